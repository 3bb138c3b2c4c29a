"""Another worker's events as the continuation of the stream the client knows.

One id, created, model and role; text that was held back, stop strings across the seam, ids and
logprobs that the client has already, usage over all attempts. Events at the seam are decoded and
written anew; once nothing is special any more only their first bytes are exchanged.
"""

from __future__ import annotations

import msgspec
from attrs import define, field

from router.migration.asking import Asking
from router.migration.chunks import Json, choices_of, decode, encode, with_data
from router.migration.closing import usage_of
from router.migration.record import Record
from router.migration.stops import StopSeam

_LIST_MEMBERS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_CHOICES = b'"choices":['
_WANTED = ("id", "object", "created", "model")
_FINGERPRINT = "system_fingerprint"


@define(eq=False)
class Seam:
    """One resumed attempt, on its way to the client."""

    record: Record
    asking: Asking
    #: SGLang writes `"usage":null` in completions, vLLM `null` for ids that were not asked for.
    engine: str
    stops: StopSeam
    #: Tokens before this attempt.
    base: int
    #: The first bytes of this attempt's events, once they are known.
    _head: bytes | None = None
    _offset_shift: int | None = None
    _identity: Json = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._identity = self.record.identity()

    @property
    def head(self) -> bytes | None:
        """The first bytes of an event, where no more than these have to be exchanged."""
        return None if not self.stops.is_done or self.record.replay else self._head

    def quick(self, event: bytes) -> bytes | None:
        """An event in the middle of things with another head, or None where that is not enough."""
        head, known = self.head, self.record.head
        if head is None or known is None or not event.startswith(head):
            return None
        return known + event[len(head) :]

    def rewrite(self, event: bytes, data: bytes, *, skip: int) -> bytes:
        """An event as the client is to see it; empty when nothing of it is for the client.

        `skip` of its tokens the client has already.
        """
        chunk = decode(data)
        if chunk is None:
            return event
        if self._head is None:
            self._head = head_of(event)
        self._rename(chunk)
        had_usage = chunk.get("usage") is not None
        self._fix_usage(chunk)
        choices = choices_of(chunk)
        if not choices:
            return self._rest(event, chunk, had_usage)
        is_empty = [self._fix_choice(choice, skip) for choice in choices]
        if all(is_empty):
            return b""
        return with_data(event, encode(chunk))

    def _rename(self, chunk: Json) -> None:
        for name in (*_WANTED, _FINGERPRINT):
            if name in chunk and name in self._identity:
                chunk[name] = self._identity[name]
        self._drop_prompt(chunk, -1)

    def _drop_prompt(self, holder: Json, index: int) -> None:
        """Prompt ids, unless they are the first that the client is given for this index."""
        if self.asking.ids or index in self.record.prompts_given:
            self._drop_ids(holder, "prompt_token_ids")
        elif holder.get("prompt_token_ids") is not None:
            self.record.prompts_given.add(index)

    def _drop_ids(self, holder: Json, name: str) -> None:
        if holder.get(name) is None:
            return
        if self.engine == "vllm":
            holder[name] = None
        else:
            del holder[name]

    def _rest(self, event: bytes, chunk: Json, had_usage: bool) -> bytes:
        """A chunk without choices: usage, or what only some engines send."""
        if had_usage and chunk.get("usage") is None:
            return b""
        self.record.gave_usage |= had_usage
        return with_data(event, encode(chunk))

    #### choices

    def _fix_choice(self, choice: Json, skip: int) -> bool:
        """Make a choice fit; whether nothing is left in it that the client has to see."""
        delta = choice.get("delta")
        holder, name = (delta, "content") if isinstance(delta, dict) else (choice, "text")
        was_role = isinstance(delta, dict) and self._drop_role(choice, delta)
        text = holder.get(name)
        shown = self._pass_text(text or "", bool(choice.get("finish_reason")))
        if shown or isinstance(text, str):
            holder[name] = shown
        if self.stops.hit is not None:
            self._stop(choice)
        shows_tokens = self._fix_tokens(choice, skip)
        index = choice.get("index", 0)
        self._drop_prompt(choice, index if isinstance(index, int) else 0)
        if shown or shows_tokens or choice.get("finish_reason"):
            return False
        if isinstance(delta, dict) and any(delta.values()):
            return False
        return was_role or bool(text) or skip > 0 or delta == {}

    def _drop_role(self, choice: Json, delta: Json) -> bool:
        index = choice.get("index", 0)
        if "role" not in delta or not isinstance(index, int):
            return False
        if index not in self.record.roles:
            self.record.roles.add(index)
            return False
        del delta["role"]
        return True

    def _pass_text(self, text: object, is_last: bool) -> str:
        record = self.record
        if not isinstance(text, str):
            return ""
        # vLLM spares the first `min_tokens` tokens, SGLang looks for stop strings in all of them.
        may_stop = self.engine != "vllm" or record.tokens > record.shape.min_tokens
        shown = self.stops.feed(text, is_last=is_last, may_stop=may_stop)
        record.waiting = self.stops.waiting
        return shown

    def _stop(self, choice: Json) -> None:
        """A stop string was completed across the seam."""
        choice["finish_reason"] = "stop"
        name = "matched_stop" if "matched_stop" in choice else "stop_reason"
        choice[name] = self.stops.hit

    def _fix_tokens(self, choice: Json, skip: int) -> bool:
        """Ids and logprobs without those the client has; whether any new ones are shown."""
        shape, ids = self.record.shape, choice.get("token_ids")
        shown = False
        if isinstance(ids, list):
            if self.asking.ids:
                self._drop_ids(choice, "token_ids")
            else:
                choice["token_ids"] = ids[skip:]
                shown = bool(ids[skip:])
        logprobs = choice.get("logprobs")
        if shape.asks_logprobs and isinstance(logprobs, dict):
            shown |= self._fix_logprobs(logprobs, skip)
        return shown

    def _fix_logprobs(self, logprobs: Json, skip: int) -> bool:
        content = logprobs.get("content")
        if isinstance(content, list):
            logprobs["content"] = content[skip:]
            return bool(content[skip:])
        for name in _LIST_MEMBERS:
            values = logprobs.get(name)
            if isinstance(values, list):
                logprobs[name] = values[skip:]
        offsets = logprobs.get("text_offset")
        if not isinstance(offsets, list) or not offsets:
            return False
        if self._offset_shift is None:
            self._offset_shift = offset_after(self.record) - offsets[0]
        # SGLang knows no offsets and writes -1.
        shift = self._offset_shift
        logprobs["text_offset"] = [at if at < 0 else at + shift for at in offsets]
        return True

    #### usage

    def _fix_usage(self, chunk: Json) -> None:
        usage = chunk.get("usage")
        if not isinstance(usage, dict):
            return
        shape = self.record.shape
        is_asked = shape.asks_continuous_usage if choices_of(chunk) else shape.asks_usage
        if is_asked:
            chunk["usage"] = self._merge(usage, is_last=not choices_of(chunk))
        elif choices_of(chunk) and self.engine == "sglang" and shape.endpoint == "completions":
            chunk["usage"] = None
        else:
            del chunk["usage"]

    def _merge(self, usage: Json, *, is_last: bool) -> Json:
        """Usage of this attempt as usage of the whole generation."""
        record, mine = self.record, usage.get("completion_tokens")
        tokens = self.base + mine if isinstance(mine, int) else record.tokens
        if not is_last:
            tokens = max(tokens, record.tokens_shown)
        merged = usage | usage_of(record)
        if record.prompt_tokens is None and isinstance(usage.get("prompt_tokens"), int):
            merged["prompt_tokens"] = usage["prompt_tokens"]
        prompt = merged["prompt_tokens"]
        assert isinstance(prompt, int)
        merged |= {"completion_tokens": tokens, "total_tokens": prompt + tokens}
        if merged.get("prompt_tokens_details") is not None:
            known = record.prompt_details
            merged["prompt_tokens_details"] = None if known is None else msgspec.Raw(known)
        return merged


def head_of(event: bytes) -> bytes | None:
    """An event up to its choices, where nothing but the stream's identity stands there."""
    end = event.find(_CHOICES)
    if end < 0 or not event.startswith(b"data: {"):
        return None
    chunk = decode(event[6:end] + b'"choices":[]}')
    if chunk is None or not set(chunk) <= {*_WANTED, "choices", _FINGERPRINT}:
        return None
    return event[:end]


def offset_after(record: Record) -> int:
    """Where in the text the token after the last delivered one begins, as logprobs count it."""
    chunk = decode(record.last_logprobs or b"") or {}
    for choice in choices_of(chunk):
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            offsets, tokens = logprobs.get("text_offset"), logprobs.get("tokens")
            if isinstance(offsets, list) and isinstance(tokens, list) and offsets and tokens:
                return int(offsets[-1]) + len(str(tokens[-1]))
    return 0
