"""Breadth-first explorer: every order of facts that a model allows, checked against its promises.

A model is a start, the steps that could happen in a world, and properties that read as sentences.
*Always* properties hold in every world, *never between* ones judge a step by its two ends, and
*sometimes* ones must hold in at least one world, lest a model in which nothing happens prove
everything. *Eventually* ones come true at last on every way, from the start or whenever something
else holds. Worlds are found nearest first, so the first path that breaks a promise is the shortest.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Generic, TypeVar

from attrs import field, frozen

from statemachines.chart import IllegalTransition
from statemachines.eventually import Due, evasion, way_back
from statemachines.graph import Graph

__all__ = ["Broken", "Found", "Model", "Path", "explore", "path_lines", "path_on"]

W = TypeVar("W", bound=Hashable)

#: A model that grows past this has lost a bound.
WORLDS_MAX = 200_000
#: So many worlds are looked at between two reports of progress.
PROGRESS_EVERY = 1_000

#: Steps and what is shown of the worlds they lead to; the first step has no name.
Path = tuple[tuple[str, Mapping[str, str]], ...]
#: Told how many worlds have been looked at, and how many of the known ones have not.
Progress = Callable[[int, int], None]


@frozen(eq=False)
class Model(Generic[W]):
    """What to explore; worlds are hashable values."""

    name: str
    starts: tuple[W, ...]
    #: What could happen next: a word for it, and the world after it.
    steps: Callable[[W], Iterable[tuple[str, W]]]
    is_over: Callable[[W], bool]
    always: Mapping[str, Callable[[W], bool]]
    sometimes: Mapping[str, Callable[[W], bool]]
    #: Judged on the world before, the word for what happened, and the world after.
    between: Mapping[str, Callable[[W, str, W], bool]] = field(factory=dict)
    #: Comes true at last, on whichever way things go.
    eventually: Mapping[str, Callable[[W], bool]] = field(factory=dict)
    #: Whenever the first holds, the second comes true at last.
    whenever: Mapping[str, tuple[Callable[[W], bool], Callable[[W], bool]]] = field(factory=dict)
    #: What there is to see of a world, by name.
    show: Callable[[W], Mapping[str, str]] = lambda world: {"world": repr(world)}
    #: Of these, what is spent, and what the columns are called that say how much of it is left.
    budgets: Mapping[str, str] = field(factory=dict)
    #: Its budgets mean nothing any more and are none, which makes fewer worlds.
    forgets: Callable[[W], bool] = lambda _: False

    def columns(self, world: W) -> Mapping[str, str]:
        """The columns of a printed path. What was forgotten is not shown as spent."""
        shown = self.show(world)
        gone = self.budgets if self.forgets(world) else ()
        return {
            self.budgets.get(name, name): "-" if name in gone and text == "0" else text
            for name, text in shown.items()
        }

    @property
    def promises(self) -> list[str]:
        """Every sentence that is checked, in the order in which it is reported."""
        return [*self.always, *self.between, *map(_sometimes, self.sometimes), *self.dues,
                STUCK, CYCLE, RAISED]  # fmt: skip

    @property
    def dues(self) -> dict[str, Due[W]]:
        """What must come true at last, by its whole sentence."""
        from_the_start = {name: Due(None, until) for name, until in self.eventually.items()}
        others = {name: Due(since, until) for name, (since, until) in self.whenever.items()}
        return {f"eventually {name}": due for name, due in (from_the_start | others).items()}


#: Promises of every model.
STUCK = "something can always happen until it is over"
CYCLE = "it ends: no world comes back"
RAISED = "no fact is illegal where it can happen"

COMES_BACK = "the last world below comes back"


@frozen
class Broken:
    """A promise that does not hold, with the shortest way to see it."""

    promise: str
    #: What happened, and the printed columns after it; the first entry is the start.
    path: Path = ()
    note: str = ""

    def __str__(self) -> str:
        head = f"broken: {self.promise}" + (f" ({self.note})" if self.note else "")
        return "\n".join([head, *path_lines(self.path)])


@frozen
class Found:
    """What an exploration saw."""

    model: str
    worlds: int
    steps: int
    promises: tuple[str, ...]
    broken: tuple[Broken, ...]


def explore(
    model: Model[W],
    *,
    until_broken: bool = False,
    progress: Progress | None = None,
    worlds_max: int | None = None,
) -> Found:
    """Visit every world of the model and judge it; stop at the first breach if asked to."""
    walk = _Walk(model, progress, WORLDS_MAX if worlds_max is None else worlds_max)
    broken = {each.promise: each for each in walk.breaches(until_broken)}
    if not (until_broken and broken):
        late = islice(walk.verdicts_at_the_end(), 1 if until_broken else None)
        broken |= {each.promise: each for each in late}
    return Found(
        model=model.name,
        worlds=len(walk.graph),
        steps=walk.graph.step_count,
        promises=tuple(model.promises),
        broken=tuple(broken[promise] for promise in model.promises if promise in broken),
    )


class _Walk(Generic[W]):
    def __init__(self, model: Model[W], progress: Progress | None, worlds_max: int) -> None:
        self.model = model
        self.progress = progress
        self.worlds_max = worlds_max
        self.graph = Graph(model.starts, model.steps)
        self.unseen = set(model.sometimes)

    def breaches(self, until_broken: bool) -> Iterator[Broken]:
        """Walk, reporting each promise the first time it breaks, which is by the shortest path."""
        seen: set[str] = set()
        graph = self.graph
        while (number := graph.looked_at) < len(graph):
            if self.progress is not None and number % PROGRESS_EVERY == 0:
                self.progress(number, len(graph) - number)
            for broken in self._judge(number):
                if broken.promise not in seen:
                    seen.add(broken.promise)
                    yield broken
                if until_broken:
                    return

    def _judge(self, number: int) -> Iterator[Broken]:
        model, graph = self.model, self.graph
        world = graph.worlds[number]
        for promise, holds in model.always.items():
            if not holds(world):
                yield Broken(promise, self._path(number))
        if self.unseen:
            self.unseen -= {name for name in self.unseen if model.sometimes[name](world)}
        try:
            for word, after in graph.look():
                for promise, fits in model.between.items():
                    if not fits(world, word, after):
                        yield Broken(promise, (*self._path(number), (word, model.columns(after))))
        except Exception as error:
            yield Broken(RAISED, self._path_to_raising(number, error), note=str(error))
            return
        if len(graph) > self.worlds_max:
            raise RuntimeError(
                f"{model.name}: more than {self.worlds_max} worlds; a bound is missing"
            )
        if not graph.onward(number) and not model.is_over(world):
            yield Broken(STUCK, self._path(number))

    def verdicts_at_the_end(self) -> Iterator[Broken]:
        for name in self.model.sometimes:
            if name in self.unseen:
                yield Broken(_sometimes(name))
        worlds = self.graph.ends_first()
        if worlds.returning:
            path = self._path(self._on_a_cycle(worlds.returning))
            yield Broken(CYCLE, path, note=COMES_BACK)
        for promise, due in self.model.dues.items():
            if (found := evasion(self.graph, due, worlds)) is not None:
                path = path_on(self.model, self.graph, found.way)
                yield Broken(promise, path, note=COMES_BACK if found.comes_back else "")

    def _path_to_raising(self, number: int, error: Exception) -> Path:
        """The way there, and the fact that has no row, which leads nowhere."""
        path = self._path(number)
        if not isinstance(error, IllegalTransition):
            return path
        nowhere = dict.fromkeys(self.model.columns(self.graph.worlds[number]), "")
        return (*path, (f"{error.fact}, which is illegal", nowhere))

    def _on_a_cycle(self, returning: Sequence[int]) -> int:
        """The nearest world that comes back, of those that do or lead to one."""
        among = set(returning)
        onward = {n: [each for each in self.graph.onward(n) if each in among] for n in returning}
        return next(number for number in returning if way_back(onward, number) is not None)

    def _path(self, number: int) -> Path:
        return path_on(self.model, self.graph, self.graph.way_to(number))


def path_on(model: Model[W], graph: Graph[W], way: Sequence[int]) -> Path:
    """What happens on a way, and what is shown of each world on it."""
    shown = [model.columns(graph.worlds[number]) for number in way]
    return tuple(zip(graph.words_on(way), shown, strict=True))


def _sometimes(name: str) -> str:
    return f"sometimes {name}"


def path_lines(path: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """A path as a table: what happened, and the columns after it; the first entry is the start."""
    rows: list[list[str]] = []
    for number, (word, columns) in enumerate(path):
        if not rows:
            rows.append(["step", "what happened", *columns])
        rows.append([str(number), word, *columns.values()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
