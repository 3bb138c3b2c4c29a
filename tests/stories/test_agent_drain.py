"""How an agent stops: rows 93 to 100 and scenario 41 of the old protocol, and what is ours."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import trio

from router.agent.draining import HEARD_SECONDS
from tests.agents import ASK_ALL, NAMES, Asked, Stage, play
from tests.memory_broker import MemoryConsumption

WINDOW: Mapping[str, object] = {"drain_timeout_secs": 3.0}
AT_ONCE: Mapping[str, object] = {"drain_timeout_secs": 0.0}


#### The window


def test_a_request_that_ends_within_the_window_gets_no_notice() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(20)
        await asked.wait_frames(3)
        stage.agent.ask_to_stop()
        await stage.wait_stopped()

        assert asked.ending == "done"
        # It does not sit out its window.
        assert stage.ended_at < 3.0

    play(story, settings=WINDOW)


@pytest.mark.parametrize("accept", ["", ASK_ALL])
@pytest.mark.parametrize("migratable", [True, False, None])
def test_at_the_end_of_the_window_what_can_go_on_is_handed_back(
    migratable: bool | None, accept: str
) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(200, migratable=migratable, accept=accept)
        await asked.wait_frames(3)
        began = stage.now
        stage.agent.ask_to_stop()
        await stage.wait_stopped()

        assert asked.last is not None
        assert asked.ending == ("notice" if migratable else "error")
        assert asked.last.at == pytest.approx(began + 3.0, abs=0.01)
        assert asked.data
        # The router is told nothing of a status when it is handed something back.
        assert asked.last.status == (None if migratable else 503)

    play(story, settings=WINDOW)


def test_a_unary_request_is_never_handed_back() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(200, stream=False, migratable=True)
        await trio.sleep(1.0)
        stage.agent.ask_to_stop()
        await stage.wait_stopped()

        assert asked.ending == "error"

    play(story, settings=AT_ONCE)


def test_a_window_of_zero_hands_back_at_once() -> None:
    async def story(stage: Stage) -> None:
        asked, fixed, whole = stage.ask(200), stage.ask(200, migratable=False), stage.ask(2)
        await whole.wait_over()
        began = stage.now
        stage.agent.ask_to_stop()
        await stage.wait_stopped()

        assert [asked.ending, fixed.ending, whole.ending] == ["notice", "error", "done"]
        assert stage.ended_at == pytest.approx(began, abs=0.01)

    play(story, settings=AT_ONCE)


def test_a_request_without_a_first_token_is_handed_back_too() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(8, fault="hang")
        await trio.sleep(1.0)
        stage.agent.ask_to_stop()
        await stage.wait_stopped()

        assert asked.kinds == ["error"]
        assert asked.is_handed_back

    play(story, settings=AT_ONCE)


@pytest.mark.parametrize("window", [0.0, 0.3])
@pytest.mark.parametrize("migratable", [True, False])
@pytest.mark.parametrize("moment", [x / 20 for x in range(32)])
def test_a_drain_at_any_moment_of_a_stream(moment: float, migratable: bool, window: float) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(8, migratable=migratable)
        await trio.sleep(moment)
        stage.agent.ask_to_stop()
        await stage.wait_stopped()
        await stage.settle()

        # 0.5 s to the first token, 0.1 s to each of the others.
        over = moment + window > 1.21
        if moment + window < 1.19 or over:
            assert asked.ending == ("done" if over else "notice" if migratable else "error")
        assert stage.ended_at <= moment + window + 0.51

    play(story, settings={"drain_timeout_secs": window})


def test_notices_end_streams_where_their_routers_can_go_on() -> None:
    """What went out before a notice, and what a calm engine says, begin alike."""
    texts: list[str] = []

    async def calm(stage: Stage) -> None:
        asked = stage.ask(30)
        await asked.wait_over()
        texts.append(asked.text)

    async def drained(stage: Stage) -> None:
        asked = stage.ask(30)
        await asked.wait_frames(9)
        stage.agent.ask_to_stop()
        await stage.wait_stopped()
        texts.append(asked.text)

    play(calm)
    play(drained, settings=AT_ONCE)

    assert 0 < len(texts[1]) < len(texts[0])
    assert texts[0].startswith(texts[1])


#### The order


def test_the_entry_says_what_still_runs_until_the_drain_is_over() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(60), stage.ask(200)
        await asked[1].wait_frames(2)
        stage.agent.ask_to_stop()
        seen = []
        while not stage.ended.is_set():
            await trio.sleep(0.05)
            entry = stage.entry
            seen.append(None if entry is None else (entry["state"], entry["inflight"]))

        assert {("draining", 2), ("draining", 1)} <= set(seen)
        assert [each for each in seen if each and each[0] != "draining"] == []
        assert stage.entry is None
        assert [each.ending for each in asked] == ["done", "notice"]

    play(story, settings={"drain_timeout_secs": 10.0})


@pytest.mark.parametrize("fault", ["", "path=/health:status,code=503"])
def test_an_agent_that_is_not_registered_is_not_so_by_its_drain(fault: str) -> None:
    async def story(stage: Stage) -> None:
        if fault:
            stage.engine.add_faults(fault)
            await stage.reach(lambda: stage.entry is None)
        asked = stage.ask(100)
        await asked.wait_frames(2)
        stage.agent.ask_to_stop()
        while not stage.ended.is_set():
            await trio.sleep(0.05)
            assert not fault or stage.entry is None
        assert stage.entry is None

    play(story, settings=WINDOW)


def test_the_entry_changes_before_anything_else_and_the_door_stays_open_for_a_moment() -> None:
    async def story(stage: Stage) -> None:
        running = stage.ask(100)
        await running.wait_frames(2)
        assert stage.entry is not None
        stage.agent.ask_to_stop()
        await stage.settle()
        assert stage.entry is not None
        assert stage.entry["state"] == "draining"
        # A router that has not heard of it yet.
        late = stage.ask(4)
        await trio.sleep(HEARD_SECONDS + 0.1)
        refused = stage.ask(4)
        await late.wait_over()
        await stage.settle()

        assert late.ending == "done"
        assert refused.is_absent
        assert running.ending == "nothing"
        await stage.wait_stopped()
        assert running.ending == "notice"

    play(story, settings=WINDOW)


@pytest.mark.parametrize("queued", [0, 4])
def test_nothing_is_handed_back_before_the_entry_says_why(queued: int) -> None:
    """It would come again, from a router that reads there that this worker takes requests."""

    async def story(stage: Stage) -> None:
        running = await stage.store(200) if queued else stage.ask(200)
        await running.wait_frames(3)
        said: list[object] = []

        def note(*_: object) -> None:
            assert stage.entry is not None
            said.append(stage.entry["state"])

        stage.agent.handback_listeners = (note,)
        stage.agent.ask_to_stop()
        await stage.wait_stopped()

        assert running.ending == "notice"
        assert said == ["draining"]

    play(story, settings={"nats_req_max_pending": queued, **AT_ONCE})


def test_no_request_is_lost_in_the_door() -> None:
    """Somebody asks every 10 ms: each is answered, or told that nobody is there."""

    async def story(stage: Stage) -> None:
        asked = []
        for number in range(200):
            asked.append(stage.ask(2))
            await trio.sleep(0.01)
            if number == 20:
                stage.agent.ask_to_stop()
        await stage.wait_stopped()
        await stage.settle()

        served = [each for each in asked if each.ending == "done"]
        absent = [each for each in asked if each.is_absent]
        assert len(served) >= 60
        assert len(served) + len(absent) == len(asked)

    play(story, settings=WINDOW, first_token_seconds=0.05)


def test_cancels_are_heard_while_it_drains() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(200)
        await asked.wait_frames(3)
        stage.agent.ask_to_stop()
        await trio.sleep(1.0)
        stage.cancel(asked)
        await stage.wait_stopped()

        assert asked.ending == "nothing"
        assert stage.ended_at < 2.0

    play(story, settings=WINDOW)


#### An abrupt stop


def test_a_second_signal_ends_it_at_once_without_notices() -> None:
    async def story(stage: Stage) -> None:
        asked, fixed = stage.ask(200), stage.ask(200, migratable=False)
        await asked.wait_frames(3)
        stage.agent.ask_to_stop()
        await trio.sleep(1.0)
        stage.agent.ask_to_stop()
        began = stage.now
        await stage.wait_stopped()

        assert [asked.ending, fixed.ending] == ["error", "error"]
        assert stage.ended_at == pytest.approx(began, abs=0.01)
        assert stage.entry is None

    play(story, settings=WINDOW)


@pytest.mark.parametrize("moment", [0.0, 0.2, 0.6, 1.0, 2.9])
def test_a_second_signal_at_any_moment_of_a_drain(moment: float) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(200)
        await asked.wait_frames(3)
        stage.agent.ask_to_stop()
        await trio.sleep(moment)
        stage.agent.ask_to_stop()
        await stage.wait_stopped(0.5)

        assert asked.ending == "error"

    play(story, settings=WINDOW)


def test_an_agent_that_is_cancelled_frees_its_engine() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(200)
        await asked.wait_frames(3)
        stage.scope.cancel(reason="a bug somewhere above")
        await stage.wait_stopped()
        await stage.settle()

        assert asked.ending == "error"

    play(story)


#### Asked over NATS


def test_who_asks_for_a_drain_over_nats_waits_until_it_is_done() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(200)
        await asked.wait_frames(3)
        began = stage.now
        end = await stage.ask_to_drain()

        assert end == "drained"
        assert stage.now == pytest.approx(began + 3.0, abs=0.1)
        assert asked.ending == "notice"
        await stage.wait_stopped()

    play(story, settings=WINDOW)


def test_asking_twice_is_no_second_signal() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(200)
        await asked.wait_frames(3)
        ends = []

        async def ask(seconds: float) -> None:
            await trio.sleep(seconds)
            ends.append(await stage.ask_to_drain())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 0.0)
            nursery.start_soon(ask, 1.0)
        assert ends == ["drained", "drained"]
        assert asked.ending == "notice"

    play(story, settings=WINDOW)


def test_nobody_there_is_no_failure_and_no_broker_is() -> None:
    async def story(stage: Stage) -> None:
        stage.agent.ask_to_stop()
        await stage.wait_stopped()
        assert await stage.ask_to_drain() == "absent"
        stage.server.down()
        began = stage.now
        assert await stage.ask_to_drain() == "away"
        assert stage.now <= began + 5.1

    play(story)


def test_an_agent_that_dies_while_it_drains_is_not_waited_for_longer_than_its_window() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(200)
        await asked.wait_frames(3)

        async def kill() -> None:
            await trio.sleep(1.0)
            stage.server.cut(stage.broker)
            stage.scope.cancel(reason="killed")

        stage.nursery.start_soon(kill)
        began = stage.now
        assert await stage.ask_to_drain() == "late"
        assert stage.now < began + 15.0
        stage.server.mend(stage.broker)

    play(story, settings=WINDOW)


#### Without a broker


@pytest.mark.parametrize("moment", [0.0, 1.0])
def test_a_drain_ends_in_time_when_the_broker_is_away(moment: float) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(200, fault="hang")
        await trio.sleep(1.0)
        began = stage.now
        if moment == 0.0:
            stage.server.down()
        stage.agent.ask_to_stop()
        await trio.sleep(moment)
        stage.server.down()
        await stage.wait_stopped()

        assert stage.ended_at < began + 3.0 + 8.0
        assert asked.ending == "nothing"

    play(story, settings=WINDOW)


def test_a_drain_ends_in_time_when_the_broker_hangs() -> None:
    async def story(stage: Stage) -> None:
        stage.ask(200, fault="hang")
        await trio.sleep(1.0)
        began = stage.now
        stage.server.stall()
        stage.agent.ask_to_stop()
        await stage.wait_stopped()
        stage.server.go_on()

        assert stage.ended_at < began + 3.0 + 8.0

    play(story, settings=WINDOW)


#### Out of a work queue

QUEUED: Mapping[str, object] = {"nats_req_max_pending": 4, **WINDOW}


def stored(stage: Stage) -> int:
    """Messages that the queue still holds."""
    return len(stage.server.streams[NAMES.stream].stored)


def test_a_queued_request_is_acknowledged_when_it_is_over_not_before() -> None:
    async def story(stage: Stage) -> None:
        done = await stage.store(20)
        left = await stage.store(200)
        broken = await stage.store(20, payload=b"{")
        await stage.settle()
        assert broken.ending == "error"
        assert stored(stage) == 2
        await done.wait_over()
        await stage.settle()
        assert done.ending == "done"
        assert stored(stage) == 1
        stage.cancel(left)
        await stage.settle()
        assert stored(stage) == 0

    play(story, settings=QUEUED)


def test_a_cancel_for_what_is_still_queued_is_remembered() -> None:
    async def story(stage: Stage) -> None:
        limit_the_hand(stage, 1)
        running = await stage.store(10)
        waiting = await stage.store(10)
        await running.wait_frames(3)
        heard = len(stage.engine.requests)
        stage.cancel(waiting)
        await running.wait_over()
        await trio.sleep(3.0)

        assert waiting.frames == []
        assert [each.path for each in list(stage.engine.requests)[heard:]].count(
            "/v1/completions"
        ) == 0
        assert stored(stage) == 0

    play(story, settings=QUEUED)


def test_what_a_new_consumer_hands_out_again_is_the_request_that_is_open() -> None:
    """As when an agent that drains deletes the consumer of the next one of its id."""

    async def story(stage: Stage) -> None:
        running, short = await stage.store(20), await stage.store(2)
        await short.wait_over()
        await running.wait_frames(3)
        stage.server.streams[NAMES.stream].durables.clear()
        stage.server.wake()
        await running.wait_over()
        await stage.settle()

        asked = [each for each in stage.engine.requests if each.method == "POST"]
        assert len(asked) == 2
        assert stored(stage) == 0

    play(story, settings=QUEUED)


def test_what_has_no_inbox_leaves_the_queue() -> None:
    async def story(stage: Stage) -> None:
        await stage.store(4, inbox="a.*")
        await trio.sleep(1.0)
        assert stored(stage) == 0

    play(story, settings=QUEUED)


def limit_the_hand(stage: Stage, jobs: int) -> None:
    """As if so many jobs were all that an agent takes at once."""
    stage.broker.consumptions[0].max_ack_pending = jobs
    for durable in stage.server.streams[NAMES.stream].durables.values():
        durable.max_ack_pending = jobs


def test_the_door_closes_when_the_queue_is_empty() -> None:
    async def story(stage: Stage) -> None:
        limit_the_hand(stage, 1)
        asked = [await stage.store(4) for _ in range(3)]
        await asked[0].wait_frames(2)
        stage.agent.ask_to_stop()
        await stage.wait_stopped()

        assert [each.ending for each in asked] == ["done"] * 3
        assert stage.ended_at < 3.4
        assert stored(stage) == 0
        assert not stage.server.streams[NAMES.stream].durables

    play(story, settings=QUEUED)


def test_a_queue_that_cannot_be_emptied_is_handed_back() -> None:
    async def story(stage: Stage) -> None:
        limit_the_hand(stage, 1)
        asked = [await stage.store(200, migratable=number != 3) for number in range(5)]
        await asked[0].wait_frames(3)
        began = stage.now
        stage.agent.ask_to_stop()
        await stage.wait_stopped()

        assert [each.ending for each in asked] == ["notice"] * 3 + ["error", "notice"]
        assert asked[4].data == b""
        assert stage.ended_at < began + 3.0 + 2.5
        assert stored(stage) == 0
        assert not stage.server.streams[NAMES.stream].durables

    play(story, settings=QUEUED)


@pytest.mark.parametrize("window", [0.0, 1.0])
def test_the_end_of_a_window_does_not_wait_for_a_door_that_is_slow_to_close(
    window: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer waits until what it has asked for last has come to nothing."""
    drain = MemoryConsumption.drain

    async def slow(self: MemoryConsumption, seconds: float) -> bool:
        await trio.sleep(1.9)
        return await drain(self, seconds)

    monkeypatch.setattr(MemoryConsumption, "drain", slow)

    async def story(stage: Stage) -> None:
        running, late = await stage.store(200), stage.expect("_INBOX.late")
        await running.wait_frames(3)
        began = stage.now
        stage.agent.ask_to_stop()
        await trio.sleep(window + 0.5)
        await stage.store(4, inbox="_INBOX.late")
        await stage.wait_stopped()

        assert running.last is not None
        assert running.ending == "notice"
        assert running.last.at == pytest.approx(began + window, abs=0.01)
        assert late.ending == "notice"

    play(story, settings={"nats_req_max_pending": 4, "drain_timeout_secs": window})


def test_what_is_stored_as_the_door_closes_is_not_left_behind() -> None:
    async def story(stage: Stage) -> None:
        running = await stage.store(200)
        await running.wait_frames(3)
        stage.agent.ask_to_stop()
        await trio.sleep(1.0)
        late = await stage.store(4)
        await stage.wait_stopped()

        assert late.ending == "notice"
        assert stored(stage) == 0

    play(story, settings=QUEUED)


def test_a_queue_that_cannot_be_read_is_tried_once() -> None:
    async def story(stage: Stage) -> None:
        limit_the_hand(stage, 1)
        running = await stage.store(200)
        await running.wait_frames(3)
        # The consumer has gone from the server: nothing tells what waits.
        stage.server.streams[NAMES.stream].durables.clear()
        stage.broker.consumptions.clear()
        stage.agent.ask_to_stop()
        await stage.wait_stopped()

        assert running.ending == "notice"

    play(story, settings=QUEUED)


def test_without_a_limit_jetstream_s_queues_are_not_touched() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(4)
        await asked.wait_over()
        stage.agent.ask_to_stop()
        await stage.wait_stopped()
        assert stage.server.streams == {}

    play(story)


def test_a_broker_that_forgot_its_queue_gets_it_again() -> None:
    async def story(stage: Stage) -> None:
        first = await stage.store(4)
        await first.wait_over()
        stage.server.down(forgets=True)
        await trio.sleep(2.0)
        stage.server.up()
        await stage.settle()
        second: Asked = await stage.store(4)
        await second.wait_over()
        assert second.ending == "done"

    play(story, settings=QUEUED)
