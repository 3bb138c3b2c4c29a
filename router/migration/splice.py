"""Changing members of a JSON object as text, without reading or rewriting the others.

The client's body may hold megabytes of messages, numbers of any precision and whatever an engine
understands that we don't; all of it goes on byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

Members = dict[str, msgspec.Raw]

_OBJECT = msgspec.json.Decoder(Members)
_BEFORE_KEY = re.compile(rb"[\s,]*")
_KEY = re.compile(rb'"(?:[^"\\]|\\.)*"\s*:\s*', re.DOTALL)
_AFTER = re.compile(rb"\s*\}\s*\Z")


def read_members(text: bytes) -> Members | None:
    """The members of an object as raw values, or None when it is no object."""
    try:
        return _OBJECT.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def edit(text: bytes, changes: Mapping[str, bytes | None]) -> bytes:
    """An object with members set to JSON text, or removed (None); the rest as it was.

    A member that is there is replaced in its place, a new one comes last. `text` must be an
    object.
    """
    members = _OBJECT.decode(text)
    if not changes:
        return text
    spans = _spans(text, members)
    if spans is None or any(value is None for value in changes.values()):
        return _assemble(members, changes)
    added = b"".join(
        b",%b:%b" % (msgspec.json.encode(name), value)
        for name, value in changes.items()
        if name not in spans and value is not None
    )
    end = text.rindex(b"}")
    pieces = [text[end:]]
    pieces.append(added if members else added[1:])
    for name, (start, stop) in sorted(spans.items(), key=lambda item: -item[1][0]):
        value = changes.get(name)
        if value is not None:
            pieces += [text[stop:end], value]
            end = start
    pieces.append(text[:end])
    return b"".join(reversed(pieces))


def _spans(text: bytes, members: Members) -> dict[str, tuple[int, int]] | None:
    """Where each value stands, or None when a name occurs twice (the last one counts)."""
    spans: dict[str, tuple[int, int]] = {}
    position = text.index(b"{") + 1
    for name, value in members.items():
        between = _BEFORE_KEY.match(text, position)
        key = _KEY.match(text, between.end() if between else position)
        if key is None:
            return None
        start, position = key.end(), key.end() + len(bytes(value))
        if text[start:position] != bytes(value):
            return None
        spans[name] = (start, position)
    return spans if _AFTER.match(text, position) else None


def _assemble(members: Members, changes: Mapping[str, bytes | None]) -> bytes:
    merged: dict[str, bytes | None] = {name: bytes(value) for name, value in members.items()}
    merged |= changes
    encode = msgspec.json.encode
    kept = (encode(name) + b":" + value for name, value in merged.items() if value is not None)
    return b"{" + b",".join(kept) + b"}"
