"""The frames that go out for one request: numbered, split to what the broker takes, and one last.

Nothing is kept back: what the broker does not take raises, and then the request has a hole and
must end; its number is used up, so that whoever reads numbers sees the hole and takes nothing that
follows for the engine's failure. Only a last frame may wait, for the broker to come back, since
without it a router would learn of the end by a timeout. One that went out shortly before, or before
the router was back as well, may be lost, so it is sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from attrs import define, field, frozen

from router.agent.audience import Audience
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
    STILL,
    TYPE,
    frame_headers,
    head_headers,
)

#: Of a message's bytes, kept for its headers and what the client library puts around them.
HEADER_BYTES = 512
#: Last frames kept for a broker that is away. Beyond that the oldest requests' routers time out.
LAST_FRAMES_MAX = 10_000
#: Between two attempts to send them.
LAST_AGAIN_SECONDS = 0.5
#: Last frames so young when the connection is lost may be lost with it: a connection that hangs is
#: found out after 6 s.
RECENT_SECONDS = 10.0
RECENT_MAX = 2000
#: After the connection is back its router may not be, for a moment (it tries once a second).
BACK_SECONDS = 3.0
BACK_AGAIN_SECONDS = 1.0
#: Of a text for another process: what an engine or a library says may be long.
TEXT_CHARS_MAX = 2000


class Clogged(Exception):
    """The broker does not take a frame, so the answer has a hole from here on."""


@frozen(eq=False)
class LastFrame:
    """The last frame of one request."""

    inbox: str
    payload: bytes
    headers: Mapping[str, str]
    #: Its router knows it by its number when it comes twice.
    may_repeat: bool


@define(eq=False)
class LastFrames:
    """Last frames that wait until the broker takes them; looked at by the reactor's sweeper."""

    broker: Broker
    reactor: Reactor
    armed_at: float | None = None
    _waiting: deque[LastFrame] = field(factory=lambda: deque(maxlen=LAST_FRAMES_MAX))
    #: What went out, and when, of what may be repeated.
    _recent: deque[tuple[float, LastFrame]] = field(factory=lambda: deque(maxlen=RECENT_MAX))
    #: Until when what is recent is repeated, and when next.
    _repeats_until: float = 0.0
    _repeats_at: float = 0.0

    def send(self, frame: LastFrame) -> None:
        """Send now, or when the broker takes it; never raises."""
        if not self._publish(frame):
            self._waiting.append(frame)
            self.reactor.sweeper.arm(self, self.reactor.now + LAST_AGAIN_SECONDS)

    def connection_lost(self) -> None:
        """What went out a moment ago may be lost; what is older has arrived."""
        since = self.reactor.now - RECENT_SECONDS
        while self._recent and self._recent[0][0] < since:
            self._recent.popleft()

    def connection_found(self) -> None:
        """Send what waits and what may be lost, now and while its router may not be back."""
        self._repeats_until = self.reactor.now + BACK_SECONDS
        self._repeat()
        self._try_again()
        self.reactor.sweeper.arm(self, self._repeats_at)

    def sweep(self, now: float) -> float | None:
        """Connected again or not, there may be room now; see `Timed`."""
        repeats = now < self._repeats_until
        if repeats and now >= self._repeats_at:
            self._repeat()
        self._try_again()
        moments = [self._repeats_at] * repeats + [now + LAST_AGAIN_SECONDS] * bool(self._waiting)
        return min(moments, default=None)

    def _repeat(self) -> None:
        self._repeats_at = self.reactor.now + BACK_AGAIN_SECONDS
        recent, self._recent = list(self._recent), deque(maxlen=RECENT_MAX)
        for moment, frame in recent:
            self._try(frame)
            self._recent.append((moment, frame))

    def _try_again(self) -> None:
        while self._waiting and self._publish(self._waiting[0]):
            self._waiting.popleft()

    def crashed(self, error: Exception) -> None:
        """See `Timed`."""
        self.reactor.report(error)

    def _publish(self, frame: LastFrame) -> bool:
        is_sent = self._try(frame)
        if is_sent and frame.may_repeat:
            self._recent.append((self.reactor.now, frame))
        return is_sent

    def _try(self, frame: LastFrame) -> bool:
        try:
            self.broker.publish(frame.inbox, frame.payload, headers=frame.headers)
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
    #: Whether anybody listens; None where nobody is to ask.
    audience: Audience | None = None
    _seq: int = 0

    @property
    def count(self) -> int:
        """Frames that were sent, those that the broker did not take included."""
        return self._seq

    @property
    def are_numbers_read(self) -> bool:
        """Its router sees by the numbers whether a frame is missing: it is no old one."""
        return bool(self.accepts)

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
        """Still here; one that cannot go out is no loss, and leaves its number to the next."""
        seq, takes_none = self._seq, STILL in self.accepts
        try:
            self._publish(b"", self._headers(STILL if takes_none else HEARTBEAT, seq))
        except Clogged:
            takes_none = True
        if takes_none:
            self._seq = seq

    def done(self, status: int) -> None:
        """The last frame of a whole answer.

        It waits for the broker if its router sees whether any before it was lost; where not, it
        raises Clogged.
        """
        headers = self._headers(DONE, self._seq, status)
        if self.are_numbers_read:
            self._send_last(b"", headers)
        else:
            self._publish(b"", headers)

    def error(self, text: str, status: int) -> None:
        """The last frame of a request that failed; waits for the broker if it must."""
        payload = text[:TEXT_CHARS_MAX].encode(errors="replace")
        self._send_last(payload, self._headers(ERROR, self._seq, status))

    def notice(self) -> None:
        """The last frame of a request that is handed back; waits for the broker if it must."""
        self._send_last(DRAIN_NOTICE, self._headers(ERROR, self._seq))

    def _send_last(self, payload: bytes, headers: Mapping[str, str]) -> None:
        may_repeat = self.are_numbers_read
        self.last_frames.send(LastFrame(self.inbox, payload, headers, may_repeat))

    def _headers(self, kind: str, seq: int, status: int | None = None) -> dict[str, str]:
        return frame_headers(kind, seq, status, sender=self.sender)

    def _publish(self, payload: bytes, headers: Mapping[str, str]) -> None:
        self._seq += 1
        reply, now = "", self.last_frames.reactor.now
        if self.audience is not None:
            reply = self.audience.reply(now, is_piece=headers[TYPE] != STILL)
        try:
            self.broker.publish(self.inbox, payload, reply=reply, headers=headers)
        except (BrokerAway, PayloadTooLarge) as error:
            raise Clogged(str(error)) from error
