"""How long a peer may be silent, which depends on what it has shown of itself; pure.

An agent says at once that it has a request, and then every so often that it lives, so its silence
means something: it is gone, or the request never arrived (core NATS may lose a message, and says
nothing). An old worker may think for minutes without a frame, and its silence means nothing.
After the broker was away nobody is blamed for silence, and it need not last: an agent that is back
sends a heartbeat for whatever it is still at.
"""

from __future__ import annotations

from enum import Enum

from attrs import define, field

from router.wires.nats.protocol import HEARTBEAT_LOST_SECONDS

#: A broker that is away may come back, and nothing may be lost; so much longer is waited for it.
AWAY_SECONDS = 10.0
#: A silence is looked at twice: this process itself may have stood still, and frames be waiting.
SECOND_LOOK_SECONDS = 1.0
#: Since the agent is known to be back, how long it may say nothing of a request that it has.
BACK_QUIET_SECONDS = 2.0


class Verdict(Enum):
    GONE = "the agent is silent"
    MISSED = "no frame: the request, or what came of it, may be lost"


@define(eq=False, slots=True)
class Peer:
    """What is known of who answers at a worker's subject."""

    #: It says at once that it has a request: an agent, no old worker.
    has_word: bool = False
    #: When it was first heard after the broker was away; None while it was not.
    back_at: float | None = 0.0


@define(eq=False, slots=True)
class Silence:
    """One attempt's."""

    peer: Peer
    heard_at: float = 0.0
    #: It sends heartbeats.
    is_beating: bool = False
    #: When frames may have been lost; what comes after that, if it has the right number, shows
    #: that none were.
    exposed_at: float = float("-inf")
    #: Nobody could be heard before.
    back_at: float = 0.0
    #: It went to the worker itself, not into a queue where it may wait, and no frame has come.
    is_awaited: bool = False
    _looked_at: float = field(init=False, default=0.0)

    def sent(self, now: float) -> None:
        """It has gone to the worker itself."""
        self.is_awaited, self.heard_at = True, now

    def began(self) -> None:
        """The first frame has come."""
        self.is_awaited = False

    def withdrawn(self) -> None:
        """The request has not been sent after all: nothing of it was lost."""
        self.exposed_at = float("-inf")

    @property
    def was_exposed(self) -> bool:
        """Frames may have been lost since it was sent."""
        return self.exposed_at > float("-inf")

    @property
    def is_exposed(self) -> bool:
        """Frames may have been lost, and none has come since."""
        return self.exposed_at >= self.heard_at

    @property
    def cut_off_at(self) -> float:
        """When frames may last have been lost, or nobody could send any."""
        return max(self.exposed_at, self.back_at)

    def look(self, now: float, is_connected: bool) -> float | Verdict | None:
        """What to make of it, or when to look again; None when it means nothing."""
        if not (self.is_beating or self.is_exposed or self.is_awaited):
            return None
        until = max(self.heard_at, self.back_at) + HEARTBEAT_LOST_SECONDS
        if self.is_exposed and is_connected:
            until = self._soonest(until)
            if now < until:
                return min(until, now + SECOND_LOOK_SECONDS / 2)  # the agent may be back by then
        if now < until:
            return until
        if not (self.is_beating or self.is_exposed or self.peer.has_word):
            return now + HEARTBEAT_LOST_SECONDS  # the next probe may show who it is
        if not is_connected and now < until + AWAY_SECONDS:
            return until + AWAY_SECONDS  # nobody can be heard, but the broker may come back
        if self._looked_at <= max(self.heard_at, self.back_at):
            self._looked_at = now
            return now + SECOND_LOOK_SECONDS
        is_blamed = self.is_beating and is_connected and not self.is_exposed
        return Verdict.GONE if is_blamed else Verdict.MISSED

    def _soonest(self, until: float) -> float:
        """The agent is back, and would have said so of this request by then."""
        back_at = self.peer.back_at
        if back_at is None or not self.peer.has_word:
            return until
        since = max(back_at, self.back_at, self.exposed_at)
        return min(until, since + BACK_QUIET_SECONDS)
