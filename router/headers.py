"""Which headers cross Baton, in both directions, and which never do.

Hop-by-hop headers, and whatever `Connection` names, end here (RFC 9110, 7.6.1). Framing headers
are always made anew from the body that is really sent, never copied (complaints about cut error
bodies in other routers come from copying `Content-Length`).
"""

from __future__ import annotations

import random
import re

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_TO_WORKERS = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
_NOT_TO_WORKERS_IDENTITY = _NOT_TO_WORKERS | {b"accept-encoding"}
_NOT_TO_CLIENTS = _HOP_BY_HOP | {b"content-length", b"x-request-id", b"x-router-error-code"}
_KEY = frozenset({b"authorization"})
_STREAM_OWN = frozenset({b"cache-control", b"x-accel-buffering"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@+/=-]{1,128}")


def find(headers: Headers, name: bytes) -> bytes | None:
    """The first value of a header (names are lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def request_id_of(headers: Headers) -> str:
    """The client's `x-request-id` where it is harmless in a log and in a header, else a new one."""
    if b"x-request-id" in dict(headers):
        value = find(headers, b"x-request-id") or b""
        text = value.decode("latin-1")
        if _REQUEST_ID.fullmatch(text):
            return text
    return f"{random.getrandbits(128):032x}"


def to_worker(headers: Headers, *, identity: bool, is_keyed: bool = False) -> bytes:
    """The client's headers as a worker may see them, as header lines.

    With `identity` an unencoded answer is asked for, since events inside a compressed stream can
    neither be read nor judged. `is_keyed`: the key in Authorization was for the router, and is
    none of a worker's business.
    """
    dropped = _NOT_TO_WORKERS_IDENTITY if identity else _NOT_TO_WORKERS
    if (named := _connection_tokens(headers)) is not None:
        dropped = dropped | named
    if is_keyed:
        dropped = dropped | _KEY
    lines = [b"%b: %b\r\n" % pair for pair in headers if pair[0] not in dropped]
    if identity:
        lines.append(b"accept-encoding: identity\r\n")
    return b"".join(lines)


def to_client(headers: Headers, *, stream: bool) -> bytes:
    """A worker's headers as a client may see them, as header lines."""
    dropped = _NOT_TO_CLIENTS
    if (named := _connection_tokens(headers)) is not None:
        dropped = dropped | named
    if stream:
        dropped = dropped | _STREAM_OWN
    lines = [b"%b: %b\r\n" % pair for pair in headers if pair[0] not in dropped]
    if stream:
        lines.append(b"cache-control: no-cache\r\nx-accel-buffering: no\r\n")
    return b"".join(lines)


def lines_of(headers: Headers) -> bytes:
    """Headers of our own as header lines."""
    return b"".join([b"%b: %b\r\n" % pair for pair in headers])


def _connection_tokens(headers: Headers) -> frozenset[bytes] | None:
    if b"connection" not in dict(headers):
        return None
    tokens: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            tokens.update(token.strip().lower() for token in value.split(b","))
    return frozenset(tokens) if tokens else None
