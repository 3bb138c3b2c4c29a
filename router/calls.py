"""Reading calls: one client connection's bytes in, requests with one framing each out.

Anything that is not plainly one request with one framing is refused, since guessing is how requests
are smuggled: httptools (llhttp, strict) refuses what breaks the grammar, and what is left to us is
the number of Host headers, the version and the limits. A refusal takes its place in the order of
the calls; after it nothing more is read.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache

import httptools
from attrs import define, field, frozen

from router.errors import Refusal
from router.headers import Headers, find

#: Largest body of a call without a key where one is asked for: enough to answer it in order.
STRANGER_BYTES_MAX = 64 * 1024
#: What is kept for a WebSocket whose handshake is not answered yet.
UNREAD_BYTES_MAX = 64 * 1024


@frozen
class Limits:
    """What a client may send, and how slowly. Seconds; 0 turns a time off."""

    head_bytes_max: int
    body_bytes_max: int
    head_seconds: float
    idle_seconds: float
    stall_seconds: float
    #: From the first byte of a head to the last of its body.
    call_seconds: float = 0.0
    #: Whoever has none of these may not bring a large body; empty where everybody is served.
    keys: tuple[str, ...] = ()


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
    #: It asks for a WebSocket; what came behind it is kept in the reader's `unread`.
    wants_websocket: bool = False
    #: Set where the request cannot be served: it is answered so and the connection closed.
    refusal: Refusal | None = None


class Reading(Enum):
    """What the connection is in the middle of reading."""

    NOTHING = "nothing"
    HEAD = "head"
    BODY = "body"


class CallReader:
    """Cuts a connection's bytes into calls."""

    __slots__ = (
        "_add",
        "_beside",
        "_body",
        "_body_bytes",
        "_body_bytes_max",
        "_call",
        "_fed",
        "_feeding",
        "_limits",
        "_now",
        "_parser",
        "_target",
        "calls",
        "expects_continue",
        "head_since",
        "is_refused",
        "reading",
        "unread",
    )

    def __init__(self, limits: Limits) -> None:
        #: Calls read and not yet taken, in order.
        self.calls: deque[Call] = deque()
        self.reading = Reading.NOTHING
        #: When the head being read began.
        self.head_since = 0.0
        #: The client waits for leave to send its body.
        self.expects_continue = False
        self.is_refused = False
        #: What came behind a request for a WebSocket.
        self.unread = b""
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._call = Call()
        self._target: list[bytes] = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._body_bytes_max = limits.body_bytes_max
        #: Bytes read since the last that belonged to a body.
        self._beside = 0
        #: Bytes of the head being read, as far as they came before those being fed.
        self._fed = 0
        self._feeding = 0
        self._now = 0.0
        self._add = self._call.headers.append

    def feed(self, data: bytes, now: float) -> None:
        """Read on; what was completed or refused stands in `calls`."""
        self._now = now
        while data and not self.is_refused:
            if self._call.wants_websocket:
                self._keep_unread(data)
                return
            data = self._parse(data)

    def _keep_unread(self, data: bytes) -> None:
        self.unread += data
        if len(self.unread) > UNREAD_BYTES_MAX:
            self.refuse(Refusal("bad_request", "Too much was sent before the handshake's answer."))

    def _parse(self, data: bytes) -> bytes:
        """Read on; returns what must be read anew, since a request asked for an upgrade."""
        body_bytes = self._body_bytes
        self._feeding = len(data)
        self._fed += self._feeding
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Refused):
                raise
            return b""
        except httptools.HttpParserUpgrade as upgrade:
            return self._after_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.refuse(Refusal("bad_request", f"Not a valid HTTP request: {error}."))
            return b""
        if self.reading is Reading.BODY:
            # Trailers and extensions of chunks are nobody's body, and may not go on for ever.
            self._beside += len(data)
            if self._body_bytes != body_bytes:
                self._beside = 0
            elif self._beside > self._limits.head_bytes_max:
                self.refuse(self._too_large_head())
        elif self.reading is Reading.HEAD and self._fed > self._limits.head_bytes_max:
            self.refuse(self._too_large_head())
        return b""

    def refuse(self, refusal: Refusal) -> None:
        """Answer so after the calls before it: the framing can no longer be trusted."""
        self.is_refused = True
        self.reading = Reading.NOTHING
        # With what was read of its headers: even this answer has a request id.
        self.calls.append(Call(refusal=refusal, headers=self._call.headers))

    # What httptools reports

    def on_message_begin(self) -> None:
        self._call = call = Call()
        self._add = call.headers.append
        self._target = []
        self._body = []
        self._body_bytes = 0
        self._beside = 0
        self._fed = 0
        self.head_since = self._now
        self.reading = Reading.HEAD

    def on_url(self, url: bytes) -> None:
        self._target.append(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._add((name.lower(), value))

    def on_headers_complete(self) -> None:
        call, parser = self._call, self._parser
        call.method = parser.get_method().decode()
        call.target, call.path = _split(b"".join(self._target))
        call.http_10 = parser.get_http_version() != "1.1"
        call.keep_alive = parser.should_keep_alive()
        self.reading = Reading.BODY
        self._add = _ignore  # what comes behind a body is nobody's
        refusal = self._refusal_of_head(call)
        if refusal is not None:
            self.refuse(refusal)
            raise _Refused

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes > self._body_bytes_max:
            self.refuse(self._too_large_body())
            raise _Refused
        self._body.append(data)

    def on_message_complete(self) -> None:
        call = self._call
        call.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self.reading = Reading.NOTHING
        self.expects_continue = False
        self.calls.append(call)

    def _refusal_of_head(self, call: Call) -> Refusal | None:
        """What is wrong with a head, beyond its grammar."""
        headers = call.headers
        named = dict(headers)
        limits = self._limits
        self._body_bytes_max = limits.body_bytes_max
        if limits.keys and not has_key(call, limits.keys):
            self._body_bytes_max = min(STRANGER_BYTES_MAX, limits.body_bytes_max)
        if b"content-length" in named and int(named[b"content-length"]) > self._body_bytes_max:
            return self._too_large_body()
        for name, value in headers if b"transfer-encoding" in named else ():
            if name == b"transfer-encoding" and (call.http_10 or value.lower() != b"chunked"):
                return Refusal("bad_request", "The only transfer coding here is chunked.")
        if b"expect" in named:
            self.expects_continue = named[b"expect"].lower() == b"100-continue" and not call.http_10
        if self._fed or self._feeding > self._limits.head_bytes_max:
            # It is no larger than what brought it, unless it came in several pieces.
            size = sum([len(name) + len(value) + 4 for name, value in headers])
            if size + len(call.target) > self._limits.head_bytes_max:
                return self._too_large_head()
        if not call.http_10 and (
            b"host" not in named
            or (len(named) != len(headers) and [name for name, _ in headers].count(b"host") != 1)
        ):
            return Refusal("bad_request", "A request has exactly one Host header.")
        if call.http_10 and self._parser.get_http_version() != "1.0":
            return Refusal("bad_request", "Only HTTP/1.1 and HTTP/1.0 are spoken here.")
        return None

    def _too_large_body(self) -> Refusal:
        limit = self._limits.body_bytes_max
        if self._body_bytes_max < limit:
            return Refusal("unauthorized", "A valid key is required to send so much.")
        return Refusal("body_too_large", f"The body is larger than {limit} bytes.")

    def _too_large_head(self) -> Refusal:
        limit = self._limits.head_bytes_max
        return Refusal("headers_too_large", f"The headers are larger than {limit} bytes.")

    def _after_upgrade(self, rest: bytes) -> bytes:
        """Nobody is upgraded by accident: what asks for anything but a WebSocket goes on as HTTP.

        A client that asks for a WebSocket where there is none is answered, and cannot go on. Of
        the others the parser has skipped the body, which must not be taken for the next request
        (Java's HttpClient offers h2c with every request): it reads them again without the offer.
        """
        call = self._call
        self._parser = httptools.HttpRequestParser(self)
        if call.method == "CONNECT":
            self.calls.remove(call)
            self.refuse(Refusal("method_not_allowed", "There are no tunnels here."))
            return b""
        has_body = any(name in _FRAMING for name, _ in call.headers)
        upgrade = find(call.headers, b"upgrade") or b""
        if upgrade.strip().lower() == b"websocket" and not has_body:
            call.wants_websocket = True
            call.keep_alive = False
            return rest
        if not has_body:
            return rest
        self.calls.remove(call)
        return _head_without_upgrade(call) + rest


def _ignore(_header: tuple[bytes, bytes]) -> None:
    pass


def has_key(call: Call, keys: Sequence[str]) -> bool:
    """Whether a call carries one of these keys as its bearer token; compared in constant time."""
    scheme, _, token = (find(call.headers, b"authorization") or b"").partition(b" ")
    found = [hmac.compare_digest(token.strip(), key.encode()) for key in keys]
    return scheme.lower() == b"bearer" and any(found)


_FRAMING = (b"content-length", b"transfer-encoding")


@lru_cache(maxsize=256)
def _split(target: bytes) -> tuple[bytes, str]:
    """The target as it is passed on, and its path alone; clients ask for few of them."""
    target = _origin_form(target)
    return target, target.partition(b"?")[0].decode("latin-1")


def _origin_form(target: bytes) -> bytes:
    """The path and query of a target in absolute form, which a server must accept (RFC 9112)."""
    if target[:1] == b"/" or b"://" not in target:
        return target
    rest = target.partition(b"://")[2]
    start = min((place for place in (rest.find(b"/"), rest.find(b"?")) if place >= 0), default=-1)
    path = rest[start:] if start >= 0 else b""
    return path if path[:1] == b"/" else b"/" + path


def _head_without_upgrade(call: Call) -> bytes:
    lines = [b"%b: %b\r\n" % pair for pair in call.headers if pair[0] != b"upgrade"]
    version = b"HTTP/1.0" if call.http_10 else b"HTTP/1.1"
    return b"%b %b %b\r\n%b\r\n" % (call.method.encode(), call.target, version, b"".join(lines))


class _Refused(Exception):
    """Stops the parser after a refusal; never leaves this module."""
