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


def run(stop: str | None, *, faults: str = "", second: str = "") -> Outcome:
    """One completion; where the first engine is cut, another that merges tokens goes on."""
    extra = FIELDS if stop is None else FIELDS | {"stop": [stop]}
    client = Client(tokens=24, chat=False, extra=extra)
    merging = Engine(tokens_per_chunk=6, faults=second)
    plan = Plan(
        engines=(Engine(faults=faults), merging, Engine(tokens_per_chunk=6)),
        clients=(client,),
        settings={"migration_limit": 1, "policy": "round_robin"},
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
