"""The simulated language model: which token comes next.

The next token is a hash of every id before it. Lose one, double one or change one anywhere in
the prefix and all that follows is other text, so a continuation that was put together wrongly
cannot look right by luck. The hash is carried along, which makes a token cost microseconds
however long the prefix is. Must never look at anything but the ids: two engines of the same
seed answer alike, as real engines with the same weights do at temperature 0.
"""

from collections.abc import Iterable

from attrs import define, field, frozen

from router.sim import tokens

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9

_WORDS = tuple(
    id_
    for id_ in range(tokens.id_of(" the"), tokens.VOCABULARY_SIZE)
    if tokens.VOCABULARY[id_].startswith(b" ")
)
_COMMON_WORDS = _WORDS[:256]
_PUNCTUATION = tuple(map(tokens.id_of, tokens.PUNCTUATION))
_PIECES = tuple(map(tokens.id_of, tokens.PIECES))
_CHARACTERS = tuple(
    (character.encode(), tuple(tokens.tokens_of_character(character)))
    for character in tokens.CHARACTERS
)


def extend(state: int, id_: int) -> int:
    """The hash of a prefix and one more token."""
    return (state * _GOLDEN + id_ + 1) & _MASK


def _mix(state: int) -> int:
    mixed = (state ^ (state >> 31)) * _MIX & _MASK
    return mixed ^ (mixed >> 29)


@frozen
class Model:
    """A set of weights. Equal models continue each other's generations.

    `eos_every`: on average every how many tokens the model wants to end; 0 = never by itself.
    `ambiguous`: now and then write a word as pieces that encode differently when read back,
    so that text carried to another worker becomes other tokens than the generated ones.
    """

    seed: int = 0
    eos_every: int = 0
    ambiguous: bool = False

    def start(self, prompt: Iterable[int], *, choice: int = 0) -> "Generation":
        """Begin after a prompt. Further choices of one request go their own ways."""
        state = _mix(self.seed * _GOLDEN + choice & _MASK)
        tail = b""
        for id_ in prompt:
            state = extend(state, id_)
            tail = (tail + tokens.VOCABULARY[id_])[-4:]
        return Generation(self, state, tokens.unfinished_character(tail))

    def next_token(self, prefix: Iterable[int]) -> int:
        """The token that follows a prefix, if the model may not end."""
        return self.start(prefix).next_token(may_end=False)


@define(eq=False)
class Generation:
    """One growing sequence: the hash of all its ids, and the character it is in the middle of."""

    model: Model
    _state: int
    unfinished: bytes = field(default=b"")

    def next_token(self, *, may_end: bool) -> int:
        """Draw the next token and append it."""
        id_ = self._draw(_mix(self._state), may_end)
        self._state = extend(self._state, id_)
        self.unfinished = tokens.unfinished_character(self.unfinished + tokens.VOCABULARY[id_])
        return id_

    def _draw(self, luck: int, may_end: bool) -> int:
        if self.unfinished:
            return _continue_character(self.unfinished, luck)
        if may_end and self.model.eos_every and luck % self.model.eos_every == 0:
            return tokens.TURN_END
        luck >>= 16
        if self.model.ambiguous and luck & 7 == 0:
            return _PIECES[(luck >> 3) % len(_PIECES)]
        return _draw_plain(luck >> 3)


def _draw_plain(luck: int) -> int:
    kind, rest = luck & 31, luck >> 5
    if kind < 2:
        return _CHARACTERS[rest % len(_CHARACTERS)][1][0]
    if kind < 5:
        return _PUNCTUATION[rest % len(_PUNCTUATION)]
    words = _WORDS if kind < 8 else _COMMON_WORDS
    return words[rest % len(words)]


def _continue_character(begun: bytes, luck: int) -> int:
    """One more token of a character the model knows, else any byte that keeps it valid."""
    ways = [
        ids[position]
        for encoded, ids in _CHARACTERS
        if encoded.startswith(begun) and (position := _position(ids, len(begun))) is not None
    ]
    if ways:
        return ways[luck % len(ways)]
    # 0xA0 may follow every lead byte except 0xED and 0xF4, which want something below.
    return tokens.id_of(b"\x9f" if begun == b"\xed" else b"\x8f" if begun == b"\xf4" else b"\xa0")


def _position(ids: tuple[int, ...], length: int) -> int | None:
    """How many of a character's tokens make up its first `length` bytes."""
    done = 0
    for position, id_ in enumerate(ids):
        if done == length:
            return position
        done += len(tokens.VOCABULARY[id_])
    return None
