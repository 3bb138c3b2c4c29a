"""The seam between the reactor and the world: what a socket and a network must be able to do.

Two worlds implement it: real non-blocking sockets in an edge-triggered epoll (`router.tcp`), with
TLS as a memory BIO inside the seam (`router.tls`), and the tests' in-memory network under virtual
time. Nothing above this file knows which one it runs on. One suite of tests is run over both.
"""

from __future__ import annotations

import select
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol

import trio
from attrs import frozen

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
HANGUP = select.EPOLLHUP | select.EPOLLRDHUP
ERROR = select.EPOLLERR

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

    #: What was given to `nest` is readable, as of the last poll.
    is_nested_ready: bool

    def poll(self, limit: int, seconds: float = 0.0) -> Sequence[tuple[object, int]]:
        """Up to `limit` owners with their new events; waits at most `seconds` for the first."""

    def nest(self, descriptor: int | None) -> bool:
        """Let polls end when this descriptor (an epoll of somebody else's) is readable, too.

        False where that cannot be done; None takes it out again.
        """

    async def wait(self) -> None:
        """Wait until `poll` would return something."""
