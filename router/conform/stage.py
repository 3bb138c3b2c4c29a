"""What a case can see and do: the engines, the router's front door, and clients.

A `Place` is where it happens: sockets of the loopback with the router as a process, or memory and
virtual time. Everything waits for conditions with a bound, so that a slow machine makes a case
slow and not wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import trio
from attrs import define, field, frozen

from router.conform.heard import CHAT, LOOK_SECONDS, Ask, Heard, converse
from router.sim import tokens
from router.sim.engine import SimEngine
from router.sim.running import Running
from router.sim.settings import EngineKind, Role
from router.sim.wire import Received

PATIENCE_SECONDS = 30.0


class Failed(Exception):
    """The router did not do what the case expects; the message is the reason, in one line."""


class NotServing(Exception):
    """The router did not begin to serve; the message says what is known of it, in one line."""


class NotApplicable(Exception):
    """The case has no meaning for this router; the message says why."""


@frozen
class Actor:
    """One simulated engine of a case; its faults come once the router serves."""

    faults: str = ""
    role: Role = "mixed"
    model: str = "tiny"
    token_seconds: float = 0.02


@frozen
class Seat:
    """An engine where the router can reach it."""

    url: str
    role: Role
    bootstrap_port: int = 0


@frozen
class Order:
    """How the router is to be started: for which engines, with which knobs."""

    seats: tuple[Seat, ...]
    knobs: Mapping[str, str]
    engine: EngineKind


class Router(Protocol):
    """A router that runs."""

    ready_path: str | None
    """Where it says whether it can serve; None where it has no such thing."""

    async def connect(self) -> trio.abc.Stream:
        """A new connection; raises OSError."""

    def terminate(self) -> None:
        """Ask it to stop, as SIGTERM does."""

    async def wait_exited(self) -> None:
        """Return when it is gone."""

    def last_words(self) -> str:
        """How it ended, and the last it said; once it is gone."""


class Place(Protocol):
    """Where engines and routers run."""

    async def host(self, engine: SimEngine) -> str:
        """Let an engine serve until the place ends; its URL."""

    async def connect(self, url: str) -> trio.abc.Stream:
        """A connection to an engine; raises OSError."""

    async def launch(self, order: Order) -> Router:
        """Start the router; it need not serve yet."""


@define(eq=False)
class Stage:
    """One case while it runs."""

    place: Place
    router: Router
    engines: list[SimEngine]
    model_engine: str
    """Where an engine without faults and without haste is."""
    heard: list[Heard] = field(factory=list)

    async def ask(
        self,
        ask: Ask | None = None,
        *,
        patience: float = PATIENCE_SECONDS,
        leave_when: Callable[[Heard], bool] | None = None,
        heard: Heard | None = None,
    ) -> Heard:
        """A client with a connection of its own asks the router; never raises.

        It leaves when `leave_when` says so; `heard` shows meanwhile what has come.
        """
        heard = Heard() if heard is None else heard
        try:
            stream = await self.router.connect()
        except OSError:
            heard.ending = "refused"
            return heard
        await converse(stream, ask or Ask(), heard, patience=patience, leave_when=leave_when)
        return heard

    async def ask_directly(self, ask: Ask | None = None) -> Heard:
        """What a well engine says to it, without a router."""
        heard = Heard()
        stream = await self.place.connect(self.model_engine)
        await converse(stream, ask or Ask(), heard, patience=PATIENCE_SECONDS)
        if not heard.is_whole:
            raise Failed(f"the simulated engine itself does not answer this ({heard.summary})")
        return heard

    async def get(self, path: str) -> Heard:
        """Ask the router itself."""
        return await self.ask(Ask(method="GET", path=path), patience=20.0)

    def asked(self, place: int) -> list[Received]:
        """Generations that an engine was asked for since the router serves."""
        return [one for one in self.engines[place].requests if one.path == CHAT]

    @property
    def running(self) -> int:
        """Generations that run now, on all engines."""
        return sum(engine.inflight for engine in self.engines)

    @property
    def generating(self) -> int:
        """Of these, the ones that have tokens to come: one that has ended is let go a bit later."""
        return sum(self.generating_at(place) for place in range(len(self.engines)))

    def generating_at(self, place: int) -> int:
        """The same on one engine."""
        return sum(map(_goes_on, self.engines[place].running))

    def works_on(self, prompt: str) -> bool:
        """Whether an engine has tokens to come of an answer to this prompt."""
        each = [one for engine in self.engines for one in engine.running]
        return any(_goes_on(one) and prompt in tokens.decode(one.job.prompts[0]) for one in each)

    def must_have_asked(self, places: Collection[int], heard: Heard) -> None:
        """Raises Failed where none of these engines was asked: what they do was not tried then."""
        if not any(self.asked(place) for place in places):
            names = " or ".join(str(place + 1) for place in places)
            raise Failed(f"engine {names} was never asked; the client got: {heard.summary}")

    async def until(self, holds: Callable[[], bool], seconds: float, otherwise: str) -> None:
        """Wait for a condition; raises Failed with the reason when it does not come."""
        with trio.move_on_after(seconds) as waiting:
            while not holds():  # noqa: ASYNC110  # it is other processes that are looked at
                await trio.sleep(LOOK_SECONDS)
        if waiting.cancelled_caught:
            raise Failed(otherwise)


def _goes_on(one: Running) -> bool:
    return any(choice.finish is None for choice in one.choices)
