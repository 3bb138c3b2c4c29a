"""Plans drawn by seeds: whatever goes wrong, in whatever order, the promises hold.

The standing promises of every simulated run are the assertion. A seed that breaks one is told with
the smallest plan that breaks it in the same way, as a line to paste; found bugs become stories.
`--seed N` draws other plans.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from multiprocessing import get_context
from time import process_time

import pytest

from router.migration.record import Record
from router.sim.fault_kinds import KINDS
from tests.plans import Client, Engine, Plan
from tests.shrinking import simulate_small
from tests.simulate import simulate
from tests.swarm import COMPANIES, FAULTS, FEATURES, OF_HALVES, UNDRAWN, features, swarm

SEEDS, SEEDS_AT_NIGHT = 1000, 20_000
#: Of one test; of one task of a process.
CHUNK, TASK = 100, 100
#: Seeds between those of `--seed N` and of `--seed N+1`.
APART = 1_000_000
PROCESSES = 2
#: Made and not freed before Python looks for cycles.
OBJECTS = 100_000
#: Runs of the same plans in two processes must tell the same, whatever orders their sets have.
TOLD_TWICE = 15
#: Of a promise that is looked at afterwards, and of one that is looked at inside.
FAILURES = (AssertionError, ExceptionGroup)


@pytest.fixture
def first(request: pytest.FixtureRequest) -> int:
    """The first seed."""
    return int(request.config.getoption("--seed")) * APART


@contextmanager
def rare_collections() -> Iterator[None]:
    """A plan leaves little behind, and looking for it often takes a sixth of the time."""
    usual = gc.get_threshold()
    gc.set_threshold(OBJECTS, *usual[1:])
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)


def failures(seeds: Sequence[int]) -> Iterator[Exception]:
    """How the plans of these seeds break promises, each made smaller."""
    with rare_collections():
        for seed in seeds:
            try:
                simulate_small(swarm(seed))
            except Exception as error:
                error.add_note(f"made smaller from simulate(swarm({seed}))")
                yield error


def told(seeds: Sequence[int]) -> tuple[float, list[str]]:
    """The seconds of one core that these seeds took, and the failures in words."""
    began = process_time()
    words = ["\n".join([repr(each), *each.__notes__]) for each in failures(seeds)]
    return process_time() - began, words


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(SEEDS // CHUNK))
def test_promises_hold_for_every_seed(first: int, chunk: int) -> None:
    start = first + chunk * CHUNK

    for failure in failures(range(start, start + CHUNK)):
        raise failure


@pytest.mark.nightly
def test_promises_hold_for_twenty_thousand_seeds(first: int) -> None:
    tasks = [range(at, at + TASK) for at in range(first, first + SEEDS_AT_NIGHT, TASK)]

    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        done = list(pool.map(told, tasks))
    seconds = sum(each for each, _ in done)
    print(f"{SEEDS_AT_NIGHT} plans, {SEEDS_AT_NIGHT / seconds:.0f} a second of one core")
    broken = [words for _, several in done for words in several]
    assert not broken, "\n\n".join([f"{len(broken)} plans", *broken])


#### What luck draws


def test_every_kind_of_fault_is_drawn() -> None:
    halves = {kind.name for kind in KINDS.values() if kind.family == "half"}
    assert set(FAULTS) == set(KINDS) - UNDRAWN - halves
    assert set(OF_HALVES) == halves


def test_everything_is_on_in_some_plans_and_off_in_others() -> None:
    on = Counter(name for seed in range(SEEDS) for name in features(seed))

    assert all(20 < on[name] < SEEDS - 20 for name in FEATURES)
    assert all(company <= set(FEATURES) for company in COMPANIES)


@pytest.mark.slow
def test_luck_meets_what_matters() -> None:
    outcomes = [simulate(swarm(seed)) for seed in range(60)]

    endings = Counter(got.ending for outcome in outcomes for got in outcome.got)
    assert endings["clean"] > 40
    assert min(endings[each] for each in ("cut", "left")) > 2
    facts = {edge.fact for each in outcomes for t in each.tickets for _, edge in t.history}
    assert facts >= {"client_gone", "handed_back", "prefill_failed", "leg_stalled"}
    assert sum(sum(outcome.moves.values()) for outcome in outcomes) > 4


#### The same again


def transcripts() -> Iterator[bytes]:
    for seed in range(TOLD_TWICE):
        yield simulate(swarm(seed)).transcript.encode()


@pytest.mark.slow
def test_a_seed_gives_the_same_run_in_every_process() -> None:
    here = [sha256(each).hexdigest() for each in transcripts()]

    there = subprocess.run(
        [sys.executable, "-m", __name__],
        env=os.environ | {"PYTHONHASHSEED": "77"},
        capture_output=True,
        check=True,
        encoding="utf-8",
    )
    different = [n for n, one in enumerate(there.stdout.split()) if one != here[n]]
    assert not different, f"runs of these seeds are not the same twice: {different}"
    assert len(there.stdout.split()) == len(here)


#### A failure


def test_a_plan_is_written_as_python_and_in_short() -> None:
    plan = swarm(3)

    assert eval(repr(plan)) == plan
    assert repr(Plan(clients=(Client(at=1.0),))) == "Plan(clients=(Client(at=1.0),))"
    assert repr(Plan(engines=(Engine(),))) == "Plan(engines=(Engine(),))"


@pytest.mark.slow
def test_a_bug_is_told_as_a_line_that_fails_with_it_and_passes_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        keep = Record.add_ids
        patch.setattr(Record, "add_ids", lambda record, ids: keep(record, ids[1:]))
        with pytest.raises(FAILURES) as caught:
            raise next(failures(range(200)))
        line, origin = caught.value.__notes__
        with pytest.raises(FAILURES):
            eval(line)

    assert eval(line)
    assert "\n" not in line
    assert len(line) < 250
    assert origin.startswith("made smaller from simulate(swarm(")


if __name__ == "__main__":
    for each in transcripts():
        print(sha256(each).hexdigest())
