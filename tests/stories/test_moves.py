"""A stream whose worker goes away goes on elsewhere: what is carried, and what the next is sent."""

from __future__ import annotations

import msgspec
import pytest

from tests.moves import CUT, PLAIN, completion, is_told, is_whole, lose, more
from tests.simulate import Client

USAGE: dict[str, object] = {"stream_options": {"include_usage": True}}
MESSAGES = [{"role": "user", "content": "once upon a time"}]


def test_a_broken_chat_goes_on_with_the_ids_of_prompt_and_output() -> None:
    outcome = lose()

    (first,), (next_,) = outcome.asked(0), outcome.asked(1)
    carried = next_["kv_transfer_params"]
    assert is_whole(outcome)
    assert outcome.facts == [
        "admitted", "answered", "first_token", "leg_lost", "admitted", "first_token", "completed",
    ]  # fmt: skip
    assert outcome.moves == {"stream_broken exact": 1}
    assert first["return_token_ids"] is next_["return_token_ids"] is True
    assert isinstance(carried, dict)
    assert list(carried) == ["prompt_token_ids"]
    assert next_["max_tokens"] == 7
    assert next_["messages"] == MESSAGES


@pytest.mark.parametrize("kinds", ["vllm vllm", "sglang sglang", "vllm sglang", "sglang vllm"])
def test_a_broken_completion_goes_on_with_the_ids_as_its_prompt(kinds: str) -> None:
    outcome = lose(client=completion(**USAGE), kinds=kinds)

    (next_,) = outcome.asked(1)
    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken exact": 1}
    assert isinstance(next_["prompt"], list)


def test_without_ids_the_text_is_carried_as_a_turn_that_goes_on() -> None:
    outcome = lose(kinds="sglang sglang")

    (next_,) = outcome.asked(1)
    messages = next_["messages"]
    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken text": 1}
    assert isinstance(messages, list)
    assert messages[:-1] == MESSAGES
    assert messages[-1]["role"] == "assistant"
    assert outcome.one.text.startswith(messages[-1]["content"])
    assert (next_["continue_final_message"], next_["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(("kinds", "mode"), [("vllm sglang", "exact"), ("sglang vllm", "text")])
def test_a_chat_goes_on_on_an_engine_of_another_kind(kinds: str, mode: str) -> None:
    outcome = lose(kinds=kinds)

    assert is_whole(outcome)
    assert outcome.moves == {f"stream_broken {mode}": 1}


@pytest.mark.parametrize(
    "fault",
    [
        "cut,after_events=4,inside_bytes=30",
        "cut,after_events=4,reset=true",
        "end,after_events=4",
        "end,after_events=4,done=true",
        "abort,after_events=4",
        "abort,after_events=4,done=false",
        "error_event,after_events=4",
        "error_event,after_events=4,code=503,done=false",
        "hang,after_events=4",
        "garbage,what=chunk_size,after_events=4",
        "garbage,what=chunk_end,after_events=4",
        "core_dies,after_events=4",
        "server_dies,after_events=4",
        "sigterm_abort,after_events=4",
        "sigterm_hang,after_events=4",
        "sigterm_drain,timeout=0.1,after_events=4",
    ],
)
@pytest.mark.parametrize("dress", ["", ";crlf", ";comments", ";lump,events=3", ";close_delimited"])
def test_however_it_breaks_the_client_does_not_notice(fault: str, dress: str) -> None:
    outcome = lose(f"request=1:{fault}" + dress.replace(";", ";request=1:"), cuts=len(fault))

    assert is_whole(outcome)
    assert sum(outcome.moves.values()) == 1


@pytest.mark.parametrize("fault", ["scheduler_dies,after_events=4", "server_dies,after_events=4"])
def test_deaths_of_sglang_are_not_noticed_either(fault: str) -> None:
    outcome = lose(f"request=1:{fault}", kinds="sglang sglang")

    assert is_whole(outcome)


def test_a_4xx_event_in_the_middle_is_the_clients_and_moves_nothing() -> None:
    outcome = lose("request=1:error_event,after_events=4,code=400,message=too%20long")

    assert is_told(outcome)
    assert outcome.one.code == 400
    assert outcome.asked(1) == []
    assert (outcome.moves, outcome.stuck) == ({}, {})


#### What is sent again from the start


@pytest.mark.parametrize("kinds", ["vllm vllm", "sglang sglang"])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"regex": "[a-z]*"},
        {"n": 2, "temperature": 0.5},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["###"], "min_tokens": 2},
    ],
)
def test_with_nothing_but_preamble_delivered_any_request_starts_again(
    fields: dict[str, object], kinds: str
) -> None:
    client = more(**fields)

    outcome = lose("request=1:cut,after_events=1", client, kinds=kinds)

    sent = [each for each in outcome.work(1) if "x-request-id" in each.headers]
    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken restart": 1}
    is_asking = outcome.asked(1)[0].keys() - msgspec.json.decode(client.body("tiny")).keys()
    assert is_asking <= {"return_token_ids", "stream_options"}
    assert is_asking or sent[0].body == client.body("tiny")
    assert outcome.stuck == {}


#### What cannot go on


def test_content_of_a_grammar_does_not_move() -> None:
    outcome = lose(client=more(response_format={"type": "json_object"}))

    assert is_told(outcome)
    assert outcome.asked(1) == []
    assert outcome.stuck == {"poisoned": 1}
    assert outcome.count("baton_poisoned_total", reason="structured_output") == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2, "temperature": 0.5}, "several_choices"),
        ({"best_of": 3, "n": 1}, "several_choices"),
        ({"prompt": ["once"]}, "batch_prompt"),
        ({"prompt": [[9, 10]]}, "batch_prompt"),
        ({"echo": True}, "echo"),
        ({"use_beam_search": True}, "beam_search"),
        ({"skip_special_tokens": False}, "special_tokens"),
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"return_hidden_states": True}, "whole_answer_extras"),
    ],
)
def test_shapes_that_cannot_go_on_are_never_tried(fields: dict[str, object], reason: str) -> None:
    outcome = lose(client=completion(**fields))

    assert is_told(outcome)
    assert outcome.asked(1) == []
    assert "return_token_ids" not in outcome.asked(0)[0]
    assert outcome.stuck == {"poisoned": 1}
    assert outcome.count("baton_poisoned_total", reason=reason) == 1


@pytest.mark.parametrize(("kind", "is_moved"), [("vllm", True), ("openai", False)])
def test_a_prompt_of_ids_moves_where_ids_are_told(kind: str, is_moved: bool) -> None:
    client = completion(prompt=[116, 113, 102, 104])

    outcome = lose(client=client, kinds=f"{kind} {kind}")

    assert is_whole(outcome) is is_moved
    if is_moved:
        prompt = outcome.asked(1)[0]["prompt"]
        assert isinstance(prompt, list)
        assert prompt[:4] == [116, 113, 102, 104]
        assert len(prompt) == 8
    else:
        assert outcome.stuck == {"poisoned": 1}
        assert outcome.count("baton_poisoned_total", reason="token_prompt") == 1


def test_an_event_that_nobody_can_read_ties_a_stream_to_its_worker() -> None:
    outcome = lose("request=1:garbage,what=json,after_events=3;request=1:cut,after_events=6")

    assert is_told(outcome)
    assert outcome.asked(1) == []
    assert outcome.count("baton_poisoned_total", reason="unreadable") == 1


def test_a_poisoned_stream_that_does_not_break_is_counted_and_unharmed() -> None:
    outcome = lose("", client=more(response_format={"type": "json_object"}))

    assert is_whole(outcome)
    assert outcome.count("baton_poisoned_total", reason="structured_output") == 1
    assert outcome.stuck == {}


#### Budgets


@pytest.mark.parametrize(
    ("fields", "after", "expected"),
    [
        ({"min_tokens": 8}, 6, {"max_tokens": 5, "min_tokens": 3}),
        ({"min_tokens": 8}, 10, {"max_tokens": 1, "min_tokens": 0}),
        ({"max_tokens": None}, 7, {"max_tokens": None}),
        ({"max_tokens": None, "max_completion_tokens": 20}, 6, {"max_completion_tokens": 15}),
        ({"max_tokens": 5, "max_completion_tokens": 20}, 6, {"max_completion_tokens": 15}),
    ],
)
def test_budgets_of_a_chat_are_what_is_left(
    fields: dict[str, object], after: int, expected: dict[str, object]
) -> None:
    client = more(**fields, ignore_eos=False)

    outcome = lose(f"request=1:cut,after_events={after}", client, context_length=100)

    (next_,) = outcome.asked(1)
    assert {name: next_[name] for name in expected} == expected


def test_a_completion_without_a_budget_has_sixteen_tokens() -> None:
    outcome = lose("request=1:cut,after_events=6", completion(max_tokens=None))

    assert outcome.asked(1)[0]["max_tokens"] == 10
    assert is_whole(outcome)


#### Turns


@pytest.mark.parametrize("kinds", ["vllm vllm", "sglang sglang", "vllm sglang", "sglang vllm"])
@pytest.mark.parametrize("content", ["Once", [{"type": "text", "text": "Once"}]])
def test_a_turn_of_the_clients_own_is_made_longer(kinds: str, content: object) -> None:
    began = [*MESSAGES, {"role": "assistant", "content": content}]
    client = more(messages=began, continue_final_message=True, add_generation_prompt=False)

    outcome = lose(client=client, kinds=kinds)

    messages = outcome.asked(1)[0]["messages"]
    assert is_whole(outcome)
    assert isinstance(messages, list)
    if outcome.moves == {"stream_broken exact": 1}:
        assert messages == began
        return
    *before, last = messages
    if content == "Once":
        assert before == MESSAGES
        assert outcome.one.text.startswith(last["content"].removeprefix("Once"))
    else:  # SGLang leaves such a message alone, and answers in a turn of its own
        assert before == began
        assert outcome.one.text.startswith(last["content"])
    assert len(last["content"]) > len("Once")


@pytest.mark.parametrize("kinds", ["vllm vllm", "sglang sglang", "vllm sglang", "sglang vllm"])
def test_a_turn_of_the_clients_own_that_does_not_go_on_stays(kinds: str) -> None:
    began = [*MESSAGES, {"role": "assistant", "content": "Once"}]

    outcome = lose(client=more(messages=began), kinds=kinds)

    assert is_whole(outcome)
    assert len(outcome.moves) == 1


def test_media_is_sent_again_and_never_as_ids() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "x"}}]
    client = more(messages=[{"role": "user", "content": parts}])

    outcome = lose(client=client)

    (next_,) = outcome.asked(1)
    messages = next_["messages"]
    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken text": 1}
    assert isinstance(messages, list)
    assert messages[0]["content"] == parts
    assert "kv_transfer_params" not in next_


#### Again and again


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_as_many_moves_as_the_limit(limit: int, kind: str) -> None:
    cut = "cut,after_events=20"
    client = Client(tokens=90, extra=USAGE)

    outcome = lose(
        f"request=1:{cut}", client, kinds=" ".join([kind] * 4), limit=limit,
        happenings=tuple((0.0, f"faults {number} request=1:{cut}") for number in (1, 2)),
    )  # fmt: skip

    assert sum(outcome.moves.values()) == limit
    assert is_whole(outcome) is (limit == 3)
    assert outcome.stuck == ({} if limit == 3 else {"limit": 1})


def test_nobody_is_asked_twice() -> None:
    cut = "cut,after_events=20"

    outcome = lose(
        f"request=1:{cut}", Client(tokens=60), limit=5,
        happenings=((0.0, f"faults 1 request=1:{cut}"),),
    )  # fmt: skip

    assert is_told(outcome)
    assert outcome.stuck == {"no_candidate": 1}
    assert len(outcome.asked(0)) == len(outcome.asked(1)) == 1


def test_retries_before_the_client_has_something_go_on_as_before() -> None:
    outcome = lose("request=1:cut,at=head", PLAIN)

    assert is_whole(outcome)
    assert outcome.moves == {}
    assert outcome.count("baton_retries_total", reason="leg_lost") == 1
    assert CUT not in str(outcome.log)
