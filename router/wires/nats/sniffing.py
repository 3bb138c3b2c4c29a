"""What an answer is that came without a head.

Infera's worker tells the engine's status only when all is over, and sends an error body as data
like everything else. So whether the first bytes are events decides: a stream is under way, or the
answer is kept until its status is there. Pure.
"""

from __future__ import annotations

from router.errors import Refusal
from router.headers import Headers
from router.openai import BUSY

EVENTS: Headers = [(b"content-type", b"text/event-stream")]
JSON: Headers = [(b"content-type", b"application/json")]
_FIELDS = (b"data", b"event", b"id", b"retry")
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


def are_events(data: bytes) -> bool | None:
    """Whether a body that begins so is a stream of events; None while that is open."""
    text = data.removeprefix(_BOM).lstrip(b"\r\n")
    if not text or (text in _BOM and not data.startswith(_BOM)):
        return None
    if text.startswith(b":"):
        return True
    if any(text.startswith((field + b":", field + b"\n", field + b"\r")) for field in _FIELDS):
        return True
    if any(field.startswith(text) for field in _FIELDS):
        return None
    return False


def is_packed(data: bytes) -> bool:
    """Whether it is compressed, which nobody asked for; without a head nobody could say how."""
    return data.startswith(_GZIP)


def headers_of(body: bytes, *, streams: bool) -> Headers:
    """The headers that a whole answer without a head is taken to have."""
    if are_events(body) or (streams and not body):
        return EVENTS
    is_json = body.lstrip()[:1] in (b"{", b"[")
    return [(b"content-type", b"application/json" if is_json else b"text/plain; charset=utf-8")]


def refusal_of(status: int) -> Refusal:
    """What the agent itself has refused, in the router's words: its own may hold addresses."""
    message = "The worker does not take this request."
    if status in BUSY:
        return Refusal("queue_full", message)
    return Refusal("bad_request", message)
