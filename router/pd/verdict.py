"""What a prefill's answer means, however long it is.

Pure. A prefill answers what a decode would, one token long, and nobody reads that; but an engine
that gave up says so inside it (sglang #30233: a prefill that was aborted let its decode produce
text from one token's KV cache). So every answer is judged to its end, in bounded memory: an error
status, an error event, an abort or an error finish is a failure whatever the status said.
"""

from __future__ import annotations

from typing import Literal, Protocol

from attrs import frozen

from router.errors import Refusal, nest_error
from router.headers import Headers, find
from router.openai import Judge, Sign, judge_whole
from router.pd.shaping import handoff_of
from router.sse import EventReader, EventTooLarge, data_of
from router.ticket import Answer, Failure

#: Of an error's body, and of a whole answer, as much as this is kept.
KEPT_BYTES_MAX = 16 * 1024 * 1024
#: An event that is larger holds no error: those are short.
EVENT_BYTES_MAX = 1024 * 1024
#: Whether a prefill's answer has to hold what decode takes over.
Handoff = Literal["none", "optional", "required"]
_BUSY = frozenset({429, 503})
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
    if not 200 <= status < 300:
        return _ErrorReading(status, headers)
    kind = find(headers, b"content-type") or b""
    encoding = (find(headers, b"content-encoding") or b"identity").lower()
    if kind.startswith(b"text/event-stream") and encoding == b"identity":
        return _EventsReading(family, listener)
    return _WholeReading(family, handoff, listener)


def prefill_failed(answer: Answer | None = None) -> Failure:
    """The prefill failed by its worker's fault, or with an answer that is the client's."""
    return Failure(Refusal("prefill_failed", "The prefill of this request failed."), answer=answer)


def _judged(answer: Answer, reason: str) -> Verdict:
    """The verdict of an error, by its status: a 4xx, 429 and 503 are the client's as they are."""
    status = answer.status
    if status in _BUSY:
        return Verdict("backpressure", "backpressure", prefill_failed(answer))
    if 400 <= status < 500:
        return Verdict("rejected", "rejected", prefill_failed(answer))
    return Verdict("erred", reason, prefill_failed())


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
        return None if self._kept.is_whole else Verdict("erred", "status", prefill_failed())

    def end(self) -> Verdict:
        return _judged(Answer(self._status, self._headers, b"".join(self._kept.pieces)), "status")


class _EventsReading:
    """A stream: read event by event, forgotten event by event."""

    def __init__(self, family: str, listener: Listener | None) -> None:
        self._judge = Judge(family)
        self._listener = listener
        self._bytes_max = EVENT_BYTES_MAX if listener is None else KEPT_BYTES_MAX
        self._reader = EventReader(self._bytes_max)

    def feed(self, data: bytes) -> Verdict | None:
        try:
            events = self._reader.feed(data)
        except EventTooLarge:
            self._reader = EventReader(self._bytes_max)
            return None
        for event in events:
            if (verdict := self._read(event)) is not None:
                return verdict
        return None

    def end(self) -> Verdict:
        rest = self._reader.take_rest()
        return (self._read(rest + b"\n\n") if rest else None) or GOOD

    def _read(self, event: bytes) -> Verdict | None:
        judge = self._judge
        sign = judge.read(event)
        if sign is Sign.ERROR:
            answer = Answer(judge.error_status, _JSON, nest_error(judge.error_body))
            return _judged(answer, "error_event")
        # `[DONE]` without a finish is a lie of decode's only: nothing hangs on prefill's.
        if sign is Sign.LIE and not judge.done:
            return Verdict("lied", "gave_up", prefill_failed())
        if self._listener is not None and (data := data_of(event)) is not None:
            self._listener.read(data)
        return None


class _WholeReading:
    """A whole answer, kept for what is taken over from it."""

    def __init__(self, family: str, handoff: Handoff, listener: Listener | None) -> None:
        self._family = family
        self._handoff = handoff
        self._listener = listener
        self._kept = _Kept()

    def feed(self, data: bytes) -> Verdict | None:
        self._kept.feed(data)
        return None

    def end(self) -> Verdict:
        body = b"".join(self._kept.pieces)
        found = judge_whole(self._family, body)
        if found.error_status:
            answer = Answer(found.error_status, _JSON, nest_error(found.error_body))
            return _judged(answer, "error_event")
        if found.lies:
            return Verdict("lied", "gave_up", prefill_failed())
        if self._listener is not None:
            self._listener.read(body)
        if self._handoff == "none":
            return GOOD
        handoff = handoff_of(body)
        if handoff is None and self._handoff == "required":
            return Verdict("lied", "no_handoff", prefill_failed())
        return Verdict("completed", handoff=handoff)
