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

from router.answering import too_large
from router.clocks import ERROR_BODY_SECONDS
from router.errors import Refusal
from router.headers import Headers
from router.legs import Leg
from router.pd.verdict import (
    Handoff,
    Listener,
    Reading,
    Verdict,
    is_good,
    prefill_failed,
    reading_of,
    verdict_without_body,
)
from router.reactor import Reactor
from router.ticket import Failure
from router.waking import Waker

_log = structlog.get_logger("baton")


#: What becomes of a prefill whose decode has gone: SGLang 0.5.23 fails it with a 500 as soon as
#: decode is aborted, and waits up to 300 s for one that never came. That is no fault of the
#: worker's, or three clients that leave early would open its breaker.
_OF_A_LOST_DECODE = frozenset({"erred", "lied", "stalled"})
_CONSEQUENCE = Verdict("let_go")
#: Whose own deadline is no further away has had its time.
DUE_SECONDS = 0.5


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
        "_error",
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
        "was_silent",
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
        #: Its engine is not to be interrupted, also where one failure inside its answer is known.
        self.drains = drains
        #: It was the silence of both that has ended the attempt: if it lasts, it is no consequence.
        self.was_silent = False
        self._reading: Reading | None = None
        #: The head of an error, whose body has until then to come.
        self._error: tuple[float, int, Headers] | None = None
        #: Known and told; the rest of the answer is still to be read.
        self._held: Verdict | None = None
        #: Who is being told how it ended; a bug in there is theirs to hear of.
        self._telling: Waiting | None = None
        #: Its decode was given up, or failed.
        self._lost_decode = False
        #: What a callback has raised, for this leg's task to raise.
        self._bug: Exception | None = None
        self._waker = Waker()

    def is_due(self, now: float) -> bool:
        """Its own deadline has come, or comes in a moment."""
        return now >= self.leg.sent_at + self._seconds - DUE_SECONDS

    async def live(self) -> None:
        """Wait for the end of the leg, or end it: by its own deadline, or with the router."""
        try:
            await self._wait_end()
            if self.leg.is_open:
                self._reactor.turn()  # what has arrived by now beats the deadline
            if self.leg.is_open and self._error is not None:
                _, status, headers = self._error
                self._conclude(verdict_without_body(status, headers))
            elif self.leg.is_open:
                message = f"No prefill in {self._seconds:g} s."
                detail = f"no prefill within {self._seconds:g} s"
                self.lose("stalled", Refusal("request_timeout", message), detail)
            if self._bug is not None:
                raise self._bug
        finally:
            self.leg.let_go("aborted")

    async def _wait_end(self) -> None:
        """Wait until the leg is over, or has no more time."""
        until = trio.current_time() + self._seconds
        while self.leg.is_open:
            if self._error is not None:
                until = min(until, self._error[0])
            with trio.move_on_at(until) as scope:
                await self._waker.wait()
            if scope.cancelled_caught:
                return

    def leave(self, *, closes: bool, lost_decode: bool) -> None:
        """The attempt is over. The leg runs on by itself, unless it has nothing to protect."""
        self._waiting = None
        self._lost_decode = lost_decode
        if closes:
            self.leg.let_go("aborted")
            self._waker.wake()

    def lose(self, reason: str, refusal: Refusal, detail: str) -> None:
        """It is known from elsewhere that nothing will come of it."""
        self._conclude(self._held or Verdict("stalled", reason, Failure(refusal), detail=detail))

    # What the leg tells

    def on_leg_head(self, leg: Leg, status: int, headers: Headers) -> None:
        self._reading = reading_of(status, headers, self._family, self._handoff, self._listener)
        leg.on_body = self._feed
        if not is_good(status):
            self._error = self._reactor.now + ERROR_BODY_SECONDS, status, headers
            self._waker.wake()

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
                self._let_go(leg, "unreachable", refusal, was_received=False)
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
        leg.let_go("aborted")
        self._waker.wake()
        self._tell(Verdict("rejected", "rejected", Failure(too_large(limit))))

    def on_leg_missed(self, leg: Leg, detail: str) -> None:
        if self._held is not None:
            self._conclude(self._held)
            return
        refusal = Refusal("upstream_broken", "The prefill's answer was lost on its way.")
        self._let_go(leg, "broken", refusal)

    def on_leg_unread(self, leg: Leg) -> None:
        raise AssertionError("a prefill is never paused")

    def _let_go(
        self, leg: Leg, reason: str, refusal: Refusal, *, was_received: bool = True
    ) -> None:
        """It ends without a verdict on the worker."""
        is_known = self._lost_decode
        leg.trace.was_in_vain = not is_known
        leg.let_go("aborted")
        self._waker.wake()
        if not is_known:
            self._tell(Verdict("let_go", reason, Failure(refusal), was_received=was_received))

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
        if not self.drains:
            self._conclude(verdict)
            return
        self._held = verdict = self._blamed(verdict)
        if verdict is not _CONSEQUENCE:
            self.leg.trace.meet(verdict.detail)
            self._tell(verdict)

    def _conclude(self, verdict: Verdict) -> None:
        """The leg's own end first, then its attempt."""
        is_told = verdict is self._held
        if not is_told:
            verdict = self._blamed(verdict)
        if verdict is _CONSEQUENCE:
            self.leg.let_go("aborted")
        else:
            self.leg.trace.meet(verdict.detail)
            self.leg.fire(verdict.fact)
        self._waker.wake()
        if verdict is not _CONSEQUENCE and not is_told:
            self._tell(verdict)

    def _blamed(self, verdict: Verdict) -> Verdict:
        """The same, unless it follows from what became of decode."""
        is_own = self.was_silent and verdict.fact == "stalled"
        is_consequence = self._lost_decode and verdict.fact in _OF_A_LOST_DECODE and not is_own
        return _CONSEQUENCE if is_consequence else verdict

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
