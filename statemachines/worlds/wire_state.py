"""The world of a request behind a bad wire: what its router, the wire and its agents hold."""

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Literal, NamedTuple

from attrs import evolve, frozen

from statemachines.handback import HANDBACK, LAST_FRAMES
from statemachines.handback import HandbackState as H
from statemachines.leg import LEG
from statemachines.request import RequestState as S

__all__ = [
    "FAULTS",
    "Attempt",
    "Without",
    "World",
    "faulty",
    "is_busy",
    "last_frame",
    "place_of",
    "says",
    "show",
    "uncancelled",
    "with_attempt",
]

#: Messages that are lost, come twice or too early; engines that break; agents that are killed.
FAULTS = 1


class Without(StrEnum):
    """A part of the protocol that a router or an agent could lack."""

    NOTHING = "nothing"
    NUMBERS = "the numbers of frames"
    CLOSED_INBOXES = "an inbox of its own for each attempt"
    TOMBSTONES = "the memory of cancels that came first"
    REPETITION = "the repetition of cancels"
    SILENCE = "the end of the router's patience"


class Attempt(NamedTuple):
    """One attempt, as its router, the wire and its agent have it."""

    leg: Enum
    #: The router has promised to continue what is handed back.
    is_movable: bool = False
    #: Tokens that the client had when it was sent.
    carried: int = 0
    #: The number of the next frame, for the router and for the agent.
    expected: int = 0
    sent: int = 0
    #: On their way: the request, its cancel, and the numbers of frames.
    has_request: bool = True
    has_cancel: bool = False
    flying: tuple[int, ...] = ()
    #: None: the agent has not got it.
    agent: Enum | None = None
    #: It has a connection to its engine: what lives in the scope of the chart.
    holds_engine: bool = False
    is_killed: bool = False
    #: A cancel came before the request did.
    is_unwanted: bool = False

    @property
    def is_heard(self) -> bool:
        return self.leg in LEG.open

    @property
    def computes(self) -> bool:
        """Its engine is at it."""
        return self.holds_engine and not self.is_killed and self.agent in (H.ASKING, H.STREAMING)

    def kind(self, frame: int) -> str:
        """What a frame is, by its number."""
        if self.agent is not None and frame == self.sent - 1:
            last = last_frame(self.agent)
            if last != "none":
                return last
        return "data" if frame else "head"


def place_of(frame: int, expected: int) -> Literal["next", "again", "gap"]:
    """What a frame of this number is to a router that expects that one."""
    if frame == expected:
        return "next"
    return "again" if frame < expected else "gap"


def last_frame(agent: Enum) -> str:
    return LAST_FRAMES[agent] if isinstance(agent, H) and agent in LAST_FRAMES else "none"


@frozen(cache_hash=True)
class World:
    #: Any other client stays to the end.
    may_leave: bool
    #: An answer of this shape could be continued elsewhere.
    is_faithful: bool
    #: That have not been asked.
    agents: int
    state: Enum
    moves: int = 1
    retries: int = 1
    faults: int = FAULTS
    attempts: tuple[Attempt, ...] = ()
    #: Tokens that the client has.
    tokens: int = 0

    # Ghosts
    had_token_twice: bool = False
    missed_token: bool = False
    #: How often the request was told that it was handed back.
    returns: int = 0
    notice_was_lost: bool = False
    had_gap: bool = False

    @property
    def can_migrate(self) -> bool:
        return self.moves > 0 and self.agents > 0

    @property
    def answer_began(self) -> bool:
        return self.state in (S.COMMITTED, S.STREAMING, S.POISONED)


def with_attempt(world: World, place: int, attempt: Attempt) -> World:
    attempts = world.attempts
    return evolve(world, attempts=(*attempts[:place], attempt, *attempts[place + 1 :]))


def uncancelled(world: World, place: int) -> World:
    """Whoever is done with it, or not there, hears no cancel."""
    return with_attempt(world, place, world.attempts[place]._replace(has_cancel=False))


def faulty(world: World) -> World:
    return evolve(world, faults=world.faults - 1)


def says(attempt: Attempt) -> Attempt:
    """One more frame is on its way."""
    return attempt._replace(sent=attempt.sent + 1, flying=(*attempt.flying, attempt.sent))


def is_busy(attempt: Attempt) -> bool:
    """Something of it is on its way, or its agent is at it."""
    at_work = attempt.agent in HANDBACK.open and not attempt.is_killed
    return bool(attempt.has_request or attempt.has_cancel or attempt.flying or at_work)


def show(world: World) -> Mapping[str, str]:
    """The columns of a printed path."""
    return {
        "request": str(world.state.value),
        "tokens": str(world.tokens),
        "legs": ", ".join(each.leg.value for each in world.attempts),
        "agents": ", ".join(_agent_shown(each) for each in world.attempts),
        "moves": str(world.moves),
        "faults left": str(world.faults),
    }


def _agent_shown(attempt: Attempt) -> str:
    if attempt.is_killed:
        return "killed"
    return "-" if attempt.agent is None else str(attempt.agent.value)
