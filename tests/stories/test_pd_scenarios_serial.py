"""Pairs in sequence (vLLM over NIXL): every row of who fails when, and the scenarios of docs/pd.md.

Prefill first, then decode with what prefill handed over; so nobody waits for anybody, and the
danger is a hand-off that is used twice, or one of somebody else's. Simulated halves keep real
caches: with a wrong hand-off they write a wrong text, which every run is checked for.
"""

from __future__ import annotations

import attrs
import pytest
from attrs import frozen

from tests.outcome import Outcome
from tests.pairs import HANDOFF, KV, Half, Pairs, Result, error_body, play, run
from tests.plans import Client, Engine, Plan
from tests.simulate import simulate

STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
PREFILL = Engine(kind="vllm", role="prefill", options="engine=vllm")
DECODE = Engine(kind="vllm", role="decode", options="engine=vllm", first_token_seconds=0.0)
NIXL = "vllm-nixl"


def serial(prefill: str, decode: str, client: Client | None = None, **more: object) -> Result:
    """One pair by timetable."""
    return run(prefill, decode, client or Client(), protocol=NIXL, **more)


def good(stream: bool, at: float = 3.0) -> str:
    return f"head@{at},token@{at},done@{at}" if stream else f"json@{at}"


#### S1 to S4: prefill fails, and decode is never contacted


@frozen
class Row:
    """What a prefill that fails leads to."""

    prefill: str
    status: int
    #: "" where the worker's own words are passed on.
    code: str
    booked: str


PREFILL_FAILS = {
    "S1 cut before its head": Row("cut@1", 502, "upstream_broken", "error"),
    "S1 reset": Row("reset@1", 502, "upstream_broken", "error"),
    "S2 400": Row("400@1", 400, "", "client_error"),
    "S2 404": Row("404@1", 404, "", "client_error"),
    "S2 429": Row("429@1", 429, "", "backpressure"),
    "S2 503": Row("503@1", 503, "", "backpressure"),
    "S2 500": Row("500@1", 502, "prefill_failed", "error"),
    "S3 cut in its body": Row("errorhead:500@1,cut@1", 502, "upstream_broken", "error"),
    "S4 no hand-off": Row("json@1", 502, "prefill_failed", "error"),
    "S4 an abort": Row("jsonabort@1", 502, "prefill_failed", "error"),
    "S4 empty": Row("empty@1", 502, "prefill_failed", "error"),
}


@STREAMED
@pytest.mark.parametrize("name", PREFILL_FAILS)
def test_a_failed_prefill_is_the_end_of_it(name: str, stream: bool) -> None:
    row = PREFILL_FAILS[name]

    result = serial(row.prefill, "", Client(stream=stream))

    assert result.one.status == row.status
    assert result.one.ended_at == pytest.approx(1)
    assert result.one.headers.get("x-router-error-code", "") == row.code
    if not row.code:
        assert result.one.json == error_body(row.status)
    assert not result.d.bodies
    assert (result.rows("p0"), result.rows("d0")) == ([row.booked], [])
    assert sum(result.prefill_failures.values()) == 1


@STREAMED
def test_s1_a_prefill_that_nobody_reaches(stream: bool) -> None:
    result = play(
        Pairs(
            prefills=(Half("", engine="vllm", is_down=True),),
            decodes=(Half("", engine="vllm"),),
            clients=(Client(stream=stream),),
            protocol=NIXL,
        )
    )

    assert (result.one.status, result.one.code) == (502, "upstream_unreachable")
    assert not result.d.bodies
    assert (result.rows("p0"), result.rows("d0")) == (["error"], [])


@STREAMED
@pytest.mark.parametrize("clock", ["first_token", "request"])
def test_s1_a_prefill_that_stays_silent(clock: str, stream: bool) -> None:
    """It has nothing to protect, so it is closed."""
    settings: dict[str, object] = {f"{clock}_timeout_secs": 3.0, "suspect_idle_secs": 0.0}
    if clock == "first_token" and not stream:
        settings["request_timeout_secs"] = 9.0

    result = serial("", "", Client(stream=stream), settings=settings)

    assert result.one.status == 504
    assert not result.d.bodies
    assert len(result.p.left_at) == 1


def test_s1_a_silent_prefill_is_given_up_soon_after_it_has_gone() -> None:
    """It is looked at again and again, however long it was well."""
    outcome = simulate(
        Plan(
            engines=(attrs.evolve(PREFILL, faults="hang"), DECODE),
            settings={"suspect_idle_secs": 3.0, "first_token_timeout_secs": 200.0},
            happenings=((20.3, "faults 0 now:sigterm_hang"),),
        )
    )

    assert (outcome.one.status, outcome.one.code) == (502, "upstream_broken")
    assert 20.3 < outcome.one.ended_at < 22.5


MISSING = ["remote_block_ids", "remote_engine_id", "remote_host", "remote_port"]


@STREAMED
@pytest.mark.parametrize(
    ("name", "how"), [("remote_block_ids", "absent"), *((name, "null") for name in MISSING)]
)
def test_s4_half_a_hand_off_is_none(name: str, how: str, stream: bool) -> None:
    """Without blocks it would kill decode's core, without a sender hang it (vLLM 0.32.0)."""
    given = {key: value for key, value in HANDOFF.items() if key != name}
    if how == "null":
        given[name] = None  # as an engine might

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.pairs.HANDOFF", given)
        result = serial(KV, "", Client(stream=stream))

    assert (result.one.status, result.one.code) == (502, "prefill_failed")
    assert not result.d.bodies


@STREAMED
@pytest.mark.parametrize("prefill", ["", "alone"])
def test_s4_decode_computes_the_prompt_where_that_is_allowed(prefill: str, stream: bool) -> None:
    outcome = pair(
        prefill,
        client=Client(stream=stream, extra={"kv_transfer_params": {"do_remote_prefill": True}}),
        settings={"pd_recompute": True},
    )

    assert outcome.one.status == 200
    assert outcome.one.text
    assert halves(outcome) == (["success"], ["success"])


#### S5 to S7: decode fails


@STREAMED
@pytest.mark.parametrize(
    ("decode", "status", "code", "booked"),
    [
        ("400@2", 400, None, "client_error"),
        ("429@2", 429, None, "backpressure"),
        ("500@2", 500, None, "error"),
        ("503@2", 503, None, "backpressure"),
        ("cut@2", 502, "upstream_broken", "error"),
    ],
    ids=["S6 400", "S6 429", "S6 500", "S6 503", "S6 cut"],
)
def test_decode_fails_after_the_hand_off(
    decode: str, status: int, code: str | None, booked: str, stream: bool
) -> None:
    result = serial(KV, decode, Client(stream=stream))

    assert result.one.status == status
    assert result.one.headers.get("x-router-error-code") == code
    assert (result.rows("p0"), result.rows("d0")) == (["success"], [booked])
    assert not result.d.aborts, "vLLM has no such endpoint"


@STREAMED
def test_s5_a_decode_that_nobody_reaches(stream: bool) -> None:
    result = play(
        Pairs(
            prefills=(Half(KV, engine="vllm"),),
            decodes=(Half("", engine="vllm", is_down=True),),
            clients=(Client(stream=stream),),
            protocol=NIXL,
        )
    )

    assert (result.one.status, result.one.code) == (502, "upstream_unreachable")
    assert (result.rows("p0"), result.rows("d0")) == (["success"], ["error"])


@pytest.mark.parametrize(
    "decode", ["head@2,token@2,cut@3", "head@2,cut@3", "head@2,token@2,reset@3"]
)
def test_s7_decodes_stream_breaks(decode: str) -> None:
    result = serial(KV, decode)

    assert (result.one.status, result.one.ending, result.one.code) == (
        200,
        "cut",
        "upstream_broken",
    )
    assert (result.rows("p0"), result.rows("d0")) == (["success"], ["error"])
    assert result.streams("d0") == ["upstream_error"]


#### S8 to S10, 27: the client leaves


@STREAMED
@pytest.mark.parametrize("way", ["leaves_at", "half_closes_at", "resets_at"])
def test_27_s8_the_client_leaves_during_prefill(way: str, stream: bool) -> None:
    client = Client(stream=stream, **{way: 0.5})  # type: ignore[arg-type]

    result = serial("kv@1", "", client, looks=(0.6,))

    assert result.p.left_at == [pytest.approx(0.5)]
    assert not result.d.bodies
    assert result.looks[0].inflight == {"p0": 0, "d0": 0}
    assert (result.rows("p0"), result.rows("d0")) == (["cancelled"], [])
    assert result.state == "abandoned"


@STREAMED
def test_27_s9_the_client_leaves_as_prefill_hands_over(stream: bool) -> None:
    """Of one moment prefill comes first, then the client."""
    result = serial("kv@1", "", Client(stream=stream, leaves_at=1.0))

    assert result.rows("p0") == ["success"]
    assert result.rows("d0") == ["cancelled"]
    assert not result.d.bodies
    assert result.state == "abandoned"


@STREAMED
@pytest.mark.parametrize("decode", ["", "head@2,token@2"])
def test_27_s10_the_client_leaves_during_decode(decode: str, stream: bool) -> None:
    result = serial(KV, decode, Client(stream=stream, leaves_at=3.0), looks=(3.1,))

    assert result.d.left_at == [pytest.approx(3)]
    assert result.looks[0].inflight == {"p0": 0, "d0": 0}
    assert (result.rows("p0"), result.rows("d0")) == (["success"], ["cancelled"])


#### 26: what the halves are sent


@STREAMED
@pytest.mark.parametrize(
    ("chat", "extra", "cap", "absent"),
    [
        (True, {}, "max_tokens", "max_completion_tokens"),
        (True, {"max_completion_tokens": 9}, "max_completion_tokens", "max_tokens"),
        (False, {"max_tokens": 9, "min_tokens": 5}, "max_tokens", "min_tokens"),
        (False, {"n": 1, "stream_options": {"include_usage": True}}, "max_tokens", "min_tokens"),
    ],
)
def test_26_prefill_writes_one_token_and_decode_gets_what_it_handed_over(
    chat: bool, extra: dict[str, object], cap: str, absent: str, stream: bool
) -> None:
    if "stream_options" in extra and not stream:
        pytest.skip("vLLM refuses these together")

    result = serial(KV, good(stream), Client(stream=stream, chat=chat, extra=extra))

    first, second = result.p.bodies[0], result.d.bodies[0]
    assert first[cap] == 1
    assert first["stream"] is False
    assert not {absent, "min_tokens", "stream_options"} & set(first)
    assert first.get("n", 1) == 1
    wanted = first["kv_transfer_params"]
    assert isinstance(wanted, dict)
    assert (wanted["do_remote_decode"], wanted["do_remote_prefill"]) == (True, False)
    assert second["kv_transfer_params"] == HANDOFF
    for name, value in extra.items():
        assert second[name] == value
    assert second.get("stream", False) is stream
    assert result.one.status == 200


@STREAMED
@pytest.mark.parametrize("chat", [True, False])
def test_26_a_pair_says_what_one_engine_says(chat: bool, stream: bool) -> None:
    clients = tuple(
        Client(at=0.1 * n, chat=chat, stream=stream, prompt=f"prompt {n}", tokens=6)
        for n in range(20)
    )

    outcome = simulate(Plan(engines=(PREFILL, PREFILL, DECODE, DECODE), clients=clients))

    assert all(got.ending == "clean" for got in outcome.got)


@STREAMED
@pytest.mark.parametrize(
    "extra",
    [
        {"prompt": ["one prompt", "another one"]},
        {"n": 2, "temperature": 0.5},
        {"prompt": ["x", "y"], "n": 2, "temperature": 0.5},
    ],
    ids=["batch", "samples", "both"],
)
def test_26_several_sequences_go_to_decode_alone(extra: dict[str, object], stream: bool) -> None:
    """A hand-off is of one sequence, and decode would use it for all."""
    outcome = pair(client=Client(chat=False, stream=stream, extra=extra))

    assert outcome.one.status == 200
    assert [len(outcome.asked(0)), len(outcome.asked(1))] == [0, 1]
    assert halves(outcome) == ([], ["success"])
    if not stream:
        assert outcome.one.json["choices"] == outcome.one.direct[0].json["choices"]


@STREAMED
@pytest.mark.parametrize("decode", ["status,code=500", "cut,at=head", "transfer_fails"])
def test_26_a_new_decode_has_a_new_prefill(decode: str, stream: bool) -> None:
    """A hand-off that was used is somebody else's text (vllm #52234)."""
    bad = Engine(kind="vllm", role="decode", options="engine=vllm", faults=f"always:{decode}")

    outcome = simulate(
        Plan(
            engines=(PREFILL, bad, DECODE),
            clients=tuple(Client(at=3.0 * n, stream=stream, prompt=f"p {n}") for n in range(4)),
            settings={"pd_max_retries": 1, "breaker_failure_threshold": 0},
        )
    )

    given = [body["kv_transfer_params"] for each in (1, 2) for body in outcome.asked(each)]
    references = [each["remote_request_id"] for each in given]  # type: ignore[index]
    assert len(references) == len(set(references)) == len(outcome.asked(0))
    answered = [got for got in outcome.got if got.ending == "clean" and got.status == 200]
    assert len(answered) == 4 or decode != "status,code=500"


@STREAMED
@pytest.mark.parametrize(
    "happens", ["faults 0 now:server_dies", "faults 0 now:server_dies,restart_after=0.2"]
)
def test_26_prefill_dies_between_its_answer_and_decodes_fetch(happens: str, stream: bool) -> None:
    slow = Engine(kind="vllm", role="decode", options="engine=vllm", faults="delay,head=1")

    outcome = simulate(
        Plan(
            engines=(PREFILL, slow),
            clients=(Client(stream=stream),),
            happenings=((1.5, happens),),
        )
    )

    assert outcome.one.error is not None
    assert outcome.one.ended_at == pytest.approx(2)
    assert halves(outcome) == (["success"], ["error"])


#### Simulated pairs


def pair(
    prefill: str = "", decode: str = "", client: Client | None = None, **more: object
) -> Outcome:
    """A run of one simulated pair with these faults."""
    engines = (
        Engine(kind="vllm", role="prefill", options="engine=vllm", faults=prefill),
        Engine(kind="vllm", role="decode", options="engine=vllm", faults=decode),
    )
    plan = {"engines": engines, "clients": (client or Client(),)} | more
    return simulate(Plan(**plan))  # type: ignore[arg-type]  # a test that errs will hear of it


def halves(outcome: Outcome) -> tuple[list[str], list[str]]:
    """How the legs of the only pair were booked."""
    found: dict[str, list[str]] = {"prefill": [], "decode": []}
    for worker, role in (("w0", "prefill"), ("w1", "decode")):
        for each in ("success", "client_error", "backpressure", "error", "cancelled"):
            labels = {"worker": worker, "role": role, "outcome": each}
            found[role] += [each] * int(outcome.count("baton_worker_requests_total", **labels))
    return found["prefill"], found["decode"]
