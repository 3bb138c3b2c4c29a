"""The cap and its queue: first come first served, nothing drifts, nobody stays as a ghost."""

from __future__ import annotations

from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from router.admission import Admission


@define(eq=False)
class Guest:
    """Somebody who asks for a place."""

    admission: Admission
    woken: int = 0
    held_when_woken: list[bool] = field(factory=list)

    def wake(self) -> None:
        self.woken += 1
        self.held_when_woken.append(self in self.admission.holding)

    def enter(self) -> bool:
        return self.admission.enter(self, self.wake)


def guests(count: int, *, cap: int, queue_max: int) -> list[Guest]:
    admission = Admission(cap, queue_max)
    return [Guest(admission) for _ in range(count)]


def test_without_a_cap_everybody_is_admitted() -> None:
    everybody = guests(100, cap=0, queue_max=0)

    assert all(guest.enter() for guest in everybody)
    assert len(everybody[0].admission.holding) == 100
    for guest in everybody:
        guest.admission.leave(guest)
    assert not everybody[0].admission.holding


def test_beyond_the_cap_one_waits_and_beyond_the_queue_one_is_refused() -> None:
    first, second, third = guests(3, cap=1, queue_max=1)

    assert first.enter()
    assert second.enter()
    assert not third.enter()
    assert first.admission.holding == {first}
    assert list(first.admission.waiting) == [second]


def test_without_a_queue_the_cap_refuses() -> None:
    first, second = guests(2, cap=1, queue_max=0)

    assert first.enter()
    assert not second.enter()


def test_a_place_goes_to_who_waited_longest_and_he_is_woken_when_he_has_it() -> None:
    first, second, third = guests(3, cap=1, queue_max=2)
    for guest in (first, second, third):
        guest.enter()

    first.admission.leave(first)

    assert (second.woken, third.woken) == (1, 0)
    assert second.held_when_woken == [True]
    assert first.admission.holding == {second}


def test_who_leaves_the_queue_is_no_ghost_in_it() -> None:
    first, second, third = guests(3, cap=1, queue_max=2)
    for guest in (first, second, third):
        guest.enter()

    first.admission.leave(second)
    first.admission.leave(first)

    assert (second.woken, third.woken) == (0, 1)
    assert first.admission.holding == {third}


def test_leaving_twice_gives_one_place() -> None:
    first, second, third = guests(3, cap=1, queue_max=2)
    for guest in (first, second, third):
        guest.enter()

    first.admission.leave(first)
    first.admission.leave(first)

    assert third.woken == 0


@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=40),
)
def test_the_cap_holds_in_every_order(
    cap: int, queue_max: int, steps: list[tuple[bool, int]]
) -> None:
    everybody = guests(8, cap=cap, queue_max=queue_max)
    admission = everybody[0].admission
    inside: set[Guest] = set()

    for enters, number in steps:
        guest = everybody[number]
        if enters and guest not in inside:
            if guest.enter():
                inside.add(guest)
            else:
                assert len(inside) == cap + queue_max
        elif not enters:
            admission.leave(guest)
            inside.discard(guest)
        assert admission.holding | admission.waiting.keys() == inside
        assert len(admission.holding) == min(cap, len(inside))
        assert not admission.holding & admission.waiting.keys()
