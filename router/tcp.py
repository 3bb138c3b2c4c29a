"""Real sockets: non-blocking TCP, watched edge-triggered by a private epoll.

What each of these promises is said by the protocols of `router.sockets`; here stands how the kernel
keeps the promise.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket as stdlib_socket
import struct
import sys
import termios
from collections.abc import Callable, Sequence

import trio
from attrs import define

from router.sockets import Address, Listening, Socket, TlsTarget
from router.tls import TlsSocket

_WATCHED = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_LINGER_ZERO = struct.pack("ii", 1, 0)
#: Waiting connections the kernel keeps for us.
_BACKLOG = 4096


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
        self._nested: int | None = None
        self.is_nested_ready = False

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

    def poll(self, limit: int, seconds: float = 0.0) -> Sequence[tuple[object, int]]:
        """Resolve descriptors to owners at once, so that none of this batch can be mistaken."""
        owners = self._owners
        found = self._epoll.poll(seconds, limit)
        if len(found) == 1:
            number, events = found[0]
            owner = owners.get(number)
            self.is_nested_ready = owner is None
            return () if owner is None else ((owner, events),)
        ready = [(owners[number], events) for number, events in found if number in owners]
        # The nested one has no owner, and is the only one without.
        self.is_nested_ready = len(ready) != len(found)
        return ready

    def nest(self, descriptor: int | None) -> bool:
        """Watch another epoll, level-triggered: it is asked anew in every poll."""
        if self._nested is not None:
            self._epoll.unregister(self._nested)
        self._nested = descriptor
        if descriptor is not None:
            self._epoll.register(descriptor, select.EPOLLIN)
        return True

    async def wait(self) -> None:
        """Wait on the epoll descriptor itself."""
        await trio.lowlevel.wait_readable(self._epoll.fileno())

    def close(self) -> None:
        """Close the epoll; sockets belong to their channels."""
        self._epoll.close()


def _fileno(sock: Socket | Listening) -> int:
    assert isinstance(sock, TcpSocket | TlsSocket | TcpListening)
    return sock.fileno()
