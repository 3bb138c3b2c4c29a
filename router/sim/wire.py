"""One HTTP/1.1 connection of the simulated engine, on any Trio stream.

Requests are read with h11, one parser a request. Answers are written as raw bytes, because an
engine that is to send a bad status line or half a chunk cannot use a library that refuses to.
All waiting goes through Trio's clock. Whoever uses a `Wire` closes it with `cut`.
"""

import gzip
import socket
from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Literal, Protocol, runtime_checkable

import h11
import trio
from attrs import define, field

RECEIVE_BYTES = 65536
PIPELINED_BYTES_MAX = 1 << 20

Framing = Literal["chunked", "sized", "until_close"]
Stream = trio.abc.HalfCloseableStream


@runtime_checkable
class Abrupt(Protocol):
    """A stream that can end at once, also as with a TCP reset."""

    def reset(self) -> None: ...
    def close(self) -> None: ...


@define
class Received:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    reused: bool
    keeps_alive: bool
    body: bytes = b""


class ClientGone(Exception):
    """The client closed the connection, or it broke."""


@define(eq=False)
class Wire:
    """Reads requests and writes answers."""

    stream: Stream
    served: int = field(default=0, init=False)
    is_open: bool = field(default=True, init=False)
    client_is_gone: bool = field(default=False, init=False)
    _unread: bytes = field(default=b"", init=False)
    piece_bytes: int = field(default=0, init=False)
    """If not 0, what is sent is cut into pieces of this size."""
    piece_seconds: float = field(default=0.0, init=False)
    framing: Framing = field(default="chunked", init=False)

    async def read_head(self, parser: h11.Connection, idle_seconds: float) -> h11.Request | None:
        """The next request's head, or None if there will be none.

        Raises h11.RemoteProtocolError for what is no HTTP.
        """
        if self._unread:
            parser.receive_data(self._unread)
            self._unread = b""
        if not self.served:
            return await self._read_head(parser)
        with trio.move_on_after(idle_seconds):
            return await self._read_head(parser)
        return None

    async def _read_head(self, parser: h11.Connection) -> h11.Request | None:
        event = await self._next_event(parser)
        return event if isinstance(event, h11.Request) else None

    async def read_body(self, parser: h11.Connection, bytes_per_second: int = 0) -> bytes:
        """The rest of the request; what follows it is kept for the next one."""
        if parser.they_are_waiting_for_100_continue:
            await self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            parser.send(h11.InformationalResponse(status_code=100, headers=[]))
        parts = []
        while True:
            event = await self._next_event(parser, bytes_per_second)
            if isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                if bytes_per_second:
                    await trio.sleep(len(event.data) / bytes_per_second)
            elif isinstance(event, h11.EndOfMessage):
                self._unread = parser.trailing_data[0]
                return b"".join(parts)
            else:
                raise ClientGone

    async def _next_event(
        self, parser: h11.Connection, bytes_per_second: int = 0
    ) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = parser.next_event()
            # By class: the type checker does not see that `is not NEED_DATA` excludes it.
            if isinstance(event, h11.Event) or event is h11.PAUSED:
                return event
            # A slow reader takes little at a time, so that the kernel's buffers fill up.
            amount = max(bytes_per_second // 10, 1) if bytes_per_second else RECEIVE_BYTES
            parser.receive_data(await self._receive_some(amount))

    async def _receive_some(self, amount: int) -> bytes:
        try:
            return bytes(await self.stream.receive_some(amount))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    async def wait_closed(self) -> None:
        """Return when the client closes its side; what else it sends is kept, up to a bound."""
        while len(self._unread) < PIPELINED_BYTES_MAX:
            data = await self._receive_some(RECEIVE_BYTES)
            if not data:
                # After a cut of our own it is not the client who left.
                self.client_is_gone = self.is_open
                return
            self._unread += data
        await trio.sleep_forever()

    async def send(self, data: bytes) -> None:
        """Raw bytes; raises ClientGone if nobody is there."""
        try:
            if not self.piece_bytes:
                await self.stream.send_all(data)
                return
            for start in range(0, len(data), self.piece_bytes):
                await self.stream.send_all(data[start : start + self.piece_bytes])
                await trio.sleep(self.piece_seconds)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.client_is_gone = self.is_open
            raise ClientGone from error

    async def send_head(self, head: bytes, framing: Framing) -> None:
        self.framing = framing
        await self.send(head)

    async def send_body(self, data: bytes) -> None:
        """A part of the body, as one chunk if the answer is chunked."""
        await self.send(chunk(data) if self.framing == "chunked" else data)

    async def end_body(self, garbage: bytes = b"") -> None:
        """The end of a body that ended well, and what should not come after it."""
        end = b"0\r\n\r\n" if self.framing == "chunked" else b""
        if end or garbage:
            await self.send(end + garbage)

    async def cut(self, *, reset: bool = False) -> None:
        """Close both directions now; twice is harmless."""
        if not self.is_open:
            return
        self.is_open = False
        if isinstance(self.stream, Abrupt):
            self.stream.reset() if reset else self.stream.close()
            return
        if reset and isinstance(self.stream, trio.SocketStream):
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        await trio.aclose_forcefully(self.stream)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def head(status: int, headers: Iterable[tuple[str, str]], unix_time: float) -> bytes:
    """A response head in uvicorn's order: date first."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    lines = [f"HTTP/1.1 {status} {phrase}", f"date: {formatdate(unix_time, usegmt=True)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def received(request: h11.Request, *, reused: bool) -> Received:
    """The request of this head, its body yet to come."""
    headers = {name.decode().lower(): value.decode("latin-1") for name, value in request.headers}
    closes = "close" in headers.get("connection", "").lower() or request.http_version == b"1.0"
    return Received(
        request.method.decode(),
        request.target.decode().partition("?")[0],
        headers,
        reused,
        not closes,
    )


def compress(data: bytes) -> bytes:
    """gzip without a time in it, so that runs are equal."""
    return gzip.compress(data, mtime=0)
