"""Typed partial reading of streamed chunks, and how their bytes are changed.

One decoding an event, of the few members that continuing depends on; everything else in a chunk is
neither read nor built. Changes are cuts in the bytes where the shape of the bytes allows it (the
one in which vLLM 0.32 and SGLang 0.5.23 write), and a decoding of the whole otherwise.
"""

from __future__ import annotations

import re
from typing import TypeGuard

import msgspec

from router.sse import data_of

Json = dict[str, object]

ABSENT = msgspec.Raw(b"")
_EMPTY = (b"", b"null", b'""', b"[]", b"{}")


class Delta(msgspec.Struct, gc=False):
    content: str | None = None
    role: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = ABSENT


class Choice(msgspec.Struct, gc=False):
    index: int = 0
    finish_reason: str | None = None
    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: msgspec.Raw = ABSENT


class Chunk(msgspec.Struct, gc=False):
    choices: list[Choice] | None = None
    error: msgspec.Raw = ABSENT
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class _RareChoice(msgspec.Struct):
    delta: dict[str, msgspec.Raw] | None = None


class _RareChunk(msgspec.Struct):
    choices: list[_RareChoice] = []


CHUNK = msgspec.json.Decoder(Chunk)
_RARE = msgspec.json.Decoder(_RareChunk)
_ANY = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder()

_LINE_END = re.compile(rb"\r\n|\n|\r")
_TOKEN_IDS = b',"token_ids":['
_TO_VALUE = len(_TOKEN_IDS) - 1
_USAGE = b',"usage":'


def is_empty(value: msgspec.Raw) -> bool:
    """Absent, null, or an empty string, list or object."""
    return bytes(value) in _EMPTY


def has_other_content(data: bytes) -> bool:
    """Whether a delta holds anything but a role and text, or what cannot be read."""
    try:
        choices = _RARE.decode(data).choices
    except (msgspec.DecodeError, RecursionError):
        return True  # the names of members that are skipped are not read elsewhere
    return any(
        name not in ("role", "content") and not is_empty(value)
        for choice in choices
        for name, value in (choice.delta or {}).items()
    )


def decode(data: bytes) -> Json | None:
    """The whole chunk as an object, or None when it is none."""
    try:
        chunk: object = _ANY.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    return chunk if isinstance(chunk, dict) else None


def choices_of(chunk: Json) -> list[Json]:
    """The choices that are objects."""
    choices = chunk.get("choices")
    return [one for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []


def is_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(id_) is int for id_ in value)


def encode(chunk: object) -> bytes:
    """JSON as the engines write it: compact, characters as they are."""
    return _ENCODER.encode(chunk)


def event_of(chunk: object) -> bytes:
    """A chunk as an event."""
    return b"data: %b\n\n" % _ENCODER.encode(chunk)


def with_data(event: bytes, data: bytes) -> bytes:
    """The event with other data; its name and comments stay."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return b"data: %b\n\n" % data
    lines = [
        line
        for line in _LINE_END.split(event)
        if line and line.partition(b":")[0] != b"data" and line != b"\xef\xbb\xbf"
    ]
    return b"".join(line + b"\n" for line in [*lines, b"data: " + data]) + b"\n"


def strip_ids(event: bytes, *, to_null: bool) -> bytes:
    """The event without the ids of its one choice; the event itself where they are not found.

    vLLM writes `null` where it was not asked for them, SGLang leaves the members out.
    """
    start = event.rfind(_TOKEN_IDS)
    if start < 0 or event.find(_TOKEN_IDS, 0, start) >= 0:
        return event
    end = event.index(b"]", start) + 1
    if to_null:
        return b"%bnull%b" % (event[: start + _TO_VALUE], event[end:])
    return event[:start] + event[end:]


def strip_ids_slowly(event: bytes, *, to_null: bool) -> bytes:
    """The same for a chunk that is not written as engines write."""
    chunk = decode(data_of(event) or b"")
    if chunk is None:
        return event
    changed = False
    for holder in (chunk, *choices_of(chunk)):
        for name in ("token_ids", "prompt_token_ids"):
            if holder.get(name) is not None:
                changed = True
                if to_null:
                    holder[name] = None
                else:
                    del holder[name]
    return with_data(event, encode(chunk)) if changed else event


def strip_usage(event: bytes, *, to_null: bool) -> bytes:
    """The event without usage; SGLang's completions write `null` where it was not asked for."""
    place = event.rfind(_USAGE)
    if place >= 0 and event.endswith(b"}}\n\n") and _is_object(event[place + len(_USAGE) : -3]):
        return event[:place] + (b',"usage":null}\n\n' if to_null else b"}\n\n")
    chunk = decode(data_of(event) or b"")
    if chunk is None or chunk.get("usage") is None:
        return event
    if to_null:
        chunk["usage"] = None
    else:
        del chunk["usage"]
    return with_data(event, encode(chunk))


def _is_object(text: bytes) -> bool:
    """Whether a text that begins and ends like an object is one, and not several members."""
    return text.startswith(b"{") and (text.count(b"{") == 1 or decode(text) is not None)
