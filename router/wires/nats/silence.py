"""How long a peer may be silent, which depends on what it has shown of itself; pure.

An agent says at once that it has a request, and then every so often that it lives, so its silence
means something: it is gone, or the request never arrived (core NATS may lose a message, and says
nothing). An old worker may think for minutes without a frame, and its silence means nothing.
"""

from __future__ import annotations

from enum import Enum

from attrs import define, field

from router.wires.nats.protocol import HEARTBEAT_LOST_SECONDS

#: A broker that is away may come back, and nothing may be lost; so much longer is waited for it.
AWAY_SECONDS = 10.0
#: A silence is looked at twice: this process itself may have stood still, and frames be waiting.
SECOND_LOOK_SECONDS = 1.0


class Verdict(Enum):
    GONE = "the agent is silent"
    MISSED = "no frame: the request, or what came of it, may be lost"


@define(eq=False, slots=True)
class Peer:
    """What is known of who answers at a worker's subject."""

    #: It says at once that it has a request: an agent, no old worker.
    has_word: bool = False


@define(eq=False, slots=True)
class Silence:
    """One attempt's."""

    peer: Peer
    heard_at: float = 0.0
    #: It sends heartbeats.
    is_beating: bool = False
    #: Frames may have been lost before the first one came.
    is_exposed: bool = False
    #: It went to the worker itself, not into a queue where it may wait, and no frame has come.
    is_awaited: bool = False
    _looked_at: float = field(init=False, default=0.0)

    def began(self) -> None:
        """The first frame has come."""
        self.is_awaited = False

    def look(self, now: float, is_connected: bool) -> float | Verdict | None:
        """What to make of it, or when to look again; None when it means nothing."""
        if not (self.is_beating or self.is_exposed or self.is_awaited):
            return None
        until = self.heard_at + HEARTBEAT_LOST_SECONDS
        if now < until:
            return until
        if not (self.is_beating or self.is_exposed or self.peer.has_word):
            return now + HEARTBEAT_LOST_SECONDS  # the next probe may show who it is
        if not is_connected and now < until + AWAY_SECONDS:
            return until + AWAY_SECONDS  # nobody can be heard, but the broker may come back
        if self._looked_at <= self.heard_at:
            self._looked_at = now
            return now + SECOND_LOOK_SECONDS
        return Verdict.GONE if self.is_beating and is_connected else Verdict.MISSED
