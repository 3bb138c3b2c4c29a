"""How many of the reported ids the delivered text stands for.

Ids run ahead of text: vLLM holds back what could become a stop string and both engines hold back
an unfinished character, but the ids are reported at once. A continuation from all ids loses what
was held; one from the middle of a character makes vLLM repeat the whole prompt and SGLang drop the
character (recorded). Where an event proves the place (one id, and all of its text), `seek` answers
at once; else it asks a worker of the same model to detokenize, and gives up rather than guess.
"""

from __future__ import annotations

import unicodedata
from typing import Protocol

import msgspec
from attrs import evolve, frozen

from router.migration.record import Record

#: Ids of the prompt that are put before a question, so that its text is decoded in context.
CONTEXT_IDS = 32
#: Ids at the end that are rolled back at most. A character has four bytes at most, but there may
#: be several broken ones in a row.
UNFINISHED_IDS_MAX = 16
#: Steps of the search where the place is looked for: enough for any sequence.
_STEPS_MAX = 40
#: Tokens without text that are looked for: special ones, which a stream leaves out.
_SILENT_MAX = 4
_REPLACEMENT = "\ufffd"


@frozen
class Agreed:
    """The first `ids` ids stand for the record's text and then for `held`, nothing else."""

    ids: int
    held: str = ""


@frozen
class Disagreed:
    """Nothing proves a place: only text can be carried."""


@frozen
class Inquiry:
    """A question to a worker of the same model: the text of `tokens`, specials included or not.

    `answer` takes it (None: nobody answered) and returns what follows.
    """

    record: Record
    tokens: tuple[int, ...]
    #: How many ids of the output are in the question; -1 while only the context is asked.
    ids: int = -1
    context: str = ""
    #: The place is known to be in here: at least `low`, less than `high`.
    low: int = 0
    high: int = 0
    steps: int = 0
    #: A place that will do, while a better one is looked for.
    found: Agreed | None = None
    #: What is held seems to have a special token in it, which the stream would have left out.
    is_spelled: bool = False
    #: Which ids have no text in the stream, although the worker spells them.
    silent: tuple[int, ...] = ()
    #: The first such id that is not known yet is looked for.
    is_hunting: bool = False

    def answer(self, text: str | None) -> Inquiry | Agreed | Disagreed:
        """What follows from the answer."""
        if text is None or self.steps > _STEPS_MAX:
            return self._give_up()
        if self.ids < 0:
            asked = self.record
            return evolve(self, context=text)._ask(len(asked.ids))
        if not text.startswith(self.context):
            return self._give_up()
        output = text[len(self.context) :]
        read = self.record.text[self.record.text_base :]
        if self.found is not None:
            return self._lessen(output, read)
        if self.record.has_parser:
            return self._narrow(output, read)
        if self.is_hunting:
            return self._hunt(output, read)
        return self._shorten(output, read)

    def _ask(self, ids: int) -> Inquiry:
        told = [id_ for at, id_ in enumerate(self.record.ids[:ids]) if at not in self.silent]
        tokens = (*_context(self.record), *told)
        return evolve(self, tokens=tokens, ids=ids, steps=self.steps + 1)

    def _shorten(self, output: str, read: str) -> Inquiry | Agreed | Disagreed:
        """Drop ids from the end until no character is unfinished."""
        if output.endswith(_REPLACEMENT):
            dropped = len(self.record.ids) - self.ids
            if dropped >= UNFINISHED_IDS_MAX or self.ids <= self.record.agreed_ids:
                return Disagreed()
            return self._ask(self.ids - 1)
        if not output.startswith(read):
            if len(self.silent) >= _SILENT_MAX:
                return Disagreed()
            return evolve(self, low=0, high=self.ids, is_hunting=True)._next_of_hunt()
        found = Agreed(self.ids, output[len(read) :])
        is_spelled = len(found.held) > _held_max(self.record)
        if not _may_roll_back(self.record):
            return Disagreed() if is_spelled else found
        low = max(self.record.agreed_ids, self.ids - _held_max(self.record) - UNFINISHED_IDS_MAX)
        search = evolve(self, found=found, low=low, high=self.ids, is_spelled=is_spelled)
        return search._halve(found) if found.held else found

    def _hunt(self, output: str, read: str) -> Inquiry | Disagreed:
        """Find the first id whose text the stream has not: a special token, most likely."""
        shown = output.rstrip(_REPLACEMENT)
        if read.startswith(shown) or output.startswith(read):
            return evolve(self, low=self.ids + 1)._next_of_hunt()
        return evolve(self, high=self.ids)._next_of_hunt()

    def _next_of_hunt(self) -> Inquiry | Disagreed:
        if self.low < self.high:
            return self._ask((self.low + self.high) // 2)
        if self.high < 1 or self.high - 1 in self.silent:
            return Disagreed()
        silent = (*self.silent, self.high - 1)
        return evolve(self, silent=silent, is_hunting=False)._ask(len(self.record.ids))

    def _lessen(self, output: str, read: str) -> Inquiry | Agreed | Disagreed:
        """Find the fewest ids whose text has what was read in it, and ends in no broken character.

        First the fewest of all, by halving; from there upwards, one by one.
        """
        found, low, high = self.found, self.low, self.high
        assert found is not None
        is_enough = output.startswith(read)
        if is_enough and not output.endswith(_REPLACEMENT):
            found = Agreed(self.ids, output[len(read) :])
        if self.low >= self.high:
            low = high = self.ids + 1
        elif is_enough:
            high = self.ids
        else:
            low = self.ids + 1
        return evolve(self, found=found, low=low, high=high)._halve(found)

    def _halve(self, found: Agreed) -> Inquiry | Agreed | Disagreed:
        if self.low >= found.ids:
            return found
        if self.low >= self.high and self.is_spelled:
            return Disagreed()  # between here and there may be the special token
        return self._ask((self.low + self.high) // 2)

    def _give_up(self) -> Agreed | Disagreed:
        return Disagreed() if self.found is None or self.is_spelled else self.found

    def _narrow(self, output: str, read: str) -> Inquiry | Agreed | Disagreed:
        """Find the ids whose text is exactly what was read: a parser's leavings are not shown."""
        if output == read:
            return Agreed(self.ids)
        low, high = self.low, self.high
        if len(output) < len(read):
            low = self.ids + 1
        else:
            high = self.ids
        if low >= high:
            return Disagreed()
        return evolve(self, low=low, high=high)._ask((low + high) // 2)


def _may_roll_back(record: Record) -> bool:
    """Whether the next worker may be left to make again what was held back.

    The text of a special token is nothing that an engine would send, but vLLM's `/detokenize`
    spells it. So of what was held no more is delivered than the rest of a token that was begun,
    unless the client has seen ids that may not come again, or there is no next worker.
    """
    shape, rest = record.shape, record.rest()
    return (shape.is_greedy or not shape.shows_tokens) and (rest is None or rest > 0)


def _held_max(record: Record) -> int:
    """How many characters vLLM 0.32 holds back for stop strings: always so many, if it can."""
    return max((len(stop) - 1 for stop in record.shape.stops), default=0)


def _context(record: Record) -> list[int]:
    return (record.prompt_ids or [])[-CONTEXT_IDS:]


def seek(record: Record) -> Inquiry | Agreed | Disagreed:
    """Where ids and text agree, or what has to be asked to know it."""
    if not record.is_exact or record.prompt_ids is None:
        return Disagreed()
    if record.agreed_text == record.text_length and not record.text.endswith(_REPLACEMENT):
        return Agreed(record.agreed_ids)
    count = len(record.ids)
    low = record.agreed_ids + 1
    return Inquiry(record, tuple(_context(record)), low=min(low, count), high=count)


def releases_all(text: str) -> bool:
    """Whether the text of one id shows that SGLang holds nothing of it back.

    It releases the part before an unfinished character where that part ends in a space or in a
    Chinese character, so that such an end proves nothing. vLLM releases all of a token or nothing.
    """
    last = text[-1]
    if last < "\u2e80":
        return last != " "
    return unicodedata.category(last) != "Lo"


#### what is sent and read


class _Prompt(msgspec.Struct):
    prompt: str | None = None
    text: str | None = None


_PROMPT = msgspec.json.Decoder(_Prompt)


class Question(Protocol):
    """What asks for the text of tokens."""

    @property
    def tokens(self) -> tuple[int, ...]: ...


def question_body(inquiry: Question, model: str | None) -> bytes:
    """The body for `/detokenize`, which vLLM and SGLang both serve."""
    asked = {"model": model, "tokens": inquiry.tokens}
    return msgspec.json.encode({name: value for name, value in asked.items() if value is not None})


def read_answer(body: bytes) -> str | None:
    """The text in an answer of `/detokenize`: `prompt` of vLLM, `text` of SGLang."""
    try:
        found = _PROMPT.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found.prompt if found.prompt is not None else found.text
