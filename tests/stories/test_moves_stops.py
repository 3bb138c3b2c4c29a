"""A stop string that begins before a move and ends inside one event of several tokens.

The answers are sampled: of greedy ones the beginning is made again, and the engine finds its end.
"""

from __future__ import annotations

import pytest

from tests.moves import is_whole
from tests.outcome import Outcome
from tests.plans import Client, Engine, Plan
from tests.simulate import simulate

FIELDS: dict[str, object] = {
    "return_token_ids": True,
    "temperature": 0.7,
    "stream_options": {"include_usage": True},
}


def run(
    stop: str | None,
    *,
    faults: str = "",
    tokens: int = 24,
    merged: int = 6,
    looks: tuple[float, ...] = (),
) -> Outcome:
    """One completion; where the first engine is cut, another that merges tokens goes on."""
    extra = FIELDS if stop is None else FIELDS | {"stop": [stop]}
    client = Client(tokens=tokens, chat=False, extra=extra)
    merging = Engine(tokens_per_chunk=merged)
    plan = Plan(
        engines=(Engine(faults=faults), merging, merging),
        clients=(client,),
        settings={"migration_limit": 1, "policy": "round_robin"},
        looks=looks,
    )
    return simulate(plan)


@pytest.mark.parametrize("cut", range(9, 13))
def test_tokens_after_the_stop_string_are_not_told(cut: int) -> None:
    text = run(None).one.text
    stop = text[len(text) // 2 - 12 : len(text) // 2 + 12]
    whole = run(stop)

    moved = run(stop, faults=f"request=1:cut,after_events={cut}")

    assert is_whole(moved)
    assert moved.one.text == whole.one.text
    assert moved.one.ids == whole.one.ids
    assert moved.one.usages == whole.one.usages
    assert moved.asked(1)[0].get("include_stop_str_in_output") is True


@pytest.mark.parametrize("merged", [1, 6])
def test_the_engine_that_would_go_on_is_freed_at_once(merged: int) -> None:
    """What it sees of the stop string is no more than its second half."""
    text = run(None).one.text
    stop = text[len(text) // 2 - 12 : len(text) // 2 + 12]
    fault = "request=1:cut,after_events=10"
    ended_at = run(stop, faults=fault, tokens=400, merged=merged).one.ended_at

    outcome = run(
        stop, faults=fault, tokens=400, merged=merged, looks=(ended_at - 0.05, ended_at + 0.05)
    )

    assert is_whole(outcome)
    assert outcome.one.finish == "stop"
    assert [look.running for look in outcome.looks] == [[0, 1, 0], [0, 0, 0]]
