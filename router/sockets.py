"""The seam between the reactor and the world: what a socket and a network must be able to do.

Two worlds implement it: real non-blocking sockets in an edge-triggered epoll (here), with TLS as
a memory BIO inside the seam, and the tests' in-memory network under virtual time. Nothing above
this file knows which one it runs on. One suite of tests is run over both.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket as stdlib_socket
import ssl
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from typing import Protocol

import trio
from attrs import define, frozen

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
HANGUP = select.EPOLLHUP | select.EPOLLRDHUP
ERROR = select.EPOLLERR

_WATCHED = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_LINGER_ZERO = struct.pack("ii", 1, 0)
#: Waiting connections the kernel keeps for us.
_BACKLOG = 4096


#: Where to connect: family and socket address as `getaddrinfo` gives them.
Address = tuple[int, tuple[str, int] | tuple[str, int, int, int]]


@frozen
class TlsTarget:
    """How to speak TLS to a worker: the context, and the name its certificate must carry."""

    context: ssl.SSLContext
    server_name: str


class Socket(Protocol):
    """One connection. `recv` and `send` raise BlockingIOError when they would block."""

    #: Bytes given to `send` that still lie inside (TLS records); flush them by `send(b"")`.
    has_unsent: bool
    recv: Callable[[int], bytes]
    send: Callable[[bytes], int]

    def finish_connecting(self) -> None:
        """Return once usable; raises BlockingIOError to be asked again, OSError on failure."""

    def is_quiet(self) -> bool:
        """True where an idle connection has neither bytes nor an end waiting to be read."""

    def untaken_bytes(self) -> int:
        """Bytes of `send` that the peer has not acknowledged yet."""

    def shutdown_write(self) -> None:
        """Half-close: the peer reads an end, we read on."""

    def close(self) -> None:
        """Close; unsent bytes of the kernel are still delivered."""

    def reset(self) -> None:
        """Close so that the peer sees a reset."""


class Listening(Protocol):
    """A listening socket."""

    address: tuple[str, int]

    def accept(self) -> Socket | None:
        """The next waiting connection, or None."""

    def close(self) -> None:
        """Stop listening."""


class Network(Protocol):
    """Makes sockets and says which are ready."""

    def listen(self, host: str, port: int) -> Listening:
        """Listen; port 0 picks a free one. Raises OSError."""

    def connect(self, address: Address, tls: TlsTarget | None) -> Socket:
        """Begin a connection; raises OSError where it fails at once."""

    def stream_of(self, sock: Socket) -> trio.abc.HalfCloseableStream:
        """A connection that has left the reactor, as a Trio stream that owns it."""

    def register(self, sock: Socket | Listening, owner: object) -> None:
        """Report readiness of `sock` as `owner`, edge-triggered, until `unregister`."""

    def unregister(self, sock: Socket | Listening) -> None:
        """Stop reporting; must come before the socket is closed."""

    def poll(self, limit: int) -> Sequence[tuple[object, int]]:
        """Up to `limit` owners with their new events, without waiting."""

    async def wait(self) -> None:
        """Wait until `poll` would return something."""


class TcpSocket:
    """A real TCP connection."""

    __slots__ = ("_sock", "has_unsent", "recv", "send")

    def __init__(self, sock: stdlib_socket.socket) -> None:
        self._sock = sock
        self.has_unsent = False
        # Bound once: a method of ours in between would cost on every event.
        self.recv: Callable[[int], bytes] = sock.recv
        self.send: Callable[[bytes], int] = sock.send

    def fileno(self) -> int:
        """The descriptor, for epoll."""
        return self._sock.fileno()

    def finish_connecting(self) -> None:
        """Raise what the kernel says of the connection attempt."""
        code = self._sock.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        try:
            self._sock.getpeername()
        except OSError as error:
            if error.errno == errno.ENOTCONN:
                raise BlockingIOError from error
            raise

    def is_quiet(self) -> bool:
        """One peek: anything readable on an idle connection, an end included, makes it unusable."""
        try:
            self._sock.recv(1, stdlib_socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def untaken_bytes(self) -> int:
        """What the kernel still holds; 0 where it does not say."""
        try:
            found = fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        except OSError:
            return 0
        return int.from_bytes(found, sys.byteorder)

    def shutdown_write(self) -> None:
        """Send FIN."""
        try:
            self._sock.shutdown(stdlib_socket.SHUT_WR)
        except OSError:
            pass  # the peer is already gone, which is what we wanted to tell it

    def shutdown_read(self) -> None:
        """Take nothing more; reported as an end by the next poll."""
        try:
            self._sock.shutdown(stdlib_socket.SHUT_RD)
        except OSError:
            pass  # it has ended by itself, which is reported as well

    def close(self) -> None:
        """Send FIN after what the kernel still holds."""
        self._sock.close()

    def reset(self) -> None:
        """Send RST."""
        try:
            self._sock.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_LINGER, _LINGER_ZERO)
        finally:
            self._sock.close()

    def release(self) -> stdlib_socket.socket:
        """Give the socket away, for a Trio stream over it."""
        return self._sock


class TlsSocket:
    """TLS as a client, over a `TcpSocket`, with the same face.

    The records live in two memory BIOs, so that the reactor needs to know nothing of TLS: a
    handshake is an unfinished connect, and ciphertext the kernel did not take is `has_unsent`.
    """

    __slots__ = (
        "_ended",
        "_error",
        "_handshaken",
        "_incoming",
        "_outgoing",
        "_tcp",
        "_tls",
        "_unsent",
        "recv",
        "send",
    )

    def __init__(self, tcp: TcpSocket, context: ssl.SSLContext, server_name: str) -> None:
        self._tcp = tcp
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._unsent = b""
        self._handshaken = False
        #: What stands behind the bytes that were returned: an orderly end, or an error.
        self._ended = False
        self._error: OSError | None = None
        self.recv: Callable[[int], bytes] = self._recv
        self.send: Callable[[bytes], int] = self._send

    @property
    def has_unsent(self) -> bool:
        """Ciphertext waits for the kernel."""
        return bool(self._unsent) or self._outgoing.pending > 0

    @has_unsent.setter
    def has_unsent(self, _value: bool) -> None:
        raise AttributeError("derived")

    def fileno(self) -> int:
        """The descriptor, for epoll."""
        return self._tcp.fileno()

    def finish_connecting(self) -> None:
        """Connect, then shake hands; a certificate that does not fit is an OSError (SSLError)."""
        if self._handshaken:
            return
        self._tcp.finish_connecting()
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._push()
                if not self._pull():
                    raise BlockingIOError from None
        self._handshaken = True
        self._push()

    def is_quiet(self) -> bool:
        """See `TcpSocket.is_quiet`; session tickets have been read by the reactor long before."""
        return self._tls.pending() == 0 and self._tcp.is_quiet()

    def untaken_bytes(self) -> int:
        """Ciphertext, which is as good."""
        return self._tcp.untaken_bytes()

    def shutdown_write(self) -> None:
        """Half-close the transport."""
        self._tcp.shutdown_write()

    def close(self) -> None:
        """Close the transport; workers do not miss a close_notify from a client."""
        self._tcp.close()

    def reset(self) -> None:
        """Reset the transport."""
        self._tcp.reset()

    def _recv(self, limit: int) -> bytes:
        pieces: list[bytes] = []
        size = 0
        try:
            while size < limit and not self._ended and self._error is None:
                piece = self._read(limit - size)
                if piece is None:
                    break
                self._ended = not piece
                pieces.append(piece)
                size += len(piece)
            self._push()
        except OSError as error:
            self._error = error  # also an end without close_notify, perhaps a truncation
        if size:
            if self._ended or self._error is not None:
                # What comes behind these bytes must be read, too, and may bring no edge by itself.
                self._tcp.shutdown_read()
            return b"".join(pieces)
        if self._error is not None:
            raise self._error
        if self._ended:
            return b""
        raise BlockingIOError

    def _read(self, limit: int) -> bytes | None:
        """Plaintext, b"" at an orderly end, or None where more ciphertext must come first.

        Ciphertext is taken from the kernel only when it is needed, so that little is kept here.
        """
        while True:
            try:
                return self._tls.read(limit)
            except ssl.SSLWantReadError:
                if not self._pull():
                    return None

    def _send(self, data: bytes) -> int:
        self._push()
        if self._unsent:
            raise BlockingIOError
        if data:
            self._tls.write(data)
            self._push()
        return len(data)

    def _pull(self) -> bool:
        """Take ciphertext, or its end, from the kernel; whether there was any."""
        try:
            data = self._tcp.recv(65536)
        except BlockingIOError:
            return False
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        return True

    def _push(self) -> None:
        while self.has_unsent:
            data = self._unsent or self._outgoing.read()
            try:
                sent = self._tcp.send(data)
            except BlockingIOError:
                self._unsent = data
                return
            self._unsent = data[sent:]


@define(eq=False)
class TcpListening:
    """A real listening socket."""

    _sock: stdlib_socket.socket
    address: tuple[str, int]

    def fileno(self) -> int:
        """The descriptor, for epoll."""
        return self._sock.fileno()

    def accept(self) -> Socket | None:
        """The next waiting connection; one that was reset meanwhile is skipped."""
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return None
            except ConnectionAbortedError:
                continue
            sock.setblocking(False)
            sock.setsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_NODELAY, 1)
            return TcpSocket(sock)

    def close(self) -> None:
        """Stop listening."""
        self._sock.close()


class TcpNetwork:
    """Real sockets in a private epoll that one Trio task waits for."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._owners: dict[int, object] = {}

    def listen(self, host: str, port: int) -> Listening:
        """Listen on TCP; raises OSError with the address in it."""
        family = stdlib_socket.AF_INET6 if ":" in host else stdlib_socket.AF_INET
        sock = stdlib_socket.socket(family, stdlib_socket.SOCK_STREAM)
        try:
            sock.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return TcpListening(sock, sock.getsockname()[:2])

    def connect(self, address: Address, tls: TlsTarget | None) -> Socket:
        """Begin a TCP connection, and TLS over it where asked."""
        family, sockaddr = address
        sock = stdlib_socket.socket(family, stdlib_socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_NODELAY, 1)
            code = sock.connect_ex(sockaddr)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except BaseException:
            sock.close()
            raise
        tcp = TcpSocket(sock)
        return tcp if tls is None else TlsSocket(tcp, tls.context, tls.server_name)

    def stream_of(self, sock: Socket) -> trio.abc.HalfCloseableStream:
        """The connection as a `trio.SocketStream`."""
        assert isinstance(sock, TcpSocket)
        return trio.SocketStream(trio.socket.from_stdlib_socket(sock.release()))

    def register(self, sock: Socket | Listening, owner: object) -> None:
        """Watch everything, once."""
        number = _fileno(sock)
        self._owners[number] = owner
        self._epoll.register(number, _WATCHED)

    def unregister(self, sock: Socket | Listening) -> None:
        """Forget the descriptor before its number can be given to another socket."""
        number = _fileno(sock)
        if self._owners.pop(number, None) is not None:
            self._epoll.unregister(number)

    def poll(self, limit: int) -> Sequence[tuple[object, int]]:
        """Resolve descriptors to owners at once, so that none of this batch can be mistaken."""
        owners = self._owners
        return [
            (owners[number], events)
            for number, events in self._epoll.poll(0, limit)
            if number in owners
        ]

    async def wait(self) -> None:
        """Wait on the epoll descriptor itself."""
        await trio.lowlevel.wait_readable(self._epoll.fileno())

    def close(self) -> None:
        """Close the epoll; sockets belong to their channels."""
        self._epoll.close()


def _fileno(sock: Socket | Listening) -> int:
    assert isinstance(sock, TcpSocket | TlsSocket | TcpListening)
    return sock.fileno()
