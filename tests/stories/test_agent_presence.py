"""Two agents with one id: the second does not begin, and where both serve, both say so."""

from __future__ import annotations

import json

import pytest
import trio
from attrs import define, field

from router.agent.app import Agent
from router.agent.draining import LINGER_SECONDS
from router.agent.presence import ANSWER_SECONDS, ASK_SECONDS, GONE_SECONDS
from tests.agents import ID, NAMES, Stage, play
from tests.memory_broker import MemoryBroker


@define(eq=False)
class Second:
    """Another agent of the same id, on a connection of its own."""

    agent: Agent
    broker: MemoryBroker
    ended: trio.Event = field(factory=trio.Event)


def start_second(stage: Stage, *, instance: str = "", is_connected: bool = True) -> Second:
    first = stage.agent
    broker = stage.server.broker(is_connected=is_connected)
    second = Second(Agent(first.settings, stage.network, first.logs, broker), broker)
    if instance:
        second.agent.presence.instance = instance

    async def run() -> None:
        await second.agent.run()
        second.ended.set()

    stage.nursery.start_soon(run)
    return second


def said(stage: Stage, event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in stage.log.lines]
    return [line for line in lines if line["event"].startswith(event)]


def test_a_second_agent_of_an_id_does_not_begin() -> None:
    async def story(stage: Stage) -> None:
        second = start_second(stage)
        with trio.fail_after(5.0):
            await second.ended.wait()

        assert second.agent.refused_by is not None
        assert second.agent.refused_by.instance == stage.agent.presence.instance
        assert not second.agent.listening.is_set()
        assert stage.agent.listening.is_set()
        assert not second.broker.subscriptions
        assert stage.entry is not None
        asked = stage.ask(4)
        await asked.wait_over()
        assert asked.ending == "done"

    play(story)


@pytest.mark.parametrize("instance", ["0", "z"])
def test_of_two_that_start_at_once_one_goes_on(instance: str) -> None:
    async def story(stage: Stage) -> None:
        second = start_second(stage, instance=instance, is_connected=False)
        await trio.sleep(1.0)
        stage.server.mend(stage.broker)
        await trio.sleep(ANSWER_SECONDS / 2)
        stage.server.mend(second.broker)
        await trio.sleep(2.0)

        both = [stage.agent, second.agent]
        assert [each.listening.is_set() for each in both] in ([True, False], [False, True])
        for each in both:
            each.ask_to_stop()
        await second.ended.wait()

    play(story, is_connected=False)


def test_an_agent_waits_for_its_predecessor_to_drain() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(50)
        await asked.wait_frames(2)
        stage.agent.ask_to_stop()
        await trio.sleep(0.1)
        second = start_second(stage)
        await stage.wait_stopped()
        assert not second.agent.listening.is_set()
        assert asked.ending == "done"
        await trio.sleep(2.0)

        assert second.agent.listening.is_set()
        assert stage.entry is not None
        second.agent.ask_to_stop()
        await second.ended.wait()
        assert stage.entry is None

    play(story)


@pytest.mark.parametrize("later", [0.0, 1.0, 2.5, 4.0])
def test_two_that_meet_later_complain_once_and_spare_the_other_s_entry(later: float) -> None:
    """They started on two sides of a broken network."""

    async def story(stage: Stage) -> None:
        stage.server.lose(NAMES.agent(ID), times=2)
        second = start_second(stage)
        await trio.sleep(4 * ASK_SECONDS + later)
        assert second.agent.listening.is_set()
        assert len(said(stage, "two agents have one id")) == 2  # once each; they share a log
        second.agent.ask_to_stop()
        while not second.ended.is_set():  # all the time until then
            assert stage.entry is not None
            assert stage.entry["state"] == "ready"
            await trio.sleep(0.05)
        asked = stage.ask(4)
        await asked.wait_over()
        assert asked.ending == "done"
        stage.agent.ask_to_stop()
        await stage.wait_stopped()
        await trio.sleep(0.1)

        assert stage.entry is None

    play(story)


def test_one_of_two_that_leaves_spares_the_other_s_place_in_the_queue() -> None:
    async def story(stage: Stage) -> None:
        stage.server.lose(NAMES.agent(ID), times=2)
        second = start_second(stage)
        await trio.sleep(4 * ASK_SECONDS)
        durables = stage.server.streams[NAMES.stream].durables
        shared = dict(durables)
        second.agent.ask_to_stop()
        await second.ended.wait()

        assert durables == shared
        assert shared
        stage.agent.ask_to_stop()
        await stage.wait_stopped()
        assert not durables

    play(story, settings={"nats_req_max_pending": 4})


def test_an_entry_is_not_left_to_one_that_has_gone_without_a_word() -> None:
    async def story(stage: Stage) -> None:
        stage.server.lose(NAMES.agent(ID), times=2)
        second = start_second(stage)
        await trio.sleep(4 * ASK_SECONDS)
        assert stage.agent.presence.is_shared
        stage.server.cut(second.broker)
        await trio.sleep(GONE_SECONDS + ASK_SECONDS)
        stage.agent.ask_to_stop()
        await stage.wait_stopped()

        assert stage.entry is None
        second.agent.ask_to_stop()
        await second.ended.wait()

    play(story)


def test_an_agent_that_never_saw_its_broker_can_be_stopped() -> None:
    async def story(stage: Stage) -> None:
        await trio.sleep(3.0)
        assert not stage.agent.listening.is_set()
        stage.agent.ask_to_stop()
        await stage.wait_stopped(1.0)

    play(story, is_connected=False)


#### What is told


def test_an_agent_lingers_after_it_has_told_its_asker() -> None:
    async def story(stage: Stage) -> None:
        assert await stage.ask_to_drain() == "drained"
        told_at = stage.now
        await stage.wait_stopped()

        assert stage.ended_at == pytest.approx(told_at + LINGER_SECONDS, abs=0.1)

    play(story, settings={"drain_timeout_secs": 1.0})


def test_the_log_tells_of_the_broker_and_of_the_engine() -> None:
    async def story(stage: Stage) -> None:
        stage.engine.add_faults("path=/health:status,code=503")
        await trio.sleep(30.0)
        stage.engine.clear_faults()
        await trio.sleep(10.0)
        stage.server.cut(stage.broker)
        stage.server.mend(stage.broker)
        await trio.sleep(5.0)
        stage.agent.ask_to_stop()
        await stage.wait_stopped()

        expected = [
            "the engine is healthy",
            "registered",
            "the engine is unhealthy",
            "deregistered",
            "the engine is healthy",
            "registered",
            "the broker is away",
            "connected to the broker",
            "draining",
            "deregistered",
            "drained",
        ]
        events = [json.loads(line)["event"] for line in stage.log.lines]
        # What else is told depends on luck: a renewal may meet the loss.
        assert [each for each in events if each in expected] == expected, events

    play(story, settings={"drain_timeout_secs": 1.0})


@pytest.mark.parametrize("method, path", [("GET", "/health"), ("POST", "/tokenize")])
def test_what_routers_ask_for_themselves_is_no_line_at_info(method: str, path: str) -> None:
    async def story(stage: Stage) -> None:
        payload = json.dumps({"path": path, "method": method, "body": {"prompt": "x"}})
        await stage.ask(payload=payload.encode()).wait_over()
        await stage.ask(2).wait_over()

        assert len(said(stage, "request")) == 1

    play(story)
