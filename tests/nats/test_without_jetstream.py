"""A broker that keeps nothing: what needs it says so, and everything else works."""

import pytest
import trio

from tests.nats import fleet as f
from tests.nats.conftest import World
from tests.nats.test_losses import bodies, check_honest, right_answers
from tests.nats_server import NatsServer
from tests.real.calls import get

pytestmark = pytest.mark.slow

ENGINE = "engine=vllm"
SAID = "the broker has no JetStream"


async def test_named_workers_serve_move_and_drain_without_jetstream(world: World) -> None:
    with NatsServer(has_jetstream=False) as broker, world.fleet() as fleet:
        fleet.broker = broker.url
        agents = [
            fleet.agent(f"a{n}", world.sims[n].port, "--drain-timeout-secs", "0.2")
            for n in range(2)
        ]
        named = ["--worker-urls", *(f"nats:a{n},{ENGINE}" for n in range(2))]
        router = fleet.router(*named, "--migration-limit", "1")
        await f.all_ready(router, "a0", "a1")
        asked = bodies(6, tokens=60, token_seconds=0.03)
        right = right_answers(world.sims[0], asked)
        answers: list[f.Told] = []

        async def clients() -> None:
            answers.extend(await f.many(router.port, asked))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(clients)
            await f.until(lambda: f.metric(router, "baton_worker_inflight") == len(asked), 5)
            began = trio.current_time()
            agents[0].terminate()
            assert await agents[0].ended(5) == 0
            left = trio.current_time() - began
        await f.until(lambda: SAID in router.said(), 5)
        shown = get(router.port, "/readyz").json()
        moved = f.metric(router, "baton_migrations_total", reason="worker_draining")

    assert check_honest(answers, right) == len(asked)
    assert moved >= 3
    assert left < 2.0, "nothing is waited for that cannot be"
    assert isinstance(shown, dict)
    assert shown["registry"]["has_jetstream"] is False
    said = agents[1].said()
    assert said.count('"not registered" worker=a1') == 1
    assert f"is not registered, and routers must name it: {SAID}" in said


async def test_when_jetstream_is_there_after_all_everything_is(world: World) -> None:
    limit = ["--nats-req-max-pending", "5"]
    with NatsServer(has_jetstream=False) as broker, world.fleet() as fleet:
        fleet.broker = broker.url
        agent = fleet.agent("a0", world.sims[0].port, *limit)
        router = fleet.router(*limit)
        await f.until(lambda: SAID in agent.said() and SAID in router.said(), 10)
        assert get(router.port, "/readyz").status == 503
        broker.kill()
        broker.has_jetstream = True
        broker.start()
        await f.all_ready(router, "a0")
        answer = await f.stream(router.port, f.chat("hi", tokens=5))

    assert answer.is_good
