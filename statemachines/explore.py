"""Breadth-first explorer: every order of facts that a model allows, checked against its promises.

A model is a start, the steps that could happen in a world, and properties that read as sentences.
*Always* properties hold in every world, *never between* ones judge a step by its two ends, and
*sometimes* ones must hold in at least one world, lest a model in which nothing happens prove
everything. "It always ends" needs no temporal logic: every world that is not over has a step, and
the graph of worlds has no cycle. Parent pointers make the first path that breaks a promise the
shortest one.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from attrs import field, frozen

__all__ = ["Broken", "Found", "Model", "Path", "explore", "path_lines", "path_to"]

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
    #: The columns of a printed path.
    show: Callable[[W], Mapping[str, str]] = lambda world: {"world": repr(world)}

    @property
    def promises(self) -> list[str]:
        """Every sentence that is checked, in the order in which it is reported."""
        return [*self.always, *self.between, *map(_sometimes, self.sometimes), STUCK, CYCLE, RAISED]


#: Promises of every model.
STUCK = "something can always happen until it is over"
CYCLE = "it ends: no world comes back"
RAISED = "no fact is illegal where it can happen"


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
    model: Model[W], *, until_broken: bool = False, progress: Progress | None = None
) -> Found:
    """Visit every world of the model and judge it; stop at the first breach if asked to."""
    walk = _Walk(model, progress)
    broken = {each.promise: each for each in walk.breaches(until_broken)}
    if not (until_broken and broken):
        broken |= {each.promise: each for each in walk.verdicts_at_the_end()}
    return Found(
        model=model.name,
        worlds=len(walk.parents),
        steps=sum(map(len, walk.onward.values())),
        promises=tuple(model.promises),
        broken=tuple(broken[promise] for promise in model.promises if promise in broken),
    )


class _Walk(Generic[W]):
    def __init__(self, model: Model[W], progress: Progress | None) -> None:
        self.model = model
        self.progress = progress
        self.parents: dict[W, tuple[W, str] | None] = dict.fromkeys(model.starts)
        self.onward: dict[W, list[W]] = {}
        self.unseen = set(model.sometimes)

    def breaches(self, until_broken: bool) -> Iterator[Broken]:
        """Walk, reporting each promise the first time it breaks, which is by the shortest path."""
        seen: set[str] = set()
        todo = deque(self.parents)
        while todo:
            world = todo.popleft()
            if self.progress is not None and len(self.onward) % PROGRESS_EVERY == 0:
                self.progress(len(self.onward), len(todo) + 1)
            for broken in self._judge(world, todo):
                if broken.promise not in seen:
                    seen.add(broken.promise)
                    yield broken
                if until_broken:
                    return

    def _judge(self, world: W, todo: deque[W]) -> Iterator[Broken]:
        model = self.model
        for promise, holds in model.always.items():
            if not holds(world):
                yield Broken(promise, self._path(world))
        self.unseen -= {name for name in self.unseen if model.sometimes[name](world)}
        following = self.onward[world] = []
        try:
            for word, after in model.steps(world):
                following.append(after)
                if after not in self.parents:
                    self.parents[after] = (world, word)
                    todo.append(after)
                for promise, fits in model.between.items():
                    if not fits(world, word, after):
                        yield Broken(promise, (*self._path(world), (word, model.show(after))))
        except Exception as error:
            yield Broken(RAISED, self._path(world), note=str(error))
            return
        if len(self.parents) > WORLDS_MAX:
            raise RuntimeError(f"{model.name}: more than {WORLDS_MAX} worlds; a bound is missing")
        if not following and not model.is_over(world):
            yield Broken(STUCK, self._path(world))

    def verdicts_at_the_end(self) -> Iterator[Broken]:
        for name in self.model.sometimes:
            if name in self.unseen:
                yield Broken(_sometimes(name))
        if (returning := _on_a_cycle(self.onward)) is not None:
            yield Broken(CYCLE, self._path(returning), note="the last world below comes back")

    def _path(self, world: W) -> Path:
        return path_to(self.model, self.parents, world)


def path_to(model: Model[W], parents: Mapping[W, tuple[W, str] | None], world: W) -> Path:
    """The steps that lead to a world, and what is shown of each world on the way."""
    path: list[tuple[str, Mapping[str, str]]] = []
    at: W | None = world
    while at is not None:
        parent = parents[at]
        path.append((parent[1] if parent else "", model.show(at)))
        at = parent[0] if parent else None
    return tuple(reversed(path))


def _on_a_cycle(onward: Mapping[W, list[W]]) -> W | None:
    """A world that can come back, if there is one.

    Worlds with nowhere left to go are taken away again and again; whoever walks among those that
    remain must return to where he was.
    """
    backward: dict[W, list[W]] = {}
    for world, following in onward.items():
        for after in following:
            backward.setdefault(after, []).append(world)
    left = {world: len(following) for world, following in onward.items()}
    todo = [world for world, count in left.items() if count == 0]
    while todo:
        gone = todo.pop()
        del left[gone]
        for before in backward.get(gone, ()):
            left[before] -= 1
            if left[before] == 0:
                todo.append(before)
    if not left:
        return None
    walked: set[W] = set()
    at = next(iter(left))
    while at not in walked:
        walked.add(at)
        at = next(after for after in onward[at] if after in left)
    return at


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
