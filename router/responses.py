"""The head of a response to a client, as bytes. Framing headers are added by whoever frames."""

from __future__ import annotations

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


def head_of(status: int, lines: bytes, *, keeps_alive: bool, http_10: bool) -> bytes:
    """Status line and header lines (without the empty line that ends a head).

    HTTP/1.1 keeps a connection unless it is told otherwise, HTTP/1.0 only if it is told.
    """
    connection = b"" if keeps_alive else b"connection: close\r\n"
    if http_10 and keeps_alive:
        connection = b"connection: keep-alive\r\n"
    reason = _REASONS.get(status, b"Unknown")
    return b"HTTP/1.1 %d %b\r\n%b%b" % (status, reason, lines, connection)
