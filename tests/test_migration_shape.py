"""What of a request decides whether its answer can be continued; numbers are the cases' own."""

from __future__ import annotations

import json

import pytest

from router.migration.poison import Poison
from router.migration.shape import Endpoint, Shape, examine
from tests.continuing import chat, completion


def shape(endpoint: Endpoint, **more: object) -> Shape:
    request = chat(**more) if endpoint == "chat" else completion(**more)
    return examine(json.dumps(request).encode(), endpoint)


STRICT = [{"type": "function", "function": {"name": "f", "strict": True}}]
LOOSE = [{"type": "function", "function": {"name": "f"}}]
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "case, endpoint, more, reason",
    [
        (42, "chat", {"n": 2}, Poison.SEVERAL_CHOICES),
        (42, "completions", {"n": "2"}, Poison.SEVERAL_CHOICES),
        (42, "completions", {"best_of": 3}, Poison.SEVERAL_CHOICES),
        (42, "completions", {"use_beam_search": True}, Poison.BEAM_SEARCH),
        (42, "completions", {"prompt": ["a"]}, Poison.BATCH_PROMPT),
        (42, "completions", {"prompt": [[1]]}, Poison.BATCH_PROMPT),
        (42, "completions", {"prompt": []}, Poison.BATCH_PROMPT),
        (42, "completions", {"prompt_embeds": "AAAA"}, Poison.PROMPT_EMBEDS),
        (42, "completions", {"suffix": "}"}, Poison.SUFFIX),
        (43, "chat", {"response_format": {"type": "json_object"}}, Poison.STRUCTURED_OUTPUT),
        (
            43,
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            Poison.STRUCTURED_OUTPUT,
        ),
        (43, "chat", {"structured_outputs": {"choice": ["a"]}}, Poison.STRUCTURED_OUTPUT),
        (43, "chat", {"guided_json": {}}, Poison.STRUCTURED_OUTPUT),
        (43, "completions", {"guided_regex": "a"}, Poison.STRUCTURED_OUTPUT),
        (43, "completions", {"regex": "a"}, Poison.STRUCTURED_OUTPUT),
        (43, "completions", {"ebnf": "a"}, Poison.STRUCTURED_OUTPUT),
        (43, "completions", {"json_schema": "{}"}, Poison.STRUCTURED_OUTPUT),
        (43, "chat", {"tools": LOOSE, "tool_choice": "required"}, Poison.TOOL_CHOICE),
        (43, "chat", {"tools": LOOSE, "tool_choice": NAMED}, Poison.TOOL_CHOICE),
        (43, "chat", {"tools": STRICT}, Poison.TOOL_CHOICE),
        (40, "chat", {"max_tokens": 0}, Poison.NO_GENERATION),
        (40, "completions", {"max_tokens": 0}, Poison.NO_GENERATION),
        (41, "completions", {"echo": True}, Poison.ECHO),
        (41, "chat", {"echo": "true"}, Poison.ECHO),
        (48, "chat", {"include_reasoning": False}, Poison.HIDDEN_REASONING),
        (48, "chat", {"thinking_token_budget": 10}, Poison.HIDDEN_REASONING),
        (48, "chat", {"stream_reasoning": False}, Poison.HIDDEN_REASONING),
        (48, "chat", {"skip_special_tokens": False}, Poison.SPECIAL_TOKENS),
        (48, "chat", {"model": "openai/gpt-oss-20b"}, Poison.HARMONY),
        (0, "chat", {"return_hidden_states": "last"}, Poison.WHOLE_ANSWER_EXTRAS),
        (0, "chat", {"return_output_ids_in_sglext": True}, Poison.WHOLE_ANSWER_EXTRAS),
        (0, "completions", {"prompt_logprobs": 1}, Poison.WHOLE_ANSWER_EXTRAS),
        (0, "completions", {"stop_regex": "a+"}, Poison.STOP_REGEX),
        (0, "completions", {"session_params": {"id": "s"}}, Poison.SERVER_SESSION),
        (0, "chat", {"n": {}}, Poison.MALFORMED),
        (0, "completions", {"stop": 7}, Poison.MALFORMED),
        (0, "completions", {"prompt": 7}, Poison.MALFORMED),
    ],
)
def test_a_shape_that_cannot_be_continued_has_its_reason(
    case: int, endpoint: Endpoint, more: dict[str, object], reason: Poison
) -> None:
    assert shape(endpoint, **more).poison is reason


@pytest.mark.parametrize(
    "case, endpoint, more",
    [
        (44, "chat", {"tools": LOOSE}),
        (44, "chat", {"tools": STRICT, "tool_choice": "none"}),
        (42, "chat", {"n": 1}),
        (42, "chat", {"n": None}),
        (43, "chat", {"response_format": {"type": "text"}}),
        (43, "chat", {"response_format": None, "guided_json": None}),
        (42, "completions", {"prompt": [1, 2]}),
        (42, "completions", {"suffix": ""}),
        (49, "chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (50, "chat", {"logprobs": True, "top_logprobs": 2}),
        (51, "completions", {"logprobs": 0}),
        (52, "chat", {"seed": 1}),
        (53, "chat", {"presence_penalty": 1, "bad_words": ["x"]}),
        (54, "chat", {"truncate_prompt_tokens": 10}),
        (55, "chat", {"model": "my-lora", "lora_path": "x"}),
        (0, "chat", {"stop": ["a"], "stop_token_ids": [1], "reasoning_effort": "low"}),
        (0, "chat", {"include_reasoning": True, "skip_special_tokens": True, "echo": False}),
    ],
)
def test_nothing_is_poisoned_for_convenience(
    case: int, endpoint: Endpoint, more: dict[str, object]
) -> None:
    assert shape(endpoint, **more).poison is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"n":', b"\xff", b"null"])
def test_what_is_no_object_is_poisoned_and_nothing_raises(body: bytes) -> None:
    assert examine(body, "chat").poison is Poison.MALFORMED


@pytest.mark.parametrize(
    "endpoint, more, budget",
    [
        ("completions", {"max_tokens": None}, 16),  # case 38
        ("completions", {"max_tokens": 7, "max_completion_tokens": 3}, 7),
        ("completions", {"max_tokens": "7"}, 7),
        ("chat", {"max_tokens": None}, None),
        ("chat", {"max_tokens": 9, "max_completion_tokens": 5}, 5),  # case 37
        ("chat", {"max_tokens": 9}, 9),
    ],
)
def test_the_budget_has_its_endpoints_default(
    endpoint: Endpoint, more: dict[str, object], budget: int | None
) -> None:
    assert shape(endpoint, **more).budget == budget


@pytest.mark.parametrize(
    "endpoint, more, reason",
    [
        ("completions", {"prompt": [1, 2]}, Poison.TOKEN_PROMPT),  # case 27
        ("chat", {"input_ids": [1]}, Poison.TOKEN_PROMPT),
        ("chat", {"kv_transfer_params": {"prompt_token_ids": [1]}}, Poison.TOKEN_PROMPT),
        ("chat", {"truncate_prompt_tokens": 4}, Poison.TRUNCATED_PROMPT),  # case 54
        ("chat", {}, None),
        ("completions", {}, None),
    ],
)
def test_some_can_only_be_continued_by_ids(
    endpoint: Endpoint, more: dict[str, object], reason: Poison | None
) -> None:
    assert shape(endpoint, **more).text_barred is reason


def test_what_else_is_read() -> None:
    found = shape(
        "chat",
        min_tokens=3,
        stop="END",
        stop_token_ids=[5],
        no_stop_trim=True,
        stream_options={"include_usage": True, "continuous_usage_stats": False},
        return_token_ids=False,
        logprobs=True,
        tools=LOOSE,
        messages=[{"role": "user", "content": ["a", {"type": "image_url"}]}],
    )

    assert (found.min_tokens, found.stops) == (3, ("END",))
    assert found.stop_ids == {5}
    assert (found.keeps_stop, found.asks_ids, found.asks_logprobs) == (True, False, True)
    assert (found.asks_usage, found.asks_continuous_usage) == (True, False)
    assert (found.has_media, found.has_tools, found.model) == (True, True, "tiny")


def test_every_reason_says_why() -> None:
    assert len({reason.value for reason in Poison}) == len(list(Poison))
    for reason in Poison:
        assert reason.value.replace("_", "").islower()
        assert 20 < len(reason.why) < 200
        assert not reason.why.endswith(".")
