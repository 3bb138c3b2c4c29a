"""A network in memory, under virtual time: the other world that the reactor can run in.

On one side of every connection is a `Socket` of the seam, for the router; on the other a Trio
stream, for a simulated engine or a test's client. A pipe holds as many bytes as a kernel's buffer
would, so that back-pressure is real, and what one `recv` returns is cut where the seed says, so
that no test can come to rely on how bytes were sent. The conformance suite in test_network.py
holds this and the real sockets to the same promises.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import trio
from attrs import define, field

from router.sockets import (
    ERROR,
    HANGUP,
    READABLE,
    WRITABLE,
    Address,
    Listening,
    Socket,
    TlsTarget,
)

PIPE_BYTES = 64 * 1024

Handler = Callable[["MemoryStream"], Awaitable[None]]


@define(eq=False)
class Pipe:
    """Bytes in one direction."""

    capacity: int = PIPE_BYTES
    data: bytearray = field(factory=bytearray)
    ended: bool = False
    broken: bool = False
    #: Called when there is something to read, and when there is room again after there was none.
    on_readable: Callable[[], None] = lambda: None
    on_writable: Callable[[], None] = lambda: None
    starved: bool = False

    @property
    def has_room(self) -> bool:
        """Some byte would be taken."""
        return len(self.data) < self.capacity

    @property
    def is_quiet(self) -> bool:
        """There is nothing to take, not even an end."""
        return not (self.data or self.ended or self.broken)

    def put(self, data: bytes) -> int:
        """Take what fits; raises BlockingIOError if nothing does, BrokenPipeError after an end."""
        if self.broken or self.ended:
            raise BrokenPipeError(errno.EPIPE, "broken pipe")
        room = self.capacity - len(self.data)
        if room <= 0:
            self.starved = True
            raise BlockingIOError
        self.data += data[:room]
        if len(data) > room:
            self.starved = True
        self.on_readable()
        return min(len(data), room)

    def take(self, limit: int) -> bytes:
        """Up to `limit` bytes; b"" at the end; raises BlockingIOError or ConnectionResetError."""
        if self.broken:
            raise ConnectionResetError(errno.ECONNRESET, "connection reset")
        if not self.data:
            if self.ended:
                return b""
            raise BlockingIOError
        found = bytes(self.data[:limit])
        del self.data[:limit]
        if self.starved:
            self.starved = False
            self.on_writable()
        return found

    def end(self) -> None:
        """No more bytes will come; those inside can still be read."""
        self.ended = True
        self.on_readable()

    def break_(self) -> None:
        """A reset: the bytes inside are lost."""
        self.broken = True
        self.data.clear()
        self.on_readable()
        self.on_writable()


class MemorySocket:
    """The router's end of a connection."""

    def __init__(self, network: MemoryNetwork, incoming: Pipe, outgoing: Pipe) -> None:
        self.network = network
        self.incoming = incoming
        self.outgoing = outgoing
        self.has_unsent = False
        self.connect_error: OSError | None = None
        self.is_connecting = False
        self.is_closed = False
        self.recv: Callable[[int], bytes] = self._recv
        self.send: Callable[[bytes], int] = self._send
        incoming.on_readable = self._note_readable
        outgoing.on_writable = lambda: network.note(self, WRITABLE)

    def finish_connecting(self) -> None:
        if self.is_connecting:
            raise BlockingIOError
        if self.connect_error is not None:
            raise self.connect_error

    def is_quiet(self) -> bool:
        return self.incoming.is_quiet

    def untaken_bytes(self) -> int:
        return len(self.outgoing.data)

    def shutdown_write(self) -> None:
        self.outgoing.end()

    def close(self) -> None:
        self._close(hard=bool(self.incoming.data))

    def reset(self) -> None:
        self._close(hard=True)

    def established(self, error: OSError | None) -> None:
        """The connection attempt has come to its end."""
        self.is_connecting = False
        self.connect_error = error
        self.network.note(self, WRITABLE if error is None else ERROR)

    def _close(self, *, hard: bool) -> None:
        assert not self.is_closed, "a socket is closed once"
        self.is_closed = True
        self.network.open_sockets.discard(self)
        # A kernel answers unread bytes with a reset, and so does this.
        if hard:
            self.outgoing.break_()
        else:
            self.outgoing.end()
        self.incoming.broken = True
        self.incoming.on_writable()

    def readiness(self) -> int:
        """What holds now."""
        pipe = self.incoming
        events = 0 if self.is_quiet() else READABLE
        if pipe.ended or pipe.broken:
            events |= HANGUP
        if pipe.broken or self.connect_error is not None:
            events |= ERROR
        return events | (WRITABLE if self.outgoing.has_room else 0)

    def _note_readable(self) -> None:
        self.network.note(self, self.readiness() & ~WRITABLE)

    def _recv(self, limit: int) -> bytes:
        assert not self.is_closed
        found = self.incoming.take(min(limit, self.network.cut(len(self.incoming.data))))
        if self.incoming.data and len(found) < limit:
            # A short read means a drained socket, so the rest must look as if it came later.
            self._note_readable()
        return found

    def _send(self, data: bytes) -> int:
        assert not self.is_closed
        return self.outgoing.put(data) if data else 0


class MemoryStream(trio.abc.HalfCloseableStream):
    """The other end: a Trio stream for an engine or a client."""

    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self.incoming = incoming
        self.outgoing = outgoing
        #: Of whoever waits to read, and to write.
        self._may_read: trio.Event | None = None
        self._may_write: trio.Event | None = None
        self._is_closed = False
        incoming.on_readable = self._wake_reader
        outgoing.on_writable = self._wake_writer

    def _wake_reader(self) -> None:
        if self._may_read is not None:
            self._may_read.set()
            self._may_read = None

    def _wake_writer(self) -> None:
        if self._may_write is not None:
            self._may_write.set()
            self._may_write = None

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        rest = memoryview(bytes(data))
        while rest:
            try:
                rest = rest[self._checked(self.outgoing).put(bytes(rest[:PIPE_BYTES])) :]
            except BlockingIOError:
                if self._may_write is None:
                    self._may_write = trio.Event()
                await self._may_write.wait()
            except OSError as error:
                raise trio.BrokenResourceError from error

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._is_closed or not self.incoming.is_quiet:
            await trio.lowlevel.checkpoint()  # else there is one in the waiting
        while True:
            pipe = self._checked(self.incoming)
            if pipe.is_quiet:
                if self._may_read is None:
                    self._may_read = trio.Event()
                await self._may_read.wait()
                continue
            try:
                return pipe.take(max_bytes or PIPE_BYTES)
            except OSError as error:
                raise trio.BrokenResourceError from error

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()
        self.outgoing.end()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close without a checkpoint."""
        if not self._is_closed:
            self._end(hard=bool(self.incoming.data))

    def reset(self) -> None:
        """Close so that the other end sees a reset."""
        if not self._is_closed:
            self._end(hard=True)

    def _end(self, *, hard: bool) -> None:
        self._is_closed = True
        if hard:
            self.outgoing.break_()
        else:
            self.outgoing.end()
        self.incoming.broken = True
        self.incoming.on_writable()
        self._wake_reader()
        self._wake_writer()

    def _checked(self, pipe: Pipe) -> Pipe:
        if self._is_closed:
            raise trio.ClosedResourceError
        return pipe


@define(eq=False)
class MemoryListening:
    """A listening socket of the router."""

    network: MemoryNetwork
    address: tuple[str, int]
    waiting: list[MemorySocket] = field(factory=list)

    def accept(self) -> Socket | None:
        return self.waiting.pop(0) if self.waiting else None

    def close(self) -> None:
        del self.network.listening[self.address]
        for sock in self.waiting:  # as a kernel does with those that nobody has accepted
            sock.reset()
        self.waiting.clear()


@define(eq=False)
class MemoryNetwork:
    """Connects the router's sockets with engines and clients in the same process."""

    #: Runs the handlers of engines; must outlive the router.
    nursery: trio.Nursery
    #: None: bytes arrive as they were sent. Else: cut anywhere, by this seed.
    cuts: Random | None = None
    pipe_bytes: int = PIPE_BYTES
    engines: dict[tuple[str, int], Handler] = field(factory=dict)
    #: Engines whose listener may be closed.
    refuses: dict[tuple[str, int], Callable[[], bool]] = field(factory=dict)
    #: Addresses that neither accept nor refuse.
    silent: set[tuple[str, int]] = field(factory=set)
    listening: dict[tuple[str, int], MemoryListening] = field(factory=dict)
    open_sockets: set[MemorySocket] = field(factory=set)
    connects: list[tuple[str, int]] = field(factory=list)
    _owners: dict[Socket | Listening, object] = field(factory=dict)
    _ready: dict[Socket | Listening, int] = field(factory=dict)
    _woken: trio.Event = field(factory=trio.Event)
    is_nested_ready: bool = False

    def cut(self, available: int) -> int:
        """How many of the bytes that are there one recv returns."""
        if self.cuts is None or available < 2:
            return 1 << 30
        return self.cuts.choice((1, 2, 3, self.cuts.randint(1, available), 1 << 30))

    # The seam

    def listen(self, host: str, port: int) -> Listening:
        address = (host, port or 8000)
        if address in self.listening:
            raise OSError(errno.EADDRINUSE, "address in use")
        found = self.listening[address] = MemoryListening(self, address)
        return found

    def connect(self, address: Address, tls: TlsTarget | None) -> Socket:
        assert tls is None, "TLS is tested on real sockets"
        target = address[1][:2]
        self.connects.append(target)
        here, there = Pipe(self.pipe_bytes), Pipe(self.pipe_bytes)
        sock = MemorySocket(self, incoming=there, outgoing=here)
        self.open_sockets.add(sock)
        handler = self.engines.get(target)
        sock.is_connecting = True
        if target in self.silent:
            return sock
        if handler is None or self.refuses.get(target, lambda: False)():
            sock.established(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))
        else:
            sock.established(None)
            self.nursery.start_soon(handler, MemoryStream(incoming=here, outgoing=there))
        return sock

    def stream_of(self, sock: Socket) -> MemoryStream:
        assert isinstance(sock, MemorySocket)
        self.open_sockets.discard(sock)
        return MemoryStream(incoming=sock.incoming, outgoing=sock.outgoing)

    def register(self, sock: Socket | Listening, owner: object) -> None:
        self._owners[sock] = owner
        if isinstance(sock, MemorySocket) and not sock.is_connecting:
            # All that is so already is told anew, as epoll does, whoever has polled meanwhile.
            self.note(sock, sock.readiness())
        elif sock in self._ready:
            self._wake()

    def unregister(self, sock: Socket | Listening) -> None:
        self._owners.pop(sock, None)
        self._ready.pop(sock, None)

    def poll(self, limit: int, seconds: float = 0.0) -> Sequence[tuple[object, int]]:
        found = []
        for sock in list(self._ready)[:limit]:
            events = self._ready.pop(sock)
            if sock in self._owners:
                found.append((self._owners[sock], events))
        if self.cuts is not None:
            self.cuts.shuffle(found)
        return found

    def nest(self, descriptor: int | None) -> bool:
        return False  # there is nothing here to sleep in

    async def wait(self) -> None:
        while not self._ready:
            await self._woken.wait()
        # What others do in the same moment is seen together with it.
        await trio.lowlevel.checkpoint()

    # The tests' side

    def note(self, sock: Socket | Listening, events: int) -> None:
        """Something happened to a socket: an edge."""
        self._ready[sock] = self._ready.get(sock, 0) | events
        self._wake()

    def open_client(self, port: int = 8000, host: str = "127.0.0.1") -> MemoryStream:
        """A new connection to the router; raises ConnectionRefusedError."""
        listening = self.listening.get((host, port))
        if listening is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        here, there = Pipe(self.pipe_bytes), Pipe(self.pipe_bytes)
        sock = MemorySocket(self, incoming=here, outgoing=there)
        self.open_sockets.add(sock)
        listening.waiting.append(sock)
        self.note(listening, READABLE)
        return MemoryStream(incoming=there, outgoing=here)

    def _wake(self) -> None:
        self._woken.set()
        self._woken = trio.Event()
