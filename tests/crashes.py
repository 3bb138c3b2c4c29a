"""Bugs on purpose: a function of the router that raises, and what must be untouched by it.

A scene is one client's request with its fate, played while another client's stream waits between
two of its events, so that whatever runs meanwhile runs for the first one. `calls_of` tells which
functions do; `play` plays the scene with one of them raising and looks at what came of it: the
router lives, the other client has its whole answer, the bug is in the log, and nothing is left.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType

import attrs
import trio
from attrs import define, field, frozen
from trio.testing import MockClock, wait_all_tasks_blocked

import router
from router.app import App
from router.calls import _split
from router.config import Settings
from router.logs import configure
from router.migration.skimming import _compiled
from router.sim import SimEngine, SimSettings
from router.workerspec import WorkerSpec
from tests.leftovers import Lines, hurried, left_of
from tests.memory import MemoryNetwork, MemoryStream
from tests.memory_broker import MemoryServer
from tests.nats_peers import Peer, dialler
from tests.neighbours import Neighbours

_HOME = str(Path(router.__file__).parent)
#: A bystander's events come so far apart (seconds); the scene is played between two of them.
PAUSE_SECONDS = 40.0
SCENE_SECONDS = 30.0
#: After the scene: longer than every deadline.
REST_SECONDS = 100.0
#: A prefill whose decode a bug has taken waits for it, as SGLang's does, and nobody ends it.
REST_SECONDS_OF_HALVES = 400.0


class Bug(Exception):
    """Raised on purpose."""


@define(eq=False)
class World:
    """A router, its engines, and what a scene may do with them."""

    network: MemoryNetwork
    app: App
    engines: list[SimEngine]
    log: Lines
    #: The broker that the router and its workers' agents are connected to, if any.
    server: MemoryServer
    streams: list[MemoryStream] = field(factory=list)
    #: What the scene's clients were sent.
    heard: bytes = b""

    @property
    def bugs(self) -> list[object]:
        """What was told of bugs: the log's lines, and what a broker in memory keeps instead."""
        return [*self.log.bugs, *(each for b in self.server.brokers for each in b.errors)]

    def open(self) -> MemoryStream:
        """A connection of the scene's client; closed when the scene is over."""
        stream = self.network.open_client()
        self.streams.append(stream)
        return stream

    async def ask(self, request: bytes, *, after: float = 0.0) -> None:
        """Send, and read until the router ends the connection, or says no more."""
        stream = self.open()
        try:
            await stream.send_all(request)
            await trio.sleep(after)
            while piece := await stream.receive_some():
                self.heard += piece
        except trio.BrokenResourceError:
            pass

    def fault(self, text: str, *, role: str | None = None) -> None:
        """All engines but the bystander's suffer this, or those of a role."""
        for engine in self.engines[1:]:
            if role in (None, engine.settings.role):
                engine.add_faults(text)


@frozen
class Scene:
    """What one client does, and the settings of the router it does it to."""

    name: str
    act: Callable[[World], Awaitable[None]]
    #: 0 is no cap.
    places: int = 0
    #: The engine of two prefill and two decode workers that the scene's client is served by.
    halves: str = ""
    #: The scene's client is served by workers behind NATS; the bystander's is not.
    is_behind_nats: bool = False
    first_token_seconds: float = 60.0


def post(
    path: str = "/v1/completions", *, stream: bool = True, tokens: int = 4, more: str = ""
) -> bytes:
    """A request for a few tokens, or for whatever `more` says."""
    body = (
        f'{{"model": "tiny", "prompt": "x", "max_tokens": {tokens}, "ignore_eos": true,'
        f' "stream": {str(stream).lower()}{more}}}'
    ).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: b\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def get(path: str, method: str = "GET", lines: str = "") -> bytes:
    """A request without a body."""
    return f"{method} {path} HTTP/1.1\r\nhost: b\r\n{lines}\r\n".encode()


#### Which functions run

Trace = Callable[[FrameType, str, object], None]


def calls_of(scene: Scene) -> Counter[str]:
    """The functions of the router that run in a scene, with how often each is entered."""
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        name = _names(frame.f_code)
        if name is not None and event == "call":
            counts[name] += 1

    bugs = _run(scene, count).bugs
    assert not bugs, bugs
    return counts


def play(scene: Scene, name: str, number: int) -> World:
    """Play a scene in which the function raises when it is entered for the `number`th time.

    A task that runs on after having waited enters its function once more.
    """
    count, raised = 0, False

    def trip(frame: FrameType, event: str, _: object) -> None:
        nonlocal count, raised
        if event == "call" and _names(frame.f_code) == name:
            count += 1
            if count == number:
                raised = True
                raise Bug(f"{name} #{number}")

    try:
        world = _run(scene, trip)
        assert raised, "it did not run"
        assert world.bugs, "nobody was told of the bug"
    except BaseException as error:
        error.add_note(f"play(SCENES[{scene.name!r}], {name!r}, {number})")
        raise
    return world


#: What a process remembers for good would not run a second time.
_REMEMBERED = (_split, _compiled)


@cache
def _names(code: CodeType) -> str | None:
    """`module.qualified_name` of a function of the router; None for anybody else's."""
    if not code.co_filename.startswith(_HOME) or "/sim/" in code.co_filename:
        return None
    module = code.co_filename.removeprefix(_HOME).removesuffix(".py").strip("/").replace("/", ".")
    return f"{module}.{code.co_qualname}"


#### One run


def _run(scene: Scene, trace: Trace) -> World:
    random.seed(1)
    for each in _REMEMBERED:
        each.cache_clear()  # what one run remembers does not run in the next
    trio._core._run._r.seed(1)
    clock = MockClock(autojump_threshold=0)
    return trio.run(_play, scene, trace, clock=clock, strict_exception_groups=True)


async def _play(scene: Scene, trace: Trace) -> World:
    async with trio.open_nursery() as nursery:
        world = _build(nursery, scene)
        await trio.sleep(3)
        async with trio.open_nursery() as clients:
            clients.start_soon(_stand_by, world)
            await trio.sleep(4)
            await wait_all_tasks_blocked()
            with trio.move_on_after(SCENE_SECONDS):
                sys.settrace(trace)
                try:
                    await scene.act(world)
                finally:
                    sys.settrace(None)
            sys.settrace(None)
            for stream in world.streams:
                stream.close()
        await trio.sleep(REST_SECONDS_OF_HALVES if scene.halves else REST_SECONDS)
        assert await _is_served(world), "the router serves nobody any more"
        left = left_of(world.app)
        assert not left, left
        world.app.ask_to_stop()
        await trio.sleep(40)
        assert world.app.state.value == "stopped", world.app.state
        assert not world.network.open_sockets
        nursery.cancel_scope.cancel()
    return world


def _build(nursery: trio.Nursery, scene: Scene) -> World:
    network = MemoryNetwork(nursery)
    engines = []
    for place in range(3):
        engine = SimEngine(
            SimSettings(
                engine="vllm", name=f"w{place}", model="slow" if place == 0 else "tiny",
                first_token_seconds=0.5, token_seconds=PAUSE_SECONDS if place == 0 else 0.1,
            )
        )  # fmt: skip
        engines.append(engine)
        network.engines["127.0.0.1", 9000 + place] = engine.serve_connection
    neighbours = Neighbours(nursery)
    halves: dict[str, tuple[WorkerSpec, ...]] = {"prefill": (), "decode": ()}
    for place, role in enumerate(("prefill", "prefill", "decode", "decode")):
        if scene.halves:
            engine, spec = _half(scene, neighbours, place, role)
            engines.append(engine)
            network.engines["127.0.0.1", spec.port] = engine.serve_connection
            halves[role] += (spec,)
    urls = [f"http://127.0.0.1:{9000 + place},engine=vllm" for place in range(3)]
    settings = attrs.evolve(
        hurried(urls, port=8000, places=scene.places),
        migration_limit=2,
        prefill=halves["prefill"],
        decode=halves["decode"],
        pd_max_retries=1,
        health_check_interval_secs=300.0,
        first_token_timeout_secs=scene.first_token_seconds,
        stream_idle_timeout_secs=60.0,
        request_timeout_secs=500.0,
        suspect_idle_secs=0.0,
        # None of the bystander's deadlines is looked at while the scene is played.
        connect_timeout_secs=60.0,
        header_timeout_secs=60.0,
        keep_alive_timeout_secs=60.0,
    )
    server = MemoryServer()
    if scene.is_behind_nats:
        settings = _behind_nats(nursery, server, engines, settings)
    logs = configure(format="json", level="debug")
    logs.writer = lines = Lines()
    app = App(settings, network, logs, server.broker() if scene.is_behind_nats else None)
    app.listen()
    nursery.start_soon(app.run)
    return World(network, app, engines, lines, server)


def _behind_nats(
    nursery: trio.Nursery, server: MemoryServer, engines: list[SimEngine], settings: Settings
) -> Settings:
    """All workers but the bystander's have an agent, and are reached by no other way."""
    names = [engine.settings.name for engine in engines[1:]]
    for engine in engines[1:]:
        dial = dialler(nursery, partial(getattr, engine, "serve_connection"), lambda: False)
        Peer(nursery, server.broker(), engine.settings.name, dial).start()
    specs = [WorkerSpec.parse(f"nats:{name},engine=vllm,bootstrap_host=x") for name in names]
    return attrs.evolve(
        settings, worker_urls=(settings.worker_urls[0], *specs), nats="nats://127.0.0.1:4222"
    )


def _half(
    scene: Scene, neighbours: Neighbours, place: int, role: str
) -> tuple[SimEngine, WorkerSpec]:
    settings = SimSettings(
        engine=scene.halves, name=f"h{place}", role=role, bootstrap_port=8900 + place,  # type: ignore[arg-type]
        first_token_seconds=0.5, token_seconds=0.1,
    )  # fmt: skip
    text = f"http://127.0.0.1:{9010 + place},engine={scene.halves},id=h{place}"
    if role == "prefill":
        text += f",bootstrap_port={8900 + place}"
    return neighbours.start(settings), WorkerSpec.parse(text, role=role)


async def _stand_by(world: World) -> None:
    stream = world.network.open_client()
    await stream.send_all(post(tokens=3).replace(b"tiny", b"slow"))
    heard = b""
    while not heard.endswith(b"0\r\n\r\n"):
        piece = await stream.receive_some()
        assert piece, f"the bystander was cut after {heard!r}"
        heard += piece
    assert b"[DONE]" in heard, heard
    stream.close()


async def _is_served(world: World) -> bool:
    for engine in world.engines:
        engine.clear_faults()
    stream = world.network.open_client()
    await stream.send_all(post(stream=False))
    answer = await stream.receive_some()
    stream.close()
    await trio.sleep(5)  # for what lingers
    return answer.startswith(b"HTTP/1.1 200")
