"""The breaker: what opens it, what closes it, and that every permit comes back once."""

from __future__ import annotations

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from router.breaker import Breaker, Permit
from statemachines import Edge, worlds
from statemachines.breaker import BreakerState
from statemachines.graph import Graph
from statemachines.leg import VERDICTS, LegState, Verdict
from statemachines.worlds.breaker import World


def make_breaker(threshold: int = 3) -> Breaker:
    return Breaker(id="w1", threshold=threshold, cooldown_secs=5.0, max_cooldown_secs=60.0)


def send(breaker: Breaker, verdict: Verdict, now: float = 0.0) -> None:
    permit = breaker.try_acquire(now)
    assert permit is not None
    permit.close(verdict, now)


def opened(now: float = 0.0) -> Breaker:
    breaker = make_breaker()
    for _ in range(3):
        send(breaker, "failure", now)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = make_breaker()

    send(breaker, "failure")
    send(breaker, "failure")
    still_closed = breaker.state
    send(breaker, "failure")

    assert still_closed is BreakerState.CLOSED
    assert breaker.state is BreakerState.OPEN
    assert breaker.try_acquire(4.9) is None


def test_a_success_ends_the_streak() -> None:
    breaker = make_breaker()

    for verdict in ("failure", "failure", "success", "failure", "failure"):
        send(breaker, verdict)

    assert breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize(
    "end", [LegState.REFUSED, LegState.PUSHED_BACK, LegState.HANDED_BACK, LegState.CLOSED]
)
def test_what_is_not_the_workers_fault_never_opens_it(end: LegState) -> None:
    breaker = make_breaker()

    for _ in range(10):
        send(breaker, VERDICTS[end])

    assert breaker.state is BreakerState.CLOSED


def test_client_errors_do_not_hide_a_run_of_failures() -> None:
    breaker = make_breaker()

    broken, refused = LegState.BROKEN, LegState.REFUSED
    for end in (broken, refused, broken, refused, broken):
        send(breaker, VERDICTS[end])

    assert breaker.state is BreakerState.OPEN


def test_threshold_zero_turns_it_off() -> None:
    breaker = make_breaker(threshold=0)

    for _ in range(100):
        send(breaker, "failure")

    assert breaker.state is BreakerState.CLOSED


def test_half_open_lets_one_request_through() -> None:
    breaker = opened()

    probe = breaker.try_acquire(5.0)
    second = breaker.try_acquire(5.0)

    assert probe is not None
    assert second is None
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_good_probe_closes_it_and_forgets_the_long_cooldown() -> None:
    breaker = opened()
    send(breaker, "failure", 5.0)

    send(breaker, "success", 15.0)
    for _ in range(3):
        send(breaker, "failure", 20.0)

    assert breaker.cools_at == 25.0


def test_the_cooldown_doubles_up_to_its_maximum() -> None:
    breaker = opened()
    waits = []

    for _ in range(6):
        now = breaker.cools_at
        send(breaker, "failure", now)
        waits.append(breaker.cools_at - now)

    assert waits == [10.0, 20.0, 40.0, 60.0, 60.0, 60.0]


def test_a_neutral_probe_lets_the_next_request_probe() -> None:
    breaker = opened()

    send(breaker, "neutral", 5.0)

    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.try_acquire(5.0) is not None


def test_a_probe_that_streams_for_long_does_not_keep_the_worker_out() -> None:
    breaker = opened()
    long_stream = breaker.try_acquire(5.0)

    too_early = breaker.try_acquire(9.9)
    next_probe = breaker.try_acquire(10.0)

    assert long_stream is not None
    assert too_early is None
    assert next_probe is not None


def test_the_end_of_an_overdue_probe_does_not_return_the_latest() -> None:
    breaker = opened()
    overdue, latest = breaker.try_acquire(5.0), breaker.try_acquire(10.0)
    assert overdue is not None
    assert latest is not None

    overdue.close("neutral", 11.0)
    while_the_latest_is_out = breaker.try_acquire(11.0)
    latest.close("neutral", 11.0)

    assert while_the_latest_is_out is None
    assert breaker.try_acquire(11.0) is not None


def test_closing_a_permit_again_does_nothing() -> None:
    breaker = make_breaker()
    permit = breaker.try_acquire(0.0)
    assert permit is not None

    for _ in range(5):
        permit.close("failure", 0.0)

    assert breaker.failures == 1


def test_a_probe_closed_twice_does_not_return_the_probe_of_another() -> None:
    breaker = opened()
    first = breaker.try_acquire(5.0)
    assert first is not None
    first.close("neutral", 5.0)
    breaker.try_acquire(5.0)

    first.close("neutral", 5.0)

    assert breaker.try_acquire(5.0) is None


def test_failures_of_requests_sent_before_it_opened_change_nothing() -> None:
    breaker = make_breaker()
    permits = [breaker.try_acquire(0.0) for _ in range(5)]
    for permit in permits:
        assert permit is not None
        permit.close("failure", 1.0)

    assert breaker.cools_at == 6.0
    assert breaker.failures == 3


def test_an_old_failure_does_not_reopen_what_a_probe_has_closed() -> None:
    breaker = make_breaker(threshold=1)
    old = breaker.try_acquire(0.0)
    send(breaker, "failure", 0.0)
    send(breaker, "success", 5.0)
    assert old is not None

    old.close("failure", 6.0)

    assert breaker.state is BreakerState.CLOSED


def test_a_forced_success_closes_it_before_the_cooldown_is_over() -> None:
    breaker = opened()

    breaker.acquire_anyway(1.0).close("success", 2.0)

    assert breaker.state is BreakerState.CLOSED


def test_a_forced_failure_does_not_prolong_the_cooldown() -> None:
    breaker = opened()

    breaker.acquire_anyway(4.0).close("failure", 4.5)

    assert breaker.cools_at == 5.0
    assert breaker.try_acquire(5.0) is not None


def test_its_moves_are_told() -> None:
    breaker = make_breaker()
    told: list[str] = []

    def listen(subject: Breaker, edge: Edge) -> None:
        told.append(f"{subject.id} {edge.source.value} {edge.fact} {edge.target.value}")

    breaker.listeners.append(listen)
    for _ in range(3):
        send(breaker, "failure")
    send(breaker, "success", 5.0)

    assert told == [
        "w1 closed failed closed",
        "w1 closed failed closed",
        "w1 closed failed open",
        "w1 open cooled_down half_open",
        "w1 half_open probe_succeeded closed",
    ]


@define
class InTheModelsWords:
    """A breaker that does what the model calls so, and says what the model would say of it."""

    breaker: Breaker = field(factory=lambda: make_breaker(threshold=2))
    now: float = 0.0
    permits: list[Permit] = field(factory=list)

    def do(self, word: str) -> None:
        if word == "cooldown over":
            self.now = max(self.now, self.breaker.cools_at)
        elif word in ("sent anyway", "probe permit taken", "plain permit taken"):
            had = self.breaker.try_acquire(self.now)
            assert (had is None) is (word == "sent anyway")
            self.permits.append(had or self.breaker.acquire_anyway(self.now))
            assert f"{self.called(self.permits[-1])} permit taken" == word or had is None
        else:
            called, verdict = word.split()
            permit = next(each for each in self.permits if self.called(each) == called)
            self.permits.remove(permit)
            permit.close(SAID[verdict], self.now)

    def called(self, permit: Permit) -> str:
        if permit.era != self.breaker.era:
            return "old"
        is_followed = permit.kind == "probe" and permit is not self.breaker.probe
        return "overdue" if is_followed else permit.kind

    def world(self) -> tuple[object, int, tuple[str, ...]]:
        called = tuple(sorted(map(self.called, self.permits)))
        return self.breaker.state, min(self.breaker.failures, 2), called


SAID: dict[str, Verdict] = {"succeeded": "success", "failed": "failure", "said_nothing": "neutral"}


def test_it_does_what_its_model_does_in_every_order() -> None:
    """Each step of the model, after the shortest way to where it is taken."""
    model = worlds.breaker()
    graph = Graph(model.starts, model.steps).complete()
    assert len(graph) > 200

    def told(world: World) -> tuple[object, int, tuple[str, ...]]:
        return world.state, world.failures, world.permits

    for number, world in enumerate(graph.worlds):
        way = graph.words_on(graph.way_to(number))[1:]
        for word, after in model.steps(world):
            real = InTheModelsWords()
            for each in way:
                real.do(each)
            assert real.world() == told(world), way
            real.do(word)
            assert real.world() == told(after), (way, word)


verdicts: list[Verdict] = ["success", "failure", "neutral"]
moves = st.one_of(st.sampled_from(["take", "force", "wait"]), st.sampled_from(verdicts))


def play(breaker: Breaker, plan: list[tuple[str, int]]) -> float:
    """Take, force and close permits as planned; returns the time at the end."""
    now = 0.0
    out: list[Permit] = []
    for move, which in plan:
        now += 10.0 if move == "wait" else 1.0
        if move == "take" and (permit := breaker.try_acquire(now)):
            out.append(permit)
        elif move == "force":
            out.append(breaker.acquire_anyway(now))
        for verdict in verdicts:
            if move == verdict and out:
                out[which % len(out)].close(verdict, now)
    return now


@settings(max_examples=50)
@given(st.lists(st.tuples(moves, st.integers(0, 7)), max_size=60), st.integers(0, 3))
def test_whatever_happens_it_lets_somebody_through_again(
    plan: list[tuple[str, int]], threshold: int
) -> None:
    breaker = make_breaker(threshold)

    end = play(breaker, plan)

    assert breaker.try_acquire(end + 60.0) is not None
