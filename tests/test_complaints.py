"""What users of other routers complain about, each as a test that would catch it here.

The numbers C1, C2, ... are of a survey of issue trackers; the issues it names are in the
docstrings. Most of these behaviours have more stories of their own in tests/stories.
"""

from __future__ import annotations

import pytest

from router.errors import STATUS_OF
from tests.simulate import Client, Engine, Outcome, Plan, simulate

SILENT = Engine(faults="hang")


def get(path: str, at: float) -> Client:
    """A client that asks the router itself."""
    return Client(method="GET", path=path, at=at, stream=False)


def nothing_is_left(outcome: Outcome) -> bool:
    """No engine works and no worker has a leg, right after the clients left."""
    look = outcome.looks[-1]
    return not any(look.running) and not any(look.inflight.values()) and not look.states


def test_a_whole_answer_nobody_waits_for_is_cancelled_and_counted_once() -> None:
    """C1: a cancelled non-stream request keeps running; counters leak (production-stack#634)."""
    whole = Client(stream=False, tokens=40, leaves_at=0.3)
    streams = tuple(Client(at=1.0, tokens=100, leaves_at=3.0 + 0.01 * turn) for turn in range(20))

    outcome = simulate(Plan(clients=(whole, *streams), looks=(0.301, 3.3)))

    assert outcome.looks[0].running == [0, 0]
    assert nothing_is_left(outcome)
    assert sum(engine.disconnects for engine in outcome.engines) == 21
    assert outcome.sum("baton_worker_inflight") == 0
    assert outcome.count("baton_requests_total", route="chat", outcome="abandoned") == 21


@pytest.mark.parametrize("point", ["request", "head"])
def test_a_client_that_leaves_before_the_first_token_is_noticed(point: str) -> None:
    """C2: a disconnect during time-to-first-token is ignored (litellm#37140, #13774)."""
    waiting = Engine(faults=f"hang,at={point}")

    outcome = simulate(
        Plan(engines=(waiting,), clients=(Client(leaves_at=0.3),), looks=(0.29, 0.31))
    )

    assert outcome.looks[0].states == ["dispatching"]
    assert nothing_is_left(outcome)


def test_a_client_that_leaves_a_silent_stream_is_noticed() -> None:
    """C3: the relay notices the client only at its next write (smg PR #2136, sglang#11399)."""
    outcome = simulate(
        Plan(
            engines=(Engine(faults="hang,after_events=5"),),
            clients=(Client(leaves_at=4.0),),
            looks=(3.99, 4.01),
        )
    )

    assert outcome.looks[0].running == [1]
    assert nothing_is_left(outcome)


def test_a_stale_connection_is_replaced_once_and_blames_nobody() -> None:
    """C8: stale keep-alive connections (smg PR #2162, sglang#20851)."""
    stale = Engine(faults="request=2:close_reused")

    outcome = simulate(
        Plan(
            engines=(stale,),
            clients=(Client(tokens=1), Client(at=2.0, tokens=1)),
            looks=(5.0,),
        )
    )

    assert [got.status for got in outcome.got] == [200, 200]
    assert [each.reused for each in outcome.work(0)] == [False, True, False]
    assert outcome.sum("baton_retries_total") == 0
    assert outcome.look.breakers == {"w0": "closed"}


def test_idle_connections_are_given_up_before_the_engine_closes_them() -> None:
    """C8: an engine closes idle connections after 5 s; a pool must not keep them longer."""
    turns = tuple(Client(at=4.6 * turn, tokens=1) for turn in range(6))

    outcome = simulate(
        Plan(
            engines=(Engine(first_token_seconds=0.0),),
            clients=turns,
            settings={"health_check_interval_secs": 500.0},
        )
    )

    assert not any(each.reused for each in outcome.work(0))
    assert {got.status for got in outcome.got} == {200}


def test_a_worker_that_never_answers_has_a_limit() -> None:
    """C9: no timeout at all (production-stack#749)."""
    settings: dict[str, object] = {"first_token_timeout_secs": 0.5}

    alone = simulate(Plan(engines=(SILENT,), settings=settings))
    helped = simulate(Plan(engines=(SILENT, Engine()), settings=settings))

    assert (alone.one.code, alone.one.ended_at) == ("first_token_timeout", 0.5)
    assert helped.one.ending == "clean"


def test_gauges_do_not_grow_by_requests_that_hang() -> None:
    """C12: the gauge of in-flight requests grows for ever (dynamo PR #7924, #14918)."""
    hanging = tuple(Client(at=0.01 * turn) for turn in range(100))

    outcome = simulate(
        Plan(
            engines=(SILENT,),
            clients=(*hanging, get("/metrics", 5.0), get("/metrics", 15.0)),
            settings={"request_max_retries": 0},
            happenings=((10.0, "faults 0 now:server_dies"),),
        )
    )

    before, after = (got.body for got in outcome.got[-2:])
    assert b'baton_worker_inflight{worker="w0"} 100.0' in before
    assert b'baton_worker_inflight{worker="w0"} 0.0' in after
    assert b'baton_requests_open{state="dispatching"} 0.0' in after


def test_load_is_what_runs_whatever_happened_before() -> None:
    """C13: a load counter drifts and sends all traffic to one node (vllm-router PR #215)."""
    faults = ("", "cut", "status,code=500", "status,code=400", "abort", "cut,after_events=3")
    mixed = tuple(
        Client(
            at=0.2 * turn,
            fault=faults[turn % len(faults)],
            stream=turn % 4 != 0,
            leaves_at=0.2 * turn + 1.3 if turn % 5 == 0 else None,
        )
        for turn in range(60)
    )
    looks = tuple(0.1 + 0.5 * turn for turn in range(30))

    last = tuple(
        Client(at=40.0 + turn, tokens=30, headers=(("x-request-id", f"last-{turn}"),))
        for turn in range(4)
    )

    outcome = simulate(
        Plan(clients=(*mixed, *last), settings={"policy": "least_load"}, looks=looks)
    )

    for look in outcome.looks:
        assert list(look.inflight.values()) == look.running, look
    for number in (0, 1):
        names = [each.headers["x-request-id"] for each in outcome.work(number)]
        assert sum(name.startswith("last-") for name in names) == 2
    assert outcome.sum("baton_worker_inflight") == 0


def test_a_cap_is_never_exceeded() -> None:
    """C14: a concurrency cap does not cap (smg PR #2240, vllm-router PR #280)."""
    slow = tuple(Client(at=0.01 * turn, tokens=20) for turn in range(20))

    outcome = simulate(
        Plan(
            clients=slow,
            settings={"max_concurrent_requests": 4, "queue_timeout_secs": 100.0},
            looks=tuple(0.25 + 0.5 * turn for turn in range(30)),
        )
    )

    assert max(sum(look.running) for look in outcome.looks) == 4
    assert {got.ending for got in outcome.got} == {"clean"}


@pytest.mark.parametrize("status", [400, 422, 429])
def test_errors_of_clients_do_not_open_the_breaker(status: int) -> None:
    """C15: the breaker counts client errors (sglang#25811, vllm-router PR #60)."""
    bad = tuple(Client(at=turn, fault=f"status,code={status}") for turn in range(10))

    outcome = simulate(Plan(engines=(Engine(),), clients=(*bad, Client(at=11.0)), looks=(10.5,)))

    assert outcome.got[-1].ending == "clean"
    assert outcome.look.breakers == {"w0": "closed"}


def test_a_death_behind_the_headers_opens_the_breaker() -> None:
    """C16: the breaker is scored on headers only (smg PR #2487)."""
    dies = Engine(faults="cut,after_events=3")

    outcome = simulate(
        Plan(
            engines=(dies, Engine()),
            clients=tuple(Client(at=2.0 * turn) for turn in range(8)),
            settings={"breaker_cooldown_secs": 60.0},
            looks=(20.0,),
        )
    )

    assert outcome.look.breakers == {"w0": "open", "w1": "closed"}
    assert outcome.sent[0] == 3


def test_framing_is_made_anew_for_what_is_really_sent() -> None:
    """C19: wrong framing headers on relay (sglang PR #27523, production-stack PR #733)."""
    engines = (Engine(kind="sglang"),)
    clients = (
        Client(fault="status,code=400,message=rewritten%20here"),
        Client(at=1.0, fault="gzip"),
        Client(at=5.0, fault="gzip", stream=False),
        Client(at=9.0, fault="close_delimited"),
    )

    outcome = simulate(Plan(engines=engines, clients=clients))

    rewritten, packed, packed_whole, delimited = outcome.got
    assert rewritten.headers["content-length"] == str(len(rewritten.body))
    assert [got.ending for got in outcome.got] == ["clean"] * 4
    for got in (packed, packed_whole, delimited):
        assert got.text == got.direct[0].text
    assert {each.headers["accept-encoding"] for each in outcome.work(0)} == {"identity"}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_may_be_cut_anywhere(size: int) -> None:
    """C20: UTF-8 split over chunks (sglang PR #11766)."""
    client = Client(prompt="日本語 🙂 ñ", tokens=40, fault=f"dribble,bytes={size}")

    outcome = simulate(Plan(engines=(Engine(),), clients=(client,), cuts=size))

    assert outcome.one.normal == outcome.one.direct[0].normal
    assert any(ord(character) > 127 for character in outcome.one.text)


def test_a_long_healthy_stream_is_left_alone() -> None:
    """C23: one blunt timeout kills long healthy streams (smg PR #1858, #2201)."""
    outcome = simulate(
        Plan(
            engines=(Engine(first_token_seconds=3.0, token_seconds=0.2),),
            clients=(Client(tokens=50),),
            settings={"stream_idle_timeout_secs": 1.0},
        )
    )

    assert outcome.one.ending == "clean"
    assert outcome.one.ended_at == pytest.approx(12.8)


def test_events_arrive_when_they_are_made() -> None:
    """C24: SSE arrives in one lump (litellm#26102, dstack#4269)."""
    outcome = simulate(
        Plan(engines=(Engine(first_token_seconds=0.1),), clients=(Client(tokens=10),))
    )

    moments = [moment for moment, _ in outcome.one.pieces]
    assert len(set(moments)) >= 10
    assert moments[-1] - moments[0] == pytest.approx(0.9)
    assert outcome.one.headers["x-accel-buffering"] == "no"
    assert outcome.one.headers["cache-control"] == "no-cache"


def test_large_bodies_pass_up_to_one_documented_limit() -> None:
    """C25: large bodies (GIE#854, sglang PR #38714)."""
    limit = 3_000_000
    fits = b'{"model":"tiny","prompt":"' + b"a" * (limit - 200) + b'"}'
    clients = (
        Client(path="/v1/other", raw_body=fits, stream=False),
        Client(path="/v1/other", raw_body=fits + b" " * 1000, stream=False),
    )

    outcome = simulate(Plan(clients=clients, settings={"max_body_bytes": limit}))

    passed, refused = outcome.got
    assert passed.status == passed.direct[0].status
    assert outcome.work(0)[0].body == fits
    assert (refused.status, refused.code) == (413, "body_too_large")
    assert sum(outcome.sent) == 1


ERRORS: dict[str, Plan] = {
    "bad_request": Plan(clients=(Client(path="/v1/completions", raw_body=b"{"),)),
    "unauthorized": Plan(settings={"api_key": ("x",)}),
    "not_found": Plan(clients=(Client(path="/nowhere"),)),
    "model_not_found": Plan(clients=(Client(model="other"),)),
    "method_not_allowed": Plan(clients=(Client(path="/v1/completions", method="PUT"),)),
    "body_too_large": Plan(settings={"max_body_bytes": 10}),
    "queue_full": Plan(
        clients=(Client(), Client(at=0.1)),
        settings={"max_concurrent_requests": 1, "queue_size": 0},
    ),
    "queue_timeout": Plan(
        clients=(Client(tokens=90), Client(at=0.1)),
        settings={"max_concurrent_requests": 1, "queue_timeout_secs": 2.0},
    ),
    "upstream_unreachable": Plan(
        engines=(Engine(),), clients=(Client(at=1.0),), happenings=((0.5, "faults 0 now:refuse"),)
    ),
    "upstream_broken": Plan(engines=(Engine(faults="cut,at=head"),)),
    "no_workers": Plan(engines=()),
    "shutting_down": Plan(clients=(Client(tokens=90), Client(at=2.0)), happenings=((1.0, "stop"),)),
    "first_token_timeout": Plan(engines=(SILENT,), settings={"first_token_timeout_secs": 2.0}),
    "stream_idle_timeout": Plan(
        engines=(Engine(faults="hang,after_events=6"),), settings={"stream_idle_timeout_secs": 2.0}
    ),
    "request_timeout": Plan(engines=(SILENT,), settings={"request_timeout_secs": 2.0}),
}
#: Codes of the contract that this version cannot tell yet, and those of our own HTTP server.
ELSEWHERE = {
    "prefill_failed",
    "no_prefill_workers",
    "no_decode_workers",
    "no_compatible_pd_group",
    "breaker_open",
    "header_timeout",
    "body_timeout",
    "worker_exists",
    "headers_too_large",
    "internal_error",
}


@pytest.mark.parametrize("code", ERRORS)
def test_every_error_has_the_same_shape(code: str) -> None:
    """C26: the error's shape differs by path (aibrix#671, #1103)."""
    outcome = simulate(ERRORS[code])

    error = outcome.got[-1].error
    assert error is not None
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert outcome.got[-1].status in (STATUS_OF[code], 200)


def test_every_code_is_tried() -> None:
    """C26: a code that nobody has ever seen has an unknown shape."""
    assert set(ERRORS) | ELSEWHERE == set(STATUS_OF)


@pytest.mark.parametrize(
    "faults", ["", "status,code=500", "status,code=400"], ids=["success", "retry", "error"]
)
def test_a_request_keeps_its_name(faults: str) -> None:
    """C27: the request id is lost or replaced (sglang#24220, litellm#4419)."""
    named = Client(headers=(("x-request-id", "order-66"),))

    outcome = simulate(Plan(engines=(Engine(faults=faults), Engine()), clients=(named,)))

    asked = [each for number in (0, 1) for each in outcome.work(number)]
    assert {each.headers["x-request-id"] for each in asked} == {"order-66"}
    assert outcome.one.headers["x-request-id"] == "order-66"
    (line,) = (line for line in outcome.log if line["event"] == "request")
    assert (line["id"], line["attempts"]) == ("order-66", len(asked))


def test_readiness_follows_the_workers() -> None:
    """C28: ready too early or stuck unready; states invisible (sglang#33740, litellm#30192)."""
    late = Engine(faults="now:server_dies,restart_after=20")

    outcome = simulate(
        Plan(
            engines=(late,),
            clients=(get("/readyz", 1.0), get("/readyz", 40.0), get("/readyz", 46.0)),
            happenings=((45.0, "drain 0"),),
            looks=(1.0, 40.0, 46.0),
        )
    )

    assert [got.status for got in outcome.got] == [503, 200, 503]
    assert [look.workers["w0"] for look in outcome.looks] == ["probing", "ready", "draining"]


def test_a_stop_lets_running_streams_complete() -> None:
    """C29: the router's shutdown drops what is in flight (litellm#14334, dynamo#791)."""
    running = tuple(Client(at=0.05 * turn, tokens=20) for turn in range(10))

    outcome = simulate(
        Plan(
            clients=(*running, get("/readyz", 1.5), Client(at=2.0), Client(at=10.0)),
            happenings=((1.0, "stop"),),
        )
    )

    assert {got.ending for got in outcome.got[:10]} == {"clean"}
    unready, late, too_late = outcome.got[10:]
    assert (unready.status, late.status, late.code) == (503, 503, "shutting_down")
    assert too_late.ending == "refused"


def test_cancelled_streams_leave_no_hole_in_the_pool() -> None:
    """C32: pool exhaustion by leaked responses (litellm PR #21213)."""
    leaving = tuple(Client(at=0.01 * turn, tokens=90, leaves_at=3.0) for turn in range(50))

    outcome = simulate(
        Plan(
            engines=(Engine(),),
            clients=(*leaving, Client(at=3.1)),
            settings={"max_concurrent_requests": 50, "queue_size": 0},
        )
    )

    assert outcome.got[-1].ending == "clean"
    assert outcome.got[-1].head_at == pytest.approx(4.1)


def test_an_unknown_model_is_nobodys() -> None:
    """C34: an unknown model goes to any worker (smg#752, #1419)."""
    outcome = simulate(
        Plan(
            engines=(Engine(model="a"), Engine(model="b")),
            clients=(Client(model="a"), Client(at=5.0, model="b"), Client(at=9.0, model="c")),
        )
    )

    assert [got.status for got in outcome.got] == [200, 200, 404]
    assert outcome.sent == [1, 1]


def test_a_client_that_leaves_the_queue_leaves_no_ghost() -> None:
    """C35: waiting in a queue ignores cancellation (dynamo PR #10875)."""
    waiting = tuple(Client(at=0.1 * turn, leaves_at=3.0) for turn in range(1, 6))

    outcome = simulate(
        Plan(
            engines=(Engine(),),
            clients=(Client(tokens=50), *waiting, Client(at=3.5)),
            settings={"max_concurrent_requests": 1, "queue_size": 5},
            looks=(2.9, 3.01),
        )
    )

    assert [look.waiting for look in outcome.looks] == [5, 0]
    assert outcome.got[-1].ending == "clean"
    assert outcome.sent == [2]


def test_a_dead_worker_costs_no_request() -> None:
    """C36: with one of two workers dead half of all requests fail (production-stack)."""
    crowd = tuple(Client(at=0.5 + 0.05 * turn, tokens=1) for turn in range(100))

    outcome = simulate(Plan(clients=crowd, happenings=((0.4, "faults 0 now:server_dies"),)))

    assert [got.status for got in outcome.got] == [200] * 100


@pytest.mark.parametrize(
    "fault",
    [
        "empty",
        "error_event",
        "end",
        "end,done=true",
        "abort",
        "comments;empty",
        "lump,events=9;error_event,after_events=1",
        "lump,events=9;abort,after_events=1",
    ],
)
def test_nothing_is_promised_before_there_is_something(fault: str) -> None:
    """C37: an empty 200, or an error as the first event (GoModel PR #1015)."""
    outcome = simulate(Plan(engines=(Engine(faults=fault), Engine())))

    assert (outcome.one.status, outcome.one.ending) == (200, "clean")
    assert outcome.one.normal == outcome.one.direct[0].normal
    assert outcome.sent == [1, 1]
