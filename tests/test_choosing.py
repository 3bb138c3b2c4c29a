"""Policies: fair, never twice the same, never past a shut breaker unless all are shut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.choosing import LINES_MAX, Choice, Chooser, RoundRobin, make_chooser
from router.config import Settings
from router.worker import Fleet, Worker
from router.workerspec import WorkerSpec
from statemachines.breaker import BreakerState

POLICIES = ["round_robin", "random", "least_load", "power_of_two"]
every_policy = pytest.mark.parametrize("policy", POLICIES)


def make_workers(count: int) -> tuple[Worker, ...]:
    fleet = Fleet(Settings())
    return tuple(fleet.add(WorkerSpec.of(f"http://127.0.0.1:{9000 + n}")) for n in range(count))


def shut(worker: Worker) -> None:
    for _ in range(3):
        worker.breaker.acquire_anyway(0.0).close("failure", 0.0)
    assert worker.breaker.state is BreakerState.OPEN


def chosen(chooser: Chooser, candidates: Sequence[Worker], model: str | None = None) -> Worker:
    choice = chooser.choose(candidates, 0.0, model=model)
    assert choice is not None
    choice.permit.close("success", 0.0)
    return choice.worker


@every_policy
def test_nobody_to_choose_from(policy: str) -> None:
    assert make_chooser(policy).choose((), 0.0) is None


@every_policy
def test_what_was_tried_is_not_tried_again(policy: str) -> None:
    workers = make_workers(3)
    chooser = make_chooser(policy, Random(1))
    tried: list[Worker] = []

    while choice := chooser.choose(workers, 0.0, tried):
        tried.append(choice.worker)

    assert sorted(worker.id for worker in tried) == sorted(worker.id for worker in workers)


@every_policy
def test_idle_workers_get_equal_shares(policy: str) -> None:
    workers = make_workers(4)
    chooser = make_chooser(policy, Random(1))

    shares = Counter(chosen(chooser, workers).id for _ in range(4000))

    assert all(900 <= shares[worker.id] <= 1100 for worker in workers)


@every_policy
def test_a_shut_breaker_is_passed_over(policy: str) -> None:
    workers = make_workers(3)
    chooser = make_chooser(policy, Random(1))
    shut(workers[1])

    ids = {chosen(chooser, workers).id for _ in range(50)}

    assert ids == {workers[0].id, workers[2].id}


@every_policy
def test_when_all_breakers_are_shut_one_is_used_anyway_and_it_is_said(policy: str) -> None:
    workers = make_workers(3)
    chooser = make_chooser(policy, Random(1))
    for worker in workers:
        shut(worker)

    choices = [chooser.choose(workers, 0.0) for _ in range(60)]

    assert all(choice is not None and choice.forced for choice in choices)
    assert {choice.worker for choice in choices if choice} == set(workers)


@every_policy
def test_a_forced_choice_does_not_return_to_what_was_tried(policy: str) -> None:
    workers = make_workers(2)
    chooser = make_chooser(policy, Random(1))
    for worker in workers:
        shut(worker)

    choice = chooser.choose(workers, 0.0, tried=[workers[0]])

    assert choice is not None
    assert choice.worker is workers[1]
    assert choice.forced


@every_policy
def test_a_cooled_breaker_gets_one_request_and_the_others_go_elsewhere(policy: str) -> None:
    workers = make_workers(2)
    chooser = make_chooser(policy, Random(1))
    shut(workers[0])

    choices = [chooser.choose(workers, 5.0) for _ in range(20)]

    ids = [choice.worker.id for choice in choices if choice]
    assert ids.count(workers[0].id) == 1
    assert not any(choice.forced for choice in choices if choice)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="best_of_all"):
        make_chooser("best_of_all")


#### Round robin


def test_round_robin_takes_turns() -> None:
    workers = make_workers(3)
    chooser = make_chooser("round_robin")

    picks = [chosen(chooser, workers) for _ in range(6)]

    assert picks == [*workers, *workers]


def test_models_take_turns_apart() -> None:
    workers = make_workers(2)
    chooser = make_chooser("round_robin")

    picks = [(model, chosen(chooser, workers, model)) for _ in range(4) for model in "ab"]

    for model in "ab":
        assert [w for m, w in picks if m == model] == [*workers, *workers]


def test_who_stays_keeps_its_turn_when_others_come_and_go() -> None:
    w1, w2, w3, w4 = make_workers(4)
    chooser = make_chooser("round_robin")
    before = [chosen(chooser, (w1, w2, w3)), chosen(chooser, (w1, w2, w3))]

    after = [chosen(chooser, (w1, w3, w4)) for _ in range(3)]

    assert before == [w1, w2]
    assert after == [w3, w1, w4]


@settings(max_examples=30)
@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=2, max_size=40))
def test_nobody_who_stays_is_passed_over_between_two_turns_of_another(
    steps: list[set[int]],
) -> None:
    workers = make_workers(5)
    chooser = make_chooser("round_robin")

    picks = [
        workers.index(chosen(chooser, tuple(workers[number] for number in sorted(present))))
        for present in steps
    ]

    for now, pick in enumerate(picks):
        if pick in picks[:now]:
            last = now - 1 - picks[:now][::-1].index(pick)
            stayed = set.intersection(*steps[last : now + 1])
            assert stayed <= set(picks[last : now + 1])


def test_models_that_clients_make_up_do_not_pile_up() -> None:
    workers = make_workers(2)
    policy = RoundRobin()
    chooser = Chooser(policy)

    for number in range(3 * LINES_MAX):
        chosen(chooser, workers, f"made-up-{number}")

    assert len(policy._lines._lines) <= LINES_MAX


#### By load


@pytest.mark.parametrize("policy", ["least_load", "power_of_two"])
def test_of_two_the_less_loaded_one(policy: str) -> None:
    busy, idle = make_workers(2)
    busy.legs.update(("a", "b"))
    idle.legs.add("c")
    chooser = make_chooser(policy, Random(1))

    assert [chosen(chooser, (busy, idle)) for _ in range(10)] == [idle] * 10


def test_least_load_finds_the_least() -> None:
    workers = make_workers(5)
    for number, worker in enumerate(workers):
        worker.legs.update(range(5 - number))
    chooser = make_chooser("least_load")

    assert chosen(chooser, workers) is workers[4]


def test_power_of_two_never_picks_the_busiest() -> None:
    workers = make_workers(4)
    workers[2].legs.add("leg")
    chooser = make_chooser("power_of_two", Random(1))

    assert workers[2] not in {chosen(chooser, workers) for _ in range(200)}


@pytest.mark.parametrize("policy", ["random", "power_of_two"])
def test_a_seed_fixes_what_is_chosen(policy: str) -> None:
    workers = make_workers(5)

    def run() -> list[Worker]:
        chooser = make_chooser(policy, Random(42))
        return [chosen(chooser, workers) for _ in range(50)]

    assert run() == run()


def test_a_choice_carries_an_open_permit_of_its_worker() -> None:
    workers = make_workers(2)

    choice = make_chooser("round_robin").choose(workers, 0.0)

    assert isinstance(choice, Choice)
    assert choice.permit.is_open
    assert choice.permit.breaker is choice.worker.breaker
