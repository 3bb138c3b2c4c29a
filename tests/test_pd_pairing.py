"""Who is paired with whom, and what is said where there is no pair."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Literal

import pytest

from router.choosing import make_chooser
from router.config import Settings
from router.engines import Knowledge
from router.errors import Refusal
from router.pd.attempt import Places
from router.pd.pairing import BOOTSTRAP, NIXL, PairChoice, Pairing
from router.worker import Fleet, Probe, ProbeOutcome, Worker
from router.workerspec import WorkerSpec
from statemachines.breaker import BreakerState


def pairing_of(fleet: Fleet, protocol: str = "auto", policy: str = "round_robin") -> Pairing:
    return Pairing(
        fleet,
        protocol,
        prefill_chooser=make_chooser(policy, Random(1)),
        make_decode_chooser=lambda: make_chooser(policy, Random(2)),
    )


def join(
    fleet: Fleet,
    name: str,
    *,
    group: str | None = None,
    engine: str = "sglang",
    model: str = "m",
    bootstrap_port: int | None = 8998,
) -> Worker:
    """A ready worker; its role is the first letter of its name."""
    role = {"p": "prefill", "d": "decode", "m": "mixed"}[name[0]]
    port = 1 + len(fleet.all())
    spec = WorkerSpec.of(f"http://h:{port}", id=name, role=role, group=group, engine=engine)
    worker = fleet.add(spec)
    kind: Literal["sglang", "vllm"] = "sglang" if engine == "sglang" else "vllm"
    worker.learn(Knowledge(kind, (model,), bootstrap_port=bootstrap_port))
    worker.probed(Probe(ProbeOutcome.PASSED, 0.0))
    return worker


def names(choice: PairChoice | Refusal) -> tuple[str, str]:
    assert isinstance(choice, PairChoice), choice
    choice.give_back(0.0)
    return choice.prefill.worker.id, choice.decode.worker.id


def code(choice: PairChoice | Refusal) -> str:
    assert isinstance(choice, Refusal), choice
    return choice.code


def shut(*workers: Worker) -> None:
    for worker in workers:
        for _ in range(3):
            worker.breaker.acquire_anyway(0.0).close("failure", 0.0)
        assert worker.breaker.state is BreakerState.OPEN


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_load", "power_of_two"])
def test_decode_comes_from_its_prefills_group(policy: str) -> None:
    fleet = Fleet(Settings())
    for group in ("a", "b", None):
        for name in ("p1", "p2", "d1", "d2", "d3"):
            join(fleet, f"{name}-{group}", group=group)
    pairing = pairing_of(fleet, policy=policy)

    chosen = Counter(names(pairing.choose("m", 0.0)) for _ in range(600))

    assert all(p.split("-")[1] == d.split("-")[1] for p, d in chosen)
    assert len({p for p, _ in chosen}) == 6
    assert len({d for _, d in chosen}) == 9


def test_turns_of_decodes_are_kept_apart_by_group() -> None:
    fleet = Fleet(Settings())
    for name, group in (("p1", "a"), ("p2", "b")):
        join(fleet, name, group=group)
    for name, group in (("d1", "a"), ("d2", "a"), ("d3", "b"), ("d4", "b")):
        join(fleet, name, group=group)
    pairing = pairing_of(fleet)

    chosen = Counter(names(pairing.choose("m", 0.0))[1] for _ in range(8))

    assert chosen == {"d1": 2, "d2": 2, "d3": 2, "d4": 2}


def test_a_prefill_of_an_incomplete_group_is_never_chosen() -> None:
    fleet = Fleet(Settings())
    join(fleet, "p1", group="a")
    join(fleet, "p2", group="orphan")
    join(fleet, "d1", group="a")
    pairing = pairing_of(fleet)

    assert {names(pairing.choose("m", 0.0)) for _ in range(20)} == {("p1", "d1")}


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ((), "no_prefill_workers"),
        (("d1",), "no_prefill_workers"),
        (("p1",), "no_decode_workers"),
        (("p1:a", "d1:b"), "no_compatible_pd_group"),
        (("p1:a", "d1"), "no_compatible_pd_group"),
        (("p1", "d1:a"), "no_compatible_pd_group"),
    ],
)
def test_each_missing_half_has_its_own_word(present: tuple[str, ...], expected: str) -> None:
    fleet = Fleet(Settings())
    for each in present:
        name, _, group = each.partition(":")
        join(fleet, name, group=group or None)
    pairing = pairing_of(fleet)

    assert not pairing.is_complete()
    assert code(pairing.choose("m", 0.0)) == expected


@pytest.mark.parametrize("protocol", ["auto", "sglang-bootstrap", "vllm-nixl"])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("known", [True, False])
def test_a_prefill_that_decodes_ask_for_kv_must_be_found(
    protocol: str, engine: str, known: bool
) -> None:
    fleet = Fleet(Settings())
    join(fleet, "p1", engine=engine, bootstrap_port=8998 if known else None)
    join(fleet, "d1", engine=engine)
    pairing = pairing_of(fleet, protocol)

    needs = protocol == "sglang-bootstrap" or (protocol, engine) == ("auto", "sglang")
    assert pairing.is_complete("m") is (known or not needs)
    if needs and not known:
        assert code(pairing.choose("m", 0.0)) == "no_prefill_workers"


def test_engines_of_two_protocols_are_no_pair_by_themselves() -> None:
    fleet = Fleet(Settings())
    prefill, decode = join(fleet, "p1", engine="sglang"), join(fleet, "d1", engine="vllm")

    auto, fixed = pairing_of(fleet), pairing_of(fleet, NIXL)

    assert (auto.protocol_of(prefill), auto.protocol_of(decode)) == (BOOTSTRAP, NIXL)
    assert code(auto.choose("m", 0.0)) == "no_compatible_pd_group"
    assert names(fixed.choose("m", 0.0)) == ("p1", "d1")


def test_pairs_serve_one_model_together() -> None:
    fleet = Fleet(Settings())
    join(fleet, "p1", model="a")
    join(fleet, "d1", model="b")
    join(fleet, "p2", model="b")
    pairing = pairing_of(fleet)

    assert names(pairing.choose("b", 0.0)) == ("p2", "d1")
    assert code(pairing.choose("a", 0.0)) == "no_decode_workers"


def test_a_worker_that_joins_completes_the_pair_at_once() -> None:
    fleet = Fleet(Settings())
    join(fleet, "p1")
    pairing = pairing_of(fleet)
    assert not pairing.is_complete("m")

    join(fleet, "d1")
    assert pairing.is_complete("m")

    fleet.remove("p1")
    assert not pairing.is_complete("m")


@pytest.mark.parametrize("half", ["p", "d"])
def test_a_pair_is_never_forced(half: str) -> None:
    fleet = Fleet(Settings())
    workers = {name: join(fleet, name) for name in ("p1", "p2", "d1", "d2")}
    shut(*(worker for name, worker in workers.items() if name.startswith(half)))
    pairing = pairing_of(fleet)

    assert code(pairing.choose("m", 0.0)) == "breaker_open"


def test_permits_of_half_a_pair_come_back() -> None:
    fleet = Fleet(Settings())
    prefill, decode = join(fleet, "p1"), join(fleet, "d1")
    shut(prefill, decode)
    cooled = prefill.breaker.cools_at
    decode.breaker.cools_at = cooled + 100.0
    pairing = pairing_of(fleet)

    assert code(pairing.choose("m", cooled)) == "breaker_open"
    assert prefill.breaker.state is BreakerState.HALF_OPEN
    assert prefill.breaker.probe is None


def test_a_group_whose_decodes_are_shut_does_not_hide_another() -> None:
    fleet = Fleet(Settings())
    for name, group in (("p1", "a"), ("p2", "b"), ("d2", "b")):
        join(fleet, name, group=group)
    shut(join(fleet, "d1", group="a"))
    pairing = pairing_of(fleet)

    assert {names(pairing.choose("m", 0.0)) for _ in range(6)} == {("p2", "d2")}


def test_what_failed_a_request_is_not_chosen_for_it_again() -> None:
    fleet = Fleet(Settings())
    workers = {name: join(fleet, name) for name in ("p1", "p2", "d1", "d2")}
    pairing = pairing_of(fleet)
    tried = {workers["p1"], workers["d2"]}

    assert {names(pairing.choose("m", 0.0, tried)) for _ in range(4)} == {("p2", "d1")}
    assert not pairing.has_other("m", {workers["p1"], workers["p2"]})
    assert isinstance(pairing.choose("m", 0.0, {workers["d1"], workers["d2"]}), Refusal)


def test_models_that_only_clients_name_are_not_remembered() -> None:
    fleet = Fleet(Settings())
    join(fleet, "p1")
    join(fleet, "d1")
    pairing = pairing_of(fleet)

    for number in range(100):
        pairing.choose(f"made up {number}", 0.0)

    assert len(pairing._known) <= 2


def test_places_that_are_not_used_give_their_permits_back() -> None:
    fleet = Fleet(Settings())
    join(fleet, "p1")
    decode = join(fleet, "d1")
    shut(decode)
    now = decode.breaker.cools_at
    choice = pairing_of(fleet).choose("m", now)
    assert isinstance(choice, PairChoice)
    while_it_is_out = decode.breaker.try_acquire(now)

    Places(choice).release(now)

    assert while_it_is_out is None
    assert decode.breaker.try_acquire(now) is not None
