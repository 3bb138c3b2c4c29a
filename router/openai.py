"""What Baton reads of OpenAI-shaped requests and answers, and nothing more.

Requests and events are decoded partially and typed: a field nobody reads is skipped without an
object being built for it. `Judge` follows one stream and says of every complete event whether it
is content, an end, or an end that lies. It never changes an event.

Sources: vLLM 0.32 and SGLang 0.5.23 as recorded, and their published schemas.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum

import msgspec

from router.errors import Refusal
from router.sse import data_of

#: Finish reasons by which an engine says that it gave up: vLLM sends `abort` on shutdown and
#: documents `error` as an internal failure; SGLang sends `abort` for /abort_request.
LYING_FINISHES = frozenset({"abort", "error"})
#: Statuses of a worker that has no room now.
BUSY = frozenset({429, 503})


class Asked(msgspec.Struct):
    """The fields of a request that routing depends on."""

    model: str | None = None
    stream: bool | None = None


_ASKED = msgspec.json.Decoder(Asked)


def read_request(body: bytes) -> Asked | Refusal:
    """What a JSON request asks for, or why it cannot be routed."""
    try:
        return _ASKED.decode(body)
    except msgspec.ValidationError as error:
        return Refusal("bad_request", f"The request body does not fit: {error}", _param(error))
    except msgspec.DecodeError as error:
        return Refusal("bad_request", f"The request body is not JSON: {error}")
    except RecursionError:
        return Refusal("bad_request", "The request body is nested too deeply.")


def _param(error: msgspec.ValidationError) -> str | None:
    # msgspec ends its message with "at `$.field`". The wording is its own: nothing depends on it.
    _, found, path = str(error).rpartition("`$.")
    return path.rstrip("`") if found else None


class Sign(Enum):
    """What one event of a stream means for the request."""

    #: No data at all: a comment or a bare field. It proves nothing.
    COMMENT = "comment"
    #: Data, but nothing to read yet: a role chunk, an empty delta, usage.
    PREAMBLE = "preamble"
    CONTENT = "content"
    #: `[DONE]` after an honest finish: the stream ended well.
    DONE = "done"
    #: `[DONE]` without a finish, or a finish by which the engine says that it gave up.
    LIE = "lie"
    #: An error event: `Judge.error_status` says which.
    ERROR = "error"


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    finish_reason: str | None = None
    text: str | None = None
    delta: _Delta | None = None


class _RareChoice(msgspec.Struct, gc=False):
    delta: dict[str, msgspec.Raw] | None = None


class _RareChunk(msgspec.Struct, gc=False):
    choices: list[_RareChoice] = []


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


#: Absent. `Raw | None` would be read as `None` only, so that every error event was unreadable.
_ABSENT = msgspec.Raw(b"")


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    error: msgspec.Raw = _ABSENT
    usage: _Usage | None = None


class _AnyEvent(msgspec.Struct, gc=False):
    error: msgspec.Raw = _ABSENT


class _GenerateFinish(msgspec.Struct, gc=False):
    type: str = ""


class _GenerateMeta(msgspec.Struct, gc=False):
    finish_reason: _GenerateFinish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _GenerateChunk(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    output_ids: list[int] | None = None
    meta_info: _GenerateMeta | None = None
    error: msgspec.Raw = _ABSENT


class _ErrorObject(msgspec.Struct, gc=False):
    object: str | None = None
    code: int | str | None = None
    status_code: int | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)
_RARE = msgspec.json.Decoder(_RareChunk)
_GENERATE = msgspec.json.Decoder(_GenerateChunk)
_ANY = msgspec.json.Decoder(_AnyEvent)
_ERROR = msgspec.json.Decoder(_ErrorObject)
_NULL = (b"null", b'""')
#: How msgspec (0.23) says that JSON ends too early; a test holds it to that.
_TRUNCATED = "truncated"
_NO_ERROR = (b"", b"null", b"false", b'""')


#: The inside of a JSON string, not empty, on one line.
_STRING = re.compile(rb'(?:[^"\\\r\n]++|\\[^\r\n])++').fullmatch
_STRING_MEMBERS = (b'"content":"', b'"text":"', b'"content": "', b'"text": "')
#: Events that were not alike after which one more is taken as the pattern.
_PATIENCE = 32


class Judge:
    """Follows the events of one stream of one endpoint.

    `family` is "openai" (chat and completions: choices, finish reasons, `[DONE]`), "generate"
    (SGLang's own) or "other", of which only error events are known.

    Most events of a stream differ from the one before in their text alone. One of them is kept as
    the pattern, by what stands before and behind its text, and events that fit it are known to be
    content without being decoded. That the bytes between really are the text is not guessed: the
    pattern is decoded with another text in that place, and must then say so.
    """

    __slots__ = (
        "_before",
        "_behind",
        "_finished",
        "_learned_at",
        "_patience",
        "_read",
        "_seen",
        "completion_tokens",
        "done",
        "due",
        "error_body",
        "error_status",
        "events",
        "finished",
        "has_finish",
        "prompt_tokens",
    )

    def __init__(self, family: str) -> None:
        self._read = {"openai": self._read_chunk, "generate": self._read_generate}.get(
            family, self._read_other
        )
        self._seen: set[int] = set()
        self._finished: set[int] = set()
        #: True once every choice seen has an honest finish reason.
        self.finished = False
        #: The streams of this family have a finish; of others only the framing tells a good end.
        self.has_finish = family in ("openai", "generate")
        self.done = False
        #: How many choices the answer must have before its `[DONE]` is believed.
        self.due: Callable[[], int] = _one
        #: Events that carried content.
        self.events = 0
        self.error_status = 0
        self.error_body = b""
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        #: The pattern: what stands before its text, and what behind; empty when there is none.
        self._before = self._behind = b""
        self._learned_at = self._patience = 0

    @property
    def choices(self) -> int:
        """How many choices were seen."""
        return len(self._seen)

    @property
    def is_whole(self) -> bool:
        """Every choice has an honest finish, those that were never seen included."""
        return self.finished and len(self._seen) >= self.due()

    def is_another(self, event: bytes) -> bool:
        """Whether this is one complete event, and content, just like one read before."""
        before, behind = self._before, self._behind
        if (
            before
            and event.startswith(before)
            and event.endswith(behind)
            and _STRING(event, len(before), len(event) - len(behind))
        ):
            self.events += 1
            return True
        return False

    def read(self, event: bytes) -> Sign:
        """What this complete raw event means."""
        if self._before and self.is_another(event):
            return Sign.CONTENT
        data = data_of(event)
        if data is None:
            return Sign.COMMENT
        if data.startswith(b"[DONE]"):
            self.done = True
            return Sign.DONE if self.is_whole or not self.has_finish else Sign.LIE
        try:
            sign = self._read(data)
        except (msgspec.DecodeError, RecursionError):
            # An event nobody can read is forwarded untouched; it proves that something came.
            sign = Sign.CONTENT
        if sign is Sign.CONTENT:
            self.events += 1
        return sign

    def _read_chunk(self, data: bytes) -> Sign:
        chunk = _CHUNK.decode(data)
        if chunk.error is not _ABSENT and self._meet_error(data, chunk.error):
            return Sign.ERROR
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens
            self.completion_tokens = chunk.usage.completion_tokens
        sign, choices = Sign.PREAMBLE, chunk.choices
        if choices is None:
            return Sign.ERROR if self._meet_flat_error(data) else sign
        for choice in choices:
            if choice.index not in self._seen:
                self._see(choice.index)
            if choice.finish_reason:
                if choice.finish_reason in LYING_FINISHES:
                    return Sign.LIE
                self._finish(choice.index)
            if choice.text or (choice.delta is not None and choice.delta.content):
                sign = Sign.CONTENT
                if self._patience:
                    self._patience -= 1
                else:
                    self._learn(data, chunk)
        if sign is Sign.PREAMBLE and choices and _has_other_content(data):
            return Sign.CONTENT
        return sign

    def _learn(self, data: bytes, chunk: _Chunk) -> None:
        """Take this event with content as the pattern, if it proves to be one."""
        # Where the last pattern fitted nothing, as with several choices in turn, learning is rare.
        self._patience = _PATIENCE if self.events <= self._learned_at + 1 else 0
        self._learned_at = self.events
        self._before = b""
        for member in _STRING_MEMBERS:
            start = data.find(member) + len(member)
            end = data.find(b'"', start)
            if start < len(member) or end <= start or b"\n" in data:
                continue
            before, behind = data[:start], data[end:]
            if _says(before + b"0" + behind, "0", chunk):
                self._before, self._behind = b"data: " + before, behind + b"\n\n"

    def _read_generate(self, data: bytes) -> Sign:
        chunk = _GENERATE.decode(data)
        if chunk.error is not _ABSENT and self._meet_error(data, chunk.error):
            return Sign.ERROR
        if chunk.text is None and self._meet_flat_error(data):
            return Sign.ERROR
        if chunk.index not in self._seen:
            self._see(chunk.index)
        if (meta := chunk.meta_info) is not None:
            self.prompt_tokens, self.completion_tokens = meta.prompt_tokens, meta.completion_tokens
            if meta.finish_reason is not None:
                if meta.finish_reason.type in LYING_FINISHES:
                    return Sign.LIE
                self._finish(chunk.index)
        return Sign.CONTENT if chunk.text or chunk.output_ids else Sign.PREAMBLE

    def _read_other(self, data: bytes) -> Sign:
        if b'"error"' in data:
            chunk = _ANY.decode(data)
            if self._meet_error(data, chunk.error) or self._meet_flat_error(data):
                return Sign.ERROR
        return Sign.CONTENT

    def _see(self, index: int) -> None:
        self._seen.add(index)
        self.finished = False  # whatever has finished before: this choice has not

    def _finish(self, index: int) -> None:
        self._finished.add(index)
        self.finished = self._finished == self._seen

    def _meet_error(self, data: bytes, error: msgspec.Raw) -> bool:
        if bytes(error) in _NO_ERROR:
            return False
        self.error_status = _status_of(bytes(error))
        self.error_body = data
        return True

    def _meet_flat_error(self, data: bytes) -> bool:
        """SGLang's form of an error without a wrapper; clients take such an event for success."""
        if b'"error"' not in data or _ERROR.decode(data).object != "error":
            return False
        self.error_status = _status_of(data)
        self.error_body = data
        return True


def _one() -> int:
    return 1


def _says(data: bytes, text: str, like: _Chunk) -> bool:
    """Whether this is a chunk that says nothing but a text, for the same choice as `like`."""
    try:
        chunk = _CHUNK.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    if chunk.error is not _ABSENT or chunk.usage is not None or like.usage is not None:
        return False
    if not chunk.choices or not like.choices or len(chunk.choices) > 1:
        return False
    choice = chunk.choices[0]
    content = choice.text if choice.delta is None else choice.delta.content
    is_same = choice.index == like.choices[0].index
    return content == text and is_same and not choice.finish_reason


def _has_other_content(data: bytes) -> bool:
    """Whether a delta without `content` holds anything but a role: reasoning, tool calls, audio."""
    return any(
        name != "role" and bytes(value) not in _NULL
        for choice in _RARE.decode(data).choices
        for name, value in (choice.delta or {}).items()
    )


def _status_of(error: bytes) -> int:
    try:
        found = _ERROR.decode(error)
    except (msgspec.DecodeError, RecursionError):
        return 500  # {"error": "text"}: nobody's fault but the worker's
    for code in (found.code, found.status_code):
        if isinstance(code, str) and code.isascii() and code.isdigit():
            code = int(code[:4])
        if isinstance(code, int) and 400 <= code <= 599:
            return code
    return 500


class _Answer(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = _ABSENT
    object: str | None = None


class _Generated(msgspec.Struct, gc=False):
    meta_info: _GenerateMeta | None = None
    error: msgspec.Raw = _ABSENT
    object: str | None = None


_ANSWER = msgspec.json.Decoder(_Answer)
_GENERATED = msgspec.json.Decoder(_Generated)
_GENERATED_BATCH = msgspec.json.Decoder(list[_Generated])


class UnaryVerdict(msgspec.Struct):
    """What a whole unary answer says."""

    lies: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    #: Of an error inside a 2xx; 0 where there is none.
    error_status: int = 0
    #: It lies since there is less of it than its framing said.
    is_short: bool = False


def judge_answer(family: str, body: bytes) -> UnaryVerdict:
    """Read a whole unary answer: its usage, and whether an engine gave up or failed inside a 200.

    JSON that ends too early is no whole answer, however well its framing ended.

    vLLM 0.32 answers 200 with `finish_reason: "abort"` for requests cut by a shutdown. Of other
    families (responses that tell of an earlier failure, say) nothing is judged.
    """
    try:
        if family == "openai":
            return _judge_choices(body)
        return _judge_generated(body) if family == "generate" else UnaryVerdict()
    except msgspec.DecodeError as error:
        # Where its framing is the end of the connection, nothing else tells that it was cut.
        is_short = body.lstrip()[:1] in (b"{", b"[") and _TRUNCATED in str(error)
        return UnaryVerdict(lies=is_short, is_short=is_short)
    except RecursionError:
        return UnaryVerdict()


def _judge_choices(body: bytes) -> UnaryVerdict:
    answer = _ANSWER.decode(body)
    usage = answer.usage or _Usage()
    return UnaryVerdict(
        any(choice.finish_reason in LYING_FINISHES for choice in answer.choices or ()),
        usage.prompt_tokens,
        usage.completion_tokens,
        _error_in(answer, body),
    )


def _judge_generated(body: bytes) -> UnaryVerdict:
    """SGLang's `/generate` answers a batch with a list."""
    is_batch = body.lstrip().startswith(b"[")
    items = _GENERATED_BATCH.decode(body) if is_batch else [_GENERATED.decode(body)]
    finishes = [each.meta_info.finish_reason for each in items if each.meta_info is not None]
    return UnaryVerdict(
        lies=any(each is not None and each.type in LYING_FINISHES for each in finishes),
        error_status=next(filter(None, (_error_in(each, body) for each in items)), 0),
    )


def _error_in(answer: _Answer | _Generated, body: bytes) -> int:
    """The status of an error that stands where an answer should; 0 where there is none."""
    if bytes(answer.error) not in _NO_ERROR:
        return _status_of(bytes(answer.error))
    return _status_of(body) if answer.object == "error" else 0
