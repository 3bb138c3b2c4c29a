"""How engines die, as seen on real ones (vLLM 0.32.0, SGLang 0.5.23).

Each death is a plan of modes and a fate for what is running. Pure but for the clock.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from router.sim.condition import Mode
from router.sim.faults import Fault
from router.sim.running import Fate

if TYPE_CHECKING:
    from router.sim.engine import SimEngine

_CORE_TO_EXIT_SECONDS = 2.0
_EXIT_SECONDS = 0.5
POISON_SECONDS = 5.0


def befall(engine: "SimEngine", fault: Fault) -> None:
    """Let an engine fault happen now."""
    restart_after = fault.seconds("restart_after")
    restarts = trio.current_time() + restart_after if restart_after else float("inf")
    engine.restart_at = restarts
    _DEATHS[fault.kind.name](engine, fault)


def poison(engine: "SimEngine") -> None:
    """Ids outside the vocabulary bring SGLang's scheduler down, and all with it (0.5.23)."""
    engine.restart_at = float("inf")
    _stall(engine, POISON_SECONDS)


def abort(engine: "SimEngine", rid: str | None) -> None:
    """Abort running generations by their request id, or all of them.

    An id that nobody has is dropped; one that somebody has takes along every id that begins with
    it (SGLang 0.5.23; sglang #30912).
    """
    named = [one for one in engine.running if rid is None or one.job.rid == rid]
    for running in list(engine.running) if named else ():
        if rid is None or running.job.rid.startswith(rid):
            engine.aborted.append(running.job.rid)
            running.abort()


def _meet_all(engine: "SimEngine", fate: Fate, *, after_seconds: float = 0.0) -> None:
    for running in engine.running:
        running.meet(fate, after_seconds=after_seconds)


def _end_idle_connections(engine: "SimEngine") -> None:
    for connection in engine.connections:
        if connection.is_idle:
            connection.scope.cancel("the server shuts down")


def _refuse(engine: "SimEngine", fault: Fault) -> None:
    engine.plan((0, Mode.REFUSING))


def _freeze(engine: "SimEngine", fault: Fault) -> None:
    engine.plan((0, Mode.FROZEN))


def _core_dies(engine: "SimEngine", fault: Fault) -> None:
    _meet_all(engine, Fate.ERROR)
    engine.plan((0, Mode.CORE_DEAD), (_CORE_TO_EXIT_SECONDS, Mode.GONE))


def _server_dies(engine: "SimEngine", fault: Fault) -> None:
    for connection in engine.connections:
        connection.ends_with_reset = fault.flag("reset")
    engine.plan((0, Mode.GONE))


def _sigterm_abort(engine: "SimEngine", fault: Fault) -> None:
    _meet_all(engine, Fate.ABORT)
    engine.plan((0, Mode.REFUSING), (_EXIT_SECONDS, Mode.GONE))
    _end_idle_connections(engine)


def _sigterm_hang(engine: "SimEngine", fault: Fault) -> None:
    _meet_all(engine, Fate.HANG)
    # Until somebody kills it; a restart does.
    engine.plan((0, Mode.REFUSING), (engine.restart_at - trio.current_time(), Mode.GONE))
    _end_idle_connections(engine)


def _sigterm_drain(engine: "SimEngine", fault: Fault) -> None:
    _meet_all(engine, Fate.ABORT, after_seconds=fault.seconds("timeout"))
    engine.begin_drain(Mode.DRAINING)


def _sglang_drain(engine: "SimEngine", fault: Fault) -> None:
    engine.begin_drain(Mode.LAME)


def _scheduler_dies(engine: "SimEngine", fault: Fault) -> None:
    _stall(engine, fault.seconds("stall"))


def _stall(engine: "SimEngine", seconds: float) -> None:
    _meet_all(engine, Fate.HANG)
    engine.plan((0, Mode.FROZEN), (seconds, Mode.GONE))


_DEATHS: dict[str, Callable[["SimEngine", Fault], None]] = {
    "refuse": _refuse,
    "freeze": _freeze,
    "core_dies": _core_dies,
    "server_dies": _server_dies,
    "sigterm_abort": _sigterm_abort,
    "sigterm_hang": _sigterm_hang,
    "sigterm_drain": _sigterm_drain,
    "sglang_drain": _sglang_drain,
    "scheduler_dies": _scheduler_dies,
}
