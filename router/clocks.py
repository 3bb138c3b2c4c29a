"""When something of a request is due: its deadlines, and the comments that keep a client waiting.

Pure: asked with the live leg, it answers with moments on Trio's clock (seconds), and never acts.
Deadlines that are switched off are no moments. The deadline for connecting is kept by the pool.
"""

from __future__ import annotations

from typing import Protocol

from attrs import define, evolve, field, frozen

from router.config import Settings
from router.ticket import Ticket
from statemachines.leg import LegState
from statemachines.request import RequestState

#: After the head of an error, how long its body may take. Engines write both at once; what a body
#: that never ends would keep from its client is the status, which is known.
ERROR_BODY_SECONDS = 1.0
_WAITING = frozenset({LegState.CONNECTING, LegState.WAITING, LegState.ANSWERING})
_BETWEEN = frozenset({RequestState.MIGRATING, RequestState.RESUMING})


@frozen
class Deadlines:
    """Seconds; 0 is off."""

    request: float
    first_token: float
    stream_idle: float
    #: Silence after which it matters what the worker's probes say.
    suspect_idle: float
    #: Between two comments to a client whose stream is being moved.
    keep_alive: float = 0.0

    @classmethod
    def of(cls, settings: Settings) -> Deadlines:
        """As the operator has set them."""
        return cls(
            request=settings.request_timeout_secs,
            first_token=settings.first_token_timeout_secs,
            stream_idle=settings.stream_idle_timeout_secs,
            suspect_idle=settings.suspect_idle_secs,
            keep_alive=settings.migration_keep_alive_secs,
        )

    def behind_nats(self, settings: Settings) -> Deadlines:
        """What holds for workers behind NATS: these, but for what was set for those alone."""
        return evolve(
            self,
            request=settings.nats_req_max_duration or self.request,
            stream_idle=settings.nats_req_idle_timeout or self.stream_idle,
        )

    def soonest(self) -> float:
        """The shortest: nothing of an attempt is due earlier after the request's beginning."""
        given = (self.request, self.first_token, self.stream_idle, self.suspect_idle)
        return min([each for each in given if each], default=float("inf"))


class LegTimes(Protocol):
    """What the clocks read of a leg."""

    state: LegState
    paused: bool
    is_error: bool
    sent_at: float
    last_event_at: float
    suspect_again_at: float


@define(eq=False)
class Clocks:
    """The clocks of one request."""

    deadlines: Deadlines
    ticket: Ticket
    #: The client asked for a stream: only then is silence judged.
    wants_stream: bool
    #: When the client was last sent something while its stream was being moved.
    kept_alive_at: float = 0.0
    #: What holds instead while an attempt is on a worker behind NATS, and until the next one.
    nats_deadlines: Deadlines | None = None
    _own: Deadlines = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._own = self.deadlines

    def go_to(self, *, behind_nats: bool) -> None:
        """The next attempt is on a worker that is behind NATS, or is not."""
        if self.nats_deadlines is not None:
            self.deadlines = self.nats_deadlines if behind_nats else self._own

    def nearest(self, leg: LegTimes | None, queue_until: float | None) -> float | None:
        """The first moment at which anything is due."""
        nearest = self.request_due()
        leg_due = None if leg is None else self.leg_due(leg)
        for due in (queue_until, leg_due, self.keep_alive_due()):
            if due is not None and (nearest is None or due < nearest):
                nearest = due
        return nearest

    def request_due(self) -> float | None:
        """The end of the request's whole time."""
        seconds = self.deadlines.request
        return self.ticket.started_at + seconds if seconds else None

    def leg_due(self, leg: LegTimes) -> float | None:
        """When the silence of a leg is to be looked at; never while its client is slow."""
        if leg.is_error and not leg.paused:
            return leg.last_event_at + ERROR_BODY_SECONDS
        if not self.wants_stream or leg.paused:
            return None
        stall, suspect = self.stall_due(leg), self._suspect_due(leg)
        if stall is None or (suspect is not None and suspect < stall):
            return suspect
        return stall

    def stall_due(self, leg: LegTimes) -> float | None:
        """When a leg was silent for too long, whatever its worker's probes say."""
        if leg.state in _WAITING:
            seconds = self.deadlines.first_token
            return leg.sent_at + seconds if seconds else None
        if leg.state is LegState.STREAMING and self.deadlines.stream_idle:
            return leg.last_event_at + self.deadlines.stream_idle
        return None

    def keep_alive_due(self) -> float | None:
        """When a client whose stream is being moved gets its next comment."""
        seconds = self.deadlines.keep_alive
        if not seconds or self.ticket.state not in _BETWEEN:
            return None
        return self.kept_alive_at + seconds

    def _suspect_due(self, leg: LegTimes) -> float | None:
        seconds = self.deadlines.suspect_idle
        if not seconds:
            return None
        return max(leg.last_event_at + seconds, leg.suspect_again_at)


def is_due(moment: float | None, now: float) -> bool:
    """Whether a moment has come."""
    return moment is not None and moment <= now
