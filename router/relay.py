"""What becomes of a worker's answer on its way to the client, bytes in and bytes out.

Pure: a relay is fed what arrived and returns what may be forwarded; what it learned stands in its
attributes, and whoever feeds it turns that into facts. `StreamRelay` works on complete events and
never lets a lying end through; `WholeAnswer` holds a unary answer until it is complete.
"""

from __future__ import annotations

from enum import Enum

from router.migration.attempt import Attempt
from router.openai import Judge, Sign
from router.sse import EventReader, EventTooLarge

#: Largest event that is still read; a chunk with logprobs of a long batch stays far below.
EVENT_BYTES_MAX = 16 * 1024 * 1024
#: Comments before the first event that are kept for the client.
HELD_BYTES_MAX = 64 * 1024
DONE_EVENT = b"data: [DONE]\n\n"


class Ending(Enum):
    """How a stream ended."""

    #: An honest finish and `[DONE]`; both are in what was returned.
    WELL = "well"
    #: The body ended after an honest finish but before `[DONE]`.
    UNMARKED = "unmarked"
    #: An end that is none: no finish, or one by which the engine gave up. Withheld.
    LIE = "lie"
    #: An error event, withheld; `judge.error_status` and `error_event` say which.
    ERROR = "error"
    #: An event without end: nothing of it can be judged.
    TOO_LARGE = "too_large"


class StreamRelay:
    """One stream of events; holds everything back until the first event with data."""

    __slots__ = (
        "_held",
        "_held_bytes",
        "_is_another",
        "_reader",
        "ending",
        "error_event",
        "has_content",
        "judge",
        "progressed",
        "released",
    )

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        #: An event with data has been returned: a head must be sent with it.
        self.released = False
        #: Content has been returned.
        self.has_content = False
        #: The last `feed` brought an event with data; comments and heartbeats are none.
        self.progressed = False
        self.ending: Ending | None = None
        self.error_event = b""
        self._reader = EventReader(EVENT_BYTES_MAX)
        # Bound once: most events of a stream need no more.
        self._is_another = judge.is_another
        self._held: list[bytes] = []
        self._held_bytes = 0

    #: What only a stream that may move can be; see `MovingRelay`.
    is_poisoned = False
    is_cut_short = False
    is_unfaithful = False
    is_unsettled = False

    @property
    def tokens(self) -> tuple[int | None, int | None]:
        """Tokens of prompt and output, as far as the engine told them."""
        return self.judge.prompt_tokens, self.judge.completion_tokens

    def feed(self, data: bytes) -> bytes:
        """What may be forwarded now. After an `ending` nothing more is read."""
        if self.ending is not None:
            self.progressed = False
            return b""
        if self.has_content and not self._reader.held and self._is_another(data):
            self.progressed = True
            return data
        return self._feed_any(data)

    def _feed_any(self, data: bytes) -> bytes:
        """The same for any bytes, while the stream has not ended."""
        self.progressed = False
        try:
            events = self._reader.feed(data)
        except EventTooLarge:
            self.ending = Ending.TOO_LARGE
            return b""
        if not self.released:
            return self._release(self._take_all(events))
        if len(events) == 1:
            return self._take(events[0])
        return b"".join(self._take_all(events))

    def finish(self) -> bytes:
        """The body ended as its framing promised, without an end that was met before.

        Returns what is left to forward: where only the framing tells the end, an unfinished last
        event is the client's, too.
        """
        if self.ending is not None:
            return b""
        if self.judge.has_finish:
            well = self.released and self.judge.finished
            self.ending = Ending.UNMARKED if well else Ending.LIE
            return b""
        rest = self._reader.take_rest()
        self.progressed |= bool(rest)
        rest = rest if self.released else self._release([rest])
        self.ending = Ending.UNMARKED if self.released else Ending.LIE
        return rest

    def _release(self, forward: list[bytes]) -> bytes:
        """Hold on, or let the first event go with the comments before it.

        An end that lies in the same read as the first event is met before anything was sent, so
        nothing is released, and the whole attempt can be made again elsewhere.
        """
        if not self.progressed and self._held_bytes > HELD_BYTES_MAX:
            return b""  # heartbeats before the first event; those that are held are enough
        self._held += forward
        self._held_bytes += sum(map(len, forward))
        if not self.progressed or self.ending not in (None, Ending.WELL):
            self.has_content = False
            return b""
        self.released = True
        held, self._held = b"".join(self._held), []
        return held

    def _take_all(self, events: list[bytes]) -> list[bytes]:
        """What is forwarded of the events, up to the end of the stream."""
        forward = []
        for event in events:
            forward.append(self._take(event))
            if self.ending is not None:
                break
        return forward

    def _take(self, event: bytes) -> bytes:
        """What is forwarded of one event; an end that lies is withheld."""
        sign = self.judge.read(event)
        if sign is Sign.CONTENT:
            self.has_content = self.progressed = True
        elif sign is not Sign.COMMENT:
            return self._take_rarely(event, sign)
        return event

    def _take_rarely(self, event: bytes, sign: Sign) -> bytes:
        if sign is Sign.LIE or sign is Sign.ERROR:
            self.ending = Ending.LIE if sign is Sign.LIE else Ending.ERROR
            self.error_event = event
            return b""
        self.progressed = True
        if sign is Sign.DONE:
            self.ending = Ending.WELL
        return event


class MovingRelay(StreamRelay):
    """The same for a stream that may move: its attempt reads, records, and says what to forward.

    A `resumed` stream has its head already, so nothing is held back; what the client must not see
    a second time is taken out by the attempt.
    """

    __slots__ = ("attempt", "is_poisoned")

    def __init__(self, attempt: Attempt, *, resumed: bool) -> None:
        super().__init__(attempt)
        self.attempt = attempt
        self.released = resumed
        #: What was delivered can no longer be continued elsewhere.
        self.is_poisoned = False

    def feed(self, data: bytes) -> bytes:
        """What may be forwarded now. After an `ending` nothing more is read."""
        if self.ending is not None:
            self.progressed = False
            return b""
        attempt = self.attempt
        if attempt.skims and not self._reader.held and attempt.skim(data):
            self.progressed = True
            return attempt.forward
        return self._feed_any(data)

    @property
    def is_cut_short(self) -> bool:  # type: ignore[override]
        """The answer was ended here; the worker is still at it."""
        return self.attempt.is_cut_short

    @property
    def is_unfaithful(self) -> bool:  # type: ignore[override]
        """The worker did not go on with what it was sent."""
        return self.attempt.is_unfaithful

    @property
    def is_unsettled(self) -> bool:  # type: ignore[override]
        """The answer is whole; how many tokens of its last event count has to be asked."""
        return self.attempt.unsettled is not None

    @property
    def tokens(self) -> tuple[int | None, int | None]:
        """Tokens of the whole generation, over all attempts; a poisoned record does not count."""
        attempt = self.attempt
        if attempt.record.poison is not None:
            return attempt.prompt_tokens, attempt.completion_tokens
        return attempt.record.prompt_tokens, attempt.record.tokens

    def _take(self, event: bytes) -> bytes:
        attempt = self.attempt
        sign = attempt.read(event)
        if sign is Sign.CONTENT:
            self.has_content = self.progressed = True
        elif sign is not Sign.COMMENT:
            self._take_rarely(event, sign)
        if attempt.record.poison is not None:
            self.is_poisoned = self.has_content
        return attempt.forward


class WholeAnswer:
    """A unary answer, or an error's body: collected until it is complete."""

    __slots__ = ("_pieces", "limit", "size")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._pieces: list[bytes] = []

    @property
    def is_too_large(self) -> bool:
        """More than may be held."""
        return self.size > self.limit

    def feed(self, data: bytes) -> None:
        """One more piece."""
        self._pieces.append(data)
        self.size += len(data)

    def body(self) -> bytes:
        """All pieces, once."""
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
