"""Trio's idle moments, spent in the reactor's own epoll.

Waking a Trio task for every event of a stream would cost more than the event itself. So the reactor
does its passes in the very moment in which Trio would go to sleep (`before_io_wait` of an
instrument) and sleeps there in Trio's place: its epoll holds Trio's epoll as well, so that whatever
Trio waits for ends the sleep, and so does the deadline for which Trio would have woken. As soon as
a pass has made a task runnable, Trio goes on. A stream that flows therefore costs Trio nothing.

Trio's scheduling is not touched: passes come between its batches of tasks, as its own input does,
and while tasks are runnable a pass does not sleep at all.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from time import monotonic
from typing import Protocol

import trio

_FDINFO = Path("/proc/self/fdinfo")
#: A Trio run has one idle moment. A second reactor in the same run waits in a task of its own.
_taken = trio.lowlevel.RunVar[bool]("baton_idling_taken", default=False)


class Nesting(Protocol):
    """What is asked of the network that sleeps in Trio's place."""

    #: What was given to `nest` is readable, as of the last poll.
    is_nested_ready: bool

    def nest(self, descriptor: int | None) -> bool:
        """Let polls end when this descriptor is readable; False where that cannot be done."""


class Sleeper(Protocol):
    """The reactor, as far as it matters here."""

    def turn(self, seconds: float = 0.0) -> None:
        """One pass, which waits up to `seconds` for something to do."""

    def nearest(self) -> float | None:
        """The reactor's own next deadline; a nearer one than before must be told to Trio."""


class Idling(trio.abc.Instrument):
    """Runs a reactor's passes in the idle moments of one Trio run; needs Linux with /proc."""

    def __init__(self, sleeper: Sleeper, network: Nesting) -> None:
        self._sleeper = sleeper
        self._network = network
        #: Rung to end a wait that Trio is about to begin.
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_scheduled = False
        self._error: BaseException | None = None

    async def run(self) -> None:
        """Returns at once where this run's idle moments cannot be had; else runs until cancelled.

        Raises what a pass has raised.
        """
        if _taken.get():
            return
        _taken.set(True)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._answer_bell)
                outer = _epoll_with(self._bell)
                if outer is not None and self._network.nest(outer):
                    await self._be_called()
                nursery.cancel_scope.cancel(reason="no idle moments to be had")
        finally:
            _taken.set(False)

    async def _be_called(self) -> None:
        trio.lowlevel.add_instrument(self)
        try:
            await trio.sleep_forever()
        finally:
            trio.lowlevel.remove_instrument(self)
            self._network.nest(None)

    async def _answer_bell(self, task_status: trio.TaskStatus[None]) -> None:
        try:
            # Said before the wait, but `start` returns only once this task is parked in it.
            task_status.started()
            while True:
                await trio.lowlevel.wait_readable(self._bell)
                os.eventfd_read(self._bell)
                if self._error is not None:
                    raise self._error
        finally:
            os.close(self._bell)

    # What Trio calls

    def task_scheduled(self, _task: trio.lowlevel.Task) -> None:
        """Somebody can run."""
        self._is_scheduled = True

    def before_io_wait(self, timeout: float) -> None:
        """Trio has nothing more to do, or (0 seconds) looks for input between two batches."""
        try:
            if timeout <= 0:
                self._sleeper.turn()
            else:
                self._sleep(timeout)
        except BaseException as error:
            # An instrument that raises is thrown out, silently; this ends the reactor instead.
            self._error = error
            os.eventfd_write(self._bell, 1)

    def _sleep(self, seconds: float) -> None:
        """Passes until Trio is needed. Trio then waits for as long as it had decided to, unless
        something is ready: hence the bell, wherever it is not Trio's own input that ends this.
        """
        sleeper, network = self._sleeper, self._network
        until = monotonic() + seconds
        nearest = sleeper.nearest()
        self._is_scheduled = False
        while True:
            sleeper.turn(seconds)
            if self._is_scheduled or sleeper.nearest() != nearest:
                break
            if network.is_nested_ready:
                return
            seconds = until - monotonic()
            if seconds <= 0:
                break
        os.eventfd_write(self._bell, 1)


def _epoll_with(descriptor: int) -> int | None:
    """The epoll of this process that watches `descriptor`, or None where the system does not tell.

    Trio keeps its own to itself, but this says which one it is without asking for its privates.
    """
    watched = re.compile(rf"^tfd:\s*{descriptor}\s", re.MULTILINE)
    try:
        names = os.listdir(_FDINFO)
    except OSError:
        return None
    for name in names:
        try:
            if watched.search((_FDINFO / name).read_text(encoding="utf-8")):
                return int(name)
        except OSError:
            continue  # closed meanwhile: the listing itself, for one
    return None
