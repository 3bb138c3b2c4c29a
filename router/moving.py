"""One generation that may move: its record, its budget of moves, and how it moved so far.

Between the exchange, which loses legs, and the pure core in `router.migration`, which knows how a
stream goes on. Pure itself: it decides and remembers, it neither asks nor sends. A request without
one (migration is off, or it is no stream of chat or completions) never moves.
"""

from __future__ import annotations

from typing import Protocol

from attrs import define, field

from router.migration.agreement import Agreed, Disagreed, Inquiry, seek
from router.migration.asking import ask, gives_ids, plan_asking
from router.migration.attempt import Attempt
from router.migration.closing import close
from router.migration.continuation import (
    CannotContinue,
    CompletedLocally,
    Continuation,
    Mode,
    Outcome,
    Target,
    build,
    resume,
)
from router.migration.record import Record
from router.migration.settling import Unsettled
from router.migration.shape import Shape
from router.worker import Worker

#: A worker that dies before this many tokens of one request may have been killed by it.
EARLY_TOKENS = 16
#: So many different ones, and the request itself is suspect.
EARLY_DEATHS_MAX = 2


class StreamEnded(Protocol):
    """Who counts how streams ended, for the worker that carried them."""

    def __call__(self, *, worker: str, outcome: str) -> None: ...


@define(eq=False)
class Moving:
    """The moves of one request."""

    shape: Shape
    #: The client's own body.
    body: bytes
    tokens_max: int
    #: Moves that are left; one is spent when a move has produced content.
    moves_left: int
    record: Record = field(init=False)
    attempt: Attempt | None = None
    #: What the leg that is being tried was sent, after the first.
    continuation: Continuation | None = None
    #: Where ids and text agree, once it is known for the break at hand.
    agreed: Agreed | Disagreed | None = None
    #: How much the first worker could have generated: prompt and output together.
    context_length: int | None = None
    #: The fingerprint of the workers that the ids of the record come from.
    fingerprint: str | None = None
    #: Forms that a worker has refused, or has not gone on with.
    refused: frozenset[Mode] = frozenset()
    #: When the stream broke (its last token's moment, Trio's clock), where, and why.
    lost_at: float | None = None
    lost_worker: str = ""
    reason: str = "stream_broken"
    #: Streams that broke since the last move: their workers, and how they end if none goes on.
    undecided: list[tuple[str, str]] = field(factory=list)
    #: Workers that died within the first tokens of this request.
    early_deaths: set[Worker] = field(factory=set)
    #: Continuations that were sent since the break.
    tries: int = 0
    #: Why the stream cannot go on, in the metric's words, once that is known.
    stuck: str | None = None

    def __attrs_post_init__(self) -> None:
        self.record = Record(self.shape, self.tokens_max)

    # The first attempt

    def begin(self, worker: Worker) -> bytes:
        """The body for a first attempt on this worker; what an earlier one brought is forgotten."""
        longest = Target(worker.engine, worker.context_length).sequence_max
        self.record = Record(self.shape, self.tokens_max, longest)
        asking = plan_asking(self.shape, worker.engine)
        self.attempt = Attempt(self.record, worker.engine, asking)
        self.continuation = None
        self.fingerprint = worker.fingerprint
        self.context_length = worker.context_length
        return ask(self.body, asking, self.shape)

    # Guards

    @property
    def can_continue(self) -> bool:
        """Nothing delivered so far forbids a continuation."""
        return self.record.can_continue

    @property
    def can_migrate(self) -> bool:
        """A move may be tried; a spent budget needs no move, only an end."""
        record = self.record
        if self.unsettled is not None:
            return True
        if record.has_content and (record.poison is not None or record.is_too_long):
            return False
        rest = record.rest()
        return (self.moves_left > 0 and not self.is_suspect) or (rest is not None and rest <= 0)

    @property
    def may_be_handed_back(self) -> bool:
        """What the attempt that begins now will bring can be continued, as far as is known.

        A worker that drains keeps a request for longer if it cannot be moved, so this is false in
        doubt: for the last move, and for shapes that are tied to their worker once they flow.
        """
        record = self.record
        if self.shape.poison is not None or record.poison is not None or record.is_too_long:
            return False
        return not self.is_suspect and self.moves_left > (self.continuation is not None)

    def may_go_to(self, worker: Worker) -> bool:
        """This worker could take over from the attempt that begins now, as far as is known."""
        shape = self.shape
        if shape.text_barred is None:
            return True
        is_kin = self.fingerprint is not None and worker.fingerprint == self.fingerprint
        return is_kin and shape.asks_ids is not False and gives_ids(worker.engine, shape.endpoint)

    @property
    def can_rephrase(self) -> bool:
        """The continuation has another form, which was not tried."""
        return self.continuation is not None and self.continuation.mode is Mode.EXACT

    @property
    def is_suspect(self) -> bool:
        """Different workers died of this request: it must not take down a fleet."""
        return len(self.early_deaths) >= EARLY_DEATHS_MAX

    # A break

    def lose(self, worker: Worker, *, last_event_at: float, died: bool, reason: str) -> None:
        """The worker is lost. `died`: it accepted the request and then was gone or broken."""
        if self.lost_at is None:
            self.lost_at, self.lost_worker, self.reason = last_event_at, worker.id, reason
        base = 0 if self.attempt is None else self.attempt.base
        if died and self.record.tokens - base < EARLY_TOKENS:
            self.early_deaths.add(worker)
        self.agreed = None

    def refuse_form(self) -> None:
        """The form of the last continuation is not tried again."""
        if self.continuation is not None:
            self.refused |= {self.continuation.mode}

    def seek(self) -> Inquiry | Agreed | Disagreed:
        """Where ids and text agree, or the first question that has to be asked."""
        return seek(self.record) if self.record.has_content else Disagreed()

    def plan(self, worker: Worker) -> Outcome:
        """How this worker would go on; `agreed` must be known."""
        assert self.agreed is not None
        if self.record.has_content and not self._has_room(worker):
            return CannotContinue("unsuitable")
        same = self.fingerprint is not None and worker.fingerprint == self.fingerprint
        target = Target(worker.engine, worker.context_length, same_tokens=same)
        return build(self.record, self.body, target, self.agreed, refused=self.refused)

    def _has_room(self, worker: Worker) -> bool:
        """A shorter context than the first worker's must not end the answer early."""
        room, known = worker.context_length, self.context_length
        if room is None or (known is not None and room >= known):
            return True
        rest = self.record.rest()
        return rest is not None and self.record.sequence_length + rest <= room

    def own_end(self) -> bytes | None:
        """The end of an answer whose budget is spent: no worker is needed for it."""
        rest = self.record.rest()
        if rest is None or rest > 0 or self.agreed is None:
            return None
        target = Target("", None)
        outcome = build(self.record, self.body, target, self.agreed, refused=self.refused)
        return outcome.tail if isinstance(outcome, CompletedLocally) else None

    def go_on(self, worker: Worker, continuation: Continuation) -> None:
        """The continuation is being sent to this worker."""
        self.continuation = continuation
        self.attempt = resume(self.record, continuation)
        if continuation.mode is not Mode.EXACT:
            self.fingerprint = worker.fingerprint
        if continuation.mode is Mode.RESTART:
            self.context_length = worker.context_length
            longest = Target(worker.engine, worker.context_length).sequence_max
            self.record.sequence_max = longest
        self.agreed = None
        self.tries += 1

    def arrive(self) -> None:
        """The continuation has produced content: the move is made, and spent."""
        self.moves_left -= 1
        self.lost_at = None
        self.tries = 0
        self.refused = frozenset()

    def decide(self, ended: StreamEnded, outcome: str | None) -> None:
        """It is known how the streams that broke have ended; None: as they broke."""
        for worker, broken in self.undecided:
            ended(worker=worker, outcome=outcome or broken)
        self.undecided.clear()

    @property
    def unsettled(self) -> Unsettled | None:
        """The last event of a whole answer, of which it is not known how many tokens count."""
        return None if self.attempt is None else self.attempt.unsettled

    def tail(self) -> bytes:
        """What a stream whose finish was delivered still lacks."""
        return close(self.record, self.record.finish or "stop")

    def why_stuck(self) -> str:
        """Why a stream that broke after content did not go on."""
        record = self.record
        if self.stuck is not None:
            return self.stuck
        if record.poison is not None:
            return "poisoned"
        if record.is_too_long:
            return "too_long"
        if self.is_suspect:
            return "suspect"
        if self.moves_left <= 0:
            return "limit"
        return "no_first_token" if self.tries else "no_candidate"
