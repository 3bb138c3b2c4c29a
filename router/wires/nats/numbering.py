"""Which frame is the next one of an answer, and which is none of it, came twice, or shows a hole.

Every frame bears the next number, and the name of the process that has sent it; of two agents with
one id, the first is heard. A peer of another make may number nothing: then nothing can be known.
"""

from __future__ import annotations

from enum import Enum

from router.wires.nats.broker import Message
from router.wires.nats.protocol import (
    FROM,
    SEQ,
    SERVER_STATUS,
    STILL,
    TYPE,
    is_absent,
    is_stored,
    number,
)


class Place(Enum):
    """What a message is, beside a reason to call the answer incomplete."""

    NEXT = "the next frame"
    NONE = "no frame of this answer, or one that came twice"
    NOBODY = "the broker says that nobody listens"


class Numbering:
    """The frames of one answer so far."""

    __slots__ = ("expected", "is_numbered", "sender")

    def __init__(self) -> None:
        self.expected = 0
        #: None until a frame has shown whether this peer numbers them.
        self.is_numbered: bool | None = None
        #: Whose frames these are.
        self.sender: str | None = None

    def place(self, message: Message, *, is_exposed: bool) -> Place | str:
        """Where a message belongs, or what is missing; `is_exposed`: some may have been lost."""
        headers = message.headers
        if SERVER_STATUS in headers and TYPE not in headers:
            is_nobody = not self.expected and is_absent(headers)
            return Place.NOBODY if is_nobody else Place.NONE
        if is_stored(headers, message.payload):
            return Place.NONE
        if self.expected and headers.get(FROM) != self.sender:
            return Place.NONE
        found = number(headers, SEQ)
        if found is None:
            if SEQ in headers or self.is_numbered:
                return "a frame without its number"
            if is_exposed:
                return "frames without numbers, and some may be lost"
        elif found < self.expected:
            return Place.NONE
        elif found > self.expected:
            return f"frame {found} came where {self.expected} was due"
        self.is_numbered = found is not None
        if headers.get(TYPE) != STILL:  # which takes no number
            self.sender = headers.get(FROM)
            self.expected += 1
        return Place.NEXT
