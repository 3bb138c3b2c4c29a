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


def expected(seconds: dict[str, int]) -> tuple[S, str | None]:
    """The final state and the code told, by going through the events as they come."""
    worker, sent, failures = "a", False, 0
    due = sorted((at, event) for event, at in seconds.items())
    missed: list[str] = []
    while due or missed:
        event = missed.pop(0) if missed else due.pop(0)[1]
        step = event.rstrip("'").partition(".")[2]
        if event == "leaves":
            return S.ABANDONED, None
        if event == "deadline":
            return S.FAILED, "request_timeout"
        if event == "stop":
            return S.FAILED, "shutting_down"
        if not event.startswith(worker):
            continue
        if step == "event":
            sent = True
        elif step == "rest":
            return S.FINISHED, None
        elif step in ("cut", "error"):
            failures += 1
            if sent or failures > 1:
                return S.FAILED, "upstream_broken" if step == "cut" else "500"
            worker = "b"
            # Its moments that have passed are now, before anything that is still to come.
            now = seconds[event]
            steps = sorted((at, each) for each, at in seconds.items() if each.startswith("b."))
            missed = [each for at, each in steps if at < now]
    raise AssertionError("it would hang")


def run(seconds: dict[str, int]) -> Outcome:
    """The plan of these seconds: worker a is asked first, then b."""
    settings: dict[str, object] = {}
    if "deadline" in seconds:
        settings["request_timeout_secs"] = float(seconds["deadline"])
    if "stop" in seconds:
        settings["drain_timeout_secs"] = 0.0
    return simulate(
        Plan(
            engines=(Engine(script=script("a", seconds)), Engine(script=script("b", seconds))),
            clients=(
                Client(
                    chat=False, tokens=TOKENS, leaves_at=float(seconds.get("leaves", 0)) or None
                ),
            ),
            settings=settings,
            happenings=((float(seconds["stop"]), "stop"),) if "stop" in seconds else (),
        )
    )


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
    tried = 0
    for seconds in orders(*lines):
        outcome = run(seconds)

        (ticket,) = outcome.tickets
        code = outcome.got[0].code
        found = ticket.state, None if code is None else str(code)
        assert found == expected(seconds), f"{found} in {seconds}: {outcome.plan!r}"
        tried += 1
    assert tried == count
