"""Random orders of everything that can happen to an agent, each to be replayed by its seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import trio

from tests.agents import ASK_ALL, Stage, Story, play

SEEDS = 120
MOMENTS = [x / 20 for x in range(80)]
FAULTS = ("", "", "cut,after_events=3", "hang", "hang,after_events=2", "status,code=500", "cut")


def story_of(luck: random.Random) -> tuple[Story, list[str]]:
    """A story, and what happens in it as text."""
    plan: list[tuple[float, str, int]] = []
    requests = luck.randint(2, 5)
    for number in range(requests):
        plan.append((luck.choice(MOMENTS[:30]), "ask", number))
        if luck.random() < 0.4:
            plan.append((luck.choice(MOMENTS), "cancel", number))
    for what in ("cut", "stop", "stop", "engine dies"):
        if luck.random() < 0.4:
            plan.append((luck.choice(MOMENTS), what, 0))
    plan.sort()
    details = [
        (luck.choice(("", ASK_ALL)), luck.random() < 0.6, luck.choice(FAULTS), luck.randint(1, 12))
        for _ in range(requests)
    ]

    async def story(stage: Stage) -> None:
        def ask(number: int) -> None:
            accept, migratable, fault, tokens = details[number]
            inbox = f"_INBOX.r{number}"
            if stage.router.is_connected:
                stage.ask(tokens, accept=accept, migratable=migratable, fault=fault, inbox=inbox)

        def cut(_: int) -> None:
            stage.server.cut(stage.broker)
            stage.nursery.start_soon(mend)

        async def mend() -> None:
            await trio.sleep(0.7)
            stage.server.mend(stage.broker)

        acts: dict[str, Callable[[int], object]] = {
            "ask": ask,
            "cancel": lambda number: stage.cancel(f"_INBOX.r{number}"),
            "cut": cut,
            "stop": lambda _: stage.agent.ask_to_stop(),
            "engine dies": lambda _: stage.engine.add_faults("now:server_dies,restart_after=1"),
        }
        for moment, what, number in plan:
            await trio.sleep_until(stage.began_at + moment)
            acts[what](number)
        await trio.sleep(10.0)

    return story, [f"{moment} {what} {number}" for moment, what, number in plan]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_order_leaves_nothing_behind_and_tells_nothing_twice(seed: int) -> None:
    luck = random.Random(seed)
    story, told = story_of(luck)
    limits = {"nats_req_idle_timeout": 2.0, "nats_req_max_duration": luck.choice((0.0, 3.0))}
    window = {"drain_timeout_secs": luck.choice((0.0, 0.5, 3.0))}

    try:
        stage = play(story, settings={**limits, **window}, is_lossy=True)
    except BaseException as error:
        error.add_note("; ".join(told))
        raise

    for asked in stage.asked.values():
        assert not (asked.is_absent and asked.frames), asked
        is_unwanted = any(f"cancel {asked.inbox[-1]}" in each for each in told)
        if not is_unwanted and not any("cut" in each for each in told):
            assert asked.is_absent or asked.last, asked
