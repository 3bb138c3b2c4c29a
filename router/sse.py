"""Server-sent events: bytes of any cut in, complete events out, byte for byte.

`EventReader` only finds where events end; `data_of` reads what an event carries. What the reader
returns, joined, is exactly what it was fed, up to the last complete event: an event that needs no
change is forwarded as the bytes it came in. The grammar is the HTML standard's: LF, CR or CRLF,
comments, several data lines, a missing space after the colon, a byte order mark.
"""

from __future__ import annotations

import re

#: A line end, then an empty line. The groups are atomic: CRLF is never taken for two line ends.
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")
#: Looking for a number in bytes is many times faster than looking for a byte.
_CR = ord("\r")
_COLON = ord(":")
#: What is held may be searched once more if it is shorter than this.
_SHORT_BYTES = 4096
_BOM = b"\xef\xbb\xbf"


class EventTooLarge(Exception):
    """An event passed the bound of its reader: what follows cannot be judged."""


class EventReader:
    """Cuts a byte stream into complete events, holding at most `event_bytes_max` bytes."""

    __slots__ = ("_searched", "event_bytes_max", "held")

    def __init__(self, event_bytes_max: int) -> None:
        self.event_bytes_max = event_bytes_max
        #: The beginning of an event that is not complete yet.
        self.held = b""
        #: How far `held` is known to hold no end of an event.
        self._searched = 0

    def take_rest(self) -> bytes:
        """The bytes of an event that was never completed."""
        rest, self.held = self.held, b""
        return rest

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, raw, each with the line ends that end it.

        Raises EventTooLarge.
        """
        if not self.held and data.endswith(b"\n\n") and _CR not in data:
            # What engines send: whole events, LF only.
            if data.count(b"\n\n") == 1:
                return [data]
            return self._feed_lines(data)
        if len(self.held) < _SHORT_BYTES and _CR not in data and _CR not in self.held:
            return self._feed_lines(self.held + data)
        return self._feed_slowly(data)

    def _feed_lines(self, data: bytes) -> list[bytes]:
        """The same where every line ends with LF."""
        *events, rest = data.split(b"\n\n")
        self.held = rest
        self._searched = len(rest)
        if len(rest) > self.event_bytes_max:
            raise EventTooLarge(f"an event is larger than {self.event_bytes_max} bytes")
        if events and data[0] == _COLON and b"\nd" not in data:
            # Nothing but comments: a worker may send them without an end, and they are one to us.
            return [data.removesuffix(rest)]
        return [event + b"\n\n" for event in events]

    def _feed_slowly(self, data: bytes) -> list[bytes]:
        held = self.held + data
        events: list[bytes] = []
        start = 0
        # The end of an event may straddle the cut: it is at most four bytes long.
        position = max(0, self._searched - 3)
        if position and held.startswith(b"\r\n", position - 1):
            position -= 1
        while (end := _EVENT_END.search(held, position)) is not None:
            if end.end() == len(held) and held.endswith(b"\r\n\r"):
                break  # half of a CRLF: its LF belongs to this event
            events.append(held[start : end.end()])
            start = position = end.end()
        self.held = held[start:]
        self._searched = len(self.held)
        if len(self.held) > self.event_bytes_max:
            raise EventTooLarge(f"an event is larger than {self.event_bytes_max} bytes")
        return events


def data_of(event: bytes) -> bytes | None:
    """The data an event carries (its data lines joined with LF), or None when it has none."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and _CR not in event:
        return event[6:-2]
    if event.startswith(b":") and b"\nd" not in event and _CR not in event:
        return None  # heartbeats; a worker may send many
    lines = []
    for line in _LINE_END.split(event.removeprefix(_BOM)):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines) if lines else None
