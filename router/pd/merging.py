"""A decode's answer that has to wait for what only its prefill knows.

The one case in which decode's bytes are held back: the client asked for the logprobs of its prompt
(see `router.pd.logprobs`). What decode says is kept until prefill has ended, up to a bound, and
goes on from there as it would have before; until then nothing counts as a first token.
"""

from __future__ import annotations

from typing import Protocol

from router.answering import Answering
from router.pd.logprobs import PromptLogprobs
from router.sse import EventReader, EventTooLarge, data_of

#: More than this is passed on as it is: memory comes before completeness.
HELD_BYTES_MAX = 16 * 1024 * 1024


class Leg(Protocol):
    """The decode leg, as far as it matters here."""

    @property
    def is_open(self) -> bool:
        """Not in a final state."""


class MergingAnswering:
    """Stands before the reading of decode's answer."""

    __slots__ = (
        "_ended",
        "_events",
        "_held",
        "_inner",
        "_is_known",
        "_leg",
        "_logprobs",
        "_passes",
        "_size",
    )

    def __init__(
        self, inner: Answering, leg: Leg, logprobs: PromptLogprobs, *, is_stream: bool
    ) -> None:
        self._inner = inner
        self._leg = leg
        self._logprobs = logprobs
        #: None: the answer is merged as a whole.
        self._events = EventReader(HELD_BYTES_MAX) if is_stream else None
        self._held: list[bytes] = []
        self._size = 0
        self._ended = False
        self._is_known = False
        #: Too much to hold: everything goes on as it comes.
        self._passes = False

    def prefill_is_done(self) -> None:
        """What prefill knows is known."""
        self._is_known = True
        self._go_on()

    # What the exchange asks of an answer

    def feed(self, data: bytes) -> None:
        self._held.append(data)
        self._size += len(data)
        if self._size > HELD_BYTES_MAX:
            self._passes = True
        self._go_on()

    def end(self) -> None:
        self._ended = True
        self._go_on()

    def survives(self, leg_fact: str) -> bool:
        return self._inner.survives(leg_fact)

    def _go_on(self) -> None:
        is_ready = self._is_known and (self._ended or self._events is not None)
        if not is_ready and not self._passes:
            return
        data, self._held, self._size = b"".join(self._held), [], 0
        if data and not self._passes:
            data = self._merged(data)
        if data:
            self._inner.feed(data)
        if self._ended and self._leg.is_open:  # what was fed may have been the end of it
            self._inner.end()

    def _merged(self, data: bytes) -> bytes:
        if self._events is None:
            return self._logprobs.merge(data)
        try:
            return b"".join(map(self._merge_event, self._events.feed(data)))
        except EventTooLarge:
            self._passes = True
            return self._events.take_rest()

    def _merge_event(self, event: bytes) -> bytes:
        data = data_of(event)
        if data is None or not data.startswith(b"{"):
            return event
        merged = self._logprobs.merge(data)
        return event if merged is data else b"data: %b\n\n" % merged
