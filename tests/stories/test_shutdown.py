"""SIGTERM: readiness falls, running requests may finish, and whatever is cut off is told so."""

from __future__ import annotations

import pytest

from tests.simulate import Client, Engine, Plan, simulate

FAT = "padding,bytes=50000"


def test_readiness_falls_and_liveness_does_not() -> None:
    outcome = simulate(
        Plan(
            clients=(
                Client(tokens=100),
                Client(method="GET", path="/readyz", at=2.0, stream=False),
                Client(method="GET", path="/health", at=2.0, stream=False),
            ),
            happenings=((1.0, "stop"),),
        )
    )

    assert [got.status for got in outcome.got] == [200, 503, 200]
    assert outcome.got[1].code == "shutting_down"


def test_new_requests_are_told_to_go_elsewhere() -> None:
    outcome = simulate(
        Plan(clients=(Client(tokens=100), Client(at=2.0)), happenings=((1.0, "stop"),))
    )

    late = outcome.got[1]
    assert (late.status, late.code) == (503, "shutting_down")
    assert late.headers["connection"] == "close"
    assert "retry-after" in late.headers


def test_running_requests_complete_and_then_it_stops() -> None:
    running = tuple(Client(at=0.1 * turn, tokens=20, stream=turn % 2 == 0) for turn in range(10))

    outcome = simulate(Plan(clients=running, happenings=((1.0, "stop"),)))

    assert {got.ending for got in outcome.got} == {"clean"}
    assert 3.7 < outcome.stopped_at < 5


def test_connections_are_refused_once_it_has_stopped() -> None:
    outcome = simulate(Plan(clients=(Client(at=5.0),), happenings=((1.0, "stop"),)))

    assert outcome.one.ending == "refused"
    assert outcome.stopped_at < 2


@pytest.mark.parametrize("stream", [True, False])
def test_when_the_window_is_over_the_rest_is_ended_visibly(stream: bool) -> None:
    outcome = simulate(
        Plan(
            clients=(Client(tokens=300, stream=stream),),
            settings={"drain_timeout_secs": 4.0},
            happenings=((1.0, "stop"),),
        )
    )

    assert outcome.one.code == "shutting_down"
    assert (outcome.one.status, outcome.one.ending) == ((200, "cut") if stream else (503, "clean"))
    assert outcome.one.ended_at == 5
    assert outcome.stopped_at < 9


def test_a_second_signal_ends_at_once() -> None:
    outcome = simulate(
        Plan(
            clients=(Client(tokens=300),),
            happenings=((1.5, "stop"), (3.0, "stop")),
        )
    )

    assert (outcome.one.ending, outcome.one.code) == ("cut", "shutting_down")
    assert outcome.one.ended_at == 3
    assert outcome.stopped_at < 7


def test_a_client_that_reads_nothing_does_not_hold_the_end_up() -> None:
    stuck = Client(tokens=300, fault=FAT, reads_from=500.0)

    outcome = simulate(
        Plan(
            clients=(stuck,),
            settings={"drain_timeout_secs": 5.0},
            happenings=((1.0, "stop"),),
        )
    )

    assert outcome.one.ending == "cut"
    assert outcome.stopped_at < 10


def test_last_words_wait_a_moment_for_a_client_that_lags() -> None:
    lagging = Client(tokens=300, fault=FAT, reads_from=7.0)

    outcome = simulate(
        Plan(
            clients=(lagging,),
            settings={"drain_timeout_secs": 5.0},
            happenings=((1.0, "stop"),),
        )
    )

    assert outcome.one.code == "shutting_down"
    assert outcome.stopped_at < 10


def test_an_answer_that_a_client_has_yet_to_take_is_not_cut() -> None:
    slow = Client(stream=False, fault="padding,bytes=500000", reads_from=20.0)

    outcome = simulate(Plan(clients=(slow,), happenings=((3.0, "stop"),)))

    assert outcome.one.ending == "clean"
    assert len(outcome.one.body) > 500_000
    assert 20 < outcome.stopped_at < 21


def test_who_waits_in_the_queue_may_still_have_its_turn() -> None:
    outcome = simulate(
        Plan(
            clients=(Client(tokens=30), Client(at=0.5)),
            settings={"max_concurrent_requests": 1},
            happenings=((1.0, "stop"),),
        )
    )

    assert [got.ending for got in outcome.got] == ["clean", "clean"]


def test_an_idle_connection_does_not_hold_the_end_up() -> None:
    first = Client(tokens=1, then=(Client(at=60.0, tokens=1),))

    outcome = simulate(Plan(clients=(first,), happenings=((5.0, "stop"),)))

    assert [got.ending for got in outcome.got] == ["clean", "cut"]
    assert outcome.stopped_at < 6


def test_a_retry_during_the_drain_is_still_made() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="status,code=500;delay,head=3"), Engine()),
            happenings=((1.0, "stop"),),
        )
    )

    assert (outcome.one.status, outcome.one.ending) == (200, "clean")
