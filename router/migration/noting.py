"""What one chunk brings into the record.

Runs for every token of a stream that may move, so it reads typed chunks only and keeps no more than
a continuation needs. It changes the record and nothing else.
"""

from __future__ import annotations

from router.migration.agreement import releases_all
from router.migration.chunks import (
    Choice,
    Chunk,
    Delta,
    Usage,
    choices_of,
    decode,
    encode,
    has_other_content,
    is_empty,
)
from router.migration.poison import Poison
from router.migration.record import Record
from router.migration.seam import head_of
from router.openai import Judge

#: So many tokens at the end of an answer of SGLang's may have come without an event.
SILENT_TOKENS_MAX = 4


class Noting(Judge):
    """Judges the events of one attempt and notes what they bring."""

    __slots__ = (
        "_has_ids",
        "_is_chat",
        "_is_fresh",
        "_is_vllm",
        "_proves",
        "base",
        "engine",
        "record",
    )

    def __init__(self, record: Record, engine: str, *, is_fresh: bool) -> None:
        super().__init__("openai")
        self.record = record
        self.engine = engine
        #: Tokens before this attempt.
        self.base = record.tokens
        #: The prompt that the worker reports is the client's.
        self._is_fresh = is_fresh
        #: This attempt's events have ids.
        self._has_ids = False
        self._is_chat = record.shape.endpoint == "chat"
        self._is_vllm = engine == "vllm"
        # vLLM holds text back while there are stop strings; SGLang holds ids and text together.
        holds = self._is_vllm and bool(record.shape.stops)
        #: With one id and its text, an event can prove that both agree.
        self._proves = not holds and not record.has_parser

    def _note(self, chunk: Chunk, choice: Choice, text: str | None) -> int:
        """Keep what a continuation needs. How many of the ids the client has already, or -1."""
        record, ids, usage, skip = self.record, choice.token_ids, chunk.usage, 0
        prompt = choice.prompt_token_ids
        if prompt is not None or chunk.prompt_token_ids is not None:
            self._take_prompt(prompt or chunk.prompt_token_ids or [])
        if ids is not None:
            if record.replay and (skip := self._repeated(ids)) < 0:
                return skip
            self._has_ids |= bool(ids)
            record.tokens += len(ids)
            if record.is_exact:
                record.add_ids(ids)
        if usage is not None:
            self._take_usage(usage, has_ids=ids is not None)
        if choice.index:
            record.spoil(Poison.SEVERAL_CHOICES)
        if text:
            if ids is None:
                self._meet_text_without_ids(is_counted=usage is not None)
            record.tokens_at_text = record.tokens
            if record.is_kept:
                record.add_text(text)
                is_single = self._proves and ids is not None and len(ids) == 1
                if is_single and record.is_exact and (self._is_vllm or releases_all(text)):
                    record.agree()
        if record.tokens > record.room and record.is_kept:
            record.outgrow()
        return skip

    def _look_closer(self, data: bytes, delta: Delta, ids: list[int] | None) -> bool:
        """Whether a delta holds more than text, which nobody can continue."""
        record = self.record
        if delta.reasoning or delta.reasoning_content:
            record.spoil(Poison.REASONING)
        elif not is_empty(delta.tool_calls):
            record.spoil(Poison.TOOL_CALL)
        elif has_other_content(data):
            record.spoil(Poison.OTHER_CONTENT)
        else:
            if ids and delta.content is None:
                record.has_parser, self._proves = True, False
            return False
        return True

    def _meet_finish(self, finish: str, data: bytes, chunk: Chunk, choice: Choice) -> None:
        record = self.record
        record.finish = finish
        if self._is_chat and choice.token_ids is None and chunk.usage is None:
            # SGLang's finish has no usage; the token that stopped it is counted in the last chunk.
            found = choices_of(decode(data) or {})
            stopped_by = found[0].get("matched_stop") if found else None
            if type(stopped_by) is int:
                record.tokens += 1
            elif finish == "length" and self.engine == "sglang":
                # Its last tokens may have had no text; more than a few are another limit.
                rest = record.rest() or 0
                record.tokens += rest if 0 < rest <= SILENT_TOKENS_MAX else 0
            record.is_miscounted = isinstance(stopped_by, str)

    def _meet_first(self, event: bytes, data: bytes) -> None:
        record = self.record
        record.first, record.head, record.engine = data, head_of(event), self.engine

    def _take_prompt(self, prompt: list[int]) -> None:
        record = self.record
        if self._is_fresh:
            record.learn_prompt(len(prompt))
        if record.prompt_json is None and record.is_exact:
            record.prompt_json = encode(prompt)

    def _take_usage(self, usage: Usage, *, has_ids: bool) -> None:
        record, mine = self.record, usage.completion_tokens
        if self._is_fresh and usage.prompt_tokens is not None:
            record.learn_prompt(usage.prompt_tokens)
            if not is_empty(usage.prompt_tokens_details):
                record.prompt_details = bytes(usage.prompt_tokens_details)
        if mine is None:
            return
        if not has_ids:
            record.tokens = self.base + mine
        elif self.base + mine != record.tokens and record.is_exact and record.finish is None:
            record.lose_exactness()  # tokens were swallowed whose ids nobody told

    def _meet_text_without_ids(self, *, is_counted: bool) -> None:
        record, shape = self.record, self.record.shape
        if record.is_exact:
            record.lose_exactness()
        if not is_counted:
            record.tokens += 1
            if shape.budget is not None or shape.min_tokens or shape.asks_usage:
                record.spoil(Poison.UNCOUNTED)

    def _repeated(self, ids: list[int]) -> int:
        """How many of these ids the client has already; -1 where others had to come."""
        replay = self.record.replay
        count = min(len(ids), len(replay))
        if ids[:count] != replay[:count]:
            return -1
        del replay[:count]
        return count
