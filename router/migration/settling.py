"""How many tokens an answer has, where a stop string ended somewhere inside its last event.

vLLM merges tokens that are ready together into one event. Where the router itself looks for stop
strings (see `router.migration.stops`), the event that completes one may hold tokens which the
engine, had it looked, would never have told of; the client must see neither their ids nor their
number. Which they are is asked of a worker of the same model. Where nobody can say, all count.
"""

from __future__ import annotations

from attrs import evolve, field, frozen

from router.migration.chunks import Json, choices_of, decode, encode, with_data
from router.migration.closing import DONE, usage_event, usage_of
from router.migration.record import Record
from router.sse import data_of

#: Ids before the event's that are put before a question, so that its text is decoded in context.
CONTEXT_IDS = 32
_REPLACEMENT = "\ufffd"
_TOKEN_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@frozen
class Unsettled:
    """The last event of an answer, which may have too many tokens."""

    #: As it goes to the client, but for the tokens that are too many.
    event: bytes
    #: Its ids, and those right before them.
    ids: tuple[int, ...]
    context: tuple[int, ...]
    #: The event's text to the end of the stop string.
    text: str

    def ask(self) -> Counting:
        """The first question."""
        return Counting(self, self.context, high=len(self.ids))


@frozen
class Counting:
    """A question to a worker of the same model: the text of `tokens`.

    The smallest number of ids whose text has the stop string in it is above `low`, at most `high`.
    """

    unsettled: Unsettled
    tokens: tuple[int, ...]
    high: int
    low: int = 0
    #: The text of the context, once that was asked.
    before: str | None = None
    _ids: int = field(default=0, alias="ids")

    def answer(self, text: str | None) -> Counting | int:
        """What follows from the answer (None: nobody answered): a question, or how many ids."""
        most = len(self.unsettled.ids)
        if text is None:
            return most
        if self.before is None:
            # What ends inside a character ends in one that stands for all such.
            return evolve(self, before=text.rstrip(_REPLACEMENT))._next()
        if not text.startswith(self.before):
            return most
        if self.unsettled.text in text[len(self.before) :]:
            return evolve(self, high=self._ids)._next()
        if self._ids == most:
            return most  # its text is not the worker's: special tokens, say
        return evolve(self, low=self._ids)._next()

    def _next(self) -> Counting | int:
        if self.low + 1 >= self.high:
            return self.high
        ids = (self.low + self.high) // 2
        return evolve(self, tokens=self.unsettled.context + self.unsettled.ids[:ids], ids=ids)


def settle(record: Record, unsettled: Unsettled, ids: int) -> bytes:
    """The end of the answer, of whose last event so many ids count."""
    surplus = len(unsettled.ids) - ids
    record.tokens -= surplus
    if surplus:
        record.keep_ids(max(0, len(record.ids) - surplus))
    event = _without_last(record, unsettled.event, surplus) if surplus else unsettled.event
    return event + usage_event(record) + DONE


def _without_last(record: Record, event: bytes, surplus: int) -> bytes:
    chunk = decode(data_of(event) or b"")
    if chunk is None:
        return event
    for choice in choices_of(chunk):
        _shorten(choice, "token_ids", surplus)
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            for name in ("content", *_TOKEN_LISTS):
                _shorten(logprobs, name, surplus)
    if isinstance(usage := chunk.get("usage"), dict):
        chunk["usage"] = usage | usage_of(record)
    return with_data(event, encode(chunk))


def _shorten(holder: Json, name: str, surplus: int) -> None:
    values = holder.get(name)
    if isinstance(values, list):
        holder[name] = values[: max(0, len(values) - surplus)]
