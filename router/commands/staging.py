"""What the demos share: child processes, and how they talk to the terminal.

A child is a `baton` command of its own, started as a user would; whoever starts it ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable

import httpx
import trio
from attrs import define

from router.options import bare

START_SECONDS = 30.0


class SceneFailed(Exception):
    """A scene did not go as told."""


@define(eq=False)
class Child:
    """A process of the demo and where it listens."""

    name: str
    process: trio.Process
    url: str = ""


def perform(demo: Callable[..., Awaitable[None]], *args: object) -> int:
    """Run a demo to its end; the exit code, 1 when a scene has failed."""
    try:
        trio.run(demo, *args)
    except* SceneFailed as failures:
        for failure in failures.exceptions:
            say(f"\n✗ {failure}")
        code = 1
    else:
        code = 0
    return code


def caller(*, timeout_seconds: float) -> httpx.AsyncClient:
    """A client of the demo's; a proxy in the environment is not for this machine's own ports."""
    return httpx.AsyncClient(timeout=timeout_seconds, trust_env=False)


async def launch(name: str, words: list[str]) -> Child:
    """Start `baton WORDS`; it listens nowhere, so others say when it is there."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "router", *words], stdout=subprocess.PIPE, env=bare(os.environ)
    )
    return Child(name, process)


async def start(name: str, words: list[str]) -> Child:
    """Start `baton WORDS` and wait for the line that says where it listens."""
    child = await launch(name, words)
    assert child.process.stdout is not None
    line = b""
    with trio.fail_after(START_SECONDS):
        while not line.endswith(b"\n"):
            data = await child.process.stdout.receive_some()
            if not data:
                raise SceneFailed(f"{name} did not start")
            line += data
    child.url = line.decode().split("listening on ", 1)[1].strip()
    return child


async def wait_until(
    condition: Callable[[], Awaitable[bool]], what: str, seconds: float, *, pause_seconds: float
) -> None:
    """Ask again and again: the others are processes and tell nobody unasked.

    Raises SceneFailed if it does not come true within that time.
    """
    with trio.move_on_after(seconds):
        while not await condition():  # noqa: ASYNC110
            await trio.sleep(pause_seconds)
        return
    raise SceneFailed(f"expected within {seconds:g} s that {what}")


def check(holds: bool, what: str) -> None:
    """Fail the scene unless it holds."""
    if not holds:
        raise SceneFailed(f"expected that {what}")


def title(text: str) -> None:
    say(f"\n━━ {text}")


def say(text: str) -> None:
    print(text, flush=True)
