"""The other end of a connection, as a client or an engine holds it, in memory or over TCP."""

from __future__ import annotations

import socket
from typing import Protocol

import trio
from attrs import define

_LINGER_ZERO = b"\x01\x00\x00\x00\x00\x00\x00\x00"


class Peer(Protocol):
    """What `tests.memory.MemoryStream` and `TcpPeer` both are."""

    async def send_all(self, data: bytes) -> None: ...
    async def receive_some(self, max_bytes: int | None = None) -> bytes: ...
    async def send_eof(self) -> None: ...
    async def aclose(self) -> None: ...
    def reset(self) -> None: ...


@define(eq=False)
class TcpPeer:
    """A Trio stream over TCP that can be reset."""

    stream: trio.SocketStream

    async def send_all(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self.stream.receive_some(max_bytes))

    async def send_eof(self) -> None:
        await self.stream.send_eof()

    async def aclose(self) -> None:
        await self.stream.aclose()

    def reset(self) -> None:
        """Close so that the other end sees a reset."""
        if self.stream.socket.fileno() >= 0:
            self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            self.stream.socket.close()
