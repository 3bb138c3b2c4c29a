"""The breaker of a worker: when it opens, whom it lets through, and what it does not count."""

from __future__ import annotations

import pytest

from tests.simulate import Client, Engine, Outcome, Plan, simulate

#: After the head: a cut before it may mean that a kept connection was stale, which is no failure.
CUT = "cut,at=head"
BREAKER: dict[str, object] = {
    "breaker_failure_threshold": 3,
    "breaker_cooldown_secs": 20.0,
    "breaker_max_cooldown_secs": 60.0,
}


def asks(*moments: float, tokens: int = 1) -> tuple[Client, ...]:
    """Clients that come at these moments."""
    return tuple(Client(at=moment, tokens=tokens) for moment in moments)


def breakers(outcome: Outcome) -> list[str]:
    """The state of the first worker's breaker at each look."""
    return [look.breakers["w0"] for look in outcome.looks]


def test_it_opens_after_failures_in_a_row_and_spares_the_worker() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults=CUT), Engine()),
            clients=asks(*range(10)),
            settings=BREAKER,
            looks=(4.5, 12.0),
        )
    )

    assert [got.status for got in outcome.got] == [200] * 10
    assert outcome.sent == [3, 10]
    assert breakers(outcome)[-1] == "open"


def test_a_success_in_between_starts_the_count_anew() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults=f"request=1..2:{CUT};request=4..5:{CUT}"),),
            clients=asks(*range(0, 12, 2)),
            settings=BREAKER,
            looks=(12.0,),
        )
    )

    assert outcome.sent == [6]
    assert breakers(outcome) == ["closed"]


def test_deaths_in_the_middle_of_the_body_count() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="cut,after_events=3"), Engine()),
            clients=tuple(Client(at=moment) for moment in range(0, 24, 3)),
            settings=BREAKER,
            looks=(24.0,),
        )
    )

    assert outcome.sent == [3, 5]
    assert [got.ending for got in outcome.got].count("cut") == 3


def test_a_success_is_known_at_the_end_of_the_body_only() -> None:
    long = Client(at=50.0, tokens=100)

    outcome = simulate(
        Plan(
            engines=(Engine(faults=f"request=1..3:{CUT}"),),
            clients=(*asks(0, 1, 2), long),
            settings=BREAKER,
            looks=(3.0, 55.0, 70.0),
        )
    )

    assert breakers(outcome) == ["open", "half_open", "closed"]


@pytest.mark.parametrize(
    "fault",
    [
        "status,code=400",
        "status,code=404",
        "status,code=429",
        "status,code=503",
        "error_event,code=400",
        "error_event,code=429",
        "error_event,after_events=3,code=400",
    ],
)
def test_what_says_nothing_about_the_worker_is_not_counted(fault: str) -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults=f"request=1..10:{fault}"),),
            clients=asks(*range(0, 22, 2)),
            settings=BREAKER,
            looks=(22.0,),
        )
    )

    assert outcome.got[-1].status == 200
    assert outcome.sent == [11]
    assert breakers(outcome) == ["closed"]


def test_clients_that_leave_are_not_counted() -> None:
    leaving = tuple(Client(at=turn, leaves_at=turn + 0.5) for turn in range(6))

    outcome = simulate(Plan(engines=(Engine(),), clients=leaving, settings=BREAKER, looks=(10.0,)))

    assert breakers(outcome) == ["closed"]


def test_half_open_lets_one_request_through() -> None:
    together = asks(30.0, 30.2, 30.4, 30.6, tokens=60)

    outcome = simulate(
        Plan(
            engines=(Engine(faults=f"request=1..3:{CUT}"), Engine()),
            clients=(*asks(0, 1, 2, 3, 4, 5), *together),
            settings=BREAKER,
            looks=(31.0, 40.0),
        )
    )

    assert outcome.sent == [4, 9]
    assert breakers(outcome) == ["half_open", "closed"]


@pytest.mark.parametrize(
    ("probe", "fault"),
    [
        (Client(at=30.0, leaves_at=30.5), ""),
        (Client(at=30.0), "request=4:status,code=400"),
        (Client(at=30.0), "request=4:status,code=429"),
    ],
    ids=["the client left", "400", "429"],
)
def test_a_probe_that_says_nothing_gives_its_leave_back(probe: Client, fault: str) -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults=f"request=1..3:{CUT};{fault}"),),
            clients=(*asks(0, 1, 2), probe, Client(at=33.0)),
            settings=BREAKER,
            looks=(32.0, 36.0),
        )
    )

    assert outcome.got[-1].status == 200
    assert breakers(outcome) == ["half_open", "closed"]
    assert outcome.sum("baton_breaker_overridden_total") == 0


def test_the_cooldown_doubles_up_to_its_limit() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults=CUT), Engine()),
            clients=asks(*range(0, 200, 2)),
            settings=BREAKER,
        )
    )

    failures = [
        ticket.started_at - outcome.plan.begin
        for ticket in outcome.tickets
        if any(edge.fact == "leg_lost" for _, edge in ticket.history)
    ]
    opened, first, second, third = failures[2:6]
    assert first - opened == pytest.approx(20, abs=3)
    assert second - first == pytest.approx(40, abs=3)
    assert third - second == pytest.approx(60, abs=3)


def test_a_threshold_of_0_is_no_breaker() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults=CUT), Engine()),
            clients=asks(*range(0, 40, 2)),
            settings={"breaker_failure_threshold": 0},
        )
    )

    assert outcome.sent[0] >= 10
