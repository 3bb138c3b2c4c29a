"""What a prefill's answer means, however long it is.

Pure. A prefill answers what a decode would, one token long, and nobody reads that; but an engine
that gave up says so inside it (sglang #30233: a prefill that was aborted let its decode produce
text from one token's KV cache). So every answer is judged to its end, in bounded memory: an error
status, an error event, an abort or an error finish is a failure whatever the status said.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec
from attrs import frozen

from router.errors import Refusal, nest_error
from router.headers import Headers, find
from router.openai import BUSY, Judge, Sign
from router.pd.shaping import handoff_of
from router.sse import EventReader, EventTooLarge, data_of
from router.ticket import Answer, Failure
from router.traces import GAVE_UP, error_event, error_in_body

#: Of an error's body, and of a whole answer, as much as this is kept.
KEPT_BYTES_MAX = 16 * 1024 * 1024
#: An event that is larger holds no error: those are short.
EVENT_BYTES_MAX = 1024 * 1024
#: Whether a prefill's answer has to hold what decode takes over.
Handoff = Literal["none", "optional", "required"]
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_JSON: Headers = [(b"content-type", b"application/json")]


@frozen
class Verdict:
    """How a prefill ended: the fact of its leg, and why for the metric."""

    fact: str
    reason: str = ""
    #: What the client is told while it has nothing.
    failure: Failure | None = None
    #: What decode takes over (vLLM).
    handoff: bytes | None = None
    #: Not so where nobody was there, and the wire has said so.
    was_received: bool = True
    #: What was met, for the log; empty where the fact or the status says it all.
    detail: str = ""


GOOD = Verdict("completed")


class Reading(Protocol):
    """One answer being read."""

    def feed(self, data: bytes) -> Verdict | None:
        """More of the body; a verdict as soon as there is one."""

    def end(self) -> Verdict:
        """The body ended as its framing promised."""


class Listener(Protocol):
    """Who wants to know what a good answer says."""

    def read(self, data: bytes) -> None:
        """An event's data, or a whole answer."""


def reading_of(
    status: int, headers: Headers, family: str, handoff: Handoff, listener: Listener | None
) -> Reading:
    """How an answer with this head is read."""
    if not is_good(status):
        return _ErrorReading(status, headers)
    kind = find(headers, b"content-type") or b""
    encoding = (find(headers, b"content-encoding") or b"identity").lower()
    is_plain = encoding == b"identity"
    if kind.startswith(b"text/event-stream") and is_plain:
        return _EventsReading(family, listener)
    return _WholeReading(family, handoff, listener, is_plain=is_plain)


def is_good(status: int) -> bool:
    """Whether what follows a head with this status is an answer, and no error."""
    return 200 <= status < 300


def verdict_without_body(status: int, headers: Headers) -> Verdict:
    """The verdict of an error whose body does not come, or has no end."""
    return _judged(Answer.without_body(status, headers), "status")


def prefill_failed(answer: Answer | None = None) -> Failure:
    """The prefill failed by its worker's fault, or with an answer that is the client's."""
    return Failure(Refusal("prefill_failed", "The prefill of this request failed."), answer=answer)


#: A 2xx that answers nothing: whoever computed a prompt has something to say of it.
EMPTY = Verdict("lied", "empty", prefill_failed(), detail="an answer that says nothing")
_GAVE_UP = Verdict("lied", "gave_up", prefill_failed(), detail=GAVE_UP)
_NO_HANDOFF = Verdict(
    "lied", "no_handoff", prefill_failed(), detail="nothing in it that decode could take over"
)


def _judged(answer: Answer, reason: str, detail: str = "") -> Verdict:
    """The verdict of an error, by its status: a 4xx, 429 and 503 are the client's as they are."""
    status = answer.status
    if status in BUSY:
        return Verdict("backpressure", "backpressure", prefill_failed(answer), detail=detail)
    if 400 <= status < 500:
        return Verdict("rejected", "rejected", prefill_failed(answer), detail=detail)
    return Verdict("erred", reason, prefill_failed(), detail=detail)


class _Kept:
    """The beginning of a body, up to a bound."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.size = 0

    @property
    def is_whole(self) -> bool:
        return self.size <= KEPT_BYTES_MAX

    def feed(self, data: bytes) -> None:
        self.size += len(data)
        if self.is_whole:
            self.pieces.append(data)
        else:
            self.pieces.clear()


class _ErrorReading:
    """An error status: the verdict waits for the body, which may be the client's."""

    def __init__(self, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = headers
        self._kept = _Kept()

    def feed(self, data: bytes) -> Verdict | None:
        self._kept.feed(data)
        return None if self._kept.is_whole else verdict_without_body(self._status, self._headers)

    def end(self) -> Verdict:
        return _judged(Answer(self._status, self._headers, b"".join(self._kept.pieces)), "status")


class _EventsReading:
    """A stream: read event by event, forgotten event by event."""

    def __init__(self, family: str, listener: Listener | None) -> None:
        self._judge = Judge(family)
        self._listener = listener
        self._bytes_max = EVENT_BYTES_MAX if listener is None else KEPT_BYTES_MAX
        self._reader = EventReader(self._bytes_max)
        #: Something was said, if only in an event too large to be read.
        self._has_data = False

    def feed(self, data: bytes) -> Verdict | None:
        try:
            events = self._reader.feed(data)
        except EventTooLarge:
            self._reader = EventReader(self._bytes_max)
            self._has_data = True
            return None
        for event in events:
            if (verdict := self._read(event)) is not None:
                return verdict
        return None

    def end(self) -> Verdict:
        rest = self._reader.take_rest()
        verdict = self._read(rest + b"\n\n") if rest else None
        return verdict or (GOOD if self._has_data else EMPTY)

    def _read(self, event: bytes) -> Verdict | None:
        judge = self._judge
        sign = judge.read(event)
        if sign is Sign.ERROR:
            answer = Answer(judge.error_status, _JSON, nest_error(judge.error_body))
            return _judged(answer, "error_event", error_event(answer.status))
        # `[DONE]` without a finish is a lie of decode's only: nothing hangs on prefill's.
        if sign is Sign.LIE and not judge.done:
            return _GAVE_UP
        if sign is not Sign.COMMENT and not judge.done:
            self._has_data = True
        if self._listener is not None and (data := data_of(event)) is not None:
            self._listener.read(data)
        return None


class _WholeReading:
    """A whole answer, kept for what is taken over from it."""

    def __init__(
        self, family: str, handoff: Handoff, listener: Listener | None, *, is_plain: bool
    ) -> None:
        self._is_plain = is_plain
        self._family = family
        self._handoff = handoff
        self._listener = listener
        self._kept = _Kept()

    def feed(self, data: bytes) -> Verdict | None:
        self._kept.feed(data)
        return None

    def end(self) -> Verdict:
        body = b"".join(self._kept.pieces)
        found = _judge_whole(self._family, body)
        if found.error_status:
            answer = Answer(found.error_status, _JSON, nest_error(found.error_body))
            return _judged(answer, "error_event", error_in_body(answer.status))
        if found.lies:
            return _GAVE_UP
        if self._handoff == "none" and not found.is_answer and self._is_judged():
            # Events that do not say so, or nothing that an engine would answer.
            events = _EventsReading(self._family, self._listener)
            return events.feed(body) or events.end()
        if self._listener is not None:
            self._listener.read(body)
        if self._handoff == "none":
            return GOOD
        handoff = handoff_of(body)
        if handoff is None and self._handoff == "required":
            return _NO_HANDOFF
        return Verdict("completed", handoff=handoff)

    def _is_judged(self) -> bool:
        """The whole answer is there as it was meant; what is packed is there if anything is."""
        return self._kept.is_whole and (self._is_plain or not self._kept.size)


class _Found(msgspec.Struct):
    """What a whole answer says that nobody is going to read."""

    lies: bool = False
    #: It is an object, or a list of them, as every answer of an engine is.
    is_answer: bool = False
    #: Of an error inside a 2xx; 0 where there is none.
    error_status: int = 0
    error_body: bytes = b""


def _judge_whole(family: str, body: bytes) -> _Found:
    """Whether an engine gave up, or reports an error, inside a whole 2xx answer.

    SGLang's `/generate` answers a batch with a list.
    """
    try:
        compact = msgspec.json.format(body, indent=-1)
        items = _LIST.decode(compact) if compact.startswith(b"[") else [msgspec.Raw(compact)]
    except (msgspec.DecodeError, RecursionError):
        return _Found()
    is_answer = bool(items) and all(bytes(item).startswith(b"{") for item in items)
    for item in items:
        judge = Judge(family)
        sign = judge.read(b"data: %b\n\n" % bytes(item))
        if sign is Sign.ERROR:
            return _Found(error_status=judge.error_status, error_body=judge.error_body)
        if sign is Sign.LIE:
            return _Found(lies=True)
    return _Found(is_answer=is_answer)
