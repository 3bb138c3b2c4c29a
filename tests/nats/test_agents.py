"""What an agent does with the requests it has, however it ends, and what waits in its queue."""

import json
import os
import re
import signal
import sys
from functools import partial

import nats.js.api
import pytest
import trio

from tests.infera_peer import DRAINING, Client
from tests.nats import fleet as f
from tests.nats.conftest import World
from tests.nats.test_losses import bodies, check_honest, right_answers
from tests.real.calls import get
from tests.test_examples import MANIFEST

pytestmark = pytest.mark.slow

LONG = f.slowly(f.chat("Tell me", tokens=500), 0.02)


async def serving(client: Client, worker_id: str) -> None:
    """Wait until an agent answers."""
    body = f.chat("hi", tokens=1, stream=False)

    def serves() -> bool:
        reading = client.ask(worker_id, f.CHAT, body, stream=False)
        return reading.ended.wait(0.5) and reading.status == 200

    await f.until(serves, f.READY_SECONDS, f"{worker_id} serves")


#### Ends: scenario 41


async def test_a_window_of_zero_hands_back_at_once(world: World) -> None:
    with world.fleet() as fleet, Client(world.broker, prefix=fleet.prefix) as client:
        agent = fleet.agent("a:1", world.sims[0].port, "--drain-timeout-secs", "0")
        await serving(client, "a:1")
        movable = client.ask("a:1", f.CHAT, LONG, migratable=True)
        bound = client.ask("a:1", f.CHAT, LONG)
        await f.until(lambda: min(len(movable.frames), len(bound.frames)) > 2, 5)

        agent.terminate()

        assert await f.until(movable.ended.is_set, 2) < 1
        assert (movable.error or b"").startswith(DRAINING)
        await f.until(bound.ended.is_set, 2)
        assert not (bound.error or b"").startswith(DRAINING)
        assert await agent.ended(3) == 0
        assert [movable.after, bound.after] == [[], []]


@pytest.mark.parametrize("way", ["killed", "second signal"])
async def test_an_abrupt_end_hands_nothing_back(world: World, way: str) -> None:
    with world.fleet() as fleet, Client(world.broker, prefix=fleet.prefix) as client:
        agent = fleet.agent("a:1", world.sims[0].port, "--drain-timeout-secs", "20")
        await serving(client, "a:1")
        movable = client.ask("a:1", f.CHAT, LONG, migratable=True)
        await f.until(lambda: len(movable.frames) > 2, 5)

        if way == "killed":
            agent.kill()
        else:
            agent.terminate()
            await trio.sleep(0.3)
            agent.terminate()
            await agent.ended(3)

        await trio.sleep(0.3)
        assert not (movable.error or b"").startswith(DRAINING)
        assert movable.status is None
        await f.until(lambda: f.inflight(world.sims[0]) == 0, 3)


async def test_a_pre_stop_command_drains_the_running_agent_and_waits(world: World) -> None:
    with world.fleet() as fleet, Client(world.broker, prefix=fleet.prefix) as client:
        agent = fleet.agent("a:1", world.sims[0].port, "--drain-timeout-secs", "0.5")
        await serving(client, "a:1")
        movable = client.ask("a:1", f.CHAT, LONG, migratable=True)
        await f.until(lambda: len(movable.frames) > 2, 5)

        # As the kubelet runs it: the words of the example, and the variables of the pod.
        found = re.search(r"preStop: .*command: (\[.*?\])", MANIFEST.read_text(encoding="utf-8"))
        assert found is not None
        program, *words = json.loads(found[1])
        assert program == "baton"
        pod = {"BATON_NATS": fleet.broker, "BATON_ID": "a:1", "BATON_NATS_PREFIX": fleet.prefix}
        began = trio.current_time()
        command = await trio.run_process(
            [sys.executable, "-m", "router", *words],
            env=os.environ | pod,
            capture_stdout=True,
            check=False,
        )
        took = trio.current_time() - began

        assert (command.returncode, command.stdout) == (0, b"baton agent: a:1: drained\n")
        assert 0.5 < took < 10
        assert movable.ended.is_set()
        assert (movable.error or b"").startswith(DRAINING)
        # What is asked of it from now on is asked of nobody.
        again = client.ask("a:1", f.CHAT, f.chat("hi", tokens=1))
        await f.until(lambda: bool(again.frames), 2)
        assert again.frames[0].headers.get("Status") == "503"
        if agent.is_running:
            agent.terminate()
        assert await agent.ended(5) == 0


#### The queue


async def test_a_request_that_is_cancelled_in_the_queue_never_runs(world: World) -> None:
    """The cancel overtakes it: the agent was stopped, and the queue hands out when asked to."""
    with world.fleet() as fleet:
        with Client(world.broker, prefix=fleet.prefix, stored=True) as client:
            agent = fleet.agent("a:1", world.sims[2].port, "--nats-req-max-pending", "8")
            await serving(client, "a:1")
            os.kill(agent.pid, signal.SIGSTOP)
            unwanted = client.ask("a:1", f.CHAT, LONG)
            unwanted.leave()
            await trio.sleep(0.1)
            os.kill(agent.pid, signal.SIGCONT)

            wanted = client.ask("a:1", f.CHAT, f.slowly(f.chat("hi", tokens=20), 0.02))

            await f.until(lambda: len(wanted.frames) > 2, 5)
            assert f.inflight(world.sims[2]) == 1
            await f.until(wanted.ended.is_set, 5)
            await f.until(lambda: f.inflight(world.sims[2]) == 0, 2)
            await f.until(lambda: client.backlog("a:1") == (0, 0), 2)


async def test_a_full_worker_is_passed_by_and_a_full_fleet_says_so(world: World) -> None:
    """Admission: scenario 39, at first and in a move."""
    with world.fleet() as fleet:
        limit = ["--nats-req-max-pending", "2"]
        router = fleet.router("--migration-limit", "1", *limit)
        flags = [*limit, "--drain-timeout-secs", "0"]
        agents = [fleet.agent(f"a{n}", world.sims[n].port, *flags) for n in range(3)]
        await f.all_ready(router, "a0", "a1", "a2")
        asked = bodies(5, tokens=120, token_seconds=0.03)
        right = right_answers(world.sims[0], asked)
        answers: list[f.Told] = []

        async def first() -> None:
            answers.extend(await f.many(router.port, asked[:4]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await f.until(lambda: f.metric(router, "baton_worker_inflight") == 4, 5)
            agents[0].terminate()
            # What moves finds room at the two others, and fills it.
            await f.until(lambda: [busy(router, each) for each in ("a1", "a2")] == [2, 2], 5)
            refused = await f.whole(router.port, asked[4])
        late = await f.many(router.port, bodies(2, tokens=5, token_seconds=0))

    assert check_honest(answers, right[:4]) == 4
    assert refused.status == 429
    assert json.loads(refused.body)["error"]["code"] == "queue_full"
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-router-error-code"] == "queue_full"
    assert all(each.is_good for each in late)


def busy(router: f.Process, worker_id: str) -> object:
    return f.workers(router)[worker_id]["inflight"]


async def test_the_queue_refuses_what_it_cannot_keep(world: World) -> None:
    """Infera's forgets its oldest; what is accepted here stays."""
    with world.fleet() as fleet, Client(world.broker, prefix=fleet.prefix) as client:
        router = fleet.router("--nats-req-max-pending", "2")
        fleet.agent("a:1", world.sims[0].port, "--nats-req-max-pending", "2")
        await f.all_ready(router, "a:1")

        async def policy() -> object:
            name = f"{fleet.prefix.upper()}_REQUESTS"
            return (await client.connection.jetstream().stream_info(name)).config.discard

        found = await trio.to_thread.run_sync(partial(client.call, policy()))

    assert found == nats.js.api.DiscardPolicy.NEW


#### What the engine is asked


async def test_bytes_come_as_the_engine_wrote_them(world: World) -> None:
    """An agent asks for no compression; what is compressed all the same is unpacked on the way."""
    with world.fleet() as fleet:
        router = fleet.router()
        fleet.agent("a:1", world.sims[0].port)
        await f.all_ready(router, "a:1")
        body = f.chat("Tell me", tokens=20)

        plain = await f.whole(router.port, body)
        packed = await f.whole(router.port, {**body, "x-sim-fault": "gzip"})
        unary = await f.whole(router.port, {**body, "x-sim-fault": "gzip", "stream": False})

    assert "content-encoding" not in plain.headers
    assert f.told(plain).is_good
    assert f.told(packed).said == f.told(plain).said
    assert "content-encoding" not in unary.headers
    assert json.loads(unary.body)["choices"]


async def test_an_engine_that_dies_ends_the_stream_and_the_worker(world: World) -> None:
    with world.fleet() as fleet:
        router = fleet.router("--migration-limit", "1")
        mortal = fleet.sim("mortal").ready()
        fleet.agent("a:1", mortal.port)
        fleet.agent("a:2", world.sims[0].port)
        await f.all_ready(router, "a:1", "a:2")
        asked = bodies(4, tokens=60, token_seconds=0.02)
        right = right_answers(world.sims[0], asked)

        async def kill() -> None:
            await f.until(lambda: f.metric(router, "baton_worker_inflight") == 4, 5)
            await trio.sleep(0.3)
            os.kill(mortal.pid, signal.SIGKILL)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            answers = await f.many(router.port, asked)
        await f.until(lambda: f.state_of(router, "a:1") != "ready", 10, "it is seen")

    assert check_honest(answers, right) == 4


#### Pairs


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_both_halves_of_a_pair_are_reached_over_nats(world: World, engine: str) -> None:
    with world.fleet() as fleet:
        router = fleet.router()
        halves = {}
        for role in ("prefill", "decode"):
            sim = fleet.sim(role, "--engine", engine, "--role", role).ready()
            halves[role] = sim
            port = await trio.to_thread.run_sync(bootstrap_port, sim.port)
            flags = ["--role", role, "--engine", engine]
            if role == "prefill" and port:
                flags += ["--bootstrap-port", str(port)]
            fleet.agent(role, sim.port, *flags)
        await f.until(lambda: get(router.port, "/readyz").status == 200, f.READY_SECONDS)
        asked = bodies(6, tokens=20, token_seconds=0)
        plain = fleet.sim("plain", "--engine", engine).ready()
        right = right_answers(plain, asked)

        answers = await f.many(router.port, asked)
        halves["prefill"].kill()
        started = trio.current_time()
        failed = await f.stream(router.port, asked[0])
        took = trio.current_time() - started

    assert check_honest(answers, right) == len(asked)
    assert failed.status in (502, 503)
    assert took < 5


def bootstrap_port(port: int) -> int:
    """Where a simulated half of SGLang's hands over its KV cache; 0 for others."""
    answer = get(port, "/server_info")
    info = json.loads(answer.body) if answer.status == 200 else {}
    return int(info.get("disaggregation_bootstrap_port") or 0)
