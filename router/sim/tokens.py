"""The simulated model's vocabulary and tokenizer.

A router that continues a generation has to survive what real tokenizers do: characters whose
bytes are spread over several tokens, words that are one token here and six there, text that
encodes to other tokens than it was generated from, ids that mean nothing. All of that happens
here with a vocabulary built by arithmetic, so nothing is downloaded and two processes agree.
Must never depend on the order of a set, on the locale or on a random number.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product

END_OF_TEXT, TURN_START, TURN_END = 0, 1, 2
"""Ids of the special tokens. `TURN_END` is the end-of-sequence token."""

SPECIAL_TEXTS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY_SIZE = 2048
"""As large as the tiny model's that the recorded streams come from, so that their ids are valid."""

_FIRST_BYTE = len(SPECIAL_TEXTS)
_SHORT = 1000
"""Characters of a text whose tokens are kept, since prompts come again, and to many engines."""

# The first half of many four-byte characters is one token, as in trained byte-level
# vocabularies; the second half then is two single bytes.
_MERGES = (b"\xf0\x9f", b"\xe4\xb8", b"\xe4\xbd")

_COMMON_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this from have "
    "or by one had not but what all were when we there can an your which their said if do "
    "will each about how up out them then she many some so these would other into has more "
    "her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most "
    "know get through back much before go good new write our used me man too any day same "
    "right look think also around another came come work three word must because does part "
    "even place well such here take why things help put years different away again off went "
    "old number great tell men say small every found still between name should home big give "
    "air line set own under read last never us left end along while might next sound below "
    "saw something thought both few those always looked show large often together asked house "
    "world going want school important until form food keep children feet land side without "
    "boy once animals life enough took sometimes four head above kind began almost live page "
    "got earth need far hand high year mother light parts country father let night following "
    "picture being study second eyes soon times story boys since white days ever paper hard "
    "near sentence better best across during today others however sure means knew try told "
    "young miles sun ways thing whole hear example heard several change answer room sea "
    "against top turned learn point city play toward five using himself usually "
)
_COMMON = _COMMON_TEXT.split()

PUNCTUATION = (",", ".", ";", ":", "!", "?", "\n", " (", ")", " -", ' "', '"')

# Pieces that merge into a longer word when the text is encoded again (" the" + "re" -> " there").
PIECES = (" th", " wh", " a", " be", " s", "e", "ere", "en", "at", "ing", "re", "s", "ll", "d")

CHARACTERS = "éüñßøΩжλ世界中不你好日本語한글★🙂🚀👍🌍✨🎉"
"""Characters outside ASCII that the model writes; each takes two to four tokens at most."""

_PIECE_PATTERN = re.compile(
    rb" ?[A-Za-z]+|[\xc0-\xff][\x80-\xbf]*| ?[^A-Za-z\s\x80-\xff]|.", re.DOTALL
)
_SPECIAL_PATTERN = re.compile("(" + "|".join(map(re.escape, SPECIAL_TEXTS)) + ")")


def _invented_words() -> Iterable[str]:
    """Pronounceable nonsense, enough to fill any vocabulary."""
    syllables = [a + b for a, b in product("bdfgklmnprstvz", "aeiou")]
    return (a + b for a, b in product(syllables, syllables))


def _build_vocabulary() -> tuple[bytes, ...]:
    texts: list[bytes] = [text.encode() for text in SPECIAL_TEXTS]
    texts += [bytes([value]) for value in range(256)]
    texts += _MERGES
    seen = set(texts)
    words = (" " + word for word in (*_COMMON, *_invented_words()))
    for text in (*PUNCTUATION, *PIECES, *words):
        encoded = text.encode()
        if encoded in seen:
            continue
        seen.add(encoded)
        texts.append(encoded)
        if len(texts) == VOCABULARY_SIZE:
            break
    return tuple(texts)


VOCABULARY: tuple[bytes, ...] = _build_vocabulary()
"""The bytes of every token, by id. Special tokens have the bytes of their spelling."""

_ID_OF = {text: id_ for id_, text in enumerate(VOCABULARY) if id_ >= _FIRST_BYTE}
_LONGEST = max(map(len, _ID_OF))


def id_of(text: str | bytes) -> int:
    """The id of exactly this token; KeyError if there is none."""
    return _ID_OF[text.encode() if isinstance(text, str) else text]


def is_special(id_: int) -> bool:
    return id_ < _FIRST_BYTE


def is_in_vocabulary(id_: int) -> bool:
    return 0 <= id_ < VOCABULARY_SIZE


def encode(text: str) -> list[int]:
    """The tokens of a text; the spelling of a special token becomes that token.

    Lone surrogates (legal in JSON) are encoded as the replacement character.
    """
    ids = _encode_again if len(text) < _SHORT else _encode
    return list(ids(text))


def _encode(text: str) -> tuple[int, ...]:
    ids: list[int] = []
    for index, part in enumerate(_SPECIAL_PATTERN.split(text)):
        if index % 2:
            ids.append(SPECIAL_TEXTS.index(part))
        elif part:
            ids += _encode_plain(part)
    return tuple(ids)


_encode_again = lru_cache(maxsize=1024)(_encode)


def _encode_plain(text: str) -> Iterable[int]:
    for piece in _PIECE_PATTERN.findall(text.encode("utf-8", "replace")):
        whole = _ID_OF.get(piece)
        if whole is not None:
            yield whole
        else:
            yield from _encode_greedily(piece)


def _encode_greedily(piece: bytes) -> Iterable[int]:
    start = 0
    while start < len(piece):
        for end in range(min(len(piece), start + _LONGEST), start, -1):
            id_ = _ID_OF.get(piece[start:end])
            if id_ is not None:
                yield id_
                start = end
                break


def bytes_of(ids: Iterable[int], *, with_special: bool = False) -> bytes:
    return b"".join(VOCABULARY[id_] for id_ in ids if with_special or not is_special(id_))


def decode(ids: Iterable[int], *, with_special: bool = False) -> str:
    """The text of tokens; bytes that are no UTF-8 become the replacement character."""
    return bytes_of(ids, with_special=with_special).decode("utf-8", "replace")


def unfinished_character(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a character and do not finish it."""
    for length in (1, 2, 3):
        lead = data[-length:][:1]
        if len(data) < length or not lead:
            return b""
        if lead[0] >= 0xC0:
            return data[-length:] if length < _character_length(lead[0]) else b""
        if lead[0] < 0x80:
            return b""
    return b""


def _character_length(lead: int) -> int:
    if lead >= 0xF0:
        return 4 if lead <= 0xF4 else 1
    return 3 if lead >= 0xE0 else 2


def tokens_of_character(character: str) -> Sequence[int]:
    return list(_encode_greedily(character.encode()))
