"""A subject that lives for one fact, so that worlds can be values and still ask the real charts."""

from enum import Enum
from functools import lru_cache

from attrs import define, field

from statemachines.chart import Chart, Edge

__all__ = ["fire", "lives_on"]

#: Questions whose answers are kept; of one chart there are some hundreds.
ANSWERS_KEPT = 10_000


@define(eq=False, slots=False)
class _Standin:
    state: Enum
    listeners: tuple[()] = field(default=(), init=False)


def fire(chart: Chart, state: Enum, fact: str, **guards: bool) -> Edge:
    """The edge the chart takes in `state` while the guards have these values."""
    return _fire(chart, state, fact, tuple(guards.items()))


def lives_on(edge: Edge, scope: str, is_alive: bool) -> bool:
    """Whether what lives in this scope is alive after the move, if it was or was not before."""
    return (is_alive and scope not in edge.leaves) or scope in edge.enters


@lru_cache(ANSWERS_KEPT)
def _fire(chart: Chart, state: Enum, fact: str, guards: tuple[tuple[str, bool], ...]) -> Edge:
    subject = _Standin(state)
    subject.__dict__.update(guards)  # guards are attributes of the subject, whichever they are
    return chart.fire(subject, fact)
