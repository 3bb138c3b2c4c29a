"""Waking tasks: a parking place for one task, and one sleeper for all deadlines.

The reactor's callbacks never reschedule a task themselves: a task that was cancelled in the
meantime would raise. They wake a `Waker`, which may be woken any number of times. A `Sweeper`
sleeps until the nearest deadline; a deadline that only moves away costs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

import trio


class Waker:
    """A parking place for one task; `wake` may be called any number of times, at any moment."""

    __slots__ = ("_error", "_task", "_woken")

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None
        self._woken = False
        self._error: Exception | None = None

    def wake(self) -> None:
        """Let the parked task run on, or the next `wait` return at once."""
        task = self._task
        if task is None:
            self._woken = True
        else:
            self._task = None
            trio.lowlevel.reschedule(task)

    def throw(self, error: Exception) -> None:
        """Wake the task with an error, which `wait` raises; the first error is kept."""
        if self._error is None:
            self._error = error
        self.wake()

    async def wait(self) -> None:
        """Park until woken.  Cancellable; a wake that came first is not lost."""
        if self._woken:
            self._woken = False
        else:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abandon)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _abandon(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


class Timed(Protocol):
    """Something with deadlines; `armed_at` belongs to the sweeper."""

    armed_at: float | None

    def sweep(self, now: float) -> float | None:
        """Act on what is due at `now`; return when to look again (seconds), or None."""

    def crashed(self, error: Exception) -> None:
        """`sweep` raised: a bug of ours. The owner must hear of it."""


class Sweeper:
    """One task for all deadlines; it sleeps until the nearest.

    An object is armed with the earliest moment at which something of it may be due and is asked
    again then. A deadline that moves away (an idle timer, at every event) costs nothing: the
    object simply answers with a later moment.
    """

    def __init__(self, on_bug: Callable[[Exception], None]) -> None:
        self._on_bug = on_bug
        self._heap: list[tuple[float, int, Timed]] = []
        self._sequence = 0
        self._scope: trio.CancelScope | None = None

    def arm(self, timed: Timed, when: float) -> None:
        """Look at `timed` at `when` (Trio's clock, seconds) or before."""
        if timed.armed_at is not None and timed.armed_at <= when:
            return
        timed.armed_at = when
        self._sequence += 1
        heapq.heappush(self._heap, (when, self._sequence, timed))
        if self._scope is not None and when < self._scope.deadline:
            self._scope.deadline = when

    def nearest(self) -> float | None:
        """The earliest moment that anything is armed with."""
        return self._heap[0][0] if self._heap else None

    def sweep(self, now: float) -> None:
        """Look at everything that is due, once; an exception is reported and ends only that look.

        Who answers with a moment that has passed is asked again in the next pass, not in this
        one: it may wait for a task that could never run.
        """
        heap = self._heap
        due = []
        while heap and heap[0][0] <= now:
            due.append(heapq.heappop(heap))
        for when, _, timed in due:
            if timed.armed_at != when:
                continue  # it was armed anew for an earlier moment, and has been looked at then
            timed.armed_at = None
            try:
                later = timed.sweep(now)
            except Exception as error:
                try:
                    timed.crashed(error)
                except Exception as second:
                    self._on_bug(second)
                continue
            if later is not None:
                self.arm(timed, later)

    async def wait(self) -> None:
        """Sleep until the nearest deadline."""
        deadline = self._heap[0][0] if self._heap else float("inf")
        with trio.CancelScope(deadline=deadline) as self._scope:
            await trio.sleep_forever()
        self._scope = None
