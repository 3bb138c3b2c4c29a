"""Streams under luck: whatever breaks, the client has the model's text, or sees that it has not.

A seed draws a fleet of two to five engines of mixed kinds, what they suffer, and a handful of
requests of random shapes; each request's answer is held against what a healthy engine says
directly. The promises of every simulated run (one identity, role, finish, usage and end; nobody
asked too often; nothing leaked) are held, too. The plan of a seed that fails is printed, to be
pasted into a story.
"""

from __future__ import annotations

import os
from random import Random

import pytest
import trio

from tests.simulate import Client, Engine, Outcome, Plan, simulate

#: Requests of a plan; a fleet alone costs as much as four of them.
REQUESTS = 15
#: 3,000 requests in CI, each another shape and another fate.
PLANS = 200 if os.environ.get("CI") else 20
#: Plans of one test.
BATCH = 10
FAULTS = [
    "cut,after_events={}", "cut,after_events={},reset=true", "cut,after_events={},inside_bytes=40",
    "end,after_events={}", "end,after_events={},done=true", "abort,after_events={}",
    "error_event,after_events={}", "hang,after_events={}", "pause,after_events={},seconds=9",
    "garbage,what=chunk_size,after_events={}", "cut,at=finish", "end,at=finish", "hang,at=finish",
    "status,code=503", "status,code=500", "cut,at=head",
]  # fmt: skip
DEATHS = {
    "vllm": [
        "core_dies", "server_dies", "sigterm_abort", "sigterm_hang", "sigterm_drain,timeout=0.3",
    ],
    "sglang": ["server_dies", "scheduler_dies", "sglang_drain"],
}  # fmt: skip
DRESSES = ["", "", "", "lump,events=3", "crlf", "comments", "dribble,bytes=50"]
STOPS = ["the", " a", "e", "世界", "🙂", ". ", "and the", "zz"]


def draw_client(luck: Random, kind: str, *, merges: bool) -> Client:
    """A request that can be continued, in one of its many shapes."""
    # SGLang's chat tells how many tokens there were, not which of them the text stands for.
    chat = luck.random() < 0.5 and (kind == "vllm" or not merges)
    tokens = luck.randint(1, 24)
    extra: dict[str, object] = {"ignore_eos": luck.random() < 0.7}
    if luck.random() < 0.5:
        usage = {"include_usage": True, "continuous_usage_stats": luck.random() < 0.3}
        extra["stream_options"] = usage
    if luck.random() < 0.3 and not (chat and kind != "vllm"):
        extra["return_token_ids"] = True
    # Where only text can be carried, half a word held back becomes other tokens.
    if luck.random() < 0.3 and not chat:
        extra["stop"] = luck.sample(STOPS, luck.randint(1, 3))
    if luck.random() < 0.2:
        extra["min_tokens"] = luck.randint(0, tokens)
    at = round(luck.random(), 2)
    leaves = at + luck.random() * 5 if luck.random() < 0.1 else None
    prompt = " ".join(
        luck.choices(["once", "upon", "世界", "🙂", "a", "time"], k=luck.randint(1, 6))
    )
    return Client(
        at=at, chat=chat, tokens=tokens, prompt=prompt, extra=extra, leaves_at=leaves,
        reads_from=at + luck.choice([0, 0, 0, 2]),
    )  # fmt: skip


def draw_engine(luck: Random, kind: str, *, merges: bool) -> Engine:
    """An engine and what some of its requests suffer."""
    faults = [
        f"request={number}:{luck.choice(FAULTS).format(luck.randint(0, 10))}"
        for number in range(1, 9)
        if luck.random() < 0.4
    ]
    if luck.random() < 0.3:
        death = luck.choice(DEATHS[kind])
        faults.append(f"request={luck.randint(1, 4)}:{death},after_events={luck.randint(0, 20)}")
    faults.append(luck.choice(DRESSES))
    return Engine(
        kind=kind, faults=";".join(filter(None, faults)), eos_every=40,
        token_seconds=luck.choice([0.0, 0.01, 0.02, 0.05]),
        first_token_seconds=luck.choice([0.0, 0.3]),
        tokens_per_chunk=luck.randint(1, 3) if merges else 1,
    )  # fmt: skip


def draw_plan(seed: int) -> Plan:
    """The plan of a seed."""
    luck = Random(seed)
    merges = luck.random() < 0.3
    kinds = luck.choice([["vllm"], ["sglang"], ["sglang"], ["vllm", "sglang"]])
    engines = tuple(
        draw_engine(luck, luck.choice(kinds), merges=merges) for _ in range(luck.randint(2, 5))
    )
    one_kind = engines[0].kind if len({each.kind for each in engines}) == 1 else "mixed"
    drains = [
        (round(luck.random() * 3, 2), f"drain {luck.randrange(len(engines))} {luck.choice([0, 1])}")
        for _ in range(luck.choice([0, 0, 1]))
    ]
    return Plan(
        engines=engines,
        clients=tuple(draw_client(luck, one_kind, merges=merges) for _ in range(REQUESTS)),
        settings={
            "migration_limit": luck.choice([1, 2, 3]),
            "policy": luck.choice(["round_robin", "random", "least_load", "power_of_two"]),
            "stream_idle_timeout_secs": 4.0,
            "first_token_timeout_secs": 6.0,
            "suspect_idle_secs": 1.0,
            "request_timeout_secs": luck.choice([3.0, 60.0, 60.0]),
            "health_success_threshold": 1,
            "health_check_interval_secs": 30.0,
        },
        cuts=luck.choice([None, None, seed]),
        luck=seed,
        happenings=tuple(drains),
        begin=1.0,
    )


def run(seed: int) -> Outcome:
    """Simulate the plan of a seed; Trio's scheduler is part of the luck, and drawn by it, too."""
    trio._core._run._r.seed(seed)  # as pytest-trio does it for hypothesis
    return simulate(draw_plan(seed))


def check_budgets(outcome: Outcome) -> None:
    """No client got more tokens than it asked for."""
    for got in outcome.got:
        assert len(got.ids) <= got.client.tokens
        for usage in got.usages:
            told = usage["completion_tokens"]
            assert isinstance(told, int)
            assert told <= got.client.tokens, got


@pytest.mark.parametrize("batch", range(PLANS // BATCH))
def test_a_broken_stream_is_right_or_seen_to_be_broken(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        check_budgets(run(seed))


def test_luck_lets_most_streams_move_and_end_well() -> None:
    outcomes = [run(seed) for seed in range(12)]

    endings = [got.ending for outcome in outcomes for got in outcome.got]
    moves = {name for outcome in outcomes for name in outcome.moves}
    assert sum(sum(outcome.moves.values()) for outcome in outcomes) > 8
    assert endings.count("clean") > len(endings) / 2
    assert moves >= {"stream_broken exact", "stream_broken text"}
