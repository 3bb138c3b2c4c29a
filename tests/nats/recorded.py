"""A recorded stream of a real vLLM, taken apart."""

import json
from pathlib import Path

from tests.infera_peer import Json

TRACES = Path(__file__).parent.parent / "traces"
CHAT_TRACE = (TRACES / "vllm-chat-ids.sse").read_bytes()
COMPLETION_TRACE = (TRACES / "vllm-completions-ids.sse").read_bytes()
WITH_IDS: dict[str, Json] = {
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}
"""What the recorded streams were asked for with."""


def events_of(trace: bytes) -> list[bytes]:
    """The events, each with the blank line that ends it."""
    return [event + b"\n\n" for event in trace.split(b"\n\n") if event]


def text_of(trace: bytes) -> str:
    text = ""
    for event in events_of(trace):
        if event.startswith(b"data: {"):
            for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


CHAT_TEXT = text_of(CHAT_TRACE)
