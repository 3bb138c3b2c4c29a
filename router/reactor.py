"""The reactor: every client and worker socket, read and written by one Trio task.

Sockets are non-blocking and registered once, edge-triggered, in a private epoll. One ordinary
task of the root nursery drains it, a bounded number of events a pass, and calls the channels'
callbacks, which are synchronous. No channel, cancel scope or task switch is paid per event;
lifetimes stay what they are in Trio, because a channel never outlives the task that owns it.

Rules that keep it safe, each with a test:

* An event belongs to a channel object, not to a descriptor number: events of a pass that reach a
  channel closed earlier in the same pass are dropped.
* Facts of one pass come in a fixed order, whatever epoll's was: prefill workers, then decode and
  mixed workers, then clients, then deadlines.
* Edge-triggered readiness is remembered: a channel that was paused, or whose read filled the
  buffer, is read again without waiting for an edge that may never come, but not before other
  tasks had their turn.
* A callback cannot raise past the reactor. What it raises goes to `Channel.crashed`, whose owner
  re-raises it in its own task.
* Tasks are woken through `Waker`, which is idempotent and safe to call for a task that was
  cancelled in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from operator import itemgetter
from typing import cast

import trio

from router.sockets import (
    ERROR,
    HANGUP,
    READABLE,
    WRITABLE,
    Address,
    Listening,
    Network,
    Socket,
    TlsTarget,
)
from router.waking import Sweeper, Waker

_BY_RANK = itemgetter(0)
_ENDING = HANGUP | ERROR
_TO_READ = READABLE | _ENDING
#: Bytes asked of one recv; a shorter answer means the socket is drained.
RECV_BYTES = 65536
#: Events taken from the network in one pass, so that Trio's other tasks get their turn.
EVENTS_PER_PASS = 512
#: Connections accepted in one pass, for the same reason.
ACCEPTS_PER_PASS = 128
#: After a failed accept.
ACCEPT_AGAIN_SECONDS = 0.1


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
        "_broken", "_connecting", "_ended", "_hung_up", "_out", "_readable", "armed_at",
        "backlog_bytes", "closing", "in_next_pass", "is_open", "paused", "rank", "reactor",
        "sock",
    )  # fmt: skip

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
        """Write what the kernel takes now and keep the rest; `lost` reports errors, later."""
        if self._broken is not None:
            return
        if self._out or self._connecting:
            self._out.append(data)
            self.backlog_bytes += len(data)
            return
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
        """Close at once; the backlog is dropped. Idempotent."""
        if self.is_open:
            self.is_open = False
            self.reactor.forget(self)
            self.sock.close()
            self.closed()

    def reset(self) -> None:
        """Close so that the peer sees a reset (RST) and cannot take it for a clean end."""
        if self.is_open:
            self.is_open = False
            self.reactor.forget(self)
            self.sock.reset()
            self.closed()

    def detach(self) -> Socket:
        """Take the socket out of the reactor; the caller owns and closes it."""
        self.is_open = False
        self.reactor.forget(self)
        return self.sock

    # What the reactor calls

    def ready(self, events: int) -> None:
        """Handle readiness; only the reactor calls this."""
        if self._connecting and not self._finish_connecting():
            return
        if events & WRITABLE and (self._out or self.sock.has_unsent):
            self._flush()
        if not self.is_open or not events & _TO_READ:
            return
        self._readable = True
        if events & _ENDING:
            self._hung_up = True
        if not self.paused:
            self.read()
        elif self._hung_up:
            self.hung_up_while_paused()

    def read(self) -> None:
        """One bounded read; a full buffer or a hang-up behind it is looked at in the next pass."""
        if self.paused:
            # Found out here, too: an end seen before the pause brings no second edge.
            if self._hung_up:
                self.hung_up_while_paused()
            return
        data: bytes | None
        try:
            data = self.sock.recv(RECV_BYTES)
        except BlockingIOError:
            data = None
        except OSError as error:
            self._lose(error)
            return
        if not data:
            self._readable = False
            if self._broken is not None:
                self._lose(self._broken)
            elif data is not None and not self._ended:
                self._ended = True
                self.ended()
            return
        if len(data) < RECV_BYTES and not self._hung_up:
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


class Listener:
    """A listening socket; every accepted connection is handed to `accepted`."""

    __slots__ = ("_accepted", "armed_at", "in_next_pass", "is_open", "listening", "rank", "reactor")

    def __init__(
        self, reactor: Reactor, listening: Listening, accepted: Callable[[Socket], None]
    ) -> None:
        self.reactor = reactor
        self.listening = listening
        self.rank = Rank.CLIENT
        self.is_open = True
        self.in_next_pass = False
        self.armed_at: float | None = None
        self._accepted = accepted
        reactor.listen(self)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that clients reach."""
        return self.listening.address

    def ready(self, _events: int) -> None:
        """Accept; only the reactor calls this."""
        self.read()

    def read(self) -> None:
        """Accept what waits, up to a bound; the rest is looked at in the next pass."""
        for _ in range(ACCEPTS_PER_PASS):
            sock = self.listening.accept()
            if sock is None:
                return
            self._accepted(sock)
        self.reactor.look_again(self)

    def crashed(self, error: Exception) -> None:
        """Out of descriptors, for one: report it, and try again when some may be free.

        The connections that wait bring no new edge, so without this they would wait for ever.
        """
        self.reactor.report(error)
        self.reactor.sweeper.arm(self, self.reactor.now + ACCEPT_AGAIN_SECONDS)

    def sweep(self, _now: float) -> None:
        """See `crashed`."""
        self.reactor.look_again(self)

    def close(self) -> None:
        """Stop listening; accepted connections stay. Idempotent."""
        if self.is_open:
            self.is_open = False
            self.reactor.unlisten(self)
            self.listening.close()


class Reactor:
    """Drains the network and the deadlines; see the module's rules."""

    def __init__(self, network: Network, on_bug: Callable[[Exception], None]) -> None:
        self.network = network
        self.sweeper = Sweeper(on_bug)
        #: Trio's clock at the start of the current pass, in seconds.
        self.now = 0.0
        self._on_bug = on_bug
        self._channels = 0
        self._listeners = 0
        self._again: list[Channel | Listener] = []
        self._nudge = Waker()

    async def run(self) -> None:
        """Serve until cancelled: the reactor's task and the sweeper's."""
        self.now = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drain)
            nursery.start_soon(self._look_again)
            nursery.start_soon(self._sweep)

    def register(self, channel: Channel) -> None:
        """Watch a channel's socket for everything, edge-triggered, until `forget`."""
        self._channels += 1
        self.network.register(channel.sock, channel)

    def forget(self, channel: Channel) -> None:
        """Stop watching; later events of this pass for it are dropped."""
        self._channels -= 1
        self.network.unregister(channel.sock)

    def listen(self, listener: Listener) -> None:
        """Watch a listening socket."""
        self._listeners += 1
        self.network.register(listener.listening, listener)

    def unlisten(self, listener: Listener) -> None:
        """Stop watching a listening socket."""
        self._listeners -= 1
        self.network.unregister(listener.listening)

    def look_again(self, owner: Channel | Listener) -> None:
        """Read (or accept from) `owner` in the next pass, once, without waiting for an edge."""
        if not owner.in_next_pass:
            owner.in_next_pass = True
            self._again.append(owner)
            self._nudge.wake()

    def connect(self, address: Address, tls: TlsTarget | None) -> Socket:
        """Begin a connection; raises OSError when it fails at once."""
        return self.network.connect(address, tls)

    def report(self, bug: Exception) -> None:
        """Hand an unexpected exception that no request owns to the log."""
        self._on_bug(bug)

    def statistics(self) -> dict[str, int]:
        """Live channels and listeners, for tests and for /debug."""
        return {"channels": self._channels, "listeners": self._listeners}

    # The three tasks; each runs whole passes, so it does not matter which of them comes first

    async def _drain(self) -> None:
        while True:
            await self.network.wait()
            self.turn()

    async def _look_again(self) -> None:
        while True:
            await self._nudge.wait()
            # A nudge that came during the last pass does not park us, and somebody who sends
            # without a stop would keep every other task, deadlines included, from running.
            await trio.lowlevel.checkpoint()
            self.turn()

    async def _sweep(self) -> None:
        while True:
            await self.sweeper.wait()
            # Whatever arrived by now comes first: an answer beats a deadline of the same moment.
            self.turn()
            self.sweeper.sweep(self.now)

    def turn(self) -> None:
        """One pass: what is ready now, in the fixed order."""
        self.now = trio.current_time()
        ready: list[tuple[int, Channel | Listener, int]] = []
        if self._again:
            again, self._again = self._again, []
            for it in again:
                it.in_next_pass = False
                ready.append((it.rank, it, -1))
        # The network returns what `register` was given, and we give it nothing else.
        found = cast("Sequence[tuple[Channel | Listener, int]]", self.network.poll(EVENTS_PER_PASS))
        for owner, events in found:
            ready.append((owner.rank, owner, events))
        if len(ready) > 1:
            ready.sort(key=_BY_RANK)
        for _, owner, events in ready:
            if owner.is_open:
                try:
                    if events < 0:
                        owner.read()
                    else:
                        owner.ready(events)
                except Exception as error:
                    self._crash(owner, error)

    def _crash(self, owner: Channel | Listener, error: Exception) -> None:
        try:
            owner.crashed(error)
        except Exception as second:
            owner.close()
            self._on_bug(second)
