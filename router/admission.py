"""The admission cap: how many requests are served at once, and who waits for a place.

A place is held until the last byte of the answer. The places taken are a set of live requests and
the queue is a list of waiting ones, so that neither can drift; whoever leaves while waiting leaves
no ghost behind (dynamo PR #10875).
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field


@define(eq=False)
class Admission:
    """First come, first served; a cap of 0 admits everybody."""

    cap: int
    queue_max: int
    #: Who holds a place, and who waits for one and how to wake it, in order of arrival.
    holding: set[object] = field(factory=set)
    waiting: dict[object, Callable[[], None]] = field(factory=dict)

    def enter(self, who: object, wake: Callable[[], None]) -> bool:
        """Take a place, or a place in the queue; False where both are full.

        Whoever waits is woken once `who` is in `holding`.
        """
        if not self.cap or len(self.holding) < self.cap:
            self.holding.add(who)
            return True
        if len(self.waiting) >= self.queue_max:
            return False
        self.waiting[who] = wake
        return True

    def leave(self, who: object) -> None:
        """Give a place up, wherever it was; the first in the queue gets it. Idempotent."""
        self.waiting.pop(who, None)
        self.holding.discard(who)
        while self.waiting and len(self.holding) < self.cap:
            first = next(iter(self.waiting))
            wake = self.waiting.pop(first)
            self.holding.add(first)
            wake()
