"""A client may leave at any moment; whatever worked for it is free at once."""

from __future__ import annotations

import attrs
import pytest

from tests.simulate import Client, Engine, Outcome, Plan, simulate

HOWS = ["leaves_at", "half_closes_at", "resets_at"]
FAT = "padding,bytes=50000"


def leave(plan: Plan, moment: float, how: str) -> Outcome:
    """Run the plan with its last client leaving at this moment, and look right after it."""
    last = attrs.evolve(plan.clients[-1], **{how: moment})  # type: ignore[arg-type]
    clients = (*plan.clients[:-1], last)
    return simulate(attrs.evolve(plan, clients=clients, looks=(moment - 0.001, moment + 0.001)))


def is_abandoned_at_once(outcome: Outcome, before: list[int], state: str) -> None:
    """It was in this state, its engine worked, and then neither was left."""
    then, now = outcome.looks
    assert (then.running, then.states) == (before, [state])
    assert (now.running, now.states) == ([0] * len(before), [])
    assert outcome.facts[-1] == "client_gone"
    assert outcome.sum("baton_worker_inflight") == 0
    totals = {"route": "chat", "outcome": "abandoned"}
    assert outcome.count("baton_requests_total", **totals) == 1


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_while_nothing_has_come_back(stream: bool, how: str) -> None:
    plan = Plan(engines=(Engine(faults="delay,first_token=50"),), clients=(Client(stream=stream),))

    outcome = leave(plan, 0.3, how)

    is_abandoned_at_once(outcome, [1], "dispatching")


@pytest.mark.parametrize("how", HOWS)
def test_while_a_frozen_worker_reads_nothing(how: str) -> None:
    outcome = leave(Plan(engines=(Engine(faults="freeze"),)), 0.3, how)

    is_abandoned_at_once(outcome, [0], "dispatching")
    assert outcome.count(
        "baton_worker_requests_total", worker="w0", role="mixed", outcome="cancelled"
    )


@pytest.mark.parametrize("how", HOWS)
def test_while_connecting(how: str) -> None:
    plan = Plan(engines=(Engine(),), clients=(Client(at=1.0),), happenings=((0.5, "silent 0"),))

    outcome = leave(plan, 2.0, how)

    is_abandoned_at_once(outcome, [0], "dispatching")


@pytest.mark.parametrize("how", HOWS)
def test_after_the_head_and_before_the_first_token(how: str) -> None:
    outcome = leave(Plan(engines=(Engine(faults="hang,after_events=1"),)), 2.0, how)

    is_abandoned_at_once(outcome, [1], "committed")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("cuts", [None, 1])
def test_in_the_middle_of_a_stream(how: str, cuts: int | None) -> None:
    plan = Plan(engines=(Engine(),), clients=(Client(tokens=100),), cuts=cuts)

    outcome = leave(plan, 5.05, how)

    is_abandoned_at_once(outcome, [1], "streaming")
    assert outcome.count("baton_stream_outcome_total", worker="w0", outcome="client_disconnect")


@pytest.mark.parametrize("how", HOWS)
def test_in_the_middle_of_a_silence(how: str) -> None:
    outcome = leave(Plan(engines=(Engine(faults="hang,after_events=6"),)), 4.0, how)

    is_abandoned_at_once(outcome, [1], "streaming")


@pytest.mark.parametrize("how", HOWS)
def test_while_the_router_waits_for_it_to_read(how: str) -> None:
    slow = Client(tokens=100, fault=FAT, reads_from=500.0)

    outcome = leave(Plan(engines=(Engine(),), clients=(slow,)), 30.0, how)

    is_abandoned_at_once(outcome, [1], "streaming")


@pytest.mark.parametrize("how", HOWS)
def test_on_the_second_worker(how: str) -> None:
    plan = Plan(engines=(Engine(faults="status,code=500"), Engine()))

    outcome = leave(plan, 0.5, how)

    is_abandoned_at_once(outcome, [0, 1], "dispatching")
    assert outcome.tickets[0].attempts == 2


@pytest.mark.parametrize("how", HOWS)
def test_while_waiting_in_the_queue(how: str) -> None:
    plan = Plan(
        engines=(Engine(),),
        clients=(Client(tokens=100), Client(at=1.0)),
        settings={"max_concurrent_requests": 1},
    )

    outcome = leave(plan, 3.0, how)

    then, now = outcome.looks
    assert (then.waiting, now.waiting) == (1, 0)
    assert outcome.sent == [1]
    assert outcome.got[0].ending == "clean"


def test_with_its_request_half_sent() -> None:
    half = b"POST /v1/completions HTTP/1.1\r\nhost: baton\r\ncontent-length: 100\r\n\r\n{"
    outcome = simulate(Plan(clients=(Client(raw=half, leaves_at=1.0),), looks=(0.5, 1.5)))

    assert outcome.tickets == []
    assert outcome.sent == [0, 0]


def test_with_the_answer_complete_but_unread() -> None:
    outcome = simulate(
        Plan(clients=(Client(tokens=200, fault=FAT, reads_from=90.0, leaves_at=80.0),))
    )

    assert outcome.tickets[0].state.value == "abandoned"


def test_the_next_request_is_not_hurt() -> None:
    leaving = tuple(Client(at=turn, leaves_at=turn + 0.5) for turn in range(5))

    outcome = simulate(Plan(engines=(Engine(),), clients=(*leaving, Client(at=10.0))))

    assert outcome.got[-1].ending == "clean"
    assert outcome.engines[0].disconnects == 5
