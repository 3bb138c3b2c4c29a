"""How the registry and the fleet live together: who wins, who is kept out, what junk does."""

from __future__ import annotations

import json

import pytest
import structlog.testing
import trio
from attrs import evolve

import router.registry
from router.engines import Knowledge
from router.wires.nats import entries
from router.wires.nats.broker import Change, ChangeKind
from router.wires.nats.entries import RENEW_SECONDS, TTL_SECONDS, Entry
from router.wires.nats.protocol import token_of
from router.worker import DuplicateWorker, Origin, Probe, ProbeOutcome, Worker
from router.workerspec import WorkerSpec
from statemachines.worker import WorkerState
from tests.memory_broker import Entries
from tests.registries import BUCKET, SOON, Registered, Router, tell

X = Entry("x:8000", engine="vllm", models=("m",), context_length=4096)


async def put(world: Registered, key: str, value: bytes) -> None:
    await world.server.broker().bucket(BUCKET, ttl_seconds=TTL_SECONDS).put(key, value)


#### Joining


def test_a_worker_that_registers_serves_before_it_was_ever_probed() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        world.add_agent(X)
        await trio.sleep(SOON)

        worker = router.worker(X.id)
        assert worker is not None
        assert worker.state is WorkerState.READY
        assert worker.origin is Origin.REGISTRY
        assert worker.url == "nats:x:8000"
        assert worker.knowledge == Knowledge("vllm", ("m",), 4096)
        assert router.fleet.ready("mixed", "m") == (worker,)

    tell(story)


def test_a_worker_whose_agent_does_not_know_its_engine_waits_for_a_probe() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        world.add_agent(evolve(X, engine="auto"))
        await trio.sleep(SOON)

        worker = router.worker(X.id)
        assert worker is not None
        assert worker.state is WorkerState.PROBING

    tell(story)


def test_a_worker_that_registers_draining_gets_nothing() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        world.add_agent(evolve(X, is_draining=True))
        await trio.sleep(SOON)

        assert router.fleet.ready("mixed") == ()
        assert [each.state for each in router.fleet.all()] == [WorkerState.DRAINING]

    tell(story)


def test_an_agent_s_word_does_not_heal_who_fails_its_probes() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        world.add_agent(X)
        await trio.sleep(SOON)
        worker = router.worker(X.id)
        assert worker is not None
        for _ in range(3):
            worker.probed(Probe(ProbeOutcome.REFUSED, trio.current_time()))
        world.change(X.id, inflight=1)
        await trio.sleep(5)

        assert worker.state is WorkerState.UNHEALTHY

    tell(story)


def test_what_the_engine_said_itself_outlives_renewals() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        world.add_agent(X)
        await trio.sleep(SOON)
        worker = router.worker(X.id)
        assert worker is not None
        probed = Knowledge("vllm", ("m", "lora"), 2048, "0.33.0")
        worker.learn(probed)
        worker.fingerprint = "f"
        world.change(X.id, inflight=1)
        await trio.sleep(5)

        assert worker.knowledge == probed
        assert worker.fingerprint == "f"

        world.change(X.id, models=("n",))
        await trio.sleep(SOON)
        assert worker.models == ("n",)
        assert worker.fingerprint is None

    tell(story)


def test_what_others_have_at_a_worker_counts_as_its_load() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        world.add_agent(X)
        await trio.sleep(SOON)
        worker = router.worker(X.id)
        assert worker is not None
        worker.legs.update((object(), object()))
        world.change(X.id, inflight=5)
        await trio.sleep(SOON)

        assert worker.elsewhere == 3

    tell(story)


#### Who else names workers


@pytest.mark.parametrize("url", ["http://x:8000", "nats:x:8000"])
@pytest.mark.parametrize("origin", [Origin.STATIC, Origin.API])
@pytest.mark.parametrize("comes_first", [True, False])
def test_whom_the_operator_named_stays_as_named(
    url: str, origin: Origin, comes_first: bool
) -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        spec = WorkerSpec.of(url, engine="sglang", group="mine")
        if comes_first:
            named = router.fleet.add(spec, origin)
        world.add_agent(X)
        await trio.sleep(SOON)
        if not comes_first:
            # The published API: an id that is known is a conflict, whoever brought it.
            with pytest.raises(DuplicateWorker):
                router.fleet.add(spec, origin)
            return

        assert router.worker(X.id) is named
        assert (named.url, named.engine, named.group) == (spec.url, "sglang", "mine")
        assert named.models == ("m",)  # the entry only adds what nobody knew
        assert named.context_length == 4096
        assert named.state is WorkerState.PROBING  # whether it can serve is for its probes to say

        world.agents[X.id].crash()
        await trio.sleep(3 * TTL_SECONDS)
        assert router.worker(X.id) is named

        world.add_agent(evolve(X, version="baton 9"))
        await trio.sleep(SOON)
        await world.agents[X.id].leave()
        await trio.sleep(SOON)
        assert router.worker(X.id) is named

    tell(story)


def test_an_entry_does_not_overrule_what_a_named_worker_said_of_itself() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        named = router.fleet.add(WorkerSpec.of("http://x:8000"))
        named.learn(Knowledge("vllm", ("other",), 1024, "0.33.0"))
        world.add_agent(X)
        await trio.sleep(SOON)
        world.change(X.id, models=("n",))
        await trio.sleep(SOON)

        assert named.models == ("other",)

    tell(story)


@pytest.mark.parametrize("ending", ["ready", "leave", "crash"])
def test_a_named_worker_drains_while_its_entry_says_so(ending: str) -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        named = router.fleet.add(WorkerSpec.of("nats:x:8000"))
        named.probed(Probe(ProbeOutcome.PASSED, 0.0))
        agent = world.add_agent(X)
        await trio.sleep(SOON)
        world.change(X.id, is_draining=True)
        await trio.sleep(SOON)
        assert router.shown()[X.id][0] == WorkerState.DRAINING

        if ending == "ready":
            world.change(X.id, is_draining=False)
        elif ending == "leave":
            await agent.leave()
        else:
            agent.crash()
        await trio.sleep(2 * TTL_SECONDS)
        # Its probes say whether it can serve again.
        state = WorkerState.DRAINING if ending == "leave" else WorkerState.PROBING
        assert router.shown()[X.id][0] == state

    tell(story)


def probe(worker: Worker, outcome: ProbeOutcome) -> None:
    worker.probed(Probe(outcome, trio.current_time()))


@pytest.mark.parametrize("is_gone_first", [True, False])
@pytest.mark.parametrize("returns", ["registers", "registers draining", "answers", "not"])
def test_a_named_worker_that_deregisters_gets_nothing_until_it_is_back(
    returns: str, is_gone_first: bool
) -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        named = router.fleet.add(WorkerSpec.of("nats:x:8000"))
        probe(named, ProbeOutcome.PASSED)
        agent = world.add_agent(X)
        await trio.sleep(SOON)
        await agent.leave()
        await trio.sleep(SOON)
        assert named.state is WorkerState.DRAINING

        for _ in range(3):  # the agent still answers probes while it drains
            probe(named, ProbeOutcome.PASSED)
            await trio.sleep(RENEW_SECONDS)
        assert named.state is WorkerState.DRAINING
        if is_gone_first:
            probe(named, ProbeOutcome.REFUSED)
            await trio.sleep(3 * RENEW_SECONDS)
        assert named.state is WorkerState.DRAINING

        if returns.startswith("registers"):
            world.add_agent(evolve(X, is_draining=returns == "registers draining"))
            await trio.sleep(SOON)
        elif returns == "answers":
            probe(named, ProbeOutcome.PASSED)
        await trio.sleep(2 * RENEW_SECONDS)
        is_back = returns == "registers" or (returns == "answers" and is_gone_first)
        assert named.state is (WorkerState.PROBING if is_back else WorkerState.DRAINING)
        probe(named, ProbeOutcome.PASSED)
        assert named.is_ready is is_back
        if returns == "registers draining":
            world.change(X.id, is_draining=False)
            await trio.sleep(SOON)
            probe(named, ProbeOutcome.PASSED)
            assert named.is_ready

    tell(story)


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_the_operator_says_of_a_worker_that_deregistered_stands(when: str) -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        named = router.fleet.add(WorkerSpec.of("nats:x:8000"))
        probe(named, ProbeOutcome.PASSED)
        agent = world.add_agent(X)
        await trio.sleep(SOON)
        if when == "before":
            router.fleet.drain(X.id)
        await agent.leave()
        await trio.sleep(SOON)
        if when == "after":
            router.fleet.cancel_drain(X.id)
            await trio.sleep(2 * RENEW_SECONDS)
            router.fleet.drain(X.id)
        world.add_agent(X)
        await trio.sleep(2 * RENEW_SECONDS)
        assert named.state is WorkerState.DRAINING

    tell(story)


@pytest.mark.parametrize("how", ["crashes", "is reached by HTTP"])
def test_a_named_worker_keeps_serving_when_its_agent(how: str) -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        url = "http://x:8000" if how == "is reached by HTTP" else "nats:x:8000"
        named = router.fleet.add(WorkerSpec.of(url))
        probe(named, ProbeOutcome.PASSED)
        agent = world.add_agent(X)
        await trio.sleep(SOON)
        if how == "crashes":
            agent.crash()
        else:
            await agent.leave()
        await trio.sleep(2 * TTL_SECONDS)
        assert named.is_ready  # until its probes say otherwise

    tell(story)


def test_the_operator_s_drain_is_not_undone_by_an_entry() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        world.add_agent(X)
        await trio.sleep(SOON)
        router.fleet.drain(X.id)
        for inflight in range(5):
            world.change(X.id, inflight=inflight)
            await trio.sleep(1)

        assert [each.state for each in router.fleet.all()] == [WorkerState.DRAINING]

    tell(story)


def test_whom_the_operator_removed_stays_out_until_it_registers_anew() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        agent = world.add_agent(X)
        await trio.sleep(SOON)
        router.fleet.remove(X.id)
        for inflight in range(10):
            world.change(X.id, inflight=inflight, is_draining=inflight % 2 == 1)
            await trio.sleep(1)
        assert router.worker(X.id) is None

        await agent.leave()
        await trio.sleep(SOON)
        world.add_agent(X)
        await trio.sleep(SOON)
        assert router.worker(X.id) is not None

    tell(story)


def test_whom_the_operator_removed_stays_out_over_an_outage() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        world.add_agent(X)
        await trio.sleep(SOON)
        router.fleet.remove(X.id)
        world.server.down(forgets=True)
        await trio.sleep(5)
        world.server.up()
        await trio.sleep(3 * TTL_SECONDS)

        assert router.worker(X.id) is None

    tell(story)


#### What is no entry


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (X.key, b"junk"),
        (X.key, b"{}"),
        (X.key, b'{"id":"x:8000","role":"boss"}'),
        (X.key, entries.encode(evolve(X, id="y:8000"))),
        ("junk", entries.encode(X)),
        ("junk.key", b"\xff"),
        ("a" * 500, b'{"id":"x"}'),
        (token_of("a b"), b'{"id":"a b"}'),
    ],
)
def test_junk_is_refused_once_and_changes_nothing(key: str, value: bytes) -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        await put(world, key, value)
        with structlog.testing.capture_logs() as log:
            for _ in range(5):
                await put(world, key, value)
                await trio.sleep(2)

        assert router.fleet.all() == ()
        assert router.registry.view.refused >= 5
        assert router.registry.view.entries == 0
        assert [line["fact"] for line in log if line.get("fact") == "refused"] in ([], ["refused"])
        world.add_agent(X)
        await trio.sleep(SOON)
        assert [each.id for each in router.fleet.all()] == [X.id]

    tell(story)


def test_junk_over_an_entry_leaves_its_worker_alone() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        agent = world.add_agent(X)
        await trio.sleep(SOON)
        worker = router.worker(X.id)
        agent.crash()
        for _ in range(20):  # longer than a TTL: somebody renews it, whatever he says
            await put(world, X.key, b"junk")
            await trio.sleep(2)
        assert router.worker(X.id) is worker

        await trio.sleep(2 * TTL_SECONDS)
        assert router.worker(X.id) is None

    tell(story)


def test_an_id_that_is_said_under_another_key_takes_nobody_s_place() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        world.add_agent(X)
        await trio.sleep(SOON)
        worker = router.worker(X.id)
        await put(world, token_of("y:1"), entries.encode(evolve(X, engine="sglang")))
        await trio.sleep(SOON)

        assert router.fleet.all() == (worker,)
        assert worker is not None
        assert worker.engine == "vllm"

    tell(story)


def test_two_agents_with_one_id_do_not_throw_each_other_out() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        one = world.add_agent(X)
        await trio.sleep(SOON)
        with structlog.testing.capture_logs() as log:
            world.add_agent(evolve(X, engine="sglang", version="baton 9"))
            await trio.sleep(60)
        assert len(router.joined) == 2
        whys = [line["why"] for line in log if line.get("fact") == "refused"]
        assert whys == ["two agents have the id x:8000"]

        world.agents[X.id].crash()
        await trio.sleep(2 * TTL_SECONDS)
        found = router.worker(X.id)
        assert found is not None
        assert found.engine == "vllm"

        one.crash()
        await trio.sleep(2 * TTL_SECONDS)
        assert router.fleet.all() == ()

    tell(story)


def test_who_learned_more_than_we_know_is_read_all_the_same() -> None:
    async def story(world: Registered) -> None:
        router = world.add_router()
        await put(world, X.key, json.dumps({"id": X.id, "engine": "vllm", "later": [1]}).encode())
        await trio.sleep(SOON)

        assert router.fleet.ready("mixed", "anything") == router.fleet.all() != ()

    tell(story)


def test_a_registry_that_cannot_be_read_is_complained_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As a server without JetStream: it is there, and never tells an entry.
    monkeypatch.setattr("tests.memory_broker.MemoryWatch.begin", lambda _: None)

    async def story(world: Registered) -> None:
        world.add_router()
        await trio.sleep(60)
        world.server.down()
        await trio.sleep(60)

    with structlog.testing.capture_logs() as log:
        tell(story)
    (line,) = [line for line in log if line.get("fact") == "unreadable"]
    assert "is JetStream on" in line["why"]


#### Many


@pytest.mark.slow
def test_thousands_join_and_leave_a_few_at_a_time() -> None:
    many = [evolve(X, id=f"w{number}:8000") for number in range(2000)]
    steps: list[int] = []

    class Steps(trio.abc.Instrument):
        """How many come or go before another task of the router has its turn."""

        done = 0

        def after_task_step(self, task: trio.lowlevel.Task) -> None:
            done = len(followed.joined) + len(followed.left)
            steps.append(done - self.done)
            self.done = done

    followed: Router

    async def story(world: Registered) -> None:
        values = {each.key: (entries.encode(each), 1e9) for each in many}
        world.server.buckets[BUCKET] = Entries(TTL_SECONDS, values)
        nonlocal followed
        followed = world.add_router()
        trio.lowlevel.add_instrument(Steps())
        await trio.sleep(5)
        assert len(followed.fleet.ready("mixed", "m")) == len(many)

        world.server.down(forgets=True)
        world.server.up()
        await trio.sleep(2 * TTL_SECONDS)
        assert followed.fleet.all() == ()

    with structlog.testing.capture_logs():
        tell(story)
    assert sum(steps) == 2 * len(many)
    assert max(steps) <= router.registry.CHANGES_AT_ONCE


def test_beyond_a_bound_nobody_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.registry, "ENTRIES_MAX", 3)

    async def story(world: Registered) -> None:
        followed = world.add_router()
        for number in range(5):
            world.add_agent(evolve(X, id=f"w{number}"))
            await trio.sleep(0.1)
        await trio.sleep(SOON)
        assert [each.id for each in followed.fleet.all()] == ["w0", "w1", "w2"]

        await world.agents["w1"].leave()
        await trio.sleep(5)
        # The next renewal of one of the others takes the place.
        assert len(followed.fleet.all()) == 3

    tell(story)


def test_more_changes_than_can_be_looked_at_begin_the_watch_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router.registry, "BACKLOG_MAX", 20)

    async def story(world: Registered) -> None:
        followed = world.add_router()
        for number in range(5):
            world.add_agent(evolve(X, id=f"w{number}"))
        await trio.sleep(SOON)
        for inflight in range(30):
            value = entries.encode(evolve(X, id="w0", inflight=inflight))
            world.server.change(BUCKET, Change(ChangeKind.PUT, token_of("w0"), value))
        await trio.sleep(5)

        assert followed.losses == 1
        assert followed.registry.is_synced
        assert len(followed.fleet.all()) == 5
        assert followed.left == []

    tell(story)


#### Two routers


def test_two_routers_see_joins_and_drains_within_two_seconds() -> None:
    async def story(world: Registered) -> None:
        one, other = world.add_router(), world.add_router()
        for number in range(5):
            world.add_agent(evolve(X, id=f"w{number}"))
        await trio.sleep(2)
        assert one.shown() == other.shown()
        assert len(one.fleet.ready("mixed")) == 5

        for number in range(5):
            world.change(f"w{number}", is_draining=True)
            await trio.sleep(2)
            assert one.shown() == other.shown()
            assert len(one.fleet.ready("mixed")) == 4 - number

    tell(story)


def test_a_router_that_starts_late_or_alone_sees_the_same() -> None:
    async def story(world: Registered) -> None:
        world.server.down()
        one = world.add_router(is_connected=False)
        world.add_agent(X)
        await trio.sleep(20)
        assert one.fleet.all() == ()
        assert not one.registry.view.is_synced
        assert one.registry.view.seconds_since_sync == 20
        assert not one.registry.view.is_connected

        world.server.up()
        await trio.sleep(5)
        other = world.add_router()
        await trio.sleep(SOON)
        assert one.shown() == other.shown() != {}
        assert one.registry.view.seconds_since_sync < 3

    tell(story)
