"""What a prefill's answer means, however it is cut and however long it is."""

from __future__ import annotations

import pytest

from router.headers import Headers
from router.pd.verdict import EVENT_BYTES_MAX, Handoff, Verdict, reading_of

EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON: Headers = [(b"content-type", b"application/json"), (b"retry-after", b"3")]
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def verdict_of(
    pieces: list[bytes],
    status: int = 200,
    headers: Headers = EVENTS,
    family: str = "openai",
    handoff: Handoff = "none",
) -> Verdict:
    reading = reading_of(status, headers, family, handoff, None)
    for piece in pieces:
        if (early := reading.feed(piece)) is not None:
            return early
    return reading.end()


@pytest.mark.parametrize(
    "body",
    [
        CHUNK,
        CHUNK + DONE,
        b": ping\n\n" + CHUNK,
        b"data: nonsense\n\n",
        b'data: {"choices":[{"index":0,"delta":{"content":"{\\"error\\": 1}"}}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"a","finish_reason":"length"}]}\n\n' + DONE,
        b'data: {"error":null,"choices":[]}\n\n',
    ],
)
def test_a_stream_without_an_error_is_a_success(body: bytes) -> None:
    for size in (1, 7, len(body) + 1):
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        assert verdict_of(pieces).fact == "completed"


@pytest.mark.parametrize("headers", [EVENTS, JSON, [], [(b"content-type", b"text/html")]])
@pytest.mark.parametrize(
    "body",
    [b"", b" ", DONE, b": ping\n\n", b": ping\n\n" + DONE, b"nonsense\n\n", b"<html>", b"{", b"[]",
     b"null", b'"a"', b"5"],
)  # fmt: skip
def test_an_answer_that_says_nothing_is_a_failure(body: bytes, headers: Headers) -> None:
    for size in (1, 7, len(body) + 1):
        found = verdict_of([body[at : at + size] for at in range(0, len(body), size)], 200, headers)
        assert (found.fact, found.reason) == ("lied", "empty")


@pytest.mark.parametrize("headers", [JSON, [], [(b"content-type", b"text/html")]])
def test_events_that_do_not_say_so_are_events(headers: Headers) -> None:
    assert verdict_of([CHUNK, DONE], headers=headers).fact == "completed"
    assert verdict_of([b'data: {"error":{"code":400}}\n\n'], headers=headers).fact == "rejected"


def test_what_cannot_be_read_is_an_answer_if_it_is_there() -> None:
    packed: Headers = [*EVENTS, (b"content-encoding", b"gzip")]

    assert verdict_of([b"\x1f\x8b"], headers=packed).fact == "completed"
    assert verdict_of([], headers=packed).fact == "lied"
    assert verdict_of([b"x" * 2**20] * 17, headers=JSON).fact == "completed"


@pytest.mark.parametrize(
    ("event", "fact", "reason"),
    [
        (b'data: {"error":{"message":"x"}}\n\n', "erred", "error_event"),
        (b'data: {"error":{"code":500}}\n\n', "erred", "error_event"),
        (b'data:{"error":"x"}\r\n\r\n', "erred", "error_event"),
        (b'data: {"object":"error","message":"x","code":500}\n\n', "erred", "error_event"),
        (b'data: {"error":{"code":422}}\n\n', "rejected", "rejected"),
        (b'data: {"error":{"code":503}}\n\n', "backpressure", "backpressure"),
        (b'data: {"choices":[{"finish_reason":"abort"}]}\n\n', "lied", "gave_up"),
        (b'data: {"choices":[{"finish_reason":"error"}]}\n\n', "lied", "gave_up"),
    ],
)
@pytest.mark.parametrize("before", [b"", CHUNK, b": ping\n\n"])
def test_an_error_inside_a_200_is_a_failure_wherever_it_is_cut(
    before: bytes, event: bytes, fact: str, reason: str
) -> None:
    body = before + event
    for cut in range(len(body)):
        found = verdict_of([body[:cut], body[cut:], DONE])
        assert (found.fact, found.reason) == (fact, reason)


def test_an_error_event_without_its_last_line_end_counts() -> None:
    assert verdict_of([b'data: {"error":{"message":"x"}}']).fact == "erred"


@pytest.mark.parametrize(
    ("body", "family", "fact"),
    [
        (b'{"choices":[{"finish_reason":"stop"}]}', "openai", "completed"),
        (b'{"choices":[{"finish_reason":"abort"}]}', "openai", "lied"),
        (b'{\n  "choices": [\n {"finish_reason": "error"}\n]\n}', "openai", "lied"),
        (b'{"error":{"code":500}}', "openai", "erred"),
        (b'{"object":"error","message":"x","code":400}', "openai", "rejected"),
        (b'{"text":"a","meta_info":{"finish_reason":{"type":"length"}}}', "generate", "completed"),
        (b'{"text":"a","meta_info":{"finish_reason":{"type":"abort"}}}', "generate", "lied"),
        (b'[{"text":"a"},{"text":"","meta_info":{"finish_reason":{"type":"abort"}}}]', "generate",
         "lied"),
    ],
)  # fmt: skip
def test_a_whole_answer_is_judged_too(body: bytes, family: str, fact: str) -> None:
    assert verdict_of([body], headers=JSON, family=family).fact == fact


@pytest.mark.parametrize(
    ("status", "fact", "reason", "is_told"),
    [
        (400, "rejected", "rejected", True),
        (404, "rejected", "rejected", True),
        (429, "backpressure", "backpressure", True),
        (503, "backpressure", "backpressure", True),
        (500, "erred", "status", False),
        (502, "erred", "status", False),
        (302, "erred", "status", False),
    ],
)
def test_a_status_decides_what_the_client_is_told(
    status: int, fact: str, reason: str, is_told: bool
) -> None:
    found = verdict_of([b'{"message":', b'"x"}'], status, JSON)

    assert (found.fact, found.reason) == (fact, reason)
    assert found.failure is not None
    assert found.failure.refusal.code == "prefill_failed"
    answer = found.failure.answer
    assert (answer is not None) is is_told
    if answer is not None:
        assert (answer.status, answer.body) == (status, b'{"message":"x"}')
        assert answer.headers == JSON


@pytest.mark.parametrize(
    ("body", "handoff", "fact"),
    [
        (b'{"kv_transfer_params":{"a":1}}', "required", "completed"),
        (b'{"kv_transfer_params":{"a":1}}', "optional", "completed"),
        (b'{"kv_transfer_params":null}', "required", "lied"),
        (b'{"kv_transfer_params":null}', "optional", "completed"),
        (b"", "required", "lied"),
    ],
)
def test_a_handoff_is_missed_only_where_it_is_needed(
    body: bytes, handoff: Handoff, fact: str
) -> None:
    found = verdict_of([body], headers=JSON, handoff=handoff)

    assert found.fact == fact
    assert (found.handoff is not None) == (b'"a"' in body)


def test_a_long_stream_is_read_in_bounded_memory_to_its_last_event() -> None:
    reading = reading_of(200, EVENTS, "openai", "none", None)
    for _ in range(3000):
        assert reading.feed(CHUNK * 100) is None
    assert reading.feed(b"data: " + b"x" * (EVENT_BYTES_MAX + 1)) is None
    assert reading.feed(b"x\n\n") is None

    found = reading.feed(b'data: {"error":{"code":500}}\n\n')
    assert found is not None
    assert found.fact == "erred"


@pytest.mark.parametrize(
    ("status", "fact"), [(400, "rejected"), (429, "backpressure"), (500, "erred")]
)
def test_an_error_without_end_is_told_by_its_status(status: int, fact: str) -> None:
    reading = reading_of(status, JSON, "openai", "none", None)

    found = None
    while found is None:
        found = reading.feed(b"x" * 1024 * 1024)

    assert found.fact == fact
