"""What is remembered of a leg, whatever it met on its way."""

from __future__ import annotations

import attrs
import pytest

from router.breaker import Permit
from router.config import Settings
from router.headers import Headers
from router.legs import Leg, LegListener
from router.traces import Trace
from router.worker import Fleet
from router.workerspec import WorkerSpec
from statemachines import LEG, Edge
from statemachines.leg import LegState

S = LegState
LOST = {S.BROKEN, S.PUSHED_BACK, S.CRASHED}


class Bug(Exception):
    """Of ours."""


class Around:
    """Owner and observer of a leg; everything that breaks it is the end of it."""

    def now(self) -> float:
        return 2.0

    def leg_settled(self, leg: Leg, outcome: str) -> None: ...

    def on_leg_head(self, leg: Leg, status: int, headers: Headers) -> None: ...

    def on_leg_end(self, leg: Leg) -> None: ...

    def on_leg_broken(self, leg: Leg, detail: str, *, connecting: bool) -> None: ...

    def on_leg_handed_back(self, leg: Leg) -> None: ...

    def on_leg_full(self, leg: Leg) -> None: ...

    def on_leg_too_large(self, leg: Leg, limit: int) -> None: ...

    def on_leg_unread(self, leg: Leg) -> None: ...

    def on_leg_missed(self, leg: Leg, detail: str) -> None: ...

    def on_crash(self, error: Exception) -> None: ...


def begun(*listeners: LegListener) -> Leg:
    worker = Fleet(Settings()).add(WorkerSpec.of("http://127.0.0.1:1"))
    permit = Permit(worker.breaker, 0)
    around = Around()
    return Leg(
        id="7f3a.1",
        worker=worker,
        role="mixed",
        permit=permit,
        owner=around,
        observer=around,
        listeners=listeners,
        now=1.0,
    )


#: How to get there.
WAYS = {
    S.CONNECTING: (),
    S.WAITING: ("connected",),
    S.ANSWERING: ("connected", "head_arrived"),
    S.STREAMING: ("connected", "head_arrived", "first_token"),
}
ENDS = [
    (state, fact, edge.target)
    for state in WAYS
    for fact in LEG.facts
    for edge in LEG.legal(state, fact)
    if edge.target in LEG.final
]


@pytest.mark.parametrize(("state", "fact", "target"), ENDS)
def test_a_leg_that_has_ended_is_remembered_as_it_ended_whoever_fails(
    state: LegState, fact: str, target: LegState
) -> None:
    def fail(_leg: Leg, taken: Edge) -> None:
        if taken.target in LEG.final:
            raise Bug

    leg = begun(fail)
    for each in WAYS[state]:
        leg.fire(each)

    with pytest.raises(Bug):
        leg.fire(fact)

    trace = leg.trace
    assert (trace.fact, trace.state, trace.ended_at) == (fact, target, 2.0)


def test_an_illegal_fact_changes_nothing_that_is_remembered() -> None:
    leg = begun()
    leg.fire("broke")

    with pytest.raises(Exception, match="completed in broken"):
        leg.fire("completed")

    assert (leg.trace.fact, leg.trace.state) == ("broke", S.BROKEN)


@pytest.mark.parametrize("state", list(S))
def test_a_leg_is_lost_by_how_it_ended_or_because_it_was_in_vain(state: LegState) -> None:
    plain = Trace("w0", "mixed", 0.0, state=state, detail="something")
    in_vain = Trace("w0", "mixed", 0.0, state=state, was_in_vain=True)

    assert plain.is_lost == (state in LOST)
    assert in_vain.is_lost


def test_what_was_met_first_is_the_cause() -> None:
    leg = begun()
    leg.trace.meet("")

    leg.on_broken("the worker closed the connection", connecting=False)
    leg.on_missed("a frame came out of turn")

    assert leg.trace.detail == "the worker closed the connection"


def test_a_bug_of_ours_is_told_as_one() -> None:
    leg = begun()

    leg.on_crash(Bug())

    assert (leg.trace.fact, leg.trace.is_lost) == ("bug", True)
    assert leg.trace.detail.startswith("a bug of Baton's")


def test_a_trace_keeps_words_and_numbers_only() -> None:
    """It is kept for as long as its request is remembered, and nothing may hang on it."""
    leg = begun()
    leg.on_connected()
    leg.on_head(500, [(b"content-type", b"text/plain")])
    leg.on_broken("the worker closed the connection", connecting=False)
    leg.fire("broke")

    kept = attrs.asdict(leg.trace).values()
    assert all(isinstance(each, str | int | float | None) for each in kept)
    assert not hasattr(leg.trace, "__dict__")
