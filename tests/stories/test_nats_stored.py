"""Requests that are stored for a worker which is killed, and what its successor makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest
import trio

from router.wires.nats.broker import Message
from router.wires.nats.protocol import Names, token_of
from router.worker import Probe, ProbeOutcome
from router.workerspec import WorkerSpec
from tests.cluster import WARM_UP_SECONDS, Answer, Cluster, Routed, run
from tests.memory_broker import MemoryBroker
from tests.simulate import read_metrics

NAMES = Names()
QUEUED: dict[str, object] = {"nats_req_max_pending": 4}
#: An entry that is not renewed lives for 10 s, and is looked at again after that.
GONE_SECONDS = 13.0


def stored(cluster: Cluster) -> int:
    return len(cluster.server.streams[NAMES.stream].stored)


def asked(cluster: Cluster, id: str) -> int:
    """Completions that an agent's engine was asked for."""
    requests = cluster.agents[id].engine.requests
    return len([each for each in requests if each.path == "/v1/completions"])


def total(metrics: Mapping[str, float], name: str) -> float:
    return sum(value for each, value in metrics.items() if each.partition("{")[0] == name)


async def complete(routed: Routed, answers: list[Answer], stream: bool = True) -> None:
    answers.append(await routed.complete(stream=stream))


class Asker:
    """Who stores requests, and hears what comes back."""

    def __init__(self, cluster: Cluster) -> None:
        self.broker: MemoryBroker = cluster.server.broker()
        self.heard: dict[str, list[Message]] = {}

    async def store(self, id: str, *, is_stored: bool = True, **request: object) -> list[Message]:
        """Through the queue, or by the subject alone, which a leftover stream captures."""
        inbox = f"_INBOX.asker.{len(self.heard)}"
        heard: list[Message] = []
        self.heard[inbox] = heard

        def hear(messages: Sequence[Message]) -> None:
            heard.extend(each for each in messages if "rs-type" in each.headers)

        self.broker.subscribe(inbox, hear, on_lost=lambda _: None)
        body = {"model": "tiny", "prompt": "once", "max_tokens": 4, "stream": True}
        made = {"path": "/v1/completions", "stream": True, "body": body} | request
        headers = {"rs-inbox": inbox, "rs-accept": "head,heartbeat"}
        subject, payload = NAMES.request(id), msgspec.json.encode(made)
        if is_stored:
            queue = self.broker.work_queue(NAMES.stream, [NAMES.requests], max_messages=1000)
            await queue.publish(subject, payload, headers=headers)
        else:
            self.broker.publish(subject, payload, headers=headers, reply=inbox)
            await trio.sleep(0.01)
        return heard


def ending(heard: list[Message]) -> tuple[str, str | None, bool]:
    (last,) = heard
    is_notice = last.payload.startswith(b"infera: worker draining")
    return last.headers["rs-type"], last.headers.get("rs-status"), is_notice


#### The router


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("is_named", [True, False])
def test_what_is_stored_for_a_killed_agent_goes_elsewhere(stream: bool, is_named: bool) -> None:
    """Whether the worker leaves with its entry, or stays because the operator has named it."""

    async def story(cluster: Cluster) -> None:
        named = (WorkerSpec.parse("nats:w1,engine=vllm"),) if is_named else ()
        router = cluster.add_router(policy="round_robin", worker_urls=named, nats_req_max_pending=4)
        for id in ("w1", "w2"):
            cluster.add_agent(id, agent=QUEUED)
        await trio.sleep(WARM_UP_SECONDS + 6.0)
        assert router.states() == {"w1": "ready", "w2": "ready"}
        before = asked(cluster, "w2")
        answers: list[Answer] = []
        cluster.agents["w1"].die()
        killed_at = trio.current_time()
        async with trio.open_nursery() as clients:
            for _ in range(4):
                clients.start_soon(complete, router, answers, stream)
                await trio.sleep(0.05)

        assert [(each.status, each.is_whole) for each in answers] == [(200, True)] * 4
        assert max(each.ended_at for each in answers) < killed_at + GONE_SECONDS
        assert asked(cluster, "w2") == before + 4
        metrics = read_metrics(router.app)
        # It ran nowhere: nothing is lost, and no retry spent.
        assert total(metrics, "baton_nats_missed_total") == 0
        assert total(metrics, "baton_breaker_trips_total") == 0
        published = cluster.server.published
        left = {
            each.headers["rs-inbox"].encode()
            for each in published
            if each.subject == NAMES.request("w1") and b"once upon" in each.payload
        }
        cancelled = {each.payload for each in published if each.subject == NAMES.cancel("w1")}
        assert len(left) == 2
        assert left <= cancelled

    run(story)


def test_what_is_stored_for_an_agent_that_drains_is_left_to_it() -> None:
    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(nats_req_max_pending=4)
        one = cluster.add_agent("w1", agent={**QUEUED, "drain_timeout_secs": 30.0})
        await trio.sleep(WARM_UP_SECONDS)
        answers: list[Answer] = []
        async with trio.open_nursery() as clients:
            clients.start_soon(complete, router, answers)
            await trio.sleep(0.01)
            one.agent.ask_to_stop()
        assert [(each.status, each.is_whole) for each in answers] == [(200, True)]
        metrics = read_metrics(router.app)
        assert total(metrics, "baton_nats_missed_total") == 0

    run(story)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_named_worker_that_was_never_started_is_passed_over(is_alone: bool) -> None:
    async def story(cluster: Cluster) -> None:
        named = (WorkerSpec.parse("nats:w1,engine=vllm"),)
        router = cluster.add_router(worker_urls=named, nats_req_max_pending=4)
        if not is_alone:
            cluster.add_agent("w2", agent=QUEUED)
        await trio.sleep(WARM_UP_SECONDS)
        router.app.fleet.get("w1").probed(Probe(ProbeOutcome.PASSED, trio.current_time(), ""))
        answers: list[Answer] = []
        for _ in range(4):
            began = trio.current_time()
            await complete(router, answers)
            assert trio.current_time() - began < 2.0

        expected = (502, True) if is_alone else (200, True)
        assert [(each.status, each.is_whole) for each in answers] == [expected] * 4
        assert total(read_metrics(router.app), "baton_breaker_trips_total") == 0

    run(story)


def test_where_probes_meet_nobody_what_is_stored_goes_elsewhere() -> None:
    """The stream has gone, with whatever it held, and so has the agent."""

    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(policy="round_robin", nats_req_max_pending=4)
        url = cluster.reach(router, cluster.start_engine("beside"))
        await trio.sleep(0.1)
        for each in ("nats:w1,engine=vllm", f"{url},engine=vllm"):
            router.app.fleet.add(WorkerSpec.parse(each))
        cluster.add_agent("w1", agent=QUEUED)
        await trio.sleep(WARM_UP_SECONDS + 8.0)
        assert set(router.states().values()) == {"ready"}
        answers: list[Answer] = []
        killed_at = trio.current_time()
        cluster.agents["w1"].die()
        async with trio.open_nursery() as clients:
            for _ in range(2):
                clients.start_soon(complete, router, answers)
            await trio.sleep(1.0)
            assert len(answers) == 1
            cluster.server.streams.clear()
        assert [(each.status, each.is_whole) for each in answers] == [(200, True)] * 2
        assert answers[1].ended_at < killed_at + 12.0

    run(story)


@pytest.mark.parametrize("stream", [True, False])
def test_what_no_agent_has_taken_costs_no_retry(stream: bool) -> None:
    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(
            policy="round_robin", nats_req_max_pending=4, request_max_retries=0
        )
        for id in ("w1", "w2"):
            cluster.add_agent(id, agent=QUEUED)
        await trio.sleep(WARM_UP_SECONDS + 6.0)
        answers: list[Answer] = []
        cluster.agents["w1"].die()
        async with trio.open_nursery() as clients:
            for _ in range(4):
                clients.start_soon(complete, router, answers, stream)
        assert [(each.status, each.is_whole) for each in answers] == [(200, True)] * 4

    run(story)


def test_an_agent_between_two_connections_takes_what_was_stored_meanwhile() -> None:
    """Although probes find nobody there."""

    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(nats_req_max_pending=4, health_check_interval_secs=1.0)
        one = cluster.add_agent("w1", agent=QUEUED)
        await trio.sleep(WARM_UP_SECONDS)
        answers: list[Answer] = []
        cluster.server.cut(one.broker)
        async with trio.open_nursery() as clients:
            clients.start_soon(complete, router, answers)
            await trio.sleep(2.5)
            assert not answers
            cluster.server.mend(one.broker)
        assert [(each.status, each.is_whole) for each in answers] == [(200, True)]
        assert asked(cluster, "w1") == 1

    run(story)


@pytest.mark.parametrize("pending", [0, 4], ids=["core", "stored"])
@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("retries", [0, 2])
def test_new_requests_wait_for_the_broker(pending: int, forgets: bool, retries: int) -> None:
    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(nats_req_max_pending=pending, request_max_retries=retries)
        for id in ("w1", "w2"):
            cluster.add_agent(id, agent={"nats_req_max_pending": pending})
        await trio.sleep(WARM_UP_SECONDS)
        answers: list[Answer] = []
        cluster.server.down(forgets=forgets)
        async with trio.open_nursery() as clients:
            for turn in range(4):
                clients.start_soon(complete, router, answers, turn % 2 == 0)
                await trio.sleep(0.5)
            cluster.server.up()
        assert [(each.status, each.is_whole) for each in answers] == [(200, True)] * 4
        metrics = read_metrics(router.app)
        assert total(metrics, "baton_nats_missed_total") == 0
        assert total(metrics, "baton_retries_total") == 0
        assert asked(cluster, "w1") + asked(cluster, "w2") == 4

    run(story)


@pytest.mark.parametrize("pending", [0, 4], ids=["core", "stored"])
def test_continuations_wait_for_the_broker(pending: int) -> None:
    """The worker over HTTP dies while the broker is away for a moment."""

    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(nats_req_max_pending=pending, migration_limit=1)
        engine = cluster.start_engine("beside", faults="request=1:cut,after_events=32")
        url = cluster.reach(router, engine)
        await trio.sleep(0.1)
        router.app.fleet.add(WorkerSpec.parse(f"{url},engine=vllm"))
        await trio.sleep(WARM_UP_SECONDS)
        found: list[Answer] = []
        async with trio.open_nursery() as clients:

            async def ask() -> None:
                found.append(await router.complete(40))

            clients.start_soon(ask)
            await trio.sleep(0.5)
            cluster.add_agent("w1", agent={"nats_req_max_pending": pending})
            await trio.sleep(WARM_UP_SECONDS)
            cluster.server.down()
            await trio.sleep(3.0)
            cluster.server.up()
        (answer,) = found
        assert (answer.status, answer.is_whole) == (200, True)
        metrics = read_metrics(router.app)
        assert total(metrics, "baton_nats_missed_total") == 0

    run(story)


#### The agent that comes after


SHAPES: dict[str, tuple[Mapping[str, object], tuple[str, str | None, bool]]] = {
    "can go on": ({"migratable": True}, ("error", None, True)),
    "cannot": ({"migratable": False}, ("error", "503", False)),
    "of an old router": ({}, ("error", "503", False)),
    "unary": ({"stream": False, "migratable": True}, ("error", "503", False)),
    "no request": ({"path": 7}, ("error", "400", False)),
}


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_stored_before_an_agent_began_runs_for_nobody(shape: str, is_stored: bool) -> None:
    """Also what a stream has captured that another, or nobody, uses."""
    request, expected = SHAPES[shape]

    async def story(cluster: Cluster) -> None:
        asker = Asker(cluster)
        elsewhere = await asker.store("w2")
        before = [await asker.store("w1", is_stored=is_stored, **request) for _ in range(3)]
        cluster.add_agent("w1", agent=QUEUED)
        await trio.sleep(WARM_UP_SECONDS)

        assert [ending(heard) for heard in before] == [expected] * 3
        assert asked(cluster, "w1") == 0
        assert (stored(cluster), elsewhere) == (1, [])
        after = await asker.store("w1", migratable=True)
        await trio.sleep(2.0)
        assert after[-1].headers["rs-type"] == "done"
        assert asked(cluster, "w1") == 1

    run(story)


def test_an_agent_that_was_killed_with_all_it_may_have_serves_again() -> None:
    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(nats_req_max_pending=4)
        cluster.add_agent("w1", agent=QUEUED)
        await trio.sleep(WARM_UP_SECONDS)
        answers: list[Answer] = []
        async with trio.open_nursery() as clients:
            for _ in range(4):
                clients.start_soon(router.complete, 300)
            await trio.sleep(2.0)
            cluster.agents["w1"].die()
            await trio.sleep(1.0)
            cluster.add_agent("w1", agent=QUEUED)
            await trio.sleep(WARM_UP_SECONDS)
            # What was open at the first is over for the router some seconds later.
            await trio.sleep(10.0)
            durable = cluster.server.streams[NAMES.stream].durables[token_of("w1")]
            assert not durable.handed
            await complete(router, answers)
            clients.cancel_scope.cancel(reason="enough")
        assert [(each.status, each.is_whole) for each in answers] == [(200, True)]

    run(story)


def test_whoever_still_waits_when_an_agent_comes_back_is_served_by_it() -> None:
    """It was stored for the one that was killed, and there is no other worker."""

    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(migration_limit=1, nats_req_max_pending=4)
        cluster.add_agent("w1", agent=QUEUED)
        cluster.add_agent("w2", agent=QUEUED)
        await trio.sleep(WARM_UP_SECONDS)
        answers: list[Answer] = []
        cluster.agents["w1"].die()
        async with trio.open_nursery() as clients:
            for turn in range(8):
                clients.start_soon(complete, router, answers, turn % 2 == 0)
            await trio.sleep(1.0)
            cluster.add_agent("w1", agent=QUEUED)
            began_at = trio.current_time()
        assert [(each.status, each.is_whole) for each in answers] == [(200, True)] * 8
        assert max(each.ended_at for each in answers) < began_at + 5.0

    run(story)


@pytest.mark.parametrize("stands", [True, False])
def test_a_queue_that_is_made_anew_counts_from_one_and_is_served(stands: bool) -> None:
    """Also where the consumer does not stand yet: then nobody says that anything was lost."""

    async def story(cluster: Cluster) -> None:
        asker = Asker(cluster)
        for _ in range(5):
            await asker.store("w1")
        broker = cluster.add_agent("w1", agent=QUEUED).broker
        await trio.sleep(WARM_UP_SECONDS)
        if not stands:
            broker.consumptions[0].on_lost = lambda _: None
        cluster.server.down(forgets=True)
        await trio.sleep(1.0)
        cluster.server.up()
        await trio.sleep(1.0)
        heard = await asker.store("w1")
        await trio.sleep(2.0)
        assert heard[-1].headers["rs-type"] == "done"

    run(story)


def test_an_agent_that_waits_for_its_queue_can_be_stopped() -> None:
    async def story(cluster: Cluster) -> None:
        one = cluster.add_agent("w1", agent=QUEUED)
        await trio.sleep(0.2)  # it looks whether another one has its id
        cluster.server.stall()
        await trio.sleep(30.0)
        assert not one.ended.is_set()
        one.agent.ask_to_stop()
        await trio.sleep(0.1)
        assert one.ended.is_set()
        cluster.server.go_on()

    run(story)
