"""A request's ticket: the subject of the request chart, its budgets, and its history.

The chart says what may follow from a fact; the ticket holds the counters that its guards read and
remembers what happened, for the log, for /debug and for whoever asks at 3 a.m. It holds no prompt
text. It is pure: it neither sends nor closes anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from attrs import define, field, frozen

from router.errors import Refusal, wordless
from router.headers import Headers
from router.moving import Moving
from router.traces import Trace
from router.worker import Worker
from statemachines import REQUEST, Edge
from statemachines.request import RequestState

Listener = Callable[["Ticket", Edge], None]

#: Answers that a worker's wire may lose in a row before this request is kept away from it.
MISSES_MAX = 3


@frozen
class Answer:
    """A worker's own answer, whole, kept for the client."""

    status: int
    headers: Headers
    body: bytes

    @classmethod
    def without_body(cls, status: int, headers: Headers) -> Answer:
        """An error of which the head has come and nothing else: its status, in our words."""
        kept = [each for each in headers if each[0] == b"retry-after"]
        return cls(status, [(b"content-type", b"application/json"), *kept], wordless(status))


@frozen
class Failure:
    """Why there is no good answer: what the client is told, and in which form."""

    refusal: Refusal
    #: The worker's own words, which the client gets instead while nothing was sent.
    answer: Answer | None = None
    #: The worker's own error event, which ends the stream instead of ours after the head.
    event: bytes | None = None


@define(eq=False)
class Ticket:
    """One client request."""

    id: str
    route: str
    model: str | None
    started_at: float
    retries_left: int
    listeners: tuple[Listener, ...]
    state: RequestState = RequestState.QUEUED
    attempts: int = 0
    #: Workers that failed this request; none of them gets it again.
    tried: set[Worker] = field(factory=set)
    #: Workers whose answers were lost on their way since the last content, and how often: others
    #: come first, but they did nothing wrong.
    missed: Counter[Worker] = field(factory=Counter)
    #: The worker of the last dispatch, and its prefill worker where it went to a pair.
    worker: Worker | None = None
    prefill_worker: Worker | None = None
    #: It goes to pairs; decided when it is dispatched for the first time.
    is_paired: bool = False
    failure: Failure | None = None
    #: How it may move; None where it never does.
    moving: Moving | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    #: Status sent to the client; 0 while none was.
    status: int = 0
    #: Code of our own error that the client was told, where it was one.
    code: str | None = None
    #: Every leg, in the order in which they began.
    traces: list[Trace] = field(factory=list)
    #: Moment and edge of every transition (seconds on Trio's clock).
    history: list[tuple[float, Edge]] = field(factory=list)

    def note_miss(self, worker: Worker) -> None:
        """An answer was lost on its way; a way that loses several in a row is as good as none."""
        self.missed[worker] += 1
        if self.missed[worker] >= MISSES_MAX:
            self.tried.add(worker)

    @property
    def can_retry(self) -> bool:
        """Guard: further workers may be tried while the client has nothing."""
        return self.retries_left > 0

    @property
    def can_continue(self) -> bool:
        """Guard: nothing delivered so far forbids a continuation."""
        return self.moving is None or self.moving.can_continue

    @property
    def can_migrate(self) -> bool:
        """Guard: migration is on, and another move may be made."""
        return self.moving is not None and self.moving.can_migrate

    @property
    def can_rephrase(self) -> bool:
        """Guard: the continuation has a form that was not tried."""
        return self.moving is not None and self.moving.can_rephrase

    @property
    def is_over(self) -> bool:
        """In a final state."""
        return self.state in REQUEST.final

    @property
    def since(self) -> float:
        """When the current state was entered."""
        return self.history[-1][0] if self.history else self.started_at

    def note(self, now: float, edge: Edge) -> None:
        """Remember a transition, and spend what its row costs."""
        self.history.append((now, edge))
        if edge.guard == "can_retry":
            self.retries_left -= 1
