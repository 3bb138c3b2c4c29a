"""One leg: one dispatch of a request to one worker, from the permit to the verdict.

A leg is the subject of the leg chart and hears of its answer from a wire. It takes what it owns
(the breaker's permit, its place among the worker's live legs, the connection) when it is made and
gives each back once, when its machine enters a final state, whoever drove it there. What the
answer means for the request is the exchange's business; the leg tells it in the chart's words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router.breaker import Permit
from router.headers import Headers
from router.traces import Trace
from router.wires.line import Sent
from router.worker import Worker
from statemachines import LEG, Edge
from statemachines.leg import OUTCOMES, VERDICTS, LegState


class LegOwner(Protocol):
    """The exchange that a leg belongs to; told only while the leg is open."""

    def on_leg_head(self, leg: Leg, status: int, headers: Headers) -> None:
        """Status and headers of the answer."""

    def on_leg_end(self, leg: Leg) -> None:
        """The body ended as its framing promised."""

    def on_leg_broken(self, leg: Leg, detail: str, *, connecting: bool) -> None:
        """The connection is gone."""

    def on_leg_handed_back(self, leg: Leg) -> None:
        """The draining worker returned the request unfinished."""

    def on_leg_full(self, leg: Leg) -> None:
        """The worker's queue holds all that it may, which is as good as its own 429."""

    def on_leg_too_large(self, leg: Leg, limit: int) -> None:
        """What was to be sent is more than the wire to this worker takes (bytes)."""

    def on_leg_unread(self, leg: Leg) -> None:
        """More of the answer waits for a slow client than the wire keeps: no fault of a worker."""

    def on_leg_missed(self, leg: Leg, detail: str) -> None:
        """The wire has failed, and nobody knows what the worker does."""

    def on_crash(self, error: Exception) -> None:
        """A callback raised: a bug of ours."""


class LegObserver(Protocol):
    """Who books how legs end."""

    def now(self) -> float:
        """The current pass's time (Trio's clock, seconds)."""

    def leg_settled(self, leg: Leg, outcome: str) -> None:
        """The leg is over, with one of the contract's worker outcomes; called once."""


LegListener = Callable[["Leg", Edge], None]


class Leg:
    """One dispatch to one worker."""

    __slots__ = (
        "_observer",
        "_permit",
        "has_rest",
        "id",
        "is_error",
        "is_stream",
        "last_event_at",
        "listeners",
        "on_body",
        "owner",
        "paused",
        "role",
        "sent_at",
        "state",
        "stream_outcome",
        "suspect_again_at",
        "trace",
        "upstream",
        "worker",
    )

    def __init__(
        self,
        *,
        id: str,
        worker: Worker,
        role: str,
        permit: Permit,
        owner: LegOwner,
        observer: LegObserver,
        listeners: tuple[LegListener, ...],
        now: float,
    ) -> None:
        self.id = id
        self.worker = worker
        self.role = role
        self.owner = owner
        self.listeners = listeners
        self.state = LegState.CONNECTING
        self.upstream: Sent | None = None
        self.sent_at = now
        #: When the last event with data came, or reading was resumed (Trio's clock, seconds).
        self.last_event_at = now
        #: When a silent worker is looked at again.
        self.suspect_again_at = now
        self.paused = False
        #: Its head is there and says no 2xx: `last_event_at` is when it came.
        self.is_error = False
        #: A 2xx stream; only those have a stream outcome.
        self.is_stream = False
        #: None where it is told later: a stream that broke may go on elsewhere.
        self.stream_outcome: str | None = "upstream_error"
        #: The worker is still at an answer that needs no more of it.
        self.has_rest = False
        #: What is kept of this leg when it is gone.
        self.trace = Trace(worker.id, role, now)
        #: What hears the body; the owner says so when the head is there.
        self.on_body: Callable[[bytes], None] = _ignore
        self._permit = permit
        self._observer = observer
        worker.legs.add(self)

    @property
    def is_open(self) -> bool:
        """Not in a final state."""
        return self.state not in LEG.final

    @property
    def is_absent(self) -> bool:
        """Broken like this, nobody was there: the broker knows of no agent, and said so at once.

        Who left needs no breaker to be kept away from, and asking the next one costs nothing.
        """
        return self.worker.is_behind_nats and self.state is LegState.CONNECTING

    def attach(self, upstream: Sent) -> None:
        """Take the connection over; it may have failed already."""
        if self.is_open:
            self.upstream = upstream
            if self.paused:
                upstream.pause()
        else:
            upstream.close()

    def fire(self, fact: str) -> None:
        """Report a fact of this leg; a final state settles everything it holds."""
        try:
            leaves = LEG.fire(self, fact).leaves
            self.trace.fact, self.trace.state = fact, self.state
            if leaves:
                self._settle()
        except Exception:
            if not self.is_open:
                if self.trace.state is not self.state:  # who listens has failed, and not the chart
                    self.trace.fact, self.trace.state = fact, self.state
                self._settle()  # what a bug of ours has kept it from giving back
            raise

    def let_go(self, stream_outcome: str) -> None:
        """What the leg lived in has ended: close the connection, which frees the engine."""
        if self.is_open:
            self.stream_outcome = stream_outcome
            self.fire("let_go")

    def drop(self, stream_outcome: str) -> None:
        """The same after a bug that may have come in between; gives back what it still holds."""
        try:
            self.let_go(stream_outcome)
        finally:
            self._settle()

    def is_excused(self) -> bool:
        """Its time is over. Whether the wire is to blame for that, and has ended it."""
        since = self.last_event_at if self.state is LegState.STREAMING else self.sent_at
        return self.upstream is not None and self.upstream.excuse(since)

    def is_recalled(self) -> bool:
        """Nobody reaches its worker. Whether it had not taken the request, which is taken back."""
        return self.upstream is not None and self.upstream.recall()

    def pause(self) -> None:
        """Read no more for now: the client is slow. The worker's idle clock stops."""
        self.paused = True
        if self.upstream is not None:
            self.upstream.pause()

    def resume(self, now: float) -> None:
        """Read on; the idle clock starts anew."""
        self.paused = False
        self.last_event_at = now
        if self.upstream is not None:
            self.upstream.resume()

    def _settle(self) -> None:
        """Give each thing back, once: called anew after a bug, it does the rest."""
        now = self._observer.now()
        self.on_body = _ignore  # what heard the body knows this leg: no circle is left behind
        self._permit.close(VERDICTS[self.state], now)
        if self.upstream is not None:
            if self.state is LegState.SUCCEEDED and not self.has_rest:
                self.upstream.leave()
            else:
                self.upstream.close()
            self.upstream = None
        if self in self.worker.legs:
            self.trace.ended_at = now
            self.worker.legs.discard(self)
            self._observer.leg_settled(self, OUTCOMES[self.state])

    # What the wire tells

    def on_connected(self) -> None:
        if self.state is LegState.CONNECTING:  # a stale connection is replaced after the fact
            self.fire("connected")

    def on_head(self, status: int, headers: Headers) -> None:
        self.trace.status = status
        self.fire("head_arrived")
        self.owner.on_leg_head(self, status, headers)

    def on_end(self) -> None:
        if self.is_open:
            self.owner.on_leg_end(self)

    def on_broken(self, detail: str, *, connecting: bool) -> None:
        if self.is_open:
            self.trace.meet(detail)
            self.owner.on_leg_broken(self, detail, connecting=connecting)

    def on_handed_back(self) -> None:
        if self.is_open:
            self.owner.on_leg_handed_back(self)

    def on_full(self) -> None:
        if self.is_open:
            self.trace.meet("its queue is full")
            self.fire("head_arrived")
            self.owner.on_leg_full(self)

    def on_too_large(self, limit: int) -> None:
        if self.is_open:
            self.trace.meet(f"larger than the {limit} bytes that the broker carries")
            self.owner.on_leg_too_large(self, limit)

    def on_unread(self) -> None:
        if self.is_open:
            self.trace.meet("more waited for the client than is kept")
            self.owner.on_leg_unread(self)

    def on_missed(self, detail: str) -> None:
        if self.is_open:
            self.trace.meet(f"lost on its way: {detail}")
            self.owner.on_leg_missed(self, detail)

    def on_crash(self, error: Exception) -> None:
        try:
            if self.is_open:
                self.trace.meet("a bug of Baton's: the log has its traceback")
                self.fire("bug")
        finally:
            self.owner.on_crash(error)


def _ignore(_data: bytes) -> None:
    """A body before its head: no wire tells of one."""
