"""Requests that the tests send, and what is equal in two answers to the same one.

All are greedy, so that the same request has the same answer. Two runs may still differ in how many
tokens an event carries, because engines merge what is ready when they come to send it.
"""

import json
from collections.abc import Iterable
from typing import TypeAlias

from tests.real import places

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
Object: TypeAlias = dict[str, Json]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG_TOKENS = 1900
"""Seventeen seconds on one core: whoever is free sooner has stopped early."""
IDENTITY = ("id", "created", "system_fingerprint")
"""What an engine makes up anew for every answer."""


def chat(text: str, **fields: Json) -> Object:
    message: Object = {"role": "user", "content": text}
    return {"model": places.MODEL_NAME, "messages": [message], "temperature": 0, **fields}


def completion(text: str, **fields: Json) -> Object:
    return {"model": places.MODEL_NAME, "prompt": text, "temperature": 0, **fields}


def long(stream: bool) -> bytes:
    """A completion that keeps an engine busy for long enough to see it stop."""
    body = completion("def main(", max_tokens=LONG_TOKENS, ignore_eos=True, stream=stream)
    return json.dumps(body).encode()


def without_identity(answer: Json) -> Json:
    assert isinstance(answer, dict)
    return {name: value for name, value in answer.items() if name not in IDENTITY}


def merged(events: Iterable[bytes]) -> Json:
    """A stream as one object: text and lists joined, of all else the last that was not null."""
    whole: Json = {}
    for event in events:
        if event == b"[DONE]":
            whole = _joined(whole, {"done": True})
        else:
            whole = _joined(whole, _by_index(without_identity(json.loads(event))))
    return whole


def _by_index(event: Json) -> Json:
    """Choices keyed by their index, since an event holds some of them in any order."""
    assert isinstance(event, dict)
    choices = event.pop("choices", None)
    if isinstance(choices, list):
        for choice in choices:
            assert isinstance(choice, dict)
            event[f"choice {choice.pop('index')}"] = choice
    return event


_FIXED = ("object", "model", "role", "finish_reason", "type")


def _joined(before: Json, after: Json) -> Json:
    if isinstance(before, dict) and isinstance(after, dict):
        names = {**before, **after}
        return {
            name: after.get(name) or before.get(name)
            if name in _FIXED
            else _joined(before.get(name), after.get(name))
            for name in names
        }
    if isinstance(before, str) and isinstance(after, str):
        return before + after
    if isinstance(before, list) and isinstance(after, list):
        return before + after
    return before if after is None else after
