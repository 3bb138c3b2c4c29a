"""Floor 1: every chart is well-formed, total, interpreted as written, drawn and documented."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, StrEnum
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import attrs
import pytest
from attrs import define, evolve, field

from router.agent.proxied import Proxied
from router.app import App
from router.breaker import Breaker, Permit
from router.config import Settings
from router.legs import Leg
from router.reference import blocks as reference_blocks
from router.ticket import Ticket
from router.worker import Fleet, Worker
from router.workerspec import WorkerSpec
from statemachines import (
    CHARTS,
    HANDBACK,
    LEG,
    REQUEST,
    ROUTER,
    WORKER,
    Chart,
    Edge,
    IllegalTransition,
    MalformedChart,
    generated,
)
from statemachines.breaker import BREAKER
from statemachines.chart import Everywhere, each, everywhere
from statemachines.draw import arrows, dot, mermaid, mermaid_legend
from statemachines.generated import NotDrawn, UnknownBlock, stale, write
from statemachines.leg import OUTCOMES, VERDICTS, told_by_decode, told_by_prefill
from statemachines.request import RequestState
from statemachines.tables import grid, row_table

ROOT = Path(__file__).parent.parent

every_chart = pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)


@define(eq=False, slots=False)
class Subject:
    """Anything a chart can move."""

    state: Enum
    listeners: list[Callable[[Subject, Edge], None]] = field(factory=list)

    def with_guards(self, **guards: object) -> Subject:
        self.__dict__.update(guards)
        return self


#### What is refused at import


class Light(StrEnum):
    DARK = "dark"
    LIT = "lit"
    BROKEN = "broken"


DARK, LIT, BROKEN = Light

SWITCHED = Edge(DARK, "switched", LIT, "somebody came in")
BURNT = Edge(LIT, "burnt", BROKEN, "it was old")


def lamp(
    *rows: Edge | Everywhere,
    final: Sequence[Enum] = (BROKEN,),
    states: dict[Enum, str] | None = None,
    facts: dict[str, str] | None = None,
    guards: Sequence[str] = (),
    scopes: dict[str, Sequence[Light]] | None = None,
    ends: dict[str, Sequence[str]] | None = None,
    compiled: bool = False,
) -> Chart:
    """A small chart; facts get a text of their own accord."""
    return Chart(
        name="lamp",
        initial=DARK,
        final=final,
        states=states or {DARK: "off", LIT: "on", BROKEN: "for the bin"},
        facts=facts or {row.fact: f"it was {row.fact}" for row in rows},
        guards=dict.fromkeys(guards, "a guard"),
        scopes=scopes or {},
        ends=ends or {},
        rows=rows,
        compiled=compiled,
    )


def test_a_well_formed_chart_is_accepted() -> None:
    chart = lamp(SWITCHED, BURNT, scopes={"warm": (LIT,)}, ends={"warm": ("burnt",)})

    assert chart.open == (DARK, LIT)
    assert [edge.fact for edge in chart.edges] == ["switched", "burnt"]


REFUSED: dict[str, tuple[Callable[[], Chart], str]] = {
    "an unreachable state": (
        lambda: lamp(Edge(DARK, "burnt", BROKEN, "x"), Edge(LIT, "burnt", BROKEN, "x")),
        "state lit is unreachable",
    ),
    "an open state that cannot end": (
        lambda: lamp(
            SWITCHED, Edge(DARK, "burnt", BROKEN, "x"), Edge(LIT, "switched", LIT, "again")
        ),
        "open state lit cannot reach a final state",
    ),
    "an endless chart that cannot return": (
        lambda: lamp(SWITCHED, BURNT, final=()),
        "open state broken cannot reach dark again",
    ),
    "a row twice": (
        lambda: lamp(SWITCHED, SWITCHED, BURNT),
        "row dark --switched--> lit twice",
    ),
    "a row after an unguarded one": (
        lambda: lamp(SWITCHED, Edge(DARK, "switched", BROKEN, "x"), BURNT),
        "row dark --switched--> broken can never be taken",
    ),
    "the same guard asked twice": (
        lambda: lamp(
            Edge(DARK, "switched", LIT, "x", "is_new"),
            Edge(DARK, "switched", BROKEN, "x", "is_new"),
            Edge(DARK, "switched", DARK, "x"),
            BURNT,
            guards=["is_new"],
        ),
        "row dark --switched--> broken can never be taken",
    ),
    "a guard without a fallback": (
        lambda: lamp(Edge(DARK, "switched", LIT, "x", "is_new"), BURNT, guards=["is_new"]),
        "guard is_new of dark --switched--> lit without an unguarded fallback",
    ),
    "a guard without a text": (
        lambda: lamp(
            Edge(DARK, "switched", LIT, "x", "is_new"), Edge(DARK, "switched", BROKEN, "x"), BURNT
        ),
        "guard is_new without a text",
    ),
    "a state without a text": (
        lambda: lamp(SWITCHED, BURNT, states={DARK: "off", LIT: " ", BROKEN: "for the bin"}),
        "state lit without a text",
    ),
    "a state that the chart does not list": (
        lambda: lamp(SWITCHED, BURNT, states={DARK: "off", BROKEN: "for the bin"}),
        "states without a text: lit",
    ),
    "a row without a why": (
        lambda: lamp(Edge(DARK, "switched", LIT, ""), BURNT),
        "row dark --switched--> lit without a why",
    ),
    "a fact without a text": (
        lambda: lamp(SWITCHED, BURNT, facts={"switched": "somebody pressed it"}),
        "fact burnt without a text",
    ),
    "a fact in no row": (
        lambda: lamp(SWITCHED, BURNT, facts={"switched": "x", "burnt": "x", "stolen": "x"}),
        "fact stolen is in no row",
    ),
    "a row that leaves a final state": (
        lambda: lamp(SWITCHED, BURNT, Edge(BROKEN, "repaired", LIT, "x")),
        "row broken --repaired--> lit leaves a final state",
    ),
    "a scope that names a final state": (
        lambda: lamp(SWITCHED, BURNT, scopes={"warm": (LIT, BROKEN)}),
        "scope warm names states that are not open: broken",
    ),
    "scopes that overlap and do not nest": (
        lambda: lamp(
            SWITCHED,
            Edge(LIT, "burnt", BROKEN, "x"),
            Edge(BROKEN, "repaired", DARK, "x"),
            final=(),
            scopes={"warm": (LIT, BROKEN), "usable": (LIT, DARK)},
        ),
        "scopes overlap and do not nest",
    ),
    "a fact that ends a scope and stays inside": (
        lambda: lamp(
            SWITCHED,
            BURNT,
            Edge(LIT, "cut", LIT, "x"),
            scopes={"warm": (LIT,)},
            ends={"warm": ("cut",)},
        ),
        "row lit --cut--> lit ends what lives in warm and stays inside",
    ),
    "facts that end a scope which is none": (
        lambda: lamp(SWITCHED, BURNT, ends={"warm": ("burnt",)}),
        "facts that end an unknown scope: warm",
    ),
    "an ending fact in no row": (
        lambda: lamp(SWITCHED, BURNT, scopes={"warm": (LIT,)}, ends={"warm": ("cut",)}),
        "facts that end scope warm are in no row: cut",
    ),
}


@pytest.mark.parametrize(("build", "complaint"), REFUSED.values(), ids=REFUSED)
def test_is_refused(build: Callable[[], Chart], complaint: str) -> None:
    with pytest.raises(MalformedChart, match=complaint):
        build()


def test_every_complaint_is_told_at_once() -> None:
    with pytest.raises(MalformedChart) as refusal:
        lamp(Edge(DARK, "switched", LIT, ""), BURNT, scopes={"warm": (BROKEN,)})

    assert refusal.value.breaches == (
        "lamp: row dark --switched--> lit without a why",
        "lamp: scope warm names states that are not open: broken",
    )
    assert str(refusal.value) == "; ".join(refusal.value.breaches)


def test_a_lost_leg_that_stays_in_its_attempt_is_refused() -> None:
    staying = Edge(RequestState.POISONED, "leg_lost", RequestState.POISONED, "carry on regardless")
    rows = [
        staying if (e.source, e.fact) == (staying.source, staying.fact) else e
        for e in REQUEST.edges
    ]

    with pytest.raises(MalformedChart, match="poisoned --leg_lost--> poisoned ends what lives"):
        rebuilt(REQUEST, rows)


def rebuilt(chart: Chart, rows: Sequence[Edge]) -> Chart:
    return Chart(
        name=chart.name,
        initial=chart.initial,
        final=chart.final,
        states=chart.states,
        facts=chart.facts,
        guards=chart.guards,
        scopes=chart.scopes,
        ends=chart.ends,
        rows=rows,
    )


#### fire


@pytest.mark.parametrize("compiled", [True, False])
def test_fire_moves_then_tells_every_listener(compiled: bool) -> None:
    chart = lamp(SWITCHED, BURNT, scopes={"warm": (LIT,)}, compiled=compiled)
    heard: list[tuple[str, Enum, str]] = []
    subject = Subject(DARK)
    subject.listeners += [
        lambda s, edge: heard.append(("first", s.state, edge.fact)),
        lambda s, edge: heard.append(("second", s.state, edge.fact)),
    ]

    edge = chart.fire(subject, "switched")

    assert heard == [("first", LIT, "switched"), ("second", LIT, "switched")]
    assert (edge.source, edge.target) == (DARK, LIT)
    assert edge.enters == {"warm"}
    assert chart.fire(subject, "burnt").leaves == {"warm"}


@pytest.mark.parametrize("compiled", [True, False])
def test_an_illegal_fact_raises_and_changes_nothing(compiled: bool) -> None:
    chart = lamp(SWITCHED, BURNT, compiled=compiled)
    heard: list[Edge] = []
    subject = Subject(DARK, [lambda s, edge: heard.append(edge)])

    for fact in ("burnt", "no such fact"):
        with pytest.raises(IllegalTransition, match=f"lamp: {fact} in dark"):
            chart.fire(subject, fact)

    assert subject.state is DARK
    assert heard == []


@pytest.mark.parametrize("compiled", [True, False])
def test_a_subject_of_another_machine_is_illegal(compiled: bool) -> None:
    chart = lamp(SWITCHED, BURNT, compiled=compiled)

    with pytest.raises(IllegalTransition, match="lamp: switched in queued"):
        chart.fire(Subject(RequestState.QUEUED), "switched")


def test_an_illegal_transition_names_machine_subject_fact_and_state() -> None:
    subject = Subject(RequestState.FINISHED).with_guards(id="7f3a")

    with pytest.raises(IllegalTransition, match=r"^request 7f3a: first_token in finished$"):
        REQUEST.fire(subject, "first_token")


def test_a_listener_that_raises_leaves_the_subject_moved() -> None:
    def fails(_: Subject, edge: Edge) -> None:
        raise ValueError(edge.fact)

    heard: list[Edge] = []
    subject = Subject(DARK, [fails, lambda s, edge: heard.append(edge)])

    with pytest.raises(ValueError, match="switched"):
        lamp(SWITCHED, BURNT).fire(subject, "switched")

    assert subject.state is LIT
    assert heard == []


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("value", [0, 2, None, "yes"])
def test_a_guard_that_is_no_bool_does_not_hold(compiled: bool, value: object) -> None:
    guarded = Edge(DARK, "switched", LIT, "x", "is_new")
    fallback = Edge(DARK, "switched", BROKEN, "x")
    chart = lamp(guarded, fallback, BURNT, guards=["is_new"], compiled=compiled)
    subject = Subject(DARK).with_guards(is_new=value)

    chart.fire(subject, "switched")

    assert subject.state is BROKEN


#### The interpreters agree


def by_the_rows(chart: Chart, state: Enum, fact: str, guards: dict[str, bool]) -> Enum | None:
    """The rows read as they are written: the first that fits."""
    for edge in chart.edges:
        if edge.source is state and edge.fact == fact and guards.get(edge.guard or "", True):
            return edge.target
    return None


def every_question(chart: Chart) -> Iterator[tuple[Enum, str, dict[str, bool]]]:
    for state in chart.states:
        for fact in chart.facts:
            for values in product((True, False), repeat=len(chart.guards)):
                yield state, fact, dict(zip(chart.guards, values, strict=True))


def outcome(chart: Chart, subject: Subject, fact: str) -> Enum | None:
    before = subject.state
    try:
        edge = chart.fire(subject, fact)
    except IllegalTransition:
        assert subject.state is before
        return None
    assert (edge.source, edge.fact, edge.target) == (before, fact, subject.state)
    return subject.state


@every_chart
def test_table_transitions_and_rows_give_the_same_answer(chart: Chart) -> None:
    table, interpreter = evolve(chart, compiled=True), evolve(chart, compiled=False)
    for state, fact, guards in every_question(chart):
        expected = by_the_rows(chart, state, fact, guards)
        for either in (table, interpreter):
            subject = Subject(state).with_guards(**guards)

            assert outcome(either, subject, fact) is expected, (state, fact, guards)


@every_chart
def test_transitions_moves_subjects_it_does_not_know(chart: Chart) -> None:
    """`Event.trigger` on an unregistered model is no documented recipe; the kit rests on it."""
    edge = chart.edges[0]
    subject = Subject(edge.source).with_guards(**dict.fromkeys(chart.guards, True))
    attributes = set(vars(subject))

    assert chart.machine.events[edge.fact].trigger(subject) is True

    assert subject.state is edge.target
    assert set(vars(subject)) == attributes
    assert chart.machine.models == []


@every_chart
def test_the_machine_has_no_back_doors(chart: Chart) -> None:
    assert set(chart.machine.events) == set(chart.facts)
    assert chart.machine.before_state_change == chart.machine.after_state_change == []


def test_facts_that_mean_the_same_are_rows_of_their_own() -> None:
    rows = each(LIT, ("burnt", "dropped"), BROKEN, "it is of no use")

    assert [(row.fact, row.why) for row in rows] == [
        ("burnt", "it is of no use"),
        ("dropped", "it is of no use"),
    ]


def test_what_holds_everywhere_holds_in_every_open_state() -> None:
    chart = lamp(SWITCHED, BURNT, everywhere("stolen", BROKEN, "it was worth it"))

    assert [e.source for e in chart.edges if e.fact == "stolen"] == [DARK, LIT]


#### The legs and their requests


def test_every_end_of_a_leg_has_an_outcome_and_a_verdict() -> None:
    assert set(OUTCOMES) == set(VERDICTS) == LEG.final


ANSWERS = {RequestState.COMMITTED, RequestState.STREAMING, RequestState.POISONED}
LEG_ENDS = [fact for fact in LEG.facts if any(e.fact == fact and e.leaves for e in LEG.edges)]


@pytest.mark.parametrize("fact", [fact for fact in LEG_ENDS if fact != "let_go"])
def test_however_a_leg_ends_its_request_has_a_row_for_it(fact: str) -> None:
    for state in REQUEST.scopes["attempt"]:
        answer_began = state in ANSWERS
        for end_was_seen in (False, True) if state is not RequestState.DISPATCHING else (False,):
            word = told_by_decode(fact, answer_began=answer_began, end_was_seen=end_was_seen)
            assert REQUEST.legal(state, word), (state, word)
        if fact not in ("completed", "handed_back"):
            word = told_by_prefill(fact, answer_began=answer_began)
            assert REQUEST.legal(state, word), (state, word)


#### Pictures and tables


@every_chart
def test_the_picture_shows_every_row(chart: Chart) -> None:
    drawn = arrows(chart)
    for edge in chart.edges:
        word = next((g for g, facts in chart.groups.items() if edge.fact in facts), edge.fact)
        covering = [
            arrow
            for arrow in drawn
            if arrow.target is edge.target
            and (
                edge.source in chart.scopes[arrow.box]
                if arrow.box is not None
                else arrow.source is edge.source
            )
            and any(label.split(" ")[0] in (word, edge.fact) for label in arrow.labels)
        ]
        assert len(covering) == 1, edge


@every_chart
def test_what_holds_everywhere_is_one_arrow(chart: Chart) -> None:
    for fact in {edge.fact for edge in chart.edges if edge.everywhere}:
        with_it = [arrow for arrow in arrows(chart) if fact in arrow.labels]
        assert len(with_it) == 1
        assert with_it[0].box is not None


@every_chart
def test_mermaid_declares_every_node_before_it_is_mentioned(chart: Chart) -> None:
    declared: set[str] = set()
    for line in mermaid(chart).splitlines()[1:]:
        words = line.split()
        if words[0] == "state":
            declared.add(words[-1])
        elif "-->" in words:
            assert {words[0], words[2].rstrip(":")} - {"[*]"} <= declared


@every_chart
def test_dot_boxes_each_scope_and_declares_each_state_once(chart: Chart) -> None:
    first_words = [line.split(" [")[0].strip() for line in dot(chart).splitlines()]

    for state in chart.states:
        assert first_words.count(str(state.value)) == 1
    for scope in chart.scopes:
        assert first_words.count(f'subgraph "cluster_{scope}" {{') == 1


@every_chart
def test_the_grid_has_a_cell_for_every_open_state_and_fact(chart: Chart) -> None:
    head, _, *lines = grid(chart).splitlines()

    assert len(lines) == len(chart.facts)
    assert head.count("|") == len(chart.open) + 2
    for line, fact in zip(lines, chart.facts, strict=True):
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        assert [cell == "" for cell in cells] == [
            not chart.legal(state, fact) for state in chart.open
        ]


def test_a_row_that_holds_everywhere_is_documented_once() -> None:
    assert row_table(REQUEST).count("`client_gone`") == 1


def test_a_blank_cell_is_a_fact_that_fails_loudly() -> None:
    assert BREAKER.legal(BREAKER.initial, "probe_failed") == ()


#### Generated files


def test_generated_files_are_up_to_date() -> None:
    assert stale(ROOT, reference_blocks()) == []


def test_written_files_are_fresh_and_stay_untouched(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "# Lamp\n\n<!-- generated: worker-grid -->\nold\n<!-- /generated -->\n\nby hand\n",
        encoding="utf-8",
    )

    first = write(tmp_path)

    assert tmp_path / "README.md" in first
    assert tmp_path / "diagrams" / "request.mmd" in first
    assert write(tmp_path) == []
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert text.startswith("# Lamp\n\n<!-- generated: worker-grid -->\n| fact |")
    assert text.endswith("|\n<!-- /generated -->\n\nby hand\n")


@every_chart
def test_every_machine_has_a_page_of_its_own(chart: Chart, tmp_path: Path) -> None:
    write(tmp_path)

    text = (tmp_path / "diagrams" / f"{chart.name}.md").read_text(encoding="utf-8")

    assert f"](./{chart.name}.svg)" in text
    assert f"```mermaid\n{mermaid(chart)}```" in text
    assert row_table(chart) in text
    assert grid(chart) in text
    assert ("## Guards" in text) is bool(chart.guards)


@every_chart
def test_each_word_of_a_mermaid_picture_is_a_fact_or_explained(chart: Chart) -> None:
    picture, legend = mermaid(chart), mermaid_legend(chart)

    labels = re.findall(r"^  \w+ --> \w+: (.+)$", picture, re.MULTILINE)
    words = {line.partition(" ")[0] for label in labels for line in label.split("<br/>")}
    for word in words - set(chart.facts):
        assert f"`{word}` stands for `{'`, `'.join(chart.groups[word])}`" in legend
    assert ("any state of scope" in picture) is ("any state of scope" in legend)
    assert ("[else]" in picture) is ("[else]" in legend)
    assert f"{legend}```mermaid\n" in generated.blocks()[f"{chart.name}-mermaid"]


def test_an_edited_or_missing_file_is_stale(tmp_path: Path) -> None:
    write(tmp_path)
    edited, missing = tmp_path / "diagrams" / "leg.dot", tmp_path / "diagrams" / "leg.mmd"
    edited.write_text("digraph {}", encoding="utf-8")
    missing.unlink()

    assert {edited, missing} <= set(stale(tmp_path))


def test_an_example_that_the_chart_does_not_have_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(generated, "_EXAMPLE", ((0.0, "admitted", "streaming"),))

    with pytest.raises(NotDrawn, match=r"not there: queued --admitted--> streaming"):
        stale(tmp_path)


def test_a_picture_is_stale_when_its_dot_text_is_another(tmp_path: Path) -> None:
    (tmp_path / "diagrams").mkdir()
    for picture in (ROOT / "diagrams").glob("*.svg"):
        (tmp_path / "diagrams" / picture.name).write_text(
            picture.read_text(encoding="utf-8"), encoding="utf-8"
        )
    changed = tmp_path / "diagrams" / "router.svg"
    changed.write_text(
        (tmp_path / "diagrams" / "leg.svg").read_text(encoding="utf-8"), encoding="utf-8"
    )

    assert [path for path in stale(tmp_path) if path.suffix == ".svg"] == [changed]


def test_without_graphviz_texts_are_written_and_pictures_stay_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")

    written = write(tmp_path)

    assert {path.suffix for path in written} == {".mmd", ".dot", ".md"}
    assert {path.suffix for path in stale(tmp_path)} == {".svg"}


def test_a_block_that_nobody_makes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(
        "<!-- generated: nonsense -->\n<!-- /generated -->\n", encoding="utf-8"
    )

    with pytest.raises(UnknownBlock, match=r"a\.md: no generated block is called nonsense"):
        write(tmp_path)


def test_others_may_add_blocks(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("<!-- generated: flags -->\n<!-- /generated -->\n", encoding="utf-8")

    write(tmp_path, {"flags": "--host\n"})

    assert (
        document.read_text(encoding="utf-8")
        == "<!-- generated: flags -->\n--host\n<!-- /generated -->\n"
    )


@pytest.mark.parametrize(
    ("subject", "chart"),
    [(App, ROUTER), (Breaker, BREAKER), (Proxied, HANDBACK), (Ticket, REQUEST), (Worker, WORKER)],
)
def test_subjects_begin_where_their_charts_do(subject: type, chart: Chart) -> None:
    assert attrs.fields_dict(subject)["state"].default is chart.initial


def test_legs_begin_where_their_chart_does() -> None:
    worker = Fleet(Settings()).add(WorkerSpec.of("http://127.0.0.1:1"))

    leg = Leg(
        id="1", worker=worker, role="mixed", permit=Permit(worker.breaker, 0),
        owner=Mock(), observer=Mock(), listeners=(), now=0.0,
    )  # fmt: skip

    assert leg.state is LEG.initial
