"""Two worlds that a test of brokers can run in: one in memory, and a real server behind bridges.

`in_both_worlds` makes of one story two tests. In memory time is virtual; before a real server it is
real, and nothing waits for longer than what it waits for takes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Protocol

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock

from router.wires.nats.bridge import Bridge
from router.wires.nats.broker import Broker, Change, Job, Message
from tests.memory_broker import MemoryBroker, MemoryServer
from tests.nats_server import NatsServer

PATIENCE_SECONDS = 8.0
_NAMES = count()


class World(Protocol):
    """One server, and connections to it."""

    async def broker(self) -> Broker:
        """A connection, made."""

    async def down(self) -> None:
        """The server is gone, with what it had in memory, and every connection knows."""

    async def up(self) -> None:
        """It is back, and so is every connection."""

    def failures(self) -> int:
        """Callbacks that raised."""


@define(eq=False)
class MemoryWorld:
    """In memory."""

    server: MemoryServer = field(factory=MemoryServer)
    brokers: list[MemoryBroker] = field(factory=list)

    async def broker(self) -> Broker:
        self.brokers.append(self.server.broker())
        return self.brokers[-1]

    async def down(self) -> None:
        self.server.down(forgets=True)

    async def up(self) -> None:
        self.server.up()

    def failures(self) -> int:
        return sum(len(each.errors) for each in self.brokers)


@define(eq=False)
class RealWorld:
    """A real server, and bridges that run in this nursery."""

    server: NatsServer
    nursery: trio.Nursery
    bridges: list[Bridge] = field(factory=list)

    async def broker(self) -> Broker:
        bridge = Bridge(self.server.url)
        self.bridges.append(bridge)
        await self.nursery.start(bridge.run)
        await connected(bridge)
        return bridge

    async def down(self) -> None:
        self.server.kill()
        for each in self.bridges:
            await connected(each, False)

    async def up(self) -> None:
        self.server.start()
        for each in self.bridges:
            await connected(each)

    def failures(self) -> int:
        return sum(each.crossing.callbacks_failed for each in self.bridges)


async def connected(broker: Broker, wanted: bool = True) -> None:
    """Wait until the connection is there, or gone."""
    changed = trio.Event()
    broker.on_state.append(lambda _: changed.set())
    with trio.fail_after(PATIENCE_SECONDS):
        while broker.is_connected is not wanted:
            await changed.wait()
            changed = trio.Event()


def in_both_worlds(story: Callable[[World], Awaitable[None]]) -> Callable[[str, NatsServer], None]:
    """Two tests of one story, which needs the fixture `nats` for one of them."""

    @pytest.mark.parametrize("kind", ["memory", "real"])
    def test(kind: str, nats: NatsServer) -> None:
        if kind == "memory":
            trio.run(_in_memory, story, clock=MockClock(autojump_threshold=0))
        else:
            trio.run(_before_a_server, story, nats)

    test.__doc__ = story.__doc__
    return test


async def _in_memory(story: Callable[[World], Awaitable[None]]) -> None:
    await story(MemoryWorld())


async def _before_a_server(story: Callable[[World], Awaitable[None]], server: NatsServer) -> None:
    async with trio.open_nursery() as nursery:
        await story(RealWorld(server, nursery))
        nursery.cancel_scope.cancel("the story is over")


def name(stem: str = "t") -> str:
    """A subject, bucket or stream that no other test uses."""
    return f"{stem}{next(_NAMES)}"


@define(eq=False)
class Told:
    """What a subscription, a watch or a consumer was told."""

    messages: list[Message] = field(factory=list)
    changes: list[Change] = field(factory=list)
    jobs: list[Job] = field(factory=list)
    lost: list[str] = field(factory=list)
    _changed: trio.Event = field(factory=trio.Event)

    def on_messages(self, messages: Sequence[Message]) -> None:
        self.messages += messages
        self._changed.set()

    def on_changes(self, changes: Sequence[Change]) -> None:
        self.changes += changes
        self._changed.set()

    def on_jobs(self, jobs: Sequence[Job]) -> None:
        self.jobs += jobs
        self._changed.set()

    def on_lost(self, why: str) -> None:
        self.lost.append(why)
        self._changed.set()

    async def until(self, is_enough: Callable[[], bool]) -> None:
        """Wait until what was told is enough."""
        with trio.fail_after(PATIENCE_SECONDS):
            while not is_enough():
                self._changed = trio.Event()
                await self._changed.wait()

    async def count(self, messages: int) -> None:
        """Wait for so many messages."""
        await self.until(lambda: len(self.messages) >= messages)

    @property
    def payloads(self) -> list[bytes]:
        return [each.payload for each in self.messages]

    @property
    def work(self) -> list[bytes]:
        return [each.message.payload for each in self.jobs]
