"""One request between the broker and the engine: the subject of the handback chart.

It is told by the reactor what the engine says, by the intake that nobody wants it any more, and by
the drain that the window has ended; the chart decides, and the final state says which frame is the
last. Leaving the chart's scope `engine` closes the connection, which frees the engine, before
anything else happens. Callbacks are synchronous; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog
from attrs import define, field

from router.agent.replies import BACK_AGAIN_SECONDS, BACK_SECONDS, Clogged, Replies
from router.headers import Headers, find, lines_of, request_id_of, to_worker
from router.reactor import Reactor
from router.wires.line import Line, Sent
from router.wires.nats.broker import Job
from router.wires.nats.protocol import (
    HEARTBEAT,
    HEARTBEAT_SECONDS,
    UNREACHABLE,
    NotARequest,
    Request,
    read_request,
)
from statemachines.chart import Edge
from statemachines.handback import HANDBACK, LAST_FRAMES, HandbackState

_log = structlog.get_logger("baton")

#: The status of an error frame, by the fact that ended the request. Infera's have none.
STATUSES = {
    "malformed": 400,
    "broke": 500,  # but UNREACHABLE where the engine got nothing
    "clogged": 500,
    "unheard": 500,
    "stalled": 504,
    "overdue": 504,
    "window_over": 503,
    "stop_came": 503,
    "bug": 500,
}

#: What routers ask for themselves: of no more interest than their probes.
ASIDE = frozenset({"/tokenize", "/detokenize", "/abort_request"})


class Beside(Protocol):
    """What all requests of one agent share."""

    @property
    def reactor(self) -> Reactor: ...
    @property
    def line(self) -> Line: ...
    @property
    def idle_seconds(self) -> float: ...
    @property
    def total_seconds(self) -> float: ...
    @property
    def handback_listeners(self) -> tuple[Callable[[Proxied, Edge], None], ...]: ...

    def request_over(self, proxied: Proxied) -> None:
        """It has reached a final state, and its last frame is out."""

    def engine_broke(self) -> None:
        """The engine took no connection, or cut one: worth a probe."""


@define(eq=False)
class Proxied:
    """One request; subject of the handback chart, told by the reactor, and timed by its sweeper."""

    beside: Beside
    replies: Replies
    #: In a work queue, what is acknowledged at the end.
    job: Job | None = None
    id: str = ""
    state: HandbackState = HandbackState.QUEUED
    #: Guard: its router has promised to continue it elsewhere.
    is_migratable: bool = False
    #: The engine's, once it has answered.
    status: int = 0
    detail: str = ""
    is_probe: bool = False
    #: It was stored for an agent of this id that has gone.
    is_left_over: bool = False
    armed_at: float | None = None
    began_at: float = field(init=False)
    _sent: Sent | None = None
    _heard_at: float = field(init=False)
    _said_at: float = field(init=False)
    #: The broker is just back, and heartbeats come more often until then.
    _hurries_until: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.began_at = self._heard_at = self._said_at = self.beside.reactor.now

    @property
    def listeners(self) -> tuple[Callable[[Proxied, Edge], None], ...]:
        """Who hears of its transitions."""
        return self.beside.handback_listeners

    @property
    def is_over(self) -> bool:
        """It is in a final state."""
        return self.state in HANDBACK.final

    def begin(self, payload: bytes) -> None:
        """Ask the engine; it may be over when this returns."""
        try:
            request = read_request(payload)
            content = request.content()
            headers = self._headers_of(request)
        except NotARequest as problem:
            self._end("malformed", f"not a request: {problem}")
            return
        self.is_migratable = request.stream and request.migratable is True
        self.is_probe = request.method == "GET" or request.path in ASIDE
        target = request.path.encode("latin-1")
        sent = self.beside.line.send(
            request.method.encode("latin-1"), target, headers, content, self
        )
        if self.is_over:
            sent.close()
            return
        self._sent = sent
        self._arm()

    # What others say

    def cancel(self) -> None:
        """Its router gave it up."""
        self._end("cancel_came", "")

    def hand_back(self) -> None:
        """The window of a drain is over."""
        self._end("window_over", "the worker is draining and its window has ended")

    def hand_back_unasked(self, payload: bytes) -> None:
        """Instead of `begin`: it was stored for an agent that has gone.

        Whoever still waits asks again, and for whoever does not no engine computes.
        """
        self.is_left_over = True
        try:
            request = read_request(payload)
        except NotARequest as problem:
            self._end("malformed", f"not a request: {problem}")
            return
        self.is_migratable = request.stream and request.migratable is True
        self._end("window_over", "it was stored for an agent that has gone")

    def unheard(self) -> None:
        """Nobody listens to its frames any more."""
        self._end("unheard", "nobody listens to the answer")

    def stop(self) -> None:
        """The agent stops at once."""
        self._end("stop_came", "the worker was stopped")

    def connection_lost(self) -> None:
        """The broker's connection was lost, and perhaps frames with it.

        A router of ours finds a gap in the numbers. An old one cannot, and would take the rest for
        all of it.
        """
        replies = self.replies
        if replies.count and not replies.are_numbers_read and not self.is_over:
            self._end("clogged", "the connection to the broker was lost in the middle")

    def connection_found(self) -> None:
        """The broker is back: a heartbeat at once shows the router what it has missed, and another
        every second while the router itself may not be back."""
        if HEARTBEAT in self.replies.accepts and not self.is_over:
            self._hurries_until = self.beside.reactor.now + BACK_SECONDS
            self._beat(self.beside.reactor.now)
            self._arm()

    # What the engine says

    def on_connected(self) -> None:
        # Told again where a kept connection turned out to be stale and a new one took its place.
        if self.state is HandbackState.QUEUED:
            HANDBACK.fire(self, "sent")

    def on_head(self, status: int, headers: Headers) -> None:
        self._hear()
        self.status = status
        HANDBACK.fire(self, "answered")
        self._say(lambda: self.replies.head(status, headers))

    def on_body(self, data: bytes) -> None:
        self._hear()
        try:
            self.replies.data(data)
        except Clogged as problem:
            self._end("clogged", str(problem))

    def on_end(self) -> None:
        if self._say(lambda: self.replies.done(self.status)):
            self._end("ended", "")

    def on_broken(self, detail: str, *, connecting: bool) -> None:
        self.beside.engine_broke()
        what = "the engine cannot be reached" if connecting else "the engine broke off"
        self._end("broke", f"{what}: {detail}", UNREACHABLE if connecting else None)

    def on_handed_back(self) -> None:
        raise AssertionError("an engine hands nothing back")

    def on_full(self) -> None:
        raise AssertionError("HTTP has no queue")

    def on_too_large(self, limit: int) -> None:
        raise AssertionError("HTTP has no such limit")

    def on_unread(self) -> None:
        raise AssertionError("HTTP keeps nothing")

    def on_missed(self, detail: str) -> None:
        raise AssertionError("HTTP misses nothing")

    def on_crash(self, error: Exception) -> None:
        self.crashed(error)

    # Time

    def sweep(self, now: float) -> float | None:
        """Act on what is due; see `Timed`."""
        if self.is_over:
            return None
        beside = self.beside
        if beside.total_seconds and now >= self.began_at + beside.total_seconds:
            self._end("overdue", f"not done after {beside.total_seconds:g} seconds")
            return None
        if self._may_stall and now >= self._heard_at + beside.idle_seconds:
            self._end("stalled", f"the engine was silent for {beside.idle_seconds:g} seconds")
            return None
        if HEARTBEAT in self.replies.accepts and now >= self._next_beat(now):
            self._beat(now)
        return self._next_look()

    def crashed(self, error: Exception) -> None:
        """A bug of ours while this request was open."""
        _log.error("internal_error", place="request", id=self.id, exc_info=error)
        if not self.is_over:
            self._end("bug", "an internal error of the agent")

    @property
    def _may_stall(self) -> bool:
        # While it connects the line has a clock of its own.
        return self.beside.idle_seconds > 0 and self.state is not HandbackState.QUEUED

    def _beat(self, now: float) -> None:
        self.replies.heartbeat()
        self._said_at = now

    def _next_beat(self, now: float) -> float:
        hurries = now < self._hurries_until
        return self._said_at + (BACK_AGAIN_SECONDS if hurries else HEARTBEAT_SECONDS)

    def _next_look(self) -> float | None:
        moments = []
        if HEARTBEAT in self.replies.accepts:
            moments.append(self._next_beat(self.beside.reactor.now))
        if self.beside.total_seconds:
            moments.append(self.began_at + self.beside.total_seconds)
        if self.beside.idle_seconds:
            # While it connects, this is early and looks again.
            began = self._heard_at if self._may_stall else self.beside.reactor.now
            moments.append(began + self.beside.idle_seconds)
        return min(moments, default=None)

    def _arm(self) -> None:
        if (when := self._next_look()) is not None:
            self.beside.reactor.sweeper.arm(self, when)

    def _headers_of(self, request: Request) -> bytes:
        fields = _fields_of(request)
        lines = to_worker(fields, identity=True)
        if find(fields, b"x-request-id") is not None:
            self.id = request_id_of(fields)
            lines += lines_of([(b"x-request-id", self.id.encode())])
        return lines

    # The end

    def _hear(self) -> None:
        self._heard_at = self._said_at = self.beside.reactor.now

    def _say(self, frame: Callable[[], None]) -> bool:
        try:
            frame()
        except Clogged as problem:
            self._end("clogged", str(problem))
            return False
        return True

    def _end(self, fact: str, detail: str, status: int | None = None) -> None:
        self.detail = detail
        edge = HANDBACK.fire(self, fact)
        assert "engine" in edge.leaves
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.close()
        if self.replies.audience is not None:
            self.replies.audience.close()
        last = LAST_FRAMES[self.state]
        if last == "error":
            self.replies.error(detail, status or STATUSES[fact])
        elif last == "notice":
            self.replies.notice()
        if self.job is not None:
            self.job.ack()
        self.beside.request_over(self)


def _fields_of(request: Request) -> Headers:
    """The router's headers; raises NotARequest where HTTP could not carry the request."""
    for text in (request.path, request.method):
        if not text.isascii() or not text.isprintable() or " " in text or not text:
            raise NotARequest("a path or a method that HTTP cannot carry")
    fields: Headers = []
    for name, value in (request.headers or {}).items():
        if not name or not _TOKEN.issuperset(name) or not _CONTROLS.isdisjoint(value):
            raise NotARequest("a header that HTTP cannot carry")
        try:
            fields.append((name.lower().encode(), value.encode("latin-1")))
        except UnicodeEncodeError:
            raise NotARequest("a header that HTTP cannot carry") from None
    if find(fields, b"content-type") is None:
        # Old routers send none: what they carry is always JSON.
        fields.append((b"content-type", b"application/json"))
    return fields


_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_CONTROLS = frozenset(map(chr, range(32))) - {"\t"} | {"\x7f"}
