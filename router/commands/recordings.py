"""What `baton replay` reads: the answer of /debug/requests/ID, or lines that were recorded.

Lines are those of /debug/transitions and of a log with `--log-format json --log-level debug`. Other
lines of a log are passed over: a log is a log. One that was cut off is noted, since a transition
may have been in it, and so is a time that cannot be one. No prompt text is in any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TypeVar

import attrs
import msgspec
from attrs import define, field, frozen

from router.commands.columns import counted, printable
from statemachines.replay import Lost, Record

T = TypeVar("T")
#: What lies beyond is no time of anything: the year 33658, or as many seconds before 1970.
SECONDS_MAX = 1e12
GZIP = b"\x1f\x8b"
#: How the columns of `baton watch` begin.
WATCHED = b"time (UTC)"
#: So much of what cannot be read is shown.
SHOWN_CHARACTERS_MAX = 60


class BadRecording(ValueError):
    """Nothing in it can be replayed; the message is one line that says what it is instead."""


class _Transition(msgspec.Struct):
    machine: str
    source: str
    fact: str
    target: str
    seconds: object = None


class Leg(msgspec.Struct):
    """One dispatch to a worker, as /debug/requests/ID shows it."""

    worker: str
    role: str
    state: str
    #: Seconds since the request came.
    began: float
    ended: float | None = None
    fact: str | None = None
    status: int | None = None
    detail: str | None = None


class _Request(msgspec.Struct):
    """The answer of /debug/requests/ID."""

    id: str
    state: str
    transitions: tuple[_Transition, ...]
    #: Of the request, when the router was asked.
    seconds: object = None
    legs: tuple[Leg, ...] = ()


class _Line(msgspec.Struct):
    machine: str
    id: str
    source: str
    fact: str
    target: str
    #: Of /debug/transitions; the log has only the time of day.
    seconds: object = None
    time: object = None
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
    #: When the router was asked, in seconds since that request came.
    asked_at: float | None = None
    legs: tuple[Leg, ...] = ()
    #: Sentences on what could not be read and is missing from the records.
    gaps: tuple[str, ...] = ()
    #: Sentences on times that are none.
    remarks: tuple[str, ...] = ()


def read_recording(data: bytes) -> Recording:
    """Read either form; raises BadRecording for what is neither."""
    if not data.strip():
        raise BadRecording("it is empty")
    try:
        whole = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        return _read_lines(data, problem)
    if isinstance(whole, dict) and "transitions" in whole:
        return _read_request(whole)
    if isinstance(whole, dict) and not {"machine", "fact", "target", "lost"}.isdisjoint(whole):
        return _read_lines(data, None)
    raise BadRecording(_kind_of(whole))


def _kind_of(whole: object) -> str:
    """What JSON it is that holds no transitions."""
    if isinstance(whole, dict) and isinstance(error := whole.get("error"), dict):
        return f"the router's answer is an error: {shown(error.get('message'))}"
    if isinstance(whole, dict) and "requests" in whole:
        return "this is a list of requests; record one with /debug/requests/ID"
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    kind = kinds.get(type(whole), "null" if whole is None else "a number")
    named = f" with {shown(', '.join(map(str, whole)))}" if whole and type(whole) is dict else ""
    return f"JSON of another kind: {kind}{named}, neither a request's answer nor a transition"


def shown(value: object) -> str:
    """A word of somebody else as a part of a line."""
    text = printable(" ".join(str(value).split()))
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}..."


#### One request


def _read_request(whole: Mapping[str, object]) -> Recording:
    try:
        request = msgspec.convert(whole, _Request)
    except msgspec.ValidationError as problem:
        raise BadRecording(f"not the answer of /debug/requests/ID: {problem}") from None
    asked_at = _seconds_of(request.seconds)
    if not request.transitions:
        waits = "" if asked_at is None else f" for {asked_at:.3f} s"
        raise BadRecording(
            f"request {shown(request.id)} has no transitions yet: it is {shown(request.state)}"
            f"{waits}"
        )
    clock = _Clock()
    records = [
        Record(*_words(each, request.id), clock.read(each.seconds)) for each in request.transitions
    ]
    return Recording(
        tuple(records),
        is_whole=True,
        state=request.state,
        asked_at=asked_at,
        legs=request.legs,
        remarks=tuple(clock.remarks()),
    )


def _words(each: _Transition | _Line, id: str) -> tuple[str, str, str, str, str]:
    words = each.machine, id, each.source, each.fact, each.target
    return tuple(map(printable, words))  # type: ignore[return-value]  # as many as there were


#### Lines


def _read_lines(data: bytes, problem: Exception | None) -> Recording:
    """`problem` is why the whole is no JSON; None where it is one line, however it is laid out."""
    reader = _Reader()
    lines = [data] if problem is None else data.splitlines()
    for number, line in enumerate(lines, 1):
        is_open = number == len(lines) and not data.endswith((b"\n", b"\r"))
        reader.read(number, line, is_open=is_open)
    if not any(isinstance(each, Record) for each in reader.records):
        raise BadRecording(reader.says_why_empty(data, len(lines), problem))
    return reader.recording()


@define(eq=False)
class _Reader:
    records: list[Record | Lost] = field(factory=list)
    others: int = 0
    is_cut: bool = False
    #: Numbers of lines that begin as JSON and do not end so, and what is wrong with others.
    _broken: list[int] = field(factory=list)
    _misfits: list[str] = field(factory=list)
    #: Of the records: seconds on a clock that never jumps, and times of day.
    _steady: list[object] = field(factory=list)
    _daily: list[object] = field(factory=list)

    def read(self, number: int, text: bytes, *, is_open: bool) -> None:
        try:
            found = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._note_broken(number, text, is_open=is_open)
            return
        if not isinstance(found, dict):
            self.others += 1
        elif "fact" in found and "machine" in found:
            self._read_transition(number, found)
        elif (missing := _converted(found, _Lost)) is not None and missing.lost > 0:
            self.records.append(Lost(missing.lost))
        else:
            self.others += 1

    def _note_broken(self, number: int, text: bytes, *, is_open: bool) -> None:
        if not text.lstrip().startswith(b"{"):
            self.others += bool(text.strip())
        elif is_open:
            self.is_cut = True
        else:
            self._broken.append(number)
            self.records.append(Lost(1))

    def _read_transition(self, number: int, found: object) -> None:
        try:
            line = msgspec.convert(found, _Line)
        except msgspec.ValidationError as problem:
            # What the router says of itself has a fact and no target.
            if isinstance(found, dict) and "target" in found:
                self._misfits.append(f"line {number}: {problem}")
                self.records.append(Lost(1))
            else:
                self.others += 1
            return
        if line.lost > 0:
            self.records.append(Lost(line.lost))
        place = f"line {number}"
        if isinstance(line.time, str):
            place += f", {shown(line.time)}"
        self.records.append(Record(*_words(line, line.id), place=place))
        self._steady.append(line.seconds)
        self._daily.append(line.time)

    def recording(self) -> Recording:
        clock = _Clock()
        times = iter(self._times(clock))
        records = [
            attrs.evolve(each, seconds=next(times)) if isinstance(each, Record) else each
            for each in self.records
        ]
        return Recording(
            tuple(records),
            is_whole=False,
            others=self.others,
            gaps=tuple(self._gaps()),
            remarks=tuple(clock.remarks()),
        )

    def _times(self, clock: _Clock) -> list[float | None]:
        """All of one clock: of the steady one where every line has that, else of the day's."""
        chosen = self._daily
        if None not in self._steady or not any(self._daily):
            chosen = self._steady
        elif any(
            steady is not None and day is None
            for steady, day in zip(self._steady, self._daily, strict=True)
        ):
            clock.is_mixed = True
        return [clock.read(value) for value in chosen]

    def _gaps(self) -> Iterator[str]:
        if self._broken:
            first, count = self._broken[0], len(self._broken)
            lines = f"line {first} is" if count == 1 else f"{count} lines from {first} on are"
            yield f"{lines} broken JSON, and what stood there is missing"
        if self._misfits:
            count = len(self._misfits)
            lines = "1 line is" if count == 1 else f"{count} lines are"
            yield f"{lines} no whole transition, and missing ({self._misfits[0]})"
        if self.is_cut:
            yield "the last line is cut off, and what stood there is missing"

    def says_why_empty(self, data: bytes, lines: int, problem: Exception | None) -> str:
        """What it is instead of a recording."""
        if data.startswith(GZIP):
            return "it is compressed; give it unpacked, as in: gunzip -c FILE | baton replay -"
        if not _is_text(data):
            return "it is no text"
        if data.startswith(WATCHED):
            return "it is what baton watch shows; with --json it writes what can be replayed"
        if self._misfits:
            return f"no whole transition in it: {self._misfits[0]}"
        if "truncated" in str(problem):
            return f"its JSON is cut off after {counted(len(data), 'byte')}"
        if lines == 1 and (self._broken or self.is_cut):
            return f"its JSON is broken: {problem}"
        return (
            f"no transitions in it ({counted(lines, 'line')}); a router's log has them with "
            "--log-format json --log-level debug"
        )


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def _converted(found: object, kind: type[T]) -> T | None:
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError:
        return None


#### Times


@define(eq=False)
class _Clock:
    """Reads times and notes those that are none."""

    is_mixed: bool = False
    _missing: int = 0
    _odd: list[str] = field(factory=list)

    def read(self, value: object) -> float | None:
        """Seconds: of a number, or of a date in ISO 8601, which is UTC where it does not say."""
        if value is None or value == "":
            self._missing += 1
            return None
        found = _seconds_of(value)
        if found is None:
            self._odd.append(shown(value))
        return found

    def remarks(self) -> Iterator[str]:
        if self._missing:
            yield f"{counted(self._missing, 'fact')} without a time"
        if self._odd:
            yield f"{counted(len(self._odd), 'time')} not readable, the first is {self._odd[0]!r}"
        if self.is_mixed:
            yield "its times are of two clocks, and only those of the day are shown"


def _seconds_of(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < SECONDS_MAX else None
    if not isinstance(value, str):
        return None
    try:
        found = datetime.fromisoformat(value)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
