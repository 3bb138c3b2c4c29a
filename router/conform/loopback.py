"""A place for cases on the loopback: engines in this process, the router in one of its own.

The router gets a session of its own, and the whole session is killed when its case is over.
Nothing ever listens on or connects to anything but 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import trio
from attrs import define

from router.conform.routers import Candidate
from router.conform.stage import NotServing, Order, Router
from router.options import bare
from router.sim.engine import SimEngine
from router.sim.server import host

HOST = "127.0.0.1"
LAST_LINES = 3
LAST_BYTES = 4096
LINE_CHARACTERS_MAX = 200


@define(eq=False)
class ProcessRouter:
    """A router that runs as a process."""

    process: trio.Process
    port: int
    ready_path: str | None
    log: Path
    log_begins: int
    """What it says stands behind so many bytes of the log."""

    async def connect(self) -> trio.abc.Stream:
        return await trio.open_tcp_stream(HOST, self.port)

    def terminate(self) -> None:
        self.process.terminate()

    async def wait_exited(self) -> None:
        await self.process.wait()

    def last_words(self) -> str:
        with self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self.log_begins, size - LAST_BYTES))
            said = log.read().decode("utf-8", "replace")
        return f"{_ending(self.process.returncode)}, {_last_lines(said)}"


@define(eq=False)
class Loopback:
    """Where one case takes place; everything ends with `opened`."""

    nursery: trio.Nursery
    candidate: Candidate
    folder: str
    log: Path
    _processes: list[trio.Process]

    async def host(self, engine: SimEngine) -> str:
        url: str = await self.nursery.start(host, engine)
        return url

    async def connect(self, url: str) -> trio.abc.Stream:
        return await trio.open_tcp_stream(HOST, int(url.rpartition(":")[2]))

    async def launch(self, order: Order) -> Router:
        port, metrics_port = _free_port(), _free_port()
        words = self.candidate.words(
            order, port=port, metrics_port=metrics_port, folder=self.folder
        )
        with self.log.open("a") as log:
            log.write(" ".join(words) + "\n")
            log.flush()
            begins = log.tell()
            process = await self._start(words, log)
        return ProcessRouter(process, port, self.candidate.ready_path, self.log, begins)

    async def _start(self, words: list[str], log: IO[str]) -> trio.Process:
        try:
            process = await trio.lowlevel.open_process(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=bare(os.environ),
                start_new_session=True,
            )
        except OSError as problem:
            reason = os.strerror(problem.errno or 0)
            raise NotServing(f"{words[0]} cannot be started: {reason}") from None
        self._processes.append(process)
        return process

    def end(self) -> None:
        """Kill what was started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.nursery.cancel_scope.cancel("the case is over")


@asynccontextmanager
async def opened(candidate: Candidate, folder: str, log: Path) -> AsyncIterator[Loopback]:
    """A place for one case."""
    async with trio.open_nursery() as nursery:
        place = Loopback(nursery, candidate, folder, log, [])
        try:
            yield place
        finally:
            place.end()
            with trio.CancelScope(shield=True):
                for process in place._processes:
                    await process.wait()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {-code}"
    return f"with exit status {code}"


def _last_lines(said: str) -> str:
    """The last of a log as one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()][-LAST_LINES:]
    if not lines:
        return "without a word"
    return "saying: " + " | ".join(
        "".join(c for c in line[:LINE_CHARACTERS_MAX] if c.isprintable()) for line in lines
    )


def _free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
