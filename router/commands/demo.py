"""`baton demo`: a small fleet of simulated engines, a router and a client, in this terminal.

Everything is real but the engines: processes, sockets, signals. Each scene does something to the
fleet, shows what the client sees, and then the path that the request took through its machine,
read from the router's own /debug. Ends by itself; exit code 0 means that every scene went as told.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import httpx
import msgspec
import trio
from attrs import define, field

from router.commands.staging import (
    START_SECONDS,
    Child,
    SceneFailed,
    caller,
    check,
    perform,
    say,
    start,
    title,
    wait_until,
)
from statemachines import REQUEST

MODEL = "tiny"
PAIR_MODEL = "tiny-pair"
TOKEN_SECONDS = 0.04
PREFILL_SECONDS = 0.6
PROMPT = "Tell me a story about a relay race."


@define(eq=False)
class Stage:
    """The processes, and a client for the router."""

    workers: list[Child] = field(factory=list)
    halves: list[Child] = field(factory=list)
    router: Child | None = None
    client: httpx.AsyncClient = field(factory=lambda: caller(timeout_seconds=30))

    @property
    def url(self) -> str:
        assert self.router is not None
        return self.router.url

    async def get(self, path: str) -> dict[str, object]:
        """A JSON answer of the router's own."""
        answer = await self.client.get(self.url + path)
        found = msgspec.json.decode(answer.content)
        assert isinstance(found, dict)
        return found

    async def in_flight(self) -> dict[str, int]:
        """Requests on each worker, as the router sees them."""
        listed = (await self.get("/v1/workers"))["workers"]
        assert isinstance(listed, list)
        return {each["id"]: each["inflight"] for each in listed}


def main() -> int:
    """Run the demo; the exit code."""
    return perform(_demo)


async def _demo() -> None:
    stage = Stage()
    try:
        await _set_up(stage)
        await _scene_stream(stage)
        await _scene_failover(stage)
        await _scene_move(stage)
        await _scene_kill(stage)
        await _scene_leave(stage)
        await _scene_prefill(stage)
        say("\nEvery scene went as told. Next: docs/statemachines.md, and `baton check`.")
    finally:
        with trio.move_on_after(5) as cleanup:
            cleanup.shield = True
            await _tear_down(stage)


#### Setting up


async def _set_up(stage: Stage) -> None:
    title("A fleet of three simulated vLLM engines, and a router in front of them")
    for number in (1, 2, 3):
        words = ["sim", "--engine", "vllm", "--model", MODEL, "--port", "0", "--name", f"w{number}"]
        words += ["--token-seconds", str(TOKEN_SECONDS), "--first-token-seconds", "0.1"]
        stage.workers.append(await start(f"w{number}", words))
    urls = [f"{worker.url},id={worker.name}" for worker in stage.workers]
    flags = ["--port", "0", "--log-level", "warning", "--health-check-interval-secs", "1"]
    flags += ["--migration-limit", "3"]
    stage.router = await start("router", ["serve", *flags, "--worker-urls", *urls])
    for child in (*stage.workers, stage.router):
        say(f"  {child.name:7} {child.url}  (process {child.process.pid})")
    await wait_until(
        partial(_all_ready, stage), "the workers are ready", START_SECONDS, pause_seconds=0.1
    )


async def _all_ready(stage: Stage) -> bool:
    return (await stage.get("/readyz")).get("workers") == len(stage.workers)


async def _tear_down(stage: Stage) -> None:
    await stage.client.aclose()
    engines = [*stage.workers, *stage.halves]
    children = [*engines, *([stage.router] if stage.router else [])]
    for child in reversed(children):
        if child.process.poll() is None:
            os.kill(child.process.pid, signal.SIGKILL if child in engines else signal.SIGTERM)
    for child in children:
        await child.process.wait()


#### Scenes


async def _scene_stream(stage: Stage) -> None:
    title("1. A stream")
    request_id = "demo-stream"
    text = await _tell(stage, request_id, tokens=24)
    check(bool(text), "the stream brought text")
    await _show_path(stage, request_id)


async def _scene_failover(stage: Stage) -> None:
    title("2. A worker fails before its first byte; the client never learns of it")
    faulty = stage.workers[0]
    await stage.client.post(faulty.url + "/sim/faults", content="times=1:cut,at=head")
    say(f"  {faulty.name} will close its next answer right after the head")
    for number in range(3):
        request_id = f"demo-failover-{number}"
        await _tell(stage, request_id, tokens=12)
        if (await stage.get(f"/debug/requests/{request_id}"))["attempts"] == 2:
            await _show_path(stage, request_id)
            return
    raise SceneFailed("no request met the faulty worker")


async def _scene_move(stage: Stage) -> None:
    title("3. A worker is killed in the middle of an answer; the client reads on")
    whole = await _tell(stage, "demo-whole", tokens=40)
    say("  the same request again, and its worker is killed (SIGKILL) on the way:")
    moved = await _tell(stage, "demo-moved", tokens=40, midway=partial(_kill_who_serves, stage))
    check(moved == whole, "both texts are the same")
    say("  both texts are the same, character by character")
    await _show_path(stage, "demo-moved")


async def _kill_who_serves(stage: Stage) -> None:
    serving = [name for name, count in (await stage.in_flight()).items() if count]
    check(len(serving) == 1, "one worker serves the stream")
    await _kill(stage, serving[0])
    sys.stdout.write(f" ⟪{serving[0]} is killed⟫")


async def _kill(stage: Stage, name: str) -> None:
    engines = [*stage.workers, *stage.halves]
    victim = next(worker for worker in engines if worker.name == name)
    os.kill(victim.process.pid, signal.SIGKILL)
    await victim.process.wait()


async def _scene_kill(stage: Stage) -> None:
    title("4. With one worker dead, twelve requests, none fails")
    results: list[int] = []
    async with trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(_ask_whole, stage, results)
    say(f"  answers: {' '.join(map(str, results))}")
    check(results == [200] * 12, "all twelve answers are 200")


async def _all_free(stage: Stage) -> bool:
    return not any((await stage.in_flight()).values())


async def _ask_whole(stage: Stage, results: list[int]) -> None:
    answer = await stage.client.post(
        stage.url + "/v1/chat/completions", json=_body(tokens=4, stream=False)
    )
    results.append(answer.status_code)


async def _scene_leave(stage: Stage) -> None:
    title("5. A client leaves in the middle of its answer; the engine is free at once")
    request_id = "demo-leave"
    async with _streaming(stage, request_id, tokens=2000) as lines:
        seen = 0
        async for _ in lines:
            seen += 1
            if seen == 10:
                break
        say(f"  while it streams, requests on the workers: {await stage.in_flight()}")
    started = trio.current_time()
    await wait_until(partial(_all_free, stage), "the workers are free", 5, pause_seconds=0.001)
    took = (trio.current_time() - started) * 1000
    say(f"  {took:.1f} ms after it left:                  {await stage.in_flight()}")
    await _show_path(stage, request_id)


async def _scene_prefill(stage: Stage) -> None:
    title("6. A prefill worker is killed before the first token; its decode would wait")
    await _add_pair(stage)
    await _tell(stage, "demo-pair", tokens=24, model=PAIR_MODEL)
    say("  that came from a pair; again, and prefill is killed while it computes:")
    prefill, decode = stage.halves
    told: list[tuple[float, int, str]] = []
    async with trio.open_nursery() as asking:
        asking.start_soon(_hear_error, stage, "demo-prefill", told)
        await trio.sleep(PREFILL_SECONDS / 2)
        killed = trio.current_time()
        await _kill(stage, prefill.name)
    [(moment, status, code)] = told
    # A kept connection that ends before an answer is tried once more, on a new one.
    words = ("upstream_broken", "upstream_unreachable")
    check(status == 502 and code in words, "the client was told that prefill broke off")
    say(f"  {(moment - killed) * 1000:.1f} ms after the kill the client has its {status} ({code})")
    await wait_until(partial(_is_idle, stage, decode), "decode is free", 5, pause_seconds=0.001)
    freed = (trio.current_time() - killed) * 1000
    say(f"  {freed:.1f} ms after the kill decode is free; alone it would have waited 300 s")
    await _show_path(stage, "demo-prefill")


async def _add_pair(stage: Stage) -> None:
    """Start two simulated SGLang halves and tell the router of them."""
    for role in ("prefill", "decode"):
        words = ["sim", "--engine", "sglang", "--role", role, "--name", role, "--port", "0"]
        words += ["--model", PAIR_MODEL, "--token-seconds", str(TOKEN_SECONDS)]
        words += ["--first-token-seconds", str(PREFILL_SECONDS if role == "prefill" else 0.0)]
        half = await start(role, words)
        stage.halves.append(half)
        worker = {"url": half.url, "id": role, "role": role, "engine": "sglang"}
        if role == "prefill":
            info = (await stage.client.get(half.url + "/server_info")).json()
            worker["bootstrap_port"] = info["disaggregation_bootstrap_port"]
        answer = await stage.client.post(stage.url + "/v1/workers", json=worker)
        check(answer.status_code == 201, f"the router takes the {role} worker")
        say(f"  {role:7} {half.url}  (process {half.process.pid})")
    await wait_until(
        partial(_serves, stage, PAIR_MODEL), "the pair serves", START_SECONDS, pause_seconds=0.1
    )


async def _serves(stage: Stage, model: str) -> bool:
    answer = await stage.client.post(
        stage.url + "/v1/chat/completions", json=_body(tokens=1, stream=False, model=model)
    )
    return answer.status_code == 200


async def _hear_error(stage: Stage, request_id: str, told: list[tuple[float, int, str]]) -> None:
    """Ask the pair for a stream, and keep when an error came and which."""
    answer = await stage.client.post(
        stage.url + "/v1/chat/completions",
        json=_body(tokens=24, stream=True, model=PAIR_MODEL),
        headers={"x-request-id": request_id},
    )
    told.append(
        (
            trio.current_time(),
            answer.status_code,
            answer.headers.get("x-router-error-code", ""),
        )
    )


async def _is_idle(stage: Stage, engine: Child) -> bool:
    state = (await stage.client.get(engine.url + "/sim/state")).json()
    return bool(state["inflight"] == 0)


#### The client


def _body(*, tokens: int, stream: bool, model: str = MODEL) -> dict[str, object]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
        "stream": stream,
        "ignore_eos": True,
    }


@asynccontextmanager
async def _streaming(
    stage: Stage, request_id: str, *, tokens: int, model: str = MODEL
) -> AsyncIterator[AsyncIterator[str]]:
    async with stage.client.stream(
        "POST",
        stage.url + "/v1/chat/completions",
        json=_body(tokens=tokens, stream=True, model=model),
        headers={"x-request-id": request_id},
    ) as answer:
        yield answer.aiter_lines()


async def _tell(
    stage: Stage,
    request_id: str,
    *,
    tokens: int,
    midway: Callable[[], Awaitable[None]] | None = None,
    model: str = MODEL,
) -> str:
    """Show a stream as it comes; returns its text, and checks that it ended well.

    `midway` happens once half of it has come.
    """
    sys.stdout.write("  client reads: ")
    text, is_done, pieces = "", False, 0
    async with _streaming(stage, request_id, tokens=tokens, model=model) as lines:
        async for line in lines:
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                piece = _text_of(line)
                text += piece
                pieces += 1
                if midway is not None and pieces == tokens // 2:
                    await midway()
                sys.stdout.write(piece)
                sys.stdout.flush()
    say("")
    check(is_done, "the stream ended with [DONE]")
    return text


def _text_of(line: str) -> str:
    choices = msgspec.json.decode(line.removeprefix("data: "))["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""


async def _show_path(stage: Stage, request_id: str) -> None:
    await wait_until(
        partial(_is_over, stage, request_id), "the request is over", 5, pause_seconds=0.01
    )
    shown = await stage.get(f"/debug/requests/{request_id}")
    transitions = shown["transitions"]
    assert isinstance(transitions, list)
    say(f"  the request, on {shown['worker']} after {shown['attempts']} attempt(s):")
    for each in transitions:
        arrow = f"{each['source']} → {each['target']}"
        say(f"    {each['seconds']:8.3f} s  {each['fact']:13} {arrow:26} {each['why']}")


async def _is_over(stage: Stage, request_id: str) -> bool:
    shown = await stage.get(f"/debug/requests/{request_id}")
    return shown.get("state") in {state.value for state in REQUEST.final}
