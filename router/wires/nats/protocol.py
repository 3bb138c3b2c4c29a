"""What travels over NATS between a router and the agent beside an engine; pure.

The protocol is Infera's (subjects, request, reply frames, drain notice, cancel), so that either
side may be Infera's own. Ours beside it: `rs-seq` on every reply frame, and the frames `head` and
`heartbeat`, which are sent only to who has asked for them with `rs-accept`, because an old
peer takes an unknown frame for data. Both the router and the agent read and write through here,
and nothing here may know either.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping

import msgspec
from attrs import frozen

from router.headers import Headers

#### headers of messages

#: The kind of a reply frame; absent it is data.
TYPE = "rs-type"
#: The frame's number from 0, without a gap (Baton).
SEQ = "rs-seq"
#: Who sends it: a name of this one process, so that of two agents with one id, which both answer,
#: only one is heard (Baton).
FROM = "rs-from"
#: The engine's HTTP status: on `done`, and on Baton's `head` and `error`.
STATUS = "rs-status"
#: Where replies go, if the request's reply field is taken (JetStream puts its ack subject there).
INBOX = "rs-inbox"
#: The kinds of frames beyond Infera's that the sender of a request understands.
ACCEPT = "rs-accept"
#: What the server itself says: "503" means that nobody listens at a subject.
SERVER_STATUS = "Status"
NO_RESPONDERS = "503"

#: Headers of an engine's answer that a `head` frame carries, and what they are called there.
CARRIED = {
    b"content-type": "rs-content-type",
    b"content-encoding": "rs-content-encoding",
    b"retry-after": "rs-retry-after",
}

#: What a value may hold to become a header of an answer. NATS carries nearly any byte, and clients
#: take some of them for the end of a line.
_HARMLESS = re.compile(r"[ -~]+")
_DIGITS_MAX = 15

#### kinds of reply frames

HEAD = "head"
DATA = "data"
HEARTBEAT = "heartbeat"
#: A heartbeat that takes no number, and bears the one of the frame that comes next: one that is
#: lost leaves no gap, and one that arrives shows whether there is any.
STILL = "still"
DONE = "done"
ERROR = "error"
#: The status of an `error` frame that says: the engine could not be reached, and got nothing.
UNREACHABLE = 502
#: What one says, by its status, in the router's words: those of other agents may hold a prompt.
_REPORTED = {
    UNREACHABLE: "its agent cannot reach the engine",
    500: "its agent has lost the engine's answer",
    503: "its agent has stopped",
    504: "its agent has waited too long for the engine",
}
#: Nothing that follows one of these counts.
TERMINAL = frozenset({DONE, ERROR})
#: What a router of ours asks for.
ACCEPTED = f"{HEAD},{HEARTBEAT},{STILL}"

#: What decoding JSON of others may raise; msgspec's own errors do not cover the last two.
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)

#: What JetStream answers when a stream has stored a message that was sent with a reply subject.
_ACK_FIELDS = frozenset({"type", "stream", "seq", "domain", "duplicate", "batch", "count", "error"})

#: How the payload of an `error` frame begins that hands a request back before a worker stops.
DRAIN_NOTICE = b"infera: worker draining"

#: An agent that was asked for heartbeats lets no more time than this pass without a frame.
HEARTBEAT_SECONDS = 2.0
#: So much silence, and the agent is gone.
HEARTBEAT_LOST_SECONDS = 3 * HEARTBEAT_SECONDS
#: A cancel is published this often, so far apart: a message may be lost, and it costs nothing.
CANCELS = 3
CANCEL_SECONDS = 1.0


def is_drain_notice(payload: bytes) -> bool:
    """Whether an `error` frame hands the request back."""
    return payload.startswith(DRAIN_NOTICE)


def is_absent(headers: Mapping[str, str]) -> bool:
    """Whether this is the server's word that nobody listens where the request was sent."""
    return headers.get(SERVER_STATUS) == NO_RESPONDERS and TYPE not in headers


def is_stored(headers: Mapping[str, str], payload: bytes) -> bool:
    """Whether this is JetStream's word that a stream has (or has not) stored the request.

    A stream on the subjects of requests, left there by whoever uses an admission limit, captures
    requests that were sent without one as well. It is no frame, though it bears no type.
    """
    if headers or not payload.startswith(b"{") or b'"stream"' not in payload[:200]:
        return False
    try:
        found = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return False
    return {"stream", "seq"} <= found.keys() <= _ACK_FIELDS


def accepted(headers: Mapping[str, str]) -> frozenset[str]:
    """The kinds of frames that the sender of a request understands beside Infera's."""
    words = headers.get(ACCEPT, "").split(",")
    return frozenset(word.strip() for word in words) & {HEAD, HEARTBEAT, STILL}


def frame_headers(
    kind: str, seq: int, status: int | None = None, *, sender: str = ""
) -> dict[str, str]:
    """The headers of a reply frame; `sender` is the process that it is from."""
    headers = {TYPE: kind, SEQ: str(seq)}
    if sender:
        headers[FROM] = sender
    if status is not None:
        headers[STATUS] = str(status)
    return headers


def head_headers(seq: int, status: int, headers: Headers, *, sender: str = "") -> dict[str, str]:
    """The headers of a `head` frame; of the engine's `headers` it carries those that count."""
    lines = frame_headers(HEAD, seq, status, sender=sender)
    for name, value in headers:
        if (carried := CARRIED.get(name)) is not None:
            lines[carried] = value.decode("latin-1")
    return lines


def answer_headers(headers: Mapping[str, str], *, streams: bool = False) -> Headers:
    """What a `head` frame says of the engine's headers (names in lower case).

    A value with anything but visible ASCII and spaces does not count; in the place of such a
    content type comes what engines send.
    """
    found = [
        (name, headers[carried].encode())
        for name, carried in CARRIED.items()
        if _HARMLESS.fullmatch(headers.get(carried, ""))
    ]
    content_type = b"content-type"
    if CARRIED[content_type] in headers and content_type not in dict(found):
        is_stream = streams and number(headers, STATUS) == 200
        found.append((content_type, b"text/event-stream" if is_stream else b"application/json"))
    return found


def number(headers: Mapping[str, str], name: str) -> int | None:
    """The header's number, or None where there is none (`rs-seq`, `rs-status`)."""
    text = headers.get(name, "")
    is_number = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
    return int(text) if is_number else None


def reported(status: int) -> str:
    """What an `error` frame with this status says, for the log."""
    return _REPORTED.get(status, "its agent has reported an error")


#### subjects and names


def token_of(worker_id: str) -> str:
    """A worker's id as one token of a subject, and its key in the registry."""
    return base64.urlsafe_b64encode(worker_id.encode()).rstrip(b"=").decode()


def id_of(token: str) -> str:
    """The worker's id of a token; raises ValueError."""
    padded = token + "=" * (-len(token) % 4)
    return base64.b64decode(padded, altchars=b"-_", validate=True).decode()


@frozen
class Names:
    """Every subject and name below one prefix."""

    prefix: str = "infera"

    def request(self, worker_id: str) -> str:
        """Where a worker takes requests."""
        return f"{self.prefix}.req.{token_of(worker_id)}"

    def cancel(self, worker_id: str) -> str:
        """Where a worker hears that nobody wants an answer any more; the payload is the inbox."""
        return f"{self.prefix}.cancel.{token_of(worker_id)}"

    def agent(self, worker_id: str) -> str:
        """Where Baton's agents of one id hear of each other; there should be one."""
        return f"{self.prefix}.agent.{token_of(worker_id)}"

    def drain(self, worker_id: str) -> str:
        """Where Baton's agent is asked to drain."""
        return f"{self.prefix}.drain.{token_of(worker_id)}"

    @property
    def requests(self) -> str:
        """The subjects of all requests."""
        return f"{self.prefix}.req.>"

    @property
    def stream(self) -> str:
        """The JetStream stream of requests, where there is an admission limit."""
        return f"{self.prefix.upper().replace('.', '_')}_REQUESTS"

    @property
    def bucket(self) -> str:
        """The registry of workers."""
        return f"{self.prefix.replace('.', '_')}_workers"


#### requests


class NotARequest(ValueError):
    """A message that an agent cannot take for a request."""


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request; what is at its default is not sent, except for what old workers read."""

    path: str
    #: The client's JSON as it came, neither parsed nor written anew on the way.
    body: msgspec.Raw = msgspec.Raw(b"null")
    headers: dict[str, str] | None = None
    stream: bool = False
    #: A promise of the router: handed back, this request goes on elsewhere. Streams only.
    migratable: bool | None = None
    #: Baton: probes are no POST. An old worker posts whatever it gets.
    method: str = "POST"
    #: Baton: a body that is no JSON; `body` is null then.
    body_base64: str | None = None

    def content(self) -> bytes:
        """The body as the engine is to get it; raises NotARequest."""
        if self.body_base64 is not None:
            try:
                return base64.b64decode(self.body_base64, validate=True)
            except ValueError as error:
                raise NotARequest(f"body_base64: {error}") from None
        body = bytes(self.body)
        return b"" if body == b"null" else body


_DECODER = msgspec.json.Decoder(Request)
_SKIPPER = msgspec.json.Decoder(msgspec.Raw)


def write_request(
    method: bytes,
    target: bytes,
    lines: bytes,
    body: bytes,
    *,
    stream: bool,
    migratable: bool,
) -> bytes:
    """The payload of a request; `lines` are headers as bytes, each ended by CRLF."""
    head = {
        "path": target.decode("latin-1"),
        "stream": stream,
        "headers": _fields(lines),
    }
    extra: dict[str, str | bool] = {}
    if stream:
        extra["migratable"] = migratable
    if method != b"POST":
        extra["method"] = method.decode("latin-1")
    content = body or b"null"
    if not _is_json(content):
        extra["body_base64"] = base64.b64encode(body).decode()
        content = b"null"
    # The body goes in as it is: encoders would have to copy it twice.
    front = msgspec.json.encode(head | extra)
    return b'%b,"body":%b}' % (front[:-1], content)


def read_request(payload: bytes) -> Request:
    """The request in a payload; raises NotARequest. Fields nobody knows are skipped."""
    try:
        request = _DECODER.decode(payload)
    except UNREADABLE as error:  # malformed, too deep, or of another shape
        raise NotARequest(str(error)) from None
    if not request.path.startswith("/"):
        raise NotARequest("the path does not begin with a slash")
    return request


#: Headers of one connection, which is not there.
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "content-length"}
)


def _fields(lines: bytes) -> dict[str, str] | None:
    fields: dict[str, str] = {}
    for line in lines.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if colon:
            key = name.decode("latin-1").lower()
            if key in _HOP_BY_HOP:
                continue
            text = value.strip().decode("latin-1")
            fields[key] = f"{fields[key]}, {text}" if key in fields else text
    return fields or None


def _is_json(body: bytes) -> bool:
    try:
        _SKIPPER.decode(body)
        body.decode()
    except UNREADABLE:
        return False
    return True
