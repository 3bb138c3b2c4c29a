"""Stories of prefill/decode pairs, told once more with both halves behind NATS."""

from __future__ import annotations

import pytest

from tests.simulate import Client, Engine, Outcome, Plan, simulate
from tests.stories.test_pd_moves import *  # noqa: F403  # the stories themselves
from tests.stories.test_pd_moves import CUT, KINDS, pairs


@pytest.fixture(autouse=True)
def _wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulate.WIRE", "nats")


#### Nobody there

KILLED = ((1.5, "leave 0"),)


def ask(kind: str, *, stay: int, happenings: tuple[tuple[float, str], ...], at: float) -> Outcome:
    """Requests to two prefills and two decodes; `stay` of the prefills that go are there."""
    return simulate(
        Plan(
            engines=tuple(
                Engine(kind=kind, role=role)
                for role, number in (("prefill", stay), ("decode", 2))
                for _ in range(number)
            ),
            clients=tuple(
                Client(at=at + number / 100, tokens=3, stream=number % 2 == 0)
                for number in range(8)
            ),
            settings={"pd_max_retries": 0, "breaker_failure_threshold": 1},
            happenings=happenings,
            looks=(at + 8.0,),
        )
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_absent_prefill_is_passed_over_and_nobody_pays_for_it(kind: str) -> None:
    outcome = ask(kind, stay=2, happenings=KILLED, at=1.6)

    assert [(each.status, each.ending) for each in outcome.got] == [(200, "clean")] * 8
    assert outcome.count("baton_retries_total", reason="passed_over") > 0
    assert set(outcome.look.breakers.values()) == {"closed"}
    for name, role in (("w0", "prefill"), ("w2", "decode"), ("w3", "decode")):
        labels = {"worker": name, "role": role}
        assert not outcome.count("baton_worker_requests_total", **labels, outcome="error")
    assert outcome.look.running == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_where_no_prefill_is_there_at_all_the_client_is_told_so(kind: str) -> None:
    outcome = ask(kind, stay=1, happenings=KILLED, at=1.6)

    assert [(each.status, each.code) for each in outcome.got] == [(502, "upstream_unreachable")] * 8


@pytest.mark.parametrize("kind", KINDS)
def test_an_absent_prefill_is_passed_over_in_a_move(kind: str) -> None:
    plan = pairs(kind, prefill=("", ""), decode=(CUT, ""))
    plan = Plan(
        engines=(*plan.engines, Engine(kind=kind, role="prefill")),
        clients=(Client(tokens=20),),
        settings=plan.settings | {"breaker_failure_threshold": 1},
        happenings=((1.2, "leave 1"),),
        looks=(8.0,),
    )

    outcome = simulate(plan)

    assert (outcome.one.status, outcome.one.ending) == (200, "clean")
    assert outcome.facts[3:] == [
        "leg_lost", "admitted", "passed_over", "admitted", "first_token", "completed",
    ]  # fmt: skip
    assert sum(outcome.moves.values()) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_decode_is_cancelled_where_its_prefill_is_not_there(stream: bool) -> None:
    outcome = simulate(
        Plan(
            engines=tuple(Engine(kind="sglang", role=role) for role in ("prefill", "decode")),
            clients=(Client(at=1.6, tokens=50, stream=stream),),
            happenings=KILLED,
            looks=(3.0,),
        )
    )

    assert (outcome.one.status, outcome.one.code) == (502, "upstream_unreachable")
    assert outcome.one.ended_at < 2.0
    assert outcome.look.running == [0, 0]
    for worker, role in (("w0", "prefill"), ("w1", "decode")):
        labels = {"worker": worker, "role": role, "outcome": "cancelled"}
        assert outcome.count("baton_worker_requests_total", **labels) == 1


#### What is lost on its way


def lose_a_frame(kind: str, *, pairs: int) -> Outcome:
    """The first word of a prefill is lost, while another request is with the next pair."""
    clients = (Client(at=1.2, tokens=4), Client(at=1.3, tokens=4))
    return simulate(
        Plan(
            engines=tuple(
                Engine(kind=kind, role=role) for role in ("prefill", "decode") for _ in range(pairs)
            ),
            clients=clients[:pairs],
            settings={"pd_max_retries": 1},
            happenings=((1.199, "lose 0"),),
        )
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_whose_answer_was_lost_is_asked_again(kind: str) -> None:
    """Nobody is to blame, and there is no other."""
    outcome = lose_a_frame(kind, pairs=1)

    assert (outcome.one.status, outcome.one.ending) == (200, "clean")
    assert outcome.facts[:3] == ["admitted", "prefill_failed", "admitted"]
    assert len(outcome.asked(0)) == 2


def test_a_pair_that_has_lost_nothing_comes_first() -> None:
    """Also where it has more to do."""
    outcome = lose_a_frame("vllm", pairs=2)

    assert [(got.status, got.ending) for got in outcome.got] == [(200, "clean")] * 2
    assert [len(outcome.asked(number)) for number in range(2)] == [1, 2]
