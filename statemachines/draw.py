"""Pictures and tables of a chart, as text.

Everything is emitted in the order of declaration, so that the same chart gives the same bytes and
a diff of a picture is a diff of behaviour. Parallel rows share one arrow; rows that hold in every
open state are one bold arrow from the box (DOT) or a note (Mermaid), since drawn one by one they
bury the picture. Mermaid is drawn flat with the scopes as colours: arrows across the border of its
composite states end in the wrong place. Over a picture a `Paint` can be laid: a path that was
taken, or how often each row was.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from html import escape

from attrs import frozen

from statemachines.chart import Chart, Edge
from statemachines.paint import Line, Paint

__all__ = ["arrows", "dot", "mermaid", "mermaid_legend"]

#: Between an arrow and what is written beside it: Graphviz lets them touch.
_APART = "   "

#: Fill and line of a state by how many scopes hold it, then of the states nothing leaves.
DEPTHS = (("#ffffff", "#5b6770"), ("#e3eefb", "#3b6ea5"), ("#fdf0d5", "#b07d1a"))
FINAL = ("#eceff1", "#37474f")
#: The ground of a scope's box: its states' colour, paler.
TINTS = ("#ffffff", "#f6fafe", "#fffaf0")
#: What was taken, what was not, and where a fact was refused.
TAKEN, PALE, REFUSED = "#1565c0", "#cfd8dc", "#c62828"
#: The words beside what was not taken.
FADED = "#b0bec5"
PLAIN = Paint()


@frozen
class Arrow:
    """What is drawn between two states, or from a whole scope to a state."""

    #: For an arrow from a scope, the state within it where the arrow starts.
    source: Enum
    target: Enum
    #: One line of label each, and the rows it stands for.
    labels: Mapping[str, Sequence[Edge]]
    #: Taken only where no guard of another arrow holds.
    is_fallback: bool = False
    box: str | None = None

    @property
    def edges(self) -> list[Edge]:
        """The rows it stands for."""
        return [edge for edges in self.labels.values() for edge in edges]


def arrows(chart: Chart, apart: Collection[Edge] = ()) -> list[Arrow]:
    """The arrows of the chart's picture, in order of declaration, those from boxes last.

    A fact that leads out of a scope to one and the same state, from wherever in the scope it is
    legal, is drawn once, from the scope. What `everywhere` declares is a case of this. Rows in
    `apart` are drawn from their own states whatever they have in common with others.
    """
    boxes: dict[tuple[str, Enum], list[Edge]] = {}
    between: dict[tuple[Enum, Enum, bool], list[Edge]] = {}
    alone: dict[tuple[Enum, Enum], list[Edge]] = {}
    for edge in chart.edges:
        box = _box_of(chart, edge)
        if edge in apart:
            alone.setdefault((edge.source, edge.target), []).append(edge)
        elif box is not None:
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
        *(Arrow(s, t, _by_word(edges)) for (s, t), edges in alone.items()),
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


def dot(chart: Chart, paint: Paint = PLAIN) -> str:
    """The chart for Graphviz: scopes as nested boxes, merged arrows."""
    return "\n".join([f'digraph "{chart.name}" {{', *_indent(_dot_body(chart, paint)), "}", ""])


def _dot_body(chart: Chart, paint: Paint) -> Iterator[str]:
    drawn = arrows(chart, paint.steps)
    legend = "".join(f"{line}\\l" for line in [*_dot_title(paint), *_legend(chart, drawn, paint)])
    yield "rankdir=TB; compound=true; newrank=true; nodesep=0.45; ranksep=0.5;"
    yield 'fontname="Helvetica"; fontsize=11; fontcolor="#5b6770";'
    yield f'label="{legend}"; labelloc=b; labeljust=l;'
    yield 'node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=13];'
    yield 'edge [fontname="Helvetica", fontsize=10, color="#5b6770", fontcolor="#37474f"];'
    yield from _dot_scope(chart, None, list(chart.scopes), paint)
    for state in chart.states:
        if state in chart.final:
            yield _dot_state(chart, state, paint)
    yield f"initial -> {chart.initial.value};"
    for arrow in drawn:
        yield _dot_arrow(chart, arrow, paint)


def _dot_scope(
    chart: Chart, inside: str | None, names: Sequence[str], paint: Paint
) -> Iterator[str]:
    """The scopes directly within `inside` as boxes, then the states that no smaller box holds."""
    members = frozenset(chart.open) if inside is None else chart.scopes[inside]
    smaller = [n for n in names if n != inside and chart.scopes[n] <= members]
    direct = [n for n in smaller if not any(chart.scopes[n] < chart.scopes[m] for m in smaller)]
    boxed = {state for name in direct for state in chart.scopes[name]}
    if chart.initial in members - boxed:
        # Within the boxes, lest its arrow strike out the name of one.
        yield 'initial [shape=point, width=0.15, label=""];'
    for state in chart.open:
        if state in members and state not in boxed:
            yield _dot_state(chart, state, paint)
    for name in direct:
        yield f'subgraph "cluster_{name}" {{'
        yield f'  label="{name}"; labelloc=t; labeljust=l;'
        depth = sum(chart.scopes[name] <= others for others in chart.scopes.values())
        yield f'  style="rounded,filled"; color="#b0bec5"; fillcolor="{TINTS[depth]}"; margin=14;'
        yield from _indent(_dot_scope(chart, name, smaller, paint))
        yield "}"


def _dot_state(chart: Chart, state: Enum, paint: Paint) -> str:
    fill, line = _colours(chart, state)
    extra = ", peripheries=2" if state in chart.final else ""
    if state is paint.refused_in:
        line, extra = REFUSED, f"{extra}, penwidth=3"
    elif state in paint.visited:
        line, extra = TAKEN, f"{extra}, penwidth=2.5"
    elif not paint.is_blank:
        fill, line, extra = "#ffffff", PALE, f'{extra}, fontcolor="#90a4ae"'
    label = "\\n".join(_state_lines(state, paint))
    return f'{state.value} [label="{label}", fillcolor="{fill}", color="{line}"{extra}];'


def _dot_arrow(chart: Chart, arrow: Arrow, paint: Paint) -> str:
    lines = paint.lines(arrow.labels)
    if arrow.box is not None:
        # Its arrow begins at the edge of the box, beside a state that it has nothing to do with.
        lines = [Line(f"anywhere in {arrow.box}:"), *lines]
    attributes = [f"label={_dot_label(lines)}"]
    order = list(chart.states)
    ends = [arrow.source.value, arrow.target.value]
    if arrow.box is not None:
        attributes.append(f'ltail="cluster_{arrow.box}"')
    elif arrow.source is arrow.target and not chart.final:
        # Where all must be returned from, the right side belongs to the arrows that lead back.
        attributes.append("headport=w, tailport=w")
    elif order.index(arrow.target) < order.index(arrow.source):
        # The picture reads downward: an arrow that goes back must not turn it around. Written from
        # its head it is led around the labels instead of through them.
        ends.reverse()
        attributes.append("dir=back, constraint=false")
    attributes += _dot_stroke(arrow, paint)
    return f"{' -> '.join(ends)} [{', '.join(attributes)}];"


def _dot_label(lines: Sequence[Line]) -> str:
    """A text, or where its lines differ in colour, Graphviz's own kind of HTML."""
    if not any(line.is_pale for line in lines):
        return '"' + "".join(f"{_APART}{line.text}\\l" for line in lines) + '"'
    marked = ""
    for line in lines:
        text = f"{_APART}{escape(line.text)} "
        marked += f'<font color="{FADED}">{text}</font>' if line.is_pale else text
        marked += '<br align="left"/>'
    return f"<{marked}>"


def _dot_stroke(arrow: Arrow, paint: Paint) -> list[str]:
    bold = ["penwidth=2.5"] if arrow.box is not None else []
    dashes = ["style=dashed"] if arrow.is_fallback else []
    if paint.times(arrow.edges):
        taken = [f"penwidth={paint.width(arrow.edges)}", f'color="{TAKEN}", fontcolor="{TAKEN}"']
        return [*dashes, *taken]
    if not paint.is_blank:
        return [*bold, *dashes, f'color="{PALE}", fontcolor="{FADED}"']
    return [*bold, *(f'{style}, color="#90a4ae"' for style in dashes)]


def _dot_title(paint: Paint) -> list[str]:
    return [] if paint.is_blank else [paint.title.replace("\\", "/").replace('"', "'")]


def mermaid(chart: Chart, paint: Paint = PLAIN) -> str:
    """The chart as a Mermaid state diagram: flat, scopes as colours, a node for each box."""
    return "\n".join(["stateDiagram-v2", *_indent(_mermaid_body(chart, paint)), ""])


def mermaid_legend(chart: Chart) -> str:
    """A line of Markdown with what the picture cannot say of itself, if there is anything."""
    drawn = arrows(chart)
    lines = [
        f"`{group}` stands for {', '.join(f'`{fact}`' for fact in members)}"
        for group, members in chart.groups.items()
    ]
    if any(arrow.is_fallback for arrow in drawn):
        lines.append("`[else]` is where the guard does not hold")
    if any(arrow.box for arrow in drawn):
        lines.append(
            "*any state of scope …* is every state of it where the fact can happen, if no guard "
            "holds"
        )
    return f"In it {'; '.join(lines)}.\n\n" if lines else ""


def _mermaid_body(chart: Chart, paint: Paint) -> Iterator[str]:
    drawn = arrows(chart, paint.steps)
    boxes = dict.fromkeys(arrow.box for arrow in drawn if arrow.box)
    # Every node comes first: what is mentioned before it is declared is refused by the parser.
    for state in chart.states:
        yield f'state "{"<br/>".join(_state_lines(state, paint))}" as {state.value}'
    for box in boxes:
        yield f'state "any state of scope {box}" as any_{box}'
    yield f"[*] --> {chart.initial.value}"
    for arrow in drawn:
        source = f"any_{arrow.box}" if arrow.box else str(arrow.source.value)
        suffix = " [else]" if arrow.is_fallback else ""
        label = "<br/>".join(f"{line.text}{suffix}" for line in paint.lines(arrow.labels))
        yield f"{source} --> {arrow.target.value}: {label}"
    for state in chart.states:
        if state in chart.final:
            yield f"{state.value} --> [*]"
    yield from _mermaid_colours(chart, list(boxes), paint)


def _mermaid_colours(chart: Chart, boxes: Sequence[str], paint: Paint) -> Iterator[str]:
    by_colour: dict[tuple[str, str], list[str]] = {}
    for state in chart.states:
        by_colour.setdefault(_colours(chart, state), []).append(str(state.value))
    for box in boxes:
        depth = sum(chart.scopes[box] <= members for members in chart.scopes.values())
        by_colour.setdefault(DEPTHS[depth], []).append(f"any_{box}")
    for number, ((fill, line), nodes) in enumerate(by_colour.items()):
        yield f"classDef colour{number} fill:{fill},stroke:{line},color:#263238"
        yield f"class {','.join(nodes)} colour{number}"
    taken = [str(s.value) for s in chart.states if s in paint.visited and s is not paint.refused_in]
    if taken:
        yield f"classDef taken stroke:{TAKEN},stroke-width:3px"
        yield f"class {','.join(taken)} taken"
    if paint.refused_in is not None:
        yield f"classDef refused stroke:{REFUSED},stroke-width:3px"
        yield f"class {paint.refused_in.value} refused"


def _state_lines(state: Enum, paint: Paint) -> list[str]:
    note = paint.notes.get(state)
    return [str(state.value).replace("_", " "), *([note] if note else [])]


def _legend(chart: Chart, drawn: Sequence[Arrow], paint: Paint) -> list[str]:
    lines = [f"{group}: {', '.join(members)}" for group, members in chart.groups.items()]
    if paint.counts:
        lines.append("blue ×N: taken so often; pale: never")
    if chart.scopes:
        lines.append("box: a scope, the states within which something lives")
    if any(arrow.is_fallback for arrow in drawn):
        lines.append("dashed: where the guard does not hold")
    if any(arrow.box for arrow in drawn):
        lines.append(
            "bold: from every state of the box where the fact can happen, if no guard holds"
        )
    return lines


def _labels(chart: Chart, edges: Sequence[Edge]) -> dict[str, list[Edge]]:
    """One line a fact and guard; a whole group of facts with the same guard is one line."""
    words = _by_word(edges)
    for group, members in chart.groups.items():
        for suffix in ("", *(f" [{guard}]" for guard in chart.guards)):
            whole = [f"{fact}{suffix}" for fact in members]
            if set(whole) <= set(words):
                merged = [edge for word in whole for edge in words[word]]
                words = {
                    f"{group}{suffix}" if word in whole else word: (
                        merged if word in whole else found
                    )
                    for word, found in words.items()
                }
    return words


def _by_word(edges: Sequence[Edge]) -> dict[str, list[Edge]]:
    words: dict[str, list[Edge]] = {}
    for edge in edges:
        words.setdefault(edge.label, []).append(edge)
    return words


def _colours(chart: Chart, state: Enum) -> tuple[str, str]:
    if state in chart.final:
        return FINAL
    return DEPTHS[sum(state in members for members in chart.scopes.values())]


def _indent(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}"
