"""The engine's entry in the registry: when it stands there, what it says, and when it goes."""

from __future__ import annotations

import pytest
import trio

from router.wires.nats.broker import BrokerError
from router.wires.nats.entries import RENEW_SECONDS, TTL_SECONDS
from tests.agents import KEY, NAMES, Stage, play
from tests.memory_broker import MemoryBucket


def expiry(stage: Stage) -> float:
    """When the entry would go if nobody renewed it."""
    return stage.server.buckets[NAMES.bucket].values[KEY][1] - stage.began_at


def test_an_entry_says_what_the_engine_is() -> None:
    async def story(stage: Stage) -> None:
        entry = stage.entry
        assert entry is not None
        assert entry.pop("version", "").startswith("baton")  # type: ignore[attr-defined]
        assert entry == {
            "id": "w1",
            "engine": "sglang",
            "role": "prefill",
            "models": ["tiny"],
            "context_length": 4096,
            "state": "ready",
            "inflight": 0,
            "group": "g1",
            "bootstrap_host": "kv.example",
            "bootstrap_port": 8998,
        }

    settings = {"role": "prefill", "group": "g1", "bootstrap_port": 8998}
    play(story, engine="sglang", settings={**settings, "bootstrap_host": "kv.example"})


def test_an_entry_is_renewed_while_the_agent_lives_and_goes_when_it_dies() -> None:
    async def story(stage: Stage) -> None:
        for _ in range(20):
            assert expiry(stage) >= stage.now + TTL_SECONDS - RENEW_SECONDS - 1e-6
            await trio.sleep(1.0)
        died_at = stage.now
        stage.scope.cancel(reason="killed")
        await stage.wait_stopped()
        await trio.sleep(TTL_SECONDS + 0.1)

        assert stage.entry is None
        assert stage.now <= died_at + TTL_SECONDS + 0.2

    play(story)


def test_an_entry_says_how_many_requests_are_open() -> None:
    async def story(stage: Stage) -> None:
        for _ in range(3):
            stage.ask(200)
        await trio.sleep(RENEW_SECONDS)
        assert stage.entry is not None
        assert stage.entry["inflight"] == 3

    play(story)


def test_an_engine_that_still_starts_is_not_registered() -> None:
    async def story(stage: Stage) -> None:
        assert stage.entry is None
        await trio.sleep(30.0)
        assert stage.entry is None
        stage.engine.clear_faults()
        await trio.sleep(2.5)
        assert stage.entry is not None

    play(story, faults="path=/health:status,code=503")


@pytest.mark.parametrize("fault", ["status,code=503", "hang", "cut"])
def test_an_ill_engine_is_taken_out_and_put_back(fault: str) -> None:
    async def story(stage: Stage) -> None:
        stage.engine.add_faults(f"path=/health:{fault}")
        ill_at = stage.now
        await stage.reach(lambda: stage.entry is None)
        assert ill_at + 2.0 < stage.now < ill_at + 3 * (2.2 + 5.0)
        await trio.sleep(10.0)
        assert stage.entry is None
        stage.engine.clear_faults()
        await trio.sleep(9.0)
        assert stage.entry is not None

    play(story)


def test_an_entry_that_may_stand_there_is_taken_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    put = MemoryBucket.put

    async def put_without_an_answer(bucket: MemoryBucket, key: str, value: bytes) -> None:
        await put(bucket, key, value)
        raise BrokerError("no answer in time")

    async def story(stage: Stage) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryBucket, "put", put_without_an_answer)
            stage.engine.clear_faults()
            await stage.reach(lambda: stage.entry is not None)
            assert not stage.agent.registration.registered.is_set()
            stage.engine.add_faults("now:server_dies")
            await stage.reach(lambda: stage.entry is None, TTL_SECONDS - 1.0)

    play(story, faults="path=/health:status,code=503", settings={"health_check_interval_secs": 1.0})


def test_a_dead_engine_is_noticed_by_its_requests_before_its_probes() -> None:
    async def story(stage: Stage) -> None:
        stage.engine.add_faults("now:server_dies")
        died_at = stage.now
        for _ in range(4):
            asked = stage.ask(4)
            await asked.wait_over()
            await trio.sleep(0.5)
        await stage.reach(lambda: stage.entry is None)
        # The interval is a minute, three times over.
        assert stage.now < died_at + 3.0

    play(story, settings={"health_check_interval_secs": 60.0})


def test_the_broker_s_return_brings_the_entry_at_once() -> None:
    async def story(stage: Stage) -> None:
        stage.server.down(forgets=True)
        await trio.sleep(25.0)
        stage.server.up()
        await trio.sleep(0.01)
        assert stage.entry is not None

    play(story)


def test_an_engine_with_another_model_is_registered_anew_at_once() -> None:
    async def story(stage: Stage) -> None:
        def learn() -> None:
            assert stage.agent.worker.knowledge is not None
            stage.agent.worker.models = ("other",)
            assert stage.agent.worker.on_learned is not None
            stage.agent.worker.on_learned()

        learn()
        await stage.settle()
        assert stage.entry is not None
        assert stage.entry["models"] == ["other"]

    play(story)


def test_an_entry_asked_for_as_the_drain_begins_does_not_stay() -> None:
    """A put that hangs in the broker while the agent leaves."""

    async def story(stage: Stage) -> None:
        stage.server.stall()
        stage.agent.registration.renew()
        await stage.settle()
        stage.agent.ask_to_stop()
        await trio.sleep(0.5)
        stage.server.go_on()
        await stage.wait_stopped()

        assert stage.entry is None

    play(story)
