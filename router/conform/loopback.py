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

import trio
from attrs import define

from router.conform.routers import Candidate
from router.conform.stage import Order, Router
from router.sim.engine import SimEngine
from router.sim.server import host

HOST = "127.0.0.1"


@define(eq=False)
class ProcessRouter:
    """A router that runs as a process."""

    process: trio.Process
    port: int
    ready_path: str | None

    async def connect(self) -> trio.abc.Stream:
        return await trio.open_tcp_stream(HOST, self.port)

    def terminate(self) -> None:
        self.process.terminate()

    async def wait_exited(self) -> None:
        await self.process.wait()


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
            process = await trio.lowlevel.open_process(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return ProcessRouter(process, port, self.candidate.ready_path)

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


def _free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
