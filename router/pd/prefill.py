"""A prefill leg: it lives in the router's nursery, because nobody else may end it.

A bootstrap prefill is never aborted: its engine would be interrupted in the middle of handing its
KV cache over. So it outlives the client, decode and every deadline but its own; its answer is read
to the end and forgotten; it books its own outcome. What it was good for is told to its attempt, as
long as there is one. A serial prefill has nothing to protect before its hand-off, so there the
attempt closes it.
"""

from __future__ import annotations

from typing import Protocol

import structlog
import trio

from router.errors import Refusal
from router.headers import Headers
from router.legs import Leg
from router.pd.verdict import (
    Handoff,
    Listener,
    Reading,
    Verdict,
    prefill_failed,
    reading_of,
)
from router.reactor import Reactor
from router.ticket import Failure
from router.waking import Waker

_log = structlog.get_logger("baton")


#: What an engine says of a prefill whose decode has gone: SGLang 0.5.23 fails it with a 500 as soon
#: as decode is aborted. That is no fault of the worker's, or three clients that leave early would
#: open its breaker.
_OF_A_LOST_DECODE = frozenset({"erred", "lied"})


class Waiting(Protocol):
    """The attempt that a prefill belongs to."""

    def on_prefill(self, verdict: Verdict) -> None:
        """The prefill has ended, or is known to have failed; called once."""

    def on_crash(self, error: Exception) -> None:
        """`on_prefill` raised: a bug of ours."""


class Counter(Protocol):
    """Who counts failures."""

    def prefill_failed(self, reason: str) -> None:
        """Why, in the words of `router.series.PREFILL_FAILURES`."""


class Prefill:
    """Owns one prefill leg and reads its answer."""

    __slots__ = (
        "_bug",
        "_counter",
        "_family",
        "_handoff",
        "_held",
        "_listener",
        "_lost_decode",
        "_reactor",
        "_reading",
        "_seconds",
        "_telling",
        "_waiting",
        "_waker",
        "drains",
        "leg",
    )

    leg: Leg

    def __init__(
        self,
        *,
        waiting: Waiting,
        counter: Counter,
        reactor: Reactor,
        family: str,
        seconds: float,
        handoff: Handoff,
        listener: Listener | None,
        drains: bool,
    ) -> None:
        self._waiting: Waiting | None = waiting
        self._counter = counter
        self._reactor = reactor
        self._family = family
        self._seconds = seconds
        self._handoff = handoff
        self._listener = listener
        #: Several items in one answer: the failure of one must not cut off the others.
        self.drains = drains
        self._reading: Reading | None = None
        self._held: Verdict | None = None
        #: Who is being told how it ended; a bug in there is theirs to hear of.
        self._telling: Waiting | None = None
        #: Its decode was given up, or failed.
        self._lost_decode = False
        #: What a callback has raised, for this leg's task to raise.
        self._bug: Exception | None = None
        self._waker = Waker()

    async def live(self) -> None:
        """Wait for the end of the leg, or end it: by its own deadline, or with the router."""
        try:
            with trio.move_on_after(self._seconds):
                while self.leg.is_open:
                    await self._waker.wait()
            if self.leg.is_open:
                self._reactor.turn()  # what has arrived by now beats the deadline
            if self.leg.is_open:
                message = f"No prefill in {self._seconds:g} s."
                self.lose("stalled", Refusal("request_timeout", message))
            if self._bug is not None:
                raise self._bug
        finally:
            self.leg.let_go("aborted")

    def leave(self, *, closes: bool, lost_decode: bool) -> None:
        """The attempt is over. The leg runs on by itself, unless it has nothing to protect."""
        self._waiting = None
        self._lost_decode = lost_decode
        if closes:
            self.leg.let_go("aborted")
            self._waker.wake()

    def lose(self, reason: str, refusal: Refusal) -> None:
        """It is known from elsewhere that nothing will come of it."""
        self._conclude(Verdict("stalled", reason, Failure(refusal)))

    # What the leg tells

    def on_leg_head(self, leg: Leg, status: int, headers: Headers) -> None:
        self._reading = reading_of(status, headers, self._family, self._handoff, self._listener)
        leg.on_body = self._feed

    def on_leg_end(self, leg: Leg) -> None:
        assert self._reading is not None
        self._conclude(self._held or self._reading.end())

    def on_leg_broken(self, leg: Leg, detail: str, *, connecting: bool) -> None:
        leg.worker.probe_soon()
        if self._held is not None:
            self._conclude(self._held)
        elif connecting:
            refusal = Refusal("upstream_unreachable", "The prefill worker cannot be reached.")
            if leg.is_absent:
                self._let_go(leg, "unreachable", refusal)
                return
            self._conclude(Verdict("broke", "unreachable", Failure(refusal)))
        else:
            message = "The prefill's answer broke off before its end."
            self._conclude(Verdict("broke", "broken", Failure(Refusal("upstream_broken", message))))

    def on_leg_handed_back(self, leg: Leg) -> None:
        refusal = Refusal("shutting_down", "The prefill worker is shutting down.")
        self._conclude(self._held or Verdict("handed_back", "gave_up", Failure(refusal)))

    def on_leg_full(self, leg: Leg) -> None:
        message = "Too many requests wait at the prefill worker."
        refusal = Refusal("queue_full", message, retry_after=1)
        self._conclude(Verdict("backpressure", "backpressure", Failure(refusal)))

    def on_leg_too_large(self, leg: Leg, limit: int) -> None:
        message = f"The message broker carries at most {limit} bytes, and the request is larger."
        refusal = Refusal("body_too_large", message)
        leg.let_go("aborted")
        self._waker.wake()
        self._tell(Verdict("rejected", "rejected", Failure(refusal)))

    def on_leg_missed(self, leg: Leg, detail: str) -> None:
        if self._held is not None:
            self._conclude(self._held)
            return
        refusal = Refusal("upstream_broken", "The prefill's answer was lost on its way.")
        self._let_go(leg, "broken", refusal)

    def _let_go(self, leg: Leg, reason: str, refusal: Refusal) -> None:
        """It ends without a verdict on the worker."""
        is_known = self._lost_decode
        leg.let_go("aborted")
        self._waker.wake()
        if not is_known:
            self._tell(Verdict("let_go", reason, Failure(refusal)))

    def on_crash(self, error: Exception) -> None:
        self._bug = error
        self._waker.wake()
        waiting, self._waiting = self._waiting, None
        if self._telling is not None:
            self._telling.on_crash(error)
        elif waiting is not None:
            try:
                self._note_failure("bug")
                waiting.on_prefill(Verdict("bug", "bug", prefill_failed()))
            except Exception as another:
                waiting.on_crash(another)

    def _feed(self, data: bytes) -> None:
        if self._held is not None:
            return
        assert self._reading is not None
        verdict = self._reading.feed(data)
        if verdict is None:
            return
        if self.drains:
            self._held = verdict
            self._tell(verdict)
        else:
            self._conclude(verdict)

    def _conclude(self, verdict: Verdict) -> None:
        """The leg's own end first, then its attempt."""
        is_followed = self._lost_decode and verdict is not self._held
        if is_followed and verdict.fact in _OF_A_LOST_DECODE:
            self.leg.let_go("aborted")
            self._waker.wake()
            return
        self.leg.fire(verdict.fact)
        self._waker.wake()
        if verdict is not self._held:
            self._tell(verdict)

    def _tell(self, verdict: Verdict) -> None:
        if verdict.fact != "completed":
            self._note_failure(verdict.reason)
        if self._waiting is not None:
            telling = self._telling = self._waiting
            telling.on_prefill(verdict)
            self._telling = self._waiting = None

    def _note_failure(self, reason: str) -> None:
        self._counter.prefill_failed(reason)
        _log.warning("prefill_failed", id=self.leg.id, worker=self.leg.worker.id, reason=reason)
