"""A channel: one socket in the reactor, with buffered writing, pausable reading, and its ends.

What a channel promises stands here, when it is called and by whom in `router.reactor`. Readiness is
edge-triggered, so whatever is not read now has to be remembered: nothing will tell of it twice.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from router.sockets import ERROR, HANGUP, READABLE, WRITABLE, Socket

if TYPE_CHECKING:
    from router.reactor import Reactor

_ENDING = HANGUP | ERROR
#: Events after which there is something to read.
TO_READ = READABLE | _ENDING
#: Bytes asked of one recv; a shorter answer means the socket is drained.
RECV_BYTES = 65536


class Rank(IntEnum):
    """Order in which the channels of one pass are handled."""

    PREFILL = 0
    WORKER = 1
    CLIENT = 2


class Channel:
    """One socket in the reactor: buffered writing, pausable reading, an orderly or a hard end.

    Subclasses say what bytes mean by overriding the callbacks. All callbacks are synchronous and
    run in the reactor's task; none is called after `close`.
    """

    __slots__ = (
        "_broken",
        "_connecting",
        "_ended",
        "_fetched",
        "_hung_up",
        "_kept",
        "_later",
        "_out",
        "_readable",
        "armed_at",
        "backlog_bytes",
        "closing",
        "in_next_pass",
        "is_open",
        "paused",
        "rank",
        "reactor",
        "sock",
    )

    def __init__(self, reactor: Reactor, sock: Socket, rank: Rank, *, connecting: bool) -> None:
        self.reactor = reactor
        self.sock = sock
        self.rank = rank
        self.is_open = True
        self.paused = False
        #: Belongs to the reactor: it will look at this channel again without an edge.
        self.in_next_pass = False
        #: True once the end is decided and only the backlog is still being written.
        self.closing = False
        #: Bytes accepted by `send` that the kernel has not taken yet.
        self.backlog_bytes = 0
        self.armed_at: float | None = None
        self._out: list[bytes] = []
        #: What was said during this batch; never beside a backlog.
        self._later: list[bytes] = []
        #: What `fetch` has met, until it is made something of: bytes, or why there are none.
        self._fetched: bytes | OSError | None = None
        #: A pause came between; more may have arrived behind it, whose edge was taken for its own.
        self._kept = False
        self._readable = False
        self._hung_up = False
        #: What a write has met. The kernel tells it once, and reads then find a plain end.
        self._broken: OSError | None = None
        self._connecting = connecting
        self._ended = False
        reactor.register(self)

    # What a subclass hears

    def connected(self) -> None:
        """The connection is established (only for channels that were opened by us)."""

    def received(self, data: bytes) -> None:
        """Bytes arrived."""
        raise NotImplementedError

    def ended(self) -> None:
        """The peer closed its side; called once."""
        raise NotImplementedError

    def lost(self, error: OSError) -> None:
        """The connection broke, or could not be made; the channel is already closed."""
        raise NotImplementedError

    def hung_up_while_paused(self) -> None:
        """The peer closed its side, and unread bytes may still lie before that end."""

    def backlogged(self) -> None:
        """The kernel did not take all of what was said; the rest is the backlog."""

    def progressed(self) -> None:
        """The kernel took some of the backlog, not all."""

    def drained(self) -> None:
        """The backlog is empty again."""

    def closed(self) -> None:
        """The channel is closed, by whomever."""

    def flushed_last(self) -> None:
        """The backlog of a channel that is `closing` is written."""
        self.close()

    def crashed(self, error: Exception) -> None:
        """A callback raised: a bug of ours. The owner must hear of it."""
        raise error

    def sweep(self, now: float) -> float | None:
        """See `Timed`."""
        return None

    # What the owner says

    def send(self, data: bytes) -> None:
        """Write at the end of the batch, or now outside of one; `lost` reports errors, later.

        What the kernel does not take then is the backlog.
        """
        if self._broken is not None:
            return
        if self._out or self._connecting:
            self._out.append(data)
            self.backlog_bytes += len(data)
        elif (unwritten := self.reactor.unwritten) is None:
            self._write(data)
        else:
            if not self._later:
                unwritten.append(self)
            self._later.append(data)

    @property
    def has_news(self) -> bool:
        """Something was read of it that nothing has been made of yet."""
        return self._fetched is not None

    @property
    def owes(self) -> bool:
        """Something that was said is not with the kernel yet."""
        return bool(self.backlog_bytes or self._later)

    def pause(self) -> None:
        """Read nothing until `resume`; the peer is held back by TCP."""
        self.paused = True

    def resume(self) -> None:
        """Read on; what arrived while paused is looked at in the next pass."""
        if self.paused:
            self.paused = False
            if self._readable:
                self.reactor.look_again(self)

    def close(self) -> None:
        """Close at once; what is not written yet is dropped. Idempotent."""
        if self.is_open:
            self.is_open = False
            try:
                self.reactor.forget(self)
            finally:
                self.sock.close()
                self.closed()

    def reset(self) -> None:
        """Close so that the peer sees a reset (RST) and cannot take it for a clean end."""
        if self.is_open:
            self.is_open = False
            try:
                self.reactor.forget(self)
            finally:
                self.sock.reset()
                self.closed()

    def detach(self) -> Socket:
        """Take the socket out of the reactor; the caller owns and closes it."""
        self.is_open = False
        self.reactor.forget(self)
        return self.sock

    # What the reactor calls

    def fetch(self) -> None:
        """Ask the kernel what has arrived; `ready` or `read` will make something of it."""
        if self._fetched is None and not (self.paused or self._connecting):
            try:
                self._fetched = self.sock.recv(RECV_BYTES)
            except BlockingIOError:
                pass
            except OSError as error:
                self._fetched = error

    def write_out(self) -> None:
        """Write what was said during the batch."""
        later, self._later = self._later, []
        if later and self.is_open:
            self._write(later[0] if len(later) == 1 else b"".join(later))
            if self.closing and not self._out and self._broken is None:
                self.flushed_last()

    def ready(self, events: int) -> None:
        """Handle readiness; only the reactor calls this."""
        if self._connecting and not self._finish_connecting():
            return
        if events & WRITABLE and (self._out or self.sock.has_unsent):
            self._flush()
        if not self.is_open or not events & TO_READ:
            return
        self._readable = True
        if events & _ENDING:
            self._hung_up = True
        self.read()

    def read(self) -> None:
        """One bounded read; a full buffer or a hang-up behind it is looked at in the next pass."""
        if self.paused:
            self._kept = self._fetched is not None
            # An end that was seen before the pause brings no second edge.
            if self._hung_up:
                self.hung_up_while_paused()
            return
        data = self._fetched
        if data is None:  # as `fetch`, which would be one more call on every event
            try:
                data = self.sock.recv(RECV_BYTES)
            except BlockingIOError:
                pass
            except OSError as error:
                data = error
        else:
            self._fetched = None
        kept, self._kept = self._kept, False
        if isinstance(data, OSError):
            self._lose(data)
            return
        if not data:
            self._readable = False
            if self._broken is not None:
                self._lose(self._broken)
            elif data is not None and not self._ended:
                self._ended = True
                self.ended()
            return
        if len(data) < RECV_BYTES and not (self._hung_up or kept):
            self._readable = False
        else:
            self.reactor.look_again(self)
        self.received(data)

    def _finish_connecting(self) -> bool:
        try:
            self.sock.finish_connecting()
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(error)
            return False
        self._connecting = False
        self.connected()
        if self.is_open and self._out:
            self._flush()
        return self.is_open

    def _write(self, data: bytes) -> None:
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._fail_write(error)
            return
        if sent != len(data):
            self._out.append(data[sent:])
            self.backlog_bytes = len(data) - sent
            self.backlogged()

    def _flush(self) -> None:
        data = b"".join(self._out)
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            self._out = [data] if data else []
            return
        except OSError as error:
            self._fail_write(error)
            return
        if sent != len(data):
            self._out = [data[sent:]]
            self.backlog_bytes = len(data) - sent
            if sent:
                self.progressed()
            return
        self._out = []
        self.backlog_bytes = 0
        if self.closing:
            self.flushed_last()
        else:
            self.drained()

    def _fail_write(self, error: OSError) -> None:
        """A write failed: what the peer said before that is still read, then this is a loss."""
        self._broken = error
        self._out = []
        self.backlog_bytes = 0
        self._hung_up = self._readable = True
        self.reactor.look_again(self)

    def _lose(self, error: OSError) -> None:
        self.close()
        self.lost(error)
