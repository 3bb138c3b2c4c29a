"""Routers and agents as they are, over one broker in memory, under virtual time.

Nothing is replaced but sockets, the broker and the engines: entries are written by agents of ours
and read by routers of ours. Each process has a network of its own, as it has a reactor.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import h11
import msgspec
import trio
import trio.testing
from attrs import define, field

from router.agent.app import Agent
from router.agent.settings import AgentSettings
from router.app import App
from router.config import Settings
from router.logs import configure
from router.sim.engine import SimEngine
from router.sim.settings import SimSettings
from router.worker import Worker
from tests.memory import MemoryNetwork, MemoryStream
from tests.memory_broker import MemoryBroker, MemoryServer
from tests.neighbours import Neighbours
from tests.residents import Resident
from tests.simulate import Lines

HOST, PORT = "127.0.0.1", 8000
#: Until an agent has found its engine and routers have found the agent.
WARM_UP_SECONDS = 2.0
#: Virtual seconds after which a story hangs.
GIVE_UP_SECONDS = 20_000
READ_BYTES = 65536


@define
class Answer:
    """What a client got."""

    status: int = 0
    body: bytes = b""
    #: The body ended as it should.
    is_whole: bool = False
    ended_at: float = 0.0

    @property
    def json(self) -> dict[str, object]:
        found: dict[str, object] = msgspec.json.decode(self.body)
        return found

    @property
    def text(self) -> str:
        """The generated text of a stream of completions."""
        found = ""
        for line in self.body.split(b"\n\n"):
            if line.startswith(b'data: {"id"'):
                found += "".join(each["text"] for each in json.loads(line[6:])["choices"])
        return found


@define(eq=False)
class Routed:
    """One router."""

    app: App
    network: MemoryNetwork
    broker: MemoryBroker | None
    log: Lines
    scope: trio.CancelScope = field(factory=trio.CancelScope)

    def worker(self, id: str) -> Worker | None:
        return {each.id: each for each in self.app.fleet.all()}.get(id)

    def states(self) -> dict[str, str]:
        return {each.id: each.state.value for each in self.app.fleet.all()}

    async def get(self, target: str) -> Answer:
        return await self.ask("GET", target)

    async def post(self, target: str, **body: object) -> Answer:
        return await self.ask("POST", target, json.dumps(body).encode())

    async def complete(self, tokens: int = 5, *, stream: bool = True) -> Answer:
        """A completion; the engines say the same of one prompt, whoever is asked."""
        body: dict[str, object] = {"model": "tiny", "prompt": "once upon", "max_tokens": tokens}
        return await self.post("/v1/completions", **body, stream=stream)

    async def ask(self, method: str, target: str, body: bytes = b"") -> Answer:
        stream = self.network.open_client()
        try:
            return await _ask(stream, method, target, body)
        finally:
            stream.close()


async def _ask(stream: MemoryStream, method: str, target: str, body: bytes) -> Answer:
    connection, answer = h11.Connection(h11.CLIENT), Answer()
    headers = [("host", "baton"), ("content-length", str(len(body))), ("connection", "close")]
    head = connection.send(h11.Request(method=method, target=target, headers=headers))
    data = connection.send(h11.Data(data=body)) if body else b""
    connection.send(h11.EndOfMessage())
    await stream.send_all((head or b"") + (data or b""))
    try:
        while not answer.is_whole:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(bytes(await stream.receive_some(READ_BYTES)))
            elif isinstance(event, h11.Response):
                answer.status = event.status_code
            elif isinstance(event, h11.Data):
                answer.body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                answer.is_whole = True
    except (h11.RemoteProtocolError, trio.BrokenResourceError):
        pass
    answer.ended_at = trio.current_time()
    return answer


@define(eq=False)
class Companion(Resident):
    """One agent and its engine."""

    engine: SimEngine = field(kw_only=True)


@define(eq=False)
class Cluster:
    """Everything a story can reach."""

    nursery: trio.Nursery
    server: MemoryServer = field(factory=MemoryServer)
    routers: list[Routed] = field(factory=list)
    agents: dict[str, Companion] = field(factory=dict)
    neighbours: Neighbours = field(init=False)
    _ports: int = 9000

    def __attrs_post_init__(self) -> None:
        self.neighbours = Neighbours(self.nursery)

    def start_engine(self, name: str, **settings: object) -> SimEngine:
        """An engine that nobody is connected to yet."""
        values: dict[str, object] = {"name": name, "token_seconds": 0.1}
        return self.neighbours.start(SimSettings(**(values | settings)))  # type: ignore[arg-type]

    def add_router(self, *, has_nats: bool = True, **settings: object) -> Routed:
        network, log = MemoryNetwork(self.nursery), Lines()
        logs = configure(format="json", level="info")
        logs.writer = log
        broker = self.server.broker() if has_nats else None
        values: dict[str, object] = {"host": HOST, "port": PORT}
        if has_nats:
            values["nats"] = "nats://memory"
        made = Settings(**(values | settings))  # type: ignore[arg-type]  # a story is plain text
        app = App(made, network, logs, broker)
        routed = Routed(app, network, broker, log)
        self.routers.append(routed)
        app.listen()
        self.nursery.start_soon(self._run_router, routed)
        return routed

    async def _run_router(self, routed: Routed) -> None:
        with routed.scope:
            await routed.app.run()

    def reach(self, routed: Routed, engine: SimEngine) -> str:
        """The URL of an engine that a router reaches over HTTP."""
        self._ports += 1
        _connect(routed.network, engine, self._ports)
        return f"http://{HOST}:{self._ports}"

    def add_agent(self, id: str, *, agent: dict[str, object], **settings: object) -> Companion:
        """An engine of these settings, and an agent of those beside it."""
        engine = self.start_engine(id, **settings)
        network, broker = MemoryNetwork(self.nursery), self.server.broker()
        _connect(network, engine, PORT)
        logs = configure(format="json", level="info")
        logs.writer = Lines()
        values: dict[str, object] = {"engine_url": f"http://{HOST}:{PORT}", "nats": "nats://memory"}
        values |= {"id": id, **agent}
        made = AgentSettings(**values)  # type: ignore[arg-type]  # a story is plain text
        beside = Agent(made, network, logs, broker)
        companion = self.agents[id] = Companion(network, broker, beside, engine=engine)
        self.nursery.start_soon(companion.run)
        return companion


def _connect(network: MemoryNetwork, engine: SimEngine, port: int) -> None:
    network.engines[HOST, port] = engine.serve_connection
    network.refuses[HOST, port] = lambda: engine.is_refusing


def run(story: Callable[[Cluster], Awaitable[None]]) -> Cluster:
    """Run a story to its end; no bug of ours may have been met in it."""
    clusters: list[Cluster] = []

    async def live() -> None:
        with trio.fail_after(GIVE_UP_SECONDS):
            async with trio.open_nursery() as nursery:
                cluster = Cluster(nursery)
                clusters.append(cluster)
                await story(cluster)
                for routed in cluster.routers:
                    routed.app.ask_to_stop()
                    routed.app.ask_to_stop()
                await trio.sleep(10.0)
                nursery.cancel_scope.cancel(reason="the story is over")

    trio.run(live, clock=trio.testing.MockClock(autojump_threshold=0), strict_exception_groups=True)
    (cluster,) = clusters
    for routed in cluster.routers:
        assert routed.broker is None or not routed.broker.errors
        assert not any(b"internal_error" in line for line in routed.log.lines), routed.log.lines
        assert not routed.network.open_sockets
    return cluster
