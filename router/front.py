"""The front: client connections, in the reactor.

A `ClientChannel` hands what arrives to a `CallReader` and writes one reply at a time. Each
connection has one Trio task (`router.connection`), which is parked while bytes pass; the socket is
watched all that time, and a client that leaves or half-closes is reported at once. Requests that
are pipelined are served in order, from what one read brought; no more is read until they are
answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio

from router.calls import Call, CallReader, Limits, Reading
from router.errors import Refusal
from router.headers import lines_of
from router.reactor import Channel, Rank, Reactor
from router.responses import head_of
from router.sockets import Socket
from router.waking import Waker

#: A client that owes us this many bytes of reading holds back its own worker until it took them.
BACKLOG_BYTES_HIGH = 128 * 1024
#: How long an ended connection still swallows what the client is sending, so that a reset does
#: not destroy the answer on its way.
LINGER_SECONDS = 2.0

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_BODY = frozenset({204, 304})


def _no() -> bool:
    return False


class Watcher(Protocol):
    """Who wants to know what happens to the client while a call is being served."""

    def on_client_gone(self) -> None:
        """The client closed its side, or its connection broke, or it stopped reading."""

    def on_client_slow(self) -> None:
        """Too many bytes wait for the client: send no more for now."""

    def on_client_ready(self) -> None:
        """All of them are taken: send on."""

    def next_deadline(self) -> float | None:
        """When something of this call is due, on Trio's clock in seconds."""

    def on_deadline(self, now: float) -> None:
        """Something may be due."""

    def on_crash(self, error: Exception) -> None:
        """A callback for this client raised: a bug of ours."""


class ClientChannel(Channel):
    """One client connection, for its whole life."""

    __slots__ = (
        "_is_whole",
        "_lingering_until",
        "_quiet_since",
        "_reader",
        "_slow",
        "_stalled_since",
        "_untaken",
        "_until_close",
        "_waker",
        "begin_call",
        "current",
        "gone",
        "limits",
        "reply_begun",
        "reply_chunked",
        "watcher",
    )

    def __init__(self, reactor: Reactor, sock: Socket, limits: Limits) -> None:
        self.limits = limits
        #: The call being served; its reply is the only one that may be written.
        self.current: Call | None = None
        self.watcher: Watcher | None = None
        #: Begins the call that is next in line, in a callback; False leaves it to the task.
        self.begin_call: Callable[[], bool] = _no
        self.gone = False
        self.reply_begun = False
        self.reply_chunked = False
        self._reader = CallReader(limits)
        self._waker = Waker()
        self._quiet_since = reactor.now
        self._stalled_since: float | None = None
        #: Bytes that the client had not taken when that was last looked at.
        self._untaken = 0
        self._slow = False
        self._lingering_until: float | None = None
        #: The body of the reply ends with the connection (HTTP/1.0), so it must not end by mistake.
        self._until_close = False
        #: The last byte of the reply was written, or is in the backlog.
        self._is_whole = False
        super().__init__(reactor, sock, Rank.CLIENT, connecting=False)
        try:
            self._arm()
        except Exception:
            reactor.forget(self)  # whoever made the socket closes it
            raise

    # For the task of this connection

    @property
    def has_call(self) -> bool:
        """A call is there, and no other is being served.

        Calls that came behind one whose reply was cut are not served.
        """
        return bool(self._reader.calls) and self.current is None and not self.gone

    @property
    def next_in_line(self) -> Call:
        """The call that `take_call` would take."""
        return self._reader.calls[0]

    def take_call(self) -> Call:
        """Serve the next call in line from now on."""
        self.current = call = self._reader.calls.popleft()
        self.reply_begun = False
        return call

    def finish_call(self) -> None:
        """The reply is written: on to the next call, or to the end of the connection."""
        call, self.current = self.current, None
        self.watcher = None
        if not self.is_open or self.closing or self.gone:
            return
        if call is None or not call.keep_alive or call.refusal is not None:
            self.end()
            return
        now = self._quiet_since = self.reactor.now
        if self._reader.calls:
            self._waker.wake()
        else:
            self.resume()
            # What came of the next head while this call was served has its time from now on.
            self._reader.head_since = now
            self._attend_to_reading()
        if self.limits.idle_seconds:
            self.reactor.sweeper.arm(self, now + self.limits.idle_seconds)

    def take_over(self) -> tuple[trio.abc.HalfCloseableStream, bytes]:
        """Leave the reactor: the connection as a Trio stream, and what was read beyond the call."""
        assert not self.owes
        self.gone = True
        assert not self.has_news  # it was not paused by anybody else since
        unread = self._reader.unread
        return self.reactor.network.stream_of(self.detach()), unread

    def end(self) -> None:
        """Close in order: the backlog is written, then FIN, then a moment of swallowing input."""
        self.gone = True
        if self.is_open and not self.closing:
            self.closing = True
            if not self.owes:
                self._half_close()
            self._arm()

    @property
    def waker(self) -> Waker:
        """The parking place of this connection's task."""
        return self._waker

    # Writing the reply of the current call

    def respond(self, status: int, lines: bytes, body: bytes) -> None:
        """A whole response in one send; `lines` are header lines without framing."""
        assert self.current is not None
        self.reply_begun = True
        head = self._head(status, lines)
        if status in _NO_BODY:
            self.send(head + b"\r\n")
        elif self.current.method == "HEAD":
            self.send(b"%bcontent-length: %d\r\n\r\n" % (head, len(body)))
        else:
            self.send(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self._note_backlog()

    def refuse(self, refusal: Refusal, request_id: str | None = None) -> None:
        """A router-made error as a whole response."""
        lines = lines_of(refusal.headers())
        if request_id is not None:
            lines += b"x-request-id: %b\r\n" % request_id.encode()
        self.respond(refusal.status, lines, refusal.body())

    def begin(self, status: int, lines: bytes, data: bytes) -> None:
        """The head of a response of unknown length, and its first bytes, in one send."""
        assert self.current is not None
        self.reply_begun = True
        self.reply_chunked = not self.current.http_10
        self._until_close = self.current.http_10
        self._is_whole = False
        if self.reply_chunked:
            head = self._head(status, lines) + b"transfer-encoding: chunked\r\n\r\n"
        else:
            self.current.keep_alive = False
            head = self._head(status, lines) + b"\r\n"
        self.send(head + self._framed(data))
        self._note_backlog()

    def write(self, data: bytes) -> None:
        """More of the body."""
        if data:
            if self.reply_chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            self.send(data)
            if self.backlog_bytes:
                self._note_backlog()

    def write_last(self, data: bytes) -> None:
        """The last bytes of the body and its clean end, in one send."""
        if self.reply_chunked:
            self.send(self._framed(data) + b"0\r\n\r\n")
        elif data:
            self.send(data)
        self._is_whole = True
        self._note_backlog()

    def cut(self, data: bytes) -> None:
        """Last words, then an end that no client can take for a clean one."""
        if not self.is_open:
            return
        self.gone = True
        if data:
            self.send(self._framed(data))
        self.end()

    def close(self) -> None:
        """Close at once. Idempotent.

        In a chunked body the missing last chunk says that it is not complete. An HTTP/1.0 body
        ends with the connection, so only a reset tells the client.
        """
        if self._until_close and (self.owes or not self._is_whole):
            self.reset()
        else:
            super().close()

    def _head(self, status: int, lines: bytes) -> bytes:
        call = self.current
        assert call is not None
        return head_of(status, lines, keeps_alive=call.keep_alive, http_10=call.http_10)

    def _framed(self, data: bytes) -> bytes:
        if self.reply_chunked and data:
            return b"%x\r\n%b\r\n" % (len(data), data)
        return data

    # The reactor's callbacks

    def received(self, data: bytes) -> None:
        if self._lingering_until is not None or self.gone:
            return
        now, reader = self.reactor.now, self._reader
        reader.feed(data, now)
        if reader.calls or reader.reading is not Reading.NOTHING:
            self._quiet_since = now  # empty lines before a call are no sign of life
        if reader.calls:
            # One call at a time: what else this read brought is kept, and no more is read.
            if self.current is not None or len(reader.calls) > 1 or reader.is_refused:
                self.pause()
            if not self.has_call or not self.begin_call():
                self._waker.wake()
        elif self.current is None:
            self._attend_to_reading()

    def _attend_to_reading(self) -> None:
        """The next call has begun to arrive, and it is its turn."""
        reader = self._reader
        if reader.reading is not Reading.NOTHING:
            self._arm()
        if reader.expects_continue:
            reader.expects_continue = False
            self.send(_CONTINUE)

    def ended(self) -> None:
        # A half-closed client is gone (contract): it cannot be told from one that closed.
        self._leave()

    def lost(self, error: OSError) -> None:
        self._leave()

    def hung_up_while_paused(self) -> None:
        self._leave()

    def backlogged(self) -> None:
        self._note_backlog()

    def progressed(self) -> None:
        self._stalled_since = self.reactor.now
        self._untaken = self.backlog_bytes + self.sock.untaken_bytes()

    @property
    def is_slow(self) -> bool:
        """Too many bytes wait for the client."""
        return self._slow

    def drained(self) -> None:
        self._stalled_since = None
        if self._slow:
            self._slow = False
            if self.watcher is not None:
                self.watcher.on_client_ready()
        if self.watcher is None:
            self._waker.wake()  # the task may wait for this, to take the connection over

    def closed(self) -> None:
        self.gone = True
        self._waker.wake()

    def flushed_last(self) -> None:
        self._half_close()

    def crashed(self, error: Exception) -> None:
        if self.watcher is not None:
            self.watcher.on_crash(error)
        elif self.current is not None:
            self._waker.throw(error)  # it could not even be begun
        else:
            self.close()
            raise error

    def sweep(self, now: float) -> float | None:
        """Look at every deadline of this connection and of the call it serves."""
        if not self.is_open:
            return None
        due = self._next_deadline()
        if due is not None and due <= now:
            self._meet_deadline(now)
            due = self._next_deadline() if self.is_open else None
        return due

    def rearm(self, not_before: float = 0.0) -> None:
        """A deadline of the call may have come nearer; who knows that none is due before says so.

        Then the sweeper, if it comes by until there, will ask anyway.
        """
        if self.armed_at is not None and self.armed_at <= not_before:
            return
        due = None if self.watcher is None else self.watcher.next_deadline()
        if due is not None:
            self.reactor.sweeper.arm(self, due)

    # Deadlines

    def _arm(self) -> None:
        due = self._next_deadline()
        if due is not None:
            self.reactor.sweeper.arm(self, due)

    def _next_deadline(self) -> float | None:
        limits = self.limits
        if self._lingering_until is not None:
            return self._lingering_until
        dues = []
        if self._stalled_since is not None and limits.stall_seconds:
            dues.append(self._stalled_since + limits.stall_seconds)
        if self.watcher is not None:
            due = self.watcher.next_deadline()
            if due is not None:
                dues.append(due)
        elif self.current is None and not self._reader.calls:
            if self._reader.reading is Reading.HEAD and limits.head_seconds:
                dues.append(self._reader.head_since + limits.head_seconds)
            elif limits.idle_seconds:
                dues.append(self._quiet_since + limits.idle_seconds)
            if self._reader.reading is Reading.BODY and limits.call_seconds:
                dues.append(self._reader.head_since + limits.call_seconds)
        return min(dues) if dues else None

    def _meet_deadline(self, now: float) -> None:
        limits = self.limits
        if self._lingering_until is not None:
            if self._lingering_until <= now:
                self.close()
        elif (
            self._stalled_since is not None
            and limits.stall_seconds
            and self._stalled_since + limits.stall_seconds <= now
        ):
            self._meet_stall(now)
        elif self.watcher is not None:
            self.watcher.on_deadline(now)
        elif self._reader.reading is Reading.NOTHING:
            self.close()
        else:
            if self._reader.reading is Reading.BODY:
                refusal = Refusal("body_timeout", "The body took too long to arrive.")
            else:
                refusal = Refusal("header_timeout", "The headers took too long to arrive.")
            self._reader.refuse(refusal)
            self.pause()
            self._waker.wake()

    def _meet_stall(self, now: float) -> None:
        """No room in the kernel's buffer for so long; that of a slow reader may be megabytes.

        Linux tells of room only when a third of the buffer is free, so what the client has really
        taken is asked for.
        """
        untaken = self.backlog_bytes + self.sock.untaken_bytes()
        if untaken < self._untaken:
            self._untaken, self._stalled_since = untaken, now
        else:
            self.give_up()

    # Ends

    def give_up(self) -> None:
        """The client reads too little: it counts as gone, and the rest is thrown away."""
        self._leave(hard=True)

    def _leave(self, *, hard: bool = False) -> None:
        """The client is gone: tell whoever serves it, close."""
        self.gone = True
        self._reader.calls.clear()
        try:
            if self.watcher is not None:
                self.watcher.on_client_gone()
                self.watcher = None  # not before: a crash in there is its task's to hear of
        finally:
            if hard:
                self.reset()
            self.close()
            self._waker.wake()

    def _half_close(self) -> None:
        if self._until_close and not self._is_whole:
            self.reset()
            return
        self._lingering_until = self.reactor.now + LINGER_SECONDS
        self.sock.shutdown_write()
        self.resume()
        self._arm()
        self._waker.wake()

    def _note_backlog(self) -> None:
        if not self.backlog_bytes:
            return
        if self._stalled_since is None:
            self._stalled_since = self.reactor.now
            self._untaken = self.backlog_bytes + self.sock.untaken_bytes()
            self._arm()
        if self.backlog_bytes > BACKLOG_BYTES_HIGH and not self._slow:
            self._slow = True
            if self.watcher is not None:
                self.watcher.on_client_slow()
