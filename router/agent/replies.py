"""The frames that go out for one request: numbered, split to what the broker takes, and one last.

Nothing is kept back: what the broker does not take raises, and then the request has a hole and
must end. Only a last frame may wait, for the broker to come back, since without it a router would
learn of the end by a timeout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from attrs import define, field

from router.headers import Headers
from router.reactor import Reactor
from router.wires.nats.broker import Broker, BrokerAway, PayloadTooLarge
from router.wires.nats.protocol import (
    DATA,
    DONE,
    DRAIN_NOTICE,
    ERROR,
    HEAD,
    HEARTBEAT,
    frame_headers,
    head_headers,
)

#: Of a message's bytes, kept for its headers and what the client library puts around them.
HEADER_BYTES = 512
#: Last frames kept for a broker that is away. Beyond that the oldest requests' routers time out.
LAST_FRAMES_MAX = 10_000
#: Between two attempts to send them.
LAST_AGAIN_SECONDS = 0.5
#: Of a text for another process: what an engine or a library says may be long.
TEXT_CHARS_MAX = 2000


class Clogged(Exception):
    """The broker does not take a frame, so the answer has a hole from here on."""


@define(eq=False)
class LastFrames:
    """Last frames that wait until the broker takes them; looked at by the reactor's sweeper."""

    broker: Broker
    reactor: Reactor
    armed_at: float | None = None
    _waiting: deque[tuple[str, bytes, Mapping[str, str]]] = field(
        factory=lambda: deque(maxlen=LAST_FRAMES_MAX)
    )

    def send(self, inbox: str, payload: bytes, headers: Mapping[str, str]) -> None:
        """Send now, or when the broker takes it; never raises."""
        if not self._publish(inbox, payload, headers):
            self._waiting.append((inbox, payload, headers))
            self.reactor.sweeper.arm(self, self.reactor.now + LAST_AGAIN_SECONDS)

    def try_again(self) -> None:
        """Send what waits, as far as the broker takes it."""
        while self._waiting and self._publish(*self._waiting[0]):
            self._waiting.popleft()

    def sweep(self, now: float) -> float | None:
        """Connected again or not, there may be room now; see `Timed`."""
        self.try_again()
        return now + LAST_AGAIN_SECONDS if self._waiting else None

    def crashed(self, error: Exception) -> None:
        """See `Timed`."""
        self.reactor.report(error)

    def _publish(self, inbox: str, payload: bytes, headers: Mapping[str, str]) -> bool:
        try:
            self.broker.publish(inbox, payload, headers=headers)
        except BrokerAway:
            return False
        except PayloadTooLarge:
            pass  # no server takes less than these texts have
        return True


@define(eq=False)
class Replies:
    """The frames of one request."""

    broker: Broker
    inbox: str
    #: The kinds of frames beyond Infera's that its router understands.
    accepts: frozenset[str]
    last_frames: LastFrames
    #: The agent's instance, in every frame: a router hears one of two agents with one id.
    sender: str = ""
    _seq: int = 0

    @property
    def count(self) -> int:
        """Frames that the broker has taken."""
        return self._seq

    def head(self, status: int, headers: Headers) -> None:
        """Status and headers, for a router that asked to have them early; raises Clogged."""
        if HEAD in self.accepts:
            self._publish(b"", head_headers(self._seq, status, headers, sender=self.sender))

    def data(self, data: bytes) -> None:
        """A piece of the engine's answer; raises Clogged."""
        limit = max(self.broker.max_payload - HEADER_BYTES, 1)
        if len(data) <= limit:
            self._publish(data, self._headers(DATA, self._seq))
            return
        for start in range(0, len(data), limit):
            self._publish(data[start : start + limit], self._headers(DATA, self._seq))

    def heartbeat(self) -> None:
        """Still here; one that cannot go out is no loss."""
        try:
            self._publish(b"", self._headers(HEARTBEAT, self._seq))
        except Clogged:
            pass

    def done(self, status: int) -> None:
        """The last frame of a whole answer; raises Clogged."""
        self._publish(b"", self._headers(DONE, self._seq, status))

    def error(self, text: str, status: int) -> None:
        """The last frame of a request that failed; waits for the broker if it must."""
        payload = text[:TEXT_CHARS_MAX].encode(errors="replace")
        self.last_frames.send(self.inbox, payload, self._headers(ERROR, self._seq, status))

    def notice(self) -> None:
        """The last frame of a request that is handed back; waits for the broker if it must."""
        self.last_frames.send(self.inbox, DRAIN_NOTICE, self._headers(ERROR, self._seq))

    def _headers(self, kind: str, seq: int, status: int | None = None) -> dict[str, str]:
        return frame_headers(kind, seq, status, sender=self.sender)

    def _publish(self, payload: bytes, headers: Mapping[str, str]) -> None:
        try:
            self.broker.publish(self.inbox, payload, headers=headers)
        except (BrokerAway, PayloadTooLarge) as error:
            raise Clogged(str(error)) from error
        self._seq += 1
