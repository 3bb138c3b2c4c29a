"""What of a request decides whether and how its answer can be continued elsewhere.

Examined once, before dispatch, from the body alone; what only an engine knows (its defaults for a
trailing assistant turn, say) is left to the continuation. A shape with a `poison` may still be
restarted while the client has nothing but preamble. Nothing is poisoned for convenience: the
reasons and why they are reasons stand in `router.migration.poison`.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from attrs import frozen

from router.migration.poison import Poison
from router.migration.reading import (
    Unreadable,
    flag_of,
    ids_of,
    integer_of,
    is_given,
    object_of,
    texts_of,
    value_of,
)
from router.migration.splice import Members, read_members

Endpoint = Literal["chat", "completions"]

#: Both engines (vLLM 0.32, SGLang 0.5.23) generate this many tokens when nothing is said.
COMPLETION_TOKENS_DEFAULT = 16

#: Constraints in the spelling of one engine or another, of today or of older releases.
_GRAMMARS = ("structured_outputs", "regex", "ebnf", "json_schema", "structural_tag")
_GUIDED = "guided_"
#: Answers about the generation as a whole.
_EXTRAS_WANTED = (
    "return_hidden_states",
    "return_routed_experts",
    "return_token_offsets",
    "return_meta_info",
    "return_input_ids_in_sglext",
    "return_output_ids_in_sglext",
    "return_sampling_mask",
    "return_spec_tokens_details",
    "return_cached_tokens_details",
    "return_flat_raw_output_top_logprobs",
)


@frozen
class Shape:
    """One request, as far as continuing its answer depends on it."""

    endpoint: Endpoint
    #: Why content of this request may not be continued at all.
    poison: Poison | None = None
    #: Why it may not be continued as text; token ids would do.
    text_barred: Poison | None = None
    #: Media parts: exact continuation would leave placeholders without their media.
    has_media: bool = False
    #: A tool parser may swallow text whose ids are reported.
    has_tools: bool = False
    #: Tokens of output asked for, with the endpoint's default; None: up to the context length.
    budget: int | None = None
    min_tokens: int = 0
    #: The same tokens come again, whoever makes them.
    is_greedy: bool = False
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    #: The stop string is part of the answer.
    keeps_stop: bool = False
    #: What the client said about ids and usage; None: nothing.
    asks_ids: bool | None = None
    asks_usage: bool | None = None
    asks_continuous_usage: bool | None = None
    asks_logprobs: bool = False
    model: str | None = None

    @property
    def shows_tokens(self) -> bool:
        """Whether the client can count tokens in what it is given."""
        return bool(self.asks_ids) or self.asks_logprobs


def examine(body: bytes, endpoint: Endpoint) -> Shape:
    """The shape of a request body. Never raises: what cannot be read is poisoned."""
    members = read_members(body)
    if members is None:
        return Shape(endpoint, poison=Poison.MALFORMED)
    try:
        return _examine(members, endpoint)
    except Unreadable:
        return Shape(endpoint, poison=Poison.MALFORMED)


def _examine(members: Members, endpoint: Endpoint) -> Shape:
    options = object_of(members, "stream_options")
    budget = _budget(members, endpoint)
    model = value_of(members, "model")
    return Shape(
        endpoint,
        poison=_poison(members, endpoint, budget),
        text_barred=_text_barred(members, endpoint),
        has_media=endpoint == "chat" and _has_media(members),
        has_tools=is_given(members, "tools") and value_of(members, "tool_choice") != "none",
        budget=budget,
        min_tokens=integer_of(members, "min_tokens") or 0,
        is_greedy=_is_greedy(members),
        stops=tuple(stop for stop in texts_of(members, "stop") if stop),
        stop_ids=frozenset(ids_of(members, "stop_token_ids")),
        keeps_stop=bool(
            flag_of(members, "include_stop_str_in_output") or flag_of(members, "no_stop_trim")
        ),
        asks_ids=flag_of(members, "return_token_ids"),
        asks_usage=flag_of(options, "include_usage"),
        asks_continuous_usage=flag_of(options, "continuous_usage_stats"),
        asks_logprobs=_asks_logprobs(members, endpoint),
        model=model if isinstance(model, str) else None,
    )


def _budget(members: Members, endpoint: Endpoint) -> int | None:
    if endpoint == "completions":
        # Neither engine knows `max_completion_tokens` here.
        given = integer_of(members, "max_tokens")
        return COMPLETION_TOKENS_DEFAULT if given is None else given
    given = integer_of(members, "max_completion_tokens")
    return integer_of(members, "max_tokens") if given is None else given


def _is_greedy(members: Members) -> bool:
    temperature = value_of(members, "temperature")
    return type(temperature) in (int, float) and temperature == 0


def _asks_logprobs(members: Members, endpoint: Endpoint) -> bool:
    if endpoint == "chat":
        return bool(flag_of(members, "logprobs"))
    return integer_of(members, "logprobs") is not None


def _poison(members: Members, endpoint: Endpoint, budget: int | None) -> Poison | None:
    """The first reason that forbids any continuation of content."""
    if (integer_of(members, "n") or 1) != 1 or (integer_of(members, "best_of") or 1) != 1:
        return Poison.SEVERAL_CHOICES
    if flag_of(members, "use_beam_search"):
        return Poison.BEAM_SEARCH
    if flag_of(members, "echo"):
        return Poison.ECHO
    if budget is not None and budget < 1:
        return Poison.NO_GENERATION
    if _is_structured(members):
        return Poison.STRUCTURED_OUTPUT
    if (reason := _hidden(members)) is not None:
        return reason
    if any(value_of(members, name) for name in _EXTRAS_WANTED):
        return Poison.WHOLE_ANSWER_EXTRAS
    if is_given(members, "prompt_logprobs"):
        return Poison.WHOLE_ANSWER_EXTRAS
    if texts_of(members, "stop_regex"):
        return Poison.STOP_REGEX
    if is_given(members, "session_params"):
        return Poison.SERVER_SESSION
    return _chat_poison(members) if endpoint == "chat" else _completion_poison(members)


def _is_structured(members: Members) -> bool:
    if any(is_given(members, name) for name in _GRAMMARS):
        return True
    if any(name.startswith(_GUIDED) and is_given(members, name) for name in members):
        return True
    return value_of(object_of(members, "response_format"), "type") not in (None, "text")


def _hidden(members: Members) -> Poison | None:
    if flag_of(members, "include_reasoning") is False:
        return Poison.HIDDEN_REASONING
    if flag_of(members, "stream_reasoning") is False:
        return Poison.HIDDEN_REASONING
    if is_given(members, "thinking_token_budget"):
        return Poison.HIDDEN_REASONING
    if flag_of(members, "skip_special_tokens") is False:
        return Poison.SPECIAL_TOKENS
    return None


def _chat_poison(members: Members) -> Poison | None:
    choice = value_of(members, "tool_choice")
    if choice == "required" or isinstance(choice, dict):
        return Poison.TOOL_CHOICE
    if is_given(members, "tools") and choice != "none" and _has_strict_tool(members):
        return Poison.TOOL_CHOICE
    model = value_of(members, "model")
    if isinstance(model, str) and "gpt-oss" in model.lower():
        return Poison.HARMONY
    return None


def _completion_poison(members: Members) -> Poison | None:
    if is_given(members, "suffix") and value_of(members, "suffix") != "":
        return Poison.SUFFIX
    if is_given(members, "prompt_embeds"):
        return Poison.PROMPT_EMBEDS
    prompt = value_of(members, "prompt")
    if isinstance(prompt, list) and not _is_token_prompt(prompt):
        return Poison.BATCH_PROMPT
    if not isinstance(prompt, str | list):
        return Poison.MALFORMED
    return None


def _is_token_prompt(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(id_) is int for id_ in prompt)


def _text_barred(members: Members, endpoint: Endpoint) -> Poison | None:
    """Why only ids will do."""
    if is_given(members, "truncate_prompt_tokens"):
        return Poison.TRUNCATED_PROMPT
    if endpoint == "completions":
        is_text = isinstance(value_of(members, "prompt"), str)
        return None if is_text else Poison.TOKEN_PROMPT
    transfer = object_of(members, "kv_transfer_params")
    if is_given(members, "input_ids") or is_given(transfer, "prompt_token_ids"):
        return Poison.TOKEN_PROMPT
    return None


class _Function(msgspec.Struct):
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function | None = None
    strict: bool | None = None


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


class _Part(msgspec.Struct):
    type: str = "text"


_TOOLS = msgspec.json.Decoder(list[_Tool])
_MESSAGES = msgspec.json.Decoder(list[_Message])
_PARTS = msgspec.json.Decoder(list[_Part | str])


def _has_strict_tool(members: Members) -> bool:
    try:
        tools = _TOOLS.decode(members["tools"])
    except msgspec.DecodeError as error:
        raise Unreadable("tools") from error
    return any(tool.strict or (tool.function and tool.function.strict) for tool in tools)


def _has_media(members: Members) -> bool:
    if not is_given(members, "messages"):
        return False
    try:
        for message in _MESSAGES.decode(members["messages"]):
            if bytes(message.content).startswith(b"[") and any(
                isinstance(part, _Part) and part.type != "text"
                for part in _PARTS.decode(message.content)
            ):
                return True
    except msgspec.DecodeError as error:
        raise Unreadable("messages") from error
    return False
