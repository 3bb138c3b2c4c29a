"""An unfinished answer as messages, so that the next engine renders the same prompt and goes on.

vLLM and SGLang differ in what becomes of a trailing assistant message, and the prompt that has to
be rendered again is the one that the first engine made of the client's messages.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from router.migration.poison import Poison
from router.migration.reading import flag_of
from router.migration.splice import Members, edit


class _Turn(Enum):
    """Where the answer stood in the prompt of the engine that began it."""

    OWN = "own"  # a turn of its own after all messages
    LAST = "last"  # the rest of the last message
    AFTER_USER = "after_user"  # a turn of its own, and the last message was read as a user's
    NONE = "none"  # right after the last message, in no turn at all


class _Message(msgspec.Struct):
    role: str = ""
    content: msgspec.Raw = msgspec.Raw(b"null")


_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE = msgspec.json.Decoder(_Message)
_PARTS = msgspec.json.Decoder(list[msgspec.Raw])


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


_PART = msgspec.json.Decoder(_Part)


def extend_messages(members: Members, text: str, began: str, goes_on: str) -> bytes | Poison | None:
    """The messages with `text` as the unfinished answer, for an engine that continues the last.

    `began` and `goes_on` are engines. None where this one cannot be asked so, a reason where
    nobody can.
    """
    if goes_on not in ("vllm", "sglang"):
        return None  # what it makes of an unfinished answer is not known
    messages = _MESSAGES.decode(members["messages"])
    if not messages:
        return Poison.MALFORMED
    last = _MESSAGE.decode(messages[-1])
    match _turn(members, last, began):
        case _Turn.NONE:
            return Poison.OPEN_PROMPT
        case _Turn.LAST:
            if goes_on == "sglang" and (last.role != "assistant" or not _is_text(last)):
                return None  # it would not continue this message
            return _joined([*map(bytes, messages[:-1]), _extend(bytes(messages[-1]), last, text)])
        case _Turn.AFTER_USER:
            turned = edit(bytes(messages[-1]), {"role": b'"user"'})
            return _joined([*map(bytes, messages[:-1]), turned, _answer(text)])
    return _joined([*map(bytes, messages), _answer(text)])


def _turn(members: Members, last: _Message, began: str) -> _Turn:
    continues = bool(flag_of(members, "continue_final_message"))
    if began == "sglang":
        if last.role != "assistant" or not _is_text(last):
            return _Turn.OWN
        return _Turn.LAST if continues else _Turn.AFTER_USER
    if continues:
        return _Turn.LAST
    return _Turn.OWN if flag_of(members, "add_generation_prompt", True) else _Turn.NONE


def _is_text(message: _Message) -> bool:
    return bytes(message.content).startswith(b'"')


def _answer(text: str) -> bytes:
    return msgspec.json.encode({"role": "assistant", "content": text})


def _extend(written: bytes, message: _Message, text: str) -> bytes:
    content = bytes(message.content)
    if content.startswith(b"["):
        return edit(written, {"content": _extend_parts(content, text)})
    known = "" if content == b"null" else msgspec.json.decode(content, type=str)
    return edit(written, {"content": msgspec.json.encode(known + text)})


def _extend_parts(content: bytes, text: str) -> bytes:
    """The last text part goes on; parts after it stay where they are."""
    parts = [bytes(part) for part in _PARTS.decode(content)]
    for place in reversed(range(len(parts))):
        if not parts[place].startswith(b"{"):
            continue
        part = _PART.decode(parts[place])
        if part.type == "text" and part.text is not None:
            parts[place] = edit(parts[place], {"text": msgspec.json.encode(part.text + text)})
            break
    else:
        parts.append(msgspec.json.encode({"type": "text", "text": text}))
    return _joined(parts)


def _joined(items: list[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"
