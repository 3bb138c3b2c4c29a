"""The circuit breaker of one worker: it stops sending to a worker that keeps failing.

Pure: time is an argument, and the breaker chart decides what a failure leads to. Every request
sent holds a permit, and every permit comes back once, whoever holds it and however the request
ends, so that a half-open breaker never waits for a probe that nobody is making.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from attrs import define, field

from statemachines import BREAKER, Edge
from statemachines.breaker import BreakerState
from statemachines.leg import Verdict

# Names of this module: reading a member off an enum costs as much as the rest of `try_acquire`.
_CLOSED: Final = BreakerState.CLOSED
_OPEN: Final = BreakerState.OPEN


@define(eq=False)
class Permit:
    """Leave to send one request; closed once, when the request's outcome is known."""

    breaker: Breaker
    era: int  # the breaker's when this was handed out
    kind: Literal["plain", "probe", "forced"] = "plain"
    is_open: bool = True

    def close(self, verdict: Verdict, now: float) -> None:
        """Give the permit back with what the request showed; closing again does nothing."""
        if self.is_open:
            self.is_open = False
            self.breaker.settle(self, verdict, now)


_FACT: Final = {"success": "succeeded", "failure": "failed", "neutral": "said_nothing"}


@define(eq=False)
class Breaker:
    """Stops sending to a worker that keeps failing; subject of the breaker chart.

    An era ends when the state changes. A permit of an earlier one is told as a plain fact: what an
    older request ran into says nothing about the worker as it is now.
    """

    id: str
    threshold: int  # failures in a row that open it; 0 = never
    cooldown_secs: float
    max_cooldown_secs: float
    listeners: list[Callable[[Breaker, Edge], None]] = field(factory=list)
    state: BreakerState = _CLOSED
    failures: int = 0  # in a row, since the last success
    cools_at: float = 0.0  # when the next probe may go although none has come back
    era: int = 0
    probe: Permit | None = None  # the latest request that a half-open breaker has let through
    _next_cooldown: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._next_cooldown = min(self.cooldown_secs, self.max_cooldown_secs)

    def __repr__(self) -> str:
        return f"<Breaker {self.id}: {self.state.value}>"

    @property
    def trips(self) -> bool:
        """Guard: this many failures in a row are enough to open."""
        return self.failures >= self.threshold

    def try_acquire(self, now: float) -> Permit | None:
        """A permit when a request may be sent; closing it is the caller's duty."""
        if self.state is _CLOSED:
            return Permit(self, self.era)
        # A probe is judged at the end of its body, and a stream may run for half an hour: one that
        # has not failed within a cooldown does not keep the next one waiting.
        waiting = self.state is _OPEN or self.probe is not None
        if waiting and now < self.cools_at:
            return None
        if self.state is _OPEN:
            self._fire("cooled_down")
        self.probe = Permit(self, self.era, "probe")
        self.cools_at = now + self.cooldown_secs
        return self.probe

    def acquire_anyway(self, now: float) -> Permit:
        """A permit whatever the state, for when no worker of the fleet would give one."""
        return self.try_acquire(now) or Permit(self, self.era, "forced")

    def settle(self, permit: Permit, verdict: Verdict, now: float) -> None:
        """Take a permit back; called by the permit, once."""
        if permit is self.probe:
            self.probe = None
        if self.state is not _CLOSED:
            self._judge(permit, verdict, now)
        elif self.threshold and permit.era == self.era:
            # The path of nearly every request: a good end after good ones moves nothing and tells
            # nobody, and neither does a neutral one.
            if verdict == "failure":
                self._failed("failed", now)
            elif verdict == "success" and self.failures:
                self._succeeded("succeeded")

    def _judge(self, permit: Permit, verdict: Verdict, now: float) -> None:
        """What a permit says to a breaker that is not closed."""
        fact = _FACT[verdict]
        if permit.era == self.era and permit.kind == "probe":
            fact = f"probe_{fact}"
        elif permit.era == self.era and permit.kind == "forced" and verdict == "success":
            fact = "forced_succeeded"
        if fact == "probe_succeeded" or fact == "forced_succeeded":
            self._succeeded(fact)
        elif fact == "probe_failed":
            self._failed(fact, now)
        else:
            self._fire(fact)

    def _succeeded(self, fact: str) -> None:
        self.failures = 0
        self._next_cooldown = min(self.cooldown_secs, self.max_cooldown_secs)
        self._fire(fact)

    def _failed(self, fact: str, now: float) -> None:
        self.failures += 1
        if self._fire(fact).target is _OPEN:
            self.cools_at = now + self._next_cooldown
            self._next_cooldown = min(2 * self._next_cooldown, self.max_cooldown_secs)

    def _fire(self, fact: str) -> Edge:
        edge = BREAKER.fire(self, fact)
        if edge.source is not edge.target:
            self.era += 1
            self.probe = None
        return edge
