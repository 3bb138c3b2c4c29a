"""Logprobs of a prompt, which are computed where the prompt is: on the prefill worker.

Pure. SGLang's `/generate` tells them in `meta_info.input_token_logprobs`; of a pair, prefill knows
those of the prompt and decode those of what it took over, and the client wants one list. Lists are
joined as text, number for number as the engines wrote them. What cannot be read changes nothing.
"""

from __future__ import annotations

import msgspec
from attrs import define, field

from router.migration.splice import edit

_FIELD = "input_token_logprobs"
_NONE = msgspec.Raw(b"null")


class _Meta(msgspec.Struct, gc=False):
    input_token_logprobs: msgspec.Raw = _NONE


class _Item(msgspec.Struct, gc=False):
    index: int | None = None
    meta_info: _Meta | None = None


class _Outer(msgspec.Struct, gc=False):
    meta_info: msgspec.Raw = _NONE


_ITEM = msgspec.json.Decoder(_Item)
_OUTER = msgspec.json.Decoder(_Outer)
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


@define(eq=False)
class PromptLogprobs:
    """What prefill has told, for each item of the request."""

    _lists: dict[int, bytes] = field(factory=dict)

    def read(self, data: bytes) -> None:
        """An event's data, or a whole answer, of prefill."""
        for place, item in enumerate(_split(data)):
            try:
                found = _ITEM.decode(item)
            except (msgspec.DecodeError, RecursionError):
                continue
            text = b"" if found.meta_info is None else bytes(found.meta_info.input_token_logprobs)
            if text.startswith(b"["):
                self._lists[place if found.index is None else found.index] = text

    def merge(self, data: bytes) -> bytes:
        """An event's data, or a whole answer, of decode, with prefill's lists before its own."""
        items = [self._merge_item(item, place) for place, item in enumerate(_split(data))]
        if data.lstrip().startswith(b"["):
            return b"[%b]" % b",".join(items)
        return items[0] if items else data

    def _merge_item(self, item: bytes, place: int) -> bytes:
        if _FIELD.encode() not in item:
            return item
        try:
            found, meta = _ITEM.decode(item), bytes(_OUTER.decode(item).meta_info)
            own = b"" if found.meta_info is None else bytes(found.meta_info.input_token_logprobs)
            told = self._lists.get(place if found.index is None else found.index)
            if told is None or not own.startswith(b"["):
                return item
            return edit(item, {"meta_info": edit(meta, {_FIELD: _join(told, own)})})
        except (msgspec.DecodeError, RecursionError):
            return item


def _split(data: bytes) -> list[bytes]:
    """The items of a list, or the only one."""
    if not data.lstrip().startswith(b"["):
        return [data]
    try:
        return [bytes(item) for item in _ITEMS.decode(data)]
    except (msgspec.DecodeError, RecursionError):
        return [data]


def _join(first: bytes, second: bytes) -> bytes:
    parts = [each.strip()[1:-1].strip() for each in (first, second)]
    return b"[%b]" % b",".join(part for part in parts if part)
