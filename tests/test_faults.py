"""Plans drawn by luck: whatever goes wrong, in whatever order, the promises hold.

Swarm fashion: first is drawn which kinds of faults are on in this plan, then where and when they
strike. Ties in time are meant to happen, bytes are cut by a seed, and Trio's scheduler is part of
the example. The standing promises are the assertion; a plan that breaks one is printed, and
becomes a story.
"""

from __future__ import annotations

from itertools import product

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.sim.fault_kinds import KINDS
from tests.simulate import Client, Engine, Plan, simulate

#: Moments, in seconds. Few of them, so that things happen at the same one.
MOMENTS = st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 7.0])
EVENTS = [f"after_events={count}" for count in range(8)]
PLACES = [*EVENTS, "at=head", "at=finish", "at=done"]
SECONDS = ["0.1", "1", "4", "30"]
CODES = ["400", "404", "429", "500", "503"]
#: Not JSON or UTF-8 that is none: such events pass, and then no text is right.
GARBAGE = ["status_line", "header", "two_lengths", "chunk_size", "chunk_end"]
GARBAGE += ["short_body", "long_body", "after_end"]


def variants(form: str, *parameters: list[str]) -> list[str]:
    """The form with every combination of parameters."""
    return [form.format(*each) for each in product(*parameters)]


#: Changes what the right answer is.
UNDRAWN = {"parse"}
#: What engines of a plan may suffer.
FAULTS: dict[str, list[str]] = {
    "delay": variants("delay,head={},first_token={}", SECONDS, SECONDS),
    "status": variants("status,code={}", CODES),
    "empty": ["empty"],
    "hang": variants("hang,{}", PLACES),
    "cut": variants("cut,{},{}", PLACES, ["reset=true", "inside_bytes=7"]),
    "pause": variants("pause,{},seconds={}", EVENTS, SECONDS),
    "error_event": variants("error_event,{},code={}", EVENTS, CODES),
    "abort": variants("abort,{}", EVENTS),
    "end": variants("end,{},done={}", EVENTS, ["true", "false"]),
    "garbage": variants("garbage,what={},{}", GARBAGE, EVENTS),
    "gzip": ["gzip"],
    "close_after": ["close_after"],
    "close_reused": ["close_reused"],
    "close_delimited": ["close_delimited"],
    "interim": ["interim"],
    "slow_reader": ["slow_reader,bytes_per_second=200"],
    "dribble": ["dribble,bytes=9,seconds=0.001"],
    "lump": ["lump,events=3"],
    "comments": ["comments"],
    "crlf": ["crlf"],
    "forget": variants("forget,member={}", ["kv_transfer_params", "return_token_ids"]),
    "padding": ["padding,bytes=40000"],
    "early_head": ["early_head", "early_head,comments_every=0.4"],
    "drop": ["drop"],
    "mute": ["mute"],
    **{
        kind.name: variants(f"{kind.name},{{}},restart_after={{}}", EVENTS, SECONDS)
        for kind in KINDS.values()
        if kind.family == "engine"
    },
    "refuse": variants("refuse,restart_after={}", SECONDS),
}
WHEN = ["request=1:", "request=2:", "times=1:", "every=2:", ""]
SETTINGS: dict[str, st.SearchStrategy[object]] = {
    "policy": st.sampled_from(["round_robin", "random", "least_load", "power_of_two"]),
    "request_max_retries": st.integers(0, 3),
    "migration_limit": st.integers(1, 3),
    "first_token_timeout_secs": st.sampled_from([2.0, 9.0]),
    "stream_idle_timeout_secs": st.sampled_from([1.5, 6.0]),
    "request_timeout_secs": st.sampled_from([1.2, 7.0, 40.0]),
    "client_stall_timeout_secs": st.sampled_from([0.5, 5.0]),
    "suspect_idle_secs": st.sampled_from([0.0, 1.0]),
    "breaker_failure_threshold": st.integers(0, 2),
    "max_concurrent_requests": st.integers(0, 3),
    "queue_size": st.integers(0, 3),
    "queue_timeout_secs": st.sampled_from([0.5, 3.0]),
    "drain_timeout_secs": st.sampled_from([0.0, 2.0]),
    "max_body_bytes": st.sampled_from([5000, 1_000_000]),
    "worker_keep_alive_secs": st.sampled_from([0.0, 4.0]),
}
#: More fields of requests, of which several may be.
EXTRAS: list[dict[str, object]] = [
    {},
    {},
    {"stream_options": {"include_usage": True}},
    {"n": 2, "temperature": 0.5},
    {"stop": [" little", "day"]},
    {"seed": 7, "temperature": 0.8},
]
#: Silence ends by these at the latest, so that no run is longer than it must be.
PATIENCE: dict[str, object] = {
    "first_token_timeout_secs": 9.0,
    "stream_idle_timeout_secs": 6.0,
    "request_timeout_secs": 30.0,
    "client_stall_timeout_secs": 10.0,
}


@st.composite
def clients(draw: st.DrawFn, faults: st.SearchStrategy[str]) -> Client:
    """A client with its moments and, now and then, a fault of its own."""
    at = draw(MOMENTS)
    ways_to_leave = st.sampled_from(["leaves_at", "half_closes_at", "resets_at"])
    moments: dict[str, float] = {}
    if draw(st.integers(0, 3)) == 0:
        moments[draw(ways_to_leave)] = at + draw(MOMENTS)
    following = st.builds(Client, at=MOMENTS, tokens=st.integers(1, 4), stream=st.booleans())
    has_following = draw(st.integers(0, 4)) == 0
    stream = draw(st.booleans())
    extra = draw(st.sampled_from(EXTRAS))
    return Client(
        at=at,
        stream=stream,
        chat=draw(st.booleans()),
        tokens=draw(st.integers(1, 9)),
        fault=draw(st.just("") | faults),
        extra=extra if stream else {},
        reads_from=at + draw(MOMENTS) * draw(st.integers(0, 1)),
        http_10=draw(st.integers(0, 7)) == 0,
        then=tuple(draw(st.lists(following, max_size=2))) if has_following else (),
        **moments,  # type: ignore[arg-type]  # names drawn above
    )


def happenings(engines: int) -> st.SearchStrategy[tuple[float, str]]:
    """Things that are done to workers, and to the router itself."""
    numbers = st.integers(0, engines - 1)
    words = st.sampled_from(["drain", "silent", "heal"])
    return st.tuples(MOMENTS, st.builds("{} {}".format, words, numbers) | st.just("stop"))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan in which some kinds of faults are on, and the others are off."""
    kinds = draw(st.lists(st.sampled_from(sorted(FAULTS)), min_size=1, max_size=4, unique=True))
    faults = st.sampled_from([fault for kind in kinds for fault in FAULTS[kind]])
    timed = st.builds(str.__add__, st.sampled_from(WHEN), faults)
    several = st.just("") | timed | st.builds("{};{}".format, timed, timed)
    kind = draw(st.sampled_from(["vllm", "sglang"]))
    engine = st.builds(
        Engine,
        kind=st.just(kind),
        options=st.just(f"engine={kind}"),
        faults=several,
        token_seconds=st.sampled_from([0.0, 0.1]),
        first_token_seconds=st.sampled_from([0.0, 1.0]),
    )
    engines = draw(st.lists(engine, min_size=1, max_size=4))
    names = draw(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=5, unique=True))
    return Plan(
        engines=tuple(engines),
        clients=tuple(draw(st.lists(clients(faults), min_size=1, max_size=6))),
        settings=PATIENCE | {name: draw(SETTINGS[name]) for name in names},
        cuts=draw(st.none() | st.integers(0, 1000)),
        luck=draw(st.integers(0, 100)),
        pipe_bytes=draw(st.sampled_from([2000, 64 * 1024])),
        happenings=tuple(draw(st.lists(happenings(len(engines)), max_size=2))),
    )


@given(st.random_module(), plans())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_promises_hold_under_faults(schedule: object, plan: Plan) -> None:
    simulate(plan)


def test_every_kind_of_fault_is_drawn() -> None:
    halves = {kind.name for kind in KINDS.values() if kind.family == "half"}
    assert set(FAULTS) == set(KINDS) - UNDRAWN - halves
