"""Places for cases of `baton conform` in memory and under virtual time.

Baton is started from the very words that the kit would start its process with, so that a flag
which is not Baton's shows here. Any other router is an object that serves streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import trio
import trio.testing
from attrs import define, field

from router.app import App
from router.cli import build_parser, given_words
from router.config import OPTIONS, load_settings
from router.conform.case import Case
from router.conform.routers import BATON
from router.conform.running import Verdict, try_case
from router.conform.stage import Order, Router
from router.logs import configure
from router.sim import SimEngine
from router.sim.settings import EngineKind
from tests.memory import MemoryNetwork
from tests.simulate import Lines

HOST = "127.0.0.1"
PORT = 8000
FIRST_PORT = 9000
FIRST_KV_PORT = 8900


@define(eq=False)
class Memory:
    """Engines in memory that reach each other, and are reached by URL."""

    nursery: trio.Nursery
    start_router: Callable[[Memory, Order], Router]
    network: MemoryNetwork = field(init=False)
    _engines: dict[str, SimEngine] = field(factory=dict)
    _handovers: dict[tuple[str, int], SimEngine] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.network = MemoryNetwork(self.nursery)

    async def host(self, engine: SimEngine) -> str:
        number = len(self._engines)
        address = (HOST, FIRST_PORT + number)
        self.network.engines[address] = engine.serve_connection
        self.network.refuses[address] = lambda: engine.is_refusing
        engine.dial = self._dial
        if engine.settings.role != "mixed":
            engine.kv_port = FIRST_KV_PORT + number
            self._handovers[HOST, engine.kv_port] = engine
        engine.start()
        url = f"http://{HOST}:{address[1]}"
        self._engines[url] = engine
        return url

    async def _dial(self, host: str, port: int) -> trio.abc.Stream:
        engine = self._handovers[host, port]
        return await self._reach(engine, engine.serve_handover)

    async def connect(self, url: str) -> trio.abc.HalfCloseableStream:
        engine = self._engines[url]
        return await self._reach(engine, engine.serve_connection)

    async def _reach(
        self, engine: SimEngine, serve: Callable[[trio.abc.HalfCloseableStream], Awaitable[None]]
    ) -> trio.abc.HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        if engine.is_refusing:
            raise ConnectionRefusedError
        near, far = trio.testing.memory_stream_pair()
        self.nursery.start_soon(serve, far)
        return near

    async def launch(self, order: Order) -> Router:
        return self.start_router(self, order)


def try_in_memory(
    case: Case,
    start_router: Callable[[Memory, Order], Router],
    engine: EngineKind,
    knobs: dict[str, str],
) -> Verdict:
    """Try a case under virtual time."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Memory]:
        async with trio.open_nursery() as nursery:
            yield Memory(nursery, start_router)
            nursery.cancel_scope.cancel("the case is over")

    clock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(try_case, case, opened, knobs, engine, clock=clock)


#### Baton


@define(eq=False)
class BatonInMemory:
    """Baton, as a case sees it."""

    network: MemoryNetwork
    app: App
    ready_path: str | None = BATON.ready_path
    exited: trio.Event = field(factory=trio.Event)

    async def connect(self) -> trio.abc.Stream:
        return self.network.open_client()

    def terminate(self) -> None:
        self.app.ask_to_stop()

    async def wait_exited(self) -> None:
        await self.exited.wait()

    def last_words(self) -> str:
        return "without a word"

    async def run(self) -> None:
        await self.app.run()
        self.exited.set()


def start_baton(place: Memory, order: Order) -> Router:
    """Baton with the words of its preset."""
    words = BATON.words(order, port=PORT, metrics_port=0, folder="")
    arguments = build_parser("serve").parse_args(words[words.index("serve") :])
    settings = load_settings(given_words(arguments, OPTIONS), {}, None)
    logs = configure(format="json", level="info")
    logs.writer = Lines()
    app = App(settings, place.network, logs)
    app.listen()
    router = BatonInMemory(place.network, app)
    place.nursery.start_soon(router.run)
    return router


#### Any other router


class Server(Protocol):
    """A router that serves one connection after the other."""

    async def serve(self, stream: trio.abc.HalfCloseableStream) -> None: ...


@define(eq=False)
class ServerInMemory:
    """A server as a case sees it; SIGTERM ends it at once, whatever it does."""

    server: Server
    nursery: trio.Nursery
    ready_path: str | None = "/ready"
    _told: trio.Event = field(factory=trio.Event)
    _scopes: list[trio.CancelScope] = field(factory=list)

    async def connect(self) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if self._told.is_set():
            raise ConnectionRefusedError
        near, far = trio.testing.memory_stream_pair()
        self.nursery.start_soon(self._serve, far)
        return near

    async def _serve(self, stream: trio.abc.HalfCloseableStream) -> None:
        scope = trio.CancelScope()
        self._scopes.append(scope)
        with scope, contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with stream:
                await self.server.serve(stream)

    def terminate(self) -> None:
        self._told.set()
        for scope in self._scopes:
            scope.cancel("it has got SIGTERM")

    async def wait_exited(self) -> None:
        await self._told.wait()

    def last_words(self) -> str:
        return "with exit status 7, saying: no room | goodbye"
