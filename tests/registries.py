"""Routers that follow one registry, and agents that write it, under virtual time.

Only the registry is real: the broker is in memory, nobody probes, and an agent is an entry and
who renews it. What a story does to the broker it does to `Registered.server`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
import trio.testing
from attrs import define, evolve, field

from router.config import Settings
from router.registry import Registry
from router.wires.nats import entries
from router.wires.nats.broker import BrokerAway, BrokerError
from router.wires.nats.entries import RENEW_SECONDS, TTL_SECONDS, Entry
from router.worker import Fleet, Worker
from tests.memory_broker import MemoryBroker, MemoryServer

BUCKET = "infera_workers"
#: A change that can be told is told by then.
SOON = 0.5


@define(eq=False)
class Router:
    """A fleet that follows the registry."""

    broker: MemoryBroker
    fleet: Fleet = field(factory=lambda: Fleet(Settings()))
    bugs: list[Exception] = field(factory=list)
    #: Who left, and when.
    left: list[tuple[float, str]] = field(factory=list)
    joined: list[tuple[float, str]] = field(factory=list)
    #: Who left without deregistering.
    expired: list[str] = field(factory=list)
    losses: int = 0
    registry: Registry = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.fleet.on_left.append(lambda each: self.left.append((trio.current_time(), each.id)))
        self.fleet.on_joined.append(lambda each: self.joined.append((trio.current_time(), each.id)))
        self.registry = Registry(
            broker=self.broker,
            bucket=BUCKET,
            fleet=self.fleet,
            engine="auto",
            on_bug=self.bugs.append,
            on_lost=self._count_loss,
            on_expired=self.expired.append,
        )

    def _count_loss(self) -> None:
        self.losses += 1

    def worker(self, id: str) -> Worker | None:
        return {each.id: each for each in self.fleet.all()}.get(id)

    def shown(self) -> dict[str, tuple[object, ...]]:
        """What the router takes its workers for."""
        return {
            each.id: (
                each.state,
                each.role,
                each.engine,
                each.models,
                each.context_length,
                each.group,
                each.bootstrap_host,
                each.bootstrap_port,
                each.elsewhere,
            )
            for each in self.fleet.all()
        }


@define(eq=False)
class Agent:
    """Writes one entry, and renews it until it ends."""

    broker: MemoryBroker
    entry: Entry
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    _changed: trio.Event = field(factory=trio.Event)

    async def run(self) -> None:
        bucket = self.broker.bucket(BUCKET, ttl_seconds=TTL_SECONDS)
        with self.scope:
            while True:
                self._changed = trio.Event()
                try:
                    await bucket.put(self.entry.key, entries.encode(self.entry))
                except (BrokerAway, BrokerError):
                    pass
                with trio.move_on_after(RENEW_SECONDS):
                    await self._changed.wait()

    def become(self, entry: Entry) -> None:
        """Write another entry at once."""
        self.entry = entry
        self._changed.set()

    def crash(self) -> None:
        self.scope.cancel(reason="it crashed")

    async def leave(self) -> None:
        """Deregister, if the broker can be told."""
        self.crash()
        try:
            await self.broker.bucket(BUCKET, ttl_seconds=TTL_SECONDS).delete(self.entry.key)
        except (BrokerAway, BrokerError):
            pass


@define(eq=False)
class Registered:
    """Everything there is in a story."""

    nursery: trio.Nursery
    server: MemoryServer = field(factory=MemoryServer)
    routers: list[Router] = field(factory=list)
    agents: dict[str, Agent] = field(factory=dict)

    def add_router(self, *, is_connected: bool = True) -> Router:
        router = Router(self.server.broker(is_connected=is_connected))
        self.routers.append(router)
        self.nursery.start_soon(router.registry.run)
        return router

    def add_agent(self, entry: Entry) -> Agent:
        agent = self.agents[entry.id] = Agent(self.server.broker(), entry)
        self.nursery.start_soon(agent.run)
        return agent

    def change(self, id: str, **changes: object) -> None:
        agent = self.agents[id]
        agent.become(evolve(agent.entry, **changes))  # type: ignore[arg-type]  # one story's word


def tell(story: Callable[[Registered], Awaitable[None]]) -> Registered:
    """Run a story to its end; nothing in it may have raised."""
    told: list[Registered] = []

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            world = Registered(nursery)
            told.append(world)
            await story(world)
            nursery.cancel_scope.cancel(reason="the story is over")

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
    for router in told[0].routers:
        assert not router.bugs
        assert not router.broker.errors
    return told[0]
