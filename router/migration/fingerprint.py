"""Whether two workers make the same tokens of the same text.

Ids of one worker mean something to another only if both use one tokenizer; a model's name alone
does not say so (a rolling upgrade keeps it). The probe asks each worker to tokenize a fixed text,
and workers whose name and ids agree are of one fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

#: Words, numbers, spaces, code, several scripts and an emoji: where tokenizers differ.
TEXT = (
    "The quick brown fox, 12345 times:\n\tdef f(x):  return x**2 # naïve\n"
    "Größe, 世界 and 日本語, жизнь, 🙂👍\n\n  <|im_end|> </s> don't — “so”…"
)


class _Tokens(msgspec.Struct):
    tokens: list[int] | None = None


_TOKENS = msgspec.json.Decoder(_Tokens)


def question_body(model: str) -> bytes:
    """The body for `/tokenize`, which vLLM and SGLang both serve."""
    return msgspec.json.encode({"model": model, "prompt": TEXT, "add_special_tokens": False})


def read_ids(body: bytes) -> list[int] | None:
    """The ids in an answer of `/tokenize`, or None where it holds none."""
    try:
        return _TOKENS.decode(body).tokens or None
    except (msgspec.DecodeError, RecursionError):
        return None


def fingerprint(model: str, ids: Sequence[int]) -> str:
    """A short name for the model and its tokenizer together."""
    digest = hashlib.sha256(msgspec.json.encode([model, list(ids)]))
    return digest.hexdigest()[:16]
