"""What the judge says of every kind of event, and of the streams of real engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from router.errors import Refusal
from router.openai import Asked, Judge, Sign, judge_answer, read_request
from router.sse import EventReader

TRACES = Path(__file__).parent / "traces"


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chat(delta: dict[str, object], finish: str | None = None, index: int = 0) -> bytes:
    return event({"choices": [{"index": index, "delta": delta, "finish_reason": finish}]})


def text(piece: str, finish: str | None = None, index: int = 0) -> bytes:
    return event({"choices": [{"index": index, "text": piece, "finish_reason": finish}]})


DONE = b"data: [DONE]\n\n"


def signs(stream: bytes, family: str = "openai") -> list[Sign]:
    judge = Judge(family)
    return [judge.read(each) for each in EventReader(1 << 20).feed(stream)]


#### requests


@pytest.mark.parametrize(
    "body, asked",
    [
        (b'{"model":"m","stream":true}', Asked("m", True)),
        (b'{"stream":false,"messages":[{"role":"user","content":"x"}]}', Asked(None, False)),
        (b'{"model":null,"stream":null}', Asked()),
        (b"{}", Asked()),
        (b' \n{"model":"m"} ', Asked("m")),
        ('{"model":"模型"}'.encode(), Asked("模型")),
    ],
)
def test_what_is_read_of_a_request(body: bytes, asked: Asked) -> None:
    assert read_request(body) == asked


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model":"m"',
        b'{"model":"m"} x',
        b"model=m",
        b"\xff\xfe",
        b'{"model":"\xff"}',
        b"null",
        b"[]",
        b'"text"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    refused = read_request(body)

    assert isinstance(refused, Refusal)
    assert (refused.code, refused.param) == ("bad_request", None)


@pytest.mark.parametrize(
    "body, param",
    [
        (b'{"model":1}', "model"),
        (b'{"model":["m"]}', "model"),
        (b'{"stream":"yes"}', "stream"),
        (b'{"stream":1}', "stream"),
    ],
)
def test_a_wrong_type_names_its_field(body: bytes, param: str) -> None:
    refused = read_request(body)

    assert isinstance(refused, Refusal)
    assert (refused.code, refused.param) == ("bad_request", param)


#### events

ERRORS = [
    (
        b'{"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError",'
        b'"param":null,"code":500}}',
        500,
    ),
    (
        b'{"error":{"object":"error","message":"x","type":"BadRequest","param":null,"code":400}}',
        400,
    ),
    (b'{"error":{"message":"x","code":"429"}}', 429),
    (b'{"error":{"message":"x","code":429}}', 429),
    (b'{"error":{"message":"x","code":"context_length_exceeded"}}', 500),
    (b'{"error":{"message":"x","status_code":503}}', 503),
    (b'{"error":{"message":"x","code":200}}', 500),
    (b'{"error":{"message":"x","code":1e3}}', 500),
    (b'{"error":{"message":"x","code":null}}', 500),
    (b'{"error":{}}', 500),
    (b'{"error":"boom"}', 500),
    (b'{"error":["boom"]}', 500),
    (b'{"error":true}', 500),
    (b'{"object":"error","message":"x","type":"BadRequestError","param":null,"code":400}', 400),
    (b'{"object":"error","message":"x","code":503}', 503),
    (b'{"object":"error","message":"x"}', 500),
]


@pytest.mark.parametrize("family", ["openai", "generate", "other"])
@pytest.mark.parametrize("data, status", ERRORS, ids=lambda value: str(value)[:70])
def test_error_events_in_every_shape(family: str, data: bytes, status: int) -> None:
    judge = Judge(family)

    assert judge.read(b"data: " + data + b"\n\n") is Sign.ERROR
    assert (judge.error_status, judge.error_body) == (status, data)


def test_an_error_event_may_have_a_name() -> None:
    judge = Judge("openai")

    assert judge.read(b'event: error\ndata: {"error":{"code":503}}\n\n') is Sign.ERROR
    assert judge.error_status == 503


@pytest.mark.parametrize("family", ["openai", "generate", "other"])
def test_no_error_is_no_error(family: str) -> None:
    fields = {"error": None, "text": "a", "choices": [{"index": 0, "text": "a"}], "object": "x"}

    assert Judge(family).read(event(fields)) is Sign.CONTENT


@pytest.mark.parametrize("family", ["openai", "generate", "other"])
@pytest.mark.parametrize(
    "comment", [b": ping\n\n", b":\n\n", b"event: ping\n\n", b"retry: 1000\n\n", b"id: 1\n\n"]
)
def test_what_has_no_data_proves_nothing(family: str, comment: bytes) -> None:
    judge = Judge(family)

    assert judge.read(comment) is Sign.COMMENT
    assert judge.events == 0


@pytest.mark.parametrize(
    "delta, sign",
    [
        ({"role": "assistant", "content": ""}, Sign.PREAMBLE),
        ({"role": "assistant", "content": None, "reasoning_content": None}, Sign.PREAMBLE),
        ({"role": "assistant"}, Sign.PREAMBLE),
        ({}, Sign.PREAMBLE),
        ({"content": ""}, Sign.PREAMBLE),
        ({"content": "a"}, Sign.CONTENT),
        ({"role": "assistant", "content": "a"}, Sign.CONTENT),
        ({"content": " "}, Sign.CONTENT),
        ({"reasoning_content": "hm"}, Sign.CONTENT),
        ({"content": None, "reasoning": "hm"}, Sign.CONTENT),
        ({"content": "", "tool_calls": [{"index": 0, "id": "c"}]}, Sign.CONTENT),
        ({"refusal": "no"}, Sign.CONTENT),
        ({"function_call": {"name": "f"}}, Sign.CONTENT),
        ({"role": "assistant", "content": "", "refusal": None}, Sign.PREAMBLE),
    ],
)
def test_content_is_whatever_a_client_reads(delta: dict[str, object], sign: Sign) -> None:
    judge = Judge("openai")

    assert judge.read(chat(delta)) is sign
    assert judge.events == (sign is Sign.CONTENT)


def test_content_of_any_choice_is_content() -> None:
    two = [{"index": 0, "delta": {"content": ""}}, {"index": 1, "delta": {"content": "a"}}]

    assert Judge("openai").read(event({"choices": two})) is Sign.CONTENT


UNREADABLE = {
    "openai": [b'{"choices":5}', b'{"choices":[{"index":"a"}]}', b'{"choices":[{"delta":[]}]}'],
    "generate": [b'{"text":5}', b'{"output_ids":"a"}', b'{"meta_info":[]}'],
    "other": [b'{"type":"response.created"}'],
}
NO_JSON = [b"", b"hello", b"{", b"[1]", b"[" * 100_000, b'{"a":' * 100_000]


@pytest.mark.parametrize("family", UNREADABLE)
def test_an_event_that_cannot_be_read_counts_as_content(family: str) -> None:
    for data in NO_JSON + UNREADABLE[family]:
        judge = Judge(family)

        assert judge.read(b"data: " + data + b"\n\n") is Sign.CONTENT, data[:30]
        assert not judge.finished


#### ends


def test_a_finish_may_come_alone_or_with_content() -> None:
    alone = [chat({"content": "a"}), chat({}, "stop"), DONE]
    together = [chat({"content": "a"}, "length"), DONE]

    assert signs(b"".join(alone)) == [Sign.CONTENT, Sign.PREAMBLE, Sign.DONE]
    assert signs(b"".join(together)) == [Sign.CONTENT, Sign.DONE]


def test_an_empty_answer_may_end_well() -> None:
    assert signs(chat({"role": "assistant"}) + chat({}, "stop") + DONE)[-1] is Sign.DONE


def test_done_without_a_finish_is_a_lie() -> None:
    assert signs(chat({"content": "a"}) + DONE)[-1] is Sign.LIE
    assert signs(DONE) == [Sign.LIE]
    assert signs(b": ping\n\n" + DONE)[-1] is Sign.LIE
    assert signs(event({"choices": [], "usage": {"completion_tokens": 1}}) + DONE)[-1] is Sign.LIE


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_finish_by_which_the_engine_gave_up_is_a_lie(reason: str) -> None:
    assert signs(chat({"content": ""}, reason)) == [Sign.LIE]
    assert signs(text("a", reason)) == [Sign.LIE]
    given_up = event({"text": "a", "meta_info": {"finish_reason": {"type": reason}}})
    assert signs(given_up, "generate") == [Sign.LIE]


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "content_filter", "eos_token"])
def test_every_other_finish_is_honest(reason: str) -> None:
    assert signs(text("a", reason) + DONE) == [Sign.CONTENT, Sign.DONE]


def test_an_empty_finish_reason_is_none() -> None:
    assert signs(text("a", "") + DONE)[-1] is Sign.LIE


def test_every_choice_must_finish() -> None:
    both = text("a") + text("b", index=1)

    assert signs(both + text("", "stop") + DONE)[-1] is Sign.LIE
    assert signs(both + text("", "stop") + text("", "stop", 1) + DONE)[-1] is Sign.DONE


def test_a_choice_that_begins_after_another_has_finished_must_finish_too() -> None:
    judge = Judge("openai")

    judge.read(text("a", "stop", 0))
    assert judge.finished
    judge.read(text("b", None, 1))
    assert not judge.finished
    judge.read(text("b", "stop", 1))
    assert judge.finished


def test_usage_is_read_from_wherever_it_comes() -> None:
    judge = Judge("openai")

    judge.read(event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}))
    judge.read(event({"choices": [], "usage": None}))

    assert (judge.prompt_tokens, judge.completion_tokens) == (3, 5)


def test_generate_ends_with_its_own_finish() -> None:
    meta = {"prompt_tokens": 3, "completion_tokens": 2, "finish_reason": None}
    stream = event({"text": "a", "output_ids": [1], "meta_info": meta})
    stream += event({"text": "ab", "meta_info": {**meta, "finish_reason": {"type": "length"}}})
    judge = Judge("generate")

    found = [judge.read(each) for each in EventReader(1 << 20).feed(stream + DONE)]

    assert found == [Sign.CONTENT, Sign.CONTENT, Sign.DONE]
    assert (judge.prompt_tokens, judge.completion_tokens) == (3, 2)


def test_generate_without_a_finish_is_a_lie() -> None:
    assert signs(event({"text": "a", "meta_info": {}}) + DONE, "generate")[-1] is Sign.LIE
    assert signs(event({"text": "", "output_ids": [7]}), "generate") == [Sign.CONTENT]
    assert signs(event({"text": "", "meta_info": {}}), "generate") == [Sign.PREAMBLE]


def test_streams_of_other_endpoints_may_end_as_they_like_and_never_count_as_finished() -> None:
    judge = Judge("other")

    assert judge.read(event({"type": "response.created"})) is Sign.CONTENT
    assert not judge.finished  # so that a cut is a failure
    assert judge.read(DONE) is Sign.DONE


#### recorded streams


@pytest.mark.parametrize(
    "name, last, finished",
    [
        ("sglang-abort-request", Sign.LIE, False),
        ("sglang-chat-plain", Sign.DONE, True),
        ("sglang-chat-sglext", Sign.DONE, True),
        ("sglang-chat-sglext-framed", Sign.DONE, True),
        ("sglang-completions-ids", Sign.DONE, True),
        ("sglang-kill-scheduler", Sign.CONTENT, False),
        ("sglang-pd-decode", Sign.DONE, True),
        ("sglang-pd-prefill", Sign.DONE, True),
        ("vllm-chat-continuation-kvids", Sign.DONE, True),
        ("vllm-chat-ids", Sign.DONE, True),
        ("vllm-completions-ids", Sign.DONE, True),
        ("vllm-completions-plain", Sign.DONE, True),
        ("vllm-continuation-clean", Sign.DONE, True),
        ("vllm-continuation-midutf8", Sign.DONE, True),
        ("vllm-kill-apiserver", Sign.CONTENT, False),
        ("vllm-kill-enginecore", Sign.ERROR, False),
        ("vllm-pd-decode", Sign.DONE, True),
        ("vllm-sigterm-abort", Sign.CONTENT, False),
        ("vllm-sigterm-abort-chat", Sign.LIE, False),
    ],
)
def test_how_recorded_streams_ended(name: str, last: Sign, finished: bool) -> None:
    judge = Judge("openai")
    stream = (TRACES / f"{name}.sse").read_bytes()

    found: list[Sign] = []
    for each in EventReader(1 << 20).feed(stream):
        if found and found[-1] in (Sign.LIE, Sign.ERROR):
            break  # what follows is not read
        found.append(judge.read(each))

    assert (found[-1], judge.finished) == (last, finished)
    assert found.count(Sign.CONTENT) == judge.events > 0


@pytest.mark.parametrize("name", ["sglang-chat-plain", "vllm-chat-ids"])
def test_the_first_event_of_a_recorded_chat_is_only_preamble(name: str) -> None:
    found = signs((TRACES / f"{name}.sse").read_bytes())

    assert found[:2] == [Sign.PREAMBLE, Sign.CONTENT]


def test_a_killed_engine_names_a_status() -> None:
    judge = Judge("openai")

    for each in EventReader(1 << 20).feed((TRACES / "vllm-kill-enginecore.sse").read_bytes()):
        if judge.read(each) is Sign.ERROR:
            break

    assert judge.error_status == 500
    assert b"EngineCore" in judge.error_body


#### unary answers


def test_a_whole_answer_tells_its_usage() -> None:
    body = {"choices": [{"finish_reason": "stop"}], "usage": {"prompt_tokens": 1}}

    verdict = judge_answer("openai", json.dumps(body).encode())

    assert (verdict.lies, verdict.prompt_tokens, verdict.completion_tokens) == (False, 1, None)


@pytest.mark.parametrize("reasons", [["abort"], ["error"], ["stop", "abort"]])
def test_a_whole_answer_may_lie(reasons: list[str]) -> None:
    choices = [{"index": i, "finish_reason": reason} for i, reason in enumerate(reasons)]

    assert judge_answer("openai", json.dumps({"choices": choices}).encode()).lies


@pytest.mark.parametrize(
    "body", [b"", b"x", b"[]", b"null", b"[" * 100_000, b'{"choices":1}', b'{"usage":[]}', b"\xff"]
)
def test_a_whole_answer_that_cannot_be_read_is_no_lie(body: bytes) -> None:
    assert not judge_answer("openai", body).lies


#### events like one before


def without_pattern(stream: list[bytes]) -> list[Sign]:
    """The same judgement with every event decoded."""
    judge = Judge("openai")
    found = []
    for each in stream:
        judge._before = b""
        judge._patience = 1 << 30
        found.append(judge.read(each))
    return found


PIECES = ("a", " b", "\n", '"', "\\", "\u00e4", "\U0001f600", '":"', '","content":"x', "", "a\\")


@pytest.mark.parametrize("make", [lambda piece: chat({"content": piece}), text])
def test_events_like_one_before_are_judged_as_if_decoded(make: Callable[[str], bytes]) -> None:
    stream = [make(one) for one in PIECES] * 2 + [make(a + b) for a in PIECES for b in PIECES]
    judge = Judge("openai")
    assert [judge.read(each) for each in stream] == without_pattern(stream)
    assert judge.is_another(make("one more"))
    assert judge.events == sum(sign is Sign.CONTENT for sign in without_pattern(stream)) + 1


HARD = [
    chat({"content": "a", "tool_calls": [{"function": {"arguments": "{}"}}]}),
    chat({"role": "assistant", "content": "a"}),
    chat({"content": "a"}, index=1),
    chat({"content": "a"}, finish="stop"),
    chat({"content": "a"}, finish="abort"),
    chat({"content": ""}),
    event({"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 3}}),
    event({"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 4}}),
    event({"choices": [{"delta": {"content": "a"}}], "usage": None}),
    event({"choices": [{"delta": {"content": "a"}}], "error": {"message": "x"}}),
    event({"choices": [{"delta": {"content": "a"}}], "error": None}),
    event({"choices": [{"delta": {"content": "a"}}, {"index": 1, "delta": {"content": "b"}}]}),
    event({"content": "a", "choices": [{"delta": {"content": "a"}}]}),
    event({"content": "a", "choices": [{"delta": {"content": ""}}]}),
    event({"choices": [{"text": "a", "delta": {"content": ""}}]}),
    event({"choices": [{"text": "", "delta": {"content": "a"}}]}),
    b'data: {"choices":[{"delta":{"content":"a","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"","content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"a","c\\u006fntent":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"a"}}]}\r\n\r\n',
    b': note\ndata: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":\ndata: {"content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"a"}}]} x\n\n',
    b": beat\n\n",
]


def test_no_shape_is_taken_for_the_one_before() -> None:
    """Every hard event before and behind every other, with what they may have taught."""
    compact = [each.replace(b": ", b":").replace(b"data:", b"data: ") for each in HARD]
    hard = list(dict.fromkeys([*HARD, *compact]))
    for first in hard:
        for second in hard:
            stream = [first, second, first, second, chat({"content": "z"}), first, second]
            judge = Judge("openai")
            assert [judge.read(each) for each in stream] == without_pattern(stream), (first, second)
            plain = Judge("openai")
            for each in stream:
                plain._before, plain._patience = b"", 1 << 30
                plain.read(each)
            seen = (judge.finished, judge.completion_tokens, judge.choices, judge.events)
            assert seen == (plain.finished, plain.completion_tokens, plain.choices, plain.events)


def test_streams_of_real_engines_are_judged_as_if_decoded() -> None:
    for trace in TRACES.glob("*.sse"):
        stream = EventReader(1 << 20).feed(trace.read_bytes())
        judge = Judge("openai")
        assert [judge.read(each) for each in stream] == without_pattern(stream), trace.name


def test_choices_in_turn_teach_rarely() -> None:
    judge = Judge("openai")
    learned = []
    for turn in range(200):
        judge.read(chat({"content": f"{turn}"}, index=turn % 2))
        learned.append(judge._learned_at)
    assert len(set(learned)) < 20


@pytest.mark.parametrize(
    ("family", "body"),
    [
        ("openai", b'{"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}'),
        ("generate", b'[{"text": "a", "meta_info": {"finish_reason": {"type": "stop"}}}]'),
    ],
)
def test_an_answer_that_ends_too_early_is_none(family: str, body: bytes) -> None:
    cut = [length for length in range(1, len(body)) if not judge_answer(family, body[:length]).lies]

    assert cut == []
    assert judge_answer(family, body[:-1]).is_short
    assert not judge_answer(family, body).lies
    # What is no JSON for another reason is the engine's business and the client's.
    assert not judge_answer(family, b"well" + body).lies
    assert not judge_answer(family, b'{"logprob": NaN}').lies
