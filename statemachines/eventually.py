"""What must come true at last, on whichever way things go.

It is due from the start on, or whenever something else holds, and until it comes true. It never
does on a way that ends before, or that comes back to where it was: no fairness is assumed, so who
says "at last" must have a bound for everything that could go on for ever.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Generic, TypeVar

from attrs import frozen

from statemachines.graph import EndsFirst, Graph

__all__ = ["Due", "Evasion", "evasion", "last_to_come", "must_come"]

W = TypeVar("W", bound=Hashable)


@frozen
class Due(Generic[W]):
    """Something that must come true at last."""

    #: Whenever this holds; None: from the start on, once.
    since: Callable[[W], bool] | None
    until: Callable[[W], bool]

    def at_start(self, world: W) -> bool:
        """Whether it is due in a world that begins."""
        return (self.since is None or self.since(world)) and not self.until(world)

    def after(self, was_due: bool, world: W) -> bool:
        """Whether it is due in a world that follows."""
        begins = self.since is not None and self.since(world)
        return (was_due or begins) and not self.until(world)


@frozen
class Evasion:
    """The shortest way on which it never comes true."""

    way: Sequence[int]
    #: The last world of the way is one that was there before.
    comes_back: bool


def evasion(graph: Graph[W], due: Due[W], worlds: EndsFirst) -> Evasion | None:
    """How what is due could be evaded for ever, if it could; the graph must be complete."""
    sure = must_come(graph, due.until, worlds)
    if all(sure[number] or not _begins(graph, due, number) for number in range(len(graph))):
        return None
    return min(_evasions(graph, due, set(worlds.returning)), key=lambda found: len(found.way))


def _begins(graph: Graph[W], due: Due[W], number: int) -> bool:
    if due.since is None:
        return number in graph.starts
    return due.since(graph.worlds[number])


def must_come(graph: Graph[W], holds: Callable[[W], bool], worlds: EndsFirst) -> bytearray:
    """For each world, whether this holds there or comes to hold on whichever way from there."""
    sure = bytearray(len(graph))
    for number in worlds.order:
        following = graph.onward(number)
        sure[number] = holds(graph.worlds[number]) or (
            len(following) > 0 and all(sure[after] for after in following)
        )
    return _settled(graph, sure, holds, worlds.returning)


def _settled(
    graph: Graph[W], sure: bytearray, holds: Callable[[W], bool], left: Sequence[int]
) -> bytearray:
    """The same for worlds that come back, again and again until nothing changes."""
    for number in left:
        sure[number] = holds(graph.worlds[number])
    changed = True
    while changed:
        changed = False
        for number in left:
            if not sure[number] and all(sure[after] for after in graph.onward(number)):
                sure[number] = changed = True
    return sure


class _Walk(Generic[W]):
    """Ways through the worlds, with whether it is due; the shortest ones first."""

    def __init__(self, graph: Graph[W], due: Due[W]) -> None:
        self.graph, self.due = graph, due
        self.parents: dict[tuple[int, bool], tuple[int, bool] | None] = {}
        todo: deque[tuple[int, bool]] = deque()
        for number in graph.starts:
            place = number, due.at_start(graph.worlds[number])
            self.parents[place] = None
            todo.append(place)
        while todo:
            place = todo.popleft()
            for after in graph.onward(place[0]):
                following = after, due.after(place[1], graph.worlds[after])
                if following not in self.parents:
                    self.parents[following] = place
                    todo.append(following)

    def way_to(self, place: tuple[int, bool]) -> list[int]:
        way, at = [], self.parents[place]
        way.append(place[0])
        while at is not None:
            way.append(at[0])
            at = self.parents[at]
        return way[::-1]

    def pending(self) -> Iterator[int]:
        """Worlds in which it is due, nearest first."""
        return (number for number, is_due in self.parents if is_due)


def _evasions(graph: Graph[W], due: Due[W], returning: Set[int]) -> Iterator[Evasion]:
    """The shortest way that ends, and the shortest that comes back, where there are such."""
    walk = _Walk(graph, due)
    pending = dict.fromkeys(walk.pending())
    for number in pending:
        if not graph.onward(number):
            yield Evasion(walk.way_to((number, True)), comes_back=False)
            break
    loops = [number for number in pending if number in returning]
    allowed = set(loops)
    onward = {number: [n for n in graph.onward(number) if n in allowed] for number in loops}
    for number in loops:
        if (loop := way_back(onward, number)) is not None:
            yield Evasion([*walk.way_to((number, True)), *loop], comes_back=True)
            break


def way_back(onward: Mapping[int, Iterable[int]], number: int) -> list[int] | None:
    """The shortest way from a world back to it, without its beginning; None where there is none."""
    parents: dict[int, int] = {}
    todo = deque([number])
    while todo:
        at = todo.popleft()
        for after in onward[at]:
            if after in parents:
                continue
            parents[after] = at
            if after == number:
                return _unwound(parents, number)
            todo.append(after)
    return None


def _unwound(parents: Mapping[int, int], number: int) -> list[int]:
    way, at = [number], parents[number]
    while at != number:
        way.append(at)
        at = parents[at]
    return way[::-1]


def last_to_come(graph: Graph[W], due: Due[W]) -> tuple[Sequence[int], int] | None:
    """The way to the furthest world where what was due comes true, and since which step it was.

    None where it is never due: whoever promises that promises nothing.
    """
    walk = _Walk(graph, due)
    found = None
    for place, before in walk.parents.items():
        if before is not None and before[1] and not place[1]:
            found = place
    if found is None:
        return None
    way = walk.way_to(found)
    return way, _due_since(graph, due, way)


def _due_since(graph: Graph[W], due: Due[W], way: Sequence[int]) -> int:
    """The step of the way after which what comes true with the last one has been due."""
    since, is_due = 0, False
    for step, number in enumerate(way[:-1]):
        world = graph.worlds[number]
        was_due, is_due = is_due, due.after(is_due, world) if step else due.at_start(world)
        if is_due and not was_due:
            since = step
    return since
