"""A plan that fails is made as small as it can be, and no smaller."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.plans import Client, Engine, Plan
from tests.shrinking import shrink, way_of

BIG = Plan(
    engines=(
        Engine(faults="request=1:cut,after_events=2,reset=true;every=2:crlf", token_seconds=0.1),
        Engine(kind="sglang", faults="times=1:pause,after_events=3,seconds=4"),
    ),
    clients=(
        Client(
            tokens=9,
            at=1.0,
            extra={
                "stop": ["a", "b", "c"],
                "stream_options": {"include_usage": True, "continuous_usage_stats": False},
            },
            then=(Client(at=2.0),),
        ),
        Client(stream=False),
    ),
    settings={"migration_limit": 2, "queue_size": 3},
    happenings=((1.0, "drain 0"), (2.0, "faults 1 crlf")),
    cuts=7,
    schedule=5,
)


def faults(plan: Plan) -> str:
    return ";".join(engine.faults for engine in plan.engines)


def faulty(text: str) -> dict[str, object]:
    return {"engines": (Engine(faults=text),)}


def wishing(wish: dict[str, object]) -> dict[str, object]:
    return {"clients": (Client(tokens=1, extra=wish),)}


@pytest.mark.parametrize(
    "needs, smallest",
    [
        (lambda plan: "cut" in faults(plan), faulty("cut")),
        (lambda plan: "reset" in faults(plan), faulty("cut,reset=true")),
        (lambda plan: "request=1:cut" in faults(plan), faulty("request=1:cut")),
        (lambda plan: "seconds=4" in faults(plan), faulty("pause,seconds=4")),
        (lambda plan: "'b'" in repr(plan), wishing({"stop": ["b"]})),
        (
            lambda plan: "continuous" in repr(plan),
            wishing({"stream_options": {"continuous_usage_stats": False}}),
        ),
        (lambda plan: "drain" in repr(plan), {"happenings": ((1.0, "drain 0"),)}),
        (lambda plan: "queue_size" in plan.settings, {"settings": {"queue_size": 3}}),
    ],
)
def test_what_is_left_is_what_the_failure_needs(
    needs: Callable[[Plan], object], smallest: dict[str, object]
) -> None:
    def run(plan: Plan) -> None:
        assert not needs(plan)

    with pytest.raises(AssertionError) as caught:
        run(BIG)

    found = shrink(BIG, run, way_of(caught.value))

    usual: dict[str, object] = {
        "engines": (Engine(),),
        "clients": (Client(tokens=1),),
        "schedule": 0,
    }
    assert found == Plan(**(usual | smallest))  # type: ignore[arg-type]  # fields by name
