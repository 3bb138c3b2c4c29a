"""What only NATS can do to a request: drains, absent workers, lost frames, limits of the broker."""

from __future__ import annotations

import msgspec
import pytest

from tests.moves import is_told, is_whole
from tests.simulate import Client, Engine, Outcome, Plan, simulate

LONG = Client(tokens=20)
NEW = Engine(wire="nats")
OLD = Engine(wire="old")
HTTP = Engine(wire="http")
CUT = "request=1:cut,after_events=4"


def cutting(engine: Engine) -> Engine:
    return Engine(wire=engine.wire, faults=CUT)


def run(
    *engines: Engine,
    clients: tuple[Client, ...] = (LONG,),
    limit: int = 1,
    happenings: tuple[tuple[float, str], ...] = (),
    looks: tuple[float, ...] = (),
    max_payload: int = 1 << 20,
    **settings: object,
) -> Outcome:
    return simulate(
        Plan(
            engines=engines or (NEW, NEW),
            clients=clients,
            happenings=happenings,
            looks=looks,
            max_payload=max_payload,
            settings={"migration_limit": limit} | settings,
        )
    )


def requests(outcome: Outcome, number: int) -> list[dict[str, object]]:
    """What the agent of an engine was asked by clients."""
    every = [request for request, _ in outcome.peers[number].asked]
    return [each for each in every if "x-request-id" in (each.get("headers") or {})]  # type: ignore[operator]


def cancels(outcome: Outcome, number: int) -> list[bytes]:
    """What was cancelled at the agent of an engine."""
    tokens = {0: "dzA", 1: "dzE", 2: "dzI"}
    subject = f"infera.cancel.{tokens[number]}"
    return [each.payload for each in outcome.server.published if each.subject == subject]


#### The promise that a request can be handed back


SHAPES: dict[str, tuple[dict[str, object], bool]] = {
    "plain": ({}, True),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, True),
    "two choices": ({"n": 2}, False),
    "a grammar": ({"response_format": {"type": "json_object"}}, False),
    "beams": ({"use_beam_search": True}, False),
    "special tokens": ({"skip_special_tokens": False}, False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_cannot_go_on_is_not_promised(name: str) -> None:
    fields, promise = SHAPES[name]

    outcome = run(clients=(Client(tokens=2, extra=fields),))

    assert [each["migratable"] for each in requests(outcome, 0)] == [promise]


@pytest.mark.parametrize(
    ("engines", "limit", "promise"),
    [
        ((NEW,), 1, False),
        ((NEW, NEW), 0, False),
        ((NEW, NEW), 1, True),
        ((NEW, HTTP), 1, True),
        ((OLD, OLD), 1, True),
        ((NEW, Engine(wire="nats", model="other")), 1, False),
    ],
)
def test_nothing_is_promised_without_another_candidate_and_a_move(
    engines: tuple[Engine, ...], limit: int, promise: bool
) -> None:
    outcome = run(*engines, limit=limit)

    assert [each["migratable"] for each in requests(outcome, 0)] == [promise]


@pytest.mark.parametrize(
    ("prompt", "other", "promise"),
    [("text", "", True), ([5, 6], "", True), ("text", "mute", True), ([5, 6], "mute", False)],
)
def test_what_only_ids_can_carry_is_not_promised_where_tokens_differ(
    prompt: object, other: str, promise: bool
) -> None:
    fault = "path=/tokenize:status,code=404" if other == "mute" else ""
    client = Client(tokens=2, chat=False, extra={"prompt": prompt})

    outcome = run(NEW, Engine(wire="nats", faults=fault), clients=(client,))

    assert [each["migratable"] for each in requests(outcome, 0)] == [promise]


@pytest.mark.parametrize(("longest", "promises"), [(999, [True, True]), (5, [True, False])])
def test_what_is_too_long_is_not_promised_once_that_is_known(
    longest: int, promises: list[bool]
) -> None:
    first = Engine(wire="nats", faults="request=1:cut,after_events=1")

    outcome = run(first, NEW, NEW, limit=2, migration_max_tokens=longest)

    asked = [each["migratable"] for number in range(3) for each in requests(outcome, number)]
    assert asked == promises


def test_what_is_no_stream_is_no_matter_of_promises() -> None:
    outcome = run(clients=(Client(stream=False),))

    (asked,) = requests(outcome, 0)
    assert (asked["stream"], "migratable" in asked) == (False, False)


@pytest.mark.parametrize(
    ("limit", "engines", "promises"),
    [(1, 3, [True, False]), (2, 3, [True, True]), (2, 2, [True, False]), (9, 3, [True, True])],
)
def test_the_last_leg_is_not_promised(limit: int, engines: int, promises: list[bool]) -> None:
    outcome = run(*[cutting(NEW), *[NEW] * (engines - 1)], limit=limit)

    asked = [each["migratable"] for number in range(2) for each in requests(outcome, number)]
    assert is_whole(outcome)
    assert asked == promises


@pytest.mark.parametrize(("others", "promise"), [(1, True), (0, False)])
def test_of_a_pair_only_decode_is_promised_if_there_is_another(others: int, promise: bool) -> None:
    prefills = tuple(Engine(kind="sglang", role="prefill", wire="nats") for _ in range(2))
    decode = Engine(kind="sglang", role="decode", wire="nats")

    outcome = run(*prefills, *[decode] * (1 + others), pd_max_retries=1)

    count = len(outcome.engines)
    asked = [each["migratable"] for number in range(count) for each in requests(outcome, number)]
    assert outcome.one.ending == "clean"
    assert asked == [False, promise]


#### Drains


@pytest.mark.parametrize("engine", [NEW, OLD])
def test_a_stream_that_is_handed_back_goes_on_elsewhere(engine: Engine) -> None:
    outcome = run(engine, engine, happenings=((1.5, "leave 0"),), looks=(4.0,))

    assert is_whole(outcome)
    assert outcome.moves == {"worker_draining exact": 1}
    assert outcome.peers[0].handed_back == 1
    assert outcome.look.breakers["w0"] == "closed"
    assert cancels(outcome, 0) == []


@pytest.mark.parametrize("engine", [NEW, OLD])
def test_a_request_handed_back_before_any_content_begins_anew(engine: Engine) -> None:
    outcome = run(engine, engine, happenings=((0.5, "leave 0"),), request_max_retries=0)

    assert is_whole(outcome)
    assert outcome.facts[:3] == ["admitted", "handed_back", "admitted"]
    assert outcome.moves == {}
    assert outcome.count(
        "baton_worker_requests_total", worker="w0", role="mixed", outcome="cancelled"
    )


def test_a_drain_by_the_router_moves_what_has_brought_no_frame() -> None:
    slow = Engine(wire="nats", first_token_seconds=30.0)
    outcome = run(slow, NEW, happenings=((0.2, "drain 0 0.3"),), request_max_retries=0)

    assert is_whole(outcome)
    assert outcome.one.ended_at < 5
    assert outcome.facts[:3] == ["admitted", "handed_back", "admitted"]


def test_a_drain_of_every_worker_in_turn_ends_no_stream() -> None:
    engines = [NEW] * 4
    clients = tuple(Client(at=0.1 * turn, tokens=40) for turn in range(12))
    happenings = tuple((1.5 + number, f"leave {number}") for number in range(3))

    outcome = run(*engines, clients=clients, limit=3, happenings=happenings)

    assert {got.ending for got in outcome.got} == {"clean"}
    assert sum(outcome.moves.values()) >= 3


@pytest.mark.parametrize(
    ("what", "code"), [("leave 0", "shutting_down"), ("die 0", "upstream_broken")]
)
def test_the_error_tells_a_drain_from_a_crash(what: str, code: str) -> None:
    outcome = run(happenings=((1.2, "remove 1"), (1.5, what)))

    assert is_told(outcome)
    assert outcome.one.code == code


def test_a_stream_that_was_poisoned_since_its_promise_is_told_of_the_drain() -> None:
    outcome = run(
        Engine(wire="nats", faults="request=1:garbage,what=json,after_events=3"),
        NEW,
        happenings=((1.9, "leave 0"),),
    )

    assert is_told(outcome)
    assert outcome.one.code == "shutting_down"
    assert outcome.asked(1) == []


#### Nobody there


@pytest.mark.parametrize("engine", [NEW, OLD])
def test_an_absent_worker_is_passed_over_at_once(engine: Engine) -> None:
    outcome = run(
        engine, engine, clients=(Client(at=2.0, tokens=2),), happenings=((1.5, "leave 0"),)
    )

    assert outcome.one.ending == "clean"
    assert outcome.one.ended_at < 2.0 + 1.0 + 0.5
    assert outcome.facts[:3] == ["admitted", "passed_over", "admitted"]


@pytest.mark.parametrize("engine", [NEW, OLD])
def test_an_absent_worker_costs_neither_a_retry_nor_its_breaker(engine: Engine) -> None:
    outcome = run(
        engine,
        engine,
        engine,
        clients=tuple(Client(at=2.0 + number / 100, tokens=2) for number in range(12)),
        happenings=((1.5, "leave 0"), (1.5, "leave 1")),
        looks=(3.0,),
        request_max_retries=0,
        breaker_failure_threshold=1,
    )

    assert [each.ending for each in outcome.got] == ["clean"] * 12
    assert set(outcome.look.breakers.values()) == {"closed"}


@pytest.mark.parametrize("stream", [True, False])
def test_where_nobody_at_all_is_there_the_client_is_told_so(stream: bool) -> None:
    outcome = run(
        NEW,
        NEW,
        clients=(Client(at=2.0, tokens=2, stream=stream),),
        happenings=((1.5, "leave 0"), (1.5, "leave 1")),
    )

    assert outcome.one.code == "upstream_unreachable"
    assert outcome.one.ended_at < 2.5


def test_an_absent_worker_is_passed_over_in_a_move() -> None:
    outcome = run(cutting(NEW), NEW, NEW, happenings=((1.1, "leave 1"),))

    assert is_whole(outcome)
    assert outcome.one.ended_at < 5
    assert outcome.moves == {"stream_broken exact": 1}


@pytest.mark.parametrize("engine", [NEW, OLD])
@pytest.mark.parametrize("at", [0.5, 1.5])
def test_a_killed_agent_is_noticed_in_seconds(engine: Engine, at: float) -> None:
    outcome = run(engine, engine, happenings=((at, "die 0"),))

    assert is_whole(outcome)
    assert outcome.one.ended_at < 12


#### Frames that are lost


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("limit", [0, 1])
def test_whichever_frame_is_lost_no_wrong_answer_comes_of_it(stream: bool, limit: int) -> None:
    for after in range(0, 16, 2):
        outcome = run(
            clients=(Client(tokens=10, stream=stream),),
            limit=limit,
            happenings=((0.5, f"lose {after}"),),
        )

        got = outcome.one
        if limit or not stream:
            assert (got.status, got.ending) == (200, "clean"), after
        else:
            assert got.ending == "clean" or is_told(outcome), after
        assert outcome.count("baton_breaker_state", worker="w0", state="open") == 0


def test_a_way_that_loses_something_now_and_then_stays_a_way() -> None:
    """Three losses in a row are too many; with content in between they are none."""
    losses = tuple((2.05 + 3.0 * turn, "lose 0") for turn in range(5))

    outcome = run(NEW, clients=(Client(tokens=120),), limit=9, happenings=losses)

    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken exact": 5}


@pytest.mark.parametrize("engine", [NEW, OLD])
def test_where_messages_were_dropped_only_streams_without_numbers_break(engine: Engine) -> None:
    others = Client(at=0.6, tokens=1)

    outcome = run(engine, engine, clients=(LONG, others), happenings=((1.5, "lose 0 told"),))

    assert {got.ending for got in outcome.got} == {"clean"}
    assert sum(outcome.moves.values()) >= 1


#### The broker goes away


@pytest.mark.parametrize("engine", [NEW, OLD])
@pytest.mark.parametrize(("away", "back"), [("down", "up"), ("forget", "up"), ("cut", "mend")])
@pytest.mark.parametrize("at", [0.5, 1.05, 1.5, 2.95])
def test_streams_survive_the_broker(engine: Engine, away: str, back: str, at: float) -> None:
    clients = tuple(Client(at=0.1 * turn, tokens=20) for turn in range(6))

    outcome = run(
        *[engine] * 3,
        clients=clients,
        limit=3,
        happenings=((at, away), (at + 1.0, back)),
        looks=(8.0,),
        request_max_retries=3,
    )

    assert [(got.status, got.ending) for got in outcome.got] == [(200, "clean")] * 6
    assert set(outcome.look.breakers.values()) == {"closed"}


#: Router and agents are back at once, the router first, or the agents first.
BACK = {"together": (0.0, 0.0), "router": (0.0, 0.9), "agents": (0.9, 0.0)}


def outage(at: float, seconds: float, order: str, engines: int) -> tuple[tuple[float, str], ...]:
    """The broker is away; who is back when after it."""
    router, agents = BACK[order]
    back = at + seconds
    every = [(at, "cut"), (back + router, "mend")]
    for number in range(engines):
        every += [(at, f"cut_off {number}"), (back + agents, f"rejoin {number}")]
    return tuple(every)


@pytest.mark.parametrize("order", BACK)
@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("seconds", [1.0, 3.0])
@pytest.mark.parametrize("pending", [0, 50])
def test_restarts_of_the_broker_blame_no_worker(
    engines: int, seconds: float, order: str, pending: int
) -> None:
    """A worker whose answer was lost on its way may get the stream again."""
    clients = tuple(Client(at=0.1 * turn, tokens=150) for turn in range(3))
    happenings = (*outage(3.0, seconds, order, engines), *outage(13.0, seconds, order, engines))

    outcome = run(
        *[NEW] * engines,
        clients=clients,
        limit=3,
        happenings=happenings,
        looks=(12.9, 25.0),
        nats_req_max_pending=pending,
    )

    assert [(got.status, got.ending) for got in outcome.got] == [(200, "clean")] * 3
    assert outcome.sum("baton_breaker_trips_total") == 0
    assert not any(
        outcome.count("baton_worker_requests_total", worker=f"w{n}", role="mixed", outcome="error")
        for n in range(engines)
    )
    assert outcome.sum("baton_nats_missed_total") == 6
    assert all(set(look.breakers.values()) == {"closed"} for look in outcome.looks)


@pytest.mark.parametrize("order", BACK)
def test_a_stream_that_is_silent_over_an_outage_goes_on(order: str) -> None:
    outcome = run(
        Engine(wire="nats", faults="pause,after_events=4,seconds=8"),
        clients=(LONG,),
        happenings=outage(3.0, 1.0, order, 1),
    )

    assert is_whole(outcome)
    assert outcome.moves == {}
    assert outcome.sum("baton_nats_missed_total") == 0


@pytest.mark.parametrize("order", BACK)
def test_what_was_lost_with_the_broker_is_noticed_soon(order: str) -> None:
    outcome = run(NEW, NEW, clients=(Client(tokens=100),), happenings=outage(3.0, 1.0, order, 2))

    assert is_whole(outcome)
    assert sum(outcome.moves.values()) == 1
    # Everybody is back at 4.9 s at the latest, knows it a second later, and from there it takes 1 s
    # to a first token and 10 s to the last.
    assert outcome.one.ended_at < 4.9 + 1.1 + 11.0


@pytest.mark.parametrize("order", BACK)
@pytest.mark.parametrize("stream", [True, False])
def test_requests_right_after_an_outage_wait_for_their_worker(order: str, stream: bool) -> None:
    clients = tuple(Client(at=4.0 + 0.1 * turn, tokens=2, stream=stream) for turn in range(8))

    outcome = run(
        NEW, NEW, clients=clients, happenings=outage(2.0, 2.0, order, 2), request_max_retries=0
    )

    assert {(got.status, got.ending) for got in outcome.got} == {(200, "clean")}
    assert outcome.sum("baton_breaker_trips_total") == 0


@pytest.mark.parametrize("engine", [NEW, OLD])
def test_without_moves_a_stream_whose_frames_were_lost_is_told(engine: Engine) -> None:
    outcome = run(engine, engine, limit=0, happenings=((1.5, "down"), (2.5, "up")))

    assert is_told(outcome)
    assert outcome.one.code == "upstream_broken"


def test_a_stream_that_has_lost_nothing_goes_on() -> None:
    outcome = run(happenings=((1.51, "cut"), (1.55, "mend")))

    assert is_whole(outcome)
    assert outcome.moves == {}


def test_an_outage_that_a_stream_has_survived_excuses_no_later_silence() -> None:
    pausing = Engine(wire="nats", faults="pause,after_events=5,seconds=4;hang,after_events=9")

    outcome = run(
        pausing,
        limit=0,
        happenings=((3.6, "cut"), (3.8, "mend")),
        stream_idle_timeout_secs=6.0,
        suspect_idle_secs=0.0,
    )

    assert (outcome.one.ending, outcome.one.code) == ("cut", "stream_idle_timeout")
    assert outcome.one.pieces[-2][0] > 5


def test_requests_wait_for_a_broker_that_is_away_for_a_moment() -> None:
    outcome = run(
        clients=(Client(at=1.0, tokens=2), Client(at=1.5, tokens=2, stream=False)),
        happenings=((0.5, "down"), (3.0, "up")),
    )

    assert {(got.status, got.ending) for got in outcome.got} == {(200, "clean")}
    assert outcome.sum("baton_retries_total") == 0


def test_requests_do_not_wait_for_ever_for_a_broker() -> None:
    outcome = run(happenings=((0.0, "down"),), request_max_retries=0)

    assert (outcome.one.status, outcome.one.code) == (502, "upstream_unreachable")
    assert 4 < outcome.one.ended_at < 6


def test_where_there_is_http_as_well_nobody_depends_on_the_broker() -> None:
    outcome = run(NEW, HTTP, happenings=((1.5, "down"),))

    assert is_whole(outcome)
    assert outcome.one.ended_at < 25


def test_a_broker_that_is_away_makes_no_worker_ill() -> None:
    outcome = run(
        clients=(Client(tokens=1), Client(at=100.5, tokens=1)),
        happenings=((2.0, "down"), (100.0, "up")),
        looks=(99.0,),
    )

    assert set(outcome.look.workers.values()) == {"ready"}
    assert outcome.got[1].status == 200


def test_a_network_that_hangs_for_a_moment_breaks_nothing() -> None:
    outcome = run(happenings=((1.5, "stall"), (6.0, "go_on")))

    assert is_whole(outcome)
    assert outcome.moves == {}


#### Giving up


@pytest.mark.parametrize("engine", [NEW, OLD])
@pytest.mark.parametrize("at", [0.5, 1.5])
def test_a_client_that_leaves_frees_its_engine(engine: Engine, at: float) -> None:
    outcome = run(engine, clients=(Client(tokens=100, leaves_at=at),), looks=(at + 0.1,))

    assert outcome.look.running == [0]
    (inbox,) = set(cancels(outcome, 0))
    assert len(cancels(outcome, 0)) == 3
    assert inbox.startswith(b"_INBOX.")


def test_a_client_that_leaves_in_a_move_frees_both() -> None:
    outcome = run(
        Engine(wire="nats", faults="request=1:hang,after_events=4"),
        NEW,
        clients=(Client(tokens=20, leaves_at=6.8),),
        looks=(7.0,),
        stream_idle_timeout_secs=5.0,
    )

    assert outcome.look.running == [0, 0]
    assert outcome.look.inflight == {"w0": 0, "w1": 0}
    assert len(cancels(outcome, 0)) == len(cancels(outcome, 1)) == 3
    assert outcome.stuck == {}


def test_what_runs_when_the_router_stops_is_cancelled() -> None:
    outcome = run(
        clients=(Client(tokens=1000),),
        happenings=((1.5, "stop"),),
        drain_timeout_secs=1.0,
        limit=1,
    )

    assert outcome.one.code == "shutting_down"
    assert len(cancels(outcome, 0)) >= 2


#### What the broker does not take


BIG = Client(tokens=2, prompt="x" * 3000)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_above_the_limit_is_told_where_nobody_can_take_it(stream: bool) -> None:
    outcome = run(
        NEW,
        NEW,
        clients=(Client(tokens=2, prompt="x" * 5000, stream=stream), Client(at=1.0, tokens=2)),
        max_payload=4000,
        looks=(2.0,),
    )

    assert (outcome.got[0].status, outcome.got[0].code) == (413, "body_too_large")
    assert outcome.got[0].error is not None
    assert "message broker carries at most 4000 bytes" in str(outcome.got[0].error)
    facts = [[edge.fact for _, edge in ticket.history] for ticket in outcome.tickets]
    assert ["admitted", "rejected"] in facts
    assert "lost" not in {line["event"] for line in outcome.log}
    assert outcome.sum("baton_retries_total") == 0
    assert outcome.got[1].status == 200
    assert set(outcome.look.breakers.values()) == {"closed"}


def test_a_request_above_the_limit_goes_to_whom_it_can_be_sent() -> None:
    outcome = run(NEW, NEW, HTTP, clients=(BIG,), max_payload=2500, request_max_retries=0)

    assert outcome.one.status == 200
    assert [len(outcome.asked(number)) for number in range(3)] == [0, 0, 1]
    assert outcome.facts[:5] == ["admitted", "passed_over", "admitted", "passed_over", "admitted"]
    assert outcome.count("baton_retries_total", reason="passed_over") == 2
    handed_back = 'machine="request",source="dispatching",fact="handed_back"'
    assert not [name for name in outcome.metrics if handed_back in name]


@pytest.mark.parametrize("last", [NEW, HTTP])
def test_a_continuation_above_the_limit_takes_its_other_form(last: Engine) -> None:
    words = Client(tokens=20, prompt="once upon a time " * 100)
    first = run(cutting(NEW), NEW, clients=(words,))
    sizes = [
        len(each.payload)
        for each in first.server.published
        if each.subject.startswith("infera.req.") and b"once upon" in each.payload
    ]
    assert first.moves == {"stream_broken exact": 1}
    assert sizes[1] > sizes[0] + 500

    outcome = run(
        cutting(NEW), NEW, clients=(words,), max_payload=sizes[0] + 400, request_max_retries=0
    )

    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken text": 1}


def test_a_continuation_that_fits_in_no_form_is_told() -> None:
    words = Client(tokens=20, prompt="once upon a time " * 100)
    first = run(cutting(NEW), NEW, clients=(words,))
    size = max(
        len(each.payload)
        for each in first.server.published
        if each.subject == "infera.req.dzA" and b"once upon" in each.payload
    )

    outcome = run(
        cutting(NEW), NEW, clients=(words, Client(at=5.0, tokens=2)), max_payload=size + 150
    )

    assert is_told(outcome)
    # What was too large is not what this client wrote.
    assert outcome.got[0].code == "upstream_broken"
    assert outcome.got[1].status == 200


#### Slow clients


def test_a_slow_client_gets_all_of_it_in_order() -> None:
    fat = "padding,bytes=20000"
    outcome = run(
        Engine(wire="nats", faults=fat), clients=(Client(tokens=100, reads_from=30.0),), limit=0
    )

    assert outcome.one.ending == "clean"


FAT = Engine(wire="nats", faults="padding,bytes=100000", token_seconds=0.01)


def test_a_client_that_never_reads_is_given_up_and_nobody_computes_again() -> None:
    clients = (Client(tokens=1000, reads_from=60.0),)
    outcome = run(FAT, FAT, clients=clients, limit=3, looks=(9.0,), breaker_failure_threshold=1)

    assert outcome.one.ending == "cut"
    assert outcome.facts == ["admitted", "answered", "client_gone"]
    assert outcome.look.running == [0, 0]
    assert set(outcome.look.breakers.values()) == {"closed"}
    assert "lost" not in {line["event"] for line in outcome.log}
    assert outcome.sum("baton_worker_requests_total") == 1
    labels = {"worker": "w0", "role": "mixed", "outcome": "cancelled"}
    assert outcome.count("baton_worker_requests_total", **labels) == 1
    assert outcome.sum("baton_nats_missed_total") == 0


def test_a_client_that_pauses_for_a_whole_large_answer_gets_it() -> None:
    outcome = run(FAT, FAT, clients=(Client(tokens=120, reads_from=30.0),), limit=0)

    assert outcome.one.ending == "clean"
    assert outcome.one.text == outcome.one.direct[0].text


#### The admission limit


def test_beyond_the_limit_workers_refuse() -> None:
    clients = tuple(Client(at=0.01 * turn, tokens=20) for turn in range(6))

    outcome = run(clients=clients, nats_req_max_pending=2)

    told = [(got.status, got.code) for got in outcome.got]
    assert told == [(200, None)] * 4 + [(429, "queue_full")] * 2
    assert all(got.headers["retry-after"] == "1" for got in outcome.got[4:])
    assert all(got.headers["x-router-error-code"] == "queue_full" for got in outcome.got[4:])
    assert outcome.sum("baton_breaker_trips_total") == 0


def test_a_move_passes_over_a_worker_that_has_enough() -> None:
    outcome = run(
        Engine(wire="nats", faults="request=1:cut,after_events=10"),
        NEW,
        NEW,
        clients=(LONG, Client(at=0.1, tokens=40), Client(at=0.2, tokens=1)),
        nats_req_max_pending=1,
    )

    assert {got.ending for got in outcome.got} == {"clean"}
    assert outcome.moves == {"stream_broken exact": 1}
    assert [len(outcome.asked(number)) for number in range(3)] == [1, 1, 2]


def test_what_leaves_the_queue_makes_room() -> None:
    clients = tuple(Client(at=2.0 * turn, tokens=1) for turn in range(6))

    outcome = run(NEW, clients=clients, nats_req_max_pending=1)

    assert {got.status for got in outcome.got} == {200}


#### Both wires together


@pytest.mark.parametrize(("first", "second"), [(NEW, HTTP), (HTTP, NEW), (OLD, NEW), (NEW, OLD)])
def test_streams_move_from_wire_to_wire(first: Engine, second: Engine) -> None:
    outcome = run(cutting(first), second)

    assert is_whole(outcome)
    assert sum(outcome.moves.values()) == 1


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("nats_req_idle_timeout", "stream_idle_timeout"),
        ("nats_req_max_duration", "request_timeout"),
    ],
)
@pytest.mark.parametrize("wires", ["http nats", "nats http"])
def test_the_deadlines_are_those_of_the_wire_that_is_used(
    wires: str, setting: str, code: str
) -> None:
    first, second = wires.split()
    failing = Engine(wire=first, faults="request=1:status,code=500")
    silent = Engine(wire=second, faults="pause,after_events=6,seconds=8")
    settings: dict[str, object] = {"suspect_idle_secs": 0.0, setting: 5.0}

    outcome = run(failing, silent, limit=0, **settings)  # type: ignore[arg-type]  # one of the table

    assert outcome.tickets[0].attempts == 2
    if second == "http":
        assert outcome.one.ending == "clean"
    else:
        assert (outcome.one.ending, outcome.one.code) == ("cut", code)


def test_the_shortest_deadline_of_nats_holds_on_a_kept_connection() -> None:
    """That would have been looked at again much later, as idle."""
    clients = (Client(tokens=2, then=(Client(at=10.0),)),)
    seconds = {f"{name}_timeout_secs": 300.0 for name in ("request", "first_token", "stream_idle")}

    outcome = run(
        Engine(wire="nats", faults="request=2:hang"),
        clients=clients,
        nats_req_max_duration=3.0,
        suspect_idle_secs=0.0,
        **seconds,  # type: ignore[arg-type]  # named above
    )

    assert outcome.got[1].code == "request_timeout"
    assert outcome.got[1].ended_at == 13.0


def test_a_body_travels_as_the_client_wrote_it() -> None:
    raw = b'{"model":"tiny", "messages":[{"role":"user","content":"\\u00e9 x"}],\n "max_tokens":2}'

    outcome = run(clients=(Client(raw_body=raw, stream=False),), limit=0)

    sent = [each.payload for each in outcome.server.published if each.subject == "infera.req.dzA"]
    assert any(raw in payload for payload in sent)
    assert msgspec.json.decode(outcome.work(0)[-1].body) == msgspec.json.decode(raw)
