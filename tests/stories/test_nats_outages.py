"""A broker that is away for longer than a worker may be silent: no worker is blamed for it."""

from __future__ import annotations

import pytest

from tests.simulate import Client, Engine, Outcome, Plan, simulate

SHORT: dict[str, object] = {
    "first_token_timeout_secs": 3.0,
    "stream_idle_timeout_secs": 3.0,
    "suspect_idle_secs": 1.0,
    "breaker_failure_threshold": 1,
    "request_max_retries": 3,
    "migration_limit": 3,
}
#: How it goes away and comes back; how long it takes.
OUTAGES = [("down", "up"), ("forget", "up"), ("cut", "mend")]
LONG = Client(tokens=60)
SLOW = "delay,first_token=1.5"


def run(wire: str, faults: str, away: tuple[str, str], seconds: float, **more: object) -> Outcome:
    engine = Engine(wire=wire, faults=faults)
    return simulate(
        Plan(
            engines=(engine, engine),
            clients=(LONG, LONG),
            happenings=((1.5, away[0]), (1.5 + seconds, away[1])),
            looks=(1.5 + seconds + 20.0,),
            settings=SHORT | more,
        )
    )


def blames(outcome: Outcome) -> list[str]:
    """What was booked against a worker."""
    return [
        name
        for name, value in outcome.metrics.items()
        if value and name.startswith("baton_worker_requests_total") and 'outcome="error"' in name
    ]


@pytest.mark.parametrize("faults", ["", SLOW], ids=["streaming", "before the first token"])
@pytest.mark.parametrize("away", OUTAGES, ids=[each[0] for each in OUTAGES])
@pytest.mark.parametrize("seconds", [2.0, 8.0])
@pytest.mark.parametrize("wire", ["nats", "old"])
@pytest.mark.parametrize("pending", [0, 8], ids=["core", "stored"])
def test_an_outage_blames_no_worker(
    wire: str, faults: str, away: tuple[str, str], seconds: float, pending: int
) -> None:
    outcome = run(wire, faults, away, seconds, nats_req_max_pending=pending)

    assert blames(outcome) == []
    assert set(outcome.look.breakers.values()) == {"closed"}


def test_without_an_outage_silence_is_the_worker_s() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(wire="nats", faults="request=1:hang,after_events=3"),) * 2,
            clients=(LONG,),
            settings=SHORT,
        )
    )

    assert len(blames(outcome)) == 2


def test_an_outage_before_a_silence_is_no_excuse_for_it() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(wire="nats", faults="pause,after_events=20,seconds=30"),) * 2,
            clients=(LONG,),
            happenings=((1.0, "cut"), (1.05, "mend")),
            settings=SHORT | {"migration_limit": 0},
        )
    )

    assert len(blames(outcome)) == 1
