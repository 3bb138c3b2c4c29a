"""How real engines die (observed with vLLM 0.32 and SGLang 0.5.23), and what clients see of it."""

from __future__ import annotations

import pytest

from tests.simulate import Client, Engine, Plan, simulate

LONG = Client(tokens=20)


def dying(death: str, kind: str = "vllm") -> tuple[Engine, ...]:
    """An engine that dies in the middle of its first stream, and a healthy one."""
    return (Engine(kind=kind, faults=f"request=1:{death},after_events=8"), Engine(kind=kind))


@pytest.mark.parametrize(
    ("death", "kind", "code"),
    [
        ("core_dies", "vllm", 500),
        ("server_dies", "vllm", "upstream_broken"),
        ("server_dies,reset=true", "vllm", "upstream_broken"),
        ("sigterm_abort", "vllm", "upstream_broken"),
        ("sigterm_hang", "vllm", "upstream_broken"),
        ("sigterm_drain,timeout=0.5", "vllm", "upstream_broken"),
        ("scheduler_dies", "sglang", "upstream_broken"),
        ("server_dies", "sglang", "upstream_broken"),
    ],
)
def test_a_stream_that_dies_with_its_engine_says_so(death: str, kind: str, code: object) -> None:
    outcome = simulate(Plan(engines=dying(death, kind), clients=(LONG,)))

    assert (outcome.one.status, outcome.one.ending) == (200, "cut")
    assert outcome.one.code == code
    assert outcome.one.ended_at < 15


@pytest.mark.parametrize(("death", "kind"), [("sigterm_drain", "vllm"), ("sglang_drain", "sglang")])
def test_a_stream_that_may_finish_finishes(death: str, kind: str) -> None:
    outcome = simulate(Plan(engines=dying(death, kind), clients=(LONG,)))

    assert outcome.one.ending == "clean"


@pytest.mark.parametrize(
    ("death", "kind"),
    [
        ("core_dies", "vllm"),
        ("server_dies", "vllm"),
        ("sigterm_abort", "vllm"),
        ("sigterm_hang", "vllm"),
        ("sigterm_drain", "vllm"),
        ("sglang_drain", "sglang"),
        ("scheduler_dies", "sglang"),
    ],
)
def test_nobody_else_notices(death: str, kind: str) -> None:
    others = tuple(Client(at=2.0 + turn, tokens=4) for turn in range(20))

    outcome = simulate(
        Plan(
            engines=dying(death, kind),
            clients=(LONG, *others),
            settings={"first_token_timeout_secs": 4.0},
        )
    )

    assert [got.status for got in outcome.got] == [200] * 21
    assert {got.ending for got in outcome.got[1:]} == {"clean"}


def test_a_drain_that_probes_do_not_show_costs_retries_only() -> None:
    # vLLM with a shutdown timeout: /health stays 200 while new requests get 500.
    outcome = simulate(
        Plan(
            engines=dying("sigterm_drain"),
            clients=(Client(tokens=60), Client(at=3.0), Client(at=3.2)),
        )
    )

    assert [got.ending for got in outcome.got] == ["clean"] * 3
    assert outcome.count("baton_retries_total", reason="overloaded") >= 1


def test_an_engine_that_comes_back_is_used_again() -> None:
    engines = (Engine(faults="now:server_dies,restart_after=30"), Engine())
    clients = tuple(Client(at=5.0 * turn, tokens=1) for turn in range(14))

    outcome = simulate(Plan(engines=engines, clients=clients, looks=(10.0, 65.0)))

    assert outcome.looks[0].workers["w0"] != "ready"
    assert outcome.looks[1].workers["w0"] == "ready"
    assert outcome.sent[0] >= 3
    assert {got.status for got in outcome.got} == {200}


def test_a_frozen_engine_that_thaws_goes_on() -> None:
    outcome = simulate(Plan(engines=dying("freeze,restart_after=12"), clients=(LONG,)))

    assert outcome.one.ending == "clean"
    assert outcome.one.ended_at > 12


def test_refused_ids_that_kill_an_engine_kill_one_stream_of_ours_only() -> None:
    # SGLang 0.5.23 dies of ids outside its vocabulary.
    poison = Client(
        path="/v1/completions",
        raw_body=b'{"model":"tiny","prompt":[999999],"max_tokens":4,"stream":true}',
    )

    outcome = simulate(
        Plan(
            engines=(Engine(kind="sglang"), Engine(kind="sglang")),
            clients=(poison, Client(at=0.5, tokens=30)),
            settings={"request_max_retries": 0},
        )
    )

    assert outcome.got[0].status == 502
    assert outcome.got[1].ending == "clean"


#### Whoever fails a request is looked at soon


LOOKED_AT: dict[str, tuple[str, str, str]] = {
    "refuses": ("http", "", "faults 0 now:refuse"),
    "cuts": ("http", "cut", ""),
    "cuts in mid-stream": ("http", "cut,after_events=4", ""),
    "is silent": ("http", "hang", ""),
    "is silent in mid-stream": ("http", "hang,after_events=4", ""),
    "is absent": ("nats", "", "leave 0"),
}


@pytest.mark.parametrize("way", LOOKED_AT)
def test_whoever_fails_a_request_is_looked_at_soon(way: str) -> None:
    """Whoever comes next should not have to find out as well."""
    wire, fault, happening = LOOKED_AT[way]
    ill = "path=/health,request=2..:status,code=503"

    outcome = simulate(
        Plan(
            engines=(Engine(faults=f"{fault};{ill}", wire=wire), Engine()),
            clients=(Client(at=1.0, tokens=20),),
            settings={
                "health_check_interval_secs": 900.0,
                "health_failure_threshold": 1,
                "suspect_idle_secs": 0.0,
                "first_token_timeout_secs": 5.0,
                "stream_idle_timeout_secs": 5.0,
            },
            happenings=((0.5, happening),) if happening else (),
            looks=(0.9, 12.0),
        )
    )

    assert [look.workers["w0"] for look in outcome.looks] == ["ready", "unhealthy"]
