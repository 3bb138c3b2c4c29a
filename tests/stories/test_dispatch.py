"""Choosing the worker for a request."""

from __future__ import annotations

import pytest

from tests.simulate import Client, Engine, Outcome, Plan, simulate

ONE_AFTER_ANOTHER = tuple(Client(at=5.0 * turn) for turn in range(4))
UNWELL = Engine(faults="path=/health:status,code=503")


def test_round_robin_takes_turns() -> None:
    outcome = simulate(Plan(clients=ONE_AFTER_ANOTHER))

    assert outcome.sent == [2, 2]


@pytest.mark.parametrize("policy", ["least_load", "power_of_two"])
def test_load_is_the_number_of_live_requests(policy: str) -> None:
    long = Client(tokens=300)

    outcome = simulate(Plan(clients=(long, *ONE_AFTER_ANOTHER[1:]), settings={"policy": policy}))

    assert sorted(outcome.sent) == [1, 3]


def test_random_spreads_requests() -> None:
    clients = tuple(Client(at=5.0 * turn, tokens=1) for turn in range(12))

    outcome = simulate(Plan(clients=clients, settings={"policy": "random"}))

    assert min(outcome.sent) > 2


def test_a_model_is_served_only_by_those_who_have_it() -> None:
    engines = (Engine(model="large"), Engine(model="small"), Engine(model="small"))
    clients = tuple(Client(at=5.0 * turn, model="small") for turn in range(4))

    outcome = simulate(Plan(engines=engines, clients=clients))

    assert outcome.sent == [0, 2, 2]


def test_an_unknown_model_is_told_and_nothing_is_sent() -> None:
    outcome = simulate(Plan(clients=(Client(model="other"),)))

    assert (outcome.one.status, outcome.one.code) == (404, "model_not_found")
    assert outcome.one.error is not None
    assert outcome.one.error["param"] == "model"
    assert outcome.sent == [0, 0]


def test_a_request_without_a_model_goes_to_anybody() -> None:
    body = b'{"prompt":"once","max_tokens":2}'
    client = Client(path="/v1/completions", raw_body=body, stream=False)

    outcome = simulate(Plan(clients=(client,)))

    assert outcome.one.status == 200
    assert outcome.one.normal == outcome.one.direct[0].normal


def test_an_empty_fleet_is_told() -> None:
    outcome = simulate(Plan(engines=()))

    assert (outcome.one.status, outcome.one.code) == (503, "no_workers")
    assert outcome.one.headers["retry-after"] == "1"


def test_a_worker_that_is_not_well_gets_nothing() -> None:
    outcome = simulate(Plan(engines=(UNWELL, Engine()), clients=ONE_AFTER_ANOTHER))

    assert outcome.sent == [0, 4]


def test_nobody_is_ready() -> None:
    outcome = simulate(Plan(engines=(UNWELL, UNWELL)))

    assert (outcome.one.status, outcome.one.code) == (503, "no_workers")
    assert outcome.sent == [0, 0]


def test_a_worker_that_has_not_named_its_models_yet_makes_no_model_unknown() -> None:
    slow_to_tell = Engine(faults="path=/v1/models:hang")

    outcome = simulate(Plan(engines=(slow_to_tell,)))

    assert (outcome.one.status, outcome.one.code) == (503, "no_workers")


def test_all_breakers_open_is_tried_anyway_and_said() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="request=1:cut"),),
            clients=(Client(), Client(at=1)),
            settings={"breaker_failure_threshold": 1},
        )
    )

    assert [got.status for got in outcome.got] == [502, 200]
    assert outcome.count("baton_breaker_overridden_total", worker="w0") == 1
    assert told(outcome, "breaker_overridden") == ["w0"]


def told(outcome: Outcome, event: str) -> list[object]:
    """The workers of the log lines of this event."""
    return [line["worker"] for line in outcome.log if line["event"] == event]
