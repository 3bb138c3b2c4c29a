"""Routers that know their workers from the registry, and fleets that change under load."""

import os
import signal
from contextlib import suppress

import pytest
import trio

from tests.nats import fleet as f
from tests.nats.conftest import World
from tests.nats.rolling import check, roll
from tests.nats.test_losses import bodies, check_honest, right_answers
from tests.real.calling import Broken

pytestmark = pytest.mark.slow

SEEN_SECONDS = 2.0
FREED_SECONDS = 5.0
"""An engine computes for a router that was killed for no longer."""
SILENT_SECONDS = 24.0
"""The same where nothing of an answer has come yet."""


async def _all_see(routers: list[f.Process], worker_id: str, state: str) -> float:
    """Wait until every router shows it; how long that took."""
    return await f.until(
        lambda: all(f.state_of(each, worker_id) == state for each in routers),
        SEEN_SECONDS,
        f"{worker_id} is {state or 'gone'} everywhere",
    )


async def test_two_routers_see_joins_and_drains_and_one_dies_alone(world: World) -> None:
    with world.fleet() as fleet:
        routers = [fleet.router("--migration-limit", "1", name=f"router-{n}") for n in range(2)]
        fleet.agent("a0", world.sims[0].port)
        for router in routers:
            await f.all_ready(router, "a0")

        late = fleet.agent("a1", world.sims[1].port, "--drain-timeout-secs", "5")
        await f.until(lambda: " registered " in late.said(), f.READY_SECONDS)
        joined = await _all_see(routers, "a1", "ready")

        asked = bodies(16, tokens=60, token_seconds=0.03)
        endless = bodies(16, tokens=2000, token_seconds=0.03)
        right = right_answers(world.sims[0], asked)
        begun = right_answers(world.sims[0], endless)
        answers: dict[int, list[f.Told]] = {}

        async def clients(number: int) -> None:
            bodies = asked if number else endless
            answers[number] = await f.many(routers[number].port, bodies)

        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(clients, number)
            await f.until(lambda: f.metric(routers[1], "baton_worker_inflight") == len(asked), 5)
            late.terminate()
            drained = await _all_see(routers, "a1", "draining")
            await trio.sleep(0.2)
            routers[0].kill()
            killed_at = trio.current_time()

        for sim in world.sims[:2]:
            await f.until(lambda each=sim: f.inflight(each) == 0, FREED_SECONDS)  # type: ignore[misc]
        freed = trio.current_time() - killed_at
        assert await late.ended(8) == 0
        left = await _all_see(routers[1:], "a1", "")

    print(f"seen by both: joined {joined:.2f} s, drained {drained:.2f} s, left {left:.2f} s")
    print(f"the engines of a killed router were free {freed:.1f} s later")
    assert freed < FREED_SECONDS
    assert check_honest(answers[1], right) == len(asked)
    for answer, one in zip(answers[0], begun, strict=True):
        assert not answer.is_whole
        assert one.text.startswith(answer.text)


@pytest.mark.long
async def test_a_killed_router_frees_engines_that_say_nothing(world: World) -> None:
    with world.fleet() as fleet:
        router = fleet.router()
        fleet.agent("a0", world.sims[0].port)
        await f.all_ready(router, "a0")
        hanging = f.chat("hi", tokens=5, more={"x-sim-fault": "delay,first_token=200"})

        async def client(body: f.Body) -> None:
            with suppress(Broken):
                await f.whole(router.port, body)

        async with trio.open_nursery() as nursery:
            for body in (hanging, {**hanging, "stream": False}):
                nursery.start_soon(client, body)
            await f.until(lambda: f.inflight(world.sims[0]) == 2, 5)
            await trio.sleep(0.5)
            router.kill()
        took = await f.until(lambda: f.inflight(world.sims[0]) == 0, SILENT_SECONDS)
    print(f"free after {took:.1f} s")


async def test_a_killed_agent_expires_and_one_that_leaves_is_gone_at_once(world: World) -> None:
    with world.fleet() as fleet:
        router = fleet.router()
        leaving = fleet.agent("a0", world.sims[0].port)
        killed = fleet.agent("a1", world.sims[1].port)
        await f.all_ready(router, "a0", "a1")

        leaving.terminate()
        await f.until(lambda: f.state_of(router, "a0") in ("draining", "gone", ""), SEEN_SECONDS)
        os.kill(killed.pid, signal.SIGKILL)
        # Three probes of one second, of which the first may have been under way: five seconds.
        await f.until(lambda: f.state_of(router, "a1") != "ready", 12, "it is not ready any more")
        assert await leaving.ended(5) == 0


async def test_static_registered_and_added_workers_mix(world: World) -> None:
    with world.fleet() as fleet:
        over_http = f"http://127.0.0.1:{world.sims[0].port},id=h"
        router = fleet.router("--worker-urls", over_http, "nats:a1")
        fleet.agent("a1", world.sims[1].port)
        fleet.agent("a2", world.sims[2].port)
        f.add_worker_url(router, f"http://127.0.0.1:{world.sims[2].port}", id="added")
        await f.all_ready(router, "h", "a1", "a2", "added")

        asked = bodies(8, tokens=10, token_seconds=0)
        answers = await f.many(router.port, asked)

        right = right_answers(world.sims[0], asked)
        served = {
            each: f.metric(router, "baton_worker_requests_total", outcome="success", worker=each)
            for each in ("h", "a1", "a2", "added")
        }
    assert check_honest(answers, right) == 8
    assert all(served.values()), served


async def test_a_rolling_restart_under_load_fails_nobody(world: World) -> None:
    with world.fleet() as fleet:
        rolled = await roll(
            fleet, world.sims, streams=20, tokens=50, token_seconds=0.02, window_seconds=0.3
        )
    check(rolled)


@pytest.mark.long
async def test_five_agents_restart_under_a_hundred_streams(world: World) -> None:
    with world.fleet() as fleet:
        sims = [fleet.sim(f"s{number}") for number in range(5)]
        rolled = await roll(
            fleet,
            [sim.ready() for sim in sims],
            streams=100,
            tokens=100,
            token_seconds=0.05,
            window_seconds=1.0,
        )
    check(rolled)
