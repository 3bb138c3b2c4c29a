"""What is remembered of each leg of a request, for whoever asks why it went as it did.

A trace outlives its leg by as long as its request is remembered, so it holds words and numbers
only: nothing of a prompt or an answer, and no connection.
"""

from __future__ import annotations

from attrs import define

from statemachines.leg import LegState

#### What is met by single workers and by both halves of a pair, in words for people

GAVE_UP = "a finish by which the engine gave up"
UNREACHED = "silent, and nobody reaches its worker"
UNREADABLE = "not what its content-encoding says"


def error_event(status: int) -> str:
    return f"an error event of status {status}"


def error_in_body(status: int) -> str:
    return f"an error of status {status} in its body"


def no_first_token(seconds: float) -> str:
    return f"no first token within {seconds:g} s"


#### The trace

#: A leg in these states has cost its request an attempt, or more.
_LOST = frozenset({LegState.BROKEN, LegState.PUSHED_BACK, LegState.CRASHED})


@define(eq=False)
class Trace:
    """One leg: its worker, its last fact, and what was met there."""

    worker: str
    role: str
    #: Moments on Trio's clock (seconds).
    began_at: float
    ended_at: float | None = None
    state: LegState = LegState.CONNECTING
    #: The last fact of the leg chart; of a leg that is over, the one that ended it.
    fact: str | None = None
    #: The HTTP status, once the head is there.
    status: int | None = None
    #: In our own words, what stood behind the fact; empty where the fact says it all.
    detail: str = ""
    #: It was only let go, but because nothing could come of it: nobody was there, say.
    was_in_vain: bool = False

    @property
    def is_lost(self) -> bool:
        """It has cost its request an attempt, and not by the fault of whoever asked."""
        return self.was_in_vain or self.state in _LOST

    def meet(self, detail: str) -> None:
        """What is met first is the cause: what comes after it follows from it."""
        self.detail = self.detail or detail

    def shown(self, started_at: float) -> dict[str, object]:
        """For JSON; times are counted from the beginning of the request (seconds)."""
        ended_at = self.ended_at
        return {
            "worker": self.worker,
            "role": self.role,
            "began": round(self.began_at - started_at, 6),
            "ended": None if ended_at is None else round(ended_at - started_at, 6),
            "state": self.state.value,
            "fact": self.fact,
            "status": self.status,
            "detail": self.detail or None,
        }
