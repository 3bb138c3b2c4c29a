"""Real engines behind NATS: agents beside them, a real broker, and drains in mid-stream.

What is said through the broker has to be what the engine says, token for token, also when the
agent is drained or killed in the middle and the rest comes from another engine of the same kind.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from attrs import define, frozen

from tests.nats_server import NatsServer
from tests.real.calls import Answer, asked, get, post, read
from tests.real.engines import ENGINES, Engine
from tests.real.processes import free_port, session, wait_ready, wait_until
from tests.real.requests import CHAT, TEXT, Json, Object, chat, completion, merged, without_identity

pytestmark = pytest.mark.real

READY_SECONDS = 60.0
LONG_TOKENS = 700
LEARNED_SECONDS = 3.0
WINDOW_SECONDS = 20.0
"""Of a drain at most: a window of a second, the consumer, and a slow machine."""
BODIES: dict[str, tuple[str, Object]] = {
    "chat": (CHAT, chat("What is a relay?", max_tokens=40)),
    "text": (TEXT, completion("def main(", max_tokens=40)),
    "other scripts": (TEXT, completion("héllo wörld 你好", max_tokens=40)),
    "a stop string": (TEXT, completion("def main(", max_tokens=40, stop=["mod"])),
}
LONG: Object = completion("class Foo", max_tokens=LONG_TOKENS, ignore_eos=True)


@frozen
class Agent:
    """One agent; its id is the engine's place."""

    id: str
    process: subprocess.Popen[bytes]


@define(eq=False)
class Cluster:
    """A broker, two engines of one kind, and a router in front; agents come and go."""

    kind: str
    server: NatsServer
    engines: list[Engine]
    router: int

    @contextlib.contextmanager
    def agent(self, number: int, *flags: str) -> Iterator[Agent]:
        engine, name = self.engines[number], f"agent-{free_port()}"
        command = [sys.executable, "-m", "router", "agent", "--engine-url", engine.url]
        command += ["--nats", self.server.url, "--id", f"w{number}", *flags]
        with session(name, command, {}) as process:
            wait_ready(name, process, lambda: self.knows(f"w{number}"), READY_SECONDS)
            try:
                yield Agent(f"w{number}", process)
            finally:
                process.terminate()
                # One that was killed is in the registry for ten seconds more.
                assert wait_until(lambda: self.state(f"w{number}") is None, WINDOW_SECONDS)

    def knows(self, worker: str) -> bool:
        return self.state(worker) == "ready"

    def state(self, worker: str) -> str | None:
        row = self._row(worker)
        return None if row is None else str(row["state"])

    def inflight(self, worker: str) -> bool:
        row = self._row(worker)
        return row is not None and bool(row["inflight"])

    def _row(self, worker: str) -> Object | None:
        listed = json.loads(get(self.router, "/v1/workers").body)["workers"]
        return next((each for each in listed if each["id"] == worker), None)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    kind = request.param
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(NatsServer())
        engines = [stack.enter_context(ENGINES[kind]()) for _ in range(2)]
        port = free_port()
        command = [sys.executable, "-m", "router", "serve", "--port", str(port)]
        command += ["--nats", server.url, "--migration-limit", "2"]
        name = f"router-{port}"
        process = stack.enter_context(session(name, command, {}))
        wait_ready(name, process, lambda: get(port, "/health").status == 200, READY_SECONDS)
        yield Cluster(kind, server, engines, port)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", BODIES)
def test_what_comes_over_nats_is_what_the_engine_says(
    cluster: Cluster, name: str, stream: bool
) -> None:
    path, body = BODIES[name]
    body = {**body, "stream": stream}
    right = post(cluster.engines[0].port, path, body)

    with cluster.agent(0):
        answer = post(cluster.router, path, body)

    assert answer.status == right.status == 200
    assert _said(answer) == _said(right)


def test_an_error_of_the_engine_keeps_its_status(cluster: Cluster) -> None:
    with cluster.agent(0):
        answer = post(cluster.router, TEXT, completion("x " * 3000, max_tokens=5, stream=True))

    assert answer.status == 400


def test_a_client_that_leaves_frees_the_engine(cluster: Cluster) -> None:
    engine = cluster.engines[0]
    with cluster.agent(0):
        with asked(cluster.router, "POST", TEXT, _streamed(LONG)) as response:
            _read_content(response.read1)
            assert wait_until(lambda: engine.running() == 1, 5)

        assert wait_until(lambda: engine.running() == 0, 5)


@pytest.mark.parametrize("how", ["drained", "killed"])
def test_a_stream_goes_on_when_its_agent_goes(cluster: Cluster, how: str) -> None:
    right = post(cluster.engines[0].port, TEXT, {**LONG, "stream": True})
    window = ("--drain-timeout-secs", "1")
    with cluster.agent(0, *window) as first, cluster.agent(1, *window) as second:
        # An entry in the registry is enough to be ready; that tokens are the same is learned later.
        time.sleep(LEARNED_SECONDS)
        with asked(cluster.router, "POST", TEXT, _streamed(LONG)) as response:
            before = _read_content(response.read1)
            serving = first if cluster.inflight("w0") else second
            with ThreadPoolExecutor(1) as clients:
                reading = clients.submit(read, response)
                begun = time.perf_counter()
                os.kill(serving.process.pid, signal.SIGTERM if how == "drained" else signal.SIGKILL)
                assert wait_until(lambda: serving.process.poll() is not None, WINDOW_SECONDS)
                took = time.perf_counter() - begun
                rest = reading.result()

    answer = Answer(rest.status, rest.headers, before + rest.body, rest.whole)
    print(f"\n{cluster.kind}: agent {how}, gone after {took:.2f} s; {len(answer.events())} events")
    assert answer.whole
    assert answer.events()[-1] == b"[DONE]"
    assert _said(answer) == _said(right)
    moved = get(cluster.router, "/metrics").body.decode()
    reason = "worker_draining" if how == "drained" else "stream_broken"
    assert re.search(rf'baton_migrations_total{{[^}}]*reason="(?:{reason})"[^}}]*}} [1-9]', moved)
    if how == "drained":
        for engine in cluster.engines:
            assert wait_until(partial(_is_idle, engine), 5)


def _is_idle(engine: Engine) -> bool:
    return engine.running() == 0


def _streamed(body: Object) -> bytes:
    return json.dumps({**body, "stream": True}).encode()


def _read_content(read1: Callable[[int], bytes]) -> bytes:
    """Up to the first token."""
    data = b""
    while not re.search(rb'"text":\s*"[^"]', data):
        part = read1(65536)
        assert part
        data += part
    return data


def _said(answer: Answer) -> Json:
    """All that an answer says but for what an engine makes up anew."""
    said = merged(answer.events()) if answer.events() else without_identity(json.loads(answer.body))
    assert isinstance(said, dict)
    said.pop("metadata", None)
    return said
