"""Events that are skimmed leave what reading them leaves, and only plain events are skimmed."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.migration.asking import NOTHING, Asking, ask, plan_asking
from router.migration.attempt import Attempt
from router.migration.continuation import PATHS
from router.migration.poison import Poison
from router.migration.record import Record
from router.migration.shape import Endpoint, Shape, examine
from router.migration.skimming import Skimming
from router.openai import Sign
from router.relay import MovingRelay
from router.sse import EventReader
from tests.continuing import Engine, Json, Travel, chat, completion

TRACES = sorted((Path(__file__).parent / "traces").glob("*.sse"))
ASKINGS = [NOTHING, Asking(ids=True), Asking(usage=True)]
#: What is put into events, in place of some of their bytes.
PIECES = [
    b"", b'"', b"\\", b"\\n", b'\\"', b"\\u0041", b"\\ud83d", b"\\/", b"\x00", b"\x1f", b"\x7f",
    b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xe4\xb8", "é世🙂".encode(), b" ", b"a", b"\n", b"\r",
    b"\n\n", b"\r\n\r\n", b"data: ", b": c\n\n", b"{", b"}", b"[", b"]", b",", b"0", b"1", b",2",
    b"-1", b"1.5", b"null", b"true", b"99999999999999999999", b',"index":1', b',"text":null',
    b',"text":"x"', b',"error":1', b',"error":null', b',"error":{"code":500}', b',"choices":null',
    b',"usage":null', b',"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}',
    b',"prompt_token_ids":[1]', b',"token_ids":[7,8]', b',"token_ids":null', b',"delta":null',
    b',"finish_reason":"stop"', b',"finish_reason":"abort"', b',"content":null', b',"role":"user"',
    b',"reasoning_content":"hm"', b',"tool_calls":[{}]', b',"matched_stop":2', b',"id":"other"',
]  # fmt: skip


class Reading(Attempt):
    """The general way, for every event."""

    def skim(self, event: bytes) -> bool:
        return False


def endpoint_of(stream: bytes) -> Endpoint:
    return "chat" if b"chat.completion.chunk" in stream else "completions"


def shape_of(endpoint: Endpoint, **more: object) -> Shape:
    request = chat(**more) if endpoint == "chat" else completion(**more)
    return examine(json.dumps(request).encode(), endpoint)


def both(shape: Shape, engine: str, asking: Asking, tokens_max: int = 1000) -> list[Attempt]:
    """The same attempt twice: one that skims, one that reads."""
    kinds = (Attempt, Reading)
    return [kind(Record(shape, tokens_max), engine, asking) for kind in kinds]


def state(attempt: Attempt) -> tuple[object, ...]:
    """All that anybody could see of an attempt."""
    record = attempt.record
    known = attrs.asdict(record, recurse=False)
    return known, record.text, record.ids, record.agreed_ids, record.agreed_text, attempt.events


def compare(attempts: list[Attempt], events: list[bytes]) -> int:
    """Both read the same events; how many of them the first one skimmed."""
    skimming, reading = attempts
    skimmed = 0
    for event in events:
        is_skimmed = skimming.skims and skimming.skim(event)
        skimmed += is_skimmed
        sign = Sign.CONTENT if is_skimmed else skimming.read(event)
        assert sign is reading.read(event), event
        assert skimming.forward == reading.forward
        assert state(skimming) == state(reading)
        if sign in (Sign.LIE, Sign.ERROR, Sign.DONE):
            break
    return skimmed


def events_of(trace: Path) -> list[bytes]:
    return EventReader(1 << 24).feed(trace.read_bytes())


@pytest.mark.parametrize("asking", ASKINGS, ids=["nothing", "ids", "usage"])
@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)
def test_a_recorded_stream_is_noted_alike(trace: Path, asking: Asking) -> None:
    engine, endpoint = trace.stem.split("-")[0], endpoint_of(trace.read_bytes())

    shapes: list[Json] = [{}, {"max_tokens": None}, {"stop": ["e"]}, {"tools": [{}]}, {"n": 2}]
    for more in shapes:
        for tokens_max in (1000, 20):
            attempts = both(shape_of(endpoint, **more), engine, asking, tokens_max)
            compare(attempts, events_of(trace))


@pytest.mark.slow
@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)
def test_a_recorded_stream_passes_alike_however_it_is_cut(trace: Path) -> None:
    stream = trace.read_bytes()
    engine, shape = trace.stem.split("-")[0], shape_of(endpoint_of(stream))

    def relay(kind: type[Attempt], pieces: list[bytes]) -> tuple[bytes, object]:
        attempt = kind(Record(shape), engine, Asking(ids=True))
        relay = MovingRelay(attempt, resumed=False)
        return b"".join(map(relay.feed, pieces)), (relay.ending, relay.is_poisoned, state(attempt))

    events = [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]
    expected = relay(Reading, events)
    assert relay(Attempt, events) == expected
    assert relay(Attempt, [stream[i : i + 1] for i in range(len(stream))]) == expected
    step = 1 if len(stream) < 3500 else 97
    for at, event in enumerate(events):
        for cut in range(1, len(event), step):
            pieces = [*events[:at], event[:cut], event[cut:], *events[at + 1 :]]
            assert relay(Attempt, pieces) == expected
    for joined in range(2, 6):
        reads = [b"".join(events[at : at + joined]) for at in range(1, len(events), joined)]
        assert relay(Attempt, [events[0], *reads])[0] == expected[0]


#### what engines write


def written(engine: str, endpoint: Endpoint, **more: object) -> tuple[Shape, Asking, list[bytes]]:
    """A stream of a simulated engine, as the router asks for it."""
    request: Json = chat(**more) if endpoint == "chat" else completion(**more)
    body = json.dumps(request).encode()
    shape = examine(body, endpoint)
    asking = plan_asking(shape, engine)
    return shape, asking, Engine(engine).events(PATHS[endpoint], ask(body, asking, shape))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("more", [{}, {"n": 1, "return_token_ids": False}, {"min_tokens": 3}])
def test_most_events_are_skimmed(engine: str, endpoint: Endpoint, more: Json) -> None:
    shape, asking, events = written(engine, endpoint, max_tokens=40, **more)

    assert compare(both(shape, engine, asking), events) > 30


def test_what_a_poisoned_stream_goes_on_with_is_skimmed() -> None:
    shape, asking, events = written("vllm", "chat", max_tokens=40)
    attempts = both(shape, "vllm", asking)

    compare(attempts, events[:10])
    for attempt in attempts:
        attempt.record.spoil(Poison.TOOL_CALL)

    assert compare(attempts, events[10:]) > 20
    assert b'token_ids":[' not in attempts[0].forward


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stop": ["e", "zz"]},
        {"logprobs": 1},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
def test_a_stream_that_moves_is_the_same(
    engine: str, endpoint: Endpoint, more: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    if more.get("return_token_ids") and (engine, endpoint) == ("sglang", "chat"):
        pytest.skip("SGLang refuses it")
    more = more | ({"logprobs": True} if "logprobs" in more and endpoint == "chat" else {})
    request = (chat if endpoint == "chat" else completion)(max_tokens=30, **more)

    def travel(cut: int) -> tuple[bytes, list[int], str]:
        one = Travel(request, endpoint)
        one.begin(Engine(engine), cut)
        if one.record.finish is None:
            one.go_on(Engine(engine))
        return one.client.sent, one.record.ids, one.record.text

    skimmed = [travel(cut) for cut in range(2, 20, 5)]
    monkeypatch.setattr(Skimming, "skim", lambda self, event: False)
    assert skimmed == [travel(cut) for cut in range(2, 20, 5)]


#### what they do not write

FORMS = [
    written("vllm", "chat"),
    written("vllm", "completions"),
    written("sglang", "chat"),
    written("sglang", "completions"),
    written("vllm", "chat", return_token_ids=True),
    written("sglang", "chat", max_tokens=None, stream_options={"continuous_usage_stats": True}),
]
ENGINES = ["vllm", "vllm", "sglang", "sglang", "vllm", "sglang"]


@given(st.data())
def test_a_changed_event_is_noted_alike(data: st.DataObject) -> None:
    form = data.draw(st.integers(0, len(FORMS) - 1))
    shape, asking, events = FORMS[form]
    attempts = both(shape, ENGINES[form], asking, data.draw(st.sampled_from([1000, 8])))
    compare(attempts, events[:4])

    for event in events[4:7]:
        length = len(event)
        # Mostly behind the head, where the text and the ids are.
        start = data.draw(st.integers(0, length) | st.integers(length - 120, length))
        end = data.draw(st.integers(start, min(start + 12, length)) | st.just(start))
        piece = data.draw(st.sampled_from(PIECES) | st.binary(max_size=3))
        # What is no complete event reaches nobody.
        changed = EventReader(1 << 24).feed(event[:start] + piece + event[end:])
        compare(attempts, changed)
        compare(attempts, [event])


def test_a_long_text_takes_few_bytes() -> None:
    shape, asking, events = written("vllm", "chat")
    attempt = Attempt(Record(shape), "vllm", asking)
    for event in events[:2]:
        attempt.read(event)

    for _ in range(1000):
        assert attempt.skim(events[2])

    record = attempt.record
    assert record.tokens == len(record.ids) == 1001
    assert len(record.ids_json) + len(record.text_json) < 15_000
