"""One request on its way to a worker behind NATS: frames come in, callbacks go out.

The worker proves that it is there with its first frame. From then on every frame must bear the
next number; a missing one is a break, since nothing else would tell that a piece of the answer is
lost (core NATS delivers at most once). Where two processes answer, the first is heard. A peer that
does not number its frames is believed as long as nothing can have been lost. Frames of a client
that is slow are kept, up to a bound. Whoever gives up an answer that is not over has it cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from router.headers import Headers
from router.wires.line import Answered
from router.wires.nats.broker import Message
from router.wires.nats.kept import Kept
from router.wires.nats.numbering import Numbering, Place
from router.wires.nats.protocol import (
    DATA,
    DONE,
    ERROR,
    FROM,
    HEAD,
    HEARTBEAT,
    HEARTBEAT_LOST_SECONDS,
    SEQ,
    STATUS,
    STILL,
    TERMINAL,
    TYPE,
    UNREACHABLE,
    answer_headers,
    is_drain_notice,
    number,
    reported,
)
from router.wires.nats.silence import SECOND_LOOK_SECONDS, Peer, Silence, Verdict
from router.wires.nats.sniffing import EVENTS, JSON, are_events, headers_of, is_packed, refusal_of
from router.wires.nats.untaken import lose

if TYPE_CHECKING:
    from router.wires.nats.inbox import Inbox

#: What may wait for the status of an answer without a head.
HELD_BYTES_MAX = 64 * 1024 * 1024
#: After the answer is known to be over, how long its last frame may take before it is cancelled.
LINGER_SECONDS = 1.0
ABSENT = "nobody listens at the worker's subject"


class NatsSent:
    """One attempt at one worker. Told by the inbox; `close` cancels it."""

    __slots__ = (
        "_frames",
        "_has_head",
        "_held",
        "_is_paused",
        "_kept",
        "_leaves_at",
        "_passes",
        "_streams",
        "answered",
        "armed_at",
        "cancel_subject",
        "has_begun",
        "inbox",
        "is_cold",
        "is_over",
        "is_published",
        "is_stored",
        "peer",
        "rank",
        "reply",
        "silence",
    )

    def __init__(
        self,
        inbox: Inbox,
        answered: Answered,
        cancel_subject: str,
        *,
        streams: bool,
        is_cold: bool,
        rank: int,
        peer: Peer,
    ) -> None:
        self.inbox = inbox
        self.cancel_subject = cancel_subject
        #: A probe and the like: not worth waiting for a broker that is away.
        self.is_cold = is_cold
        #: In a batch, frames of prefill workers come first.
        self.rank = rank
        #: Who is told; None once nobody is.
        self.answered: Answered | None = answered
        self.armed_at: float | None = None
        self.is_published = False
        #: It goes through a queue, where it may wait for a worker that has gone.
        self.is_stored = False
        #: The worker is done with it, or was told that nobody wants it.
        self.is_over = False
        self._streams = streams
        self._frames = Numbering()
        self.has_begun = False
        self._has_head = False
        self.silence = Silence(peer)
        self.peer = peer
        self._is_paused = False
        #: Data goes straight to whoever is told.
        self._passes = False
        #: The beginning of an answer without a head.
        self._held = bytearray()
        self._kept = Kept()
        self._leaves_at: float | None = None
        self.reply = inbox.open(self)

    # What its owner says

    def pause(self) -> None:
        """Tell nothing more until `resume`; what comes is kept."""
        self._is_paused, self._passes = True, False

    def resume(self) -> None:
        """Go on, in the next pass."""
        if self._is_paused:
            self._is_paused = False
            if self._kept:
                self._arm(self.inbox.reactor.now)
            else:
                self._passes = self._has_head

    def close(self) -> None:
        """Nobody wants the rest: the worker is told, so that its engine is freed. Idempotent."""
        self.answered = None
        if not self.is_over:
            self._finish()
            if self.is_published:
                self.inbox.cancels.add(self.cancel_subject, self.reply)

    def leave(self) -> None:
        """The answer is known to be over: its last frame may come, or it is cancelled soon."""
        self.answered = None
        if not self.is_over:
            self._leaves_at = self.inbox.reactor.now + LINGER_SECONDS
            self._arm(self._leaves_at)

    # What becomes of the request before any frame: it was not sent, or has not arrived

    def meet_full_queue(self) -> None:
        """There is no room for it."""
        if self._finish() is not None:
            answered = self._last()
            answered.on_connected()
            answered.on_full()

    def meet_nobody(self) -> None:
        """Its worker is not there."""
        if self._finish() is not None:
            self._last().on_broken(ABSENT, connecting=True)

    def meet_limit(self, limit: int) -> None:
        """The server would close the connection for a message of this size."""
        if self._finish() is not None:
            answered = self._last()
            answered.on_connected()
            answered.on_too_large(limit)

    def miss(self, detail: str) -> None:
        """Something may be lost: nobody's fault, but this answer cannot be trusted any more."""
        if self.answered is None:
            return
        answered = self._last()
        if self.is_published and not self.is_cold:
            self.inbox.missed()
        self.close()
        answered.on_missed(detail)

    def excuse(self, since: float) -> bool:
        """The broker was away meanwhile, or has dropped messages."""
        if self.inbox.is_connected and self.silence.cut_off_at < since:
            return False
        self.miss("the broker was away for a part of its time")
        return True

    def recall(self) -> bool:
        """See `Line`."""
        return lose(self, ABSENT)

    def expose(self, why: str) -> None:
        """Messages to us may have been lost: whoever numbers them shows whether any were."""
        if self.is_over or self.answered is None or not self.is_published:
            return
        if self._frames.is_numbered is False or self.is_cold:
            self.miss(why)
            return
        self.silence.exposed_at = self.inbox.reactor.now
        self._watch()

    def published(self) -> None:
        """It has gone to the worker itself, and not into a queue where it may wait."""
        self.is_published = True
        if not self.is_cold:
            self.silence.sent(self.inbox.reactor.now)
            self._watch()

    def reconnected(self) -> None:
        """Silence counts from now on: nobody could be heard before."""
        self.peer.back_at = None
        self.silence.back_at = self.inbox.reactor.now
        if self.is_published and not self.is_over:
            self._arm(self.silence.back_at + SECOND_LOOK_SECONDS)

    # What comes

    def take(self, message: Message) -> None:
        """One frame."""
        if self.is_over:
            return
        headers, frames = message.headers, self._frames
        is_next = headers.get(SEQ) == str(frames.expected) and headers.get(FROM) == frames.sender
        kind = headers.get(TYPE, DATA)
        if is_next and frames.is_numbered and kind != STILL:
            frames.expected += 1
        elif not self._counts(message):
            return
        self.silence.heard_at = self.inbox.reactor.now
        if self._passes and kind == DATA:
            if message.payload and self.answered is not None:
                self.answered.on_body(message.payload)
        else:
            self._take_other(kind, message)

    def take_all(self, messages: Sequence[Message]) -> None:
        """Several frames in a row: pieces of data are told as one."""
        pieces: list[bytes] = []
        frames = self._frames
        for message in messages:
            headers = message.headers
            is_plain = self._passes and frames.is_numbered and headers.get(TYPE) == DATA
            is_plain = is_plain and headers.get(FROM) == frames.sender
            if is_plain and headers.get(SEQ) == str(frames.expected):
                frames.expected += 1
                pieces.append(message.payload)
                continue
            self._tell_pieces(pieces)
            self.take(message)
        self._tell_pieces(pieces)

    def _tell_pieces(self, pieces: list[bytes]) -> None:
        if pieces:
            self.silence.heard_at = self.inbox.reactor.now
            data = b"".join(pieces)
            pieces.clear()
            if data and self.answered is not None:
                self.answered.on_body(data)

    def _counts(self, message: Message) -> bool:
        """Whether this frame is the next one; whatever else it is, is dealt with."""
        place = self._frames.place(message, is_exposed=self.silence.is_exposed)
        if place is Place.NEXT:
            if not self._frames.is_numbered:
                self.peer.has_word = False
            return True
        if place is Place.NOBODY:
            self.meet_absence()
        elif isinstance(place, str):
            self.miss(place)
        return False

    def meet_absence(self) -> None:
        """Nobody listens at the worker's subject."""
        if self.inbox.is_settling and self.answered is not None:
            # The broker is just back, and the agent may be a moment later.
            if self.is_cold:
                self.miss("the agent may not be back yet")
                return
            if self.inbox.sends_again(self):
                return
        self.meet_nobody()
        if self.is_cold:
            self.inbox.lose_worker(self.cancel_subject, ABSENT)

    def _take_other(self, kind: str, message: Message) -> None:
        if self.peer.back_at is None:
            self.peer.back_at = self.inbox.reactor.now
        if not self.has_begun:
            self.has_begun = True
            self.silence.began()
            self.inbox.arrived(self)
            if self.answered is not None:
                self.answered.on_connected()
        if kind in (HEARTBEAT, STILL, HEAD):
            self.silence.is_beating = self.peer.has_word = True
            self._watch()
        if kind in TERMINAL and (self.answered is None or not self._kept):
            self._finish()
        if self.answered is None or kind in (HEARTBEAT, STILL):
            return
        if self._is_paused or self._kept:
            self._keep(kind, message)
        else:
            self._tell(kind, message)

    def _keep(self, kind: str, message: Message) -> None:
        has_room = self._kept.put(kind, message)
        if kind in TERMINAL:
            self._finish()
        elif self._is_paused and not has_room:  # else it is told in the next pass
            answered = self._last()
            self.close()
            answered.on_unread()

    def _tell_kept(self) -> None:
        while self._kept and not self._is_paused and self.answered is not None:
            self._tell(*self._kept.take())
        self._passes = self._has_head and not self._is_paused and not self._kept

    # What it means

    def _tell(self, kind: str, message: Message) -> None:
        if kind == DATA:
            self._tell_data(message.payload)
        elif kind == HEAD:
            status = number(message.headers, STATUS) or 0
            if not self._has_head:
                self._tell_head(status, message)
        elif kind == DONE:
            self._tell_end(number(message.headers, STATUS))
        elif kind == ERROR:
            self._tell_error(message)

    def _tell_head(self, status: int, message: Message) -> None:
        if not 200 <= status < 600:
            self._fail("a head without a status")
        elif self.answered is not None:
            self._has_head, self._passes = True, not self._kept and not self._is_paused
            self.answered.on_head(status, answer_headers(message.headers, streams=self._streams))

    def _tell_data(self, payload: bytes) -> None:
        assert self.answered is not None
        if self._has_head:
            if payload:
                self.answered.on_body(payload)
            return
        self._held += payload
        if self._streams and are_events(bytes(self._held[:16])):
            held, self._held = bytes(self._held), bytearray()
            self._has_head, self._passes = True, not self._kept and not self._is_paused
            self.answered.on_head(200, EVENTS)
            if self.answered is not None:
                self.answered.on_body(held)
        elif is_packed(bytes(self._held[:2])):
            self._fail("an answer is compressed, and does not say how")
        elif len(self._held) > HELD_BYTES_MAX:
            self._fail("an answer without a head is too large")

    def _tell_end(self, status: int | None) -> None:
        self._finish()
        if self._has_head:
            self._last().on_end()
            return
        held, self._held = bytes(self._held), bytearray()
        status = 200 if status is None else status
        if 200 <= status < 600:
            self._tell_whole(status, headers_of(held, streams=self._streams), held)
        else:
            self._fail("an end without a status")

    def _tell_whole(self, status: int, headers: Headers, body: bytes) -> None:
        assert self.answered is not None
        self.answered.on_head(status, headers)
        if body and self.answered is not None:
            self.answered.on_body(body)
        if self.answered is not None:
            self._last().on_end()

    def _tell_error(self, message: Message) -> None:
        self._finish()
        if is_drain_notice(message.payload):
            self._last().on_handed_back()
            return
        status = number(message.headers, STATUS) or 0
        is_refusal = 400 <= status < 500 or status == 503
        if is_refusal and not self._has_head and not self._held:
            self._tell_whole(status, JSON, refusal_of(status).body())
            return
        is_unreachable = status == UNREACHABLE and not self._has_head and not self._held
        self._last().on_broken(reported(status), connecting=is_unreachable)

    def _fail(self, detail: str) -> None:
        """The worker's fault."""
        answered = self.answered
        self.close()
        if answered is not None:
            answered.on_broken(detail, connecting=False)

    # Time

    def sweep(self, now: float) -> float | None:
        """See `Timed`."""
        answered = self.answered  # who is told the last is to hear of a bug on the way as well
        try:
            return self._sweep(now)
        except Exception as error:
            self.inbox.crash(self, answered, error)
            return None

    def crashed(self, error: Exception) -> None:
        """See `Timed`."""
        raise error

    def _sweep(self, now: float) -> float | None:
        if self._kept:
            self._tell_kept()
        if self.is_over:
            return None
        if self._leaves_at is not None:
            if now < self._leaves_at:
                return self._leaves_at
            self.close()
            return None
        if not self.is_published:
            return self.inbox.wait_on(self, now)
        return self._look_at_silence(now)

    def _look_at_silence(self, now: float) -> float | None:
        found = self.silence.look(now, self.inbox.is_connected)
        if not isinstance(found, Verdict):
            return found
        tell = self._fail if found is Verdict.GONE else self.miss
        tell(found.value)
        return None

    def _watch(self) -> None:
        if self.armed_at is None:
            self.silence.heard_at = max(self.silence.heard_at, self.inbox.reactor.now)
            self._arm(self.silence.heard_at + HEARTBEAT_LOST_SECONDS)

    def _arm(self, when: float) -> None:
        self.inbox.reactor.sweeper.arm(self, when)

    # The end

    def _finish(self) -> Answered | None:
        """Nothing more can come of it; whoever is told, is told the rest."""
        self.is_over, self._passes = True, False
        self.inbox.forget(self)
        return self.answered

    def _last(self) -> Answered:
        """Whoever is told, for the last time."""
        answered, self.answered = self.answered, None
        assert answered is not None
        return answered
