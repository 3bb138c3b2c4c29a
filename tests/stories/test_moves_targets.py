"""Who goes on with a broken stream: who is asked, who is blamed, and when nobody is."""

from __future__ import annotations

import attrs
import pytest

from tests.moves import CUT, LONG, PLAIN, is_told, is_whole, lose, more
from tests.simulate import Client, Engine, Outcome, Plan, simulate

TOOLS: dict[str, object] = {"response_format": {"type": "json_object"}}


def lose_twice(second: str, client: Client = LONG, *, kinds: str = "vllm " * 3) -> Outcome:
    """The first worker is lost in the middle, and the next one suffers this."""
    return lose(
        client=client,
        kinds=kinds,
        happenings=((0.0, f"faults 1 request=1:{second}"),),
        # Of the ten minutes it has by default, every second is simulated.
        first_token_timeout_secs=20.0,
    )


#### The next candidate

BEFORE_CONTENT = [
    ("status,code=503", "backpressure"),
    ("status,code=429", "backpressure"),
    ("status,code=500", "error"),
    ("end,at=head", "error"),
    ("abort,after_events=1", "error"),
    ("empty", "error"),
    ("error_event,code=503", "backpressure"),
    ("hang", "error"),
    ("hang,after_events=1", "error"),
]


@pytest.mark.parametrize(("fault", "outcome_of_leg"), BEFORE_CONTENT)
def test_one_that_fails_before_content_is_followed_by_another(
    fault: str, outcome_of_leg: str
) -> None:
    outcome = lose_twice(fault)

    assert is_whole(outcome)
    assert sum(outcome.moves.values()) == 1
    assert outcome.stuck == {}
    assert outcome.tickets[0].attempts == 3
    told = {"worker": "w1", "role": "mixed", "outcome": outcome_of_leg}
    assert outcome.count("baton_worker_requests_total", **told) == 1


@pytest.mark.parametrize("fault", [fault for fault, _ in BEFORE_CONTENT])
def test_when_none_is_left_the_stream_fails_visibly(fault: str) -> None:
    outcome = lose_twice(fault, kinds="vllm vllm")

    assert is_told(outcome)
    assert outcome.moves == {}
    assert outcome.stuck == {"no_first_token": 1}


def test_one_that_refuses_connections_is_passed_over() -> None:
    outcome = lose(kinds="vllm vllm vllm", happenings=((0.5, "faults 1 now:refuse"),))

    assert is_whole(outcome)
    assert sum(outcome.moves.values()) == 1


def test_with_nobody_else_the_stream_fails_visibly() -> None:
    outcome = lose(kinds="vllm")

    assert is_told(outcome)
    assert outcome.one.code == "upstream_broken"
    assert outcome.stuck == {"no_candidate": 1}
    assert outcome.count("baton_stream_outcome_total", worker="w0", outcome="upstream_error") == 1
    assert outcome.sum("baton_stream_outcome_total") == 1


def test_one_that_drains_is_nobody_to_go_on() -> None:
    outcome = lose(happenings=((0.5, "drain 1"),))

    assert is_told(outcome)
    assert outcome.stuck == {"no_candidate": 1}


def test_one_of_another_model_is_nobody_to_go_on() -> None:
    outcome = simulate(
        Plan(engines=(Engine(faults=CUT), Engine(model="other")), settings={"migration_limit": 1})
    )

    assert is_told(outcome)
    assert outcome.stuck == {"no_candidate": 1}


def test_one_whose_context_is_too_short_is_passed_over() -> None:
    short = Engine(context_length=32)

    outcome = simulate(
        Plan(
            engines=(Engine(faults=CUT), short, Engine()),
            clients=(Client(tokens=20),),
            settings={"migration_limit": 1},
        )
    )

    assert is_whole(outcome)
    assert outcome.asked(1) == []


def test_one_that_is_passed_over_keeps_its_turn_to_prove_itself() -> None:
    """Its breaker lets one request through, and this was none."""
    failing = Engine(context_length=32, faults="request=1:status,code=500")

    outcome = simulate(
        Plan(
            engines=(failing, Engine(faults="request=2:cut,after_events=4")),
            clients=(Client(tokens=1), Client(at=5.0, tokens=20), Client(at=7.0, tokens=1)),
            settings={
                "migration_limit": 1, "policy": "round_robin", "breaker_failure_threshold": 1,
                "breaker_cooldown_secs": 6.0,
            },
            looks=(6.5,),
        )
    )  # fmt: skip

    assert [got.ending for got in outcome.got] == ["clean", "cut", "clean"]
    assert outcome.look.breakers == {"w0": "half_open", "w1": "open"}
    assert outcome.sum("baton_breaker_overridden_total") == 0


def test_after_a_restart_it_is_the_new_first_ones_context_that_counts() -> None:
    small, middle, large = (Engine(context_length=length) for length in (49, 60, 100))
    first = Engine(context_length=49, faults="request=1:cut,after_events=1")
    second = Engine(context_length=100, faults="request=1:cut,after_events=30")

    outcome = simulate(
        Plan(
            engines=(first, second, small, middle, large),
            clients=(attrs.evolve(ENDLESS, path="/v1/chat/completions"),),
            settings={"migration_limit": 2, "policy": "round_robin"},
        )
    )

    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken restart": 1, "stream_broken exact": 1}
    assert [len(outcome.asked(number)) for number in range(5)] == [1, 1, 0, 0, 1]
    assert outcome.one.usages[0]["total_tokens"] == 100


#### The first one's context is full (case 88)


ENDLESS = Client(extra={"max_tokens": None, "stream_options": {"include_usage": True}})
#: Events of that answer in a context of 49 tokens, usage and `[DONE]` included.
EVENTS = {"vllm": 24, "sglang": 19}


@pytest.mark.parametrize("kinds", ["vllm vllm", "sglang sglang", "vllm sglang", "sglang vllm"])
@pytest.mark.parametrize("before_the_end", range(1, 7))
@pytest.mark.parametrize("context_length", [51, 4096])
def test_the_answer_ends_where_the_first_ones_context_is_full(
    kinds: str, before_the_end: int, context_length: int
) -> None:
    began, goes_on = kinds.split()
    fault = f"request=1:cut,after_events={EVENTS[began] - before_the_end}"
    first = Engine(kind=began, context_length=49, faults=fault)
    next_one = Engine(kind=goes_on, context_length=context_length)

    outcome = simulate(
        Plan(engines=(first, next_one), clients=(ENDLESS,), settings={"migration_limit": 1})
    )

    assert is_whole(outcome)
    assert outcome.one.finish == "length"
    assert outcome.one.text == outcome.one.direct[0].text


def test_one_that_tokenizes_otherwise_is_given_the_text() -> None:
    # Whoever does not tell how it tokenizes is not believed to do it alike.
    mute = Engine(faults="path=/tokenize:status,code=404")

    outcome = simulate(Plan(engines=(Engine(faults=CUT), mute), settings={"migration_limit": 1}))

    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken text": 1}


def test_ids_go_to_nobody_who_tokenizes_otherwise_than_the_last() -> None:
    late = "request=1:cut,after_events=20"
    mute = Engine(faults=f"path=/tokenize:status,code=404;{late}")

    outcome = simulate(
        Plan(
            engines=(Engine(faults=late), mute, Engine()),
            clients=(Client(tokens=60),),
            settings={"migration_limit": 2},
            happenings=((0.0, "drain 2"), (4.0, "undrain 2")),
        )
    )

    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken text": 2}


def test_an_engine_that_nobody_knows_goes_on_with_text_or_not_at_all() -> None:
    outcome = lose(client=Client(tokens=10), kinds="openai openai")

    assert is_told(outcome)
    assert outcome.count("baton_poisoned_total", reason="uncounted") == 1


#### A 4xx to a continuation


def test_a_refused_form_is_followed_by_the_other_once() -> None:
    outcome = lose_twice("status,code=400,message=no%20such%20field", kinds="vllm vllm")

    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken text": 1}
    assert len(outcome.asked(1)) == 2


def test_what_one_move_was_refused_is_tried_in_the_next() -> None:
    late = "request=1:cut,after_events=20"
    faults = ((0.0, "faults 1 request=1:status,code=400"), (0.0, f"faults 2 {late}"))

    outcome = lose(
        late, Client(tokens=60), kinds="vllm vllm vllm", limit=2, happenings=faults
    )  # fmt: skip

    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken text": 1, "stream_broken exact": 1}


@pytest.mark.parametrize("fault", ["status,code=400", "status,code=422", "error_event,code=400"])
def test_a_continuation_that_is_refused_blames_nobody_and_is_not_shown(fault: str) -> None:
    outcome = lose(
        kinds="vllm vllm", happenings=((0.0, f"faults 1 {fault},message=bad%20continuation"),),
        breaker_failure_threshold=1, looks=(5.0,),
    )  # fmt: skip

    assert is_told(outcome)
    assert outcome.stuck == {"rejected": 1}
    assert len(outcome.asked(1)) == 2
    assert b"bad continuation" not in outcome.one.body
    assert outcome.one.code == "upstream_broken"
    assert outcome.look.breakers["w1"] == "closed"


def test_a_text_that_is_refused_is_not_tried_again() -> None:
    outcome = lose_twice("status,code=400", kinds="sglang sglang sglang")

    assert is_told(outcome)
    assert outcome.stuck == {"rejected": 1}
    assert outcome.asked(2) == []


#### Breakers and caps


def test_a_breaker_that_is_open_is_honoured() -> None:
    failing = Client(at=0.0, tokens=1)
    moving = Client(at=1.0, tokens=10)

    outcome = simulate(
        Plan(
            engines=(
                Engine(faults="request=1:cut,after_events=4"),
                Engine(faults="request=1:status,code=500"),
                Engine(),
            ),
            clients=(Client(tokens=10), failing, moving),
            settings={"migration_limit": 1, "breaker_failure_threshold": 1},
        )
    )

    assert [got.ending for got in outcome.got] == ["clean"] * 3
    assert len(outcome.asked(1)) == 1


def test_all_breakers_open_means_any_worker() -> None:
    outcome = lose(
        others=(Client(at=0.1, tokens=1),), breaker_failure_threshold=1,
        happenings=((0.0, "faults 1 request=1:status,code=500"),),
    )  # fmt: skip

    assert is_told(outcome) or is_whole(outcome)


def test_a_stream_that_moves_keeps_its_place_under_the_cap() -> None:
    outcome = lose(others=(Client(at=0.5, tokens=4),), looks=(1.5, 2.5), max_concurrent_requests=1)

    assert [got.ending for got in outcome.got] == ["clean", "clean"]
    assert [look.waiting for look in outcome.looks] == [1, 1]
    assert outcome.looks[0].states == ["resuming", "queued"]


#### Requests that kill workers


@pytest.mark.parametrize("death", ["server_dies", "core_dies", "cut", "garbage,what=chunk_size"])
def test_a_request_that_kills_two_workers_is_given_no_third(death: str) -> None:
    fault = f"request=1:{death},after_events=5"

    outcome = lose(
        fault, Client(tokens=40), kinds="vllm vllm vllm vllm", limit=9,
        happenings=((0.0, f"faults 1 {fault}"),),
    )  # fmt: skip

    assert is_told(outcome)
    assert outcome.stuck == {"suspect": 1}
    assert outcome.asked(2) == outcome.asked(3) == []


def test_it_is_the_tokens_of_the_one_that_died_that_count() -> None:
    """However long the stream was before."""
    late, early = (f"request=1:cut,after_events={count}" for count in (20, 5))
    faults = tuple((0.0, f"faults {number} {early}") for number in (1, 2, 3))

    outcome = lose(late, Client(tokens=60), kinds="vllm " * 5, limit=9, happenings=faults)

    assert is_told(outcome)
    assert outcome.stuck == {"suspect": 1}
    assert [len(outcome.asked(number)) for number in range(5)] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("death", ["cut", "cut,at=head", "cut,after_events=1", "error_event"])
def test_killing_the_second_before_its_first_token_is_enough(death: str) -> None:
    outcome = lose_twice(death)

    assert is_told(outcome)
    assert outcome.stuck == {"suspect": 1}
    assert outcome.asked(2) == []


def test_workers_that_are_shut_down_do_not_make_a_request_suspect() -> None:
    leaves = "request=1:sigterm_abort,after_events=5"

    outcome = lose(
        leaves, Client(tokens=40), kinds="vllm vllm vllm", limit=9,
        happenings=((0.0, f"faults 1 {leaves}"),),
    )  # fmt: skip

    assert is_whole(outcome)
    assert sum(outcome.moves.values()) == 2


def test_workers_that_die_late_do_not_make_a_request_suspect() -> None:
    late = "request=1:server_dies,after_events=20"

    outcome = lose(
        late, Client(tokens=60), kinds="vllm vllm vllm", limit=9,
        happenings=((0.0, f"faults 1 {late}"),),
    )  # fmt: skip

    assert is_whole(outcome)


#### Drains


def test_what_can_move_leaves_a_draining_worker_at_the_end_of_its_window() -> None:
    outcome = lose("", Client(tokens=30), happenings=((1.5, "drain 0 1.0"),), looks=(2.4, 2.6, 4.0))

    assert is_whole(outcome)
    assert outcome.moves == {"worker_draining exact": 1}
    assert [look.running for look in outcome.looks] == [[1, 0], [0, 1], [0, 1]]
    assert outcome.looks[-1].breakers == {"w0": "closed", "w1": "closed"}
    told = {"worker": "w0", "role": "mixed", "outcome": "cancelled"}
    assert outcome.count("baton_worker_requests_total", **told) == 1
    assert outcome.count("baton_stream_outcome_total", worker="w0", outcome="migrated") == 1


def test_a_drain_that_is_asked_for_over_http_moves_streams() -> None:
    drain = Client(
        at=1.5, path="/v1/workers/w0/drain", raw_body=b'{"timeout_secs":0}', stream=False
    )

    outcome = lose("", Client(tokens=30), others=(drain,))

    assert outcome.got[1].status == 200
    assert is_whole(outcome)
    assert outcome.moves == {"worker_draining exact": 1}


def test_what_ends_in_time_stays() -> None:
    outcome = lose("", Client(tokens=10), happenings=((1.5, "drain 0 5"),))

    assert is_whole(outcome)
    assert outcome.moves == {}


@pytest.mark.parametrize(("kinds", "client"), [("vllm vllm", more(**TOOLS)), ("vllm", PLAIN)])
def test_what_cannot_move_runs_on(kinds: str, client: Client) -> None:
    outcome = lose("", client, kinds=kinds, happenings=((1.55, "drain 0 0"),))

    assert is_whole(outcome)
    assert outcome.moves == outcome.stuck == {}


def test_with_its_moves_spent_a_stream_runs_on() -> None:
    outcome = lose(client=Client(tokens=30), kinds="vllm vllm vllm",
                   happenings=((3.0, "drain 1 0"), (3.0, "drain 2 0")))  # fmt: skip

    assert is_whole(outcome)
    assert sum(outcome.moves.values()) == 1


def test_a_drain_before_the_first_token_is_a_fresh_start_that_costs_nothing() -> None:
    outcome = lose(
        "", PLAIN, kinds="sglang sglang", happenings=((0.5, "drain 0 0"),), request_max_retries=0
    )

    assert is_whole(outcome)
    assert outcome.moves == {}
    assert outcome.facts[:3] == ["admitted", "handed_back", "admitted"]


def test_a_second_drain_moves_nothing_again() -> None:
    outcome = lose(
        "", Client(tokens=30), kinds="vllm vllm", limit=5,
        happenings=((1.5, "drain 0 0"), (1.6, "drain 0 0"), (3.0, "drain 0 0")),
    )  # fmt: skip

    assert is_whole(outcome)
    assert outcome.moves == {"worker_draining exact": 1}


@pytest.mark.parametrize(
    "again",
    [
        ("drain 0 20",),
        ("undrain 0", "drain 0 20"),
        ("undrain 0",),
        ("undrain 0", "drain 0"),  # by its agent, which has a window of its own
    ],
)
def test_a_window_ends_with_its_drain_and_with_the_next_one(again: tuple[str, ...]) -> None:
    """The chart says so: asked again, the new window replaces the old one."""
    later = tuple((2.0 + 0.1 * turn, each) for turn, each in enumerate(again))

    outcome = lose(
        "", Client(tokens=30), happenings=((1.5, "drain 0 1"), *later), looks=(2.6,)
    )  # fmt: skip

    assert is_whole(outcome)
    assert outcome.looks[0].running == [1, 0]
    assert outcome.moves == {}


#### Many at once


def test_many_that_move_at_once_are_spread_over_a_moment() -> None:
    crowd = tuple(Client(tokens=30) for _ in range(120))

    outcome = simulate(
        Plan(
            engines=(Engine(), Engine(), Engine()),
            clients=crowd,
            settings={"migration_limit": 1},
            happenings=((2.0, "faults 0 now:server_dies"),),
        )
    )

    moved = [
        moment for ticket in outcome.tickets for moment, edge in ticket.history
        if edge.source.value == "migrating"
    ]  # fmt: skip
    assert {got.ending for got in outcome.got} == {"clean"}
    assert sum(outcome.moves.values()) == len(moved) == 40
    assert 0 < max(moved) - min(moved) <= 1.0
    assert len(set(moved)) > 20


def test_one_that_moves_after_a_crowd_is_not_held_up() -> None:
    crowd = tuple(Client(tokens=30) for _ in range(120))
    drains = tuple((22.0 + number, f"drain {number} 0") for number in range(2))

    outcome = simulate(
        Plan(
            engines=(Engine(), Engine(), Engine()),
            clients=(*crowd, Client(at=20.0, tokens=60)),
            settings={"migration_limit": 2},
            happenings=((2.0, "faults 0 now:server_dies,restart_after=3"), *drains),
        )
    )

    last = max(outcome.tickets, key=lambda ticket: ticket.started_at)
    left = [moment for moment, edge in last.history if edge.fact == "handed_back"]
    went = [moment for moment, edge in last.history if edge.source.value == "migrating"]
    assert left
    assert left == went
