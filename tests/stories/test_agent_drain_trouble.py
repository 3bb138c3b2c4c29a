"""A broker that fails while an agent drains: no part of a drain waits for it without a limit."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import pytest
import trio

from router.agent.draining import (
    AFTER_SECONDS,
    DOOR_SECONDS,
    FLUSH_SECONDS,
    FORGET_SECONDS,
    HEARD_SECONDS,
    LEAVE_SECONDS,
)
from router.agent.proxied import Proxied
from router.wires.nats.broker import Backlog
from statemachines.chart import Edge
from statemachines.handback import HANDBACK, HandbackState
from tests.agents import NAMES, Stage, play
from tests.memory_broker import MemoryBroker, MemoryConsumption, MemoryWorkQueue
from tests.stories.test_agent_drain import limit_the_hand, stored

WINDOWS = [0.0, 1.0, 3.0]


def settings(queued: int, window: float) -> Mapping[str, object]:
    """Out of a work queue where anything is `queued`."""
    return {"nats_req_max_pending": queued, "drain_timeout_secs": window}


def fail(stage: Stage, trouble: str) -> None:
    """From now on."""
    if trouble == "silent":
        stage.server.is_jetstream_silent = True
    elif trouble == "stalled":
        stage.server.stall()
    else:
        stage.server.down()


def note_ends(stage: Stage) -> dict[Proxied, tuple[float, Enum]]:
    """When requests end and how, also where nobody can be told: for the story to read."""
    found: dict[Proxied, tuple[float, Enum]] = {}

    def note(proxied: Proxied, edge: Edge) -> None:
        if edge.target in HANDBACK.final:
            found[proxied] = stage.now, edge.target

    stage.agent.handback_listeners = (*stage.agent.handback_listeners, note)
    return found


#: Of a drain: its beginning, the moment for routers, its middle, the end, and what follows that.
MOMENTS = [
    *((0.0, 0.0), (0.0, 0.25), (0.0, 0.6), (0.5, 0.0)),
    *((1.0, -0.1), (1.0, -0.001), (1.0, 0.0), (1.0, 0.01), (1.0, 1.0), (1.0, 2.0)),
]


@pytest.mark.parametrize("trouble", ["silent", "stalled", "down"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("queued", [0, 1, 4])
@pytest.mark.parametrize(("part", "offset"), MOMENTS)
def test_no_trouble_of_the_broker_keeps_a_window_from_ending(
    part: float, offset: float, queued: int, window: float, trouble: str
) -> None:
    """`queued`: out of a work queue, and so many; the agent takes two of them at once."""

    async def story(stage: Stage) -> None:
        ends = note_ends(stage)
        if queued:
            limit_the_hand(stage, 2)
        asked = [await stage.store(200) for _ in range(queued)] or [stage.ask(200)]
        await asked[0].wait_frames(3)
        running = list(stage.agent.intake.open.values())
        began = stage.now
        if part == offset == 0.0:
            fail(stage, trouble)
        stage.agent.ask_to_stop()
        await trio.sleep(max(0.0, part * window + offset))
        if not stage.ended.is_set():
            fail(stage, trouble)
        await stage.wait_stopped()
        stage.server.is_jetstream_silent = False
        stage.server.go_on()

        # The word in the entry has its time also in a window that is too short for it.
        until = began + max(window, HEARD_SECONDS)
        assert max(ends[each][0] for each in running) <= until + 0.001
        handed_back = [ends[each][1] is HandbackState.HANDED_BACK for each in running]
        # Where the broker is away an answer with a hole in it has ended before.
        assert all(handed_back) or trouble == "down"
        # Where nothing gets through, no time is spent on the entry and the consumer.
        unasked = 0.0 if trouble == "silent" else LEAVE_SECONDS + FORGET_SECONDS
        assert stage.ended_at <= began + window + AFTER_SECONDS - unasked

    play(story, settings=settings(queued, window), is_lossy=True)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("queued", [0, 4])
@pytest.mark.parametrize("moment", [0.0, 0.4, 0.9, 2.9])
def test_who_asks_for_a_drain_hears_its_end_also_where_jetstream_is_silent(
    moment: float, queued: int, window: float
) -> None:
    async def story(stage: Stage) -> None:
        running = await stage.store(200) if queued else stage.ask(200)
        await running.wait_frames(3)

        async def silence() -> None:
            await trio.sleep(moment)
            fail(stage, "silent")

        stage.nursery.start_soon(silence)
        assert await stage.ask_to_drain() == "drained"
        assert running.ending == "notice"
        await stage.wait_stopped()

    play(story, settings=settings(queued, window))


@pytest.mark.parametrize("window", WINDOWS)
def test_a_queue_that_gives_no_answer_is_told_of_and_counts_as_empty(window: float) -> None:
    async def story(stage: Stage) -> None:
        running = await stage.store(200)
        await running.wait_frames(3)
        fail(stage, "silent")
        stage.agent.ask_to_stop()
        await stage.wait_stopped()

        assert "work queue not readable" in str(stage.log.lines)

    play(story, settings=settings(4, window))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("look_seconds", [0.9, 0.99, 1.01, 1.9])
def test_where_all_takes_nearly_too_long_and_the_queue_is_never_empty_it_ends_in_time(
    look_seconds: float, window: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_slow = False

    def slow_down(of: type, name: str, seconds: float) -> None:
        call = getattr(of, name)

        async def late(self: object, *args: float) -> object:
            try:
                await trio.sleep(min(seconds, *args) if args else seconds)
            finally:
                answer = await call(self, *args)  # cancelled, it closes what it has to close
            return answer

        monkeypatch.setattr(of, name, lambda *args: (late if is_slow else call)(*args))

    async def never_empty(*_: object) -> Backlog:
        if is_slow:
            await trio.sleep(look_seconds)
        return Backlog(1, 0)

    monkeypatch.setattr(MemoryWorkQueue, "backlog", never_empty)
    slow_down(MemoryConsumption, "drain", DOOR_SECONDS - 0.1)
    slow_down(MemoryBroker, "flush", FLUSH_SECONDS - 0.1)
    slow_down(MemoryBroker, "ask", FORGET_SECONDS - 0.1)

    async def story(stage: Stage) -> None:
        nonlocal is_slow
        running = await stage.store(200)
        await running.wait_frames(3)
        began, is_slow = stage.now, True

        assert await stage.ask_to_drain() == "drained"
        assert running.last is not None
        assert running.last.at <= began + max(window, HEARD_SECONDS) + 0.01
        assert stage.now <= began + window + AFTER_SECONDS
        await stage.wait_stopped()
        # Nobody makes the consumer anew while who asked is waited for.
        assert not stage.server.streams[NAMES.stream].durables

    play(story, settings=settings(4, window))


@pytest.mark.parametrize("healed_at", [1.0, 2.9, 3.5])
def test_what_waits_behind_a_silence_is_handed_back_when_that_ends(healed_at: float) -> None:
    async def story(stage: Stage) -> None:
        limit_the_hand(stage, 1)
        asked = [await stage.store(200) for _ in range(3)]
        await asked[0].wait_frames(3)
        fail(stage, "silent")
        stage.agent.ask_to_stop()
        await trio.sleep(healed_at)
        stage.server.is_jetstream_silent = False
        await stage.wait_stopped()

        assert [each.ending for each in asked] == ["notice"] * 3
        assert stored(stage) == 0
        assert not stage.server.streams[NAMES.stream].durables

    play(story, settings=settings(4, 3.0))


def test_who_cannot_be_told_that_it_is_over_is_not_waited_for() -> None:
    async def story(stage: Stage) -> None:
        running = stage.ask(200)
        await running.wait_frames(3)
        began = stage.now
        stage.nursery.start_soon(stage.ask_to_drain)
        await trio.sleep(1.0)
        fail(stage, "stalled")
        await stage.wait_stopped()
        stage.server.go_on()

        # One for the notices, one for the word.
        assert stage.ended_at == pytest.approx(began + 3.0 + 2 * FLUSH_SECONDS, abs=0.1)

    play(story, settings=settings(0, 3.0))
