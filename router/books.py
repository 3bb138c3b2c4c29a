"""What is written down of requests, moves and legs: counts, and lines of the log.

Nothing is decided here, and nothing is held: whoever writes has ended what it writes of, or told
the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from attrs import define

from router.legs import Leg
from router.logs import Logs
from router.metrics import Metrics
from router.moving import Moving
from router.reactor import Reactor
from router.ticket import Ticket
from router.worker import Worker
from statemachines.request import RequestState

if TYPE_CHECKING:
    from router.exchange import Exchange

_log = structlog.get_logger("baton")


@define(eq=False)
class Books:
    """The books of one router."""

    metrics: Metrics
    logs: Logs
    reactor: Reactor

    def now(self) -> float:
        """The current pass's time (Trio's clock, seconds)."""
        return self.reactor.now

    # Requests

    def request_ended(self, ticket: Ticket, moving: Moving | None) -> None:
        """One request, in its final state; `moving` is what it could have gone on with."""
        if moving is not None:
            self._note_break(ticket, moving)
            outcome = "ok" if ticket.state is RequestState.FINISHED else None
            moving.decide(self.metrics.stream_ended, outcome)
        assert ticket.ended_at is not None
        seconds = ticket.ended_at - ticket.started_at
        first = ticket.first_token_at
        first_seconds = None if first is None else first - ticket.started_at
        self.metrics.request_ended(
            route=ticket.route,
            outcome=ticket.state,
            seconds=seconds,
            first_token_seconds=first_seconds,
        )
        self.logs.request_line(
            id=ticket.id,
            route=ticket.route,
            worker=None if ticket.worker is None else ticket.worker.id,
            attempts=ticket.attempts,
            state=ticket.state,
            status=ticket.status,
            code=ticket.code,
            prompt_tokens=ticket.prompt_tokens,
            completion_tokens=ticket.completion_tokens,
            first_token_seconds=first_seconds,
            seconds=seconds,
        )

    def _note_break(self, ticket: Ticket, moving: Moving) -> None:
        """A stream that broke after content and could not go on, with the reason why."""
        is_broken = moving.lost_at is not None and moving.record.has_content
        if ticket.state is RequestState.FAILED and is_broken:
            fact = ticket.history[-1][1].fact
            if fact != "shut_down":
                reason = "deadline" if fact == "deadline_passed" else moving.why_stuck()
                self.metrics.migration_failed(reason)
                _log.warning("not_moved", id=ticket.id, source=moving.lost_worker, reason=reason)

    def completed_locally(self, reason: str) -> None:
        """The end of a stream was written here."""
        self.metrics.completed_locally(reason)

    # Moves

    def arrived(self, exchange: Exchange) -> None:
        """A move has produced content: it is counted, and one of the limit is spent."""
        ticket, moving = exchange.ticket, exchange.ticket.moving
        assert moving is not None
        assert moving.continuation is not None
        assert ticket.worker is not None
        now, continuation = self.reactor.now, moving.continuation
        gap = now - (now if moving.lost_at is None else moving.lost_at)
        self.metrics.migrated(
            reason=moving.reason,
            mode=continuation.mode.value,
            gap_seconds=gap,
            carried_tokens=moving.record.sequence_length,
        )
        _log.info(
            "moved",
            id=ticket.id,
            source=moving.lost_worker,
            target=ticket.worker.id,
            tokens=continuation.carried,
            mode=continuation.mode.value,
            reason=moving.reason,
            gap_seconds=round(gap, 6),
        )
        moving.decide(self.metrics.stream_ended, "migrated")
        moving.arrive()

    def poisoned(self, exchange: Exchange) -> None:
        """A stream can no longer be continued elsewhere; called once."""
        moving = exchange.ticket.moving
        if moving is not None and moving.record.poison is not None:
            self.metrics.poisoned(moving.record.poison)

    # Legs

    def overridden(self, ticket: Ticket, worker: Worker) -> None:
        """All breakers are open, and this worker gets the request anyway."""
        self.metrics.breaker_overridden(worker.id)
        _log.warning("breaker_overridden", id=ticket.id, worker=worker.id)

    def leg_settled(self, leg: Leg, outcome: str) -> None:
        """One leg, with one of the contract's worker outcomes; called once by the leg itself."""
        self.metrics.leg_ended(worker=leg.worker.id, role=leg.role, outcome=outcome)
        trace = leg.trace
        if trace.is_lost:
            _log.info(
                "lost",
                id=leg.id,
                worker=trace.worker,
                role=trace.role,
                fact=trace.fact,
                status=trace.status,
                detail=trace.detail or None,
                seconds=round(self.reactor.now - trace.began_at, 6),
            )
        if leg.is_stream and leg.stream_outcome is not None:
            self.metrics.stream_ended(worker=leg.worker.id, outcome=leg.stream_outcome)
