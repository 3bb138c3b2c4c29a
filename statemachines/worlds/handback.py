"""One request at the agent: its router, the engine, the broker, and an agent that is told to stop.

A cancel may come before the request does. Frames are counted as the router gets them; what a drain
does with the request is told as one fact, at the end of the window.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum

from attrs import evolve, frozen

from statemachines.chart import Chart
from statemachines.explore import Model
from statemachines.handback import HANDBACK
from statemachines.handback import HandbackState as S
from statemachines.worlds.standin import fire, lives_on

__all__ = ["handback"]

FRAMES = 2
#: What may go wrong once the engine has the request.
ENGINE_ENDS = ("broke", "stalled")
#: What may come at any moment.
ANY_MOMENT = ("cancel_came", "unheard", "overdue", "stop_came", "bug")


@frozen(cache_hash=True)
class World:
    state: Enum
    is_migratable: bool = False
    #: The message is a request.
    is_whole: bool = True
    #: Its cancel was there before it.
    is_unwanted: bool = False
    engine_has_it: bool = False
    #: It has a connection to the engine, or gets one: what lives in the scope of the chart.
    holds_engine: bool = True
    has_answered: bool = False
    #: Of the answer, as the router has got them.
    frames: int = 0
    #: Ghost: the fact that ended it.
    last_fact: str = ""

    @property
    def engine_works(self) -> bool:
        """The engine computes for it."""
        return self.holds_engine and self.engine_has_it


def handback(chart: Chart = HANDBACK, *, frames: int = FRAMES) -> Model[World]:
    """The model of one request at the agent, on this chart."""
    return _Handback(chart, frames).model()


@frozen(eq=False)
class _Handback:
    chart: Chart
    frames: int

    def model(self) -> Model[World]:
        return Model(
            name="one request at the agent",
            starts=self.starts(),
            steps=self.steps,
            is_over=lambda w: w.state in HANDBACK.final,
            always=ALWAYS,
            between=BETWEEN,
            sometimes=SOMETIMES,
            eventually=EVENTUALLY,
            whenever=WHENEVER,
            show=show,
        )

    def starts(self) -> tuple[World, ...]:
        initial = self.chart.initial
        plain = World(initial, holds_engine=initial in self.chart.scopes["engine"])
        return (
            plain,
            evolve(plain, is_migratable=True),
            evolve(plain, is_whole=False),
            evolve(plain, is_unwanted=True),
        )

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        if world.state in HANDBACK.final:
            return
        if world.is_unwanted:
            yield "cancel_came", self.told(world, "cancel_came")
            return
        if not world.is_whole:
            yield "malformed", self.told(world, "malformed")
            return
        yield "window_over", self.told(world, "window_over")
        for fact in ANY_MOMENT:
            yield fact, self.told(world, fact)
        if not world.engine_has_it:
            yield "sent", evolve(self.told(world, "sent"), engine_has_it=True)
            yield "broke", self.told(world, "broke")
            return
        for fact in ENGINE_ENDS:
            yield fact, self.told(world, fact)
        if not world.has_answered:
            yield "answered", evolve(self.told(world, "answered"), has_answered=True)
            return
        if world.frames < self.frames:
            yield "a frame goes out", evolve(world, frames=world.frames + 1)
        yield "clogged", self.told(world, "clogged")
        yield "ended", self.told(world, "ended")

    def told(self, world: World, fact: str) -> World:
        edge = fire(self.chart, world.state, fact, is_migratable=world.is_migratable)
        over = edge.target in HANDBACK.final
        return evolve(
            world,
            state=edge.target,
            holds_engine=lives_on(edge, "engine", world.holds_engine),
            last_fact=fact if over else "",
        )


def show(world: World) -> Mapping[str, str]:
    """The columns of a printed path."""
    return {
        "request": str(world.state.value),
        "migratable": "yes" if world.is_migratable else "",
        "frames": str(world.frames),
    }


#### What must hold

ALWAYS: Mapping[str, Callable[[World], bool]] = {
    "done is an answer that went out whole, and nothing else": lambda w: (
        (w.state is S.DONE) is (w.last_fact == "ended")
    ),
    "only the end of a window hands back, and only what its router will continue": lambda w: (
        w.state is not S.HANDED_BACK or (w.last_fact == "window_over" and w.is_migratable)
    ),
    "what its router will continue gets no error at the end of a window": lambda w: (
        w.last_fact != "window_over" or w.state is (S.HANDED_BACK if w.is_migratable else S.FAILED)
    ),
    "nothing goes out after a cancel, and everything else is told how it ended": lambda w: (
        (w.state is S.CANCELLED) is (w.last_fact == "cancel_came")
    ),
    "frames go out of an answer, and of nothing else": lambda w: (
        (w.state is S.STREAMING) is (w.has_answered and not w.last_fact)
    ),
    "it holds its place at the engine until it is over, and no longer": lambda w: (
        w.holds_engine is (w.state not in HANDBACK.final)
    ),
    "queued is what the engine does not have": lambda w: (
        w.last_fact != "" or (w.state is S.QUEUED) is not w.engine_has_it
    ),
    "what was cancelled before it came never reaches the engine": lambda w: (
        not w.is_unwanted or not w.engine_has_it
    ),
}  # fmt: skip

BETWEEN: Mapping[str, Callable[[World, str, World], bool]] = {
    "a drain that ends, a stop, a cancel and a router that is gone free the engine": (
        lambda w, word, after: (
            word not in ("window_over", *ANY_MOMENT, "clogged") or not after.engine_works
        )
    ),
}

SOMETIMES: Mapping[str, Callable[[World], bool]] = {
    "a request is answered": lambda w: w.state is S.DONE and w.frames > 0,
    "an empty answer is an answer": lambda w: w.state is S.DONE and w.frames == 0,
    "a stream is handed back in the middle": lambda w: w.state is S.HANDED_BACK and w.frames > 0,
    "a request is handed back before its answer": lambda w: (
        w.state is S.HANDED_BACK and w.engine_has_it and not w.has_answered
    ),
    "a request is handed back before the engine has it": lambda w: (
        w.state is S.HANDED_BACK and not w.engine_has_it
    ),
    "a request that cannot go on elsewhere is ended by a drain": lambda w: (
        w.state is S.FAILED and w.last_fact == "window_over"
    ),
    "a request is cancelled before it came": lambda w: w.state is S.CANCELLED and w.is_unwanted,
    "a stream is cancelled in the middle": lambda w: w.state is S.CANCELLED and w.frames > 0,
}

EVENTUALLY: Mapping[str, Callable[[World], bool]] = {
    "a request at the agent is over": lambda w: w.state in HANDBACK.final,
}

WHENEVER: Mapping[str, tuple[Callable[[World], bool], Callable[[World], bool]]] = {
    "an engine that has it is freed": (lambda w: w.engine_works, lambda w: not w.engine_works),
    "what was cancelled before it came is cancelled": (
        lambda w: w.is_unwanted,
        lambda w: w.state is S.CANCELLED,
    ),
}
