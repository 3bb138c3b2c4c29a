"""How well an engine is, and how that changes with time.

A death is a short schedule of modes: the core is dead now, the process is gone in two
seconds, it serves again in ten. The schedule is read against the clock instead of being
driven by a task, so it holds under virtual time and outlives every connection.
"""

from enum import Enum

import trio
from attrs import define, field


class Mode(Enum):
    """What an engine is doing with connections, probes and new work (vLLM 0.32, SGLang 0.5.23)."""

    #: Everything is well.
    SERVING = "serving"
    #: The listener is closed; what is connected goes on.
    REFUSING = "refusing"
    #: Connections are accepted by the kernel, and nobody reads them.
    FROZEN = "frozen"
    #: vLLM's API server without its engine core.
    CORE_DEAD = "core_dead"
    #: vLLM after SIGTERM with a shutdown timeout: probes do not show it.
    DRAINING = "draining"
    #: SGLang after SIGTERM: probes show it, and work is still taken.
    LAME = "lame"
    #: The process is gone.
    GONE = "gone"

    @property
    def refuses(self) -> bool:
        return self in (Mode.REFUSING, Mode.GONE)

    @property
    def answers(self) -> bool:
        return self is not Mode.FROZEN

    @property
    def health(self) -> int:
        return 503 if self in (Mode.CORE_DEAD, Mode.LAME) else 200

    @property
    def error(self) -> str | None:
        """What new work is told with a 500; None if it is taken."""
        return _ERRORS.get(self)


_ERRORS = {
    Mode.CORE_DEAD: "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    Mode.DRAINING: "cannot schedule new futures after shutdown",
}


@define(eq=False)
class Schedule:
    """The modes to come, by Trio's clock. Without entries the engine serves."""

    _changes: list[tuple[float, Mode]] = field(factory=list)
    _changed: trio.Event = field(factory=trio.Event)

    def set(self, *changes: tuple[float, Mode]) -> None:
        """Replace what was planned; times are seconds from now."""
        now = trio.current_time()
        self._changes = [(now + delay, mode) for delay, mode in changes]
        self._changed.set()
        self._changed = trio.Event()

    @property
    def mode(self) -> Mode:
        now = trio.current_time()
        past = [mode for at, mode in self._changes if at <= now]
        return past[-1] if past else Mode.SERVING

    def next_time_of(self, mode: Mode) -> float:
        """When this mode begins, if that is still to come; else infinity."""
        now = trio.current_time()
        coming = (at for at, planned in self._changes if planned is mode and at > now)
        return next(coming, float("inf"))

    async def wait_changed(self) -> None:
        """Wait until the mode may be another: a new plan, or the next planned time."""
        now = trio.current_time()
        coming = [at for at, _ in self._changes if at > now]
        with trio.move_on_at(min(coming, default=float("inf"))):
            await self._changed.wait()
