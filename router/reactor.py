"""The reactor: every client and worker socket, read and written in passes between Trio's tasks.

Sockets are non-blocking and registered once, edge-triggered, in a private epoll. It is drained a
bounded number of events a pass, in Trio's idle moments (`router.idling`) or, where these cannot be
had, by an ordinary task; a pass reads, calls the channels' callbacks, which are synchronous, and
writes what they said. No channel, cancel scope or task switch is paid per event; lifetimes stay
what they are in Trio, because a channel never outlives the task that owns it.

Rules that keep it safe, each with a test:

* An event belongs to a channel object, not to a descriptor number: events of a pass that reach a
  channel closed earlier in the same pass are dropped.
* Facts of one pass come in a fixed order, whatever epoll's was: prefill workers, then decode and
  mixed workers, then clients, then deadlines.
* Edge-triggered readiness is remembered: a channel that was paused, or whose read filled the
  buffer, is read again without waiting for an edge that may never come, but not before other
  tasks had their turn.
* A callback cannot raise past the reactor. What it raises goes to `Channel.crashed`, whose owner
  ends the request it was raised in, at once.
* Tasks are woken through `Waker`, which is idempotent and safe to call for a task that was
  cancelled in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import trio

from router.channel import RECV_BYTES, TO_READ, Channel, Rank
from router.idling import Idling
from router.sockets import (
    Address,
    Listening,
    Network,
    Socket,
    TlsTarget,
)
from router.waking import Sweeper, Waker

__all__ = ["RECV_BYTES", "Channel", "Listener", "Rank", "Reactor"]

#: Instead of events: the network says nothing new, but there may be more to read.
_AGAIN = 0
#: Events taken from the network in one pass, so that Trio's other tasks get their turn.
EVENTS_PER_PASS = 512
#: Sockets that are read before anything is made of what they said: 4 MiB of bytes at most.
FETCHED_AT_ONCE = 64
#: Connections accepted in one pass, for the same reason.
ACCEPTS_PER_PASS = 128
#: After a failed accept.
ACCEPT_AGAIN_SECONDS = 0.1


def _rank(found: tuple[Channel | Listener, int]) -> int:
    return found[0].rank


class Listener:
    """A listening socket; every accepted connection is handed to `accepted`."""

    __slots__ = ("_accepted", "armed_at", "in_next_pass", "is_open", "listening", "rank", "reactor")

    def __init__(
        self, reactor: Reactor, listening: Listening, accepted: Callable[[Socket], None]
    ) -> None:
        self.reactor = reactor
        self.listening = listening
        self.rank = Rank.CLIENT
        self.is_open = True
        self.in_next_pass = False
        self.armed_at: float | None = None
        self._accepted = accepted
        reactor.listen(self)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that clients reach."""
        return self.listening.address

    def ready(self, _events: int) -> None:
        """Accept; only the reactor calls this."""
        self.read()

    def fetch(self) -> None:
        """Nothing to prepare; only the reactor calls this."""

    def read(self) -> None:
        """Accept what waits, up to a bound; the rest is looked at in the next pass."""
        for _ in range(ACCEPTS_PER_PASS):
            sock = self.listening.accept()
            if sock is None:
                return
            self._accepted(sock)
        self.reactor.look_again(self)

    def crashed(self, error: Exception) -> None:
        """Out of descriptors, for one: report it, and try again when some may be free.

        The connections that wait bring no new edge, so without this they would wait for ever.
        """
        self.reactor.report(error)
        self.reactor.sweeper.arm(self, self.reactor.now + ACCEPT_AGAIN_SECONDS)

    def sweep(self, _now: float) -> None:
        """See `crashed`."""
        self.reactor.look_again(self)

    def close(self) -> None:
        """Stop listening; accepted connections stay. Idempotent."""
        if self.is_open:
            self.is_open = False
            self.reactor.unlisten(self)
            self.listening.close()


class Held(Protocol):
    """What is said during a pass and written at its end."""

    def hold(self) -> None:
        """A pass begins."""

    def release(self) -> None:
        """It is over."""


class _Nothing:
    def hold(self) -> None:
        pass

    def release(self) -> None:
        pass


class Reactor:
    """Drains the network and the deadlines; see the module's rules.

    `log` holds its lines during a pass, so that they cost one system call together.
    """

    def __init__(
        self, network: Network, on_bug: Callable[[Exception], None], log: Held | None = None
    ) -> None:
        self.network = network
        self._log = log or _Nothing()
        self.sweeper = Sweeper(on_bug)
        #: Trio's clock at the start of the current pass, in seconds.
        self.now = 0.0
        #: During a batch, the channels that have something to write at its end.
        self.unwritten: list[Channel] | None = None
        self._on_bug = on_bug
        self._channels = 0
        self._listeners = 0
        self._again: list[Channel | Listener] = []
        self._nudge = Waker()
        #: The nearest deadline that something is armed with (Trio's clock), or None.
        self.nearest: Callable[[], float | None] = self.sweeper.nearest
        #: Trio's clock. While it runs, its own method: Trio's function is three calls.
        self._time: Callable[[], float] = trio.current_time

    async def run(self) -> None:
        """Serve until cancelled: the reactor's task and the sweeper's."""
        self._time = trio.lowlevel.current_clock().current_time
        self.now = self._time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drain)
            nursery.start_soon(self._look_again)
            nursery.start_soon(self._sweep)

    def register(self, channel: Channel) -> None:
        """Watch a channel's socket for everything, edge-triggered, until `forget`."""
        self.network.register(channel.sock, channel)
        self._channels += 1

    def forget(self, channel: Channel) -> None:
        """Stop watching; later events of this pass for it are dropped."""
        self._channels -= 1
        self.network.unregister(channel.sock)

    def listen(self, listener: Listener) -> None:
        """Watch a listening socket."""
        self._listeners += 1
        self.network.register(listener.listening, listener)

    def unlisten(self, listener: Listener) -> None:
        """Stop watching a listening socket."""
        self._listeners -= 1
        self.network.unregister(listener.listening)

    def look_again(self, owner: Channel | Listener) -> None:
        """Read (or accept from) `owner` in the next pass, once, without waiting for an edge."""
        if not owner.in_next_pass:
            owner.in_next_pass = True
            self._again.append(owner)
            self._nudge.wake()

    def refresh(self) -> None:
        """Bring `now` up to date: for a task that something else than the reactor has woken."""
        self.now = self._time()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Several things that have happened are told inside, by a pass or by somebody else.

        The time is that of the beginning. What is said meanwhile, to peers and to the log, is
        written at the end, also after a bug: sends in a row cost half of what they cost between
        the callbacks.
        """
        self._begin_batch()
        try:
            yield
        finally:
            self._end_batch()

    def _begin_batch(self) -> None:
        self.now = self._time()
        self.unwritten = []
        self._log.hold()

    def _end_batch(self) -> None:
        unwritten, self.unwritten = self.unwritten, None
        for channel in unwritten or ():
            try:
                channel.write_out()
            except Exception as error:
                self._crash(channel, error)
        self._log.release()

    def connect(self, address: Address, tls: TlsTarget | None) -> Socket:
        """Begin a connection; raises OSError when it fails at once."""
        return self.network.connect(address, tls)

    def report(self, bug: Exception) -> None:
        """Hand an unexpected exception that no request owns to the log."""
        self._on_bug(bug)

    def statistics(self) -> dict[str, int]:
        """Live channels and listeners, for tests and for /debug."""
        return {"channels": self._channels, "listeners": self._listeners}

    # The three tasks; each runs whole passes, so it does not matter which of them comes first

    async def _drain(self) -> None:
        await Idling(self, self.network).run()
        while True:
            await self.network.wait()
            self.turn()

    async def _look_again(self) -> None:
        while True:
            await self._nudge.wait()
            # A nudge that came during the last pass does not park us, and somebody who sends
            # without a stop would keep every other task, deadlines included, from running.
            await trio.lowlevel.checkpoint()
            self.turn()

    async def _sweep(self) -> None:
        while True:
            await self.sweeper.wait()
            # Whatever arrived by now comes first: an answer beats a deadline of the same moment.
            self.turn()
            self.sweeper.sweep(self.now)

    def turn(self, seconds: float = 0.0) -> None:
        """One pass: what is ready now or within `seconds`, in the fixed order."""
        again = self._again
        if again:
            self._again = []
            for it in again:
                it.in_next_pass = False
            seconds = 0.0
        found: Sequence[tuple[Channel | Listener, int]]
        # The network returns what `register` was given, and we give it nothing else.
        found = self.network.poll(EVENTS_PER_PASS, seconds)  # type: ignore[assignment]
        if again or len(found) > 1:
            found = [*((it, _AGAIN) for it in again), *found]
            found.sort(key=_rank)
        elif not found:
            self.now = self._time()
            return
        else:
            # One event, as streams make them: nothing to put in order or together.
            self.now = self._time()
            owner, events = found[0]
            try:
                owner.ready(events)
            except Exception as error:
                self._crash(owner, error)
            return
        self._begin_batch()  # no context manager: a microsecond a pass
        try:
            for first in range(0, len(found), FETCHED_AT_ONCE):
                self._handle(found[first : first + FETCHED_AT_ONCE])
        finally:
            self._end_batch()

    def _handle(self, found: Sequence[tuple[Channel | Listener, int]]) -> None:
        """Read from all, then make something of it: both are faster with their like."""
        if len(found) > 1:
            for owner, events in found:
                if owner.is_open and (not events or events & TO_READ):
                    try:
                        owner.fetch()
                    except Exception as error:
                        self._crash(owner, error)
        for owner, events in found:
            if owner.is_open:
                try:
                    if events:
                        owner.ready(events)
                    else:
                        owner.read()
                except Exception as error:
                    self._crash(owner, error)

    def _crash(self, owner: Channel | Listener, error: Exception) -> None:
        try:
            owner.crashed(error)
        except Exception as second:
            owner.close()
            self._on_bug(second)
