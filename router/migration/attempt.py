"""One worker's events, read into the record and made ready for the client.

An `Attempt` stands in the place of `router.openai.Judge` and gives the same signs; beside them it
leaves in `forward` what the client is to be sent for the event just read: the original bytes where
nothing has to change. What the router asked for is taken out in every state, also of streams that
can no longer move. An event is decoded once.
"""

from __future__ import annotations

import msgspec

from router.migration.asking import Asking
from router.migration.chunks import (
    ABSENT,
    CHUNK,
    Choice,
    Chunk,
    Usage,
    has_other_content,
    strip_ids,
    strip_ids_slowly,
    strip_usage,
)
from router.migration.closing import DONE, usage_event
from router.migration.poison import Poison
from router.migration.record import Record
from router.migration.seam import Seam
from router.migration.settling import CONTEXT_IDS, Unsettled
from router.migration.skimming import Skimming
from router.openai import LYING_FINISHES, Sign
from router.sse import data_of

#: Poison of requests whose answer has several choices.
_SEVERAL = frozenset({Poison.SEVERAL_CHOICES, Poison.BEAM_SEARCH, Poison.BATCH_PROMPT})


class Attempt(Skimming):
    """The first attempt of a record, or with a `seam` one that goes on with it.

    `expected`: ids that the engine has to report as its prompt, or how many; else it worked from
    something other than it was sent, and nothing of it may reach the client.
    """

    __slots__ = (
        "_expected",
        "_unproven",
        "is_cut_short",
        "is_unfaithful",
        "seam",
        "unsettled",
    )

    def __init__(
        self,
        record: Record,
        engine: str,
        asking: Asking,
        *,
        seam: Seam | None = None,
        expected: list[int] | int | None = None,
        is_fresh: bool = True,
    ) -> None:
        super().__init__(record, engine, asking, is_fresh=is_fresh)
        self.seam = seam
        #: The answer was ended here (a stop string across the seam): the worker is to be let go.
        self.is_cut_short = False
        #: The worker did not go on with what it was sent; the same form is not to be tried again.
        self.is_unfaithful = False
        #: The answer ended here, inside an event; how many of its tokens count has to be asked.
        self.unsettled: Unsettled | None = None
        self._expected = expected
        #: A finish that came before the worker told its prompt.
        self._unproven: tuple[bytes, bytes, Chunk] | None = None

    def read(self, event: bytes) -> Sign:
        """What this complete raw event means; what to forward of it is in `forward`."""
        if self.skims and self.skim(event):
            return Sign.CONTENT
        self.forward = event
        data = data_of(event)
        if data is None:
            return Sign.COMMENT
        if data.startswith(b"[DONE]"):
            return self._meet_done()
        try:
            chunk = CHUNK.decode(data)
        except msgspec.ValidationError:
            return self._read_leniently(event)
        except (msgspec.DecodeError, RecursionError):
            return self._meet_unreadable()
        choices = chunk.choices
        if choices is not None and len(choices) == 1 and chunk.error is ABSENT:
            return self._read_choice(event, data, chunk, choices[0])
        return self._read_typed(event, data, chunk)

    def _read_typed(self, event: bytes, data: bytes, chunk: Chunk) -> Sign:
        if chunk.error is not ABSENT and self._meet_error(data, chunk.error):
            self.forward = b""
            return Sign.ERROR
        choices = chunk.choices
        if choices is not None and len(choices) == 1:
            return self._read_choice(event, data, chunk, choices[0])
        if choices:
            return self._read_several(event, data, choices)
        return self._read_rest(event, data, chunk)

    #### chunks with one choice: all that matter

    def _read_choice(self, event: bytes, data: bytes, chunk: Chunk, choice: Choice) -> Sign:
        record, finish, delta = self.record, choice.finish_reason, choice.delta
        if choice.index not in self._seen:
            self._see(choice.index)
        if finish and finish in LYING_FINISHES:
            self.forward = b""
            return Sign.LIE
        if self._expected is not None and not self._is_faithful(chunk, choice):
            if not finish or choice.text or (delta is not None and delta.content):
                return self._meet_unfaithful()
            # The usage that proves it comes after the finish of an empty answer.
            self._unproven, self.forward = (event, data, chunk), b""
            return Sign.PREAMBLE
        if finish:
            self._finish(choice.index)
        if record.first is None:
            self._meet_first(event, data)
        text, has_more = choice.text, False
        if delta is not None:
            text = delta.content
            if (
                not text
                or delta.tool_calls is not ABSENT
                or delta.reasoning
                or delta.reasoning_content
            ):
                has_more = self._look_closer(data, delta, choice.token_ids)
        skip = 0
        if record.poison is None and (skip := self._note(chunk, choice, text)) < 0:
            return self._meet_unfaithful()
        if finish and self.finished:
            self._meet_finish(finish, data, chunk, choice)
        if self.seam is None:
            self._prepare(event, data, chunk, choice, has_more)
        else:
            self._cross(self.seam, event, data, chunk, choice, skip)
        if self.unsettled is not None:
            return Sign.LIE
        if not text and not has_more and not (finish and self._is_of_several()):
            return Sign.DONE if self.is_cut_short else Sign.PREAMBLE
        record.has_content = True
        self.events += 1
        if self.is_cut_short:
            return Sign.DONE
        if self.patience:
            self.patience -= 1
        else:
            self._try_to_learn(event)
        return Sign.CONTENT

    def _is_of_several(self) -> bool:
        """The end of one of several choices is no preamble: made again, it would come twice."""
        return self.record.poison in _SEVERAL or not self.is_whole

    def _try_to_learn(self, event: bytes) -> None:
        """Once nothing is watched for any more that a plain event could have."""
        self.lose_patience()
        record, head = self.record, self.record.head
        if self._expected is not None or record.replay or record.shape.asks_logprobs:
            return
        own = head if self.seam is None else self.seam.head
        if own is not None and head is not None:
            self.learn(event, own, head, is_resumed=self.seam is not None)

    def _prepare(
        self, event: bytes, data: bytes, chunk: Chunk, choice: Choice, has_more: bool
    ) -> None:
        """Leave in `forward` what the client is to see of an event of the first attempt."""
        record, delta, asking = self.record, choice.delta, self.asking
        if record.shape.shows_tokens:
            self._keep_shown(data, chunk, choice)
        if delta is not None:
            if delta.role is not None:
                record.roles.add(choice.index)
            elif asking.ids and delta.content is None and not has_more and _is_swallowed(choice):
                self.forward = b""
                return
        if asking.ids:
            event = self._without_ids(event, chunk, choice)
        if asking.usage and chunk.usage is not None:
            event = strip_usage(event, to_null=not self._is_vllm and not self._is_chat)
        self.forward = event

    def _without_ids(self, event: bytes, chunk: Chunk, choice: Choice) -> bytes:
        if choice.prompt_token_ids is not None or chunk.prompt_token_ids is not None:
            stripped = strip_ids_slowly(event, to_null=self._is_vllm)
            self.record.first = data_of(stripped)  # without the prompt, which may be long
            return stripped
        if choice.token_ids is None:
            return event
        stripped = strip_ids(event, to_null=self._is_vllm)
        return stripped if stripped is not event else strip_ids_slowly(event, to_null=self._is_vllm)

    def _cross(
        self, seam: Seam, event: bytes, data: bytes, chunk: Chunk, choice: Choice, skip: int
    ) -> None:
        """The same for an attempt that goes on with the stream of another."""
        record, delta = self.record, choice.delta
        is_plain = (
            not skip
            and not choice.finish_reason
            and chunk.usage is None
            and not record.shape.asks_logprobs
            and (choice.prompt_token_ids or chunk.prompt_token_ids) is None
            and (delta is None or (delta.role is None and delta.content is not None))
        )
        if is_plain:
            plain = self._without_ids(event, chunk, choice) if self.asking.ids else event
            if (quick := seam.quick(plain)) is not None:
                self.forward = quick
                return
        self.forward = seam.rewrite(event, data, skip=skip)
        if record.shape.asks_logprobs and self.forward:
            self._keep_logprobs(data_of(self.forward) or b"")
        if seam.stops.hit is not None:
            self.finished, record.finish = True, "stop"
            if (unsettled := self._unsettle(seam, choice)) is not None:
                self.unsettled, self.forward = unsettled, b""
                return
            self.is_cut_short = True
            self.forward += usage_event(record) + DONE

    def _unsettle(self, seam: Seam, choice: Choice) -> Unsettled | None:
        """What has to be asked, where the client would see tokens from after the stop string."""
        record, ids, delta = self.record, choice.token_ids, choice.delta
        shape, text = record.shape, (choice.text if delta is None else delta.content) or ""
        is_seen = shape.shows_tokens or shape.asks_usage
        if not ids or len(ids) < 2 or not seam.stops.surplus or not is_seen:
            return None
        if not record.is_exact or record.prompt_ids is None:
            return None
        before = record.prompt_ids[-CONTEXT_IDS:] + record.ids[: -len(ids)]
        return Unsettled(
            self.forward,
            ids=tuple(ids),
            context=tuple(before[-CONTEXT_IDS:]),
            text=text[: len(text) - seam.stops.surplus],
        )

    def _is_faithful(self, chunk: Chunk, choice: Choice) -> bool:
        """Whether the worker's prompt is what it was sent; true while it has not told."""
        expected = self._expected
        if isinstance(expected, int):
            told: list[int] | int | None = (
                None if chunk.usage is None else chunk.usage.prompt_tokens
            )
        elif (told := chunk.prompt_token_ids) is None:
            told = choice.prompt_token_ids
        if told is not None:
            self._expected = None
            return told == expected
        if not self._is_chat:
            return True  # token ids as a prompt are no extension: every engine takes them
        content = choice.text or (choice.delta is not None and choice.delta.content)
        return not (content or choice.finish_reason or choice.token_ids)

    def _keep_shown(self, data: bytes, chunk: Chunk, choice: Choice) -> None:
        """Remember what the client was shown of tokens."""
        if self.record.shape.asks_logprobs:
            self._keep_logprobs(data)
        if choice.prompt_token_ids is not None:
            self.record.prompts_given.add(choice.index)
        elif chunk.prompt_token_ids is not None:
            self.record.prompts_given.add(-1)

    def _keep_logprobs(self, data: bytes) -> None:
        if b'"text_offset":[' in data and b'"text_offset":[]' not in data:
            self.record.last_logprobs = data

    #### everything else

    def _read_several(self, event: bytes, data: bytes, choices: list[Choice]) -> Sign:
        """Several choices in one chunk: nothing to continue, but to be judged and stripped."""
        record, has_content = self.record, has_other_content(data)
        for choice in choices:
            if choice.index not in self._seen:
                self._see(choice.index)
            if choice.finish_reason:
                if choice.finish_reason in LYING_FINISHES:
                    self.forward = b""
                    return Sign.LIE
                self._finish(choice.index)
                has_content = True
            delta = choice.delta
            has_content |= bool(choice.text or (delta is not None and delta.content))
            if self.seam is None and delta is not None and delta.role is not None:
                record.roles.add(choice.index)
        if record.first is None:
            self._meet_first(event, data)
        record.spoil(Poison.SEVERAL_CHOICES)
        if self.finished:
            record.finish = choices[-1].finish_reason or "stop"
        if self.seam is not None:
            self.forward = self.seam.rewrite(event, data, skip=0)
        elif self.asking.ids:
            self.forward = strip_ids_slowly(event, to_null=self._is_vllm)
        record.has_content |= has_content
        self.events += has_content
        return Sign.CONTENT if has_content else Sign.PREAMBLE

    def _read_rest(self, event: bytes, data: bytes, chunk: Chunk) -> Sign:
        """A chunk without choices: usage, mostly."""
        record, usage = self.record, chunk.usage
        if chunk.choices is None and self._meet_flat_error(data):
            self.forward = b""
            return Sign.ERROR
        if record.first is None and chunk.choices is not None:
            self._meet_first(event, data)
        if usage is not None:
            if record.poison is None:
                self._take_usage(usage, has_ids=self._has_ids)
            mine = usage.completion_tokens
            self.prompt_tokens = record.prompt_tokens or usage.prompt_tokens
            self.completion_tokens = None if mine is None else self.base + mine
        if self._unproven is not None and usage is not None:
            return self._prove(self._unproven, event, data, usage)
        if self.seam is not None:
            self.forward = self.seam.rewrite(event, data, skip=0)
        elif usage is not None and chunk.choices is not None:
            if self.asking.usage and not record.shape.asks_usage:
                self.forward = b""
            else:
                record.gave_usage = True
        return Sign.PREAMBLE

    def _prove(
        self, held: tuple[bytes, bytes, Chunk], event: bytes, data: bytes, usage: Usage
    ) -> Sign:
        """The prompt is told at last: the finish that was held goes on, with this event."""
        if usage.prompt_tokens != self._expected or self.seam is None:
            return self._meet_unfaithful()
        self._expected = self._unproven = None
        sign = self._read_typed(*held)
        finish = self.forward
        self.forward = finish + self.seam.rewrite(event, data, skip=0)
        return sign

    def _meet_done(self) -> Sign:
        self.done = True
        if self.is_whole:
            return Sign.DONE
        self.forward = b""
        return Sign.LIE

    def _meet_unfaithful(self) -> Sign:
        self.is_unfaithful = True
        self.forward = b""
        return Sign.LIE

    def _meet_unreadable(self) -> Sign:
        # Forwarded untouched; it proves that something came, and what it was nobody knows.
        self.record.spoil(Poison.UNREADABLE)
        self.record.has_content = True
        self.events += 1
        return Sign.CONTENT

    def _read_leniently(self, event: bytes) -> Sign:
        """A chunk that does not fit: malformed ids are thrown away whole, else it is unreadable."""
        cleaned = strip_ids_slowly(event, to_null=self._is_vllm)
        data = data_of(cleaned) or b""
        try:
            chunk = CHUNK.decode(data)
        except (msgspec.DecodeError, RecursionError):
            self.forward = cleaned if self.asking.ids else event
            return self._meet_unreadable()
        if self.record.is_exact:
            self.record.lose_exactness()
        sign = self._read_typed(cleaned, data, chunk)
        if not self.asking.ids and self.seam is None and self.forward is cleaned:
            self.forward = event  # the client asked for them, and gets what the engine wrote
        return sign


def _is_swallowed(choice: Choice) -> bool:
    """vLLM sends chunks with an empty delta only to those who asked for ids."""
    return choice.token_ids is not None and not choice.finish_reason
