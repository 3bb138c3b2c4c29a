"""What is remembered of a stream, and what makes it unreplayable."""

from __future__ import annotations

import json

import pytest

from router.migration.asking import NOTHING, Asking
from router.migration.attempt import Attempt
from router.migration.poison import Poison
from router.migration.record import Record
from router.migration.shape import examine
from router.openai import Sign
from tests.continuing import Engine, Travel, chat, completion

Chunk = dict[str, object]


def event(choice: Chunk, **more: object) -> bytes:
    chunk = {"id": "x", "model": "m", "choices": [{"index": 0} | choice]} | more
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text(content: str, *ids: int, **more: object) -> bytes:
    return event({"delta": {"content": content}, "token_ids": list(ids)}, **more)


def attempt(tokens_max: int = 1000, *, engine: str = "vllm", **more: object) -> Attempt:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 50} | more
    record = Record(examine(json.dumps(body).encode(), "chat"), tokens_max)
    asking = Asking(ids=True) if engine == "vllm" else Asking(usage=True)
    one = Attempt(record, engine, asking)
    one.read(event({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[7, 8]))
    return one


def test_text_and_ids_are_what_was_delivered() -> None:
    one = attempt()

    signs = [one.read(text("a", 1)), one.read(text("", 2)), one.read(text("bc", 3, 4))]

    assert signs == [Sign.CONTENT, Sign.PREAMBLE, Sign.CONTENT]
    record = one.record
    assert (record.text, record.ids, record.prompt_ids) == ("abc", [1, 2, 3, 4], [7, 8])
    assert (record.tokens, record.tokens_at_text, record.prompt_tokens) == (4, 4, 2)
    assert (record.roles, record.can_continue) == ({0}, True)


@pytest.mark.parametrize(("budget", "tokens"), [(5, 5), (None, 4)])
def test_sglangs_word_that_the_budget_is_spent_counts_tokens_without_text(
    budget: int | None, tokens: int
) -> None:
    one = attempt(engine="sglang", max_tokens=budget)
    usage = {"prompt_tokens": 2, "completion_tokens": 4}
    one.read(event({"delta": {"content": "abcd"}}, usage=usage))

    one.read(event({"delta": {}, "finish_reason": "length", "matched_stop": None}))

    assert one.record.tokens == tokens


@pytest.mark.parametrize(
    "case, delta, reason",
    [
        (45, {"tool_calls": [{"index": 0}]}, Poison.TOOL_CALL),
        (45, {"content": "x", "tool_calls": [{"index": 0}]}, Poison.TOOL_CALL),
        (46, {"reasoning": "hm"}, Poison.REASONING),
        (46, {"reasoning_content": "hm"}, Poison.REASONING),
        (46, {"reasoning_content": "hm", "content": "x"}, Poison.REASONING),
        (0, {"audio": {"id": "a"}}, Poison.OTHER_CONTENT),
        (0, {"refusal": "no"}, Poison.OTHER_CONTENT),
    ],
)
def test_what_cannot_be_carried_poisons(case: int, delta: Chunk, reason: Poison) -> None:
    one = attempt()
    one.read(text("a", 1))

    sign = one.read(event({"delta": delta, "token_ids": [2]}))

    assert sign is Sign.CONTENT
    assert one.record.poison is reason
    assert one.forward == event({"delta": delta, "token_ids": None}).replace(b'": ', b'":').replace(
        b", ", b","
    )
    assert (one.record.text, one.record.ids) == ("", [])


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": None, "content": "x"},
        {"tool_calls": [], "content": ""},
        {"tool_calls": None, "refusal": None, "content": "x"},
    ],
)
def test_what_is_empty_does_not(delta: Chunk) -> None:
    one = attempt()

    one.read(event({"delta": delta, "token_ids": [2]}))

    assert one.record.can_continue


def test_case_6_an_unreadable_event_goes_on_untouched_and_poisons() -> None:
    one = attempt()

    assert one.read(b"data: {nonsense\n\n") is Sign.CONTENT
    assert one.forward == b"data: {nonsense\n\n"
    assert one.record.poison is Poison.UNREADABLE
    one.read(text("late", 1))
    assert one.record.text == ""


def test_a_member_whose_name_is_unreadable_is_other_content() -> None:
    one = attempt()
    odd = event({"delta": {"content": "", "odd": 1}, "token_ids": [1]}).replace(b"odd", b"\xff")

    assert one.read(odd) is Sign.CONTENT
    assert one.record.poison is Poison.OTHER_CONTENT


def test_several_choices_poison_even_unasked() -> None:
    one = attempt()

    one.read(event({"index": 1, "delta": {"content": "x"}, "token_ids": [1]}))

    assert one.record.poison is Poison.SEVERAL_CHOICES


@pytest.mark.parametrize("ids", [[1, "x"], [True], "no", [1.5], {}, [[1]]])
def test_case_25_malformed_ids_are_rejected_whole(ids: object) -> None:
    one = attempt(max_tokens=None)
    one.read(text("a", 1))

    assert one.read(event({"delta": {"content": "b"}, "token_ids": ids})) is Sign.CONTENT

    assert not one.record.is_exact
    assert one.record.text == "ab"
    assert b'"token_ids":null' in one.forward


def test_case_24_ids_that_usage_contradicts_are_not_all() -> None:
    one = attempt(max_tokens=None, stream_options={"include_usage": True})

    one.read(text("a", 1, usage={"prompt_tokens": 2, "completion_tokens": 1}))
    assert one.record.is_exact
    one.read(text("b", 2, usage={"prompt_tokens": 2, "completion_tokens": 3}))

    assert not one.record.is_exact
    assert one.record.can_continue


def test_case_27_a_token_prompt_without_ids_is_poisoned() -> None:
    one = attempt(input_ids=[1, 2], max_tokens=None)

    one.read(event({"delta": {"content": "a"}}))

    assert one.record.poison is Poison.TOKEN_PROMPT


def test_case_28_chunks_are_not_tokens() -> None:
    one = attempt(engine="sglang")

    one.read(
        event({"delta": {"content": "abc"}}, usage={"prompt_tokens": 2, "completion_tokens": 5})
    )

    assert (one.record.tokens, one.record.prompt_tokens) == (5, 2)
    assert one.record.can_continue


def test_uncounted_text_is_poisoned_where_the_count_matters() -> None:
    counted, free = attempt(), attempt(max_tokens=None)
    for one in (counted, free):
        one.read(event({"delta": {"content": "a"}}))

    assert counted.record.poison is Poison.UNCOUNTED
    assert free.record.can_continue


def test_case_34_strictly_longer_than_the_bound_is_not_carried() -> None:
    one = attempt(tokens_max=4)

    one.read(text("a", 1, 2))
    assert (one.record.is_too_long, one.record.text) == (False, "a")
    one.read(text("b", 3))

    assert one.record.is_too_long
    assert (one.record.text, one.record.ids, one.record.poison) == ("", [], None)


def test_case_14_an_abort_is_withheld_and_not_recorded() -> None:
    one = attempt()

    sign = one.read(event({"delta": {"content": "z"}, "finish_reason": "abort", "token_ids": [9]}))

    assert (sign, one.forward) == (Sign.LIE, b"")
    assert (one.record.text, one.record.finish) == ("", None)


def test_case_15_an_error_event_is_withheld() -> None:
    one = attempt()

    assert one.read(b'data: {"error":{"message":"x","code":500}}\n\n') is Sign.ERROR
    assert (one.forward, one.error_status) == (b"", 500)


def test_case_13_done_without_a_finish_is_a_lie() -> None:
    one = attempt()
    one.read(text("a", 1))

    assert (one.read(b"data: [DONE]\n\n"), one.forward) == (Sign.LIE, b"")


def test_case_18_chunks_without_choices_are_no_progress() -> None:
    one = attempt()

    assert one.read(b'data: {"choices":[],"usage":{"prompt_tokens":2}}\n\n') is Sign.PREAMBLE
    assert (one.record.has_content, one.events) == (False, 0)


def test_nothing_changes_where_nothing_was_asked_for() -> None:
    for engine in (Engine("vllm"), Engine("sglang")):
        for endpoint, request in (("chat", chat()), ("completions", completion())):
            body = json.dumps(request).encode()
            shape = examine(body, "chat" if endpoint == "chat" else "completions")
            one = Attempt(Record(shape), engine.kind, NOTHING)
            path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
            for raw in engine.events(path, body):
                one.read(raw)
                assert one.forward is raw


def test_case_32_the_record_spans_all_attempts() -> None:
    travel = Travel(chat(max_tokens=20))
    travel.begin(Engine("vllm"), 5)
    prompt = travel.record.prompt_ids
    travel.go_on(Engine("vllm"), 5)
    travel.go_on(Engine("vllm"), 5)

    record = travel.record
    assert record.text == travel.client.text
    assert record.prompt_ids == prompt
    assert record.tokens == len(record.ids)
    assert record.is_exact
