"""A generation in progress, and what may happen to it from outside."""

from enum import Enum

import trio
from attrs import define, field

from router.sim.decoding import Choice
from router.sim.jobs import Job


class Fate(Enum):
    """How a generation ends before its time."""

    #: It finishes as aborted.
    ABORT = "abort"
    #: An error takes its place: an event in a stream, a 500 as a whole answer.
    ERROR = "error"
    #: Nothing more comes, and the connection stays.
    HANG = "hang"


@define(eq=False)
class Running:
    """One generation. Waiting for its tokens ends early when a fate meets it."""

    job: Job
    choices: list[Choice]
    fate: Fate | None = field(default=None, init=False)
    _fated_at: float = field(default=float("inf"), init=False)
    _scope: trio.CancelScope | None = field(default=None, init=False)

    @property
    def is_fated(self) -> bool:
        return self.fate is not None and trio.current_time() >= self._fated_at

    def meet(self, fate: Fate, *, after_seconds: float = 0.0) -> None:
        """Let this fate come; the first one to be due wins."""
        at = trio.current_time() + after_seconds
        if at >= self._fated_at:
            return
        self.fate, self._fated_at = fate, at
        if self._scope is not None:
            self._scope.deadline = at

    async def wait(self, seconds: float) -> None:
        """The time until the next token, or until a fate."""
        if seconds <= 0:
            await trio.lowlevel.checkpoint()
            return
        with trio.CancelScope(deadline=self._fated_at) as self._scope:
            await trio.sleep(seconds)
        self._scope = None
