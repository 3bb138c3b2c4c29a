"""One worker from its first probe to its removal, with every order of probes and drains."""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum

from attrs import evolve, frozen

from statemachines.chart import Chart
from statemachines.explore import Model
from statemachines.worker import WORKER
from statemachines.worker import WorkerState as S
from statemachines.worlds.standin import fire, lives_on

__all__ = ["worker"]

#: Probes in a row that it takes, either way: one is enough in some fleets, two are not in most.
THRESHOLDS = (1, 3)
PROBES = 7
DRAINS = 2


@frozen(cache_hash=True)
class World:
    threshold: int
    state: Enum
    #: In a row, up to the threshold.
    passes: int = 0
    failures: int = 0
    probes_to_come: int = PROBES
    drains_to_come: int = DRAINS
    #: Ghost: since it was added, or asked to serve again.
    ever_passed: bool = False
    #: Ghost: somebody has asked it to drain.
    was_drained: bool = False
    #: Its probes run: what lives in the scope of the chart.
    is_probed: bool = True


def worker(chart: Chart = WORKER, *, probes: int = PROBES, drains: int = DRAINS) -> Model[World]:
    """The model of one worker's life, on this chart."""
    return _Worker(chart, probes, drains).model()


@frozen(eq=False)
class _Worker:
    chart: Chart
    probes: int
    drains: int

    def model(self) -> Model[World]:
        return Model(
            name="one worker",
            starts=tuple(map(self.start, THRESHOLDS)),
            steps=self.steps,
            is_over=lambda w: w.state is S.GONE,
            always=ALWAYS,
            between=BETWEEN,
            sometimes=SOMETIMES,
            eventually=EVENTUALLY,
            whenever=WHENEVER,
            show=show,
        )

    def start(self, threshold: int) -> World:
        return World(
            threshold,
            self.chart.initial,
            probes_to_come=self.probes,
            drains_to_come=self.drains,
            is_probed=self.chart.initial in self.chart.scopes["probed"],
        )

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        if world.state is S.GONE:
            return
        if world.probes_to_come > 0 and world.is_probed:
            left = evolve(world, probes_to_come=world.probes_to_come - 1)
            yield "probe_passed", self.passed(left)
            yield "probe_failed", self.failed(left)
        if world.drains_to_come > 0:
            left = evolve(world, drains_to_come=world.drains_to_come - 1, was_drained=True)
            yield "drain_asked", self.told(left, "drain_asked")
        if world.state is S.DRAINING:
            yield "drain_cancelled", evolve(self.told(world, "drain_cancelled"), ever_passed=False)
        yield "removed", self.told(world, "removed")

    def passed(self, world: World) -> World:
        passes = min(world.passes + 1, world.threshold)
        return self.told(evolve(world, passes=passes, failures=0, ever_passed=True), "probe_passed")

    def failed(self, world: World) -> World:
        failures = min(world.failures + 1, world.threshold)
        return self.told(evolve(world, passes=0, failures=failures), "probe_failed")

    def told(self, world: World, fact: str) -> World:
        edge = fire(
            self.chart,
            world.state,
            fact,
            passed_enough=world.passes >= world.threshold,
            failed_enough=world.failures >= world.threshold,
        )
        is_probed = lives_on(edge, "probed", world.is_probed)
        return evolve(world, state=edge.target, is_probed=is_probed)


def show(world: World) -> Mapping[str, str]:
    """The columns of a printed path."""
    return {
        "worker": str(world.state.value),
        "passes": str(world.passes),
        "failures": f"{world.failures} of {world.threshold}",
    }


#### What must hold

ALWAYS: Mapping[str, Callable[[World], bool]] = {
    "a worker that never passed a probe is neither ready nor unhealthy": lambda w: (
        w.ever_passed or w.state not in (S.READY, S.UNHEALTHY)
    ),
    "a ready worker has not failed enough probes in a row": lambda w: (
        w.state is not S.READY or w.failures < w.threshold
    ),
    "an unhealthy worker has not passed enough probes in a row": lambda w: (
        w.state is not S.UNHEALTHY or w.passes < w.threshold
    ),
    "whoever is not gone is probed, and nobody else": lambda w: (
        w.is_probed is (w.state is not S.GONE)
    ),
    "nobody drains who was not asked to": lambda w: w.state is not S.DRAINING or w.was_drained,
    "probing is what has not passed a probe": lambda w: (
        w.state is not S.PROBING or not w.ever_passed
    ),
}

BETWEEN: Mapping[str, Callable[[World, str, World], bool]] = {
    "a draining worker drains until it is removed or asked to serve": lambda w, word, after: (
        w.state is not S.DRAINING
        or after.state is S.DRAINING
        or word in ("removed", "drain_cancelled")
    ),
    "it becomes ready by passing a probe": lambda w, word, after: (
        w.state is S.READY or after.state is not S.READY or word == "probe_passed"
    ),
    "one failed probe does not make a ready worker unhealthy": lambda w, word, after: (
        after.state is not S.UNHEALTHY or w.state is S.UNHEALTHY or after.failures >= w.threshold
    ),
    "one passed probe does not make an unhealthy worker ready": lambda w, word, after: (
        not (w.state is S.UNHEALTHY and after.state is S.READY) or after.passes >= w.threshold
    ),
    "a probe neither drains nor removes": lambda w, word, after: (
        not word.startswith("probe_")
        or w.state is S.DRAINING
        or after.state not in (S.DRAINING, S.GONE)
    ),
    "what is removed is gone": lambda w, word, after: (
        (word == "removed") is (after.state is S.GONE)
    ),
    "whoever is asked to drain drains": lambda w, word, after: (
        word != "drain_asked" or after.state is S.DRAINING
    ),
}

SOMETIMES: Mapping[str, Callable[[World], bool]] = {
    "it becomes ready with its first passed probe": lambda w: (
        w.state is S.READY and w.passes == 1 and w.failures == 0
    ),
    "it becomes unhealthy": lambda w: w.state is S.UNHEALTHY,
    "it comes back after it was unhealthy": lambda w: (
        w.state is S.READY and w.passes >= w.threshold
    ),
    "it serves again after a drain": lambda w: w.state is S.READY and w.was_drained,
    "it is removed while it drains": lambda w: w.state is S.GONE and w.was_drained,
}

EVENTUALLY: Mapping[str, Callable[[World], bool]] = {
    "a worker is gone, and nobody probes it": lambda w: w.state is S.GONE and not w.is_probed,
}

WHENEVER: Mapping[str, tuple[Callable[[World], bool], Callable[[World], bool]]] = {
    "whoever drains is gone, or was asked to serve again": (
        lambda w: w.state is S.DRAINING,
        lambda w: w.state in (S.GONE, S.PROBING),
    ),
    "an unhealthy worker comes back, drains or is gone": (
        lambda w: w.state is S.UNHEALTHY,
        lambda w: w.state in (S.READY, S.DRAINING, S.GONE),
    ),
}
