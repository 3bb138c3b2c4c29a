"""The worlds of a model and the steps between them, in the order in which they are found.

Worlds are numbered as they come, nearest first, and everything about them is kept by number: a
million of them fit into a gigabyte. Whoever walks on judges what is found; this only remembers it.
"""

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

from attrs import frozen

__all__ = ["EndsFirst", "Graph"]

W = TypeVar("W", bound=Hashable)

#: Where a path begins.
NOWHERE = -1


@frozen
class EndsFirst:
    """All worlds, by whether one can come back."""

    #: Each behind all that follow it.
    order: Sequence[int]
    #: Those that come back, and those that lead to one that does.
    returning: Sequence[int]


class Graph(Generic[W]):
    """Worlds by number; each has the step by which it was reached first, and those that follow."""

    def __init__(self, starts: Iterable[W], steps: Callable[[W], Iterable[tuple[str, W]]]) -> None:
        self.worlds: list[W] = list(dict.fromkeys(starts))
        self.starts = range(len(self.worlds))
        self._steps = steps
        self._numbers = {world: number for number, world in enumerate(self.worlds)}
        self._parents = array("q", [NOWHERE] * len(self.worlds))
        self._words = [""] * len(self.worlds)
        #: A word that was made for each step is kept once.
        self._known_words: dict[str, str] = {}
        #: What follows all worlds, one after the other, and where what follows each begins.
        self._following = array("q")
        self._begins = array("q", [0])

    def __len__(self) -> int:
        return len(self.worlds)

    @property
    def looked_at(self) -> int:
        """So many worlds, the first ones, have had their steps taken."""
        return len(self._begins) - 1

    @property
    def step_count(self) -> int:
        return len(self._following)

    def look(self) -> Iterator[tuple[str, W]]:
        """Take the steps of the next world; what they lead to is known from then on."""
        number = self.looked_at
        numbers, worlds, following = self._numbers, self.worlds, self._following
        try:
            for word, after in self._steps(worlds[number]):
                found = numbers.setdefault(after, len(worlds))
                if found == len(worlds):
                    worlds.append(after)
                    self._parents.append(number)
                    self._words.append(self._known_words.setdefault(word, word))
                following.append(found)
                yield word, after
        finally:
            self._begins.append(len(following))

    def complete(self) -> "Graph[W]":
        """Look at every world that was not looked at yet; returns itself."""
        while self.looked_at < len(self):
            for _ in self.look():
                pass
        return self

    def onward(self, number: int) -> Sequence[int]:
        """What follows a world that was looked at."""
        return self._following[self._begins[number] : self._begins[number + 1]]

    def way_to(self, number: int) -> list[int]:
        """The worlds on the shortest way there, from a start on."""
        way = []
        while number != NOWHERE:
            way.append(number)
            number = self._parents[number]
        return way[::-1]

    def words_on(self, way: Sequence[int]) -> list[str]:
        """What happens between the worlds of a way; the first one has no word."""
        return ["", *(self._word(one, other) for one, other in pairwise(way))]

    def _word(self, number: int, after: int) -> str:
        if self._parents[after] == number:
            return self._words[after]
        goal = self.worlds[after]
        return next(word for word, found in self._steps(self.worlds[number]) if found == goal)

    def ends_first(self) -> EndsFirst:
        """The worlds of a complete graph, from the ends on backward.

        Worlds with nowhere left to go are taken away again and again; whoever walks among those
        that remain must return to where he was.
        """
        begins, sources = self._backward()
        left = array("q", (self._begins[n + 1] - self._begins[n] for n in range(len(self))))
        order = array("q", (number for number, count in enumerate(left) if count == 0))
        for number in order:  # which grows meanwhile
            for before in sources[begins[number] : begins[number + 1]]:
                left[before] -= 1
                if left[before] == 0:
                    order.append(before)
        return EndsFirst(order, [number for number, count in enumerate(left) if count > 0])

    def _backward(self) -> tuple[Sequence[int], Sequence[int]]:
        """The steps the other way round, kept alike: where each one's begin, and all of them."""
        counts = array("q", [0]) * (len(self) + 1)
        for number in self._following:
            counts[number + 1] += 1
        for number in range(len(self)):
            counts[number + 1] += counts[number]
        places, sources = counts[:-1], array("q", [0]) * len(self._following)
        for number in range(len(self)):
            for after in self.onward(number):
                sources[places[after]] = number
                places[after] += 1
        return counts, sources
