"""Frames that wait for a slow client, in order and up to a bound."""

from __future__ import annotations

from collections import deque

from router.wires.nats.broker import Message
from router.wires.nats.protocol import DATA

#: What may wait.
PAUSED_BYTES_MAX = 4 * 1024 * 1024
#: So much of it is told at once.
TOLD_BYTES = 256 * 1024


class Kept:
    """What came while nobody was to be told."""

    __slots__ = ("_bytes", "_frames")

    def __init__(self) -> None:
        self._frames: deque[tuple[str, Message]] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def put(self, kind: str, message: Message) -> bool:
        """Keep a frame; False if that is more than may wait."""
        self._frames.append((kind, message))
        self._bytes += len(message.payload)
        return self._bytes <= PAUSED_BYTES_MAX

    def take(self) -> tuple[str, Message]:
        """The first of them."""
        kind, message = self._frames.popleft()
        self._bytes -= len(message.payload)
        return kind, message

    def take_data(self) -> bytes | None:
        """As much data as stands in front, up to a bound; None if something else does."""
        pieces: list[bytes] = []
        size = 0
        while self._frames and self._frames[0][0] == DATA and size < TOLD_BYTES:
            pieces.append(self.take()[1].payload)
            size += len(pieces[-1])
        return b"".join(pieces) if pieces else None
