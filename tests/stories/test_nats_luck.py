"""Whatever happens to agents, broker and frames in whatever order: the standing promises hold."""

from __future__ import annotations

from random import Random

import pytest

from tests.simulate import Client, Engine, Outcome, Plan, simulate

#: Runs of a kind; another seed, another order of things.
RUNS = 12
WIRES = ("nats", "nats", "nats", "old", "http")
AWAY = (("down", "up"), ("forget", "up"), ("cut", "mend"), ("stall", "go_on"))
FAULTS = ("", "", "request=1:cut,after_events=4", "request=2:hang,after_events=3", "comments")


def drawn(luck: Random, *, wires: tuple[str, ...] = WIRES, **settings: object) -> Plan:
    """Three or four engines, a dozen clients, and half a dozen misfortunes."""
    engines = tuple(
        Engine(
            wire=luck.choice(wires),
            kind=luck.choice(("vllm", "vllm", "sglang")),
            faults=luck.choice(FAULTS),
        )
        for _ in range(luck.randint(3, 4))
    )
    clients = tuple(
        Client(
            at=luck.uniform(0, 4),
            tokens=luck.randint(1, 40),
            stream=luck.random() < 0.8,
            chat=luck.random() < 0.7,
            leaves_at=luck.uniform(4, 8) if luck.random() < 0.2 else None,
            reads_from=luck.uniform(0, 6) if luck.random() < 0.2 else 0.0,
        )
        for _ in range(12)
    )
    behind = [number for number, engine in enumerate(engines) if engine.wire != "http"]
    has_old = any(engine.wire == "old" for engine in engines)
    happenings = [misfortune(luck, behind, has_old=has_old) for _ in range(luck.randint(2, 6))]
    return Plan(
        engines=engines,
        clients=clients,
        happenings=tuple(sorted(each for pair in happenings for each in pair)),
        luck=luck.randint(0, 999),
        settings={
            "migration_limit": luck.choice((0, 1, 3)),
            "request_max_retries": luck.choice((0, 1, 3)),
            "stream_idle_timeout_secs": 20.0,
            "first_token_timeout_secs": 30.0,
        }
        | settings,
        rest=40.0,
    )


def misfortune(luck: Random, behind: list[int], *, has_old: bool) -> list[tuple[float, str]]:
    """One thing that goes wrong, and how it is mended."""
    at = luck.uniform(0.5, 6)
    away, back = luck.choice(
        (("down", "up"), ("forget", "up"), ("cut", "mend"), ("stall", "go_on"))
    )
    kinds = [
        [(at, away), (at + luck.uniform(0.01, 3), back)],
        [(at, f"lose {luck.randint(0, 40)} told")],
    ]
    if not has_old:
        # Without numbers nobody can see that a frame is missing.
        kinds.append([(at, f"lose {luck.randint(0, 40)}")])
    if behind:
        number = luck.choice(behind)
        kinds += [[(at, f"die {number}")], [(at, f"leave {number}")]]
    return luck.choice(kinds)


def has_ended(outcome: Outcome) -> bool:
    return all(got.ending in ("clean", "cut", "left") for got in outcome.got)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RUNS))
def test_whatever_happens_nothing_is_wrong_or_left(seed: int) -> None:
    assert has_ended(simulate(drawn(Random(seed))))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RUNS))
def test_whatever_happens_in_front_of_work_queues(seed: int) -> None:
    plan = drawn(Random(1000 + seed), wires=("nats", "nats", "old"), nats_req_max_pending=6)

    assert has_ended(simulate(plan))
