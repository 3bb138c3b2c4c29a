"""The chart kit: one table per machine, and nothing about transitions outside it.

A chart is data. The same rows run (`Chart.fire`), are drawn, are documented, label the metrics
and are model-checked, so that none of these can drift from the others. A chart performs no I/O,
reads no clock and calls nobody but the listeners of its subject. A table that is not well-formed
is refused when it is built, which is at import.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import combinations
from typing import Protocol, Self

import transitions
from attrs import evolve, field, frozen

__all__ = [
    "Chart",
    "Edge",
    "Everywhere",
    "IllegalTransition",
    "MalformedChart",
    "Subject",
    "each",
    "everywhere",
]


@frozen(eq=False)
class Edge:
    """One row: in `source`, `fact` leads to `target`; with a guard, only while the guard holds.

    Edges are compared by identity, so that a dict of metric children keyed by edge costs nothing.
    """

    source: Enum
    fact: str
    target: Enum
    why: str
    guard: str | None = None
    #: Declared once for every open state; pictures draw such rows as one arrow.
    everywhere: bool = False
    #: The scopes of the chart that hold only the source, or only the target. The chart fills
    #: these in, so that a listener need not compare sets of states at every move.
    leaves: frozenset[str] = frozenset()
    enters: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """What stands at its arrow."""
        return f"{self.fact} [{self.guard}]" if self.guard else self.fact


@frozen
class Everywhere:
    """A row that holds in every open state; see `everywhere`."""

    fact: str
    target: Enum
    why: str

    def from_each(self, sources: Iterable[Enum]) -> Iterator[Edge]:
        for source in sources:
            yield Edge(source, self.fact, self.target, self.why, everywhere=True)


def everywhere(fact: str, target: Enum, why: str) -> Everywhere:
    """One row for all open states; it has no guard, since such facts are not argued with."""
    return Everywhere(fact, target, why)


def each(
    source: Enum, facts: Iterable[str], target: Enum, why: str, guard: str | None = None
) -> tuple[Edge, ...]:
    """One row for each of several facts that mean the same in this state."""
    return tuple(Edge(source, fact, target, why, guard) for fact in facts)


class Subject(Protocol):
    """What a machine moves: a state that only `fire` writes, and those who hear of each move.

    The guards that the chart names are further attributes. Each must be a real bool:
    `transitions` compares with `== True`, so that a counter would hold at 1 and fail at 2.
    """

    @property
    def state(self) -> Enum: ...

    @property
    def listeners(self) -> Iterable[Callable[[Self, Edge], None]]: ...


class IllegalTransition(Exception):
    """A fact arrived where the chart has no row for it: our bug, never a client's or worker's."""

    def __init__(self, machine: str, subject: object, fact: str) -> None:
        self.machine = machine
        self.subject_id = getattr(subject, "id", None)
        self.fact = fact
        self.state = getattr(subject, "state", None)
        who = machine if self.subject_id is None else f"{machine} {self.subject_id}"
        where = self.state.value if isinstance(self.state, Enum) else repr(self.state)
        super().__init__(f"{who}: {fact} in {where}")


class MalformedChart(Exception):
    """The table breaks rules of the kit; `breaches` are sentences that name the chart."""

    def __init__(self, machine: str, complaints: Iterable[str]) -> None:
        self.breaches = tuple(f"{machine}: {each}" for each in complaints)
        super().__init__("; ".join(self.breaches))


def _frozen(states: Iterable[Enum]) -> frozenset[Enum]:
    return frozenset(states)


def _frozen_states(sets: Mapping[str, Iterable[Enum]]) -> dict[str, frozenset[Enum]]:
    return {name: frozenset(members) for name, members in sets.items()}


def _frozen_facts(sets: Mapping[str, Iterable[str]]) -> dict[str, frozenset[str]]:
    return {name: frozenset(members) for name, members in sets.items()}


@frozen(eq=False)
class Chart:
    """A machine: states, facts and guards with their meaning, rows, scopes.

    `states` completes, for each state, the sentence "the <name> is ...". `scopes` names sets of
    states within which something lives (a task, a connection): an edge that leaves the set ends
    it. `ends` lists, for a scope, the facts after which its inhabitant is gone; no row may take
    such a fact and stay inside. A chart without final states must be able to return to its
    initial one from everywhere.

    With `compiled`, `fire` walks a table made once out of the interpreter's own events (0.2 µs)
    instead of asking `transitions` (6 µs). A test holds both to the same answers.
    """

    name: str
    initial: Enum
    final: frozenset[Enum] = field(converter=_frozen, repr=False)
    states: Mapping[Enum, str] = field(repr=False)
    facts: Mapping[str, str] = field(repr=False)
    rows: Sequence[Edge | Everywhere] = field(repr=False)
    guards: Mapping[str, str] = field(factory=dict, repr=False)
    scopes: Mapping[str, frozenset[Enum]] = field(
        factory=dict, converter=_frozen_states, repr=False
    )
    ends: Mapping[str, frozenset[str]] = field(factory=dict, converter=_frozen_facts, repr=False)
    #: Facts that mean the same in most states, under the word that pictures write for them.
    groups: Mapping[str, Sequence[str]] = field(factory=dict, repr=False)
    compiled: bool = field(default=False, repr=False)

    #: The rows in order of declaration, with those that hold everywhere expanded.
    edges: tuple[Edge, ...] = field(init=False, repr=False)
    #: The states that are not final, in order of declaration.
    open: tuple[Enum, ...] = field(init=False, repr=False)
    machine: transitions.Machine = field(init=False, repr=False)
    _table: dict[Enum, dict[str, tuple[Edge, ...]]] = field(init=False, repr=False)
    #: The rows of pairs that have one row only, which is never guarded.
    _sole: dict[Enum, dict[str, Edge]] = field(init=False, repr=False)
    _taken: dict[tuple[Enum, str, Enum], Edge] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        # A frozen class fills its derived fields once, here; nothing writes them afterwards.
        fill = object.__setattr__
        fill(self, "open", tuple(state for state in self.states if state not in self.final))
        fill(self, "edges", tuple(self._expanded()))
        if complaints := list(_complaints(self)):
            raise MalformedChart(self.name, complaints)
        fill(self, "machine", _interpreter(self))
        fill(self, "_taken", {(e.source, e.fact, e.target): e for e in self.edges})
        fill(self, "_table", _compile(self))
        fill(self, "_sole", {state: _sole(rows) for state, rows in self._table.items()})

    def fire(self, subject: Subject, fact: str) -> Edge:
        """Move `subject` as the table says, tell its listeners, return the edge that was taken.

        The only writer of a subject's state. Without a row for the fact it raises
        `IllegalTransition`, and nothing has changed. Listeners are called after the move: one
        that raises leaves the subject in its new state and the listeners behind it uncalled, and
        its exception is the caller's. A listener may fire facts at other subjects, never at its
        own.
        """
        if not self.compiled:
            edge = self._triggered(subject, fact)
        else:
            # Written out here: it runs ten times a request, and a call costs half as much again.
            try:
                edge = self._sole[subject.state][fact]
            except KeyError:
                edge = self._choose(subject, fact)
            subject.state = edge.target  # type: ignore[misc]  # read-only to all but the chart
        for listen in subject.listeners:
            listen(subject, edge)
        return edge

    def legal(self, state: Enum, fact: str) -> tuple[Edge, ...]:
        """The rows for this pair in the order they are tried; none means that it is illegal."""
        return self._table.get(state, {}).get(fact, ())

    def _choose(self, subject: Subject, fact: str) -> Edge:
        """The first row whose guard holds; the last row of a pair has none."""
        for edge in self._table.get(subject.state, {}).get(fact, ()):
            if edge.guard is None or getattr(subject, edge.guard) is True:
                return edge
        raise IllegalTransition(self.name, subject, fact) from None

    def _triggered(self, subject: Subject, fact: str) -> Edge:
        source = subject.state
        event = self.machine.events.get(fact)
        if event is None or source not in self.states:
            raise IllegalTransition(self.name, subject, fact)
        try:
            # The subject is never registered: that would cost 30 µs a request and keep it alive.
            event.trigger(subject)
        except transitions.MachineError:
            raise IllegalTransition(self.name, subject, fact) from None
        return self._taken[source, fact, subject.state]

    def _expanded(self) -> Iterator[Edge]:
        for row in self.rows:
            for edge in row.from_each(self.open) if isinstance(row, Everywhere) else (row,):
                yield evolve(
                    edge,
                    leaves=self._scopes_with(edge.source, without=edge.target),
                    enters=self._scopes_with(edge.target, without=edge.source),
                )

    def _scopes_with(self, state: Enum, *, without: Enum) -> frozenset[str]:
        return frozenset(
            name
            for name, members in self.scopes.items()
            if state in members and without not in members
        )


def _interpreter(chart: Chart) -> transitions.Machine:
    """One machine for the life of the process: no model, no callbacks, no back doors.

    With `auto_transitions` every state would gain a `to_<state>` that bypasses the table.
    """
    return transitions.Machine(
        model=None,
        states=list(chart.states),
        initial=chart.initial,
        auto_transitions=False,
        transitions=[
            {"trigger": e.fact, "source": e.source, "dest": e.target, "conditions": e.guard}
            for e in chart.edges
        ],
    )


def _sole(rows: Mapping[str, tuple[Edge, ...]]) -> dict[str, Edge]:
    return {fact: found[0] for fact, found in rows.items() if len(found) == 1}


def _compile(chart: Chart) -> dict[Enum, dict[str, tuple[Edge, ...]]]:
    """The interpreter's events as nested dicts: what the machine holds, not what we meant."""
    table: dict[Enum, dict[str, tuple[Edge, ...]]] = {}
    by_name = {state.name: state for state in chart.states}
    for fact, event in chart.machine.events.items():
        for source_name, rows in event.transitions.items():
            source = by_name[source_name]
            edges = tuple(chart._taken[source, fact, by_name[str(row.dest)]] for row in rows)
            table.setdefault(source, {})[fact] = edges
    return table


#### What is refused


def _complaints(chart: Chart) -> Iterator[str]:
    yield from _about_texts(chart)
    ends = {chart.initial, *(e.source for e in chart.edges), *(e.target for e in chart.edges)}
    if foreign := (ends | set(chart.final)) - set(chart.states):
        # The checks below walk the table and would only repeat this one.
        yield f"states without a text: {_list(foreign)}"
        return
    yield from _about_rows(chart)
    yield from _about_paths(chart)
    yield from _about_scopes(chart)


def _about_texts(chart: Chart) -> Iterator[str]:
    for state in type(chart.initial):
        if not chart.states.get(state, "").strip():
            yield f"state {state.value} without a text"
    for edge in chart.edges:
        if not edge.why.strip():
            yield f"row {_row(edge)} without a why"
    guards = {edge.guard for edge in chart.edges if edge.guard}
    yield from _about_words("fact", {edge.fact for edge in chart.edges}, chart.facts)
    yield from _about_words("guard", guards, chart.guards)


def _about_words(kind: str, used: set[str], texts: Mapping[str, str]) -> Iterator[str]:
    for word in sorted(used):
        if not texts.get(word, "").strip():
            yield f"{kind} {word} without a text"
    for word in texts:
        if word not in used:
            yield f"{kind} {word} is in no row"


def _about_rows(chart: Chart) -> Iterator[str]:
    tried: dict[tuple[Enum, str], list[Edge]] = {}
    for edge in chart.edges:
        earlier = tried.setdefault((edge.source, edge.fact), [])
        if edge.source in chart.final:
            yield f"row {_row(edge)} leaves a final state"
        if any(edge.target is row.target for row in earlier):
            yield f"row {_row(edge)} twice"
        elif any(row.guard in (None, edge.guard) for row in earlier):
            yield f"row {_row(edge)} can never be taken: an earlier one always is"
        earlier.append(edge)
    for rows in tried.values():
        if all(edge.guard is not None for edge in rows):
            yield f"guard {rows[-1].guard} of {_row(rows[-1])} without an unguarded fallback"


def _about_paths(chart: Chart) -> Iterator[str]:
    onward = {s: {e.target for e in chart.edges if e.source is s} for s in chart.states}
    back = {s: {e.source for e in chart.edges if e.target is s} for s in chart.states}
    reachable = _closure({chart.initial}, onward)
    for state in chart.states:
        if state not in reachable:
            yield f"state {state.value} is unreachable"
    ending = _closure(set(chart.final) or {chart.initial}, back)
    goal = "a final state" if chart.final else f"{chart.initial.value} again"
    for state in chart.open:
        if state not in ending:
            yield f"open state {state.value} cannot reach {goal}"


def _about_scopes(chart: Chart) -> Iterator[str]:
    for name, members in chart.scopes.items():
        if stray := members - set(chart.open):
            yield f"scope {name} names states that are not open: {_list(stray)}"
    for one, other in combinations(chart.scopes.values(), 2):
        if (one & other) not in (one, other, frozenset()):
            yield f"scopes overlap and do not nest: {_list(one)}; {_list(other)}"
    for scope, facts in chart.ends.items():
        if scope not in chart.scopes:
            yield f"facts that end an unknown scope: {scope}"
            continue
        if strange := facts - set(chart.facts):
            yield f"facts that end scope {scope} are in no row: {', '.join(sorted(strange))}"
        for edge in chart.edges:
            if edge.fact in facts and {edge.source, edge.target} <= chart.scopes[scope]:
                yield f"row {_row(edge)} ends what lives in {scope} and stays inside"


def _closure(start: set[Enum], steps: Mapping[Enum, set[Enum]]) -> set[Enum]:
    found, todo = set(start), list(start)
    while todo:
        fresh = steps[todo.pop()] - found
        found |= fresh
        todo.extend(fresh)
    return found


def _row(edge: Edge) -> str:
    return f"{edge.source.value} --{edge.fact}--> {edge.target.value}"


def _list(states: Iterable[Enum]) -> str:
    return ", ".join(sorted(str(state.value) for state in states))
