"""What `baton replay` reads: the answer of /debug/requests/ID, or lines that were recorded.

Lines are those of /debug/transitions and of a log with `--log-format json --log-level debug`. Other
lines of a log are passed over, as is a last one that was cut off: a log is a log. No prompt text
is in any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TypeVar

import msgspec
from attrs import frozen

from statemachines.replay import Lost, Record

T = TypeVar("T", bound=msgspec.Struct)


class _Transition(msgspec.Struct):
    machine: str
    source: str
    fact: str
    target: str
    seconds: float


class _Request(msgspec.Struct):
    """The answer of /debug/requests/ID."""

    id: str
    state: str
    transitions: tuple[_Transition, ...]


class _Line(msgspec.Struct):
    machine: str
    id: str
    source: str
    fact: str
    target: str
    #: Of /debug/transitions; the log has only the time of day.
    seconds: float | None = None
    time: str = ""
    lost: int = 0


class _Lost(msgspec.Struct):
    """The last words of /debug/transitions to one who missed what came last."""

    lost: int


@frozen
class Recording:
    """What was read."""

    records: tuple[Record | Lost, ...]
    #: Every subject is there from its first transition.
    is_whole: bool
    #: Lines that hold no transition.
    others: int = 0
    #: The state that the router showed at the end, where it is one request's answer.
    state: str | None = None


def read_recording(data: bytes) -> Recording:
    """Read either form; what is neither has no records."""
    request = _decode(data, _Request)
    if request is None:
        return _read_lines(data)
    records = [
        Record(each.machine, request.id, each.source, each.fact, each.target, each.seconds)
        for each in request.transitions
    ]
    return Recording(tuple(records), is_whole=True, state=request.state)


def _read_lines(data: bytes) -> Recording:
    records: list[Record | Lost] = []
    others = 0
    for line in data.splitlines():
        found = list(_read_line(line))
        others += not found and bool(line.strip())
        records += found
    return Recording(tuple(records), is_whole=False, others=others)


def _read_line(text: bytes) -> Iterator[Record | Lost]:
    line = _decode(text, _Line)
    missing = _decode(text, _Lost) if line is None else line
    if missing is not None and missing.lost:
        yield Lost(missing.lost)
    if line is not None:
        seconds = _seconds_of(line.time) if line.seconds is None else line.seconds
        yield Record(line.machine, line.id, line.source, line.fact, line.target, seconds)


def _decode(text: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None


def _seconds_of(time: str) -> float | None:
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None
