"""What must hold of a request behind a bad wire, whatever the wire and its agents do."""

from collections.abc import Callable, Mapping
from enum import Enum

from statemachines.handback import HANDBACK
from statemachines.handback import HandbackState as H
from statemachines.leg import LegState as L
from statemachines.request import REQUEST
from statemachines.request import RequestState as S
from statemachines.worlds.wire_state import World

__all__ = ["ALWAYS", "BETWEEN", "EVENTUALLY", "SOMETIMES", "WHENEVER"]

ATTEMPT = REQUEST.scopes["attempt"]


def _heard(world: World) -> int:
    return sum(each.is_heard for each in world.attempts)


def _computing(world: World) -> int:
    return sum(each.computes for each in world.attempts)


def _given_up(world: World) -> bool:
    """Some engine computes, and nobody hears what."""
    return any(each.computes and not each.is_heard for each in world.attempts)


def _is_awaited(world: World, agent: H) -> bool:
    """The router waits for an agent that is done, and in this way."""
    return any(each.is_heard and each.agent is agent for each in world.attempts)


def _given(world: World) -> tuple[Enum, int, list[Enum]]:
    """What the client has, and what the router has made of it."""
    return world.state, world.tokens, [each.leg for each in world.attempts]


def _handed_back(world: World) -> int:
    return sum(each.leg is L.HANDED_BACK for each in world.attempts)


def _comes_unheard(world: World, word: str) -> bool:
    """A frame comes of an attempt that was given up, or one that has come before."""
    kind, _, rest = word.partition(" ")
    if kind not in ("head", "data", "done", "notice", "error") or " is lost" in word:
        return False
    number, _, place, *_ = rest.split()
    attempt = world.attempts[int(place) - 1]
    return not attempt.is_heard or int(number) < attempt.expected


ALWAYS: Mapping[str, Callable[[World], bool]] = {
    "no token comes to the client twice": lambda w: not w.had_token_twice,
    "no token is passed over": lambda w: not w.missed_token,
    "of all agents that compute for it the client hears one at most": lambda w: _heard(w) <= 1,
    "no leg outlives its attempt, and no attempt its leg": lambda w: (
        _heard(w) == (w.state in ATTEMPT)
    ),
    "what was cancelled before it came never reaches an engine": lambda w: (
        not any(each.is_unwanted and each.computes for each in w.attempts)
    ),
    "it is handed back once by whoever hands it back": lambda w: (
        w.returns <= sum(each.agent is H.HANDED_BACK or each.is_killed for each in w.attempts)
    ),
    "an agent that is over holds no engine": lambda w: all(
        each.holds_engine is (each.agent in HANDBACK.open and not each.is_killed)
        for each in w.attempts
    ),
    "only what its router will continue is handed back": lambda w: all(
        each.is_movable or each.agent is not H.HANDED_BACK for each in w.attempts
    ),
    "no budget is overdrawn": lambda w: min(w.retries, w.moves, w.agents, w.faults) >= 0,
}

BETWEEN: Mapping[str, Callable[[World, str, World], bool]] = {
    "a frame that comes late or again changes nothing": lambda w, word, after: (
        not _comes_unheard(w, word) or _given(after) == _given(w)
    ),
    "whatever agents and messages to them do, the client has what it has": lambda w, word, after: (
        not word.startswith(("agent", "engine", "window", "a token", "cancel"))
        or _given(after) == _given(w)
    ),
    "a lost message costs nothing at once": lambda w, word, after: (
        " is lost" not in word or _given(after) == _given(w)
    ),
    "a notice spends no retry, and fails nothing that has received nothing": (
        lambda w, word, after: (
            not (w.state is S.DISPATCHING and _handed_back(after) > _handed_back(w))
            or (after.state in (S.QUEUED, S.DISPATCHING) and after.retries == w.retries)
        )
    ),
    "with moves left, whatever is missing fails no stream": lambda w, word, after: (
        w.state not in (S.COMMITTED, S.STREAMING, S.RESUMING)
        or not w.can_migrate
        or not w.is_faithful
        or after.state is not S.FAILED
    ),
    "with retries left, whatever is missing fails nothing that has received nothing": (
        lambda w, word, after: (
            w.state is not S.DISPATCHING or not w.retries or after.state is not S.FAILED
        )
    ),
}  # fmt: skip

SOMETIMES: Mapping[str, Callable[[World], bool]] = {
    "a stream is handed back and finishes elsewhere": lambda w: (
        w.state is S.FINISHED and w.returns > 0 and w.attempts[-1].carried > 0
    ),
    "a notice is lost, and the stream finishes all the same": lambda w: (
        w.state is S.FINISHED and w.notice_was_lost and w.returns == 0
    ),
    "a hole is found, and the stream finishes elsewhere": lambda w: (
        w.state is S.FINISHED and w.had_gap and w.attempts[-1].carried > 0
    ),
    "two agents compute for it at once": lambda w: _computing(w) == 2,
    "a cancel frees an engine that is at work": lambda w: any(
        each.agent is H.CANCELLED and not each.is_unwanted for each in w.attempts
    ),
    "a cancel overtakes its request": lambda w: any(
        each.is_unwanted and each.agent is H.CANCELLED for each in w.attempts
    ),
    "a killed agent's stream finishes elsewhere": lambda w: (
        w.state is S.FINISHED and any(each.is_killed for each in w.attempts)
    ),
    "a request is sent to an agent that is not there, and finishes elsewhere": lambda w: (
        w.state is S.FINISHED and w.returns > 0 and any(each.is_killed for each in w.attempts)
    ),
    "what cannot move is not handed back": lambda w: (
        w.state is S.FAILED and any(each.agent is H.FAILED for each in w.attempts)
    ),
}

EVENTUALLY: Mapping[str, Callable[[World], bool]] = {
    "it is over, whatever the wire does": lambda w: w.state in REQUEST.final,
    "nobody computes for it any more": lambda w: w.state in REQUEST.final and not _computing(w),
}

WHENEVER: Mapping[str, tuple[Callable[[World], bool], Callable[[World], bool]]] = {
    "whoever computes for nobody stops": (_given_up, lambda w: not _given_up(w)),
    "a hand-back is heard, or missed as silence": (
        lambda w: _is_awaited(w, H.HANDED_BACK),
        lambda w: not _is_awaited(w, H.HANDED_BACK),
    ),
    "an agent that was killed is not waited for": (
        lambda w: any(each.is_killed and each.is_heard for each in w.attempts),
        lambda w: not any(each.is_killed and each.is_heard for each in w.attempts),
    ),
    "a client that left has nobody compute for it": (
        lambda w: w.state is S.ABANDONED,
        lambda w: not _computing(w),
    ),
}
