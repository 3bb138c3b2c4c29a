"""What docs/nats.md permits routers and agents to do is enough for them."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nats import fleet as f
from tests.nats.conftest import World
from tests.nats_server import NatsServer

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs" / "nats.md"
#: The prefix of the table.
PREFIX = "infera"
PASSWORD = "s3cret"


def permitted() -> dict[str, tuple[str, str]]:
    """The rows of the table, as lists of a server's configuration: publish, subscribe."""
    found = {}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in ("routers", "agents") and len(cells) == 3:
            publish, subscribe = (re.findall("`([^`]+)`", cell) for cell in cells[1:])
            found[cells[0]] = (_listed(publish), _listed(subscribe))
    assert len(found) == 2
    return found


def _listed(subjects: list[str]) -> str:
    return "[" + ", ".join(f'"{each}"' for each in subjects) + "]"


@pytest.fixture(scope="module")
def guarded() -> Iterator[NatsServer]:
    users = [
        f'{{user: "{name}", password: "{PASSWORD}", '
        f"permissions: {{publish: {publish}, subscribe: {subscribe}}}}}"
        for name, (publish, subscribe) in permitted().items()
    ]
    with NatsServer(f"authorization {{ users: [{', '.join(users)}] }}") as running:
        yield running


def as_user(server: NatsServer, name: str, password: str = PASSWORD) -> str:
    return f"nats://{name}:{password}@127.0.0.1:{server.port}"


@pytest.mark.parametrize("pending", ["0", "8"])
async def test_the_table_is_enough(
    world: World, guarded: NatsServer, tmp_path: Path, pending: str
) -> None:
    queue = ("--nats-req-max-pending", pending)
    with f.fleet(as_user(guarded, "agents"), tmp_path, PREFIX, world.starter) as agents:
        agent = agents.agent("a:1", world.sims[0].port, "--drain-timeout-secs", "1", *queue)
        with f.fleet(as_user(guarded, "routers"), tmp_path, PREFIX, world.starter) as routers:
            router = routers.router("--migration-limit", "3", *queue)
            await f.all_ready(router, "a:1")
            told = await f.stream(router.port, f.chat("hi", tokens=5))
            assert told.is_whole
            words = ["agent", "--drain", "--id", "a:1", "--nats", agents.broker]
            drain = agents.start("drain", *words, "--nats-prefix", PREFIX)
            assert await drain.ended(10) == 0, drain.said()
            assert await agent.ended(10) == 0
            await f.until(lambda: not f.workers(router), 5)
            router.terminate()
            await router.ended(10)

            for each in (agent, drain, router):
                assert "nats_error" not in each.said(), each.said()
            assert "deregistered" in agent.said()


async def test_a_wrong_password_is_called_so(
    world: World, guarded: NatsServer, tmp_path: Path
) -> None:
    wrong = as_user(guarded, "agents", "wrong")
    with f.fleet(wrong, tmp_path, PREFIX, world.starter) as fleet:
        agent = fleet.agent("a:2", world.sims[0].port)
        await f.until(lambda: "waits for the NATS server" in agent.said(), 10)

        assert "it refuses the user, the password or the token" in agent.said()
        assert f"127.0.0.1:{guarded.port}" in agent.said()
        assert "wrong" not in agent.said()
        assert "listens" not in agent.said()
        os.kill(agent.pid, signal.SIGTERM)
        assert await agent.ended(10) == 0


async def test_a_server_that_is_away_is_passed_over(
    world: World, guarded: NatsServer, tmp_path: Path
) -> None:
    both = f"nats://127.0.0.1:1,{as_user(guarded, 'agents')}"
    with f.fleet(both, tmp_path, PREFIX, world.starter) as fleet:
        agent = fleet.agent("a:3", world.sims[0].port)
        await f.until(lambda: " registered " in agent.said(), 10)


async def test_a_second_agent_of_an_id_exits(world: World) -> None:
    with world.fleet() as fleet:
        first = fleet.agent("a:4", world.sims[0].port)
        await f.until(lambda: " registered " in first.said(), 10)
        second = fleet.agent("a:4", world.sims[1].port)

        assert await second.ended(10) == 3
        assert "give every agent an --id of its own" in second.said()
        assert first.is_running
