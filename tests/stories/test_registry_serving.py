"""Registered workers serve: streams, pairs, drains and outages, with real routers and agents."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from router.worker import Origin
from router.workerspec import WorkerSpec
from tests.cluster import WARM_UP_SECONDS, Answer, Cluster, Routed, run
from tests.outcome import series

pytestmark = pytest.mark.slow

LATE = 60.0


def facts(answer: Answer) -> tuple[int, bool]:
    return answer.status, answer.is_whole


def code_of(answer: Answer) -> str:
    """The code of the error a client got, as the whole answer or as a stream's last event."""
    last = answer.body.strip().rpartition(b"data: ")[2]
    code = json.loads(last)["error"]["code"]
    assert isinstance(code, str)
    return code


def test_an_agent_that_starts_is_served_by_every_router_within_two_seconds() -> None:
    async def story(cluster: Cluster) -> None:
        routers = [cluster.add_router(), cluster.add_router()]
        await trio.sleep(1)
        cluster.add_agent("w1", agent={})
        await trio.sleep(2)

        for router in routers:
            assert router.states() == {"w1": "ready"}
            assert facts(await router.complete()) == (200, True)
            assert facts(await router.complete(stream=False)) == (200, True)
            models = (await router.get("/v1/models")).json["data"]
            assert isinstance(models, list)
            assert [each["id"] for each in models] == ["tiny"]

    run(story)


def test_a_pair_meets_where_its_prefill_s_entry_says() -> None:
    async def story(cluster: Cluster) -> None:
        router = cluster.add_router()
        halves: dict[str, object] = {"engine": "sglang", "host": "10.1.2.3"}
        kv = {"bootstrap_port": 8998}
        beside = {"bootstrap_port": 8998, "bootstrap_host": "10.1.2.3", "group": "g"}
        cluster.add_agent("p", agent={"role": "prefill", **beside}, role="prefill", **kv, **halves)
        cluster.add_agent("d", agent={"role": "decode", "group": "g"}, role="decode", **halves)
        await trio.sleep(WARM_UP_SECONDS)
        assert router.states() == {"p": "ready", "d": "ready"}

        answer = await router.complete()

        assert facts(answer) == (200, True)
        for id in "pd":
            asked = cluster.agents[id].engine.requests
            (body,) = (json.loads(each.body) for each in asked if each.path == "/v1/completions")
            assert (body["bootstrap_host"], body["bootstrap_port"]) == ("10.1.2.3", 8998)

    run(story)


def test_a_draining_worker_is_shown_with_what_it_still_does() -> None:
    """It gets nothing new, and leaves when the last of it is over."""

    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(migration_limit=1)
        one = cluster.add_agent("w1", agent={"drain_timeout_secs": 30.0})
        await trio.sleep(WARM_UP_SECONDS)
        answers: list[Answer] = []
        async with trio.open_nursery() as clients:

            async def ask() -> None:
                answers.append(await router.complete(100))

            clients.start_soon(ask)
            await trio.sleep(3)
            one.agent.ask_to_stop()
            await trio.sleep(1)
            assert router.states() == {"w1": "draining"}
            assert b'"inflight":1' in (await router.get("/v1/workers")).body
            assert (await router.complete(2)).status == 503
            assert not one.ended.is_set()
        assert facts(answers[0]) == (200, True)
        await one.ended.wait()
        await trio.sleep(0.1)
        assert router.states() == {}


def test_a_stream_outlives_the_entry_of_its_worker() -> None:
    """As it is deleted by an agent that deregisters before it drains (row 100)."""

    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(migration_limit=1)
        one = cluster.add_agent("w1", agent={"drain_timeout_secs": 30.0})
        await trio.sleep(WARM_UP_SECONDS)
        answers: list[Answer] = []
        async with trio.open_nursery() as clients:

            async def ask() -> None:
                answers.append(await router.complete(100))

            clients.start_soon(ask)
            await trio.sleep(3)
            await one.agent.registration.leave(1.0)
            await trio.sleep(1)
            assert router.states() == {}
        assert facts(answers[0]) == (200, True)

    run(story)


def test_what_a_draining_agent_hands_back_goes_on_on_another() -> None:
    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(migration_limit=1)
        agents = [
            cluster.add_agent(f"w{number}", agent={"drain_timeout_secs": 1.0})
            for number in range(2)
        ]
        await trio.sleep(WARM_UP_SECONDS)
        right = await router.complete(60)
        answers: list[Answer] = []
        async with trio.open_nursery() as clients:

            async def ask() -> None:
                answers.append(await router.complete(60))

            for _ in range(4):
                clients.start_soon(ask)
            await trio.sleep(2)
            agents[0].agent.ask_to_stop()
            with trio.fail_after(3):
                await agents[0].ended.wait()

        assert [facts(each) for each in answers] == [(200, True)] * 4
        assert {each.text for each in answers} == {right.text}
        metrics = shown(router)
        assert sum(v for k, v in metrics.items() if k.startswith("baton_migrations_total")) == 2

    run(story)


def test_a_killed_agent_leaves_when_its_entry_expires_and_its_streams_go_on() -> None:
    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(migration_limit=1)
        agents = [cluster.add_agent(f"w{number}", agent={}) for number in range(2)]
        await trio.sleep(WARM_UP_SECONDS)
        right = await router.complete(80)
        answers: list[Answer] = []
        async with trio.open_nursery() as clients:

            async def ask() -> None:
                answers.append(await router.complete(80))

            for _ in range(2):
                clients.start_soon(ask)
            await trio.sleep(2)
            agents[0].die()
            await trio.sleep(14)
            assert router.states() == {"w1": "ready"}

        assert {each.text for each in answers} == {right.text}

    run(story)


@pytest.mark.parametrize("forgets", [False, True])
def test_nobody_is_dropped_while_the_broker_is_away(forgets: bool) -> None:
    async def story(cluster: Cluster) -> None:
        router = cluster.add_router()
        for number in range(3):
            cluster.add_agent(f"w{number}", agent={})
        await trio.sleep(WARM_UP_SECONDS)
        before = list(router.app.fleet.all())
        assert len(before) == 3

        cluster.server.down(forgets=forgets)
        await trio.sleep(LATE)
        assert list(router.app.fleet.all()) == before
        assert set(router.states().values()) == {"ready"}
        ready = await router.get("/readyz")
        assert ready.status == 200
        registry = ready.json["registry"]
        assert isinstance(registry, dict)
        assert (registry["is_connected"], registry["is_synced"]) == (False, False)
        assert registry["seconds_since_sync"] == pytest.approx(LATE, abs=3)
        metrics = shown(router)
        assert "baton_nats_connected" not in metrics  # zeroes are left out
        assert metrics["baton_registry_seconds_since_sync"] == pytest.approx(LATE, abs=3)
        assert metrics["baton_registry_entries"] == 3

        cluster.server.up()
        await trio.sleep(LATE)
        assert list(router.app.fleet.all()) == before
        assert facts(await router.complete()) == (200, True)
        assert shown(router)["baton_nats_connected"] == 1
        assert shown(router).get("baton_registry_seconds_since_sync", 0) <= 3

    run(story)


def test_workers_over_http_do_not_notice_that_the_broker_is_away() -> None:
    async def story(cluster: Cluster) -> None:
        engine = cluster.start_engine("h")
        router = cluster.add_router()
        url = cluster.reach(router, engine)
        await trio.testing.wait_all_tasks_blocked()
        router.app.fleet.add(WorkerSpec.of(url, id="h"))
        cluster.server.down()
        await trio.sleep(WARM_UP_SECONDS)

        assert facts(await router.complete()) == (200, True)

    run(story)


def test_a_router_that_has_nobody_says_how_long_it_has_heard_nothing() -> None:
    async def story(cluster: Cluster) -> None:
        cluster.server.down()
        router = cluster.add_router()
        await trio.sleep(20)

        answer = await router.get("/readyz")

        assert answer.status == 503
        assert code_of(answer) == "no_workers"
        assert b"The registry has not been heard for 20 seconds: the broker is away." in answer.body

    run(story)


def test_who_is_named_and_registered_before_the_start_is_the_operator_s() -> None:
    async def story(cluster: Cluster) -> None:
        cluster.add_agent("w1", agent={"group": "theirs"})
        await trio.sleep(WARM_UP_SECONDS)
        router = cluster.add_router(worker_urls=(WorkerSpec.parse("nats:w1,group=mine"),))
        await trio.sleep(WARM_UP_SECONDS)

        worker = router.worker("w1")
        assert worker is not None
        assert (worker.origin, worker.group) == (Origin.STATIC, "mine")
        assert facts(await router.complete()) == (200, True)

    run(story)


#### The worker API


def test_workers_say_where_they_came_from() -> None:
    async def story(cluster: Cluster) -> None:
        static = WorkerSpec.of("nats:static")
        router = cluster.add_router(worker_urls=(static,))
        cluster.add_agent("w1", agent={})
        cluster.add_agent("api", agent={})
        added = await router.post("/v1/workers", url="nats:api", engine="vllm")
        assert added.status == 201
        assert (added.json["url"], added.json["origin"]) == ("nats:api", "api")
        await trio.sleep(WARM_UP_SECONDS)

        listed = (await router.get("/v1/workers")).json
        workers = listed["workers"]
        assert isinstance(workers, list)
        assert {each["id"]: each["origin"] for each in workers} == {
            "static": "static",
            "api": "api",
            "w1": "registry",
        }
        assert {each["id"]: each["state"] for each in workers} == {
            "static": "probing",  # nobody listens there
            "api": "ready",
            "w1": "ready",
        }
        registry = listed["registry"]
        assert isinstance(registry, dict)
        assert registry["entries"] == 2
        again = await router.post("/v1/workers", url="nats:w1")
        assert (again.status, code_of(again)) == (409, "worker_exists")

        assert (await router.ask("DELETE", "/v1/workers/w1")).status == 200
        assert (await router.post("/v1/workers/api/drain")).status == 200
        await trio.sleep(LATE)
        assert router.states() == {"static": "probing", "api": "draining"}
        found = router.worker("api")
        assert found is not None
        assert found.origin is Origin.API

    run(story)


def test_a_router_without_nats_takes_no_worker_behind_it() -> None:
    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(has_nats=False)

        answer = await router.post("/v1/workers", url="nats:w1")

        assert (answer.status, code_of(answer)) == (400, "bad_request")
        assert b"without --nats" in answer.body
        assert "registry" not in (await router.get("/v1/workers")).json

    run(story)


#### Deadlines


@pytest.mark.parametrize(
    ("settings", "seconds", "code"),
    [
        ({}, 8.0, "stream_idle_timeout"),
        ({"nats_req_idle_timeout": 4.0}, 4.0, "stream_idle_timeout"),
        ({"nats_req_idle_timeout": 12.0}, 12.0, "stream_idle_timeout"),
        ({"nats_req_max_duration": 6.0}, None, "request_timeout"),
        ({"nats_req_max_duration": 60.0}, 8.0, "stream_idle_timeout"),
    ],
)
def test_requests_behind_nats_have_their_own_deadlines(
    settings: dict[str, object], seconds: float | None, code: str
) -> None:
    async def story(cluster: Cluster) -> None:
        router = cluster.add_router(
            stream_idle_timeout_secs=8.0,
            request_timeout_secs=30.0,
            suspect_idle_secs=0.0,
            request_max_retries=0,
            **settings,  # type: ignore[arg-type]  # one of the table
        )
        cluster.add_agent("w1", agent={}, faults=("hang,after_events=3",), first_token_seconds=0.5)
        await trio.sleep(WARM_UP_SECONDS)
        begun = trio.current_time()

        answer = await router.complete(20)

        assert facts(answer) == (200, False)
        assert code_of(answer) == code
        # 0.5 s to the first token, and 0.1 s to each of the two others.
        due = 6.0 if seconds is None else 0.7 + seconds
        assert answer.ended_at - begun == pytest.approx(due, abs=0.2)

    run(story)


def test_requests_over_http_keep_the_general_deadlines() -> None:
    async def story(cluster: Cluster) -> None:
        engine = cluster.start_engine("h", faults=("hang,after_events=3",), first_token_seconds=0.5)
        router = cluster.add_router(
            stream_idle_timeout_secs=8.0,
            suspect_idle_secs=0.0,
            request_max_retries=0,
            nats_req_idle_timeout=2.0,
            nats_req_max_duration=3.0,
        )
        await trio.testing.wait_all_tasks_blocked()
        router.app.fleet.add(WorkerSpec.of(cluster.reach(router, engine), id="h"))
        await trio.sleep(WARM_UP_SECONDS)
        begun = trio.current_time()

        answer = await router.complete(20)

        assert code_of(answer) == "stream_idle_timeout"
        assert answer.ended_at - begun == pytest.approx(8.7, abs=0.2)

    run(story)


def shown(router: Routed) -> dict[str, float]:
    return {
        series(sample.name, sample.labels): sample.value
        for family in router.app.metrics.collect()
        for sample in family.samples
        if sample.value
    }
