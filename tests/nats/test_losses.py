"""What is lost on the way is never lost silently: killed processes, a broker that dies, holes.

After each, every stream is either the one right answer or seen by its client to have failed, with
a correct beginning of it; and the next requests are served.
"""

import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress

import pytest
import trio

from tests.infera_peer import Puppet
from tests.nats import fleet as f
from tests.nats.conftest import World
from tests.nats.recorded import CHAT_TRACE, WITH_IDS, events_of
from tests.nats.tap import tapped
from tests.nats_server import NatsServer
from tests.real.calls import post

pytestmark = pytest.mark.slow

FIRST_HEARTBEATS_SECONDS = 6.5


def bodies(count: int, *, tokens: int, token_seconds: float) -> list[f.Body]:
    return [
        f.slowly(f.chat(f"Story {number}", tokens=tokens), token_seconds) for number in range(count)
    ]


def right_answers(sim: f.Process, asked: Sequence[f.Body]) -> list[f.Told]:
    """What the engine says to each when nothing is in between and nothing is slow."""
    plain = [{k: v for k, v in body.items() if k != "x-sim-fault"} for body in asked]
    return [f.told(post(sim.port, f.CHAT, body)) for body in plain]


def check_honest(answers: Sequence[f.Told], right: Sequence[f.Told]) -> int:
    """None is wrong and none is cut in silence; how many were good."""
    for answer, one in zip(answers, right, strict=True):
        if answer.is_good:
            assert answer.said == one.said
            assert (len(answer.ids), answer.roles) == (1, 1)
        else:
            assert one.text.startswith(answer.text)
            assert answer.error is not None
            assert not answer.is_done
            assert answer.status != 200 or not answer.is_whole
    return sum(answer.is_good for answer in answers)


async def test_a_killed_agent_is_noticed_in_seconds_and_its_streams_go_on(world: World) -> None:
    """While tokens come from it and while it is silent alike."""
    with world.fleet() as fleet:
        router = fleet.router("--migration-limit", "1")
        agents = [fleet.agent(f"a{n}", world.sims[n].port) for n in range(2)]
        await f.all_ready(router, "a0", "a1")
        asked = bodies(6, tokens=60, token_seconds=0.02)
        silent = f.chat(
            "Hold on", tokens=20, more={"x-sim-fault": "pause,after_events=5,seconds=1"}
        )
        asked += [silent] * 2
        right = right_answers(world.sims[0], [*asked[:6], f.chat("Hold on", tokens=20)])
        right.append(right[-1])
        answers: list[f.Told] = []
        gone = 0.0

        async def kill() -> None:
            nonlocal gone
            await f.until(lambda: f.metric(router, "baton_worker_inflight") == len(asked), 5)
            await trio.sleep(0.3)
            agents[0].kill()
            gone = trio.current_time()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            answers = await f.many(router.port, asked)
        took = trio.current_time() - gone

    assert check_honest(answers, right) == len(asked)
    assert took < FIRST_HEARTBEATS_SECONDS + 2
    print(f"the last stream of a killed agent ended {took:.1f} s after its end")


@pytest.mark.parametrize(
    "pending",
    [pytest.param(0, id="core"), pytest.param(100, id="stored", marks=pytest.mark.long)],
)
async def test_a_broker_that_dies_and_comes_back_loses_nothing_in_silence(
    world: World, pending: int
) -> None:
    limit = ["--nats-req-max-pending", str(pending)]
    with NatsServer() as broker, world.fleet() as fleet:
        fleet.broker = broker.url
        router = fleet.router("--migration-limit", "2", *limit)
        for number, sim in enumerate(world.sims):
            fleet.agent(f"a{number}", sim.port, *limit)
        await f.all_ready(router, "a0", "a1", "a2")
        asked = bodies(30, tokens=100, token_seconds=0.02)
        right = right_answers(world.sims[0], asked)

        async def restart() -> None:
            await trio.sleep(0.8)
            broker.kill()
            await trio.sleep(0.5)
            broker.start()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(restart)
            answers = await f.many(router.port, asked)
        good = check_honest(answers, right)
        back = trio.current_time()
        await f.all_ready(router, "a0", "a1", "a2", seconds=10)
        after = await f.many(router.port, bodies(6, tokens=10, token_seconds=0))
        took = trio.current_time() - back

    assert all(each.is_good for each in after)
    assert took < 6
    print(f"{good} of {len(asked)} streams outlived the broker; the rest failed visibly")


async def test_a_hole_anywhere_is_seen(world: World) -> None:
    """One in fifty of the agents' frames is lost: most streams have a hole, several have two."""
    with tapped(world.broker, share=0.02, seed=random.Random(7).randrange(999)) as tap:
        with world.fleet() as fleet:
            straight = fleet.broker
            router = fleet.router("--migration-limit", "3")
            fleet.broker = tap.url
            for number, sim in enumerate(world.sims):
                fleet.agent(f"a{number}", sim.port)
            fleet.broker = straight
            await f.all_ready(router, "a0", "a1", "a2")
            asked = bodies(40, tokens=40, token_seconds=0.005)
            right = right_answers(world.sims[0], asked)

            answers = await f.many(router.port, asked)

            good = check_honest(answers, right)
            moved = f.metric(router, "baton_migrations_total")
    assert tap.lost > 5
    assert moved > 0
    assert good > len(asked) / 2
    print(f"{tap.lost} frames of {tap.passed} lost: {moved:.0f} moves, {good} of 40 good")


@pytest.mark.long
async def test_a_request_that_never_arrives_is_asked_again(world: World) -> None:
    """An agent that has taken one says so at once; one that has not cannot say so."""
    with world.fleet() as fleet:
        subjects = f"{fleet.prefix}.req.".encode()
        with tapped(world.broker, share=0.2, seed=3, subjects=subjects) as tap:
            straight, fleet.broker = fleet.broker, tap.url
            router = fleet.router("--request-max-retries", "2")
            fleet.broker = straight
            for number, sim in enumerate(world.sims):
                fleet.agent(f"a{number}", sim.port)
            await f.all_ready(router, "a0", "a1", "a2")
            asked = bodies(20, tokens=5, token_seconds=0)
            right = right_answers(world.sims[0], asked)
            started = trio.current_time()

            answers = await f.many(router.port, asked)

            took = trio.current_time() - started
    good = check_honest(answers, right)
    print(f"{tap.lost} of {tap.lost + tap.passed} requests lost: {good} good after {took:.1f} s")
    assert tap.lost > 1
    assert good >= 19
    assert took < 2 * FIRST_HEARTBEATS_SECONDS + 2


@pytest.mark.parametrize("is_numbered", [True, False], ids=["numbered", "old"])
async def test_a_router_that_cannot_keep_up_cuts_no_stream_in_silence(
    world: World, is_numbered: bool
) -> None:
    """A server drops who does not read, and what it held for them with it (default: 64 MB)."""
    with world.fleet() as fleet:
        router = fleet.router()
        with Puppet(world.broker, "p:1", fleet.prefix) as only:
            f.add_worker(router, "p:1")
            await f.all_ready(router, "p:1")
            answers: list[f.Told] = []

            async def client() -> None:
                body = f.chat("hi", tokens=8, more=WITH_IDS)
                answers.append(await f.stream(router.port, body))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(client)
                await f.until(lambda: bool(only.asked), 5)
                [inbox] = only.asked
                events = events_of(CHAT_TRACE)

                def send(number: int) -> None:
                    if is_numbered:
                        only.send(inbox, "data", events[number], seq=number)
                    else:
                        only.send(inbox, "data", events[number])

                for number in range(3):
                    send(number)
                os.kill(router.pid, signal.SIGSTOP)
                await trio.to_thread.run_sync(only.flood, f"{inbox}", b": x\n\n" * 20_000, 900)
                os.kill(router.pid, signal.SIGCONT)
                await trio.sleep(1)
                for number in range(4, len(events)):
                    with suppress(Exception):
                        send(number)
                if is_numbered:
                    only.send(inbox, "done", status=200, seq=len(events))
                else:
                    only.send(inbox, "done", status=200)
            again = await _until_served(router, only, f.chat("hi", tokens=8, more=WITH_IDS))

    [answer] = answers
    assert not answer.is_done
    assert not answer.is_whole
    assert answer.error is not None
    assert again.is_good


async def _until_served(router: f.Process, only: Puppet, body: f.Body) -> f.Told:
    """Ask again, answered well this time."""
    await f.all_ready(router, only.worker_id)
    before = len(only.asked)
    answers: list[f.Told] = []

    async def client() -> None:
        answers.append(await f.stream(router.port, body))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client)
        await f.until(lambda: len(only.asked) > before, 5)
        only.send(only.asked[-1], "data", CHAT_TRACE)
        only.send(only.asked[-1], "done", status=200)
    return answers[0]


async def test_a_continuation_above_the_limit_goes_on_as_text(world: World) -> None:
    """Scenario 38: the ids of a long prompt do not fit beside its text."""
    with NatsServer(settings="max_payload: 56000") as small, world.fleet() as fleet:
        fleet.broker = small.url
        router = fleet.router("--migration-limit", "1")
        sims = [fleet.sim(f"wide{n}", "--context-length", "40000") for n in range(2)]
        at_once = ["--drain-timeout-secs", "0"]
        agents = [fleet.agent(f"a{n}", sim.ready().port, *at_once) for n, sim in enumerate(sims)]
        await f.all_ready(router, "a0", "a1")
        plain = f.chat("time " * 7000, tokens=60)
        [right] = right_answers(sims[0], [plain])
        midway = f.Midway(5)
        answers: list[f.Told] = []

        async def client() -> None:
            body = f.slowly(plain, 0.03)
            answers.append(await f.stream(router.port, body, heard=midway.heard))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client)
            await midway.reached.wait()
            serving = 0 if f.workers(router)["a0"]["inflight"] else 1
            agents[serving].terminate()

    assert [answer.said for answer in answers] == [right.said]
    assert "mode=text" in router.said()


@pytest.mark.long
@pytest.mark.parametrize("pending", [0, 100], ids=["core", "stored"])
@pytest.mark.parametrize("away", [0.1, 3.0])
async def test_two_restarts_blame_no_worker(world: World, pending: int, away: float) -> None:
    limit = ["--nats-req-max-pending", str(pending)]
    with NatsServer() as broker, world.fleet() as fleet:
        fleet.broker = broker.url
        router = fleet.router("--migration-limit", "3", *limit)
        for number in range(2):
            fleet.agent(f"a{number}", world.sims[number].port, *limit)
        await f.all_ready(router, "a0", "a1")
        asked = bodies(6, tokens=250, token_seconds=0.08)
        right = right_answers(world.sims[0], asked)

        async def restart() -> None:
            for _ in range(2):
                await trio.sleep(3.0)
                broker.kill()
                await trio.sleep(away)
                broker.start()
                await trio.sleep(5.0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(restart)
            answers = await f.many(router.port, asked)
        missed = f.metric(router, "baton_nats_missed_total")
        trips = f.metric(router, "baton_breaker_trips_total")
        said = [line for line in router.said().splitlines() if "moved" in line]

    print("\n".join(said))
    assert check_honest(answers, right) == len(asked)
    assert missed >= len(asked)
    assert trips == 0
