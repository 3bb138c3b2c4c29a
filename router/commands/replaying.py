"""`baton replay`: a recorded log through the charts, as tables and as a picture.

Exit code 0: the charts allow what was recorded. 1: they refuse it, and the first illegal fact is
shown. 2: there is nothing to replay, or the picture cannot be made. 3: they allow what is there,
but a part of the recording is cut off or broken.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import attrs

from router.commands.columns import columns, counted, printable
from router.commands.mistakes import complain
from router.commands.recordings import BadRecording, Leg, Recording, read_recording, shown
from router.reasons import in_words
from statemachines import CHARTS
from statemachines.chart import Chart
from statemachines.draw import dot, mermaid
from statemachines.generated import NotDrawn, svg
from statemachines.paint import Paint, counts_paint, path_paint
from statemachines.replay import Life, Record, Refusal, Replay, replay

#: More lives than these are counted instead of shown, unless --all is given.
SHOWN_MAX = 20
#: So many ids are listed to one who has named another.
IDS_MAX = 8
MACHINES = tuple(chart.name for chart in CHARTS)
_HEAD = ("seconds", "stayed", "in", "fact", "if", "leads to", "because")
_LEGS_HEAD = ("began", "took", "worker", "role", "last fact", "HTTP", "leg", "what was met")


class Mistake(Exception):
    """Nothing can be replayed or drawn; the message is one line."""


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE and what to show of it."""
    parser.epilog = (
        "FILE is the answer of /debug/requests/ID, or lines of /debug/transitions (baton watch "
        "--json) or of a log with --log-format json --log-level debug. Where a guard decided, the "
        "recorded state tells how. Exit code 0: legal; 1: refused; 2: nothing to replay; 3: legal, "
        "but lines of it are cut off or broken."
    )
    parser.add_argument("file", metavar="FILE", help="what was recorded; - reads standard input")
    parser.add_argument("--machine", help=f"only subjects of this machine: {', '.join(MACHINES)}")
    parser.add_argument("--id", help="only the subject with this id")
    parser.add_argument(
        "--all", action="store_true", help=f"show every subject, also of more than {SHOWN_MAX}"
    )
    parser.add_argument(
        "--draw",
        metavar="FILE",
        help="draw the path on the machine's diagram (of several subjects: how often each row "
        "was taken); .svg, .dot or .mmd",
    )
    parser.set_defaults(command=run_replay)


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay, print, draw; returns the exit code."""
    try:
        _check_machine(arguments.machine)
        recording = _select(_read(arguments.file), arguments.machine, arguments.id)
        found = replay(recording.records, is_whole=recording.is_whole)
        if arguments.draw:
            _draw(arguments.draw, found, recording, arguments.file)
    except (Mistake, NotDrawn, OSError) as problem:
        return complain("replay", problem)
    print("\n".join(_report(found, recording, shows_all=arguments.all)))
    if found.refusals or _differs(found, recording):
        return 1
    return 3 if recording.gaps else 0


def _check_machine(name: str | None) -> None:
    if name is not None and name not in MACHINES:
        raise Mistake(f"--machine {name}: there is no such machine; there are {_listed(MACHINES)}")


def _read(name: str) -> Recording:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as problem:
        raise Mistake(in_words(problem)) from None
    try:
        return read_recording(data)
    except BadRecording as problem:
        raise Mistake(f"{'standard input' if name == '-' else name}: {problem}") from None


def _select(recording: Recording, machine: str | None, id: str | None) -> Recording:
    """Only what is asked for; raises Mistake where that is nothing."""
    found = [each for each in recording.records if isinstance(each, Record)]
    found = _only(found, "--machine", machine, lambda record: record.machine)
    found = _only(found, "--id", id, lambda record: record.id)
    kept = {(each.machine, each.id) for each in found}
    records = tuple(
        each
        for each in recording.records
        if not isinstance(each, Record) or (each.machine, each.id) in kept
    )
    return attrs.evolve(recording, records=records)


def _only(
    found: list[Record], flag: str, wanted: str | None, name_of: Callable[[Record], str]
) -> list[Record]:
    if wanted is None:
        return found
    names = tuple(dict.fromkeys(map(name_of, found)))
    if wanted not in names:
        raise Mistake(f"{flag} {wanted}: none is recorded; there are {_listed(names)}")
    return [each for each in found if name_of(each) == wanted]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - IDS_MAX:,} more" if len(names) > IDS_MAX else ""
    return ", ".join(map(shown, names[:IDS_MAX])) + more


def _differs(found: Replay, recording: Recording) -> bool:
    """The router shows another state than the facts lead to."""
    states = {str(life.state.value) for life in found.lives}
    return recording.state is not None and bool(states) and recording.state not in states


#### In words


def _report(found: Replay, recording: Recording, *, shows_all: bool) -> Iterator[str]:
    refused = [life for life in found.lives if life.refusal is not None]
    if shows_all or len(found.lives) <= SHOWN_MAX:
        shown = found.lives
    else:
        shown = tuple(refused[:1])
        yield from _counted(found)
    for life in shown:
        yield from _table_of(life, recording)
    if recording.legs:
        yield columns([_LEGS_HEAD, *map(_row_of_leg, recording.legs)], "  ")
        yield ""
    if found.refusals:
        yield from _refused(found.refusals[0])
    elif _differs(found, recording):
        yield f"refused: the router showed it in {recording.state}"
        yield ""
    notes = [*recording.gaps, *recording.remarks, *_backward(found, recording)]
    if notes:
        yield from (f"note: {note}" for note in notes)
        yield ""
    yield _summary(found, recording)


def _backward(found: Replay, recording: Recording) -> Iterator[str]:
    """Of times that are earlier than the time before."""
    names = []
    for life in found.lives:
        times = [seconds for seconds, _ in life.path if seconds is not None]
        began = [0.0] if recording.is_whole else []
        names += [life.name for one, other in pairwise([*began, *times]) if other < one]
    if names:
        yield f"{counted(len(names), 'time')} before the one before, the first of {names[0]}"


def _counted(found: Replay) -> Iterator[str]:
    counts = Counter((life.chart.name, str(life.state.value)) for life in found.lives)
    rows = [(machine, state, f"{count:,}") for (machine, state), count in counts.items()]
    yield columns([("machine", "ends in", "subjects"), *rows], "  ")
    yield ""


def _table_of(life: Life, recording: Recording) -> Iterator[str]:
    late = "; its beginning is not in the log" if life.is_late else ""
    yield _title(life, recording) + late
    if life.path:
        yield columns([_HEAD, *_rows_of(life, recording)], "  ")
    yield ""


def _title(life: Life, recording: Recording) -> str:
    facts = counted(len(life.path), "fact")
    began, ended = _began(life, recording), life.path[-1][0] if life.path else None
    took = f" in {ended - began:.3f} s" if began is not None and ended is not None else ""
    stayed = _last_stay(life, recording)
    still = "" if stayed is None else f" for {stayed:.3f} s"
    return f"{life.name}: {facts}{took}, {life.state.value}{still}"


def _began(life: Life, recording: Recording) -> float | None:
    """The log's time at which the life began, as far as it is known."""
    if recording.is_whole:
        return 0.0
    return life.path[0][0] if life.path else None


def _last_stay(life: Life, recording: Recording) -> float | None:
    """Seconds in the state where it was when the router was asked, if it is known to be there."""
    is_there = life.refusal is None and life.state.value == recording.state
    return life.last_stay(recording.asked_at) if is_there else None


def _rows_of(life: Life, recording: Recording) -> Iterator[tuple[str, ...]]:
    began = _began(life, recording)
    stays = life.stays(0.0 if recording.is_whole else None)
    for (seconds, edge), stayed in zip(life.path, stays, strict=True):
        at = None if seconds is None or began is None else seconds - began
        condition = edge.guard or (
            "otherwise" if len(life.chart.legal(edge.source, edge.fact)) > 1 else ""
        )
        yield (
            _time(at),
            _time(stayed),
            str(edge.source.value),
            edge.fact,
            condition,
            str(edge.target.value),
            edge.why,
        )
    if (stayed := _last_stay(life, recording)) is not None:
        still = "still there when the router was asked"
        yield _time(recording.asked_at), _time(stayed), str(life.state.value), "", "", "", still


def _row_of_leg(leg: Leg) -> tuple[str, ...]:
    took = None if leg.ended is None else leg.ended - leg.began
    status = "" if leg.status is None else str(leg.status)
    words = (leg.worker, leg.role, leg.fact or "", status, leg.state, leg.detail or "")
    return _time(leg.began), _time(took), *map(printable, words)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:7.3f}"


def _refused(refusal: Refusal) -> Iterator[str]:
    record = refusal.record
    yield f"refused: {record.machine} {record.id}: {refusal.reason}"
    at = "" if record.seconds is None else f" at {record.seconds:.3f} s"
    at = f" in {record.place}" if record.place else at
    yield f"  recorded{at}: {record.source} --{record.fact}--> {record.target}"
    if refusal.state is not None:
        legal = _legal(refusal)
        yield f"  legal in {refusal.state.value}: {', '.join(legal) or 'nothing, it is over'}"
    yield ""


def _legal(refusal: Refusal) -> list[str]:
    targets: dict[str, list[str]] = {}
    for edge in refusal.legal:
        targets.setdefault(edge.fact, []).append(str(edge.target.value))
    return [f"{fact} (to {' or '.join(found)})" for fact, found in targets.items()]


def _summary(found: Replay, recording: Recording) -> str:
    facts = sum(len(life.path) for life in found.lives)
    remarks = [
        f"{counted(len(found.lives), 'subject')}, {counted(facts, 'fact')}",
        f"{len(found.refusals):,} refused" if found.refusals else "all legal",
        *([f"{counted(found.lost, 'transition')} missing in the recording"] if found.lost else []),
        *([f"{found.unjudged:,} after a refusal not judged"] if found.unjudged else []),
        *([counted(recording.others, "other line")] if recording.others else []),
    ]
    return "; ".join(remarks)


#### As a picture


def _draw(name: str, found: Replay, recording: Recording, source: str) -> None:
    charts = list(dict.fromkeys(life.chart for life in found.lives))
    if len(charts) != 1:
        machines = ", ".join(chart.name for chart in charts) or "nothing"
        raise Mistake(f"--draw {name}: one machine a picture, not {machines}; see --machine")
    picture(name, charts[0], _paint(found.lives, recording, source))


def picture(name: str, chart: Chart, paint: Paint) -> None:
    """Write one picture; its suffix says in which form. Raises Mistake and OSError."""
    path = Path(name)
    forms: dict[str, Callable[[], str | None]] = {
        ".svg": lambda: svg(dot(chart, paint)),
        ".dot": lambda: dot(chart, paint),
        ".mmd": lambda: mermaid(chart, paint),
    }
    if path.suffix not in forms:
        raise Mistake(f"{name}: pictures are {', '.join(forms)}")
    text = forms[path.suffix]()
    if text is None:
        raise Mistake(f"{name}: Graphviz's dot is not installed; .dot and .mmd need nothing")
    path.write_text(text, encoding="utf-8")


def _paint(lives: Sequence[Life], recording: Recording, source: str) -> Paint:
    if len(lives) > 1:
        taken = Counter(edge for life in lives for _, edge in life.path)
        inside = Counter(life.state for life in lives if not life.is_over)
        return counts_paint(f"{len(lives):,} subjects of {source}", taken, inside)
    (life,) = lives
    refusal = life.refusal
    return path_paint(
        f"{life.name}, {counted(len(life.path), 'fact')}",
        life.path,
        stays=life.total_stays(0.0 if recording.is_whole else None, recording.asked_at),
        refused_in=None if refusal is None else life.state,
        refused="" if refusal is None else refusal.record.fact,
    )
