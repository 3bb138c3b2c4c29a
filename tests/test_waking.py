"""The waker and the sweeper: nothing is woken twice, nothing is forgotten, nobody spins."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from router.waking import Sweeper, Waker


@pytest.fixture
def autojump_clock() -> MockClock:
    return MockClock(autojump_threshold=0)


#### waker


async def test_waking_often_wakes_once() -> None:
    waker = Waker()
    woken: list[int] = []

    async def sleeper() -> None:
        for number in range(3):
            await waker.wait()
            woken.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleeper)
        await wait_all_tasks_blocked()
        waker.wake()
        await wait_all_tasks_blocked()
        assert woken == [0]
        for _ in range(5):
            waker.wake()
        await wait_all_tasks_blocked()
        # One for the parked task, and one kept for its next wait: never more.
        assert woken == [0, 1, 2]


async def test_a_wake_that_comes_before_the_wait_is_not_lost() -> None:
    waker = Waker()
    waker.wake()

    await waker.wait()

    with trio.move_on_after(0) as scope:
        await waker.wait()
    assert scope.cancelled_caught


@pytest.mark.parametrize("wakes_first", [True, False])
async def test_a_wake_and_a_cancellation_in_the_same_moment(wakes_first: bool) -> None:
    waker = Waker()
    scope = trio.CancelScope()

    async def sleeper() -> None:
        with scope:
            await waker.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleeper)
        await wait_all_tasks_blocked()
        if wakes_first:
            waker.wake()
            scope.cancel()
        else:
            scope.cancel()
            waker.wake()
        waker.wake()


async def test_a_wake_after_a_cancellation_wakes_nobody_and_is_kept() -> None:
    waker = Waker()
    with trio.move_on_after(0):
        await waker.wait()
    waker.wake()
    waker.wake()

    with trio.fail_after(0):
        await waker.wait()


async def test_a_task_that_is_gone_can_be_woken() -> None:
    waker = Waker()

    async def sleeper() -> None:
        await waker.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleeper)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    waker.wake()


async def test_an_error_is_raised_where_the_task_waits_and_the_first_one_counts() -> None:
    waker = Waker()
    raised: list[str] = []

    async def sleeper() -> None:
        try:
            await waker.wait()
        except ValueError as error:
            raised.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleeper)
        await wait_all_tasks_blocked()
        waker.throw(ValueError("first"))
        waker.throw(ValueError("second"))

    assert raised == ["first"]


async def test_an_error_thrown_before_the_wait_is_raised_by_it_once() -> None:
    waker = Waker()
    waker.throw(ValueError("early"))

    with pytest.raises(ValueError, match="early"):
        await waker.wait()
    waker.wake()
    await waker.wait()


#### sweeper


@define(eq=False)
class Clockwork:
    """Something with a deadline that may move."""

    answer: Callable[[float], float | None] = lambda now: None
    armed_at: float | None = None
    swept: list[float] = field(factory=list)
    crashes: list[Exception] = field(factory=list)

    def sweep(self, now: float) -> float | None:
        self.swept.append(round(now - START[0], 3))
        return self.answer(now)

    def crashed(self, error: Exception) -> None:
        self.crashes.append(error)


#: Virtual time begins anywhere.
START = [0.0]


def start(nursery: trio.Nursery, bugs: list[Exception] | None = None) -> Sweeper:
    """A sweeper driven as the reactor drives it, from second 0 on."""
    START[0] = trio.current_time()
    sweeper = Sweeper(_raise if bugs is None else bugs.append)

    async def drive() -> None:
        while True:
            await sweeper.wait()
            sweeper.sweep(trio.current_time())

    nursery.start_soon(drive)
    return sweeper


def at(seconds: float) -> float:
    return START[0] + seconds


async def test_it_sleeps_until_the_nearest_deadline(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    sweeper = start(nursery)
    late, early = Clockwork(), Clockwork()
    sweeper.arm(late, at(20))
    sweeper.arm(early, at(5))

    await trio.sleep(60)

    assert (early.swept, late.swept) == ([5], [20])


async def test_a_nearer_deadline_shortens_the_sleep(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    sweeper = start(nursery)
    timed = Clockwork()
    sweeper.arm(timed, at(60))
    await trio.sleep(1)
    sweeper.arm(timed, at(10))
    sweeper.arm(timed, at(30))  # later than it is armed: it will be looked at anyway

    await trio.sleep(100)

    assert timed.swept == [10]


async def test_a_deadline_that_moves_away_costs_one_look_for_each_span(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    sweeper = start(nursery)
    timed = Clockwork()
    last_event = [START[0]]

    def look(now: float) -> float | None:
        due = last_event[0] + 10
        return due if now < due else None

    timed.answer = look
    sweeper.arm(timed, at(10))
    for _ in range(300):
        await trio.sleep(0.1)
        last_event[0] = trio.current_time()  # nobody is told
    await trio.sleep(100)

    assert len(timed.swept) <= 5
    assert timed.swept[-1] == 40


async def test_an_answer_in_the_past_is_no_reason_to_spin(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    sweeper = start(nursery)
    stuck, other = Clockwork(), Clockwork()
    stuck.answer = lambda now: None if len(stuck.swept) > 50 else now
    sweeper.arm(stuck, at(5))
    sweeper.arm(other, at(5))
    seen: list[int] = []

    async def bystander() -> None:
        await trio.sleep_until(at(5))
        while len(stuck.swept) <= 50:
            seen.append(len(stuck.swept))
            await trio.lowlevel.checkpoint()

    with trio.fail_after(60):
        await bystander()

    assert len(set(seen)) > 10  # it was asked again and again, and others ran in between
    assert other.swept == [5]


async def test_a_look_that_crashes_is_told_to_its_owner_and_the_others_are_looked_at(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    sweeper = start(nursery)
    broken, sound = Clockwork(), Clockwork()
    error = ValueError("a bug")
    broken.answer = lambda _: _raise(error)
    sweeper.arm(broken, at(5))
    sweeper.arm(sound, at(5))

    await trio.sleep(10)

    assert broken.crashes == [error]
    assert sound.swept == [5]


async def test_a_crash_that_nobody_takes_is_reported(
    autojump_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs: list[Exception] = []
    sweeper = start(nursery, bugs)
    broken, sound = Clockwork(), Clockwork()
    error = ValueError("a bug")
    broken.answer = lambda _: _raise(error)
    monkeypatch.setattr(Clockwork, "crashed", lambda self, error: _raise(error))
    sweeper.arm(broken, at(5))
    sweeper.arm(sound, at(6))

    await trio.sleep(10)

    assert bugs == [error]
    assert sound.swept == [6]


async def test_arming_within_a_look_is_kept(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    sweeper = start(nursery)
    first, second = Clockwork(), Clockwork()

    def arm_both(now: float) -> None:
        sweeper.arm(second, at(7))
        sweeper.arm(first, at(8))

    first.answer = lambda now: arm_both(now) if len(first.swept) == 1 else None
    sweeper.arm(first, at(5))

    await trio.sleep(20)

    assert (first.swept, second.swept) == ([5, 8], [7])


def _raise(error: Exception) -> NoReturn:
    raise error
