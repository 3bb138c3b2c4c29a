"""Floor 2: the promises hold in every order of facts, and every row of every chart is needed.

The numbers of worlds and steps are pinned: they change only when behaviour does, and a reviewer
should see that it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from attrs import evolve

from statemachines import BREAKER, CHARTS, HANDBACK, LEG, REQUEST, ROUTER, WORKER, worlds
from statemachines.chart import Chart, Edge, MalformedChart
from statemachines.check import run_checks
from statemachines.explore import Found, explore

Exploration = Callable[[Chart], Found]

#### Every order of facts


def test_one_request_keeps_its_promises() -> None:
    found = explore(worlds.life())

    assert not found.broken, found.broken[0]
    assert (found.worlds, found.steps) == (2058, 8134)


def test_one_request_on_pairs_keeps_its_promises() -> None:
    found = explore(worlds.pair())

    assert not found.broken, found.broken[0]
    assert (found.worlds, found.steps) == (3328, 10106)


def test_a_breaker_keeps_its_promises() -> None:
    found = explore(worlds.breaker())

    assert not found.broken, found.broken[0]
    assert (found.worlds, found.steps) == (273, 1401)


def test_a_worker_keeps_its_promises() -> None:
    found = explore(worlds.worker())

    assert not found.broken, found.broken[0]
    assert (found.worlds, found.steps) == (372, 846)


def test_the_router_keeps_its_promises() -> None:
    found = explore(worlds.router())

    assert not found.broken, found.broken[0]
    assert (found.worlds, found.steps) == (55, 61)


def test_a_request_at_the_agent_keeps_its_promises() -> None:
    found = explore(worlds.handback())

    assert not found.broken, found.broken[0]
    assert (found.worlds, found.steps) == (94, 90)


@pytest.mark.slow
def test_the_check_covers_every_world() -> None:
    report = run_checks()

    assert report.is_good
    assert len({each.model for each in report.found}) == 6


#### Every row earns its place


def first_breach(chart: Chart, explorations: Sequence[Exploration]) -> str | None:
    """The first promise that the chart breaks in any of the worlds."""
    for explored in explorations:
        if found := explored(chart).broken:
            return found[0].promise
    return None


EXPLORATIONS: dict[Chart, Sequence[Exploration]] = {
    REQUEST: (
        lambda chart: explore(worlds.life(request=chart), until_broken=True),
        lambda chart: explore(worlds.pair(request=chart), until_broken=True),
    ),
    LEG: (
        lambda chart: explore(worlds.life(leg=chart), until_broken=True),
        lambda chart: explore(worlds.pair(leg=chart), until_broken=True),
    ),
    WORKER: (lambda chart: explore(worlds.worker(chart), until_broken=True),),
    BREAKER: (lambda chart: explore(worlds.breaker(chart), until_broken=True),),
    ROUTER: (lambda chart: explore(worlds.router(chart), until_broken=True),),
    HANDBACK: (lambda chart: explore(worlds.handback(chart), until_broken=True),),
}

Mutant = tuple[str, list[Edge]]


def without_a_row(chart: Chart) -> Iterator[Mutant]:
    for gone in chart.edges:
        yield f"without {named(gone)}", [edge for edge in chart.edges if edge is not gone]


def with_a_guard_negated(chart: Chart) -> Iterator[Mutant]:
    for guarded, fallback in guarded_pairs(chart):
        swapped = {guarded: fallback.target, fallback: guarded.target}
        yield (
            f"not {guarded.guard} in {named(guarded)}",
            [evolve(edge, target=swapped.get(edge, edge.target)) for edge in chart.edges],
        )


def with_a_guard_ignored(chart: Chart) -> Iterator[Mutant]:
    for guarded, fallback in guarded_pairs(chart):
        yield (
            f"{guarded.guard} or not in {named(guarded)}",
            [
                evolve(edge, guard=None if edge is guarded else edge.guard)
                for edge in chart.edges
                if edge is not fallback
            ],
        )


def with_a_row_led_astray(chart: Chart) -> Iterator[Mutant]:
    """Each row leads to the state that is declared after its own target."""
    states = list(chart.states)
    for led in chart.edges:
        wrong = states[(states.index(led.target) + 1) % len(states)]
        yield (
            f"{named(led)} to {wrong.value}",
            [evolve(edge, target=wrong) if edge is led else edge for edge in chart.edges],
        )


def guarded_pairs(chart: Chart) -> Iterator[tuple[Edge, Edge]]:
    for edge in chart.edges:
        if edge.guard is not None:
            yield edge, chart.legal(edge.source, edge.fact)[-1]


def named(edge: Edge) -> str:
    return f"{edge.source.value} --{edge.fact}--> {edge.target.value}"


def survives(chart: Chart, rows: list[Edge]) -> bool:
    """Nobody notices that the chart has these rows instead of its own."""
    facts = {edge.fact for edge in rows}
    guards = {edge.guard for edge in rows}
    try:
        # Words that have lost their last row go with it: that a text is left over would be
        # noticed at import, but it proves nothing about behaviour.
        mutant = evolve(
            chart,
            rows=rows,
            facts={fact: text for fact, text in chart.facts.items() if fact in facts},
            guards={guard: text for guard, text in chart.guards.items() if guard in guards},
            ends={scope: ending & facts for scope, ending in chart.ends.items()},
        )
    except MalformedChart:
        return False
    return first_breach(mutant, EXPLORATIONS[chart]) is None


@pytest.mark.slow
@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
@pytest.mark.parametrize(
    "mutants", [without_a_row, with_a_guard_negated, with_a_guard_ignored, with_a_row_led_astray]
)
def test_no_mutant_survives(chart: Chart, mutants: Callable[[Chart], Iterator[Mutant]]) -> None:
    survivors = [name for name, rows in mutants(chart) if survives(chart, rows)]

    assert survivors == []


def test_a_broken_chart_is_shown_by_the_shortest_list_of_facts() -> None:
    """What a reader gets when a promise breaks: here the row that spares a poisoned request."""
    rows = [
        evolve(edge, target=edge.target if edge.fact != "unreplayable" else edge.source)
        for edge in REQUEST.edges
    ]

    found = explore(worlds.life(request=evolve(REQUEST, rows=rows)), until_broken=True)

    assert [word for word, _ in found.broken[0].path] == [
        "",
        "worker chosen",
        "connected",
        "head_arrived",
        "first content",
        "content of a kind of its own",
    ]
