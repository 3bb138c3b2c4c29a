"""Log lines: one a request at info, one a transition at debug, on standard error.

A line stays one line, whatever a value contains, and one that cannot be written is dropped: logging
must never raise into the reactor nor hold it up on purpose. The lines of one pass of the reactor
are written together at its end, those from elsewhere at once.
No prompt text, no header of a client and no worker's address ever stands in a line made here.
Everything rare goes through structlog; the two lines that come by the thousand a second are
written by hand, because a processor chain costs more than the request's own bookkeeping.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from typing import Protocol

import msgspec
import structlog
from attrs import define, field

from statemachines.chart import Edge

#: Bytes that a pipe takes whole or not at all.
_WHOLE_BYTES = 4096
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class HasId(Protocol):
    @property
    def id(self) -> str: ...


EdgeListener = Callable[[HasId, Edge], None]


@define(eq=False)
class LineWriter:
    """Whole lines to a file descriptor; what structlog calls a logger."""

    fd: int = 2
    dropped: int = 0
    """Lines that could not be written: nobody reads, or the descriptor is closed."""

    _held: list[bytes] | None = None

    def write(self, line: bytes) -> None:
        """Write one line with its newline, or count it as dropped."""
        if self._held is None:
            self._put(line, 1)
        else:
            self._held.append(line)

    def hold(self) -> None:
        """Keep the lines that come, until `release`."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Write what was kept, in order, in few system calls."""
        held, self._held = self._held, None
        if not held:
            return
        text, lines = held[0], 1
        for line in held[1:]:
            if len(text) + len(line) > _WHOLE_BYTES:
                self._put(text, lines)
                text, lines = b"", 0
            text += line
            lines += 1
        self._put(text, lines)

    def _put(self, text: bytes, lines: int) -> None:
        try:
            written = os.write(self.fd, text)
            while written < len(text):
                text = text[written:]
                written = os.write(self.fd, text)
        except OSError:
            # Some of them may have been written: nobody will miss the count of those.
            self.dropped += lines

    def debug(self, line: bytes) -> None:
        self.write(line)

    info = warning = error = critical = debug


@define(eq=False)
class Stamp:
    """The time of a line, in UTC to the millisecond; what stays the same is kept."""

    _millisecond: int = -1
    _second: int = -1
    _prefix: str = ""
    _text: str = ""

    def now(self) -> str:
        millisecond = int(time.time() * 1000)
        if millisecond != self._millisecond:
            self._millisecond = millisecond
            second, rest = divmod(millisecond, 1000)
            if second != self._second:
                self._second = second
                self._prefix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._text = f"{self._prefix}.{rest:03d}Z"
        return self._text


class RequestFields(msgspec.Struct, gc=False):
    """The request line as JSON, in the order of the text line."""

    time: str
    level: str
    event: str
    id: str
    route: str
    worker: str | None
    attempts: int
    state: str
    status: int | None
    code: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    first_token_seconds: float | None
    seconds: float | None


@define(eq=False)
class Logs:
    """The two frequent lines; `configure` makes one for the process."""

    writer: LineWriter
    json: bool
    level: int
    _stamp: Stamp = field(factory=Stamp)

    def request_line(
        self,
        *,
        id: str,
        route: str,
        worker: str | None,
        attempts: int,
        state: str,
        status: int,
        code: str | None,
        prompt_tokens: int | None,
        completion_tokens: int | None,
        first_token_seconds: float | None,
        seconds: float,
    ) -> None:
        """The one line of a request, written at its end.

        `worker` is the id of the last one tried, `state` the final state of its machine and
        `status` what the client was sent (0 where it left before), `code` that of our own error,
        if it was told one. None is "not known".
        """
        if self.level > 20:
            return
        if not self.json:
            first = "-" if first_token_seconds is None else f"{first_token_seconds:.6f}"
            self.writer.write(
                f"{self._stamp.now()} info request id={_text(id)} route={route}"
                f" worker={'-' if worker is None else _text(worker)} attempts={attempts}"
                f" state={state} status={status or '-'} code={code or '-'}"
                f" prompt_tokens={'-' if prompt_tokens is None else prompt_tokens}"
                f" completion_tokens={'-' if completion_tokens is None else completion_tokens}"
                f" first_token_seconds={first} seconds={seconds:.6f}\n".encode()
            )
            return
        self.writer.write(
            msgspec.json.encode(
                RequestFields(
                    self._stamp.now(),
                    "info",
                    "request",
                    # Sanitised long before, but half a surrogate pair would raise here.
                    id if id.isascii() else _text(id),
                    route,
                    worker if worker is None or worker.isascii() else _text(worker),
                    attempts,
                    state,
                    status or None,
                    code,
                    prompt_tokens,
                    completion_tokens,
                    _round(first_token_seconds),
                    _round(seconds),
                )
            )
            + b"\n"
        )

    def transitions(self, machine: str) -> EdgeListener | None:
        """A listener that writes a line for every edge of this machine; None above debug."""
        if self.level > 10:
            return None

        def write_text(subject: HasId, edge: Edge) -> None:
            where = f"source={edge.source.value} fact={edge.fact} target={edge.target.value}"
            who = f"machine={machine} id={_text(subject.id)}"
            self.writer.write(f"{self._stamp.now()} debug transition {who} {where}\n".encode())

        def write_json(subject: HasId, edge: Edge) -> None:
            fields: dict[str, object] = {
                "time": self._stamp.now(),
                "level": "debug",
                "event": "transition",
                "machine": machine,
                "id": subject.id,
                "source": edge.source.value,
                "fact": edge.fact,
                "target": edge.target.value,
            }
            self.writer.write(_json_line(fields))

        return write_json if self.json else write_text

    def render(self, _: object, level: str, event_dict: MutableMapping[str, object]) -> bytes:
        """The last (and only) processor of structlog: an event as one line."""
        fields: dict[str, object] = {"time": self._stamp.now(), "level": level}
        fields["event"] = event_dict.pop("event", "")
        if (trace := _traceback(event_dict.pop("exc_info", None))) is not None:
            event_dict["traceback"] = trace
        if self.json:
            return _json_line(fields | dict(event_dict))
        pairs = "".join(f" {key}={_text(_shown(value))}" for key, value in event_dict.items())
        return f"{fields['time']} {level} {_text(str(fields['event']))}{pairs}\n".encode()


def configure(*, format: str, level: str, fd: int = 2) -> Logs:
    """Set up structlog for the process and return the writer of the frequent lines."""
    logs = Logs(LineWriter(fd), format == "json", LEVELS[level])
    structlog.configure(
        processors=[logs.render],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda *_: logs.writer,
        # Lines that come this way are rare, and a logger that was used before this call must
        # not keep writing elsewhere.
        cache_logger_on_first_use=False,
    )
    return logs


def _text(value: str) -> str:
    """The value as one word of a text line: quoted and escaped unless it is plain.

    `isprintable` is false for every control character, line separator and lone surrogate.
    """
    if value and value.isprintable() and not (" " in value or '"' in value or "=" in value):
        return value
    return json.dumps(value).replace("\x7f", "\\u007f")


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6f}"
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return str(value)


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _json_line(fields: dict[str, object]) -> bytes:
    try:
        return msgspec.json.encode(fields) + b"\n"
    except (TypeError, ValueError, OverflowError):
        # Something that JSON has no word for, or half a surrogate pair: written as text.
        return json.dumps(fields, default=str).encode() + b"\n"


def _traceback(exc_info: object) -> str | None:
    error = sys.exc_info()[1] if exc_info is True else exc_info
    if not isinstance(error, BaseException):
        return None
    return "".join(traceback.format_exception(error))
