"""One stream out of several: what the client reads across any cut equals the unbroken stream."""

from __future__ import annotations

import json
import random

import pytest

from router.migration.continuation import CannotContinue, CompletedLocally, Mode
from router.migration.shape import Endpoint
from router.migration.stops import StopSeam, could_straddle
from router.openai import Sign
from router.sim.jobs import Reply
from tests.continuing import Client, Engine, Travel, chat, completion, unbroken

Json = dict[str, object]

PLAIN: Json = {}
IDS: Json = {"return_token_ids": True}
USAGE: Json = {"stream_options": {"include_usage": True}}
CONTINUOUS: Json = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def request_of(endpoint: Endpoint, seed: int, **more: object) -> Json:
    if endpoint == "chat":
        messages = [{"role": "user", "content": f"héllo 世界 {seed}"}]
        return chat(messages=messages, **more)
    return completion(prompt=f"def 🙂 {seed}", **more)


#### every cut


@pytest.mark.parametrize("tokens_per_chunk", [1, 3])
@pytest.mark.parametrize("more", [{}, USAGE, CONTINUOUS], ids=["plain", "usage", "continuous"])
@pytest.mark.parametrize(
    "endpoint, began, goes_on",
    [
        ("chat", "vllm", "vllm"),
        ("chat", "vllm", "sglang"),
        ("completions", "vllm", "vllm"),
        ("completions", "vllm", "sglang"),
        ("completions", "sglang", "vllm"),
        ("completions", "sglang", "sglang"),
    ],
)
def test_exact_at_every_cut_is_the_unbroken_stream(
    endpoint: Endpoint, began: str, goes_on: str, more: Json, tokens_per_chunk: int
) -> None:
    request = request_of(endpoint, 4, max_tokens=24, **more)

    def engine(kind: str) -> Engine:
        return Engine(kind, ambiguous=True, tokens_per_chunk=tokens_per_chunk)

    whole = unbroken(request, endpoint, engine(began))
    for cut in range(1, whole.sent.count(b"\n\n")):
        travel = Travel(dict(request), endpoint)
        travel.begin(engine(began), cut)
        travel.go_on(engine(goes_on))

        travel.client.check()
        assert_same(travel.client, whole, is_one_kind=began == goes_on)
        assert Mode.TEXT not in travel.modes


def assert_same(client: Client, whole: Client, *, is_one_kind: bool) -> None:
    if is_one_kind:
        assert client.text == whole.text
        assert client.finishes == whole.finishes
    else:  # at its end SGLang shows half a character that vLLM drops
        assert client.text.rstrip("\ufffd") == whole.text.rstrip("\ufffd")
    assert client.last_usage == whole.last_usage
    counts = [int(str(usage["completion_tokens"])) for usage in client.usages]
    assert counts == sorted(counts)


@pytest.mark.parametrize("goes_on", ["vllm", "sglang"])
def test_text_at_every_cut_loses_and_doubles_nothing(goes_on: str) -> None:
    request = request_of("chat", 4, max_tokens=24, **USAGE)
    whole = unbroken(request, "chat", Engine("sglang"))

    for cut in range(1, whole.sent.count(b"\n\n")):
        travel = Travel(dict(request), "chat")
        travel.begin(Engine("sglang"), cut)
        travel.go_on(Engine(goes_on))

        travel.client.check()
        assert travel.client.text == whole.text  # this model reads its own text as it wrote it
        if travel.modes:
            assert travel.client.last_usage == whole.last_usage


@pytest.mark.parametrize("more", [{"return_token_ids": True}, {"logprobs": 2}])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_cases_51_and_59_tokens_that_the_client_sees_come_once(
    endpoint: Endpoint, more: Json
) -> None:
    if endpoint == "chat" and "logprobs" in more:
        more = {"logprobs": True, "top_logprobs": 1}
    request = request_of(endpoint, 9, max_tokens=24, **more)
    whole = unbroken(request, endpoint, Engine("vllm"))

    for cut in range(1, whole.sent.count(b"\n\n")):
        travel = Travel(dict(request), endpoint)
        travel.begin(Engine("vllm"), cut)
        travel.go_on(Engine("vllm"))

        travel.client.check()
        assert travel.client.ids == whole.ids
        assert travel.client.prompt_ids == whole.prompt_ids
        assert travel.client.logprobs == whole.logprobs


def test_case_17_stop_strings_at_every_cut() -> None:
    request = request_of("completions", 2, max_tokens=30, **USAGE)
    text = unbroken(request, "completions", Engine("vllm")).text

    for place in range(4, 24, 3):
        for kind in ("vllm", "sglang"):
            stopped = request | {"stop": [text[place : place + 5], "never this"]}
            whole = unbroken(stopped, "completions", Engine(kind))
            for cut in range(1, whole.sent.count(b"\n\n")):
                travel = Travel(dict(stopped), "completions")
                travel.begin(Engine(kind), cut)
                travel.go_on(Engine(kind))

                travel.client.check()
                assert_same(travel.client, whole, is_one_kind=True)


#### any number of moves


@pytest.mark.slow
@pytest.mark.parametrize("block", range(6))
def test_any_number_of_moves_is_the_unbroken_stream(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        travel_anywhere(seed)


def travel_anywhere(seed: int) -> None:
    rng = random.Random(seed)
    endpoint: Endpoint = rng.choice(("chat", "completions"))
    kind = rng.choice(("vllm", "sglang")) if endpoint == "completions" else "vllm"
    eos_every, ambiguous = rng.choice((0, 0, 9, 25)), rng.random() < 0.5
    tokens_per_chunk = rng.choice((1, 1, 2, 5))

    def engine() -> Engine:
        return Engine(kind, eos_every, ambiguous, tokens_per_chunk, seed=seed % 7)

    more: Json = {"max_tokens": rng.choice((1, 5, 16, 40))}
    more |= rng.choice((PLAIN, USAGE, CONTINUOUS)) | rng.choice((PLAIN, IDS))
    request = request_of(endpoint, seed, **more)
    if text := unbroken(request, endpoint, engine()).text:
        place = rng.randrange(len(text))
        if rng.random() < 0.5:
            request["stop"] = [text[place : place + rng.randrange(1, 12)]]
    whole = unbroken(request, endpoint, engine())
    travel = Travel(request, endpoint)
    sign: Sign | None = travel.begin(engine(), rng.randrange(1, 12))
    while sign not in (None, Sign.DONE):
        sign = travel.go_on(engine(), rng.choice((None, rng.randrange(12))))

    travel.client.check()
    assert travel.client.text == whole.text, seed
    assert travel.client.finishes == whole.finishes, seed
    assert travel.client.ids == whole.ids, seed
    assert travel.client.last_usage == whole.last_usage, seed


#### what a worker may do wrong


class Forgetful(Engine):
    """vLLM before ids could be given to chat: what it does not know it ignores."""

    def stream(self, path: str, body: bytes) -> list[bytes] | Reply:
        return super().stream(path, body.replace(b"kv_transfer_params", b"unknown_params"))


def test_a_worker_that_ignores_the_ids_is_found_out() -> None:
    travel = Travel(chat(max_tokens=20))
    travel.begin(Engine("vllm"), 6)
    before = travel.client.sent
    sign = travel.go_on(Forgetful("vllm"))

    assert sign is Sign.LIE
    assert travel.attempts[-1].is_unfaithful
    assert travel.client.sent == before
    travel.go_on(Engine("vllm"), refused=frozenset({Mode.EXACT}))
    assert travel.modes == [Mode.EXACT, Mode.TEXT]
    travel.client.check()


def test_a_continuation_that_brings_no_content_spends_nothing() -> None:
    travel = Travel(chat(max_tokens=20))
    travel.begin(Engine("vllm"), 6)
    text = travel.record.text
    for cut in (0, 1, 1):
        travel.go_on(Engine("vllm"), cut)
        assert (travel.record.text, travel.client.text) == (text, text)
    travel.go_on(Engine("vllm"))

    travel.client.check()
    assert travel.client.text == unbroken(travel.request, "chat", Engine("vllm")).text


def test_without_an_answer_the_text_is_carried() -> None:
    travel = Travel(chat(max_tokens=20))
    travel.begin(Engine("vllm", tokens_per_chunk=3), 4)
    travel.go_on(Engine("vllm"), detokenizes=False)

    assert travel.modes == [Mode.TEXT]
    travel.client.check()


def test_after_a_text_move_ids_are_exact_again() -> None:
    travel = Travel(chat(max_tokens=30))
    travel.begin(Engine("vllm"), 6)
    travel.go_on(Engine("vllm"), 6, same_tokens=False)
    travel.go_on(Engine("vllm"))

    assert travel.modes == [Mode.TEXT, Mode.EXACT]
    travel.client.check()
    assert travel.client.text == unbroken(travel.request, "chat", Engine("vllm")).text


def test_a_poisoned_request_ends_where_it_broke() -> None:
    travel = Travel(chat(n=2, temperature=1))
    travel.begin(Engine("vllm"), 6)

    assert travel.go_on(Engine("vllm")) is None
    assert isinstance(travel.outcome, CannotContinue)


def test_scenario_7_a_spent_budget_dispatches_nothing() -> None:
    request = completion(max_tokens=5, **USAGE)
    travel = Travel(request, "completions")
    events = Engine("vllm").events(
        travel.path, json.dumps(request | {"max_tokens": 9, "return_token_ids": True}).encode()
    )
    travel.begin(Engine("vllm"), 4)
    attempt = travel.attempts[0]
    attempt.read(events[4])
    travel.client.sent += attempt.forward
    travel.go_on(Engine("vllm"))

    assert isinstance(travel.outcome, CompletedLocally)
    assert travel.client.finishes == [("length", None)]
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
    assert travel.client.last_usage == [usage]


#### stop strings


@pytest.mark.parametrize(
    "before, waiting, stops, pieces, given, hit",
    [
        ("abEN", 0, ["END"], ["D more"], ["", ""], "END"),
        ("abEN", 2, ["END"], ["D more"], ["", ""], "END"),
        ("abEN", 2, ["END"], ["x", "D"], ["ENx", "D"], None),
        ("abEN", 0, ["END"], ["x"], ["x"], None),
        ("abEN", 2, ["END"], ["", "D"], ["", ""], "END"),
        ("ab", 0, ["END"], ["END"], ["END"], None),  # the engine's own
        ("a#", 1, ["##", "#x"], ["x"], [""], "#x"),
        ("a##", 2, ["####"], ["#", "a"], ["", "###a"], None),
        ("", 0, ["END"], ["x"], ["x"], None),
        ("abc", 3, [], ["d"], ["abcd"], None),
    ],
)
def test_case_23_a_stop_string_across_the_seam(
    before: str,
    waiting: int,
    stops: list[str],
    pieces: list[str],
    given: list[str],
    hit: str | None,
) -> None:
    seam = StopSeam(before, waiting, stops, keeps=False)

    assert [seam.feed(piece) for piece in pieces] == given[: len(pieces)]
    assert seam.hit == hit


def test_a_kept_stop_string_is_part_of_the_answer() -> None:
    seam = StopSeam("abEN", 1, ["END"], keeps=True)

    assert seam.feed("D more") == "ND"
    assert seam.hit == "END"


def test_what_is_held_goes_out_with_the_last_event() -> None:
    seam = StopSeam("abEN", 2, ["END"], keeps=False)

    assert seam.feed("", is_last=True) == "EN"
    assert seam.is_done


def test_min_tokens_come_before_stop_strings() -> None:
    seam = StopSeam("abEN", 2, ["END"], keeps=False)

    assert seam.feed("D", may_stop=False) == "END"
    assert seam.hit is None


@pytest.mark.parametrize("keeps", [False, True])
def test_an_owned_seam_finds_every_stop_string(keeps: bool) -> None:
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(rng.choice("ab#") for _ in range(40))
        stops = ["".join(rng.choice("ab#") for _ in range(rng.randrange(2, 5))) for _ in range(2)]
        place = rng.randrange(1, 10)
        if any(stop in text[:place] for stop in stops):
            continue
        seam = StopSeam(text[:place], place, stops, keeps=keeps, owns=True)
        given = ""
        for at in range(place, len(text)):
            given += seam.feed(text[at])
            if seam.hit is not None:
                break
        else:
            given += seam.feed("", is_last=True)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        if not ends:
            assert (given, seam.hit) == (text, None)
            continue
        assert seam.hit is not None
        end = min(ends)
        assert text[:end].endswith(seam.hit)
        assert given == (text[:end] if keeps else text[: end - len(seam.hit)])


def test_what_could_straddle() -> None:
    assert could_straddle("abE", ["END"])
    assert not could_straddle("abEND", ["END"])
    assert not could_straddle("abc", ["END", "x"])
    assert not could_straddle("", ["END"])
