"""Turns samples into the tables that are printed.

Every cell is "smallest (median)" over the rounds. Noise of a machine only ever adds CPU time, so
the smallest is the better estimate and the median says how noisy it was. Ratios are taken within
each round, between neighbours in time, and their median is shown.
"""

from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.candidates import DIRECT, REFERENCE
from benchmarks.cases import Case, named
from benchmarks.measure import Sample

Round = dict[tuple[str, str], Sample]
"""One round's samples by (candidate, case); a failed measurement is missing."""
Rows = list[list[str]]
Number = Callable[[Sample], float]


def render(rounds: Sequence[Round], candidates: Sequence[str], cases: Sequence[str]) -> str:
    """All tables, as Markdown."""
    chosen = [named(name) for name in cases]
    parts = [
        ("CPU µs per operation: smallest (median)", _cpu(rounds, candidates, chosen)),
        (
            f"CPU against {REFERENCE}, median of the rounds' ratios",
            _ratios(rounds, candidates, chosen),
        ),
        (
            "Waited for its core, % of the time: beyond 5 don't trust",
            _waits(rounds, candidates, chosen),
        ),
        ("Kernel's share of the CPU time, %", _shares(rounds, candidates, chosen)),
        (f"Latency added to {DIRECT}, µs, p50 / p99 (medians)", _added(rounds, candidates, chosen)),
        ("Time to first event, µs, p50 / p99 (medians)", _first(rounds, candidates, chosen)),
        ("Operations per second, and share of the core", _speed(rounds, candidates, chosen)),
        ("Memory", _memory(rounds, candidates, chosen)),
        ("Answers that were not whole and good", _errors(rounds, candidates, chosen)),
    ]
    return "\n\n".join(f"{title}\n\n{_markdown(rows)}" for title, rows in parts if len(rows) > 1)


def ratio(rounds: Sequence[Round], candidate: str, case: str) -> float | None:
    """The candidate's CPU per operation against the reference's, median over the rounds."""
    pairs = [(samples.get((candidate, case)), samples.get((REFERENCE, case))) for samples in rounds]
    ratios = [ours.cpu_us / theirs.cpu_us for ours, theirs in pairs if ours and theirs]
    return median(ratios) if ratios else None


def stream_bytes(rounds: Sequence[Round], candidate: str, case: Case) -> float | None:
    """Resident memory that one open stream adds, median over the rounds."""
    return _median(
        rounds, candidate, case, lambda s: (s.loaded_bytes - s.idle_bytes) / case.connections
    )


def _values(rounds: Sequence[Round], candidate: str, case: Case, of: Number) -> list[float]:
    found = (samples.get((candidate, case.name)) for samples in rounds)
    return [of(sample) for sample in found if sample is not None]


def _median(rounds: Sequence[Round], candidate: str, case: Case, of: Number) -> float | None:
    values = _values(rounds, candidate, case, of)
    return median(values) if values else None


def _grid(
    candidates: Sequence[str], cases: Sequence[Case], cell: Callable[[str, Case], str]
) -> Rows:
    header = ["candidate", *(case.name for case in cases)]
    return [header, *([name, *(cell(name, case) for case in cases)] for name in candidates)]


def _cpu(rounds: Sequence[Round], candidates: Sequence[str], cases: Sequence[Case]) -> Rows:
    def cell(name: str, case: Case) -> str:
        values = _values(rounds, name, case, lambda s: s.cpu_us)
        return f"{min(values):.1f} ({median(values):.1f})" if values else "failed"

    return _grid(candidates, cases, cell)


def _ratios(rounds: Sequence[Round], candidates: Sequence[str], cases: Sequence[Case]) -> Rows:
    if REFERENCE not in candidates:
        return []

    def cell(name: str, case: Case) -> str:
        value = ratio(rounds, name, case.name)
        return "" if value is None else f"{value:.2f}"

    return _grid(candidates, cases, cell)


def _shares(rounds: Sequence[Round], candidates: Sequence[str], cases: Sequence[Case]) -> Rows:
    def cell(name: str, case: Case) -> str:
        value = _median(rounds, name, case, lambda s: s.system_share)
        return "" if value is None else f"{value:.0%}"

    return _grid(candidates, cases, cell)


def _waits(rounds: Sequence[Round], candidates: Sequence[str], cases: Sequence[Case]) -> Rows:
    def cell(name: str, case: Case) -> str:
        value = _median(rounds, name, case, lambda s: s.waited_share)
        return "" if value is None else f"{value:.0%}"

    return _grid(candidates, cases, cell)


def _added(rounds: Sequence[Round], candidates: Sequence[str], cases: Sequence[Case]) -> Rows:
    def cell(name: str, case: Case) -> str:
        numbers: tuple[Number, Number] = (lambda s: s.counts.p50, lambda s: s.counts.p99)
        shown = []
        for of in numbers:
            own, floor = (_median(rounds, who, case, of) for who in (name, DIRECT))
            if own is None:
                return ""
            shown.append(own - (floor if floor is not None and name != DIRECT else 0))
        return " / ".join(f"{value:.0f}" for value in shown)

    return _grid(candidates, cases, cell)


def _first(rounds: Sequence[Round], candidates: Sequence[str], cases: Sequence[Case]) -> Rows:
    def cell(name: str, case: Case) -> str:
        low = _median(rounds, name, case, lambda s: s.counts.first_p50)
        high = _median(rounds, name, case, lambda s: s.counts.first_p99)
        return "" if low is None or high is None else f"{low:.0f} / {high:.0f}"

    beginning = [case for case in cases if case.name in ("churn", "flat")]
    return _grid(candidates, beginning, cell) if beginning else []


def _speed(rounds: Sequence[Round], candidates: Sequence[str], cases: Sequence[Case]) -> Rows:
    def cell(name: str, case: Case) -> str:
        speed = _median(rounds, name, case, lambda s: s.per_second)
        share = _median(rounds, name, case, lambda s: s.cpu_share)
        return "" if speed is None or share is None else f"{speed:.0f} ({share:.0%})"

    return _grid(candidates, cases, cell)


def _memory(rounds: Sequence[Round], candidates: Sequence[str], cases: Sequence[Case]) -> Rows:
    held = [case for case in cases if case.name == "p1000"]
    if not held:
        return []
    rows = [["candidate", "idle MB", f"with {held[0].connections} streams MB", "KB a stream"]]
    for name in candidates:
        idle = _median(rounds, name, held[0], lambda s: s.idle_bytes / 1e6)
        loaded = _median(rounds, name, held[0], lambda s: s.loaded_bytes / 1e6)
        each = stream_bytes(rounds, name, held[0])
        if idle is not None and loaded is not None and each is not None:
            rows.append([name, f"{idle:.1f}", f"{loaded:.1f}", f"{each / 1000:.1f}"])
    return rows


def _errors(rounds: Sequence[Round], candidates: Sequence[str], cases: Sequence[Case]) -> Rows:
    rows = [["candidate", "case", "errors", "of"]]
    for name in candidates:
        for case in cases:
            errors = sum(_values(rounds, name, case, lambda s: s.counts.errors))
            total = sum(_values(rounds, name, case, lambda s: s.counts.answers))
            if errors:
                rows.append([name, case.name, f"{errors:.0f}", f"{total:.0f}"])
    return rows


def _markdown(rows: Rows) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
