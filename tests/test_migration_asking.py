"""What the router asks for is asked only where it helps, and is taken out again byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.migration.asking import NOTHING, Asking, ask, plan_asking
from router.migration.attempt import Attempt
from router.migration.continuation import PATHS
from router.migration.poison import Poison
from router.migration.record import Record
from router.migration.shape import Endpoint, examine
from router.migration.splice import edit, read_members
from router.openai import Sign
from router.sse import EventReader
from tests.continuing import Engine, chat, completion

TRACES = Path(__file__).parent / "traces"


def asked(engine: str, endpoint: Endpoint, **more: object) -> tuple[Asking, dict[str, object]]:
    request = chat(**more) if endpoint == "chat" else completion(**more)
    body = json.dumps(request).encode()
    shape = examine(body, endpoint)
    asking = plan_asking(shape, engine)
    return asking, json.loads(ask(body, asking, shape))


#### asking


@pytest.mark.parametrize(
    "engine, endpoint, ids, usage",
    [
        ("vllm", "chat", True, False),
        ("vllm", "completions", True, False),
        ("sglang", "completions", True, False),
        ("sglang", "chat", False, True),
        ("openai", "chat", False, False),
        ("openai", "completions", False, False),
    ],
)
def test_each_engine_is_asked_for_what_it_gives(
    engine: str, endpoint: Endpoint, ids: bool, usage: bool
) -> None:
    asking, body = asked(engine, endpoint)

    assert asking == Asking(ids=ids, usage=usage)
    assert body.get("return_token_ids", False) is ids
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert body.get("stream_options") == (both if usage else None)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_shape_that_cannot_use_it_is_not_asked(engine: str, endpoint: Endpoint) -> None:
    assert asked(engine, endpoint, n=2)[0] == NOTHING
    assert asked(engine, endpoint, echo=True)[0] == NOTHING


@pytest.mark.parametrize("said", [True, False])
def test_case_59_what_the_client_said_of_ids_stands(said: bool) -> None:
    asking, body = asked("vllm", "chat", return_token_ids=said)

    assert not asking.ids
    assert body["return_token_ids"] is said


@pytest.mark.parametrize(
    "options, expected",
    [
        (None, {"include_usage": True, "continuous_usage_stats": True}),
        ({}, {"include_usage": True, "continuous_usage_stats": True}),
        ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}),
        ({"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}),
        ({"continuous_usage_stats": False}, {"continuous_usage_stats": False}),
    ],
)
def test_what_the_client_said_of_usage_stands(
    options: dict[str, bool] | None, expected: dict[str, bool]
) -> None:
    assert asked("sglang", "chat", stream_options=options)[1]["stream_options"] == expected


def test_the_clients_own_text_is_left_as_it_is() -> None:
    body = b' {"model":"m" , "temperature":0.10, "messages":[ {"content":"\\u00e9"} ] , "n":1}\n'

    written = ask(body, Asking(ids=True), examine(body, "chat"))

    assert written == body[:-2] + b',"return_token_ids":true}\n'


NAMES = st.sampled_from(["a", "b", 'q"', "é", "stream_options", "return_token_ids"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(NAMES, VALUES, max_size=5),
    st.dictionaries(NAMES, st.none() | VALUES.map(lambda v: json.dumps(v).encode()), max_size=4),
    st.sampled_from([None, 1]),
)
def test_an_edit_changes_what_it_names_and_nothing_else(
    value: dict[str, object], changes: dict[str, bytes | None], indent: int | None
) -> None:
    text = json.dumps(value, indent=indent).encode()
    expected = dict(value)
    for name, change in changes.items():
        if change is None:
            expected.pop(name, None)
        else:
            expected[name] = json.loads(change)

    assert json.loads(edit(text, changes)) == expected


def test_of_a_member_that_occurs_twice_the_last_one_counts() -> None:
    text = b'{"a":1,"b":2,"a":3}'

    assert json.loads(edit(text, {"b": b"4"})) == {"a": 3, "b": 4}
    assert read_members(b"[1]") is None


#### taking out


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stop": ["e"]},
        {"stream_options": {"include_usage": True}},
        {"logprobs": True},
        {"max_tokens": 1},
    ],
    ids=["plain", "stop", "usage", "logprobs", "one"],
)
def test_case_60_a_stripped_stream_is_the_one_that_nobody_asked_for(
    kind: str, endpoint: Endpoint, more: dict[str, object]
) -> None:
    request = chat(**more) if endpoint == "chat" else completion(**more)
    if endpoint == "completions" and "logprobs" in more:
        request["logprobs"] = 2
    body = json.dumps(request).encode()
    shape = examine(body, endpoint)
    asking = plan_asking(shape, kind)
    expected = Engine(kind, tokens_per_chunk=2).events(PATHS[endpoint], body)
    events = Engine(kind, tokens_per_chunk=2).events(PATHS[endpoint], ask(body, asking, shape))

    attempt = Attempt(Record(shape), kind, asking)
    forward = [attempt.forward for event in events if attempt.read(event)]

    assert [event for event in forward if event] == expected
    assert attempt.finished


def strip(event: bytes, *, engine: str = "vllm", endpoint: Endpoint = "chat") -> bytes:
    attempt = Attempt(Record(examine(b'{"prompt":""}', endpoint)), engine, Asking(ids=True))
    attempt.read(event)
    return attempt.forward


@pytest.mark.parametrize(
    "event, stripped",
    [
        (b'data: {"choices":[{"delta":{"content":"a"},"token_ids":[1,2]}]}\n\n',
         b'data: {"choices":[{"delta":{"content":"a"},"token_ids":null}]}\n\n'),
        (b'data:{"choices":[{"delta":{"content":"a"},"token_ids":[1]}]}\r\n\r\n',
         b'data:{"choices":[{"delta":{"content":"a"},"token_ids":null}]}\r\n\r\n'),
        (b'data: {"choices": [{"delta": {"content": "a"}, "token_ids": [1, 2]}]}\n\n',
         b'data: {"choices":[{"delta":{"content":"a"},"token_ids":null}]}\n\n'),
        (b'data: {"choices":[{"delta":{"content":"a"},\ndata: "token_ids":\ndata: [1]}]}\n\n',
         b'data: {"choices":[{"delta":{"content":"a"},"token_ids":null}]}\n\n'),
        # Ids of a form that nobody defined are thrown away whole (case 25).
        (b'data: {"choices":[{"delta":{"content":"a"},"token_ids":[1,"x"]}]}\n\n',
         b'data: {"choices":[{"delta":{"content":"a"},"token_ids":null}]}\n\n'),
        # What looks like ids in a text is text.
        (b'data: {"choices":[{"delta":{"content":",\\"token_ids\\":[7]"},"token_ids":[1]}]}\n\n',
         b'data: {"choices":[{"delta":{"content":",\\"token_ids\\":[7]"},"token_ids":null}]}\n\n'),
        # vLLM sends such a chunk only because ids were asked for (case 71).
        (b'data: {"choices":[{"delta":{},"finish_reason":null,"token_ids":[1]}]}\n\n', b""),
        (b'data: {"choices":[{"delta":{"content":""},"token_ids":[1]}]}\n\n',
         b'data: {"choices":[{"delta":{"content":""},"token_ids":null}]}\n\n'),
        (b'data: {"choices":[{"delta":{"tool_calls":[1]},"token_ids":[1]}]}\n\n',
         b'data: {"choices":[{"delta":{"tool_calls":[1]},"token_ids":null}]}\n\n'),
        (b'data: {"choices":[{"index":0,"token_ids":[1]},{"index":1,"token_ids":[2]}]}\n\n',
         b'data: {"choices":[{"index":0,"token_ids":null},{"index":1,"token_ids":null}]}\n\n'),
        (b"data: {nonsense\n\n", b"data: {nonsense\n\n"),
        (b": comment\n\n", b": comment\n\n"),
    ],
)  # fmt: skip
def test_ids_are_taken_out_of_events_of_any_form(event: bytes, stripped: bytes) -> None:
    assert strip(event) == stripped


def test_ids_never_leak_after_poisoning() -> None:
    engine = Engine("vllm")
    body = json.dumps(chat()).encode()
    shape = examine(body, "chat")
    asking = plan_asking(shape, "vllm")
    attempt = Attempt(Record(shape), "vllm", asking)
    sent = b""

    for place, event in enumerate(engine.events(PATHS["chat"], ask(body, asking, shape))):
        if place == 3:
            attempt.record.spoil(Poison.TOOL_CALL)
        attempt.read(event)
        sent += attempt.forward

    assert b'token_ids":[' not in sent
    assert sent.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("trace", sorted(TRACES.glob("*.sse")), ids=lambda path: path.stem)
def test_every_cut_of_a_recorded_stream_gives_the_same(trace: Path) -> None:
    stream = trace.read_bytes()
    engine = trace.stem.split("-")[0]
    endpoint: Endpoint = "chat" if b"chat.completion.chunk" in stream else "completions"
    shape = examine(json.dumps(chat() if endpoint == "chat" else completion()).encode(), endpoint)

    def read(pieces: list[bytes]) -> tuple[bytes, str, list[int], int, str | None, Poison | None]:
        reader, record = EventReader(1 << 24), Record(shape)
        attempt, sent = Attempt(record, engine, Asking(ids=True)), b""
        for event in (event for piece in pieces for event in reader.feed(piece)):
            sign = attempt.read(event)
            sent += attempt.forward
            if sign in (Sign.LIE, Sign.ERROR, Sign.DONE):
                break
        agreed = record.agreed_ids
        return sent, record.text, record.ids, agreed, record.finish, record.poison

    expected = read([stream])
    step = 1 if len(stream) < 3500 else 97
    for cut in range(1, len(stream), step):
        assert read([stream[:cut], stream[cut:]]) == expected
    assert read([stream[i : i + 1] for i in range(len(stream))]) == expected
    assert b'token_ids":[' not in expected[0]
