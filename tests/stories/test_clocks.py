"""Five deadlines, each of which names itself, and what does not set them off."""

from __future__ import annotations

import pytest

from tests.simulate import Client, Engine, Plan, simulate


def test_connecting_has_a_limit() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(),),
            clients=(Client(at=1.0),),
            settings={"connect_timeout_secs": 3.0},
            happenings=((0.5, "silent 0"),),
        )
    )

    assert (outcome.one.status, outcome.one.code) == (502, "upstream_unreachable")
    assert outcome.one.ended_at == 4


def test_connecting_too_long_fails_over() -> None:
    outcome = simulate(
        Plan(clients=(Client(at=1.0), Client(at=1.1)), happenings=((0.5, "silent 0"),))
    )

    assert [got.status for got in outcome.got] == [200, 200]
    assert outcome.sent == [0, 2]


def test_the_first_token_has_a_limit() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="hang"),),
            settings={"first_token_timeout_secs": 7.0},
        )
    )

    assert (outcome.one.status, outcome.one.code) == (504, "first_token_timeout")
    assert outcome.one.ended_at == 7


@pytest.mark.parametrize("fault", ["hang", "hang,at=head", "freeze", "delay,first_token=100"])
def test_no_first_token_in_time_fails_over(fault: str) -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults=fault), Engine()),
            settings={"first_token_timeout_secs": 10.0, "suspect_idle_secs": 0.0},
        )
    )

    assert outcome.one.ending == "clean"
    assert outcome.one.ended_at == pytest.approx(11.7)
    assert outcome.facts[:2] == ["admitted", "leg_stalled"]


def test_a_role_is_no_first_token() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="hang,after_events=1"),),
            settings={"first_token_timeout_secs": 7.0},
        )
    )

    assert (outcome.one.ending, outcome.one.code) == ("cut", "first_token_timeout")
    assert outcome.one.ended_at == 7


def test_silence_in_a_stream_has_a_limit() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="hang,after_events=6"),),
            settings={"stream_idle_timeout_secs": 4.0},
        )
    )

    assert (outcome.one.ending, outcome.one.code) == ("cut", "stream_idle_timeout")
    assert outcome.one.ended_at == pytest.approx(1.4 + 4)


def test_comments_are_no_life() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="pause,after_events=6,seconds=50,comments_every=1"),),
            settings={"stream_idle_timeout_secs": 4.0},
        )
    )

    assert (outcome.one.ending, outcome.one.code) == ("cut", "stream_idle_timeout")


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_has_one_clock_over_all_its_attempts(stream: bool) -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="status,code=500;delay,head=20"), Engine(faults="hang")),
            clients=(Client(stream=stream),),
            settings={"request_timeout_secs": 30.0},
        )
    )

    assert (outcome.one.status, outcome.one.code) == (504, "request_timeout")
    assert outcome.one.ended_at == 30
    assert outcome.facts == ["admitted", "overloaded", "admitted", "deadline_passed"]


def test_a_request_that_takes_too_long_is_told_so() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="hang"),),
            clients=(Client(stream=False),),
            settings={"request_timeout_secs": 60.0},
        )
    )

    assert (outcome.one.status, outcome.one.code) == (504, "request_timeout")
    assert outcome.one.ended_at == 60


def test_a_request_that_takes_too_long_is_cut_in_its_stream() -> None:
    outcome = simulate(Plan(clients=(Client(tokens=100),), settings={"request_timeout_secs": 5.0}))

    assert (outcome.one.ending, outcome.one.code) == ("cut", "request_timeout")
    assert outcome.one.ended_at == 5
    name = "baton_stream_outcome_total"
    assert outcome.count(name, worker="w0", outcome="expired") == 1


def test_the_queue_has_a_limit() -> None:
    outcome = simulate(
        Plan(
            clients=(Client(tokens=200), Client(at=1.0)),
            settings={"max_concurrent_requests": 1, "queue_timeout_secs": 6.0},
        )
    )

    waiting = outcome.got[1]
    assert (waiting.status, waiting.code) == (429, "queue_timeout")
    assert waiting.headers["retry-after"]
    assert waiting.ended_at == 7


def test_time_in_the_queue_is_not_the_workers() -> None:
    outcome = simulate(
        Plan(
            clients=(Client(tokens=100), Client(at=1.0)),
            settings={"max_concurrent_requests": 1, "first_token_timeout_secs": 3.0},
        )
    )

    assert [got.ending for got in outcome.got] == ["clean", "clean"]


def test_a_long_healthy_stream_meets_no_limit() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(first_token_seconds=3.0, token_seconds=0.2),),
            clients=(Client(tokens=50),),
            settings={"first_token_timeout_secs": 4.0, "stream_idle_timeout_secs": 1.0},
        )
    )

    assert outcome.one.ending == "clean"


def test_limits_of_0_are_off() -> None:
    off: dict[str, object] = {
        "first_token_timeout_secs": 0.0,
        "stream_idle_timeout_secs": 0.0,
        "request_timeout_secs": 0.0,
        "suspect_idle_secs": 0.0,
    }
    silences = "pause,at=head,seconds=1000;pause,after_events=4,seconds=1000"

    outcome = simulate(
        Plan(
            engines=(Engine(faults=silences),),
            settings=off | {"health_check_interval_secs": 500.0},
        )
    )

    assert outcome.one.ending == "clean"
    assert outcome.one.ended_at > 2000


def test_a_silent_stream_of_a_worker_that_is_gone_is_lost() -> None:
    outcome = simulate(Plan(engines=(Engine(faults="sigterm_hang,after_events=6"), Engine())))

    assert (outcome.one.ending, outcome.one.code) == ("cut", "upstream_broken")
    assert outcome.one.ended_at < 10


def test_a_silent_stream_is_lost_soon_after_its_worker_has_gone() -> None:
    """It is looked at again and again, however long its worker was well."""
    outcome = simulate(
        Plan(
            engines=(Engine(faults="pause,after_events=6,seconds=300"), Engine()),
            settings={"suspect_idle_secs": 3.0, "stream_idle_timeout_secs": 200.0},
            happenings=((20.3, "faults 0 now:sigterm_hang"),),
        )
    )

    assert (outcome.one.ending, outcome.one.code) == ("cut", "upstream_broken")
    assert 20.3 < outcome.one.ended_at < 22.5


def test_a_silent_stream_of_a_worker_that_says_503_is_waited_for() -> None:
    pausing = "pause,after_events=6,seconds=40;path=/health,request=2..:status,code=503"

    outcome = simulate(Plan(engines=(Engine(faults=pausing),)))

    assert outcome.one.ending == "clean"
    assert outcome.one.ended_at > 40
