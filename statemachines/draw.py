"""Pictures and tables of a chart, as text.

Everything is emitted in the order of declaration, so that the same chart gives the same bytes and
a diff of a picture is a diff of behaviour. Parallel rows share one arrow; rows that hold in every
open state are one bold arrow from the box (DOT) or a note (Mermaid), since drawn one by one they
bury the picture. Mermaid is drawn flat with the scopes as colours: arrows across the border of its
composite states end in the wrong place.
"""

from collections.abc import Iterator, Sequence
from enum import Enum

from attrs import frozen

from statemachines.chart import Chart, Edge

__all__ = ["arrows", "dot", "mermaid"]

#: Fill and line of a state by how many scopes hold it, then of the states nothing leaves.
DEPTHS = (("#ffffff", "#5b6770"), ("#e3eefb", "#3b6ea5"), ("#fdf0d5", "#b07d1a"))
FINAL = ("#eceff1", "#37474f")


@frozen
class Arrow:
    """What is drawn between two states, or from a whole scope to a state."""

    #: For an arrow from a scope, the state within it where the arrow starts.
    source: Enum
    target: Enum
    #: One line of label each.
    labels: tuple[str, ...]
    #: Taken only where no guard of another arrow holds.
    is_fallback: bool = False
    box: str | None = None


def arrows(chart: Chart) -> list[Arrow]:
    """The arrows of the chart's picture, in order of declaration, those from boxes last.

    A fact that leads out of a scope to one and the same state, from wherever in the scope it is
    legal, is drawn once, from the scope. What `everywhere` declares is a case of this.
    """
    boxes: dict[tuple[str, Enum], list[Edge]] = {}
    between: dict[tuple[Enum, Enum, bool], list[Edge]] = {}
    for edge in chart.edges:
        box = _box_of(chart, edge)
        if box is not None:
            boxes.setdefault((box, edge.target), []).append(edge)
        else:
            # A fallback that stays where it is shares the loop of the other facts.
            fallback = _is_fallback(chart, edge) and edge.source is not edge.target
            between.setdefault((edge.source, edge.target, fallback), []).append(edge)
    return [
        *(Arrow(s, t, _labels(chart, edges), f) for (s, t, f), edges in between.items()),
        *(
            Arrow(_last(chart, box), t, _labels(chart, edges), box=box)
            for (box, t), edges in boxes.items()
        ),
    ]


def _box_of(chart: Chart, edge: Edge) -> str | None:
    """The smallest scope that holds every state where the fact is legal, if all lead there."""
    legal = {state for state in chart.open if chart.legal(state, edge.fact)}
    leads = {e.source for e in chart.edges if (e.fact, e.target) == (edge.fact, edge.target)}
    if len(legal) < 2 or leads != legal:
        return None
    around = [name for name, members in chart.scopes.items() if legal <= members]
    outside = [name for name in around if edge.target not in chart.scopes[name]]
    return min(outside, key=lambda name: len(chart.scopes[name]), default=None)


def _last(chart: Chart, scope: str) -> Enum:
    return next(state for state in reversed(chart.open) if state in chart.scopes[scope])


def _is_fallback(chart: Chart, edge: Edge) -> bool:
    return edge.guard is None and len(chart.legal(edge.source, edge.fact)) > 1


def dot(chart: Chart) -> str:
    """The chart for Graphviz: scopes as nested boxes, merged arrows."""
    return "\n".join([f'digraph "{chart.name}" {{', *_indent(_dot_body(chart)), "}", ""])


def _dot_body(chart: Chart) -> Iterator[str]:
    yield "rankdir=TB; compound=true; newrank=true; nodesep=0.45; ranksep=0.5;"
    yield 'fontname="Helvetica"; fontsize=11; fontcolor="#5b6770";'
    yield f'label="{_legend(chart)}"; labelloc=b; labeljust=l;'
    yield 'node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=13];'
    yield 'edge [fontname="Helvetica", fontsize=10, color="#5b6770", fontcolor="#37474f"];'
    yield 'initial [shape=point, width=0.15, label=""];'
    yield from _dot_scope(chart, None, list(chart.scopes))
    for state in chart.states:
        if state in chart.final:
            yield _dot_state(chart, state)
    yield f"initial -> {chart.initial.value};"
    for arrow in arrows(chart):
        yield _dot_arrow(chart, arrow)


def _dot_scope(chart: Chart, inside: str | None, names: Sequence[str]) -> Iterator[str]:
    """The scopes directly within `inside` as boxes, then the states that no smaller box holds."""
    members = frozenset(chart.open) if inside is None else chart.scopes[inside]
    smaller = [n for n in names if n != inside and chart.scopes[n] <= members]
    direct = [n for n in smaller if not any(chart.scopes[n] < chart.scopes[m] for m in smaller)]
    boxed = {state for name in direct for state in chart.scopes[name]}
    for state in chart.open:
        if state in members and state not in boxed:
            yield _dot_state(chart, state)
    for name in direct:
        yield f'subgraph "cluster_{name}" {{'
        yield f'  label="scope: {name}"; labelloc=t; labeljust=l;'
        yield '  style="rounded"; color="#b0bec5"; margin=14;'
        yield from _indent(_dot_scope(chart, name, smaller))
        yield "}"


def _dot_state(chart: Chart, state: Enum) -> str:
    fill, line = _colours(chart, state)
    extra = ", peripheries=2" if state in chart.final else ""
    label = str(state.value).replace("_", " ")
    return f'{state.value} [label="{label}", fillcolor="{fill}", color="{line}"{extra}];'


def _dot_arrow(chart: Chart, arrow: Arrow) -> str:
    attributes = ['label="' + "".join(f" {label}\\l" for label in arrow.labels) + '"']
    order = list(chart.states)
    if arrow.box is not None:
        attributes += [f'ltail="cluster_{arrow.box}"', "penwidth=2.5"]
    elif order.index(arrow.target) < order.index(arrow.source):
        # The picture reads downward; an arrow that goes back must not turn it around.
        attributes.append("constraint=false")
    if arrow.is_fallback:
        attributes.append('style=dashed, color="#90a4ae"')
    return f"{arrow.source.value} -> {arrow.target.value} [{', '.join(attributes)}];"


def mermaid(chart: Chart) -> str:
    """The chart as a Mermaid state diagram: flat, scopes as colours, a node for each box."""
    return "\n".join(["stateDiagram-v2", *_indent(_mermaid_body(chart)), ""])


def _mermaid_body(chart: Chart) -> Iterator[str]:
    drawn = arrows(chart)
    boxes = dict.fromkeys(arrow.box for arrow in drawn if arrow.box)
    # Every node comes first: what is mentioned before it is declared is refused by the parser.
    for state in chart.states:
        yield f'state "{str(state.value).replace("_", " ")}" as {state.value}'
    for box in boxes:
        yield f'state "any state of scope {box}" as any_{box}'
    yield f"[*] --> {chart.initial.value}"
    for arrow in drawn:
        source = f"any_{arrow.box}" if arrow.box else str(arrow.source.value)
        suffix = " [else]" if arrow.is_fallback else ""
        label = "<br/>".join(f"{label}{suffix}" for label in arrow.labels)
        yield f"{source} --> {arrow.target.value}: {label}"
    for state in chart.states:
        if state in chart.final:
            yield f"{state.value} --> [*]"
    yield from _mermaid_colours(chart, list(boxes))


def _mermaid_colours(chart: Chart, boxes: Sequence[str]) -> Iterator[str]:
    by_colour: dict[tuple[str, str], list[str]] = {}
    for state in chart.states:
        by_colour.setdefault(_colours(chart, state), []).append(str(state.value))
    for box in boxes:
        depth = sum(chart.scopes[box] <= members for members in chart.scopes.values())
        by_colour.setdefault(DEPTHS[depth], []).append(f"any_{box}")
    for number, ((fill, line), nodes) in enumerate(by_colour.items()):
        yield f"classDef colour{number} fill:{fill},stroke:{line},color:#263238"
        yield f"class {','.join(nodes)} colour{number}"


def _legend(chart: Chart) -> str:
    lines = [f"{group}: {', '.join(members)}" for group, members in chart.groups.items()]
    if any(arrow.is_fallback for arrow in arrows(chart)):
        lines.append("dashed: where the guard does not hold")
    if any(arrow.box for arrow in arrows(chart)):
        lines.append(
            "bold: from every state of the box where the fact can happen, if no guard holds"
        )
    return "".join(f"{line}\\l" for line in lines)


def _labels(chart: Chart, edges: Sequence[Edge]) -> tuple[str, ...]:
    """One line a fact and guard; a whole group of facts with the same guard is one line."""
    words = dict.fromkeys(f"{e.fact} [{e.guard}]" if e.guard else e.fact for e in edges)
    for group, members in chart.groups.items():
        for suffix in ("", *(f" [{guard}]" for guard in chart.guards)):
            whole = [f"{fact}{suffix}" for fact in members]
            if set(whole) <= set(words):
                words = dict.fromkeys(
                    f"{group}{suffix}" if word in whole else word for word in words
                )
    return tuple(words)


def _colours(chart: Chart, state: Enum) -> tuple[str, str]:
    if state in chart.final:
        return FINAL
    return DEPTHS[sum(state in members for members in chart.scopes.values())]


def _indent(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}"
