"""A generation in progress, and what may happen to it from outside."""

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum

import trio
from attrs import define, field

from router.sim.decoding import Choice
from router.sim.dialect import Trouble
from router.sim.jobs import Job, Json
from router.sim.model import Model


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
    trouble: Trouble | None = field(default=None, init=False)
    """What its error says, if it is not the engine's."""
    if_aborted: Trouble | None = field(default=None, init=False)
    """What an abort looks like while it waits for its other half; None: a finish."""
    handoff: Json | None = field(default=None, init=False)
    """What vLLM's prefill answers for its decode."""
    _fated_at: float = field(default=float("inf"), init=False)
    _scope: trio.CancelScope | None = field(default=None, init=False)
    _until: float = field(default=float("inf"), init=False)
    """The end of a pause that a fate would make shorter."""

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
            self._scope.deadline = min(at, self._until)

    @property
    def prompts(self) -> list[Sequence[int]]:
        """One for each sequence."""
        return [choice.prompt for choice in self.choices]

    def take_over(self, place: int, model: Model, cache: Sequence[int]) -> None:
        """Sequences go on from a cache that came from elsewhere."""
        way = 0 if self.job.greedy else place % self.job.n
        self.choices[place].take_over(model.start(cache, choice=way))

    def abort(self) -> None:
        """It is aborted from outside."""
        if self.if_aborted is None:
            self.meet(Fate.ABORT)
        else:
            self.fail(self.if_aborted)

    def fail(self, trouble: Trouble) -> None:
        """It ends with this error, now."""
        if self.fate is None or not self.is_fated:
            self.trouble = trouble
            self.meet(Fate.ERROR)

    async def until_fated(self, step: Callable[[], Awaitable[None]]) -> None:
        """Something that a fate interrupts."""
        with trio.CancelScope(deadline=self._fated_at) as self._scope:
            await step()
        self._scope = None

    async def wait(self, seconds: float) -> None:
        """The time until the next token, or until a fate."""
        if seconds <= 0:
            await trio.lowlevel.checkpoint()
            return
        self._until = trio.current_time() + seconds
        with trio.CancelScope(deadline=min(self._until, self._fated_at)) as self._scope:
            await trio.sleep_forever()
        self._scope, self._until = None, float("inf")
