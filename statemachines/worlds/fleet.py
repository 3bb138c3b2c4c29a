"""One worker, from its first probe to its removal, and the requests that are on it meanwhile.

The requests are alike, and whoever is not on this worker is on another one, where such requests
finish; without another one there is nowhere to go. The world plays the shell: it gives a request to
the worker while that is ready, and at the end of a drain's window takes away what can go elsewhere.
What probes, drains and the removal do to the requests is the question.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from attrs import evolve, frozen

from statemachines.chart import Chart
from statemachines.explore import Model
from statemachines.leg import LEG, LegState, told_by_decode
from statemachines.request import REQUEST
from statemachines.request import RequestState as R
from statemachines.worker import WORKER
from statemachines.worker import WorkerState as S
from statemachines.worlds.standin import fire, lives_on

__all__ = ["fleet"]

L = LegState

REQUESTS = 2
#: Probes in a row that it takes, either way.
THRESHOLD = 2
PROBES = 3
DRAINS = 1


class Request(NamedTuple):
    """One request; in an attempt and without a leg, it is on another worker.

    The leg that it had here stays: who has lost a leg on this worker does not get it again.
    """

    state: Enum
    leg: Enum | None = None

    @property
    def is_here(self) -> bool:
        """Its leg is open, and on this worker."""
        return self.leg in LEG.open


@frozen(cache_hash=True)
class World:
    #: There is another worker, which is ready.
    has_other: bool
    worker: Enum
    #: In a row, up to the threshold.
    passes: int = 0
    failures: int = 0
    probes_to_come: int = PROBES
    drains_to_come: int = DRAINS
    #: The window of the latest drain has not ended.
    in_window: bool = False
    #: Sorted, since they are alike.
    requests: tuple[Request, ...] = ()
    #: Places taken, counted up and down one by one.
    load: int = 0

    # Ghosts
    is_known: bool = False
    is_asked_to_stop: bool = False

    @property
    def is_idle(self) -> bool:
        return all(each.state in REQUEST.final for each in self.requests)


#: What the worker may do in each state of a leg, besides the first token.
WORKER_DOES: Mapping[Enum | None, tuple[str, ...]] = {
    L.CONNECTING: ("connected", "broke"),
    L.WAITING: ("head_arrived", "broke"),
    L.ANSWERING: ("completed",),
    L.STREAMING: ("completed", "broke"),
}


def fleet(
    worker: Chart = WORKER,
    request: Chart = REQUEST,
    leg: Chart = LEG,
    *,
    requests: int = REQUESTS,
    probes: int = PROBES,
    drains: int = DRAINS,
) -> Model[World]:
    """The model of one worker and its requests, on these charts."""
    starts = tuple(
        World(
            has_other,
            worker.initial,
            probes_to_come=probes,
            drains_to_come=drains,
            requests=(Request(request.initial),) * requests,
        )
        for has_other in (False, True)
    )
    return _Fleet(worker, request, leg, starts).model()


@frozen(eq=False)
class _Fleet:
    worker: Chart
    request: Chart
    leg: Chart
    starts: tuple[World, ...]

    def model(self) -> Model[World]:
        return Model(
            name="one worker and its requests",
            starts=self.starts,
            steps=self.steps,
            is_over=lambda w: w.worker is S.GONE and w.is_idle,
            always=ALWAYS,
            between=BETWEEN,
            sometimes=SOMETIMES,
            eventually=EVENTUALLY,
            whenever=WHENEVER,
            show=show,
        )

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        if world.worker is not S.GONE:
            yield from self.operated(world)
        for request in dict.fromkeys(world.requests):
            if request.state in (R.QUEUED, R.MIGRATING):
                yield from self.choose(world, request)
            elif request.leg is not None:
                yield from self.worker_acts(world, request)
            elif request.state not in REQUEST.final:
                yield "finished elsewhere", self.told(world, request, "completed")

    #### What becomes of the worker

    def operated(self, world: World) -> Iterator[tuple[str, World]]:
        if world.probes_to_come > 0:
            left = evolve(world, probes_to_come=world.probes_to_come - 1)
            passes, failures = min(world.passes + 1, THRESHOLD), min(world.failures + 1, THRESHOLD)
            passed = evolve(left, passes=passes, failures=0, is_known=True)
            yield "probe_passed", self.moved(passed, "probe_passed")
            failed = evolve(left, passes=0, failures=failures)
            yield "probe_failed", self.moved(failed, "probe_failed")
        if world.drains_to_come > 0:
            asked = evolve(
                world,
                drains_to_come=world.drains_to_come - 1,
                in_window=True,
                is_asked_to_stop=True,
            )
            yield "drain_asked", self.moved(asked, "drain_asked")
        if world.worker is S.DRAINING:
            kept = evolve(world, in_window=False, is_known=False, is_asked_to_stop=False)
            yield "drain_cancelled", self.moved(kept, "drain_cancelled")
        if world.worker is S.DRAINING and world.in_window:
            yield "window over", self.handed_over(evolve(world, in_window=False))
        yield "removed", self.moved(evolve(world, in_window=False), "removed")

    def moved(self, world: World, fact: str) -> World:
        edge = fire(
            self.worker,
            world.worker,
            fact,
            passed_enough=world.passes >= THRESHOLD,
            failed_enough=world.failures >= THRESHOLD,
        )
        return evolve(world, worker=edge.target)

    def handed_over(self, world: World) -> World:
        """What can go on elsewhere is taken from the worker; the rest stays."""
        for request in world.requests:
            if request.is_here and world.has_other and request.state in MOVABLE:
                # Without a sign of the worker there is nothing that it could give back.
                fact = "let_go" if request.leg is L.CONNECTING else "handed_back"
                world, without = self.leg_told(world, request, fact)
                world = self.told(world, without, "handed_back")
        return world

    #### What becomes of a request

    def choose(self, world: World, request: Request) -> Iterator[tuple[str, World]]:
        if world.worker is S.READY and request.leg is None:
            here = request._replace(leg=self.leg.initial)
            begun = evolve(
                _with(world, request, here),
                load=world.load + (self.leg.initial in self.leg.scopes["connection"]),
            )
            yield "begun here", self.told(begun, here, "admitted")
        if world.has_other:
            elsewhere = request._replace(leg=None)
            begun = _with(world, request, elsewhere)
            yield "begun elsewhere", self.told(begun, elsewhere, "admitted")
        elif world.worker is not S.READY:
            yield "nobody can take it", self.told(world, request, "refused")

    def worker_acts(self, world: World, request: Request) -> Iterator[tuple[str, World]]:
        for fact in WORKER_DOES.get(request.leg, ()):
            after, told = self.leg_told(world, request, fact)
            if told.leg not in LEG.open:
                began = told.state not in (R.DISPATCHING, R.RESUMING)
                word = told_by_decode(fact, answer_began=began, end_was_seen=False)
                after = self.told(after, told, word)
            yield fact, after
        if request.leg is L.ANSWERING:
            begun, told = self.leg_told(world, request, "first_token")
            yield "first content", self.told(begun, told, "first_token")
            kind = self.told(begun, told, "first_token", is_faithful=False)
            yield "first content, of a kind of its own", kind

    def leg_told(self, world: World, request: Request, fact: str) -> tuple[World, Request]:
        edge = fire(self.leg, request.leg or L.CONNECTING, fact)
        after = request._replace(leg=edge.target)
        load = world.load - 1 + lives_on(edge, "connection", is_alive=True)
        return evolve(_with(world, request, after), load=load), after

    def told(self, world: World, request: Request, fact: str, *, is_faithful: bool = True) -> World:
        edge = fire(
            self.request,
            request.state,
            fact,
            can_retry=world.has_other,
            can_continue=is_faithful,
            can_migrate=world.has_other,
            can_rephrase=False,
        )
        if "attempt" in edge.leaves and request.is_here:
            world, request_now = self.leg_told(world, request, "let_go")
        else:
            request_now = request
        leg = None if edge.target in REQUEST.final else request_now.leg
        return _with(world, request_now, Request(edge.target, leg))


def _with(world: World, before: Request, after: Request) -> World:
    """The world with one of its requests changed."""
    requests = list(world.requests)
    requests.remove(before)
    return evolve(world, requests=tuple(sorted([*requests, after], key=_order)))


def _order(request: Request) -> tuple[str, str]:
    return request.state.value, "" if request.leg is None else request.leg.value


def show(world: World) -> Mapping[str, str]:
    """The columns of a printed path."""
    return {
        "worker": str(world.worker.value),
        "window": "runs" if world.in_window else "",
        "load": str(world.load),
        "requests": ", ".join(_shown(each) for each in world.requests),
        "another": "yes" if world.has_other else "",
    }


def _shown(request: Request) -> str:
    if request.leg is not None:
        return f"{request.state.value} ({request.leg.value})"
    elsewhere = " (elsewhere)" if request.state in ATTEMPT else ""
    return f"{request.state.value}{elsewhere}"


#### What must hold

ATTEMPT = REQUEST.scopes["attempt"]
#: What can go on on another worker, if there is one.
MOVABLE = (R.DISPATCHING, R.STREAMING, R.RESUMING)


def _here(world: World) -> list[Request]:
    return [each for each in world.requests if each.is_here]


def _count(world: World, state: R) -> int:
    return sum(each.state is state for each in world.requests)


ALWAYS: Mapping[str, Callable[[World], bool]] = {
    "a worker carries as many requests as have a leg open on it": lambda w: w.load == len(_here(w)),
    "no leg outlives its attempt": lambda w: all(each.state in ATTEMPT for each in _here(w)),
}

BETWEEN: Mapping[str, Callable[[World, str, World], bool]] = {
    "nothing begins on a worker that has not passed a probe": lambda w, word, after: (
        word != "begun here" or w.is_known
    ),
    "nothing begins on a worker that fails its probes": lambda w, word, after: (
        word != "begun here" or w.failures < THRESHOLD
    ),
    "nothing begins on a worker that was asked to drain": lambda w, word, after: (
        word != "begun here" or not w.is_asked_to_stop
    ),
    "what a worker's probes and drains say cuts no request": lambda w, word, after: (
        word not in ("probe_passed", "probe_failed", "drain_asked", "drain_cancelled")
        or after.requests == w.requests
    ),
    "what a removed worker still has runs on": lambda w, word, after: (
        word != "removed" or after.requests == w.requests
    ),
    "at the end of a window whatever can move goes elsewhere": lambda w, word, after: (
        word != "window over"
        or not w.has_other
        or not any(each.state in MOVABLE for each in _here(after))
    ),
    "with another worker only what is tied to this one fails with it": lambda w, word, after: (
        not w.has_other
        or _count(after, R.FAILED) - _count(w, R.FAILED)
        <= max(0, _count(w, R.POISONED) - _count(after, R.POISONED))
    ),
    "at the end of a window nobody fails": lambda w, word, after: (
        word != "window over" or _count(after, R.FAILED) == _count(w, R.FAILED)
    ),
    "at the end of a window whatever cannot move stays": lambda w, word, after: (
        word != "window over" or _count(after, R.POISONED) == _count(w, R.POISONED)
    ),
    "nobody is refused while there is a worker that is ready": lambda w, word, after: (
        word != "nobody can take it" or (w.worker is not S.READY and not w.has_other)
    ),
}

SOMETIMES: Mapping[str, Callable[[World], bool]] = {
    "two requests are on the worker at once": lambda w: w.load == 2,
    "a worker that fails its probes has requests": lambda w: w.worker is S.UNHEALTHY and w.load > 0,
    "a worker that is gone has requests": lambda w: w.worker is S.GONE and w.load > 0,
    "a stream goes elsewhere when its window ends": lambda w: (
        w.worker is S.DRAINING and not w.in_window and _count(w, R.MIGRATING) > 0
    ),
    "a stream that cannot move runs on beyond its window": lambda w: (
        w.worker is S.DRAINING and not w.in_window and w.has_other and w.load > 0
    ),
    "a worker serves again with a stream that it had before": lambda w: (
        w.worker is S.READY and w.drains_to_come == 0 and w.load > 0
    ),
    "nobody is left to take a request": lambda w: _count(w, R.FAILED) > 0,
}

EVENTUALLY: Mapping[str, Callable[[World], bool]] = {
    "the worker is gone, and every request is over": lambda w: w.worker is S.GONE and w.is_idle,
}

WHENEVER: Mapping[str, tuple[Callable[[World], bool], Callable[[World], bool]]] = {
    "whoever drains is empty and gone, or was asked to serve again": (
        lambda w: w.worker is S.DRAINING,
        lambda w: w.worker is S.PROBING or (w.worker is S.GONE and w.load == 0),
    ),
    "the window of a drain ends, or the drain does": (
        lambda w: w.in_window,
        lambda w: not w.in_window,
    ),
    "what is on a worker that fails its probes leaves it": (
        lambda w: w.worker is S.UNHEALTHY and w.load > 0,
        lambda w: w.worker is not S.UNHEALTHY or w.load == 0,
    ),
    "a request that is handed over goes on elsewhere": (
        lambda w: _count(w, R.MIGRATING) > 0,
        lambda w: _count(w, R.MIGRATING) == 0,
    ),
}
