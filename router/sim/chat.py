"""The chat template, and how each engine applies it.

ChatML, as in the tiny model of the recorded streams. The engines differ in what becomes of a
trailing assistant message, and that difference is what a continuation in text mode stands on
(vLLM 0.32.0, SGLang 0.5.23).
"""

from collections.abc import Sequence

from router.sim import tokens
from router.sim.jobs import Message

_GENERATION_PROMPT = "<|im_start|>assistant\n"


def _render(messages: Sequence[Message]) -> str:
    return "".join(f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in messages)


def prompt_for_vllm(
    messages: Sequence[Message], *, continue_final: bool, add_generation_prompt: bool
) -> list[int]:
    """Everything is one rendered text; a continued final turn is left open, whoever's it is."""
    if continue_final:
        last = messages[-1]
        text = _render(messages[:-1]) + f"<|im_start|>{last.role}\n{last.content}"
    else:
        text = _render(messages) + (_GENERATION_PROMPT if add_generation_prompt else "")
    return tokens.encode(text)


def prompt_for_sglang(messages: Sequence[Message], *, continue_final: bool) -> list[int]:
    """A trailing assistant turn is encoded by itself and appended, or becomes a user's turn.

    But only where its content is a string; a list of parts is left alone.
    """
    last = messages[-1]
    if last.role != "assistant" or last.is_parts:
        return tokens.encode(_render(messages) + _GENERATION_PROMPT)
    if continue_final:
        opened = tokens.encode(_render(messages[:-1]) + _GENERATION_PROMPT)
        return opened + tokens.encode(last.content)
    turned = [*messages[:-1], Message("user", last.content)]
    return tokens.encode(_render(turned) + _GENERATION_PROMPT)
