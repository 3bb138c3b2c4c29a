"""A request to an engine after it was checked, and the values every dialect shares.

Pure. A dialect turns a request body into a `Job`, or into the `Reply` that refuses it.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeGuard

import msgspec
from attrs import frozen

from router.sim.decoding import Limits

Json = dict[str, object]
Route = Literal["chat", "completions", "generate"]

DONE = b"data: [DONE]\n\n"


@frozen
class Reply:
    """A complete answer that is not a generation."""

    status: int
    body: bytes = b""
    content_type: str | None = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


@frozen
class Wishes:
    """What a request asks for besides text."""

    token_ids: bool = False
    usage: bool = False
    usage_everywhere: bool = False
    echo: bool = False
    logprobs: int | None = None
    sglext_input: bool = False
    sglext_output: bool = False
    sglext_framed: bool = False


@frozen
class Meeting:
    """Where SGLang's prefill and decode meet, for one sequence."""

    host: str | None
    port: int | None
    room: int | None
    is_listed: bool = False
    """The room came in a list of rooms."""


@frozen
class Job:
    """A request that will be generated. One prompt and `n` choices make `n` indices."""

    route: Route
    id: str
    rid: str
    created: int
    model: str
    prompts: tuple[Sequence[int], ...]
    limits: tuple[Limits, ...]
    n: int
    stream: bool
    wishes: Wishes
    greedy: bool = False
    role: str = "assistant"
    echo_text: str = ""
    fingerprint: str = ""
    meetings: tuple[Meeting, ...] = ()
    is_batch: bool = False
    """Its prompts came as a list of prompts."""
    kv: Json | None = None
    """vLLM's `kv_transfer_params`."""

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def prompt_of(self, index: int) -> Sequence[int]:
        return self.prompts[index // self.n]


class BadField(Exception):
    """A field of the request has a wrong type or value."""

    def __init__(self, name: str, kind: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.kind = kind
        self.message = message


class Refused(Exception):
    """The request is refused; carries the engine's answer."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


@frozen
class Fields:
    """Typed reading of a JSON object. null counts as absent unless asked about by `has_null`."""

    values: Mapping[str, object]

    def has_null(self, name: str) -> bool:
        return name in self.values and self.values[name] is None

    def get(self, name: str) -> object:
        return self.values.get(name)

    def integer(self, name: str) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadField(name, "int_parsing", "Input should be a valid integer")
        return value

    def number(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadField(name, "float_parsing", "Input should be a valid number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadField(name, "bool_parsing", "Input should be a valid boolean")
        return value

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise BadField(name, "string_type", "Input should be a valid string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """One string or a list of them."""
        value = self.values.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise BadField(name, "string_type", "Input should be a valid string")

    def ids(self, name: str) -> tuple[int, ...] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if is_ids(value):
            return tuple(value)
        raise BadField(name, "list_type", "Input should be a valid list")

    def fields(self, name: str) -> "Fields":
        """A nested object; an absent one is empty."""
        value = self.values.get(name)
        if value is None:
            return Fields({})
        if not isinstance(value, dict):
            raise BadField(name, "dict_type", "Input should be a valid dictionary")
        return Fields(value)


def is_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    )


def prompts_of(fields: Fields) -> list[str | list[int]] | None:
    """The four forms of a completions prompt as a list; None if it is absent or none of them."""
    value = fields.get("prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return None
    if value and is_ids(value):
        return [value]
    if all(isinstance(item, str) or is_ids(item) for item in value):
        return list(value)
    return None


@frozen
class Message:
    """One turn of a conversation, its text parts joined."""

    role: str
    content: str
    is_parts: bool = False


def messages_of(value: object) -> list[Message] | None:
    """The turns of a chat request; None if it is no list of messages."""
    if not isinstance(value, list):
        return None
    turns = []
    for item in value:
        if not isinstance(item, dict) or not isinstance(role := item.get("role"), str):
            return None
        content = item.get("content")
        turns.append(Message(role, _text_of(content), is_parts=isinstance(content, list)))
    return turns


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(part for part in parts if isinstance(part, str))
    return ""


def dump(payload: object) -> bytes:
    """Compact JSON with raw non-ASCII characters, as the engines write their answers."""
    return msgspec.json.encode(payload)


def event(payload: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"
