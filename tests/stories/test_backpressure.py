"""Clients that read slowly, and what they may cost: their own time, and a bounded buffer."""

from __future__ import annotations

import pytest

from router.front import BACKLOG_BYTES_HIGH
from tests.simulate import Client, Plan, simulate

#: Every event has this many bytes more, so that a few of them fill every buffer.
FAT = "padding,bytes=50000"
PIPE_BYTES = 64 * 1024


def test_a_slow_client_holds_back_its_own_worker_and_memory_is_bounded() -> None:
    slow = Client(tokens=100, fault=FAT, reads_from=60.0)

    outcome = simulate(Plan(clients=(slow, Client(at=1.0)), looks=(20.0, 50.0)))

    for look in outcome.looks:
        assert look.running == [1, 0]
        assert look.backlog_bytes < BACKLOG_BYTES_HIGH + 2 * PIPE_BYTES
    assert [got.ending for got in outcome.got] == ["clean", "clean"]
    assert outcome.got[1].ended_at == pytest.approx(2.7)


def test_idle_timers_stop_while_the_client_is_slow() -> None:
    slow = Client(tokens=50, fault=FAT, reads_from=100.0)

    outcome = simulate(
        Plan(
            clients=(slow,),
            settings={"stream_idle_timeout_secs": 5.0, "first_token_timeout_secs": 5.0},
        )
    )

    assert outcome.one.ending == "clean"
    assert outcome.one.text == outcome.one.direct[0].text


def test_idle_timers_begin_anew_when_the_client_has_caught_up() -> None:
    # All that the worker has said is in the backlog; then it hangs.
    fault = "padding,bytes=90000;hang,after_events=3"
    slow = Client(chat=False, tokens=50, fault=fault, reads_from=100.0)

    outcome = simulate(Plan(clients=(slow,), settings={"stream_idle_timeout_secs": 5.0}))

    assert (outcome.one.ending, outcome.one.code) == ("cut", "stream_idle_timeout")
    assert outcome.one.ended_at == pytest.approx(105)


def test_a_client_that_takes_nothing_is_gone() -> None:
    stuck = Client(tokens=100, fault=FAT, reads_from=200.0)

    outcome = simulate(
        Plan(clients=(stuck,), settings={"client_stall_timeout_secs": 30.0}, looks=(30.0, 40.0))
    )

    assert outcome.one.ending == "cut"
    assert outcome.facts[-1] == "client_gone"
    assert [look.running for look in outcome.looks] == [[1, 0], [0, 0]]


def test_a_client_that_takes_a_little_now_and_then_is_not_gone() -> None:
    slow = Client(tokens=60, fault=FAT, reads_from=25.0)

    outcome = simulate(Plan(clients=(slow,), settings={"client_stall_timeout_secs": 30.0}))

    assert outcome.one.ending == "clean"


def test_a_stall_limit_of_0_is_off() -> None:
    slow = Client(tokens=60, fault=FAT, reads_from=500.0)

    outcome = simulate(
        Plan(
            clients=(slow,),
            settings={"client_stall_timeout_secs": 0.0, "health_check_interval_secs": 500.0},
        )
    )

    assert outcome.one.ending == "clean"


@pytest.mark.parametrize("fault", ["cut,after_events=20", "error_event,after_events=20"])
def test_what_a_slow_client_was_sent_before_the_end_still_arrives(fault: str) -> None:
    slow = Client(tokens=60, fault=f"{FAT};{fault}", reads_from=50.0)

    outcome = simulate(Plan(clients=(slow,)))

    assert outcome.one.ending == "cut"
    assert outcome.one.error is not None
    assert len(outcome.one.chunks) == 20


def test_a_whole_answer_waits_for_a_slow_client() -> None:
    slow = Client(stream=False, fault="padding,bytes=1000000", reads_from=60.0)

    outcome = simulate(Plan(clients=(slow,)))

    assert outcome.one.ending == "clean"
    assert outcome.one.text == outcome.one.direct[0].text
    assert outcome.facts[-1] == "completed"
