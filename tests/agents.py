"""`play(story)`: one agent under virtual time, between a broker and an engine in memory.

A story gets a `Stage` and does things to it; when it is over the agent is stopped, and the run is
held to what holds for every agent: frames are numbered without a gap, there is one last frame and
nothing after it, what the frames carry is what the engine has said from its beginning, no socket,
subscription, entry or generation is left, and no bug of ours was met.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count

import msgspec
import trio
import trio.testing
from attrs import define, field

from router.agent.app import Agent
from router.agent.draining import ask_to_drain
from router.agent.proxied import Proxied
from router.agent.settings import AgentSettings
from router.logs import configure
from router.sim.engine import SimEngine
from router.sim.settings import SimSettings
from router.wires.nats.broker import Message
from router.wires.nats.protocol import Names, token_of
from statemachines.chart import Edge
from tests.memory import MemoryNetwork
from tests.memory_broker import MemoryBroker, MemoryServer
from tests.simulate import Lines

HOST, PORT = "127.0.0.1", 9000
ID = "w1"
NAMES = Names()
KEY = token_of(ID)
#: Virtual seconds after which a story hangs.
GIVE_UP_SECONDS = 20_000
#: In which an agent finds its engine, before a story begins.
WARM_UP_SECONDS = 1.0
ASK_ALL = "head,heartbeat"
NOTICE = b"infera: worker draining"
TERMINAL = ("done", "error")

Story = Callable[["Stage"], Awaitable[None]]

#: Every edge of the handback chart that any story of this process has taken.
TAKEN: set[Edge] = set()


@define
class Frame:
    """One frame as a router gets it."""

    kind: str
    payload: bytes
    headers: Mapping[str, str]
    at: float

    @property
    def seq(self) -> int:
        return int(self.headers["rs-seq"])

    @property
    def status(self) -> int | None:
        text = self.headers.get("rs-status")
        return None if text is None else int(text)


@define(eq=False)
class Asked:
    """One request and what came back of it."""

    inbox: str
    body: bytes
    #: The broker said that nobody is there.
    is_absent: bool = False
    #: It reads the numbers of frames.
    understands: bool = True
    frames: list[Frame] = field(factory=list)
    #: When a heartbeat came that takes no number.
    beats: list[float] = field(factory=list)
    changed: trio.Event = field(factory=trio.Event)
    #: Nobody listens at its inbox any more, and nobody says so.
    vanish: Callable[[], None] = lambda: None

    @property
    def kinds(self) -> list[str]:
        """The kinds of its frames, with repetitions of data as one."""
        kinds = [each.kind for each in self.frames]
        return [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]

    @property
    def data(self) -> bytes:
        return b"".join(each.payload for each in self.frames if each.kind == "data")

    @property
    def last(self) -> Frame | None:
        """Its last frame, once it is there."""
        if self.frames and self.frames[-1].kind in TERMINAL:
            return self.frames[-1]
        return None

    @property
    def is_handed_back(self) -> bool:
        return self.last is not None and self.last.payload.startswith(NOTICE)

    @property
    def ending(self) -> str:
        """How it ended: done, notice, error, or nothing."""
        if self.last is None:
            return "nothing"
        return "notice" if self.is_handed_back else self.last.kind

    @property
    def text(self) -> str:
        """What the engine has said, out of all complete events."""
        found = ""
        for event in self.data.split(b"\n\n")[:-1]:
            payload = event.removeprefix(b"data: ")
            if payload.startswith(b"{") and (choices := json.loads(payload).get("choices")):
                found += choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
        return found

    async def wait(self, condition: Callable[[Asked], object], seconds: float = 1000.0) -> None:
        """Until it holds; raises TooSlowError."""
        with trio.fail_after(seconds):
            while not condition(self):
                self.changed = trio.Event()
                await self.changed.wait()

    async def wait_over(self, seconds: float = 1000.0) -> None:
        await self.wait(lambda asked: asked.last, seconds)

    async def wait_frames(self, number: int) -> None:
        await self.wait(lambda asked: len(asked.frames) >= number)


@define(eq=False)
class Stage:
    """Everything a story can reach."""

    network: MemoryNetwork
    server: MemoryServer
    #: The agent's connection, and the router's.
    broker: MemoryBroker
    router: MemoryBroker
    engine: SimEngine
    agent: Agent
    log: Lines
    nursery: trio.Nursery
    asked: dict[str, Asked] = field(factory=dict)
    ended: trio.Event = field(factory=trio.Event)
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    began_at: float = 0.0
    ended_at: float = 0.0
    edges: list[Edge] = field(factory=list)
    has_memory: bool = False
    _numbers: count[int] = field(factory=lambda: count(1))

    # The router's side

    def ask(
        self,
        tokens: int = 8,
        *,
        stream: bool = True,
        migratable: bool | None = True,
        accept: str = ASK_ALL,
        path: str = "/v1/completions",
        fault: str = "",
        prompt: str = "once upon a time",
        inbox: str | None = None,
        headers: Mapping[str, str] | None = None,
        payload: bytes | None = None,
    ) -> Asked:
        """Send a request by its subject."""
        made = self._make(tokens, stream, migratable, path, fault, prompt, headers, payload)
        asked = self.expect(inbox or f"_INBOX.router.{next(self._numbers)}", made)
        fields = {"rs-accept": accept} if accept else {}
        asked.understands = bool(accept)
        self.router.publish(NAMES.request(ID), made, reply=asked.inbox, headers=fields)
        return asked

    async def store(
        self,
        tokens: int = 8,
        *,
        migratable: bool | None = True,
        accept: str = ASK_ALL,
        inbox: str | None = None,
        payload: bytes | None = None,
    ) -> Asked:
        """Send a request through the work queue."""
        made = self._make(
            *(tokens, True, migratable, "/v1/completions", "", "once upon a time", None, payload)
        )
        asked = self.expect(inbox or f"_INBOX.router.{next(self._numbers)}", made)
        fields = {"rs-inbox": asked.inbox} | ({"rs-accept": accept} if accept else {})
        queue = self.router.work_queue(NAMES.stream, [NAMES.requests], max_messages=1_000_000)
        await queue.publish(NAMES.request(ID), made, headers=fields)
        return asked

    def expect(self, inbox: str, body: bytes = b"") -> Asked:
        """Listen at an inbox."""
        if inbox in self.asked:
            return self.asked[inbox]
        asked = self.asked[inbox] = Asked(inbox, body)

        def take(messages: Sequence[Message]) -> None:
            for message in messages:
                if message.is_no_responders:
                    asked.is_absent = True
                    continue
                kind = message.headers.get("rs-type", "data")
                if kind == "still":
                    asked.beats.append(trio.current_time() - self.began_at)
                    continue
                if message.headers["rs-seq"] in [each.headers["rs-seq"] for each in asked.frames]:
                    continue  # it came twice
                now = trio.current_time() - self.began_at
                asked.frames.append(Frame(kind, message.payload, message.headers, now))
            asked.changed.set()

        subscription = self.router.subscribe(inbox, take, on_lost=lambda _: None)
        asked.vanish = subscription.close
        return asked

    def cancel(self, asked: Asked | str) -> None:
        """One cancel; a router sends three."""
        inbox = asked if isinstance(asked, str) else asked.inbox
        self.router.publish(NAMES.cancel(ID), inbox.encode())

    async def ask_to_drain(self) -> str:
        """What `baton agent --drain` does."""
        return await ask_to_drain(self.router, NAMES, ID, 5.0)

    # The agent's side

    @property
    def entry(self) -> dict[str, object] | None:
        """What stands in the registry."""
        bucket = self.server.buckets.get(NAMES.bucket)
        if bucket is None or KEY not in bucket.values:
            return None
        found: dict[str, object] = json.loads(bucket.values[KEY][0])
        return found

    @property
    def now(self) -> float:
        return trio.current_time() - self.began_at

    async def settle(self) -> None:
        """Until everything that can happen now has happened."""
        for _ in range(5):
            await trio.testing.wait_all_tasks_blocked()

    async def reach(self, condition: Callable[[], bool], seconds: float = 1000.0) -> None:
        """Look every 50 ms whether it holds; raises TooSlowError."""
        with trio.fail_after(seconds):
            while not condition():  # noqa: ASYNC110  # nobody tells
                await trio.sleep(0.05)

    async def wait_stopped(self, seconds: float = 1000.0) -> None:
        with trio.fail_after(seconds):
            await self.ended.wait()

    def _make(
        self,
        tokens: int,
        stream: bool,
        migratable: bool | None,
        path: str,
        fault: str,
        prompt: str,
        headers: Mapping[str, str] | None,
        payload: bytes | None,
    ) -> bytes:
        if payload is not None:
            return payload
        body: dict[str, object] = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": stream,
        }
        if fault:
            body["x-sim-fault"] = fault
        made: dict[str, object] = {
            "path": path,
            "stream": stream,
            "headers": headers,
            "body": body,
        }
        if stream and migratable is not None:
            made["migratable"] = migratable
        return json.dumps(made).encode()


def play(
    story: Story,
    *,
    settings: Mapping[str, object] | None = None,
    faults: str = "",
    token_seconds: float = 0.1,
    first_token_seconds: float = 0.5,
    engine: str = "vllm",
    is_connected: bool = True,
    max_payload: int | None = None,
    bugs: int = 0,
    is_lossy: bool = False,
) -> Stage:
    """Run a story to its end and hold it to what holds for every agent."""
    sim = SimSettings(
        engine=engine,  # type: ignore[arg-type]  # a story is plain text
        name="sim",
        faults=(faults,) if faults else (),
        token_seconds=token_seconds,
        first_token_seconds=first_token_seconds,
    )
    values: dict[str, object] = {"engine_url": f"http://{HOST}:{PORT}", "nats": "nats://memory"}
    values |= {"id": ID, **(settings or {})}
    clock = trio.testing.MockClock(autojump_threshold=0)
    stage = trio.run(
        _run,
        *(story, sim, AgentSettings(**values), is_connected, max_payload),  # type: ignore[arg-type]
        clock=clock,
        strict_exception_groups=True,
    )
    _check(stage, bugs, is_lossy)
    return stage


async def _run(
    story: Story,
    sim: SimSettings,
    settings: AgentSettings,
    is_connected: bool,
    max_payload: int | None,
) -> Stage:
    with trio.fail_after(GIVE_UP_SECONDS):
        async with trio.open_nursery() as nursery:
            stage = _build(nursery, sim, settings, is_connected)
            if max_payload is not None:
                stage.server.max_payload = max_payload
            nursery.start_soon(_serve, stage)
            if is_connected:
                await trio.sleep(WARM_UP_SECONDS)
            stage.began_at = trio.current_time()
            await story(stage)
            if not stage.ended.is_set():
                stage.agent.ask_to_stop()
            await stage.wait_stopped()
            await stage.settle()
            # An engine may take its time to see that nobody listens.
            await trio.sleep(10.0)
            stage.has_memory = True
            _check_given_back(stage)
            nursery.cancel_scope.cancel(reason="the story is over")
    return stage


def _build(
    nursery: trio.Nursery, sim: SimSettings, settings: AgentSettings, is_connected: bool
) -> Stage:
    network = MemoryNetwork(nursery)
    engine = SimEngine(sim)
    network.engines[HOST, PORT] = engine.serve_connection
    network.refuses[HOST, PORT] = lambda: engine.is_refusing
    server = MemoryServer()
    broker, router = server.broker(is_connected=is_connected), server.broker()
    log = Lines()
    logs = configure(format="json", level="info")
    logs.writer = log
    agent = Agent(settings, network, logs, broker)
    stage = Stage(
        network, server, broker, router, engine, agent, log, nursery, began_at=trio.current_time()
    )

    def note(_: Proxied, edge: Edge) -> None:
        stage.edges.append(edge)
        TAKEN.add(edge)

    agent.handback_listeners = (note,)
    return stage


async def _serve(stage: Stage) -> None:
    with stage.scope:
        await stage.agent.run()
    stage.ended_at = stage.now
    stage.ended.set()


#### What holds for every agent


def _check_given_back(stage: Stage) -> None:
    assert not stage.agent.intake.open
    assert not stage.network.open_sockets, stage.network.open_sockets
    assert stage.engine.inflight == 0
    assert not stage.broker.subscriptions, [each.subject for each in stage.broker.subscriptions]
    assert not stage.broker.consumptions
    assert stage.agent.reactor.statistics() == {"channels": 0, "listeners": 0}


def _check(stage: Stage, bugs: int, is_lossy: bool) -> None:
    assert stage.has_memory, "the run has not come to its end"
    assert not stage.broker.errors, stage.broker.errors
    lines = [msgspec.json.decode(line, type=dict[str, object]) for line in stage.log.lines]
    assert len([line for line in lines if line["event"] == "internal_error"]) == bugs, lines
    for asked in stage.asked.values():
        check_frames(asked, is_lossy)


def check_frames(asked: Asked, is_lossy: bool) -> None:
    """What holds for the frames of every request.

    Where frames are lost on their way, an old router, which cannot see that by their numbers, must
    not be told that the answer is whole.
    """
    numbers = [each.seq for each in asked.frames]
    is_whole = numbers == list(range(len(numbers)))
    if is_lossy:
        assert numbers == sorted(set(numbers)), asked
        assert is_whole or asked.understands or asked.ending != "done", asked
    else:
        assert is_whole, asked
    terminal = [each for each in asked.frames if each.kind in TERMINAL]
    assert len(terminal) <= 1, asked
    assert not terminal or asked.frames[-1] is terminal[0], asked
    heads = [i for i, each in enumerate(asked.frames) if each.kind == "head"]
    data = [i for i, each in enumerate(asked.frames) if each.kind == "data"]
    assert len(heads) <= 1, asked
    assert not (heads and data) or heads[0] < data[0], asked
