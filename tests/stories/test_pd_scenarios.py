"""The scenarios of pairs that are started at once, by their numbers in docs/pd.md.

Where it matters what engines do to each other, they are simulated SGLang halves that wait for one
another; where moments matter, halves by timetable. Rows of who fails when are in
test_pd_scenarios_rows.py, pairs in sequence in test_pd_scenarios_serial.py.
"""

from __future__ import annotations

import random
import tracemalloc

import attrs
import msgspec
import pytest

from router.pd.verdict import reading_of
from tests.outcome import Outcome
from tests.pairs import DONE, Half, Pairs, Result, error_body, play, run
from tests.plans import Client, Engine, Plan
from tests.simulate import KV_PORT, simulate

STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
#: Halves that are well: prefill computes for a second, decode takes a tenth of one for a token.
PREFILL = Engine(kind="sglang", role="prefill", options="engine=sglang")
DECODE = Engine(kind="sglang", role="decode", options="engine=sglang", first_token_seconds=0.0)
LATE = "head@5,token@5,done@5"


def pair(
    prefill: str = "", decode: str = "", client: Client | None = None, **more: object
) -> Outcome:
    """A run of one simulated pair with these faults."""
    engines = (attrs.evolve(PREFILL, faults=prefill), attrs.evolve(DECODE, faults=decode))
    plan = {"engines": engines, "clients": (client or Client(),)} | more
    return simulate(Plan(**plan))  # type: ignore[arg-type]  # a test that errs will hear of it


def rows(outcome: Outcome, worker: str, role: str) -> list[str]:
    """How the legs of a worker were booked."""
    found = []
    for each in ("success", "client_error", "backpressure", "error", "cancelled"):
        labels = {"worker": worker, "role": role, "outcome": each}
        found += [each] * int(outcome.count("baton_worker_requests_total", **labels))
    return found


def halves(outcome: Outcome) -> tuple[list[str], list[str]]:
    """How the legs of the only pair were booked."""
    return rows(outcome, "w0", "prefill"), rows(outcome, "w1", "decode")


#### 1, 2: what the halves are sent


@STREAMED
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_1_both_bodies_meet_in_one_room(path: str, stream: bool) -> None:
    extra: dict[str, object] = {"text": "hi", "input_ids": None} if path == "/generate" else {}
    client = Client(path=path, stream=stream, extra=extra | {"unheard_of": {"a": [1, 2.50]}})
    decode = "head@1,token@1,done@1" if stream else "json@1"

    result = play(
        Pairs(
            prefills=(Half(DONE, port=8997),),
            decodes=(Half(decode),),
            clients=(client, Client(path=path, stream=stream, extra=extra, at=3.0)),
        )
    )

    sent = msgspec.json.decode(client.body("tiny"))
    first, second = result.p.bodies
    assert [first, second] == result.d.bodies
    minted = {name: first.pop(name) for name in (*BOOTSTRAP, "rid")}
    assert first == sent
    assert minted["bootstrap_host"] == "127.0.0.1"
    assert minted["bootstrap_port"] == 8997
    assert isinstance(minted["bootstrap_room"], int)
    assert 0 <= minted["bootstrap_room"] < 1 << 63
    assert len(str(minted["rid"])) == 32
    assert int(str(minted["rid"]), 16) >= 0
    assert second["bootstrap_room"] != minted["bootstrap_room"]
    assert second["rid"] != minted["rid"]


BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


@pytest.mark.parametrize(
    ("extra", "count"),
    [
        ({"prompt": ["a", "b", "c"]}, 3),
        ({"prompt": [[5, 6], [7]]}, 2),
        ({"n": 2}, 2),
        ({"prompt": ["a", "b"], "n": 2}, 4),
    ],
)
def test_1_several_sequences_get_a_room_each(extra: dict[str, object], count: int) -> None:
    client = Client(chat=False, stream=False, extra=extra)

    result = run("json@1", "json@1", client)

    for body in (result.p.bodies[0], result.d.bodies[0]):
        assert body["bootstrap_host"] == ["127.0.0.1"] * count
        assert body["bootstrap_port"] == [8998] * count
        found = body["bootstrap_room"]
        assert isinstance(found, list)
        assert len(set(found)) == count
    assert result.p.bodies == result.d.bodies


@pytest.mark.parametrize("prompt", [["a"], [5, 6, 7], "a"], ids=["list of one", "ids", "text"])
def test_1_one_sequence_has_no_list(prompt: object) -> None:
    """A list of rooms for one prompt kills both engines (SGLang 0.5.23)."""
    result = run("json@1", "json@1", Client(chat=False, stream=False, extra={"prompt": prompt}))

    assert isinstance(result.p.bodies[0]["bootstrap_room"], int)


@STREAMED
@pytest.mark.parametrize("room", [1 << 63, [1, 2], None, -4])
def test_1_a_room_of_the_clients_goes_nowhere(room: object, stream: bool) -> None:
    """It would kill the engine, or meet somebody else."""
    extra: dict[str, object] = {"bootstrap_room": room, "bootstrap_host": ["evil"] * 2}
    client = Client(stream=stream, extra=extra | {"bootstrap_port": 1})

    outcome = pair(client=client)

    assert outcome.one.status == 200
    assert halves(outcome) == (["success"], ["success"])


def test_1_an_engine_that_is_no_half_is_sent_none_of_it() -> None:
    outcome = simulate(Plan(engines=(Engine(kind="sglang"),)))

    assert not set(BOOTSTRAP) & set(outcome.asked(0)[0])


def test_2_every_prefill_has_a_port_of_its_own() -> None:
    prefills = (Half(DONE, port=11111), Half(DONE, port=22222), Half(DONE, port=None))
    clients = tuple(Client(at=float(number)) for number in range(6))

    result = play(
        Pairs(prefills=prefills, decodes=(Half("head@0,token@0,done@0"),), clients=clients)
    )

    for prefill, port, times in zip(result.prefills, (11111, 22222, None), (3, 3, 0), strict=True):
        assert [body["bootstrap_port"] for body in prefill.bodies] == [port] * times
    rooms = [body["bootstrap_room"] for each in result.prefills for body in each.bodies]
    assert sorted(map(str, rooms)) == sorted(
        str(body["bootstrap_room"]) for body in result.d.bodies
    )


#### 3 to 9: prefill fails, and decode would wait


@STREAMED
@pytest.mark.parametrize("chat", [True, False])
def test_3_a_prompt_too_long_for_prefill_is_answered_at_once(chat: bool, stream: bool) -> None:
    short = attrs.evolve(PREFILL, context_length=16)
    client = Client(stream=stream, chat=chat, prompt="word " * 40)

    outcome = simulate(Plan(engines=(short, DECODE), clients=(client,), looks=(0.5,)))

    assert outcome.one.status == 400
    assert "x-router-error-code" not in outcome.one.headers
    assert "longer than the model's context length (16 tokens)" in str(outcome.one.error)
    assert outcome.one.ended_at == pytest.approx(0, abs=0.01)
    assert halves(outcome) == (["client_error"], ["cancelled"])
    assert outcome.look.running == [0, 0], "decode still waits"
    aborts = [each.body for each in outcome.work(1) if each.path == "/abort_request"]
    rid = outcome.asked(1)[0]["rid"]
    assert [msgspec.json.decode(each) for each in aborts] == [{"rid": rid, "abort_all": False}]
    assert outcome.count("baton_engine_aborts_total", outcome="ok") == 1


@STREAMED
@pytest.mark.parametrize("code", [429, 503])
def test_4_a_busy_prefill_is_no_broken_one(code: int, stream: bool) -> None:
    clients = tuple(Client(stream=stream, at=float(n)) for n in range(10))

    outcome = pair(f"status,code={code},retry_after=7", clients=clients, looks=(10.5,))

    for got in outcome.got:
        assert got.status == code
        assert got.headers["retry-after"] == "7"
        assert "x-router-error-code" not in got.headers
    assert halves(outcome) == (["backpressure"] * 10, ["cancelled"] * 10)
    assert set(outcome.look.breakers.values()) == {"closed"}


@STREAMED
def test_5_a_failing_prefill_opens_its_own_breaker(stream: bool) -> None:
    clients = tuple(Client(stream=stream, at=0.5 * n) for n in range(4))

    outcome = pair("status,code=500", clients=clients, looks=(2.5,))

    assert [(got.status, got.code) for got in outcome.got[:3]] == [(502, "prefill_failed")] * 3
    assert (outcome.got[3].status, outcome.got[3].code) == (503, "breaker_open")
    assert halves(outcome) == (["error"] * 3, ["cancelled"] * 3)
    assert outcome.look.breakers == {"w0": "open", "w1": "closed"}


@STREAMED
@pytest.mark.parametrize(
    "fault", ["cut,at=head", "cut,after_events=1", "now:server_dies", "server_dies"]
)
def test_6_a_prefill_that_dies(fault: str, stream: bool) -> None:
    """With decode waiting for heartbeats, or for its five minutes."""
    is_later = fault.startswith("now")
    faults = "" if is_later else fault if "server" in fault else f"alone;{fault}"
    happenings = ((0.5, f"faults 0 {fault}"),) if is_later else ()

    outcome = pair(faults, client=Client(stream=stream), happenings=happenings)

    whole_after_head = fault == "cut,after_events=1" and not stream
    if not whole_after_head:
        assert outcome.one.status == 502
        assert outcome.one.code in ("upstream_broken", "upstream_unreachable")
        assert outcome.one.ended_at <= 1.1
        assert halves(outcome) == (["error"], ["cancelled"])


@pytest.mark.parametrize("cuts", [None, 1, 2, 3])
@pytest.mark.parametrize("fault", ["error_event,at=head", "error_event,after_events=1"])
def test_7_an_error_event_in_a_200(fault: str, cuts: int | None) -> None:
    """However its bytes are cut."""
    outcome = pair(f"alone;{fault}", cuts=cuts)

    assert (outcome.one.status, outcome.one.code) == (502, "prefill_failed")
    assert outcome.one.ended_at == pytest.approx(1)
    assert halves(outcome) == (["error"], ["cancelled"])


@STREAMED
def test_7_the_word_error_in_a_text_is_no_error(stream: bool) -> None:
    said = 'token:"{"error"@1'
    prefill = f"head@1,{said},done@1"

    result = run(prefill, "head@2,token@2,done@2" if stream else "json@2", Client(stream=stream))

    assert result.rows("p0") == ["success"]
    assert result.one.status == 200


@STREAMED
@pytest.mark.parametrize("reason", ["abort", "error"])
def test_8_a_finish_that_lies(reason: str, stream: bool) -> None:
    outcome = pair(f"alone;abort,at=head,reason={reason}", client=Client(stream=stream))

    assert (outcome.one.status, outcome.one.code) == (502, "prefill_failed")
    assert halves(outcome) == (["error"], ["cancelled"])


@STREAMED
@pytest.mark.parametrize("half", [0, 1])
def test_9_an_open_breaker_lets_nothing_out(half: int, stream: bool) -> None:
    faults = ["", ""]
    faults[half] = "times=1:status,code=500"

    outcome = pair(
        faults[0],
        faults[1],
        clients=(Client(stream=stream), Client(stream=stream, at=2.0)),
        settings={"breaker_failure_threshold": 1},
    )

    assert (outcome.got[1].status, outcome.got[1].code) == (503, "breaker_open")
    assert [len(outcome.asked(0)), len(outcome.asked(1))] == [1, 1]


#### 10 to 13: decode has answered


def test_10_decode_never_waits_for_prefills_answer() -> None:
    outcome = pair("linger,seconds=50", client=Client(tokens=4), looks=(2.0,))

    assert outcome.one.head_at == pytest.approx(1)
    assert outcome.one.ended_at == pytest.approx(1.3)
    assert outcome.look.inflight == {"w0": 1, "w1": 0}
    assert halves(outcome) == (["success"], ["success"])


def test_10_nor_does_a_whole_answer() -> None:
    outcome = pair("linger,seconds=50", client=Client(tokens=4, stream=False))

    assert outcome.one.ended_at == pytest.approx(1.3)
    assert halves(outcome) == (["success"], ["success"])


@pytest.mark.parametrize("comments", ["", ",comments_every=0.2"])
@pytest.mark.parametrize("fault", ["cut,at=head", "error_event,at=head", "abort,at=head"])
def test_11_12_prefill_fails_after_decodes_head(fault: str, comments: str) -> None:
    outcome = pair(f"alone;{fault}", f"early_head{comments}", looks=(1.5,))

    assert (outcome.one.status, outcome.one.ending) == (200, "cut")
    assert outcome.one.head_at == pytest.approx(0, abs=0.01)
    assert outcome.one.ended_at == pytest.approx(1)
    assert outcome.facts[-1] == "prefill_failed"
    assert halves(outcome) == (["error"], ["cancelled"])
    assert outcome.count("baton_stream_outcome_total", worker="w1", outcome="aborted") == 1
    assert outcome.look.running[1] == 0
    assert outcome.look.breakers["w1"] == "closed"


@pytest.mark.parametrize("moment", [1.25, 1.35])
def test_13_a_prefill_that_dies_after_the_hand_over(moment: float) -> None:
    outcome = pair("linger,seconds=50", happenings=((moment, "faults 0 now:server_dies"),))

    assert outcome.one.is_done
    assert halves(outcome) == (["error"], ["success"])
    assert not [each for each in outcome.work(1) if each.path == "/abort_request"]


#### 14 to 16: who is first


@STREAMED
@pytest.mark.parametrize("code", [400, 429, 500, 503])
def test_14_decodes_error_is_final(code: int, stream: bool) -> None:
    result = run(LATE, f"{code}@1", Client(stream=stream), looks=(1.05, 5.5))

    assert (result.one.status, result.one.json) == (code, error_body(code))
    assert result.one.ended_at == pytest.approx(1)
    assert [look.inflight["p0"] for look in result.looks] == [1, 0]
    assert result.rows("p0") == ["success"]
    assert not result.d.aborts
    assert not result.p.aborts


@STREAMED
@pytest.mark.parametrize("code", [400, 500])
def test_15_decodes_error_stays_whole(code: int, stream: bool) -> None:
    """Prefill fails between the two halves of its body."""
    decode = f"errorhead:{code}@1,errorrest:{code}@1.75"

    result = run("400@1.5", decode, Client(stream=stream))

    assert (result.one.status, result.one.json) == (code, error_body(code))
    assert result.one.ended_at == pytest.approx(1.75)


@STREAMED
@pytest.mark.parametrize(
    ("prefill_at", "decode_at", "winner"), [(1.0, 1.0, "p"), (1.0, 0.999, "d"), (0.999, 1.0, "p")]
)
@pytest.mark.parametrize("decode", ["good", "429"])
def test_16_ties_are_prefills(
    prefill_at: float, decode_at: float, winner: str, decode: str, stream: bool
) -> None:
    good = f"head@{decode_at},token@{decode_at},done@{decode_at}" if stream else f"json@{decode_at}"
    script = good if decode == "good" else f"429@{decode_at}"

    result = run(f"400@{prefill_at}", script, Client(stream=stream))

    won = 400 if winner == "p" else 200 if decode == "good" else 429
    assert result.one.status == won


#### 17: the client leaves


@STREAMED
@pytest.mark.parametrize("leaves_at", [0.5, 1.05])
def test_17_a_client_that_leaves_ends_decode_and_blames_nobody(
    leaves_at: float, stream: bool
) -> None:
    """SGLang's prefill fails when its decode is aborted: that is our doing, not its fault."""
    clients = tuple(
        Client(stream=stream, at=3.0 * n, leaves_at=3.0 * n + leaves_at) for n in range(5)
    )

    outcome = pair(clients=clients, looks=(2.5, 20.0))

    assert outcome.looks[0].running == [0, 0], "decode was not told"
    assert outcome.looks[1].breakers == {"w0": "closed", "w1": "closed"}
    prefill, decode = halves(outcome)
    assert decode == ["cancelled"] * 5
    assert prefill == (["cancelled"] if leaves_at == 0.5 else ["success"]) * 5
    assert outcome.sum("baton_pd_prefill_failures_total") == 0


#### 18, 19: names


@STREAMED
@pytest.mark.parametrize(
    "extra",
    [{"rid": "a"}, {"prompt": ["x", "y"], "rid": ["a", "b"]}, {"n": 2}, {"n": 2, "rid": "a"}],
    ids=["one name", "two names", "samples", "named samples"],
)
def test_18_what_the_router_did_not_name_it_does_not_abort(
    extra: dict[str, object], stream: bool
) -> None:
    result = run("400@1", "", Client(stream=stream, chat=False, extra=extra))

    assert result.one.status == 400
    assert result.d.left_at == [pytest.approx(1)]
    assert not result.d.aborts
    assert result.d.bodies[0].get("rid") == extra.get("rid")


@STREAMED
def test_18_null_is_no_name(stream: bool) -> None:
    result = run("400@1", "", Client(stream=stream, extra={"rid": None}))

    assert len(str(result.d.bodies[0]["rid"])) == 32
    assert len(result.d.aborts) == 1


def test_19_a_name_that_begins_another_takes_nobody_down() -> None:
    """SGLang aborts by prefix (sglang #30912)."""
    first = Client(extra={"rid": "request-1"}, fault="")
    second = Client(extra={"rid": "request-10"}, tokens=40, at=0.1)

    outcome = pair(
        "request=1:alone;request=1:status,code=500", clients=(first, second), looks=(0.5,)
    )

    assert [got.status for got in outcome.got] == [502, 200]
    assert outcome.got[1].is_done
    assert not outcome.engines[1].aborted


#### 20: the abort itself


@STREAMED
@pytest.mark.parametrize(
    ("aborts", "counted"),
    [("200", "ok"), ("500", "error"), ("hang", "timeout"), ("endless", "ok")],
)
def test_20_an_abort_that_fails_hurts_nobody(aborts: str, counted: str, stream: bool) -> None:
    key = (("authorization", "Bearer secret"),)
    pairs = Pairs(
        prefills=(Half("400@1 | 400@2 | 400@3 | 400@4"),),
        decodes=(Half("", aborts=aborts),),
        clients=tuple(Client(stream=stream, at=float(n), headers=key) for n in range(4)),
        looks=(4.5,),
        rest=20.0,
    )

    result = play(pairs)

    assert [got.ended_at for got in result.got] == [pytest.approx(n + 1) for n in range(4)]
    assert result.looks[0].breakers["d0"] == "closed"
    assert result.count("baton_engine_aborts_total", outcome=counted) == 4
    assert [headers["authorization"] for _, headers in result.d.aborts] == ["Bearer secret"] * 4
    assert result.rows("d0") == ["cancelled"] * 4


#### 21: the deadline


@STREAMED
@pytest.mark.parametrize("in_time", [True, False])
def test_21_an_answer_before_the_deadline_and_one_after_it(in_time: bool, stream: bool) -> None:
    """Of one moment, what has arrived comes first: see tests/test_reactor.py."""
    moment = 2.999 if in_time else 3.001
    decode = f"head@{moment},token@{moment},done@{moment}" if stream else f"json@{moment}"

    result = run(DONE, decode, Client(stream=stream), settings={"request_timeout_secs": 3.0})

    assert result.one.status == (200 if in_time else 504)
    assert result.rows("d0") == (["success"] if in_time else ["cancelled"])
    assert len(result.d.aborts) == (0 if in_time else 1)


#### 22: pools


def test_22_a_prefill_without_a_group_of_its_own_is_never_asked() -> None:
    prefills = (Half(DONE, options="group=a"), Half(DONE, options="group=lonely"), Half(DONE))
    decodes = (
        Half("head@0,token@0,done@0", options="group=a"),
        Half("head@0,token@0,done@0"),
    )
    clients = tuple(Client(at=0.2 * n) for n in range(20))

    result = play(Pairs(prefills=prefills, decodes=decodes, clients=clients))

    assert {got.status for got in result.got} == {200}
    assert [len(each.bodies) for each in result.prefills] == [10, 0, 10]
    rooms = [[body["bootstrap_room"] for body in each.bodies] for each in result.prefills]
    assert rooms[0] == [body["bootstrap_room"] for body in result.decodes[0].bodies]
    assert rooms[2] == [body["bootstrap_room"] for body in result.decodes[1].bodies]


def test_22_a_prefill_that_nobody_can_meet_is_no_half() -> None:
    ready = Client(method="GET", path="/readyz", stream=False)

    result = play(
        Pairs(
            prefills=(Half(DONE, port=None),),
            decodes=(Half("head@0,token@0,done@0"),),
            clients=(ready, Client(at=1.0)),
        )
    )

    assert [got.status for got in result.got] == [503, 503]
    assert {got.code for got in result.got} == {"no_prefill_workers"}
    assert b"bootstrap port" in result.got[1].body
    assert (result.p.bodies, result.d.bodies) == ([], [])


@pytest.mark.parametrize("given", ["", "bootstrap_port=7777"])
def test_22_a_port_that_was_not_named_is_the_engines_own(given: str) -> None:
    prefill = Engine(kind="sglang", role="prefill", options=given, names_port=False)

    outcome = simulate(Plan(engines=(prefill, DECODE)))

    (body,) = outcome.asked(0)
    assert body["bootstrap_port"] == (7777 if given else KV_PORT)


def test_22_a_pair_is_ready_when_both_halves_are() -> None:
    def ready(at: float) -> Client:
        return Client(method="GET", path="/readyz", stream=False, at=at)

    outcome = simulate(
        Plan(
            engines=(PREFILL, DECODE),
            clients=(ready(0), ready(2), Client(at=2.0), ready(4), Client(at=4.0)),
            happenings=((1.0, "drain 1"), (3.0, "remove 1"), (3.1, "add 1")),
            settings={"health_check_interval_secs": 0.1, "health_success_threshold": 1},
            rest=1.0,
        )
    )

    assert [got.status for got in outcome.got] == [200, 503, 503, 200, 200]
    assert outcome.got[2].code == "no_decode_workers"


#### 23: further pairs


def checked_retry(result: Result) -> None:
    bodies = [body for each in (*result.prefills, *result.decodes) for body in each.bodies]
    for name in ("bootstrap_room", "rid"):
        found = [body[name] for body in bodies]
        assert len(set(map(str, found))) == len(found) / 2, f"{name} of one attempt in another"


@STREAMED
@pytest.mark.parametrize("prefill", ["500@1", "cut@1", "503@1", "head@1,error@1"])
def test_23_another_pair_with_new_names(prefill: str, stream: bool) -> None:
    good = "head@2,token@2,done@2" if stream else "json@2"
    pairs = Pairs(
        prefills=(Half(prefill), Half("head@2,token@2,done@2")),
        decodes=(Half(f" | {good}"),),
        clients=(Client(stream=stream),),
        settings={"pd_max_retries": 2},
    )

    result = play(pairs)

    assert (result.one.status, result.one.ending) == (200, "clean")
    assert [len(each.bodies) for each in result.prefills] == [1, 1]
    assert len(result.d.bodies) == 2
    assert [abort["rid"] for abort, _ in result.d.aborts] == [result.d.bodies[0]["rid"]]
    checked_retry(result)


@STREAMED
def test_23_with_a_name_of_the_clients_both_workers_are_left_alone(stream: bool) -> None:
    """An engine refuses a name that it still knows (sglang #19035)."""
    result = run(
        "500@1", "", Client(stream=stream, extra={"rid": "a"}), settings={"pd_max_retries": 2}
    )

    assert (result.one.status, result.one.code) == (502, "prefill_failed")
    assert [len(result.p.bodies), len(result.d.bodies)] == [1, 1]


@STREAMED
def test_23_a_400_is_the_clients(stream: bool) -> None:
    pairs = Pairs(
        prefills=(Half("400@1"), Half("400@1")),
        decodes=(Half(""), Half("")),
        clients=(Client(stream=stream),),
        settings={"pd_max_retries": 2},
    )

    result = play(pairs)

    assert result.one.status == 400
    assert sum(len(each.bodies) for each in result.prefills) == 1


def test_23_never_after_a_head() -> None:
    pairs = Pairs(
        prefills=(Half("500@2"), Half("500@2")),
        decodes=(Half("head@1"), Half("head@1")),
        settings={"pd_max_retries": 2},
    )

    result = play(pairs)

    assert (result.one.status, result.one.ending) == (200, "cut")
    assert sum(len(each.bodies) for each in result.prefills) == 1


#### 24: ranks


@STREAMED
def test_24_rooms_and_ranks_agree(stream: bool) -> None:
    good = "head@0,token@0,done@0" if stream else "json@0"
    pairs = Pairs(
        prefills=(Half(good, options="dp_size=4"),),
        decodes=(Half(good, options="dp_size=4"),),
        clients=tuple(
            Client(stream=stream, at=0.1 * n, headers=(("x-data-parallel-rank", "9"),))
            for n in range(12)
        ),
    )

    result = play(pairs)

    for engine in (result.p, result.d):
        for body, headers in zip(engine.bodies, engine.headers, strict=True):
            assert headers["x-data-parallel-rank"] == str(body["routed_dp_rank"])
            assert body["data_parallel_rank"] is None
    for first, second in zip(result.p.bodies, result.d.bodies, strict=True):
        room = first["bootstrap_room"]
        assert isinstance(room, int)
        assert room % 4 == first["routed_dp_rank"]
        assert second["disagg_prefill_dp_rank"] == first["routed_dp_rank"]


def test_24_samples_are_not_pinned() -> None:
    pairs = Pairs(
        prefills=(Half("json@1", options="dp_size=4"),),
        decodes=(Half("json@1", options="dp_size=4"),),
        clients=(Client(stream=False, extra={"n": 2}),),
    )

    result = play(pairs)

    assert result.p.bodies[0]["routed_dp_rank"] is None


def test_24_a_client_may_not_choose_a_rank() -> None:
    result = run(DONE, "head@1,token@1,done@1", Client(headers=(("x-data-parallel-rank", "3"),)))

    for engine in (result.p, result.d):
        assert "x-data-parallel-rank" not in engine.headers[0]
        assert "routed_dp_rank" not in engine.bodies[0]


#### 28: permits


@STREAMED
@pytest.mark.parametrize("ends", ["400@11", "500@11"])
def test_28_a_probe_that_its_prefill_cancelled_comes_back(ends: str, stream: bool) -> None:
    good = "head@12,token@12,done@12" if stream else "json@12"
    pairs = Pairs(
        prefills=(Half(f"{LATE} | {ends} | head@12,token@12,done@12"),),
        decodes=(Half(f"500@1 |  | {good}"),),
        clients=(
            Client(stream=stream),
            Client(stream=stream, at=10.0),
            Client(stream=stream, at=12.0),
        ),
        settings={"breaker_failure_threshold": 1, "breaker_cooldown_secs": 5.0},
        looks=(10.5, 11.5),
        rest=20.0,
    )

    result = play(pairs)

    assert result.looks[0].breakers["d0"] == "half_open"
    assert result.looks[1].breakers["d0"] == "half_open"
    if ends.startswith("400"):
        assert (result.got[2].status, result.got[2].ending) == (200, "clean")
    else:
        assert result.got[2].code == "breaker_open"  # of the prefill, which failed
    assert result.rows("d0")[-1] == "cancelled"


#### 29: memory


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
def test_29_a_prefill_of_200_megabytes_is_read_in_little_memory(is_stream: bool) -> None:
    """And what it says at its very end is heard."""
    kind = b"text/event-stream" if is_stream else b"application/json"
    reading = reading_of(200, [(b"content-type", kind)], "chat", "none", None)
    event = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 65000)

    tracemalloc.start()
    for _ in range(200_000_000 // len(event)):
        assert reading.feed(event) is None
    verdict = reading.feed(b'data: {"error":{"message":"out of memory","code":500}}\n\n')
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 20_000_000
    if is_stream:
        assert verdict is not None
        assert verdict.fact == "erred"


#### 30: all at once


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_30_a_soak_of_faults(seed: int) -> None:
    """Every leg booked once, nothing left over; what is checked after every run is checked here."""
    luck = random.Random(seed)
    faults = [
        "status,code=500", "status,code=400", "status,code=503", "alone;cut,at=head",
        "alone;error_event,at=head", "alone;abort,at=head", "linger,seconds=3", "cut",
        "transfer_fails", "hang", "early_head,comments_every=0.3", "cut,after_events=2",
        "abort,after_events=1", "drop", "delay,head=2", "delay,first_token=2",
    ]  # fmt: skip
    pieces = ";".join(f"every={luck.randint(3, 9)}:{each}" for each in luck.sample(faults, 6))
    clients = tuple(
        Client(
            at=round(luck.random() * 40, 3),
            stream=luck.random() < 0.6,
            chat=luck.random() < 0.5,
            tokens=luck.randint(1, 12),
            prompt=luck.choice(["hi", "once upon a time", "word " * 30]),
        )
        for _ in range(250)
    )
    leaving = tuple(
        Client(at=each.at, stream=each.stream, leaves_at=each.at + luck.random() * 2)
        for each in clients[:40]
    )
    engines = [attrs.evolve(each, faults=pieces) for each in (PREFILL, PREFILL, DECODE, DECODE)]

    outcome = simulate(
        Plan(
            engines=tuple(engines),
            clients=clients[40:] + leaving,
            settings={
                "request_timeout_secs": 30.0,
                "first_token_timeout_secs": 10.0,
                "pd_max_retries": luck.randint(0, 2),
                "breaker_cooldown_secs": 1.0,
                "migration_limit": luck.randint(0, 1),
            },
            luck=seed,
            cuts=seed,
        )
    )

    assert len(outcome.tickets) == 250
    told = [got for got in outcome.got if got.status or got.ending == "left"]
    assert len(told) == 250
