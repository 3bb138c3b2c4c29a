"""Connections beside a run, for what is asked where nothing can go wrong and no order matters.

They have no bounds and no checkpoints but where something has to be waited for: what an engine
says directly is asked for every client of every plan.
"""

from __future__ import annotations

import trio
from attrs import define, field


@define(eq=False)
class Aside(trio.abc.HalfCloseableStream):
    """One end of a connection."""

    peer: Aside | None = None
    _arrived: bytearray = field(factory=bytearray)
    _is_ended: bool = False
    _woken: trio.Event = field(factory=trio.Event)

    @classmethod
    def pair(cls) -> tuple[Aside, Aside]:
        """Both ends."""
        one, other = cls(), cls()
        one.peer, other.peer = other, one
        return one, other

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        assert self.peer is not None
        if self.peer._is_ended:
            raise trio.BrokenResourceError
        self.peer._arrived += data
        self.peer._woken.set()

    async def wait_send_all_might_not_block(self) -> None: ...

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        while not self._arrived and not self._is_ended:
            self._woken = trio.Event()
            await self._woken.wait()
        found = bytes(self._arrived[:max_bytes])
        del self._arrived[:max_bytes]
        return found

    async def send_eof(self) -> None:
        assert self.peer is not None
        self.peer._is_ended = True
        self.peer._woken.set()

    async def aclose(self) -> None:
        await self.send_eof()
