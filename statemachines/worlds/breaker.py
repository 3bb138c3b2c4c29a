"""One breaker and the requests that hold its permits, several at a time.

A permit remembers what it was when it was taken. Once the breaker has moved, every permit that is
out is an old one, whose end is told as the plain fact; a closed breaker is not told it at all.
Several probes can be out at once: one that is overdue is followed by the next, and any of them may
still decide. Only the latest keeps others waiting.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum

from attrs import evolve, frozen

from statemachines.breaker import BREAKER
from statemachines.breaker import BreakerState as S
from statemachines.chart import Chart
from statemachines.explore import Model
from statemachines.worlds.standin import fire

__all__ = ["breaker"]

THRESHOLD = 2
REQUESTS = 6
#: Permits that decide about a half-open breaker.
PROBES = ("probe", "overdue")
VERDICTS = ("succeeded", "failed", "said_nothing")


@frozen(cache_hash=True)
class World:
    state: Enum
    #: Failures in a row.
    failures: int = 0
    #: The cooldown is over; while a probe is out, the probe is overdue.
    has_cooled: bool = False
    #: What is out: "plain", "probe", "overdue" (a probe that was followed by another), "forced",
    #: or "old" since the breaker has moved. Sorted.
    permits: tuple[str, ...] = ()
    to_come: int = REQUESTS


def breaker(chart: Chart = BREAKER, *, requests: int = REQUESTS) -> Model[World]:
    """The model of one breaker, on this chart."""
    return _Breaker(chart, requests).model()


@frozen(eq=False)
class _Breaker:
    chart: Chart
    requests: int

    def model(self) -> Model[World]:
        return Model(
            name="one breaker",
            starts=(World(self.chart.initial, to_come=self.requests),),
            steps=self.steps,
            is_over=lambda w: w.to_come == 0 and not w.permits,
            always=ALWAYS,
            between=BETWEEN,
            sometimes=SOMETIMES,
            eventually=EVENTUALLY,
            whenever=WHENEVER,
            show=show,
        )

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        if world.to_come > 0:
            yield self.asked(evolve(world, to_come=world.to_come - 1))
        if world.state is not S.CLOSED and not world.has_cooled:
            yield "cooldown over", evolve(world, has_cooled=True)
        for permit in dict.fromkeys(world.permits):
            for verdict in VERDICTS:
                yield f"{permit} {verdict}", self.settled(world, permit, verdict)

    def asked(self, world: World) -> tuple[str, World]:
        """A request wants a permit; it is sent anyway when it gets none."""
        if world.state is S.CLOSED:
            return "plain permit taken", _with(world, "plain")
        waiting = world.state is S.OPEN or "probe" in world.permits
        if waiting and not world.has_cooled:
            return "sent anyway", _with(world, "forced")
        if world.state is S.OPEN:
            world = self.told(world, "cooled_down")
        followed = tuple("overdue" if each == "probe" else each for each in world.permits)
        asked = evolve(world, has_cooled=False, permits=followed)
        return "probe permit taken", _with(asked, "probe")

    def settled(self, world: World, permit: str, verdict: str) -> World:
        permits = list(world.permits)
        permits.remove(permit)
        left = evolve(world, permits=tuple(permits))
        if permit in PROBES:
            return self.told(left, f"probe_{verdict}")
        if permit == "forced" and verdict == "succeeded":
            return self.told(left, "forced_succeeded")
        if permit == "old" and world.state is S.CLOSED:
            return left
        return self.told(left, verdict)

    def told(self, world: World, fact: str) -> World:
        failures = world.failures
        if fact == "probe_failed" or (fact == "failed" and world.state is S.CLOSED):
            failures = min(failures + 1, THRESHOLD)
        edge = fire(self.chart, world.state, fact, trips=failures >= THRESHOLD)
        if edge.target is S.CLOSED and fact.endswith("succeeded"):
            failures = 0
        after = evolve(world, failures=failures, state=edge.target)
        if edge.target is edge.source:
            return after
        # A probe is one as long as the breaker is on probation, any other permit until it moves.
        kept = [
            each if each in PROBES and "probation" not in edge.leaves else "old"
            for each in after.permits
        ]
        return evolve(after, has_cooled=False, permits=tuple(sorted(kept)))


def _with(world: World, permit: str) -> World:
    return evolve(world, permits=tuple(sorted((*world.permits, permit))))


def show(world: World) -> Mapping[str, str]:
    """The columns of a printed path."""
    return {
        "breaker": str(world.state.value),
        "failures": str(world.failures),
        "cooled": "yes" if world.has_cooled else "",
        "permits": ", ".join(world.permits),
    }


#### What must hold

ALWAYS: Mapping[str, Callable[[World], bool]] = {
    "a closed breaker has not seen too many failures in a row": lambda w: (
        w.state is not S.CLOSED or w.failures < THRESHOLD
    ),
    "a breaker that is not closed failed its way there": lambda w: (
        w.state is S.CLOSED or w.failures >= THRESHOLD
    ),
    "only a half-open breaker has a probe out": lambda w: (
        w.state is S.HALF_OPEN or not set(PROBES) & set(w.permits)
    ),
}

BETWEEN: Mapping[str, Callable[[World, str, World], bool]] = {
    "a neutral end moves nothing": lambda w, word, after: (
        not word.endswith("said_nothing") or (after.state, after.failures) == (w.state, w.failures)
    ),
    "what began before the breaker moved does not move it": lambda w, word, after: (
        not word.startswith("old ") or (after.state, after.failures) == (w.state, w.failures)
    ),
    "it opens on a failure, and not by any other end": lambda w, word, after: (
        w.state is S.OPEN or after.state is not S.OPEN or word.endswith("failed")
    ),
    "it closes on a success, and not by any other end": lambda w, word, after: (
        w.state is S.CLOSED or after.state is not S.CLOSED or word.endswith("succeeded")
    ),
    "it is half open when its cooldown is over, not before": lambda w, word, after: (
        w.state is S.HALF_OPEN or after.state is not S.HALF_OPEN or w.has_cooled
    ),
    "a probe that ends well closes it": lambda w, word, after: (
        word not in ("probe succeeded", "overdue succeeded") or after.state is S.CLOSED
    ),
    "a probe that fails opens it": lambda w, word, after: (
        word not in ("probe failed", "overdue failed") or after.state is S.OPEN
    ),
    "a request that was sent anyway and ends well closes it": lambda w, word, after: (
        word != "forced succeeded" or after.state is S.CLOSED
    ),
    "nobody waits for a probe that is not out": lambda w, word, after: (
        word != "sent anyway" or w.state is S.OPEN or "probe" in w.permits
    ),
}

SOMETIMES: Mapping[str, Callable[[World], bool]] = {
    "it trips": lambda w: w.state is S.OPEN,
    "it closes again": lambda w: w.state is S.CLOSED and "old" in w.permits,
    "an old request is out while the probe is": lambda w: {"old", "probe"} <= set(w.permits),
    "a second probe goes when the first is overdue": lambda w: (
        {"overdue", "probe"} <= set(w.permits)
    ),
    "three probes are out at once": lambda w: (
        "probe" in w.permits and w.permits.count("overdue") == 2
    ),
    "nobody waits for the latest probe although an overdue one is out": lambda w: (
        "overdue" in w.permits and "probe" not in w.permits
    ),
    "a request is sent anyway while the probe is out": lambda w: (
        {"forced", "probe"} <= set(w.permits)
    ),
}

EVENTUALLY: Mapping[str, Callable[[World], bool]] = {
    "every permit is back": lambda w: w.to_come == 0 and not w.permits,
}

#: A breaker that nobody asks learns nothing, so its promises hold as long as requests come.
WHENEVER: Mapping[str, tuple[Callable[[World], bool], Callable[[World], bool]]] = {
    "an open breaker lets a probe go, or nobody asks it any more": (
        lambda w: w.state is S.OPEN,
        lambda w: w.state is not S.OPEN or w.to_come == 0,
    ),
    "a half-open breaker decides, or nobody asks it any more": (
        lambda w: w.state is S.HALF_OPEN,
        lambda w: w.state is not S.HALF_OPEN or w.to_come == 0,
    ),
    "a half-open breaker with a probe out decides, or its permit is back": (
        lambda w: w.state is S.HALF_OPEN and "probe" in w.permits,
        lambda w: w.state is not S.HALF_OPEN or "probe" not in w.permits,
    ),
}
