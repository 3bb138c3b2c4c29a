"""Routers, agents and simulated engines as processes, the way users start them.

Everything talks over 127.0.0.1 and is ended by its process id. Logs lie in the test's own
directory; what a process said last is in the message when it does not get ready.
"""

import contextlib
import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import trio
from attrs import Factory, define, frozen

from router.options import bare
from tests.infera_peer import Json
from tests.real.calling import ask
from tests.real.calls import Answer, get, post
from tests.real.processes import wait_until

READY_SECONDS = 15.0
#: Limits are for a machine that has nothing else to do; on others all of it takes longer.
PATIENCE = 4
MODEL = "tiny"
Body: TypeAlias = dict[str, Json]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@define(eq=False)
class Starter:
    """Forks processes off one that has imported everything already (tests/nats/forking.py)."""

    popen: subprocess.Popen[bytes]
    pids: queue.Queue[int] = Factory(queue.Queue)
    codes: dict[int, int] = Factory(dict)

    def start(self, words: Sequence[str], log: Path) -> int:
        """The process id."""
        assert self.popen.stdin is not None
        line = json.dumps({"words": words, "log": str(log)})
        self.popen.stdin.write(line.encode() + b"\n")
        self.popen.stdin.flush()
        return self.pids.get(timeout=READY_SECONDS)

    def listen(self) -> None:
        """Until it ends; in a thread."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            told = json.loads(line)
            if "code" in told:
                self.codes[told["pid"]] = told["code"]
            else:
                self.pids.put(told["pid"])


@contextlib.contextmanager
def starter() -> Iterator[Starter]:
    popen = subprocess.Popen(
        [sys.executable, "-m", "tests.nats.forking"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=bare(os.environ),
    )
    made = Starter(popen)
    listening = threading.Thread(target=made.listen)
    listening.start()
    try:
        yield made
    finally:
        assert popen.stdin is not None
        popen.stdin.close()
        popen.wait(10)
        listening.join()
        assert popen.stdout is not None
        popen.stdout.close()


@define(eq=False)
class Process:
    """One process and what it has written so far."""

    name: str
    pid: int
    log: Path
    starter: Starter
    port: int = 0

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        return self.starter.codes.get(self.pid)

    @property
    def is_running(self) -> bool:
        return self.code is None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """It is gone when this returns."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            assert wait_until(lambda: not self.is_running, 10)

    def said(self) -> str:
        return self.log.read_text(errors="replace", encoding="utf-8")

    async def ended(self, seconds: float) -> int:
        """Wait until it has ended by itself; its exit code."""
        await until(lambda: not self.is_running, seconds, self.name)
        assert self.code is not None
        return self.code

    def ready(self) -> "Process":
        """Block until the line that says where it listens."""
        wait_until(lambda: self._listens() or not self.is_running, READY_SECONDS)
        assert self._listens(), f"{self.name}: {self.said()[-2000:]}"
        line = next(line for line in self.said().splitlines() if "listening on http" in line)
        self.port = int(line.rsplit(":", 1)[1].rstrip("/"))
        return self

    def _listens(self) -> bool:
        lines = self.said().splitlines(keepends=True)
        return any("listening on http" in line and line.endswith("\n") for line in lines)


async def until(condition: Callable[[], bool], seconds: float, what: str = "") -> float:
    """Poll other processes' state; how long it took. A TimeoutError says what was awaited.

    It comes after PATIENCE times that long: who promises the seconds compares them.
    """
    started = trio.current_time()
    while not condition():
        if trio.current_time() - started > seconds * PATIENCE:
            raise TimeoutError(f"not within {seconds} s: {what or condition}")
        await trio.sleep(0.01)
    return trio.current_time() - started


@define(eq=False)
class Fleet:
    """Processes on one broker, under one prefix."""

    broker: str
    directory: Path
    prefix: str
    starter: Starter
    processes: list[Process] = Factory(list)

    def start(self, name: str, *words: str) -> Process:
        log = self.directory / f"{name}.log"
        log.touch()
        process = Process(name, self.starter.start(words, log), log, self.starter)
        self.processes.append(process)
        return process

    def router(self, *flags: str, name: str = "router") -> Process:
        """Blocks until it listens."""
        words = ["serve", "--port", "0", "--nats", self.broker, "--nats-prefix", self.prefix]
        words += ["--log-level", "info", "--health-check-interval-secs", "1", *flags]
        return self.start(name, *words).ready()

    def agent(self, worker_id: str, engine_port: int, *flags: str) -> Process:
        """Not awaited: whoever needs it waits until a router lists it."""
        words = ["agent", "--engine-url", f"http://127.0.0.1:{engine_port}", "--id", worker_id]
        words += ["--nats", self.broker, "--nats-prefix", self.prefix, *flags]
        return self.start(f"agent-{worker_id}", *words)

    def sim(self, name: str, *flags: str) -> Process:
        """Not awaited; `ready()` does that."""
        return self.start(name, "sim", "--name", name, "--model", MODEL, *flags)

    def end(self) -> None:
        for process in self.processes:
            process.kill()


@contextlib.contextmanager
def fleet(broker: str, directory: Path, prefix: str, starter: Starter) -> Iterator[Fleet]:
    """Ends all its processes on the way out."""
    made = Fleet(broker, directory, prefix, starter)
    try:
        yield made
    finally:
        made.end()


#### What a router says of its workers


def workers(router: Process) -> dict[str, dict[str, Json]]:
    """The workers a router lists, by id."""
    listed = get(router.port, "/v1/workers").json()
    assert isinstance(listed, dict)
    return {each["id"]: each for each in listed["workers"]}


def state_of(router: Process, worker_id: str) -> str:
    """The state of a worker; empty when the router does not list it."""
    return str(workers(router).get(worker_id, {}).get("state", ""))


async def all_ready(router: Process, *ids: str, seconds: float = READY_SECONDS) -> float:
    """Wait until a router may send requests to all of them; how long it took."""
    return await until(
        lambda: all(state_of(router, each) == "ready" for each in ids), seconds, f"{ids} ready"
    )


def wait_ready(router: Process, worker_id: str) -> None:
    """Block until a router may send requests to it."""
    assert wait_until(lambda: state_of(router, worker_id) == "ready", READY_SECONDS)


def add_worker(router: Process, worker_id: str, **options: Json) -> None:
    add_worker_url(router, f"nats:{worker_id}", **options)


def add_worker_url(router: Process, url: str, **options: Json) -> None:
    answer = post(router.port, "/v1/workers", {"url": url, **options})
    assert answer.status == 201, answer


@define(eq=False)
class Added:
    """A worker that a router knows for as long as this is open."""

    router: Process
    worker_id: str
    options: dict[str, str]

    def __enter__(self) -> None:
        add_worker(self.router, self.worker_id, **self.options)

    def __exit__(self, *_: object) -> None:
        remove_worker(self.router, self.worker_id)


def remove_worker(router: Process, worker_id: str) -> None:
    http_delete(router.port, f"/v1/workers/{worker_id}")


def http_delete(port: int, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("DELETE", path)
        assert connection.getresponse().status == 200


def metric(router: Process, name: str, **labels: str) -> float:
    """The sum of the samples of that name that have these labels."""
    text = get(router.port, "/metrics").body.decode()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if re.match(rf"{name}[{{ ]", line) and all(each in line for each in wanted)
    )


#### Requests and what came of them


def chat(text: str, *, tokens: int, stream: bool = True, more: Body | None = None) -> Body:
    """A chat of exactly so many tokens; `more` are members beyond that."""
    message: Json = {"role": "user", "content": text}
    body: Body = {"model": MODEL, "messages": [message], "max_tokens": tokens}
    return {**body, "stream": stream, "ignore_eos": True, **(more or {})}


def slowly(body: Body, token_seconds: float) -> Body:
    """The same request, which the simulated engine answers at this pace."""
    return {**body, "x-sim-fault": f"delay,token={token_seconds}"}


@frozen
class Told:
    """What a client was told by a stream."""

    status: int
    text: str = ""
    finish: str | None = None
    is_done: bool = False
    is_whole: bool = True
    error: str | None = None
    ids: tuple[str, ...] = ()
    roles: int = 0

    @property
    def said(self) -> tuple[str, str | None, bool]:
        """What two answers to one request have in common."""
        return self.text, self.finish, self.is_done

    @property
    def is_good(self) -> bool:
        """Ended as a stream ends that lacks nothing."""
        return self.status == 200 and self.is_done and self.is_whole and bool(self.finish)


def told_by(body: bytes) -> Told:
    """Read a stream's bytes, wherever they came from."""
    return told(Answer(200, {}, body))


def told(answer: Answer) -> Told:
    """Read a chat's or a completion's stream."""
    if answer.status != 200:
        return Told(answer.status, error=answer.headers.get("x-router-error-code"))
    text, finish, error, roles = "", None, None, 0
    ids: dict[str, None] = {}
    events = answer.events()
    for event in events:
        if event == b"[DONE]":
            continue
        chunk = json.loads(event)
        if "error" in chunk:
            error = str(chunk["error"].get("code"))
            continue
        ids[chunk["id"]] = None
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            roles += "role" in delta
            text += delta.get("content") or choice.get("text") or ""
            finish = choice.get("finish_reason") or finish
    is_done = bool(events) and events[-1] == b"[DONE]"
    return Told(200, text, finish, is_done, answer.whole, error, tuple(ids), roles)


async def stream(
    port: int,
    body: Body,
    *,
    path: str = CHAT,
    request_id: str = "",
    heard: Callable[[], None] = lambda: None,
) -> Told:
    """Ask and read to the end; `heard` for each piece that comes."""
    data = json.dumps(body).encode()
    return told(await ask(port, path, data, request_id=request_id, heard=heard))


async def whole(port: int, body: Body, *, path: str = CHAT) -> Answer:
    """The whole answer as its bytes came."""
    return await ask(port, path, json.dumps(body).encode())


async def many(port: int, bodies: Sequence[Body]) -> list[Told]:
    """All at once; in the order of the bodies."""
    found: list[Told | None] = [None] * len(bodies)

    async def one(number: int) -> None:
        found[number] = await stream(port, bodies[number])

    async with trio.open_nursery() as nursery:
        for number in range(len(bodies)):
            nursery.start_soon(one, number)
    return [each for each in found if each is not None]


@define(eq=False)
class Midway:
    """Lets a test act once a stream has brought so many pieces."""

    pieces: int
    reached: trio.Event = Factory(trio.Event)
    count: int = 0

    def heard(self) -> None:
        self.count += 1
        if self.count >= self.pieces:
            self.reached.set()


def inflight(sim: Process) -> int:
    """Requests a simulated engine works on."""
    state = get(sim.port, "/sim/state").json()
    assert isinstance(state, dict)
    return int(state["inflight"])
