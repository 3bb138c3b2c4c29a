"""What the log says at its usual level when workers come up, fail and recover."""

from __future__ import annotations

from tests.simulate import Client, Engine, Outcome, Plan, simulate


def told(outcome: Outcome, event: str) -> list[dict[str, object]]:
    """The lines of one kind, without time and level."""
    return [
        {name: value for name, value in line.items() if name not in ("time", "event")}
        for line in outcome.log
        if line["event"] == event
    ]


def test_a_worker_s_illness_is_told_once_with_what_its_probe_met() -> None:
    outcome = simulate(
        Plan(
            clients=(Client(tokens=1), Client(at=60.0, tokens=1)),
            settings={"health_check_interval_secs": 2.0},
            happenings=((3.0, "faults 0 now:server_dies,restart_after=20"),),
        )
    )

    ready = {"level": "info", "fact": "ready", "worker": "w0"}
    first, ill, again = (line for line in told(outcome, "worker") if line["worker"] == "w0")
    assert (first, again) == (ready, ready)
    assert ill.pop("detail")
    assert ill == {"level": "warning", "fact": "unhealthy", "worker": "w0", "probe": "refused"}


def test_a_worker_that_does_not_come_up_is_told_of_once() -> None:
    # SGLang 0.5.23 takes at least a second for its /health, so with less time it is never ready.
    slow = Engine(faults="path=/health:delay,head=1.1")

    outcome = simulate(
        Plan(
            engines=(slow, Engine()),
            clients=(Client(at=60.0, tokens=1),),
            settings={"health_check_timeout_secs": 1.0},
        )
    )

    assert [line for line in told(outcome, "worker") if line["worker"] == "w0"] == [
        {"level": "warning", "fact": "not_ready", "worker": "w0", "probe": "timed_out",
         "detail": None},
    ]  # fmt: skip


def test_a_breaker_that_opens_and_closes_is_told_of() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="request=1..3:cut,at=head"), Engine()),
            clients=tuple(Client(at=moment, tokens=1) for moment in (0.0, 1, 2, 3, 4, 5, 30, 31)),
            settings={"breaker_failure_threshold": 3, "breaker_cooldown_secs": 10.0},
        )
    )

    assert told(outcome, "breaker") == [
        {"level": "warning", "fact": "opened", "worker": "w0", "failures": 3},
        {"level": "info", "fact": "closed", "worker": "w0"},
    ]
