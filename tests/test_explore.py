"""The explorer itself: it finds what is broken, by the shortest way, and sees every world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
from attrs import frozen

from statemachines.chart import IllegalTransition
from statemachines.check import Report
from statemachines.explore import CYCLE, RAISED, STUCK, Found, Model, explore


def counter(
    steps: Callable[[int], Iterable[tuple[str, int]]],
    *,
    always: Mapping[str, Callable[[int], bool]] | None = None,
    sometimes: Mapping[str, Callable[[int], bool]] | None = None,
    between: Mapping[str, Callable[[int, str, int], bool]] | None = None,
    eventually: Mapping[str, Callable[[int], bool]] | None = None,
    whenever: Mapping[str, tuple[Callable[[int], bool], Callable[[int], bool]]] | None = None,
) -> Model[int]:
    """A world that is a number from 0 on, and over at 5."""
    return Model(
        name="counter",
        starts=(0,),
        steps=steps,
        is_over=lambda n: n >= 5,
        always=always or {},
        sometimes=sometimes or {},
        between=between or {},
        eventually=eventually or {},
        whenever=whenever or {},
        show=lambda n: {"number": str(n)},
    )


def up(n: int) -> Iterable[tuple[str, int]]:
    if n < 5:
        yield "one more", n + 1
        if n < 4:
            yield "two more", n + 2


def words(found: Found, promise: str) -> list[str]:
    (broken,) = (each for each in found.broken if each.promise == promise)
    return [word for word, _ in broken.path]


def test_every_world_and_step_is_counted_once() -> None:
    found = explore(counter(up))

    assert (found.worlds, found.steps, found.broken) == (6, 9, ())


def test_a_broken_promise_comes_with_the_shortest_path() -> None:
    found = explore(counter(up, always={"never four": lambda n: n != 4}))

    assert words(found, "never four") == ["", "two more", "two more"]


def test_a_step_is_judged_by_both_of_its_ends() -> None:
    found = explore(counter(up, between={"two at a time from one on": lambda n, _, m: n + m != 3}))

    assert words(found, "two at a time from one on") == ["", "one more", "one more"]


def test_what_never_happens_is_reported_without_a_path() -> None:
    found = explore(counter(up, sometimes={"six": lambda n: n == 6, "five": lambda n: n == 5}))

    assert [(each.promise, each.path) for each in found.broken] == [("sometimes six", ())]


def test_a_world_that_is_not_over_and_has_no_step_is_stuck() -> None:
    found = explore(counter(lambda n: up(n) if n < 3 else ()))

    assert words(found, STUCK) == ["", "one more", "two more"]


def test_a_world_that_comes_back_is_a_cycle() -> None:
    def back_and_forth(n: int) -> Iterable[tuple[str, int]]:
        yield from up(n)
        if n == 4:
            yield "back", 2

    found = explore(counter(back_and_forth))

    assert [each.promise for each in found.broken] == [CYCLE]
    assert words(found, CYCLE) in (["", "two more"], ["", "two more", "two more"])


def test_a_world_that_stays_is_a_cycle() -> None:
    found = explore(counter(lambda n: [*up(n), ("stay", n)] if n == 1 else up(n)))

    assert words(found, CYCLE) == ["", "one more"]


def test_what_eventually_comes_true_may_take_its_time() -> None:
    found = explore(counter(up, eventually={"four or five": lambda n: n >= 4}))

    assert found.broken == ()
    assert "eventually four or five" in found.promises


def test_an_end_before_it_came_true_breaks_what_should_come_at_last() -> None:
    found = explore(counter(up, eventually={"three comes": lambda n: n == 3}))

    assert words(found, "eventually three comes") == ["", "two more", "two more", "one more"]


def test_a_stuck_world_breaks_what_should_come_at_last() -> None:
    stuck = counter(lambda n: up(n) if n < 3 else (), eventually={"it is over": lambda n: n == 5})

    found = explore(stuck)

    assert words(found, "eventually it is over") == ["", "one more", "two more"]


def test_a_cycle_that_avoids_it_breaks_what_should_come_at_last() -> None:
    def back_and_forth(n: int) -> Iterable[tuple[str, int]]:
        yield from up(n)
        if n == 4:
            yield "back", 2

    ends = {"it is over": lambda n: n == 5, "four comes": lambda n: n == 4 or n == 5}
    found = explore(counter(back_and_forth, eventually=ends))

    (broken,) = (each for each in found.broken if each.promise.startswith("eventually"))
    assert broken.promise == "eventually it is over"
    assert words(found, broken.promise) == ["", "two more", "two more", "back"]
    assert "comes back" in broken.note


def test_a_cycle_behind_it_breaks_nothing_that_came_at_last() -> None:
    def for_ever(n: int) -> Iterable[tuple[str, int]]:
        return [("one more", n + 1)] if n < 5 else [("back", 4)]

    found = explore(counter(for_ever, eventually={"four comes": lambda n: n == 4}))

    assert [each.promise for each in found.broken] == [CYCLE]


def test_whatever_it_follows_it_comes_at_last() -> None:
    whenever = {
        "one is followed by five": (lambda n: n == 1, lambda n: n == 5),
        "one is followed by three": (lambda n: n == 1, lambda n: n == 3),
        "six is followed by three": (lambda n: n == 6, lambda n: n == 3),
        "five is followed by five": (lambda n: n == 5, lambda n: n == 5),
    }

    found = explore(counter(up, whenever=whenever))

    assert [each.promise for each in found.broken] == ["eventually one is followed by three"]
    assert words(found, "eventually one is followed by three") == [
        "", "one more", "one more", "two more", "one more",
    ]  # fmt: skip


def test_what_came_once_does_not_count_for_the_next_time() -> None:
    """Due again after it came true, it must come again."""
    whenever = {"even is followed by odd": (lambda n: n % 2 == 0, lambda n: n % 2 == 1)}

    found = explore(counter(lambda n: [("one more", n + 1)] if n < 4 else [], whenever=whenever))

    assert words(found, "eventually even is followed by odd") == ["", *["one more"] * 4]


def test_an_exception_in_a_step_is_reported_with_the_way_there() -> None:
    def breaks(n: int) -> Iterable[tuple[str, int]]:
        if n == 3:
            raise ValueError("three is no number")
        return up(n)

    found = explore(counter(breaks))

    assert words(found, RAISED) == ["", "one more", "two more"]
    assert "three is no number" in str(found.broken[0])


def test_an_illegal_fact_is_the_last_step_of_the_way_there() -> None:
    def refused(n: int) -> Iterable[tuple[str, int]]:
        if n == 3:
            raise IllegalTransition("counter", None, "counted")
        return up(n)

    found = explore(counter(refused))

    assert words(found, RAISED) == ["", "one more", "two more", "counted, which is illegal"]


def test_it_can_stop_at_the_first_breach() -> None:
    always = {"never one": lambda n: n != 1, "never four": lambda n: n != 4}

    found = explore(counter(up, always=always), until_broken=True)

    assert [each.promise for each in found.broken] == ["never one"]
    assert found.worlds < 6


def test_a_model_without_bounds_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statemachines.explore.WORLDS_MAX", 100)

    with pytest.raises(RuntimeError, match="more than 100 worlds; a bound is missing"):
        explore(counter(lambda n: [("one more", n + 1)]))


def test_a_path_prints_as_a_table() -> None:
    found = explore(counter(up, always={"never four": lambda n: n != 4}))

    assert str(found.broken[0]).splitlines() == [
        "broken: never four",
        "  step  what happened  number",
        "  0                    0",
        "  1     two more       2",
        "  2     two more       4",
    ]


def test_a_report_says_what_holds_and_what_does_not() -> None:
    bad = explore(counter(up, always={"never four": lambda n: n != 4}))
    good = explore(counter(up))

    assert Report((good,)).is_good
    assert not Report((good, bad)).is_good
    lines = str(Report((good, bad))).splitlines()
    assert lines[0] == "counter: 6 states, 9 steps"
    assert "  BROKEN  never four" in lines
    assert lines[-1] == "12 states, 7 promises, 1 broken"


@frozen
class Plain:
    at: int


def test_a_model_may_leave_out_how_it_is_shown() -> None:
    model = Model(
        name="plain",
        starts=(Plain(1),),
        steps=lambda _: (),
        is_over=lambda _: True,
        always={"it is two": lambda world: world.at == 2},
        sometimes={},
    )

    assert "Plain(at=1)" in str(explore(model).broken[0])
