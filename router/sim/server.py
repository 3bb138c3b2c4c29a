"""`baton sim`: one simulated engine as a process.

It listens, says so in one line on stdout, and dies the way the imitated engine does, exit
included: "connection refused" needs a listener that is really closed.
"""

import signal
import time
from collections.abc import AsyncIterable, Awaitable, Callable

import attrs
import trio

from router.sim import deaths
from router.sim.condition import Mode
from router.sim.engine import SimEngine
from router.sim.faults import parse_fault
from router.sim.settings import SimSettings

_BACKLOG = 1024
_SIGTERM_FAULTS = {
    ("vllm", "native"): "now:sigterm_abort",
    ("vllm", "abort"): "now:sigterm_abort",
    ("vllm", "hang"): "now:sigterm_hang",
    ("vllm", "drain"): "now:sigterm_drain",
    ("sglang", "native"): "now:sglang_drain",
    ("sglang", "abort"): "now:sigterm_abort",
    ("sglang", "hang"): "now:sigterm_hang",
    ("sglang", "drain"): "now:sglang_drain",
}
"""What SIGTERM does; what is not listed ends the process at once."""


def run(settings: SimSettings) -> int:
    """Serve until a signal or a death ends it; returns the exit code."""
    engine = SimEngine(attrs.evolve(settings, unix_time=time.time()))
    return trio.run(serve, engine)


async def serve(engine: SimEngine) -> int:
    """Serve one engine on a real socket; returns the exit code: 1 after a death."""
    engine.start()
    settings = engine.settings
    work, handovers = await _doors(engine)
    print(f"baton sim: listening on http://{settings.host}:{work.port}", flush=True)
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            ended = _Ended()
            nursery.start_soon(_obey, engine, signals, nursery.cancel_scope, ended)
            await _listen(engine, work, handovers)
            ended.code = 0 if ended.by_signal else 1
            nursery.cancel_scope.cancel("the simulated process is gone")
    return ended.code


async def host(
    engine: SimEngine, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve one engine inside another program until it is gone for good; started with its URL."""
    engine.start()
    work, handovers = await _doors(engine)
    task_status.started(f"http://{engine.settings.host}:{work.port}")
    await _listen(engine, work, handovers)


@attrs.define(eq=False)
class _Door:
    """A port, and what is served there."""

    serve: Callable[[trio.SocketStream], Awaitable[None]]
    listeners: list[trio.SocketListener]

    @property
    def port(self) -> int:
        port: int = self.listeners[0].socket.getsockname()[1]
        return port


async def _doors(engine: SimEngine) -> tuple[_Door, _Door]:
    """Where requests come, and where other engines come; the second only for half of a pair."""
    settings = engine.settings
    work = _Door(engine.serve_connection, await _open(settings.host, settings.port))
    handovers = _Door(engine.serve_handover, [])
    if settings.role != "mixed":
        handovers.listeners = await _open(settings.host, settings.bootstrap_port)
        engine.kv_port = handovers.port
    return work, handovers


async def _open(host: str, port: int) -> list[trio.SocketListener]:
    return list(await trio.open_tcp_listeners(port, host=host, backlog=_BACKLOG))


@attrs.define(eq=False)
class _Ended:
    """How the process came to its end."""

    by_signal: bool = False
    code: int = 0


async def _obey(
    engine: SimEngine, signals: AsyncIterable[int], scope: trio.CancelScope, ended: _Ended
) -> None:
    """Do what signals ask for; a second one ends at once, as SIGINT does."""
    async for number in signals:
        key = (engine.settings.engine, engine.settings.sigterm)
        fault = _SIGTERM_FAULTS.get(key) if number == signal.SIGTERM else None
        if fault is None or ended.by_signal:
            scope.cancel("ended by a signal")
            return
        ended.by_signal = True
        deaths.befall(engine, parse_fault(fault))


async def _listen(engine: SimEngine, *doors: _Door) -> None:
    """Listen whenever the engine does; returns when it never will again."""
    ports = [door.port if door.listeners else 0 for door in doors]
    async with trio.open_nursery() as connections:
        while True:
            async with trio.open_nursery() as accepting:
                for door in doors:
                    for listener in door.listeners:
                        accepting.start_soon(_accept, door.serve, listener, connections)
                while not engine.is_refusing:
                    await engine.schedule.wait_changed()
                accepting.cancel_scope.cancel("the listener is closed")
            while engine.is_refusing:
                if engine.mode is Mode.GONE and engine.restart_at == float("inf"):
                    await _let_connections_end(engine)
                    connections.cancel_scope.cancel("the process is gone")
                    return
                await engine.schedule.wait_changed()
            for door, port in zip(doors, ports, strict=True):
                door.listeners = await _open(engine.settings.host, port) if port else []


async def _accept(
    serve: Callable[[trio.SocketStream], Awaitable[None]],
    listener: trio.SocketListener,
    connections: trio.Nursery,
) -> None:
    async with listener:
        await trio.serve_listeners(serve, [listener], handler_nursery=connections)


async def _let_connections_end(engine: SimEngine) -> None:
    """Their scopes are over already; they only have to notice."""
    while engine.connections:
        await trio.lowlevel.checkpoint()
