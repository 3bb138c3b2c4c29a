"""What the next worker is sent; numbers are the cases' own."""

from __future__ import annotations

import json

import pytest

from router.migration.agreement import Agreed, Disagreed
from router.migration.asking import Asking
from router.migration.attempt import Attempt
from router.migration.continuation import (
    CannotContinue,
    CompletedLocally,
    Continuation,
    Mode,
    Outcome,
    Target,
    build,
)
from router.migration.fingerprint import TEXT, fingerprint, question_body, read_ids
from router.migration.poison import Poison
from router.migration.record import Record
from router.migration.shape import Endpoint, examine
from tests.continuing import Engine, Travel, chat, completion

Json = dict[str, object]


def broken(
    request: Json, endpoint: Endpoint = "chat", *, began: str = "vllm", tokens: int = 5
) -> Record:
    """A record after `tokens` tokens with the texts t0, t1, … of ids 100, 101, …"""
    record = Record(examine(json.dumps(request).encode(), endpoint))
    asks_usage = began == "sglang" and endpoint == "chat"
    attempt = Attempt(record, began, Asking(ids=not asks_usage, usage=asks_usage))
    for place in range(tokens):
        choice: Json = {"index": 0, "finish_reason": None}
        if endpoint == "chat":
            choice["delta"] = {"content": f"t{place}"}
        else:
            choice["text"] = f"t{place}"
        chunk: Json = {"id": "x", "choices": [choice]}
        if asks_usage:
            chunk["usage"] = {"prompt_tokens": 3, "completion_tokens": place + 1}
        else:
            choice["token_ids"] = [100 + place]
            if place == 0:
                choice["prompt_token_ids"] = [1, 2, 3]
        attempt.read(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    return record


def outcome(
    request: Json,
    endpoint: Endpoint = "chat",
    *,
    began: str = "vllm",
    goes_on: str = "vllm",
    tokens: int = 5,
    same: bool = True,
    context: int | None = None,
    agreed: Agreed | Disagreed | None = None,
    refused: frozenset[Mode] = frozenset(),
) -> Outcome:
    record = broken(request, endpoint, began=began, tokens=tokens)
    if agreed is None:
        agreed = Agreed(tokens) if record.is_exact else Disagreed()
    body = json.dumps(request).encode()
    return build(record, body, Target(goes_on, context, same), agreed, refused=refused)


def continued(request: Json, endpoint: Endpoint = "chat", **more: object) -> tuple[Mode, Json]:
    found = outcome(request, endpoint, **more)  # type: ignore[arg-type]  # passed on as it is
    assert isinstance(found, Continuation), found
    return found.mode, json.loads(found.body)


#### exact


def test_exact_chat_stays_on_chat() -> None:
    found = outcome(chat(max_tokens=10))

    assert isinstance(found, Continuation)
    assert found.path == "/v1/chat/completions"
    body = json.loads(found.body)
    ids = [1, 2, 3, 100, 101, 102, 103, 104]
    assert body["kv_transfer_params"] == {"prompt_token_ids": ids}
    assert (body["max_tokens"], body["return_token_ids"]) == (5, True)
    assert body["messages"] == chat()["messages"]
    assert (found.mode, found.carried, found.expected) == (Mode.EXACT, 5, ids)


def test_exact_chat_of_sglang_takes_input_ids_and_tells_their_number() -> None:
    found = outcome(chat(), goes_on="sglang")

    assert isinstance(found, Continuation)
    assert json.loads(found.body)["input_ids"] == [1, 2, 3, 100, 101, 102, 103, 104]
    assert found.expected == 8
    assert found.asking == Asking(usage=True)


@pytest.mark.parametrize("goes_on", ["vllm", "sglang"])
def test_exact_completions_have_ids_as_their_prompt(goes_on: str) -> None:
    mode, body = continued(completion(max_tokens=9), "completions", goes_on=goes_on)

    assert (mode, body["max_tokens"]) == (Mode.EXACT, 4)
    assert body["prompt"] == [1, 2, 3, 100, 101, 102, 103, 104]


def test_ids_that_are_rolled_back_are_generated_again() -> None:
    _, body = continued(completion(max_tokens=9), "completions", agreed=Agreed(3))

    assert (body["prompt"], body["max_tokens"]) == ([1, 2, 3, 100, 101, 102], 6)


def test_case_33_another_tokenizer_gets_text() -> None:
    assert continued(chat(), same=False)[0] is Mode.TEXT
    assert continued(completion(), "completions", same=False)[0] is Mode.TEXT


def test_case_49_media_are_sent_again_as_text() -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]

    mode, body = continued(chat(messages=messages))

    assert mode is Mode.TEXT
    assert body["messages"] == [*messages, {"role": "assistant", "content": "t0t1t2t3t4"}]


def test_case_54_a_truncated_prompt_is_not_truncated_again() -> None:
    mode, body = continued(chat(truncate_prompt_tokens=4))

    assert mode is Mode.EXACT
    assert "truncate_prompt_tokens" not in body


#### text


def test_case_35_text_is_an_open_assistant_turn() -> None:
    mode, body = continued(chat(max_tokens=10), began="sglang", goes_on="sglang")

    assert (mode, body["max_tokens"]) == (Mode.TEXT, 5)
    messages = body["messages"]
    assert messages == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "t0t1t2t3t4"},
    ]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


def test_text_of_completions_is_appended() -> None:
    mode, body = continued(completion(), "completions", agreed=Disagreed())

    assert (mode, body["prompt"]) == (Mode.TEXT, "def main(t0t1t2t3t4")


USER = {"role": "user", "content": "hi"}
ONCE = {"role": "assistant", "content": "Once"}
OPEN = {"continue_final_message": True, "add_generation_prompt": False}
PARTS = {"role": "assistant", "content": [{"type": "text", "text": "On"}, {"type": "x", "y": 1}]}
LONGER = {"role": "assistant", "content": [{"type": "text", "text": "Ont0"}, {"type": "x", "y": 1}]}


@pytest.mark.parametrize(
    "case, began, goes_on, messages, flags, expected",
    [
        (30, "vllm", "vllm", [USER, ONCE], OPEN, [USER, ONCE | {"content": "Oncet0"}]),
        (30, "sglang", "sglang", [USER, ONCE], OPEN, [USER, ONCE | {"content": "Oncet0"}]),
        (30, "vllm", "sglang", [USER, ONCE], OPEN, [USER, ONCE | {"content": "Oncet0"}]),
        (30, "vllm", "vllm", [USER, PARTS], OPEN, [USER, LONGER]),
        (30, "vllm", "vllm", [USER], OPEN, [{"role": "user", "content": "hit0"}]),
        (30, "vllm", "sglang", [USER], OPEN, None),
        (31, "vllm", "vllm", [USER, ONCE], {}, [USER, ONCE, ONCE | {"content": "t0"}]),
        (31, "sglang", "vllm", [USER, ONCE], {},
         [USER, {"role": "user", "content": "Once"}, ONCE | {"content": "t0"}]),
        (31, "sglang", "sglang", [USER, ONCE], {},
         [USER, {"role": "user", "content": "Once"}, ONCE | {"content": "t0"}]),
        (31, "sglang", "sglang", [USER, PARTS], {}, [USER, PARTS, ONCE | {"content": "t0"}]),
        (31, "sglang", "sglang", [USER], OPEN, [USER, ONCE | {"content": "t0"}]),
        (0, "vllm", "openai", [USER], {}, None),
    ],
)  # fmt: skip
def test_a_trailing_turn_of_the_clients(
    case: int, began: str, goes_on: str, messages: list[Json], flags: Json, expected: object
) -> None:
    request = chat(messages=messages, **flags)

    found = outcome(request, began=began, goes_on=goes_on, tokens=1, agreed=Disagreed())

    if expected is None:
        assert found == CannotContinue("unsuitable")
    else:
        assert isinstance(found, Continuation)
        assert json.loads(found.body)["messages"] == expected


def test_a_prompt_without_a_turn_has_no_text_form() -> None:
    found = outcome(chat(add_generation_prompt=False), agreed=Disagreed())

    assert found == CannotContinue("poisoned", Poison.OPEN_PROMPT)


def test_case_27_a_token_prompt_has_no_text_form() -> None:
    found = outcome(completion(prompt=[1, 2, 3]), "completions", agreed=Disagreed())

    assert found == CannotContinue("poisoned", Poison.TOKEN_PROMPT)


@pytest.mark.parametrize("more", [{"return_token_ids": True}, {"logprobs": True}])
def test_tokens_that_were_shown_are_not_shown_again_as_others(more: Json) -> None:
    found = outcome(chat(**more), agreed=Disagreed())

    assert found == CannotContinue("poisoned", Poison.SHOWN_TOKENS)


def test_a_client_of_ids_needs_an_engine_that_sends_them() -> None:
    request = chat(return_token_ids=True)

    assert outcome(request, goes_on="sglang") == CannotContinue("unsuitable")


#### budgets and what is dropped


@pytest.mark.parametrize(
    "case, endpoint, more, expected",
    [
        (38, "completions", {"max_tokens": None}, {"max_tokens": 11}),
        (37, "chat", {"max_completion_tokens": 20, "max_tokens": 30},
         {"max_completion_tokens": 15, "max_tokens": 15}),
        (37, "chat", {"max_completion_tokens": 20, "max_tokens": None},
         {"max_completion_tokens": 15, "max_tokens": 15}),
        (36, "chat", {"max_tokens": None}, {"max_tokens": None}),
        (39, "chat", {"min_tokens": 8, "max_tokens": 10}, {"min_tokens": 3, "max_tokens": 5}),
        (39, "chat", {"min_tokens": 2, "max_tokens": 10}, {"min_tokens": 0, "max_tokens": 5}),
        (52, "chat", {"seed": 7}, {"seed": 7}),
        (58, "chat", {"user": "u", "cache_salt": "s", "priority": 3},
         {"user": "u", "cache_salt": "s", "priority": 3}),
        (55, "chat", {"model": "lora"}, {"model": "lora"}),
        (44, "chat", {"tools": [{"type": "function"}]}, {"tools": [{"type": "function"}]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("same", [True, False])
def test_what_is_reduced_and_what_stays(
    case: int, endpoint: Endpoint, more: Json, expected: Json, same: bool
) -> None:
    request = chat(**more) if endpoint == "chat" else completion(**more)

    _, body = continued(request, endpoint, same=same)

    assert {name: body[name] for name in expected} == expected


@pytest.mark.parametrize(
    "name",
    ["request_id", "rid", "kv_transfer_params", "bootstrap_room", "data_parallel_rank"],
)
def test_cases_56_and_57_what_belonged_to_one_attempt_is_dropped(name: str) -> None:
    request = chat(**{name: {} if name == "kv_transfer_params" else 5})

    assert name not in continued(request, same=False)[1]


def test_a_smaller_context_takes_what_fits() -> None:
    assert continued(chat(max_tokens=50), context=20)[1]["max_tokens"] == 12
    assert outcome(chat(max_tokens=50), context=8) == CannotContinue("unsuitable")


#### ends, and refusals


def test_case_12_a_spent_budget_is_completed_locally() -> None:
    found = outcome(chat(max_tokens=5))

    assert isinstance(found, CompletedLocally)
    assert found.reason == "budget_spent"
    assert b'"finish_reason":"length"' in found.tail
    assert found.tail.endswith(b"data: [DONE]\n\n")


def test_a_spent_budget_with_held_text_gives_it() -> None:
    found = outcome(chat(max_tokens=5, stop=["xyz"]), agreed=Agreed(5, "rest"))

    assert isinstance(found, CompletedLocally)
    assert b'"content":"rest"' in found.tail


def test_a_budget_spent_on_half_a_character_is_not_spent() -> None:
    assert (
        continued(completion(max_tokens=5), "completions", agreed=Agreed(4))[1]["max_tokens"] == 1
    )


def test_case_17_a_stop_token_at_the_end_was_the_end() -> None:
    found = outcome(chat(max_tokens=10, stop_token_ids=[104]))

    assert isinstance(found, CompletedLocally)
    assert found.reason == "finish_seen"
    assert b'"finish_reason":"stop","stop_reason":104' in found.tail


def test_case_11_a_finish_that_was_given_is_completed_with_usage() -> None:
    travel = Travel(chat(stream_options={"include_usage": True}))
    travel.begin(Engine("vllm"), -2)  # all but usage and [DONE]

    assert travel.go_on(Engine("vllm")) is None
    assert isinstance(travel.outcome, CompletedLocally)
    assert travel.outcome.reason == "finish_seen"
    travel.client.check()
    usage = {"prompt_tokens": 23, "completion_tokens": 12, "total_tokens": 35}
    assert travel.client.last_usage == [usage]


@pytest.mark.parametrize(
    "more",
    [{}, {"n": 2, "temperature": 1}, {"tools": [{"type": "function"}], "tool_choice": "none"}],
)
def test_case_20_preamble_restarts_the_request_as_it_was(more: Json) -> None:
    travel = Travel(chat(**more))
    travel.begin(Engine("vllm"), 1)
    second = Engine("vllm")
    travel.go_on(second)

    assert travel.modes == [Mode.RESTART]
    if travel.record.shape.poison is not None:
        assert second.bodies == [travel.request]
    assert travel.client.sent.count(b'"role":"assistant"') == more.get("n", 1)
    assert travel.client.sent.count(b"data: [DONE]") == 1


def test_a_poisoned_stream_does_not_move() -> None:
    assert outcome(chat(response_format={"type": "json_object"})) == CannotContinue(
        "poisoned", Poison.STRUCTURED_OUTPUT
    )


def test_a_long_stream_does_not_move() -> None:
    request = chat(max_tokens=20)
    record = Record(examine(json.dumps(request).encode(), "chat"), tokens_max=5)
    attempt = Attempt(record, "vllm", Asking(ids=True))
    for event in Engine("vllm").events("/v1/chat/completions", json.dumps(request).encode())[:9]:
        attempt.read(event)
    record.outgrow()

    found = build(record, json.dumps(request).encode(), Target("vllm"), Disagreed())
    assert found == CannotContinue("too_long")


def test_case_87_another_form_is_tried_after_a_4xx() -> None:
    refused = frozenset({Mode.EXACT})

    assert continued(chat(), refused=refused)[0] is Mode.TEXT
    assert continued(chat(), refused=frozenset({Mode.TEXT}))[0] is Mode.EXACT
    both = frozenset({Mode.EXACT, Mode.TEXT})
    assert outcome(chat(), refused=both) == CannotContinue("rejected")


def test_case_62_the_clients_body_is_left_as_it_is() -> None:
    request = chat(max_tokens=10)
    body = json.dumps(request).encode()
    record = broken(request)

    found = build(record, body, Target("vllm", None, True), Agreed(5))

    assert body == json.dumps(request).encode()
    assert isinstance(found, Continuation)
    assert (len(record.ids), record.tokens) == (5, 5)


#### fingerprint


def test_a_fingerprint_is_of_a_model_and_its_ids() -> None:
    assert fingerprint("m", [1, 2]) == fingerprint("m", (1, 2))
    assert len({fingerprint("m", [1, 2]), fingerprint("n", [1, 2]), fingerprint("m", [12])}) == 3
    assert json.loads(question_body("m"))["prompt"] == TEXT
    assert read_ids(b'{"tokens":[1,2],"count":2}') == [1, 2]
    assert read_ids(b'{"tokens":[]}') is None
    assert read_ids(b"no") is None
