"""Workers and the fleet: who is ready for what, and that load is what is alive."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from router.choosing import Choice, make_chooser
from router.config import Settings
from router.engines import Knowledge
from router.worker import DuplicateWorker, Fleet, Probe, ProbeOutcome, UnknownWorker, Worker
from router.workerspec import WorkerSpec
from statemachines import Edge
from statemachines.leg import Verdict
from statemachines.worker import WorkerState

PASSED = Probe(ProbeOutcome.PASSED, at=0.0)
REFUSED = Probe(ProbeOutcome.REFUSED, at=0.0)
TIMED_OUT = Probe(ProbeOutcome.TIMED_OUT, at=0.0)
UNAVAILABLE = Probe(ProbeOutcome.UNAVAILABLE, at=0.0)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(Settings())


def join(fleet: Fleet, worker_id: str, *, role: str = "mixed", models: str = "tiny") -> Worker:
    worker = fleet.add(WorkerSpec.of("http://127.0.0.1:9000", id=worker_id, role=role))
    worker.learn(Knowledge("vllm", tuple(models.split())))
    worker.probed(PASSED)
    return worker


#### Health


def test_a_new_worker_is_ready_with_its_first_good_probe(fleet: Fleet) -> None:
    worker = fleet.add(WorkerSpec.of("http://127.0.0.1:9000"))

    before = worker.state
    worker.probed(PASSED)

    assert before is WorkerState.PROBING
    assert worker.is_ready


def test_a_worker_that_fell_ill_must_pass_twice(fleet: Fleet) -> None:
    worker = join(fleet, "w1")
    for _ in range(3):
        worker.probed(TIMED_OUT)

    ill = worker.state
    worker.probed(PASSED)
    once = worker.state
    worker.probed(PASSED)

    assert (ill, once) == (WorkerState.UNHEALTHY, WorkerState.UNHEALTHY)
    assert worker.is_ready


def test_two_failed_probes_are_a_hiccup(fleet: Fleet) -> None:
    worker = join(fleet, "w1")

    for probe in (TIMED_OUT, UNAVAILABLE, PASSED, TIMED_OUT, REFUSED):
        worker.probed(probe)

    assert worker.is_ready


@pytest.mark.parametrize(
    ("probes", "silent"),
    [
        ([PASSED], False),
        ([REFUSED], True),
        ([TIMED_OUT, TIMED_OUT], False),
        ([TIMED_OUT, TIMED_OUT, TIMED_OUT], True),
        ([UNAVAILABLE] * 5, False),
        ([TIMED_OUT, TIMED_OUT, UNAVAILABLE, TIMED_OUT], False),
        ([REFUSED, PASSED], False),
    ],
)
def test_silence_is_a_refusal_or_timeouts_in_a_row_but_never_a_503(
    fleet: Fleet, probes: list[Probe], silent: bool
) -> None:
    worker = join(fleet, "w1")

    for probe in probes:
        worker.probed(probe)

    assert worker.is_silent is silent


def test_a_draining_worker_is_still_watched(fleet: Fleet) -> None:
    worker = join(fleet, "w1")
    fleet.drain("w1")

    worker.probed(REFUSED)

    assert worker.state is WorkerState.DRAINING
    assert worker.is_silent


#### What it serves


def test_a_learned_engine_fills_in_auto_and_never_overrules_the_operator(fleet: Fleet) -> None:
    auto = fleet.add(WorkerSpec.of("http://127.0.0.1:1"))
    told = fleet.add(WorkerSpec.of("http://127.0.0.1:2", engine="openai"))

    for worker in (auto, told):
        worker.learn(Knowledge("sglang", ("tiny",), context_length=2048))

    assert (auto.engine, told.engine) == ("sglang", "openai")
    assert auto.context_length == 2048


def test_what_an_engine_says_after_a_restart_counts(fleet: Fleet) -> None:
    worker = fleet.add(WorkerSpec.of("http://127.0.0.1:1"))

    for models, context_length in ((("a", "b"), 2048), (("b",), 1024), (("b",), None)):
        worker.learn(Knowledge("vllm", models, context_length=context_length))

        assert (worker.models, worker.context_length) == (models, context_length)


def test_only_ready_workers_of_the_role_and_model_are_candidates(fleet: Fleet) -> None:
    w1 = join(fleet, "w1", models="a b")
    w2 = join(fleet, "w2", models="b")
    join(fleet, "p1", role="prefill", models="a")
    fleet.add(WorkerSpec.of("http://127.0.0.1:9000", id="new"))

    assert fleet.ready("mixed", "a") == (w1,)
    assert fleet.ready("mixed", "b") == (w1, w2)
    assert fleet.ready("mixed", "c") == ()
    assert fleet.ready("mixed") == (w1, w2)


def test_a_worker_that_names_no_models_takes_any(fleet: Fleet) -> None:
    worker = join(fleet, "w1", models="")

    assert fleet.ready("mixed", "whatever") == (worker,)
    assert fleet.knows("whatever")


def test_candidates_are_the_same_tuple_until_something_changes(fleet: Fleet) -> None:
    worker = join(fleet, "w1")
    first = fleet.ready("mixed", "tiny")

    worker.probed(PASSED)

    assert fleet.ready("mixed", "tiny") is first


def test_every_change_shows_in_the_candidates(fleet: Fleet) -> None:
    w1 = join(fleet, "w1")
    seen = [fleet.ready("mixed", "tiny")]

    w2 = join(fleet, "w2")
    seen.append(fleet.ready("mixed", "tiny"))
    w1.learn(Knowledge("vllm", ("other",)))
    seen.append(fleet.ready("mixed", "tiny"))
    fleet.drain("w2")
    seen.append(fleet.ready("mixed", "tiny"))

    assert seen == [(w1,), (w1, w2), (w2,), ()]
    assert fleet.models() == ("other",)


def test_models_that_clients_make_up_are_not_remembered(fleet: Fleet) -> None:
    join(fleet, "w1", models="tiny")
    join(fleet, "w2", models="")

    for number in range(1000):
        fleet.ready("mixed", f"made-up-{number}")

    assert len(fleet._ready) == 0


def test_a_model_of_an_ill_worker_is_known_and_a_wrong_name_is_not(fleet: Fleet) -> None:
    worker = join(fleet, "w1")
    for _ in range(3):
        worker.probed(REFUSED)

    assert not fleet.ready("mixed", "tiny")
    assert fleet.knows("tiny")
    assert not fleet.knows("wrong")


def test_any_model_may_be_known_while_a_worker_has_yet_to_answer(fleet: Fleet) -> None:
    join(fleet, "w1")
    fleet.add(WorkerSpec.of("http://127.0.0.1:9001", id="new"))

    assert fleet.knows("other")


#### Coming and going


def test_a_taken_id_is_refused(fleet: Fleet) -> None:
    join(fleet, "w1")

    with pytest.raises(DuplicateWorker, match="w1"):
        fleet.add(WorkerSpec.of("http://127.0.0.1:9001", id="w1"))


@pytest.mark.parametrize("act", ["get", "remove", "drain"])
def test_an_unknown_id_is_refused(fleet: Fleet, act: str) -> None:
    with pytest.raises(UnknownWorker, match="worker w9: not in the fleet"):
        getattr(fleet, act)("w9")


def test_a_removed_worker_is_gone_and_its_legs_run_on(fleet: Fleet) -> None:
    worker = join(fleet, "w1")
    worker.legs.add("leg")

    fleet.remove("w1")

    assert worker.is_gone
    assert worker.inflight == 1
    assert fleet.all() == ()
    assert fleet.ready("mixed", "tiny") == ()


def test_a_late_probe_of_a_removed_worker_changes_nothing(fleet: Fleet) -> None:
    worker = join(fleet, "w1")
    fleet.remove("w1")

    worker.probed(PASSED)

    assert worker.is_gone


def test_added_again_it_is_another_worker(fleet: Fleet) -> None:
    old = join(fleet, "w1")
    for _ in range(3):
        old.breaker.acquire_anyway(0.0).close("failure", 0.0)
    fleet.remove("w1")

    new = fleet.add(WorkerSpec.of("http://127.0.0.1:9000", id="w1"))

    assert new is not old
    assert new.state is WorkerState.PROBING
    assert new.breaker.try_acquire(0.0) is not None


def test_joining_and_leaving_are_told(fleet: Fleet) -> None:
    told: list[str] = []
    fleet.on_joined.append(lambda worker: told.append(f"+{worker.id}"))
    fleet.on_left.append(lambda worker: told.append(f"-{worker.id}"))

    join(fleet, "w1")
    fleet.remove("w1")

    assert told == ["+w1", "-w1"]


def test_draining_twice_is_fine(fleet: Fleet) -> None:
    worker = join(fleet, "w1")

    fleet.drain("w1")
    fleet.drain("w1")

    assert worker.state is WorkerState.DRAINING


def test_a_cancelled_drain_serves_again_after_a_good_probe(fleet: Fleet) -> None:
    worker = join(fleet, "w1")
    fleet.drain("w1")

    fleet.cancel_drain("w1")
    before = fleet.ready("mixed")
    worker.probed(PASSED)

    assert before == ()
    assert fleet.ready("mixed") == (worker,)


def test_its_moves_are_told_after_the_candidates_have_changed() -> None:
    seen: list[tuple[str, int]] = []

    def listen(worker: Worker, edge: Edge) -> None:
        if edge.source is not edge.target:
            seen.append((edge.target.value, len(watched.ready("mixed"))))

    watched = Fleet(Settings(), worker_listeners=(listen,))
    join(watched, "w1")
    watched.drain("w1")
    watched.remove("w1")

    assert seen == [("ready", 1), ("draining", 0), ("gone", 0)]


#### Load (complaints C12, C13)


def live_dispatches(fleet: Fleet, rng: Random) -> Iterator[int]:
    """A random life of dispatches, failures, retries and cancellations; yields how many live."""
    chooser = make_chooser("least_load", rng)
    live: list[tuple[Choice, object]] = []
    verdicts: tuple[Verdict, ...] = ("success", "failure", "neutral")
    for step in range(2000):
        now = float(step)
        if live and rng.random() < 0.5:
            ended, leg = live.pop(rng.randrange(len(live)))
            ended.worker.legs.discard(leg)
            ended.permit.close(rng.choice(verdicts), now)
        elif choice := chooser.choose(fleet.ready("mixed", "tiny"), now, model="tiny"):
            leg = object()
            choice.worker.legs.add(leg)
            live.append((choice, leg))
        yield len(live)
    for ended, leg in live:
        ended.worker.legs.discard(leg)
        ended.permit.close("neutral", 2000.0)


def test_the_sum_of_all_loads_is_what_is_alive_at_every_step(fleet: Fleet) -> None:
    for number in range(4):
        join(fleet, f"w{number}")

    for live in live_dispatches(fleet, Random(7)):
        assert sum(worker.inflight for worker in fleet.all()) == live

    assert [worker.inflight for worker in fleet.all()] == [0, 0, 0, 0]
