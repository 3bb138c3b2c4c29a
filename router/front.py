"""The front: HTTP/1.1 connections of clients, in the reactor.

A `ClientChannel` turns bytes into `Call`s, one after the other, and writes one reply at a time.
Each connection has one Trio task, parked in `next_call` or wherever its request waits; the socket
is watched all that time, and a client that leaves or half-closes is reported at once. Requests
that are pipelined are served in order, from what one read brought; no more is read until they are
answered.

Anything that is not plainly one request with one framing is refused with 400 and a closed
connection, since guessing is how requests are smuggled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import httptools
from attrs import define, field, frozen

from router.errors import Refusal
from router.headers import Headers, lines_of
from router.reactor import Channel, Rank, Reactor, Waker
from router.sockets import Socket

#: A client that owes us this many bytes of reading holds back its own worker until it took them.
BACKLOG_BYTES_HIGH = 128 * 1024
#: How long an ended connection still swallows what the client is sending, so that a reset does
#: not destroy the answer on its way.
LINGER_SECONDS = 2.0

_REASONS = {
    200: b"OK", 201: b"Created", 202: b"Accepted", 204: b"No Content", 206: b"Partial Content",
    301: b"Moved Permanently", 302: b"Found", 303: b"See Other", 304: b"Not Modified",
    307: b"Temporary Redirect", 308: b"Permanent Redirect",
    400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found",
    405: b"Method Not Allowed", 408: b"Request Timeout", 409: b"Conflict",
    413: b"Content Too Large", 422: b"Unprocessable Content", 429: b"Too Many Requests",
    431: b"Request Header Fields Too Large", 499: b"Client Closed Request",
    500: b"Internal Server Error", 501: b"Not Implemented", 502: b"Bad Gateway",
    503: b"Service Unavailable", 504: b"Gateway Timeout",
}  # fmt: skip
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_BODY = frozenset({204, 304})


@frozen
class Limits:
    """What a client may send, and how slowly. Seconds; 0 turns a time off."""

    head_bytes_max: int
    body_bytes_max: int
    head_seconds: float
    idle_seconds: float
    stall_seconds: float


@define(eq=False)
class Call:
    """One request as it arrived; header names are in lower case."""

    method: str = ""
    target: bytes = b""
    #: The target without its query.
    path: str = ""
    http_10: bool = False
    keep_alive: bool = False
    headers: Headers = field(factory=list)
    body: bytes = b""
    #: Set where the request cannot be served: it is answered so and the connection closed.
    refusal: Refusal | None = None


class Gone(Exception):
    """The client left while a call of its was being waited for or answered."""


class Watcher(Protocol):
    """Who wants to know what happens to the client while a call is being served."""

    def on_client_gone(self) -> None:
        """The client closed its side, or its connection broke, or it stopped reading."""

    def on_client_slow(self) -> None:
        """Too many bytes wait for the client: send no more for now."""

    def on_client_ready(self) -> None:
        """All of them are taken: send on."""

    def next_deadline(self) -> float | None:
        """When something of this call is due, on Trio's clock in seconds."""

    def on_deadline(self, now: float) -> None:
        """Something may be due."""

    def on_crash(self, error: Exception) -> None:
        """A callback for this client raised: a bug of ours."""


class Reading(Enum):
    """What the connection is in the middle of reading."""

    NOTHING = "nothing"
    HEAD = "head"
    BODY = "body"


class ClientChannel(Channel):
    """One client connection, for its whole life."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_call",
        "_calls",
        "_fed",
        "_head_since",
        "_lingering_until",
        "_parser",
        "_quiet_since",
        "_reset_at_end",
        "_slow",
        "_stalled_since",
        "_target",
        "_waker",
        "current",
        "gone",
        "limits",
        "reading",
        "reply_begun",
        "reply_chunked",
        "watcher",
    )

    def __init__(self, reactor: Reactor, sock: Socket, limits: Limits) -> None:
        self.limits = limits
        #: The call being served; its reply is the only one that may be written.
        self.current: Call | None = None
        self.watcher: Watcher | None = None
        self.gone = False
        self.reading = Reading.NOTHING
        self.reply_begun = False
        self.reply_chunked = False
        self._parser = httptools.HttpRequestParser(self)
        self._waker = Waker()
        self._calls: deque[Call] = deque()
        self._call = Call()
        self._target: list[bytes] = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._fed = 0
        self._head_since = 0.0
        self._quiet_since = reactor.now
        self._stalled_since: float | None = None
        self._slow = False
        self._lingering_until: float | None = None
        self._reset_at_end = False
        super().__init__(reactor, sock, Rank.CLIENT, connecting=False)
        self._arm()

    # For the task of this connection

    async def next_call(self) -> Call:
        """The next request, whole. Raises Gone when there will be none. Cancellable."""
        while not self._calls:
            if self.gone or not self.is_open:
                raise Gone
            await self._waker.wait()
        self.current = call = self._calls.popleft()
        self.reply_begun = False
        return call

    async def wait_closed(self) -> None:
        """Wait until the connection is closed, its lingering end included. Cancellable."""
        while self.is_open:
            await self._waker.wait()

    def finish_call(self) -> None:
        """The reply is written: on to the next call, or to the end of the connection."""
        call, self.current = self.current, None
        self.watcher = None
        if not self.is_open or self.closing:
            return
        if call is None or not call.keep_alive or call.refusal is not None:
            self.end()
            return
        now = self._quiet_since = self.reactor.now
        if not self._calls:
            self.resume()
        if self.limits.idle_seconds:
            self.reactor.sweeper.arm(self, now + self.limits.idle_seconds)

    def end(self) -> None:
        """Close in order: the backlog is written, then FIN, then a moment of swallowing input."""
        self.gone = True
        if self.is_open and not self.closing:
            self.closing = True
            if not self.backlog_bytes:
                self._half_close()
            self._arm()

    @property
    def waker(self) -> Waker:
        """The parking place of this connection's task."""
        return self._waker

    # Writing the reply of the current call

    def respond(self, status: int, lines: bytes, body: bytes) -> None:
        """A whole response in one send; `lines` are header lines without framing."""
        assert self.current is not None
        self.reply_begun = True
        head = self._head(status, lines)
        if status in _NO_BODY:
            self.send(head + b"\r\n")
        elif self.current.method == "HEAD":
            self.send(b"%bcontent-length: %d\r\n\r\n" % (head, len(body)))
        else:
            self.send(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self._note_backlog()

    def refuse(self, refusal: Refusal, request_id: str | None = None) -> None:
        """A router-made error as a whole response."""
        lines = lines_of(refusal.headers())
        if request_id is not None:
            lines += b"x-request-id: %b\r\n" % request_id.encode()
        self.respond(refusal.status, lines, refusal.body())

    def begin(self, status: int, lines: bytes, data: bytes) -> None:
        """The head of a response of unknown length, and its first bytes, in one send."""
        assert self.current is not None
        self.reply_begun = True
        self.reply_chunked = not self.current.http_10
        if self.reply_chunked:
            head = self._head(status, lines) + b"transfer-encoding: chunked\r\n\r\n"
        else:
            self.current.keep_alive = False
            head = self._head(status, lines) + b"\r\n"
        self.send(head + self._framed(data))
        self._note_backlog()

    def write(self, data: bytes) -> None:
        """More of the body."""
        if data:
            self.send(self._framed(data))
            self._note_backlog()

    def write_last(self, data: bytes) -> None:
        """The last bytes of the body and its clean end, in one send."""
        if self.reply_chunked:
            self.send(self._framed(data) + b"0\r\n\r\n")
        elif data:
            self.send(data)
        self._note_backlog()

    def cut(self, data: bytes) -> None:
        """Last words, then an end that no client can take for a clean one."""
        if not self.is_open:
            return
        self.gone = True
        if data:
            self.send(self._framed(data))
        # In a chunked body the missing last chunk says that it is not complete. An HTTP/1.0 body
        # ends with the connection, so only a reset tells the client.
        self._reset_at_end = not self.reply_chunked
        self.end()

    def _head(self, status: int, lines: bytes) -> bytes:
        assert self.current is not None
        reason = _REASONS.get(status, b"Unknown")
        connection = b"" if self.current.keep_alive else b"connection: close\r\n"
        if self.current.http_10 and self.current.keep_alive:
            connection = b"connection: keep-alive\r\n"
        return b"HTTP/1.1 %d %b\r\n%b%b" % (status, reason, lines, connection)

    def _framed(self, data: bytes) -> bytes:
        if self.reply_chunked and data:
            return b"%x\r\n%b\r\n" % (len(data), data)
        return data

    # The reactor's callbacks

    def received(self, data: bytes) -> None:
        if self._lingering_until is not None or self.gone:
            return
        now = self._quiet_since = self.reactor.now
        self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Refused):
                raise
            return
        except httptools.HttpParserUpgrade as upgrade:
            self._after_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse_rest(Refusal("bad_request", f"Not a valid HTTP request: {error}."))
            return
        if self.reading is Reading.HEAD:
            if self._fed > self.limits.head_bytes_max:
                self._refuse_rest(self._too_large_head())
            elif self.limits.head_seconds:
                self.reactor.sweeper.arm(self, now + self.limits.head_seconds)

    def ended(self) -> None:
        # A half-closed client is gone (contract): it cannot be told from one that closed.
        self._leave()

    def lost(self, error: OSError) -> None:
        self._leave()

    def hung_up_while_paused(self) -> None:
        self._leave()

    def progressed(self) -> None:
        self._stalled_since = self.reactor.now

    def drained(self) -> None:
        self._stalled_since = None
        if self._slow:
            self._slow = False
            if self.watcher is not None:
                self.watcher.on_client_ready()

    def closed(self) -> None:
        self.gone = True
        self._waker.wake()

    def flushed_last(self) -> None:
        self._half_close()

    def crashed(self, error: Exception) -> None:
        watcher = self.watcher
        if watcher is None:
            self.close()
            raise error
        watcher.on_crash(error)

    def sweep(self, now: float) -> float | None:
        """Look at every deadline of this connection and of the call it serves."""
        if not self.is_open:
            return None
        due = self._next_deadline()
        if due is not None and due <= now:
            self._meet_deadline(now)
            due = self._next_deadline() if self.is_open else None
        return due

    def rearm(self) -> None:
        """A deadline of the call may have come nearer."""
        due = None if self.watcher is None else self.watcher.next_deadline()
        if due is not None:
            self.reactor.sweeper.arm(self, due)

    # Deadlines

    def _arm(self) -> None:
        due = self._next_deadline()
        if due is not None:
            self.reactor.sweeper.arm(self, due)

    def _next_deadline(self) -> float | None:
        limits = self.limits
        if self._lingering_until is not None:
            return self._lingering_until
        dues = []
        if self._stalled_since is not None and limits.stall_seconds:
            dues.append(self._stalled_since + limits.stall_seconds)
        if self.watcher is not None:
            due = self.watcher.next_deadline()
            if due is not None:
                dues.append(due)
        elif self.current is None and not self._calls:
            if self.reading is Reading.HEAD and limits.head_seconds:
                dues.append(self._head_since + limits.head_seconds)
            elif limits.idle_seconds:
                dues.append(self._quiet_since + limits.idle_seconds)
        return min(dues) if dues else None

    def _meet_deadline(self, now: float) -> None:
        limits = self.limits
        if self._lingering_until is not None:
            if self._lingering_until <= now:
                self.close()
        elif (
            self._stalled_since is not None
            and limits.stall_seconds
            and self._stalled_since + limits.stall_seconds <= now
        ):
            self._leave(hard=True)
        elif self.watcher is not None:
            self.watcher.on_deadline(now)
        elif self.reading is Reading.NOTHING:
            self.close()
        else:
            self._refuse_rest(Refusal("header_timeout", "The request took too long to arrive."))

    # Ends

    def _leave(self, *, hard: bool = False) -> None:
        """The client is gone: tell whoever serves it, close."""
        self.gone = True
        self._calls.clear()
        watcher, self.watcher = self.watcher, None
        if watcher is not None:
            watcher.on_client_gone()
        if hard:
            self.reset()
        self.close()
        self._waker.wake()

    def _half_close(self) -> None:
        if self._reset_at_end:
            self.reset()
            return
        self._lingering_until = self.reactor.now + LINGER_SECONDS
        self.sock.shutdown_write()
        self.resume()
        self._arm()
        self._waker.wake()

    def _note_backlog(self) -> None:
        if not self.backlog_bytes:
            return
        if self._stalled_since is None:
            self._stalled_since = self.reactor.now
            self._arm()
        if self.backlog_bytes > BACKLOG_BYTES_HIGH and not self._slow:
            self._slow = True
            if self.watcher is not None:
                self.watcher.on_client_slow()

    # What httptools reports

    def on_message_begin(self) -> None:
        self._call = Call()
        self._target = []
        self._body = []
        self._body_bytes = 0
        self._fed = 0
        self._head_since = self.reactor.now
        self.reading = Reading.HEAD

    def on_url(self, url: bytes) -> None:
        self._target.append(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.reading is Reading.HEAD:
            self._call.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        call, parser = self._call, self._parser
        call.method = parser.get_method().decode()
        call.target = target = b"".join(self._target)
        call.path = target.partition(b"?")[0].decode("latin-1")
        call.http_10 = parser.get_http_version() != "1.1"
        call.keep_alive = parser.should_keep_alive()
        self.reading = Reading.BODY
        refusal = self._refusal_of_head(call)
        if refusal is not None:
            self._refuse_rest(refusal)
            raise _Refused

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes > self.limits.body_bytes_max:
            self._refuse_rest(self._too_large_body())
            raise _Refused
        self._body.append(data)

    def on_message_complete(self) -> None:
        call = self._call
        call.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self.reading = Reading.NOTHING
        self._calls.append(call)
        # One call at a time: what else this read brought is parsed and kept, no more is read.
        if self.current is not None or len(self._calls) > 1:
            self.pause()
        self._waker.wake()

    def _refusal_of_head(self, call: Call) -> Refusal | None:
        """What is wrong with a head; a client that waits for leave to send its body gets it."""
        hosts = size = 0
        expects = False
        for name, value in call.headers:
            size += len(name) + len(value) + 4
            if name == b"host":
                hosts += 1
            elif name == b"content-length" and int(value) > self.limits.body_bytes_max:
                return self._too_large_body()
            elif name == b"expect":
                expects = value.lower() == b"100-continue"
        if size + len(call.target) > self.limits.head_bytes_max:
            return self._too_large_head()
        if not call.http_10 and hosts != 1:
            return Refusal("bad_request", "A request has exactly one Host header.")
        if call.http_10 and self._parser.get_http_version() != "1.0":
            return Refusal("bad_request", "Only HTTP/1.1 and HTTP/1.0 are spoken here.")
        if expects and not call.http_10 and not self._calls and self.current is None:
            self.send(_CONTINUE)
        return None

    def _too_large_body(self) -> Refusal:
        limit = self.limits.body_bytes_max
        return Refusal("body_too_large", f"The body is larger than {limit} bytes.")

    def _too_large_head(self) -> Refusal:
        limit = self.limits.head_bytes_max
        return Refusal("headers_too_large", f"The headers are larger than {limit} bytes.")

    def _refuse_rest(self, refusal: Refusal) -> None:
        """Answer so after the calls before it, then close: the framing can no longer be trusted."""
        self.reading = Reading.NOTHING
        self._calls.append(Call(refusal=refusal))
        self.pause()
        self._waker.wake()

    def _after_upgrade(self, rest: bytes) -> None:
        # Nobody is upgraded by accident: the request was parsed and is answered over HTTP/1.1.
        self._parser = httptools.HttpRequestParser(self)
        if rest:
            self.received(rest)


class _Refused(Exception):
    """Stops the parser after a refusal; never leaves this module."""


def listen_for_clients(
    reactor: Reactor, limits: Limits, opened: Callable[[ClientChannel], None]
) -> Callable[[Socket], None]:
    """What a `Listener` needs: makes a channel of every accepted socket and announces it."""

    def accepted(sock: Socket) -> None:
        opened(ClientChannel(reactor, sock, limits))

    return accepted
