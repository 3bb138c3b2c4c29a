"""From tokens to the text a client is shown, the way each engine does it.

vLLM's ids run ahead of its text: it keeps back as many characters as the longest stop string
less one (none where stop strings stay in the answer), and drops an unfinished character at the
end. SGLang keeps back whole chunks, ids and all, while their end looks like the beginning of a
stop string, and flushes an unfinished character as a replacement character. A prompt that ends
inside a character makes vLLM repeat the whole prompt and SGLang lose the character (vLLM 0.32.0,
SGLang 0.5.23, recorded streams). A router has to get its text right on top of this, so it must
never be made nicer than it is.
"""

import codecs
from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from router.sim import tokens
from router.sim.model import Generation, Model


@frozen
class Manner:
    """How an engine turns ids into text.

    `holds_characters`: text that could begin a stop string is kept back, its ids are not;
    else whole chunks are kept back, ids and text alike, and what went out stays out.
    `spares_the_least`: a stop string has to end behind the first `min_tokens` tokens (vLLM 0.32.0);
    else these only put off the end of sequence and stop tokens (SGLang 0.5.23).
    """

    holds_characters: bool
    repeats_cut_prompt: bool
    flushes_unfinished: bool
    spares_the_least: bool


VLLM = Manner(
    holds_characters=True,
    repeats_cut_prompt=True,
    flushes_unfinished=False,
    spares_the_least=True,
)
SGLANG = Manner(
    holds_characters=False,
    repeats_cut_prompt=False,
    flushes_unfinished=True,
    spares_the_least=False,
)


@frozen
class Limits:
    """When a choice ends."""

    budget: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    keeps_stop_text: bool = False

    def up_to(self, budget: int | None) -> "Limits":
        """The same with a smaller budget."""
        return self if budget is None else evolve(self, budget=min(self.budget, budget))

    @property
    def longest_stop(self) -> int:
        return max(map(len, self.stop), default=0)


@frozen
class Piece:
    """What one step of one choice gives: usually one token, and text that may lag behind it."""

    index: int
    ids: tuple[int, ...]
    text: str
    finish: str | None = None
    stopped_by: str | int | None = None


@define(eq=False)
class Choice:
    """One choice of one request, being generated."""

    index: int
    prompt: Sequence[int]
    limits: Limits
    manner: Manner
    _generation: Generation
    _decoder: codecs.IncrementalDecoder = field(init=False)
    count: int = field(default=0, init=False)
    texts: list[str] = field(factory=list, init=False)
    ids: list[int] = field(factory=list, init=False)
    finish: str | None = field(default=None, init=False)
    stopped_by: str | int | None = field(default=None, init=False)
    _held_ids: list[int] = field(factory=list, init=False)
    _unsent: str = field(default="", init=False)
    _recent: str = field(default="", init=False)
    """The end of the text that was given out: a stop string may begin in it."""
    _repeat: str = field(default="", init=False)
    _lost: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        begun = self._generation.unfinished
        if not begun:
            return
        self._decoder.decode(begun)
        if self.manner.repeats_cut_prompt:
            self._repeat = tokens.bytes_of(self.prompt)[: -len(begun)].decode("utf-8", "replace")
        else:
            self._lost = 1

    @property
    def text(self) -> str:
        """All the text given out so far."""
        return "".join(self.texts)

    def take_over(self, generation: Generation) -> None:
        """Go on from a KV cache that was computed elsewhere, for whichever prompt that was."""
        self._generation = generation

    def step(self, tokens_wanted: int = 1) -> Piece:
        """Generate up to `tokens_wanted` tokens; fewer where the choice ends.

        A piece without ids and finish means that the engine sends nothing yet.
        """
        if self.limits.budget == 0:
            self.finish = "length"
        for _ in range(tokens_wanted):
            if self.finish is None:
                self._read(self._next())
        text = self._release()
        if text is None:
            return Piece(self.index, (), "")
        return self._give_out(text)

    def cut_short(self, finish: str, *, one_more: bool = True) -> Piece:
        """End now, for a reason from outside; what was kept back is given out.

        SGLang's last chunk brings one more token, vLLM's none (recorded aborts). Without
        `one_more` it does not: where a piece was lost, another one would follow a hole.
        """
        if one_more and self.finish is None and not self.manner.holds_characters:
            self._read(self._next())
        self.finish, self.stopped_by = finish, None
        return self._give_out(self._release() or "")

    def _give_out(self, text: str) -> Piece:
        ids, self._held_ids = tuple(self._held_ids), []
        self.ids += ids
        self.texts.append(text)
        return Piece(self.index, ids, text, self.finish, self.stopped_by)

    def _next(self) -> int:
        may_end = not self.limits.ignore_eos and self.count >= self.limits.min_tokens
        token = self._generation.next_token(may_end=may_end)
        self.count += 1
        self._held_ids.append(token)
        if may_end and (token == tokens.TURN_END or token in self.limits.stop_ids):
            self.finish = "stop"
            self.stopped_by = token
        elif self.count >= self.limits.budget:
            self.finish = "length"
        return token

    def _read(self, token: int) -> None:
        known = len(self._unsent)
        if self.stopped_by is None and not tokens.is_special(token):
            self._unsent += self._decode(tokens.VOCABULARY[token])
        if self.finish is not None and self.manner.flushes_unfinished:
            self._unsent += self._decoder.decode(b"", final=True)
        is_spared = self.manner.spares_the_least and self.count <= self.limits.min_tokens
        if self.limits.stop and not is_spared:
            self._look_for_stop(len(self._unsent) - known)

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        if not text:
            return ""
        if self._repeat:
            text, self._repeat = self._repeat + text, ""
        elif self._lost:
            text, self._lost = text[1:], 0
        return text

    def _look_for_stop(self, new: int) -> None:
        """Look at matches that end in the `new` characters of one token, as for every token."""
        window = self._recent + self._unsent
        old = len(window) - new
        hits = [
            (at, stop)
            for stop in self.limits.stop
            if (at := window.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        if not hits:
            return
        at, stop = min(hits)
        self.finish, self.stopped_by = "stop", stop
        end = at + (len(stop) if self.limits.keeps_stop_text else 0)
        self._unsent = window[len(self._recent) : end]

    def _release(self) -> str | None:
        """The text that may go out now; None if the whole chunk has to wait."""
        text, self._unsent = self._unsent, ""
        if self.finish is not None or not self.limits.stop:
            return text
        if self.manner.holds_characters and self.limits.keeps_stop_text:
            self._recent = (self._recent + text)[-max(self.limits.longest_stop - 1, 1) :]
            return text
        keep = max(self.limits.longest_stop - 1, 0)
        if self.manner.holds_characters:
            reach = max(len(text) - keep, 0)
            self._unsent = text[reach:]
            return text[:reach]
        window = self._recent + text
        if self._may_begin_stop(window):
            self._unsent = text
            return None
        self._recent = window[len(window) - min(keep, len(window)) :]
        return text

    def _may_begin_stop(self, window: str) -> bool:
        return any(
            window.endswith(stop[:length])
            for stop in self.limits.stop
            for length in range(1, len(stop))
        )


def start_choice(
    model: Model, prompt: Sequence[int], limits: Limits, manner: Manner, *, index: int, way: int
) -> Choice:
    """Begin one choice; `way` sets the choices of one prompt apart."""
    return Choice(index, prompt, limits, manner, model.start(prompt, choice=way))
