"""A subject that lives for one fact, so that worlds can be values and still ask the real charts."""

from enum import Enum

from attrs import define, field

from statemachines.chart import Chart, Edge

__all__ = ["fire"]


@define(eq=False, slots=False)
class _Standin:
    state: Enum
    listeners: tuple[()] = field(default=(), init=False)


def fire(chart: Chart, state: Enum, fact: str, **guards: bool) -> Edge:
    """The edge the chart takes in `state` while the guards have these values."""
    subject = _Standin(state)
    subject.__dict__.update(guards)  # guards are attributes of the subject, whichever they are
    return chart.fire(subject, fact)
