"""Frames that wait for a slow client, in order and up to a bound."""

from __future__ import annotations

from collections import deque

from router.wires.nats.broker import Message
from router.wires.nats.protocol import DATA

#: What may wait: a whole answer of nearly every client that pauses for seconds.
PAUSED_BYTES_MAX = 16 * 1024 * 1024
#: So much of it is told at once.
TOLD_BYTES = 256 * 1024


class Kept:
    """What came while nobody was to be told.

    Of data only the bytes are kept, in blocks: as messages, short frames would take many times
    their size.
    """

    __slots__ = ("_bytes", "_frames")

    def __init__(self) -> None:
        self._frames: deque[tuple[str, Message | bytearray]] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def put(self, kind: str, message: Message) -> bool:
        """Keep a frame; False if that is more than may wait."""
        self._bytes += len(message.payload)
        last = self._frames[-1][1] if self._frames else None
        if kind != DATA:
            self._frames.append((kind, message))
        elif isinstance(last, bytearray) and len(last) < TOLD_BYTES:
            last += message.payload
        else:
            self._frames.append((kind, bytearray(message.payload)))
        return self._bytes <= PAUSED_BYTES_MAX

    def take(self) -> tuple[str, Message]:
        """The first of them; data that came in a row is one of at most about `TOLD_BYTES`."""
        kind, kept = self._frames.popleft()
        message = Message("", bytes(kept), {}) if isinstance(kept, bytearray) else kept
        self._bytes -= len(message.payload)
        return kind, message
