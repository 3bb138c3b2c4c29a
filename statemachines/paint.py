"""What is laid over a chart's picture: the path of one subject, or how often each row was taken.

A paint says what is shown; `draw` decides how. It knows rows by identity, so it belongs to one
chart.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from math import log10

from attrs import field, frozen

from statemachines.chart import Edge

__all__ = ["Line", "Paint", "counts_paint", "path_paint"]


@frozen
class Line:
    """One line of an arrow's label."""

    text: str
    #: It shares its arrow with something that was taken, and was not taken itself.
    is_pale: bool = False


@frozen
class Paint:
    """What a picture shows beyond its chart; a blank one shows nothing more."""

    title: str = ""
    #: Written before the fact of a row that is on the path, once for each time it was taken.
    steps: Mapping[Edge, Sequence[str]] = field(factory=dict)
    #: How often each row was taken.
    counts: Mapping[Edge, int] = field(factory=dict)
    #: A second line in the box of a state.
    notes: Mapping[Enum, str] = field(factory=dict)
    #: The states that something was in.
    visited: frozenset[Enum] = frozenset()
    #: The state in which a fact was refused.
    refused_in: Enum | None = None

    @property
    def is_blank(self) -> bool:
        """There is nothing to lay over the picture."""
        return not self.title

    def times(self, edges: Iterable[Edge]) -> int:
        """How often any of these rows was taken."""
        return sum(self.counts.get(edge, 0) + len(self.steps.get(edge, ())) for edge in edges)

    def width(self, edges: Iterable[Edge]) -> float:
        """The width of an arrow that stands for these rows, which were taken."""
        return 2.5 if self.steps else round(1.5 + log10(self.times(edges)), 1)

    def lines(self, labels: Mapping[str, Sequence[Edge]]) -> list[Line]:
        """The lines of an arrow's label; of one that was taken, each says how often it was."""
        if not self.times(edge for edges in labels.values() for edge in edges):
            return [Line(label) for label in labels]
        if self.steps:
            return [
                Line(f"{step} {label}")
                for label, edges in labels.items()
                for edge in edges
                for step in self.steps.get(edge, ())
            ]
        return [
            Line(f"{word} ×{count:,}", is_pale=not count)
            for label, edges in labels.items()
            for word, count in self._counted(label, edges).items()
        ]

    def _counted(self, label: str, edges: Sequence[Edge]) -> dict[str, int]:
        """How often each fact was taken; a group of which none was stays one line."""
        if not self.times(edges):
            return {label: 0}
        counts: dict[str, int] = {}
        for edge in edges:
            counts[edge.label] = counts.get(edge.label, 0) + self.times([edge])
        return counts


def path_paint(
    title: str,
    path: Sequence[tuple[float | None, Edge]],
    *,
    stays: Mapping[Enum, float],
    refused_in: Enum | None = None,
    refused: str = "",
) -> Paint:
    """The path of one subject, its steps numbered; `path` holds seconds and rows.

    `stays` is how long it was in each state (seconds). `refused_in` and `refused` are the state
    and the fact at which its chart would not go on.
    """
    steps: dict[Edge, list[str]] = {}
    for number, (_, edge) in enumerate(path, 1):
        steps.setdefault(edge, []).append(f"{number}.")
    notes = {state: f"{seconds:.3f} s" for state, seconds in stays.items()}
    visited = {state for _, edge in path for state in (edge.source, edge.target)}
    if refused_in is not None:
        notes[refused_in] = f"refused {refused}"
        visited.add(refused_in)
    return Paint(title, steps, {}, notes, frozenset(visited), refused_in)


def counts_paint(
    title: str, counts: Mapping[Edge, int], inside: Mapping[Enum, int] | None = None
) -> Paint:
    """How often each row was taken, and how many subjects are in each state at the moment."""
    taken = {edge: count for edge, count in counts.items() if count}
    inside = inside or {}
    visited = {state for edge in taken for state in (edge.source, edge.target)}
    visited |= {state for state, number in inside.items() if number}
    notes = {state: f"{number:,} now" for state, number in inside.items() if number}
    return Paint(title, {}, taken, notes, frozenset(visited))
