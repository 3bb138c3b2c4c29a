"""A recorded log of transitions, run through the charts again.

A record says what a router noted: machine, id, state, fact, next state. Each subject's facts are
fired at its chart in the order of the log, and the chart has to end up where the log says it did.
The recorded target tells which guarded row was taken, since no log holds what guards read; a
target that no row leads to is refused like a fact without a row. A log may begin in the middle of
a life, lose transitions, and use an id again after, or even during, its first life.
"""

from collections.abc import Iterable, Iterator
from enum import Enum

from attrs import define, field, frozen

from statemachines import CHARTS
from statemachines.chart import Chart, Edge

__all__ = ["Life", "Lost", "Record", "Refusal", "Replay", "replay"]

_CHARTS = {chart.name: chart for chart in CHARTS}


@frozen
class Record:
    """One transition as it was noted.

    `seconds` is on the clock of its log, and `place` says where in there it stands.
    """

    machine: str
    id: str
    source: str
    fact: str
    target: str
    seconds: float | None = None
    place: str = ""


@frozen
class Lost:
    """So many transitions are missing here, of whichever subjects."""

    count: int


@frozen
class Refusal:
    """The record that a chart does not allow, and what it would have allowed."""

    record: Record
    #: A sentence.
    reason: str
    #: Where the subject was according to its chart; None where there is no chart or no such state.
    state: Enum | None = None
    legal: tuple[Edge, ...] = ()


@define(eq=False, slots=False)
class Life:
    """One subject from its first record to its last; the subject of its chart.

    After lost transitions a life that was found elsewhere goes on as another, late one.
    """

    chart: Chart
    id: str
    state: Enum
    #: Its first record did not start in the initial state: the log begins in its middle.
    is_late: bool = False
    #: Records may be missing since the last one.
    is_unsure: bool = False
    #: Seconds and row of every transition.
    path: list[tuple[float | None, Edge]] = field(factory=list)
    refusal: Refusal | None = None
    listeners: tuple[()] = field(default=(), init=False)

    @property
    def is_over(self) -> bool:
        """In a final state."""
        return self.state in self.chart.final

    @property
    def name(self) -> str:
        """Machine and id."""
        return f"{self.chart.name} {self.id}"

    def fire(self, fact: str, row: Edge) -> Edge:
        """Move as the chart says while its guards are such that this row is taken."""
        for each in self.chart.legal(self.state, fact):
            if each.guard is not None:
                # Guards are attributes of the subject, whichever they are.
                self.__dict__[each.guard] = each is row
        return self.chart.fire(self, fact)

    def stays(self, began: float | None = None) -> Iterator[float | None]:
        """Seconds in the source of each transition; `began` is when the first state was entered."""
        before = began
        for seconds, _ in self.path:
            known = seconds is not None and before is not None
            yield seconds - before if known else None  # type: ignore[operator]  # known
            before = seconds

    def last_stay(self, until: float | None) -> float | None:
        """Seconds in the state where it is, up to this moment; None where it is over."""
        since = self.path[-1][0] if self.path else None
        return None if self.is_over or until is None or since is None else until - since

    def total_stays(
        self, began: float | None = None, until: float | None = None
    ) -> dict[Enum, float]:
        """Seconds in each state, over all of its stays, as far as they are known.

        `began` is when the first state was entered, `until` up to when the last one is watched.
        """
        states = [*(edge.source for _, edge in self.path), self.state]
        total: dict[Enum, float] = {}
        for state, seconds in zip(states, [*self.stays(began), self.last_stay(until)], strict=True):
            if seconds is not None:
                total[state] = total.get(state, 0.0) + seconds
        return total


@frozen
class Replay:
    """What came of it."""

    lives: tuple[Life, ...]
    refusals: tuple[Refusal, ...]
    #: Transitions that the log says it lacks.
    lost: int
    #: Records of subjects that had been refused.
    unjudged: int


def replay(records: Iterable[Record | Lost], *, is_whole: bool = False) -> Replay:
    """Fire every record at its chart; refusals come in the order of the log.

    `is_whole`: the log has every subject from its first transition, so one that begins elsewhere
    than in its initial state is refused.
    """
    running = _Replay(is_whole)
    for record in records:
        if isinstance(record, Lost):
            running.lose(record.count)
        else:
            running.take(record)
    return Replay(
        tuple(running.lives), tuple(running.refusals), running.lost, unjudged=running.unjudged
    )


@define(eq=False)
class _Replay:
    is_whole: bool
    lives: list[Life] = field(factory=list)
    refusals: list[Refusal] = field(factory=list)
    lost: int = 0
    unjudged: int = 0
    #: The lives of an id that are going on, and the last one that has ended.
    _by_id: dict[tuple[str, str], list[Life]] = field(factory=dict)
    _refused: set[tuple[str, str]] = field(factory=set)

    def lose(self, count: int) -> None:
        self.lost += count
        for lives in self._by_id.values():
            for life in lives:
                life.is_unsure = True

    def take(self, record: Record) -> None:
        key = record.machine, record.id
        if key in self._refused:
            self.unjudged += 1
            return
        life, refusal = self._judge(record)
        if refusal is not None:
            self._refused.add(key)
            self.refusals.append(refusal)
            if life is not None:
                life.refusal = refusal

    def _judge(self, record: Record) -> tuple[Life | None, Refusal | None]:
        chart = _CHARTS.get(record.machine)
        if chart is None:
            known = ", ".join(_CHARTS)
            return None, Refusal(record, f"there is no machine {record.machine}, but {known}")
        states = {str(state.value): state for state in chart.states}
        for word in (record.source, record.target):
            if word not in states:
                return None, Refusal(record, f"the {chart.name} machine has no state {word}")
        life = self._life_of(record, chart, states[record.source])
        return life, _advance(life, record, states[record.target])

    def _life_of(self, record: Record, chart: Chart, source: Enum) -> Life:
        """Whose record this is: a life that is in this state, or a new one."""
        lives = self._by_id.setdefault((record.machine, record.id), [])
        for life in lives:
            if life.state is source:
                return life
        # What led an unsure one away from where it was is among the lost.
        may_be_late = not self.is_whole and (not lives or any(each.is_unsure for each in lives))
        lives[:] = [each for each in lives if not each.is_unsure]
        if source is not chart.initial and not may_be_late and lives:
            return lives[-1]
        begins = source if may_be_late else chart.initial
        life = Life(chart, record.id, begins, is_late=begins is not chart.initial)
        lives[:] = [*(each for each in lives if not each.is_over), life]
        self.lives.append(life)
        return life


def _advance(life: Life, record: Record, target: Enum) -> Refusal | None:
    """Fire the fact with guards that lead to the recorded target, or say why that is refused."""
    chart, state = life.chart, life.state
    if record.source != state.value:
        reason = f"it was noted in {record.source}, but its chart is in {state.value}"
        return Refusal(record, reason, state, _legal_in(chart, state))
    rows = chart.legal(state, record.fact)
    if not rows:
        known = "" if record.fact in chart.facts else "; the machine knows no such fact"
        reason = f"{record.fact} is illegal in {state.value}{known}"
        return Refusal(record, reason, state, _legal_in(chart, state))
    row = next((each for each in rows if each.target is target), None)
    if row is None:
        targets = " or ".join(str(each.target.value) for each in rows)
        reason = f"{record.fact} in {state.value} leads to {targets}, not to {target.value}"
        return Refusal(record, reason, state, rows)
    life.path.append((record.seconds, life.fire(record.fact, row)))
    return None


def _legal_in(chart: Chart, state: Enum) -> tuple[Edge, ...]:
    return tuple(edge for edge in chart.edges if edge.source is state)
