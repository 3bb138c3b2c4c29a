"""A router that is gone without a word: the engine computes for nobody, and not for long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from router.agent.audience import ABSENT_SECONDS, AGAIN_SECONDS, ASK_SECONDS
from tests.agents import ASK_ALL, Asked, Stage, play

#: What a router of ours asks for, and one of an earlier release.
NEW = "head,heartbeat,still"
LONG = 4000
#: From the end of a router to that of its streams.
SOON_SECONDS = ASK_SECONDS + AGAIN_SECONDS + 0.5
#: From the end of a router to that of what has brought nothing.
LATE_SECONDS = ABSENT_SECONDS + 2 * ASK_SECONDS + 0.5


async def _freed(stage: Stage, act: Callable[[], None], seconds: float) -> float:
    began = stage.now
    act()
    await stage.reach(lambda: not stage.agent.intake.open, seconds)
    await stage.settle()
    await trio.sleep(0.2)
    assert stage.engine.inflight == 0
    return stage.now - began


@pytest.mark.parametrize("accept", ["", ASK_ALL, NEW], ids=["old", "earlier", "new"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_is_freed_when_its_router_is_killed(accept: str, stream: bool) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(LONG, accept=accept, stream=stream)
        await trio.sleep(3.0)
        await _freed(stage, asked.vanish, SOON_SECONDS if stream else LATE_SECONDS)

    if not accept and not stream:
        pytest.skip("an old router is sent nothing before the answer is there")
    play(story, is_lossy=True)


@pytest.mark.parametrize("fault", ["delay,first_token=900", "hang,after_events=3"])
def test_also_while_the_engine_is_silent(fault: str) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(LONG, accept=NEW, fault=fault)
        await trio.sleep(3.0)
        await _freed(stage, asked.vanish, LATE_SECONDS)

    play(story, is_lossy=True)


def test_the_streams_of_another_router_go_on() -> None:
    async def story(stage: Stage) -> None:
        gone, there = stage.ask(LONG, accept=NEW), stage.ask(200, accept=NEW)
        await trio.sleep(1.0)
        gone.vanish()
        await there.wait_over()

        assert there.ending == "done"
        assert [each.fact for each in stage.edges].count("unheard") == 1

    play(story, is_lossy=True)


def test_it_is_asked_every_two_seconds_and_not_with_every_token() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(100, accept=NEW)
        await asked.wait_over()

        frames = [each for each in stage.server.published if each.subject == asked.inbox]
        asking = [each for each in frames if each.reply]
        assert len(frames) > 100
        assert 5 <= len(asking) <= 7
        assert len({each.reply for each in asking}) == len(asking)
        assert not stage.agent.intake.doorbell._asked

    play(story)


@pytest.mark.parametrize("seconds", [1.0, 8.0, 15.0])
def test_a_router_that_was_cut_off_gets_the_answer_it_waits_for(seconds: float) -> None:
    """Nothing of the answer has come yet, so nothing is lost: it waits for the broker, too."""

    async def story(stage: Stage) -> None:
        asked = stage.ask(4, accept=NEW, fault="delay,first_token=40")
        await trio.sleep(3.0)
        asked.frames.clear()
        asked.vanish()
        await trio.sleep(seconds)
        again = _listen(stage, asked)
        await again.wait_over()

        assert again.ending == "done"
        assert again.data.endswith(b"data: [DONE]\n\n")

    play(story, is_lossy=True)


def test_a_router_that_is_cut_off_now_and_then_is_never_gone() -> None:
    """Each time for less than would be believed; all of them together are more."""

    async def story(stage: Stage) -> None:
        asked = stage.ask(4, accept=NEW, fault="delay,first_token=100")
        for _ in range(3):
            await trio.sleep(3.0)
            asked.frames.clear()
            asked.vanish()
            await trio.sleep(ABSENT_SECONDS / 2)
            asked = _listen(stage, asked)
        await asked.wait_over()

        assert asked.ending == "done"

    play(story, is_lossy=True)


def test_an_old_router_that_was_cut_off_is_told_of_the_hole_it_cannot_see() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(100, accept="")
        await trio.sleep(3.0)
        asked.vanish()
        await stage.reach(lambda: not stage.agent.intake.open, SOON_SECONDS)
        errors = [each for each in stage.server.published if each.subject == asked.inbox]

        assert errors[-1].headers["rs-type"] == "error"

    play(story, is_lossy=True)


@pytest.mark.parametrize("away", [0.2, 2.0, 10.0])
def test_a_broker_that_was_away_makes_nobody_gone(away: float) -> None:
    """The agent is back before its router is."""

    async def story(stage: Stage) -> None:
        asked = stage.ask(4, accept=NEW, fault="delay,first_token=40")
        await trio.sleep(3.0)
        stage.server.cut(stage.router)
        stage.server.cut(stage.broker)
        await trio.sleep(away)
        stage.server.mend(stage.broker)
        await trio.sleep(3.0)
        stage.server.mend(stage.router)
        await asked.wait_over()

        assert asked.ending == "done"

    play(story, is_lossy=True)


def _listen(stage: Stage, asked: Asked) -> Asked:
    """Its router is back."""
    del stage.asked[asked.inbox]
    return stage.expect(asked.inbox, asked.body)
