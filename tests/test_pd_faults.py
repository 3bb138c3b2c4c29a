"""Pairs under faults that luck has drawn: whatever happens, the standing promises hold.

Like tests/test_faults.py, with halves that need each other. A hand-over that went wrong would show
as a wrong text, since a decode writes from the cache it was given.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.sim.fault_kinds import KINDS
from tests.plans import Engine, Plan
from tests.simulate import simulate
from tests.test_faults import FAULTS, PATIENCE, WHEN, clients, happenings

#: Faults of halves, alone and with what makes them matter.
OF_HALVES: dict[str, list[str]] = {
    "alone": ["alone", "alone;error_event,at=head", "alone;abort,at=head", "alone;cut,at=head"],
    "linger": ["linger,seconds=0.5", "linger,seconds=20"],
    "transfer_fails": ["transfer_fails"],
}
ALL = FAULTS | OF_HALVES
SETTINGS: dict[str, st.SearchStrategy[object]] = {
    "pd_max_retries": st.integers(0, 2),
    "migration_limit": st.integers(1, 2),
    "first_token_timeout_secs": st.sampled_from([2.0, 9.0]),
    "stream_idle_timeout_secs": st.sampled_from([1.5, 6.0]),
    "request_timeout_secs": st.sampled_from([1.2, 7.0]),
    "suspect_idle_secs": st.sampled_from([0.0, 1.0]),
    "breaker_failure_threshold": st.integers(0, 2),
    "max_concurrent_requests": st.integers(0, 2),
    "pd_recompute": st.just(True),
    "pd_cancel_unmatched_prefill": st.just(True),
    "worker_keep_alive_secs": st.sampled_from([0.0, 4.0]),
}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Up to two halves of each role, some of them faulty."""
    kinds = draw(st.lists(st.sampled_from(sorted(ALL)), min_size=1, max_size=4, unique=True))
    faults = st.sampled_from([fault for kind in kinds for fault in ALL[kind]])
    timed = st.builds(str.__add__, st.sampled_from(WHEN), faults)
    several = st.just("") | timed | st.builds("{};{}".format, timed, timed)
    kind = draw(st.sampled_from(["vllm", "sglang"]))
    engines = [
        Engine(
            kind=kind,
            role=role,
            options=f"engine={kind}",
            faults=draw(several),
            token_seconds=draw(st.sampled_from([0.0, 0.1])),
            first_token_seconds=draw(st.sampled_from([0.0, 1.0])),
        )
        for role in ("prefill", "decode")
        for _ in range(draw(st.integers(1, 2)))
    ]
    names = draw(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=5, unique=True))
    return Plan(
        engines=tuple(engines),
        clients=tuple(draw(st.lists(clients(faults), min_size=1, max_size=5))),
        settings=PATIENCE | {name: draw(SETTINGS[name]) for name in names},
        cuts=draw(st.none() | st.integers(0, 1000)),
        luck=draw(st.integers(0, 100)),
        pipe_bytes=draw(st.sampled_from([2000, 64 * 1024])),
        happenings=tuple(draw(st.lists(happenings(len(engines)), max_size=2))),
        # What a prefill has to itself, and what its engine takes to notice.
        rest=45.0,
    )


@given(st.random_module(), plans())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_promises_hold_under_faults(schedule: object, plan: Plan) -> None:
    simulate(plan)


def test_every_fault_of_halves_is_drawn() -> None:
    assert set(OF_HALVES) == {kind.name for kind in KINDS.values() if kind.family == "half"}
