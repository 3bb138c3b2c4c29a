"""A chart as Markdown: its states, facts, guards and rows with their texts, and the full grid.

The grid has a cell for every state and fact. A blank one is a decision: that fact cannot happen
there, and if it does it is a bug that fails its subject loudly.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from statemachines.chart import Chart, Edge

__all__ = ["fact_table", "grid", "guard_table", "row_table", "state_table", "table"]


def state_table(chart: Chart) -> str:
    """Every state, the scopes that hold it, and what it means."""
    return table(
        ("state", "scopes", f"the {chart.name} is …"),
        (
            (
                f"**{state.value}**",
                "*(final)*" if state in chart.final else ", ".join(_scopes(chart, state)),
                text,
            )
            for state, text in chart.states.items()
        ),
    )


def fact_table(chart: Chart) -> str:
    """Every fact and what has happened when it is told."""
    return table(("fact", "what has happened"), _words(chart.facts.items()))


def guard_table(chart: Chart) -> str:
    """Every guard and what holds when it is true."""
    return table(("guard", "holds while"), _words(chart.guards.items()))


def row_table(chart: Chart) -> str:
    """Every row with its why; a row that holds in every open state stands once."""
    rows = {id(e) if not e.everywhere else (e.fact, e.target): e for e in chart.edges}
    return table(
        ("in", "fact", "if", "leads to", "because"),
        (
            (
                "*any open state*" if edge.everywhere else str(edge.source.value),
                f"`{edge.fact}`",
                _condition(chart, edge),
                f"**{edge.target.value}**",
                edge.why,
            )
            for edge in rows.values()
        ),
    )


def grid(chart: Chart) -> str:
    """Facts down, open states across, in the cell where it leads; blank where it is illegal."""
    return table(
        ("fact", *(str(state.value) for state in chart.open)),
        (
            (f"`{fact}`", *(_cell(chart, state, fact) for state in chart.open))
            for fact in chart.facts
        ),
    )


def _cell(chart: Chart, state: Enum, fact: str) -> str:
    rows = chart.legal(state, fact)
    return "<br>".join(
        f"{edge.target.value} *({edge.guard})*" if edge.guard else str(edge.target.value)
        for edge in rows
    )


def _condition(chart: Chart, edge: Edge) -> str:
    if edge.guard is not None:
        return f"`{edge.guard}`"
    return "otherwise" if len(chart.legal(edge.source, edge.fact)) > 1 else ""


def _scopes(chart: Chart, state: Enum) -> Iterator[str]:
    return (name for name, members in chart.scopes.items() if state in members)


def _words(texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    return ((f"`{word}`", text) for word, text in texts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
