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
#: Of a text for another process: what an engine or a library says may be long.
TEXT_CHARS_MAX = 2000


class Clogged(Exception):
    """The broker does not take a frame, so the answer has a hole from here on."""


@define(eq=False)
class LastFrames:
    """Last frames that wait for the broker to come back."""

    broker: Broker
    _waiting: deque[tuple[str, bytes, Mapping[str, str]]] = field(
        factory=lambda: deque(maxlen=LAST_FRAMES_MAX)
    )

    def __attrs_post_init__(self) -> None:
        self.broker.on_state.append(self._state_changed)

    def send(self, inbox: str, payload: bytes, headers: Mapping[str, str]) -> None:
        """Send now, or when the broker is back; never raises."""
        try:
            self.broker.publish(inbox, payload, headers=headers)
        except BrokerAway:
            self._waiting.append((inbox, payload, headers))
        except PayloadTooLarge:
            pass  # its texts are shorter than anything a server could be set to

    def _state_changed(self, is_connected: bool) -> None:
        if is_connected:
            waiting, self._waiting = self._waiting, deque(maxlen=LAST_FRAMES_MAX)
            for each in waiting:
                self.send(*each)


@define(eq=False)
class Replies:
    """The frames of one request."""

    broker: Broker
    inbox: str
    #: The kinds of frames beyond Infera's that its router understands.
    accepts: frozenset[str]
    last_frames: LastFrames
    _seq: int = 0

    @property
    def count(self) -> int:
        """Frames that the broker has taken."""
        return self._seq

    def head(self, status: int, headers: Headers) -> None:
        """Status and headers, for a router that asked to have them early; raises Clogged."""
        if HEAD in self.accepts:
            self._publish(b"", head_headers(self._seq, status, headers))

    def data(self, data: bytes) -> None:
        """A piece of the engine's answer; raises Clogged."""
        limit = max(self.broker.max_payload - HEADER_BYTES, 1)
        if len(data) <= limit:
            self._publish(data, frame_headers(DATA, self._seq))
            return
        for start in range(0, len(data), limit):
            self._publish(data[start : start + limit], frame_headers(DATA, self._seq))

    def heartbeat(self) -> None:
        """Still here; one that cannot go out is no loss."""
        try:
            self._publish(b"", frame_headers(HEARTBEAT, self._seq))
        except Clogged:
            pass

    def done(self, status: int) -> None:
        """The last frame of a whole answer; raises Clogged."""
        self._publish(b"", frame_headers(DONE, self._seq, status))

    def error(self, text: str, status: int) -> None:
        """The last frame of a request that failed; waits for the broker if it must."""
        payload = text[:TEXT_CHARS_MAX].encode(errors="replace")
        self.last_frames.send(self.inbox, payload, frame_headers(ERROR, self._seq, status))

    def notice(self) -> None:
        """The last frame of a request that is handed back; waits for the broker if it must."""
        self.last_frames.send(self.inbox, DRAIN_NOTICE, frame_headers(ERROR, self._seq))

    def _publish(self, payload: bytes, headers: Mapping[str, str]) -> None:
        try:
            self.broker.publish(self.inbox, payload, headers=headers)
        except (BrokerAway, PayloadTooLarge) as error:
            raise Clogged(str(error)) from error
        self._seq += 1
