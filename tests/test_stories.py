"""What the router does, one story a behaviour, in the order of a request's life.

Every story is a plan, run whole under virtual time; whatever must hold in all of them is asserted
by `simulate` itself (tests/promises.py). Moments are virtual seconds after the plan's begin.
"""

from __future__ import annotations

from tests.simulate import Client, Engine, Plan, simulate

#### Deadlines


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
