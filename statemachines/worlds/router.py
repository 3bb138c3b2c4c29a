"""The process, its open requests and the signals it gets."""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum

from attrs import evolve, frozen

from statemachines.chart import Chart
from statemachines.explore import Model
from statemachines.router import ROUTER
from statemachines.router import RouterState as S
from statemachines.worlds.standin import fire, lives_on

__all__ = ["router"]

REQUESTS = 2
SIGNALS = 2


@frozen(cache_hash=True)
class World:
    state: Enum
    requests: int = 0
    requests_to_come: int = REQUESTS
    signals_to_come: int = SIGNALS
    #: Its tasks run, and its port is open: what lives in the scopes of the chart.
    runs: bool = True
    listens: bool = False
    # Ghosts
    refused: bool = False
    #: The fact that ended it.
    last_fact: str = ""


def router(chart: Chart = ROUTER, *, requests: int = REQUESTS) -> Model[World]:
    """The model of the process, on this chart."""
    return _Router(chart, requests).model()


@frozen(eq=False)
class _Router:
    chart: Chart
    requests: int

    def model(self) -> Model[World]:
        return Model(
            name="the router",
            starts=(self.start(),),
            steps=self.steps,
            is_over=lambda w: w.state is S.STOPPED,
            always=ALWAYS,
            between=BETWEEN,
            sometimes=SOMETIMES,
            eventually=EVENTUALLY,
            whenever=WHENEVER,
            show=show,
        )

    def start(self) -> World:
        scopes, initial = self.chart.scopes, self.chart.initial
        return World(
            initial,
            requests_to_come=self.requests,
            runs=initial in scopes["router"],
            listens=initial in scopes["listening"],
        )

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        if world.state is S.STOPPED or not world.runs:
            return
        yield "crashed", self.told(world, "crashed")
        if world.signals_to_come > 0:
            left = evolve(world, signals_to_come=world.signals_to_come - 1)
            yield "stop_asked", self.told(left, "stop_asked")
        if world.state is S.STARTING:
            yield "listening", self.told(world, "listening")
        if world.listens and world.requests_to_come > 0:
            left = evolve(world, requests_to_come=world.requests_to_come - 1)
            if world.state is S.SERVING:
                yield "request came", evolve(left, requests=world.requests + 1)
            else:
                yield "request refused", evolve(left, refused=True)
        if world.requests > 0:
            yield "request ended", evolve(world, requests=world.requests - 1)
        if world.state is S.DRAINING:
            yield "window_over", self.told(world, "window_over")
        if world.state is S.DRAINING and world.requests == 0:
            yield "emptied", self.told(world, "emptied")

    def told(self, world: World, fact: str) -> World:
        edge = fire(self.chart, world.state, fact)
        return evolve(
            world,
            state=edge.target,
            runs=lives_on(edge, "router", world.runs),
            listens=lives_on(edge, "listening", world.listens),
            last_fact=fact if edge.target is S.STOPPED else "",
        )


def show(world: World) -> Mapping[str, str]:
    """The columns of a printed path."""
    return {"router": str(world.state.value), "requests": str(world.requests)}


#### What must hold

ALWAYS: Mapping[str, Callable[[World], bool]] = {
    "requests are cut by the end of the window, a second signal or a crash": lambda w: (
        w.state is not S.STOPPED
        or w.requests == 0
        or w.last_fact in ("window_over", "stop_asked", "crashed")
    ),
    "its port is open while it serves and while it drains": lambda w: (
        w.listens is (w.state in (S.SERVING, S.DRAINING))
    ),
    "what runs in it ends with it, and not before": lambda w: w.runs is (w.state is not S.STOPPED),
    "nothing runs before it listens": lambda w: w.state is not S.STARTING or w.requests == 0,
}

BETWEEN: Mapping[str, Callable[[World, str, World], bool]] = {
    "the first signal cuts nobody": lambda w, word, after: (
        word != "stop_asked" or w.signals_to_come < SIGNALS or after.requests == 0
        or after.state is S.DRAINING
    ),
    "a crash ends it": lambda w, word, after: word != "crashed" or after.state is S.STOPPED,
    "the second signal ends it at once": lambda w, word, after: (
        word != "stop_asked" or w.signals_to_come == SIGNALS or after.state is S.STOPPED
    ),
    "it never serves again after a signal": lambda w, word, after: (
        after.state is not S.SERVING or w.signals_to_come == SIGNALS
    ),
}  # fmt: skip

SOMETIMES: Mapping[str, Callable[[World], bool]] = {
    "it stops with nobody cut": lambda w: (
        w.state is S.STOPPED and w.requests == 0 and w.last_fact == "emptied"
    ),
    "a request that comes while it drains is told so": lambda w: (
        w.state is S.DRAINING and w.refused
    ),
    "requests end while it drains": lambda w: w.state is S.DRAINING and w.requests == 1,
    "it is stopped before it listens": lambda w: (
        w.state is S.STOPPED and w.signals_to_come == SIGNALS - 1 and w.last_fact == "stop_asked"
    ),
}

EVENTUALLY: Mapping[str, Callable[[World], bool]] = {
    "the process is over": lambda w: w.state is S.STOPPED,
}

WHENEVER: Mapping[str, tuple[Callable[[World], bool], Callable[[World], bool]]] = {
    "whoever is asked to stop has stopped": (
        lambda w: w.signals_to_come < SIGNALS,
        lambda w: w.state is S.STOPPED and not w.runs,
    ),
    "open requests end, or are cut by the end of it all": (
        lambda w: w.requests > 0,
        lambda w: w.requests == 0 or w.state is S.STOPPED,
    ),
}
