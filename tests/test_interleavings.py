"""Every order in which the events of a small plan can come, and what must follow from it.

Time is the schedule: each event has a virtual second of its own, and permuting the seconds gives
every interleaving without tricks on the scheduler. What must follow is worked out beside it by a
dozen lines that know nothing of the router; and every run is held to the standing promises.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest

from statemachines.request import RequestState as S
from tests.simulate import Client, Engine, Outcome, Plan, simulate

#: Tokens of the answer; each is an event of its own.
TOKENS = 3
Order = tuple[str, ...]


def orders(*lines: str) -> Iterator[dict[str, int]]:
    """All ways to give the events of these lines seconds of their own, each line in its order."""
    events = [event for line in lines for event in line.split()]
    for order in permutations(events):
        seconds = {event: second for second, event in enumerate(order, start=1)}
        if all(_is_in_order(line.split(), seconds) for line in lines):
            yield seconds


def _is_in_order(line: list[str], seconds: dict[str, int]) -> bool:
    return [seconds[event] for event in line] == sorted(seconds[event] for event in line)


def script(engine: str, seconds: dict[str, int]) -> str:
    """The timetable of the events that are called `ENGINE.STEP` (or `ENGINE.STEP'`)."""
    steps = [(at, event.rstrip("'")) for event, at in seconds.items() if event.startswith(engine)]
    return ",".join(f"{event.removeprefix(f'{engine}.')}@{at}" for at, event in sorted(steps))


def expected(seconds: dict[str, int], moves: int = 0) -> tuple[S, str | None, bool]:
    """The final state, the code told, and whether it moved: by going through the events."""
    worker, sent, failures, is_moved = "a", False, 0, False
    due = sorted((at, event) for event, at in seconds.items())
    missed: list[str] = []

    def go_to_b(at: int) -> None:
        # Its moments that have passed are now, before anything that is still to come.
        nonlocal worker, is_moved
        worker, is_moved = "b", sent
        steps = sorted((when, each) for each, when in seconds.items() if each.startswith("b."))
        missed.extend(each for when, each in steps if when < at)

    while due or missed:
        event = missed.pop(0) if missed else due.pop(0)[1]
        step = event.rstrip("'").partition(".")[2]
        if event == "leaves":
            return S.ABANDONED, None, is_moved
        if event == "deadline":
            return S.FAILED, "request_timeout", is_moved
        if event == "stop":
            return S.FAILED, "shutting_down", is_moved
        if event == "drain" and worker == "a" and moves:
            go_to_b(seconds[event])
        if not event.startswith(worker):
            continue
        if step == "event":
            sent = True
        elif step == "rest":
            return S.FINISHED, None, is_moved
        elif step in ("cut", "error"):
            failures += 1
            if worker == "b" or (sent and not moves):
                return S.FAILED, "upstream_broken" if step == "cut" else "500", is_moved
            go_to_b(seconds[event])
    raise AssertionError("it would hang")


def run(seconds: dict[str, int], moves: int = 0, wire: str = "http") -> Outcome:
    """The plan of these seconds: worker a is asked first, then b."""
    settings: dict[str, object] = {"migration_limit": moves}
    happenings: list[tuple[float, str]] = []
    if "deadline" in seconds:
        settings["request_timeout_secs"] = float(seconds["deadline"])
    if "stop" in seconds:
        settings["drain_timeout_secs"] = 0.0
        happenings.append((float(seconds["stop"]), "stop"))
    if "drain" in seconds:
        # Over NATS it is the agent whose window is over.
        what = "drain 0 0" if wire == "http" else "leave 0"
        happenings.append((float(seconds["drain"]), what))
    return simulate(
        Plan(
            engines=tuple(Engine(script=script(each, seconds), wire=wire) for each in "ab"),
            clients=(
                Client(
                    chat=False, tokens=TOKENS, leaves_at=float(seconds.get("leaves", 0)) or None
                ),
            ),
            settings=settings,
            happenings=tuple(happenings),
        )
    )


def check_every_order(lines: Order, count: int, moves: int = 0, wire: str = "http") -> None:
    tried = 0
    for seconds in orders(*lines):
        outcome = run(seconds, moves, wire)

        (ticket,) = outcome.tickets
        code = outcome.got[0].code
        is_moved = any(edge.target is S.RESUMING for _, edge in ticket.history)
        found = ticket.state, None if code is None else str(code), is_moved
        wanted = expected(seconds, moves)
        assert found == wanted, f"{found}, not {wanted}, in {seconds}: {outcome.plan!r}"
        tried += 1
    assert tried == count


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        # The first attempt fails before its first event; the second one goes well.
        (("a.head a.cut", "b.event b.rest", "leaves", "deadline"), 180),
        # The first attempt dies after its first event: there is no second.
        (("a.event a.cut", "leaves", "deadline"), 12),
        # The second attempt dies in the middle.
        (("a.cut", "b.event b.event' b.cut", "leaves"), 20),
        (("a.error", "b.error", "leaves", "deadline"), 24),
        (("a.cut", "b.event b.rest", "leaves", "stop"), 60),
    ],
    ids=["a retry", "a death", "a death on the second", "errors", "a stop"],
)
@pytest.mark.slow
def test_every_order_ends_as_it_must(lines: Order, count: int) -> None:
    check_every_order(lines, count)


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        # A stream breaks, goes on at the second worker, and breaks there, too.
        (("a.event a.cut", "b.event b.rest", "leaves"), 30),
        (("a.event a.cut", "b.event b.cut", "deadline"), 30),
        # The first worker drains with no window, before or in or after the stream.
        (("a.event a.rest", "b.event b.rest", "drain", "leaves"), 180),
        (("a.event a.cut", "b.event b.cut", "drain"), 30),
        (("a.event a.cut", "b.rest", "drain", "stop"), 60),
    ],
    ids=["a move", "two deaths", "a drain", "a drain and deaths", "a drain and a stop"],
)
@pytest.mark.parametrize("wire", ["http", "nats"])
@pytest.mark.slow
def test_every_order_of_a_move_ends_as_it_must(lines: Order, count: int, wire: str) -> None:
    check_every_order(lines, count, moves=1, wire=wire)
