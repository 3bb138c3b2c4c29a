"""Baton and the old peers drive each other, over core NATS and over JetStream.

The old ones know nothing beyond their own protocol (tests/infera_peer.py), so whatever of ours is
required, or sent without having been asked for, fails here.
"""

import json
from collections.abc import Iterator
from functools import partial

import pytest
import trio
from attrs import define

from tests.infera_peer import DRAINING, Client, HttpEngine, Reading, Scripted, Worker
from tests.nats import fleet as f
from tests.nats.conftest import World
from tests.nats.recorded import CHAT_TRACE, COMPLETION_TRACE, WITH_IDS, text_of
from tests.real.calls import post

pytestmark = pytest.mark.slow

#: Members of a request that old peers know.
KNOWN = {"path", "stream", "headers", "body", "migratable"}
MOVES = "baton_migrations_total"
MODES = {"core": 0, "stored": 8}


@pytest.fixture(params=MODES, scope="module")
def pending(request: pytest.FixtureRequest) -> int:
    """The limit of the admission queue; 0 is core NATS."""
    return MODES[request.param]


#### A Baton router and old workers


@pytest.fixture(scope="module")
def routed(world: World, pending: int) -> Iterator[f.Process]:
    """A router that moves streams, with no workers yet."""
    with world.fleet() as fleet:
        flags = ["--migration-limit", "2", "--nats-req-max-pending", str(pending)]
        router = fleet.router(*flags, name=f"router-{pending}")
        world.prefixes[router.pid] = fleet.prefix
        yield router


def old_worker(
    world: World, router: f.Process, worker_id: str, engine: Scripted | HttpEngine, pending: int
) -> Worker:
    prefix = world.prefixes[router.pid]
    return Worker(world.broker, worker_id, engine=engine, prefix=prefix, max_pending=pending)


async def test_a_stream_of_an_old_worker_passes_byte_for_byte(
    world: World, routed: f.Process, pending: int
) -> None:
    engine = Scripted(CHAT_TRACE)
    with old_worker(world, routed, "old:1", engine, pending), added(routed, "old:1"):
        await f.all_ready(routed, "old:1")
        body = f.chat("hi", tokens=8, more=WITH_IDS)

        answer = await f.whole(routed.port, body)

    assert (answer.status, answer.whole, answer.body) == (200, True, CHAT_TRACE)
    assert (answer.content_type or "").startswith("text/event-stream")
    [asked] = engine.asked
    assert asked.members == KNOWN
    assert (asked.path, asked.stream, asked.migratable) == (f.CHAT, True, False)


async def test_an_old_workers_whole_answer_and_its_refusal_are_the_engines(
    world: World, routed: f.Process, pending: int
) -> None:
    [sim, *_] = world.sims
    engine = HttpEngine(f"http://127.0.0.1:{sim.port}")
    with old_worker(world, routed, "old:2", engine, pending) as worker, added(routed, "old:2"):
        await f.all_ready(routed, "old:2")
        good = f.chat("hi", tokens=5, stream=False)
        wrong = f.chat("hi", tokens=5, more={"temperature": -3})

        answer = await f.whole(routed.port, good)
        refused = await f.whole(routed.port, wrong)

        direct = post(sim.port, f.CHAT, wrong)
    assert answer.status == 200
    assert (
        json.loads(answer.body)["choices"]
        == json.loads(post(sim.port, f.CHAT, good).body)["choices"]
    )
    assert (refused.status, refused.body) == (direct.status, direct.body)
    assert refused.status == 400
    taken = [each for each in worker.took if each.path == f.CHAT]
    assert [each.stream for each in taken] == [False, True]
    assert taken[0].members == KNOWN - {"migratable"}


async def test_a_client_that_leaves_is_told_to_an_old_worker_three_times(
    world: World, routed: f.Process, pending: int
) -> None:
    engine = Scripted(CHAT_TRACE, hold_after=3)
    with old_worker(world, routed, "old:3", engine, pending) as worker, added(routed, "old:3"):
        await f.all_ready(routed, "old:3")
        async with trio.open_nursery() as nursery:
            midway = f.Midway(2)
            body = f.chat("hi", tokens=8, more=WITH_IDS)
            nursery.start_soon(partial(f.stream, routed.port, body, heard=midway.heard))
            await midway.reached.wait()
            [inbox] = [each.inbox for each in worker.took if each.path == f.CHAT]
            nursery.cancel_scope.cancel("the client leaves")

        assert await f.until(lambda: inbox not in worker.running, 1) < 1
        await f.until(lambda: worker.cancelled.count(inbox) == 3, 5)


@pytest.mark.parametrize("path", [f.CHAT, f.TEXT])
async def test_what_an_old_worker_hands_back_goes_on_at_another_old_one(
    world: World, routed: f.Process, pending: int, path: str
) -> None:
    trace = CHAT_TRACE if path == f.CHAT else COMPLETION_TRACE
    dying, living = Scripted(trace, hold_after=4), Scripted(trace)
    first = old_worker(world, routed, "old:4", dying, pending)
    second = old_worker(world, routed, "old:5", living, pending)
    before = f.metric(routed, MOVES, reason="worker_draining")
    with first, second, added(routed, "old:4", engine="vllm"):
        await f.all_ready(routed, "old:4")
        body = f.chat("hi", tokens=8, more=WITH_IDS) if path == f.CHAT else prompt_body()
        read: list[f.Told] = []

        async def client() -> None:
            read.append(await f.stream(routed.port, body, path=path, heard=midway.heard))

        midway = f.Midway(3)
        with added(routed, "old:5", engine="vllm"):
            await f.all_ready(routed, "old:5")
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    # Round robin: one of two goes to each.
                    nursery.start_soon(client)
                await f.until(lambda: bool(dying.asked), 5)
                await midway.reached.wait()
                await trio.to_thread.run_sync(first.drain, 0.2)

    assert all(each.is_good for each in read), read
    assert {each.text for each in read} == {text_of(trace)}
    assert all(len(each.ids) == 1 for each in read)
    assert {each.migratable for each in dying.asked} == {True}
    moved = f.metric(routed, MOVES, reason="worker_draining") - before
    # One that had brought nothing yet is asked again, which is no move.
    assert 1 <= moved <= len(dying.asked)


async def test_a_job_that_is_stored_is_not_answered_by_its_receipt(
    world: World, pending: int
) -> None:
    """A work queue that somebody else made acknowledges whatever is published into it."""
    if pending:
        pytest.skip("of core NATS")
    with world.fleet() as fleet, Client(world.broker, prefix=fleet.prefix, stored=True) as other:
        other.ask("nobody:1", f.CHAT, {})
        router = fleet.router()
        engine = Scripted(CHAT_TRACE)
        with Worker(world.broker, "old:6", engine=engine, prefix=fleet.prefix):
            f.add_worker(router, "old:6")
            await f.all_ready(router, "old:6")

            answer = await f.whole(router.port, f.chat("hi", tokens=8, more=WITH_IDS))

    assert (answer.status, answer.body) == (200, CHAT_TRACE)


def added(router: f.Process, worker_id: str, **options: str) -> "f.Added":
    return f.Added(router, worker_id, options)


def prompt_body() -> f.Body:
    return {"model": f.MODEL, "prompt": "hi", "max_tokens": 8, "stream": True, **WITH_IDS}


#### An old client and a Baton agent


@pytest.fixture
def tended(world: World, pending: int) -> Iterator["Tended"]:
    """An agent beside a simulated engine, and an old client."""
    with world.fleet() as fleet:
        stored = pending > 0
        [sim, *_] = world.sims
        flags = ["--nats-req-max-pending", str(pending), "--drain-timeout-secs", "1"]
        agent = fleet.agent("new:1", sim.port, *flags)
        with Client(world.broker, prefix=fleet.prefix, stored=stored) as client:
            yield Tended(agent, sim, client)


@define(eq=False)
class Tended:
    """The agent, its engine, and who asks it."""

    agent: f.Process
    sim: f.Process
    client: Client

    def ask(self, body: f.Body, *, migratable: bool = False) -> Reading:
        streams = bool(body["stream"])
        return self.client.ask("new:1", f.CHAT, body, stream=streams, migratable=migratable)

    async def wait_serving(self) -> None:
        await f.until(self._serves, f.READY_SECONDS, "the agent serves")

    def _serves(self) -> bool:
        body = f.chat("hi", tokens=1, stream=False)
        reading = self.client.ask("new:1", f.CHAT, body, stream=False)
        return reading.ended.wait(0.5) and reading.status == 200


async def ended(reading: Reading, seconds: float = 10) -> Reading:
    await f.until(reading.ended.is_set, seconds)
    return reading


async def test_an_old_client_reads_an_agents_answers(tended: Tended) -> None:
    await tended.wait_serving()
    body = f.chat("Tell me", tokens=30)
    wrong = f.chat("Tell me", tokens=30, more={"temperature": -3})

    streamed = await ended(tended.ask(body))
    unary = await ended(tended.ask({**body, "stream": False}))
    refused = await ended(tended.ask(wrong))

    direct = f.told(post(tended.sim.port, f.CHAT, body))
    assert f.told_by(streamed.body).said == direct.said
    assert streamed.status == unary.status == 200
    assert json.loads(unary.body)["choices"][0]["message"]["content"] == direct.text
    # The engine's own refusal is data for who asked for no head, and the status comes at the end.
    assert refused.status == 400
    assert "error" in json.loads(refused.body)
    for reading in (streamed, unary, refused):
        kinds = {frame.headers["rs-type"] for frame in reading.frames}
        assert kinds <= {"data", "done"}
        numbers = [int(frame.headers["rs-seq"]) for frame in reading.frames]
        assert numbers == list(range(len(reading.frames)))
        assert not reading.after


async def test_an_old_client_that_leaves_frees_the_engine(tended: Tended) -> None:
    await tended.wait_serving()
    reading = tended.ask(f.slowly(f.chat("Tell me", tokens=500), 0.02))
    await f.until(lambda: len(reading.frames) > 3, 5)
    assert f.inflight(tended.sim) == 1

    reading.leave()

    assert await f.until(lambda: f.inflight(tended.sim) == 0, 2) < 2
    assert not reading.ended.is_set()


async def test_an_agent_that_drains_hands_an_old_client_what_it_may(
    tended: Tended, pending: int
) -> None:
    await tended.wait_serving()
    long = f.slowly(f.chat("Tell me", tokens=500), 0.02)
    short = f.slowly(f.chat("Tell me", tokens=20), 0.02)
    movable = tended.ask(long, migratable=True)
    bound = tended.ask(long)
    quick = tended.ask(short, migratable=True)
    await f.until(lambda: min(len(each.frames) for each in (movable, bound, quick)) > 1, 5)

    started = trio.current_time()
    tended.agent.terminate()

    assert (await ended(quick)).status == 200, "the window was long enough for it"
    assert ((await ended(movable)).error or b"").startswith(DRAINING)
    assert trio.current_time() - started > 0.8
    assert not ((await ended(bound)).error or b"").startswith(DRAINING)
    assert bound.status is None
    assert await tended.agent.ended(5) == 0
    assert [each.after for each in (movable, bound, quick)] == [[], [], []]
    await f.until(lambda: f.inflight(tended.sim) == 0, 2)
    if pending:
        with pytest.raises(Exception, match="consumer not found"):
            tended.client.backlog("new:1")


async def test_a_queue_forgets_what_an_agent_has_answered(tended: Tended, pending: int) -> None:
    if not pending:
        pytest.skip("of JetStream")
    await tended.wait_serving()
    client = tended.client
    reading = tended.ask(f.slowly(f.chat("Tell me", tokens=20), 0.02))
    await f.until(lambda: len(reading.frames) > 1, 5)
    assert client.backlog("new:1") == (0, 1)

    await ended(reading)

    await f.until(lambda: client.backlog("new:1") == (0, 0), 2)
