"""Floor 2: the promises hold in every order of facts, and every row of every chart is needed.

What each model does is pinned, by numbers and by a digest of every step: they change only when
behaviour does, and a reviewer should see that it did.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from router.wires.nats.broker import Message
from router.wires.nats.numbering import Numbering, Place
from router.wires.nats.protocol import DATA, FROM, SEQ, TYPE
from statemachines import BREAKER, CHARTS, HANDBACK, LEG, REQUEST, ROUTER, WORKER, worlds
from statemachines.chart import Chart, Edge, MalformedChart
from statemachines.check import deep_models, models, run_checks
from statemachines.explore import Found, Model, explore
from statemachines.graph import Graph
from statemachines.worlds import Without
from statemachines.worlds.wire_state import place_of

#### Every order of facts

#: Worlds, steps and digest of each model, smallest first.
PINNED = {
    "the router": (55, 61, "f6307df48525c1d1"),
    "one request at the agent": (104, 100, "ed945db6a4f08268"),
    "one breaker": (273, 1401, "ffb5b5017f35a277"),
    "one worker": (700, 1564, "2e76d66d40fbc71f"),
    "one request": (2672, 11781, "473e5eec00383583"),
    "one request on pairs": (6366, 18649, "beeb5261da258c74"),
    "one worker and its requests": (9402, 36215, "a42e812e6c01902f"),
    "one request behind a bad wire": (11537, 31376, "492588f3a3c10c97"),
}


def digest(model: Model[Any]) -> str:
    """Of what is shown on both sides of each step, and its word; in whatever order they come."""
    graph = Graph(model.starts, model.steps).complete()
    shown = {world: tuple(model.show(world).items()) for world in graph.worlds}
    total = 0
    for world, before in shown.items():
        for word, after in model.steps(world):
            step = repr((before, word, shown[after])).encode()
            total += int.from_bytes(hashlib.blake2b(step, digest_size=8).digest())
    return f"{total % 2**64:016x}"


@pytest.mark.slow
@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_every_order_of_facts_keeps_the_promises(model: Model[Any]) -> None:
    found = explore(model)

    assert not found.broken, found.broken[0]
    counted = found.worlds, found.steps, digest(model)
    if counted != PINNED[model.name]:
        said = f"it does something else now; if that is meant:\n{pin(model.name, counted)}"
        pytest.fail(said, pytrace=False)


def pin(name: str, counted: tuple[int, int, str]) -> str:
    """The line of PINNED, whole: an assertion would cut the digest short."""
    worlds, steps, shown = counted
    return f'    "{name}": ({worlds}, {steps}, "{shown}"),'


@pytest.mark.parametrize("name", PINNED)
def test_a_pin_is_shown_as_it_is_pasted(name: str) -> None:
    assert pin(name, PINNED[name]) in Path(__file__).read_text(encoding="utf-8").splitlines()


def test_the_check_covers_every_world() -> None:
    assert {model.name for model in models()} == set(PINNED)
    assert [model.name for model in deep_models()] == [model.name for model in models()]


#: Worlds of the nightly check.
DEEP_SIZES = {
    "one request": 38118,
    "one request on pairs": 44612,
    "one breaker": 7101,
    "one worker": 8762,
    "the router": 2269,
    "one request at the agent": 1160,
    "one worker and its requests": 149312,
    "one request behind a bad wire": 842993,
}


def test_the_page_has_the_same_numbers() -> None:
    page = (Path(__file__).parent.parent / "docs" / "statemachines.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.+?) \| .+ \| ([\d,]+ \| [\d,]+) \|$", page, re.MULTILINE))

    assert rows == {
        name: f"{worlds:,} | {DEEP_SIZES[name]:,}" for name, (worlds, *_) in PINNED.items()
    }


@pytest.mark.long
def test_a_million_worlds_keep_the_promises() -> None:
    report = run_checks(deep=True)

    assert not [str(breach) for found in report.found for breach in found.broken]
    assert {found.model: found.worlds for found in report.found} == DEEP_SIZES
    assert report.worlds > 1_000_000


#### What a wire needs

#: What breaks first, or at all, without a part of the protocol.
NEEDED_FOR = {
    Without.NUMBERS: ("no token comes to the client twice", "no token is passed over",
                      "what is finished is whole"),
    Without.CLOSED_INBOXES: ("a frame that comes late or again changes nothing",),
    Without.TOMBSTONES: ("what was cancelled before it came never reaches an engine",),
    Without.REPETITION: ("eventually whoever computes for nobody stops",),
    Without.SILENCE: ("eventually it is over, whatever the wire does",
                      "eventually a hand-back is heard, or missed as silence",
                      "eventually an agent that was killed is not waited for"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("without", NEEDED_FOR)
def test_every_part_of_the_wire_s_protocol_is_needed(without: Without) -> None:
    # Frames that still come after their inbox was closed make many more worlds.
    is_large = without is Without.CLOSED_INBOXES

    found = explore(worlds.wire(without=without), until_broken=is_large)

    broken = {each.promise for each in found.broken}
    assert broken >= set(NEEDED_FOR[without])


def test_the_router_numbers_frames_as_its_model_does() -> None:
    """Every order of four frames, each of which may come twice."""
    for order in itertools.product(range(4), repeat=5):
        frames = Numbering()
        for frame in order:
            expected = frames.expected
            message = Message("inbox", b"x", {SEQ: str(frame), FROM: "agent", TYPE: DATA})
            found = frames.place(message, is_exposed=False)
            said = {Place.NEXT: "next", Place.NONE: "again"}
            place = said[found] if isinstance(found, Place) else "gap"
            assert place == place_of(frame, expected), (order, frame)
            if place == "gap":
                break  # the attempt is given up


#### Every row and every scope earns its place

Exploration = Callable[[Chart], Found]
#: A chart that is not ours, under what is wrong with it; it may be refused when it is built.
Mutant = tuple[str, Callable[[], Chart]]

#: The models around each chart, smallest first: who breaks in a small one is not asked in others.
EXPLORATIONS: dict[Chart, Sequence[Exploration]] = {
    REQUEST: (
        lambda chart: explore(worlds.life(request=chart), until_broken=True),
        lambda chart: explore(worlds.pair(request=chart), until_broken=True),
        lambda chart: explore(worlds.fleet(request=chart), until_broken=True),
        lambda chart: explore(worlds.wire(request=chart), until_broken=True),
    ),
    LEG: (
        lambda chart: explore(worlds.life(leg=chart), until_broken=True),
        lambda chart: explore(worlds.pair(leg=chart), until_broken=True),
        lambda chart: explore(worlds.fleet(leg=chart), until_broken=True),
        lambda chart: explore(worlds.wire(leg=chart), until_broken=True),
    ),
    WORKER: (
        lambda chart: explore(worlds.worker(chart), until_broken=True),
        lambda chart: explore(worlds.fleet(worker=chart), until_broken=True),
    ),
    BREAKER: (lambda chart: explore(worlds.breaker(chart), until_broken=True),),
    ROUTER: (lambda chart: explore(worlds.router(chart), until_broken=True),),
    HANDBACK: (
        lambda chart: explore(worlds.handback(chart), until_broken=True),
        lambda chart: explore(worlds.wire(handback=chart), until_broken=True),
    ),
}


def without_a_row(chart: Chart) -> Iterator[Mutant]:
    for gone in chart.edges:
        rows = [edge for edge in chart.edges if edge is not gone]
        yield f"without {named(gone)}", partial(with_rows, chart, rows)


def with_a_guard_negated(chart: Chart) -> Iterator[Mutant]:
    for guarded, fallback in guarded_pairs(chart):
        swapped = {guarded: fallback.target, fallback: guarded.target}
        rows = [evolve(edge, target=swapped.get(edge, edge.target)) for edge in chart.edges]
        yield f"not {guarded.guard} in {named(guarded)}", partial(with_rows, chart, rows)


def with_a_guard_ignored(chart: Chart) -> Iterator[Mutant]:
    for guarded, fallback in guarded_pairs(chart):
        rows = [
            evolve(edge, guard=None if edge is guarded else edge.guard)
            for edge in chart.edges
            if edge is not fallback
        ]
        yield f"{guarded.guard} or not in {named(guarded)}", partial(with_rows, chart, rows)


def with_a_row_led_astray(chart: Chart) -> Iterator[Mutant]:
    """Each row leads to the state that is declared after its own target."""
    states = list(chart.states)
    for led in chart.edges:
        wrong = states[(states.index(led.target) + 1) % len(states)]
        rows = [evolve(edge, target=wrong) if edge is led else edge for edge in chart.edges]
        yield f"{named(led)} to {wrong.value}", partial(with_rows, chart, rows)


def with_a_scope_shrunk(chart: Chart) -> Iterator[Mutant]:
    """What lives in the scope does not live in one of its states."""
    for scope, members in chart.scopes.items():
        for state in members:
            less = {**chart.scopes, scope: members - {state}}
            yield f"{scope} without {state.value}", partial(evolve, chart, scopes=less)


def with_a_scope_grown(chart: Chart) -> Iterator[Mutant]:
    """What lives in the scope lives in one state more."""
    for scope, members in chart.scopes.items():
        for state in set(chart.open) - members:
            more = {**chart.scopes, scope: members | {state}}
            yield f"{scope} with {state.value}", partial(evolve, chart, scopes=more)


def with_another_begin(chart: Chart) -> Iterator[Mutant]:
    for state in chart.open:
        if state is not chart.initial:
            yield f"begins as {state.value}", partial(evolve, chart, initial=state)


MUTATIONS = (
    without_a_row,
    with_a_guard_negated,
    with_a_guard_ignored,
    with_a_row_led_astray,
    with_a_scope_shrunk,
    with_a_scope_grown,
    with_another_begin,
)


def guarded_pairs(chart: Chart) -> Iterator[tuple[Edge, Edge]]:
    for edge in chart.edges:
        if edge.guard is not None:
            yield edge, chart.legal(edge.source, edge.fact)[-1]


def named(edge: Edge) -> str:
    return f"{edge.source.value} --{edge.fact}--> {edge.target.value}"


def with_rows(chart: Chart, rows: list[Edge]) -> Chart:
    """The chart with these rows; words that have lost their last row go with it.

    That a text is left over would be noticed at import, but it proves nothing about behaviour.
    """
    facts = {edge.fact for edge in rows}
    guards = {edge.guard for edge in rows}
    return evolve(
        chart,
        rows=rows,
        facts={fact: text for fact, text in chart.facts.items() if fact in facts},
        guards={guard: text for guard, text in chart.guards.items() if guard in guards},
        ends={scope: ending & facts for scope, ending in chart.ends.items()},
    )


def caught_by(chart: Chart, build: Callable[[], Chart]) -> str | None:
    """The promise that the mutant of this chart breaks, in the smallest model that shows it.

    One that the kit refuses to build is caught by the rule that it breaks.
    """
    try:
        mutant = build()
    except MalformedChart as refusal:
        return f"refused: {refusal}"
    for explored in EXPLORATIONS[chart]:
        if broken := explored(mutant).broken:
            return broken[0].promise
    return None


@pytest.mark.slow
@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
@pytest.mark.parametrize("mutants", MUTATIONS)
def test_no_mutant_survives(chart: Chart, mutants: Callable[[Chart], Iterator[Mutant]]) -> None:
    survivors = [name for name, build in mutants(chart) if caught_by(chart, build) is None]

    assert not survivors, "\n".join(survivors)


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
