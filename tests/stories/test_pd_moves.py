"""A lost decode goes on on a fresh pair, as if its continuation were a request of its own."""

from __future__ import annotations

import pytest

from tests.simulate import Client, Engine, Outcome, Plan, simulate

KINDS = ["sglang", "vllm"]
CUT = "cut,after_events=5"


def pairs(kind: str, *, prefill: tuple[str, str] = ("", ""), decode: tuple[str, str]) -> Plan:
    """Two prefills and two decodes, with these faults."""
    roles = (("prefill", prefill), ("decode", decode))
    engines = tuple(
        Engine(kind=kind, role=role, faults=fault) for role, faults in roles for fault in faults
    )
    return Plan(engines=engines, settings={"migration_limit": 1})


def moved(plan: Plan, client: Client) -> Outcome:
    outcome = simulate(Plan(engines=plan.engines, clients=(client,), settings=plan.settings))
    assert (outcome.one.status, outcome.one.ending) == (200, "clean")
    assert outcome.one.text in [each.text for each in outcome.one.direct]
    return outcome


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
def test_a_lost_decode_goes_on_on_a_fresh_pair(kind: str, chat: bool) -> None:
    outcome = moved(pairs(kind, decode=(CUT, "")), Client(chat=chat))

    assert sum(outcome.moves.values()) == 1
    assert outcome.facts == [
        "admitted", "answered", "first_token", "leg_lost", "admitted", "first_token", "completed",
    ]  # fmt: skip
    for prefill in ("w0", "w1"):
        labels = {"worker": prefill, "role": "prefill", "outcome": "success"}
        assert outcome.count("baton_worker_requests_total", **labels) == 1
    assert outcome.count("baton_stream_outcome_total", worker="w2", outcome="migrated") == 1


def test_the_fresh_pair_has_a_room_and_a_name_of_its_own() -> None:
    outcome = moved(pairs("sglang", decode=(CUT, "")), Client(chat=False))

    first, second = (
        {(body["bootstrap_room"], body["rid"]) for n in pair for body in outcome.asked(n)}
        for pair in ((0, 2), (1, 3))
    )
    assert len(first) == len(second) == 1
    assert not first & second


def test_a_continuation_from_ids_is_handed_over_like_any_prompt() -> None:
    outcome = moved(pairs("vllm", decode=(CUT, "")), Client())

    assert outcome.moves == {"stream_broken exact": 1}
    (prefill,), (decode,) = outcome.asked(1), outcome.asked(3)
    for body in (prefill, decode):
        params = body["kv_transfer_params"]
        assert isinstance(params, dict)
        assert params["prompt_token_ids"]
    assert prefill["max_tokens"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_s_own_name_does_not_go_on(kind: str) -> None:
    outcome = moved(pairs(kind, decode=(CUT, "")), Client(extra={"rid": "mine"}))

    assert outcome.asked(2)[0]["rid"] == "mine"
    assert outcome.asked(3)[0].get("rid") != "mine"


def test_the_prefill_of_a_fresh_pair_may_fail_too() -> None:
    status = "status,code=500"
    plan = pairs("sglang", prefill=("", status), decode=(CUT, ""))
    third = Engine(kind="sglang", role="prefill")
    plan = Plan(engines=(*plan.engines, third), settings=plan.settings)

    outcome = moved(plan, Client(chat=False))

    assert outcome.facts[3:] == [
        "leg_lost", "admitted", "prefill_failed", "admitted", "first_token", "completed",
    ]  # fmt: skip
    assert outcome.count("baton_pd_prefill_failures_total", reason="status") == 1


def test_where_no_pair_is_left_the_stream_fails() -> None:
    plan = pairs("sglang", decode=(CUT, ""))
    plan = Plan(engines=plan.engines[:3], settings=plan.settings)

    outcome = simulate(plan)

    assert (outcome.one.status, outcome.one.ending) == (200, "cut")
    assert outcome.stuck == {"no_candidate": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_draining_decode_gives_its_stream_to_another_pair(kind: str) -> None:
    plan = pairs(kind, decode=("", ""))
    plan = Plan(
        engines=plan.engines,
        clients=(Client(tokens=30),),
        settings=plan.settings,
        happenings=((2.5, "drain 2 0"),),
    )

    outcome = simulate(plan)

    assert (outcome.one.status, outcome.one.ending) == (200, "clean")
    assert set(outcome.moves) <= {"worker_draining exact", "worker_draining text"}
    assert outcome.moves
