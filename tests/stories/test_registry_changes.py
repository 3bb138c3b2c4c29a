"""Every kind of change of an entry, at every moment of every kind of outage.

What holds for all of them: while nobody can be heard nobody is dropped, a living worker never
leaves, and soon after the outage every router sees what is true.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import pytest
import trio
from attrs import evolve, frozen

from router.wires.nats.entries import RENEW_SECONDS, TTL_SECONDS, Entry
from statemachines.worker import WorkerState
from tests.registries import SOON, Registered, Router, tell

X = Entry(
    "x:8000",
    engine="vllm",
    role="prefill",
    models=("m",),
    context_length=4096,
    group="g",
    bootstrap_host="x",
    bootstrap_port=8998,
    version="baton 0.1.0",
)
BYSTANDER = Entry("b:8000", engine="vllm", models=("m",))

#### What an entry may do

CHANGES: dict[str, Entry] = {
    "load": evolve(X, inflight=7),
    "models": evolve(X, models=("m", "n")),
    "context_length": evolve(X, context_length=8192),
    "engine": evolve(X, engine="sglang"),
    "version": evolve(X, version="baton 0.2.0"),
    "role": evolve(X, role="decode"),
    "group": evolve(X, group="h"),
    "bootstrap": evolve(X, bootstrap_host="y", bootstrap_port=8999),
    "drain": evolve(X, is_draining=True),
}
#: Only another process can have said so.
ANOTHER = {"engine", "version", "role", "group", "bootstrap"}
#: Each differs from another kind in nothing but the field; once each is enough.
ALIKE = {"context_length", "role", "group", "bootstrap"}
KINDS = ("join", "leave", "crash", "undrain", "return", "return_as_another", *CHANGES)


async def do(world: Registered, kind: str) -> None:
    agent = world.agents.get(X.id)
    if kind == "join":
        world.add_agent(X)
        return
    assert agent is not None
    if kind == "leave":
        await agent.leave()
    elif kind == "crash":
        agent.crash()
    elif kind.startswith("return"):
        await agent.leave()
        world.add_agent(X if kind == "return" else CHANGES["version"])
    else:
        agent.become(CHANGES.get(kind, X))


#### What may be wrong meanwhile


@frozen
class Outage:
    name: str
    begin: Callable[[Registered], object]
    end: Callable[[Registered], object]


OUTAGES = (
    Outage("none", lambda world: None, lambda world: None),
    Outage("down", lambda world: world.server.down(), lambda world: world.server.up()),
    Outage(
        "forgetful",
        lambda world: world.server.down(forgets=True),
        lambda world: world.server.up(),
    ),
    Outage("hung", lambda world: world.server.stall(), lambda world: world.server.go_on()),
    Outage(
        "router cut off",
        lambda world: world.server.cut(world.routers[0].broker),
        lambda world: world.server.mend(world.routers[0].broker),
    ),
    Outage(
        "slow consumer",
        lambda world: world.routers[0].broker.lose_connection("too many messages"),
        lambda world: world.routers[0].broker.find_connection(),
    ),
)
BEGIN = 6.0
#: Shorter than a TTL, and long enough for every entry to have expired twice.
LENGTHS = (5.0, 25.0)
#: Renewals go out at even seconds; nothing here is to happen at the same moment as one.
SHIFT = 0.3


def moments(length: float) -> dict[str, float]:
    return {
        "just before": BEGIN - 0.1 + SHIFT,
        "at the beginning": BEGIN + 0.1 + SHIFT,
        "in the middle": BEGIN + length / 2 + SHIFT,
        "at the end": BEGIN + length - 0.1 + SHIFT,
        "just after": BEGIN + length + 0.1 + SHIFT,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outage", "kind"),
    [
        pytest.param(outage, kind, id=f"{outage.name}-{kind}")
        for outage in OUTAGES
        for kind in KINDS
        if outage.name == "none" or kind not in ALIKE
    ],
)
def test_every_change_at_every_moment(kind: str, outage: Outage) -> None:
    for length in LENGTHS[:1] if outage.name == "none" else LENGTHS:
        for name, moment in moments(length).items():
            case = f"{kind}, {outage.name} for {length:g} s, {name}"
            try:
                tell(story(kind, outage, length, moment))
            except BaseException as error:
                error.add_note(case)
                raise


def story(
    kind: str, outage: Outage, length: float, moment: float
) -> Callable[[Registered], Awaitable[None]]:
    async def play(world: Registered) -> None:
        one, other = world.add_router(), world.add_router()
        world.add_agent(BYSTANDER)
        if kind != "join":
            world.add_agent(evolve(X, is_draining=kind == "undrain"))
        await trio.sleep_until(BEGIN - 1)
        before = one.worker(X.id)
        end = BEGIN + length + SHIFT

        async with trio.open_nursery() as happenings:
            happenings.start_soon(at, BEGIN + SHIFT, outage.begin, world)
            happenings.start_soon(at, end, outage.end, world)
            happenings.start_soon(later, moment, world, kind)
            happenings.start_soon(nobody_is_dropped, one, outage, end)
        # The entry of who has gone is doubted for one TTL after the outage, not longer.
        await trio.sleep_until(max(end, moment) + TTL_SECONDS + 3 * RENEW_SECONDS + SOON)

        assert [id for _, id in one.left + other.left if id == BYSTANDER.id] == []
        assert_true(kind, one, before)
        assert one.shown() == other.shown()
        assert one.registry.view.is_synced
        assert one.registry.view.seconds_since_sync <= RENEW_SECONDS

    return play


async def at(moment: float, act: Callable[[Registered], object], world: Registered) -> None:
    await trio.sleep_until(moment)
    act(world)


async def later(moment: float, world: Registered, kind: str) -> None:
    await trio.sleep_until(moment)
    await do(world, kind)


async def nobody_is_dropped(router: Router, outage: Outage, end: float) -> None:
    """What cannot be heard is no reason."""
    if outage.name == "none":
        return
    await trio.sleep_until(BEGIN + SHIFT + SOON)
    known = {worker.id for worker in router.fleet.all()}
    await trio.sleep_until(end - 0.05)
    if not router.registry.broker.is_connected or outage.name == "hung":
        assert {worker.id for worker in router.fleet.all()} == known


def assert_true(kind: str, router: Router, before: object) -> None:
    worker = router.worker(X.id)
    if kind in ("leave", "crash"):
        assert worker is None
        return
    assert worker is not None
    expected = CHANGES.get(kind, X)
    if kind == "return_as_another":
        expected = CHANGES["version"]
    state = WorkerState.DRAINING if expected.is_draining else WorkerState.READY
    assert worker.state is state
    assert (worker.role, worker.engine, worker.models) == (
        expected.role,
        expected.engine,
        expected.models,
    )
    assert worker.context_length == expected.context_length
    assert worker.group == expected.group
    assert (worker.bootstrap_host, worker.bootstrap_port) == (
        expected.bootstrap_host,
        expected.bootstrap_port,
    )
    assert worker.elsewhere == expected.inflight
    if kind in ANOTHER or kind == "return_as_another":
        assert worker is not before
    elif kind in CHANGES:
        assert worker is before


#### By luck


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_in_whatever_order_the_end_is_true(seed: int) -> None:
    luck = Random(seed)

    async def play(world: Registered) -> None:
        one, other = world.add_router(), world.add_router()
        alive: dict[str, Entry] = {}
        outage: Outage | None = None
        for _ in range(60):
            await trio.sleep(luck.choice((0.01, 0.3, 1.7, 4.1, 11.3)))
            if luck.random() < 0.3:
                if outage is not None:
                    outage.end(world)
                outage = luck.choice(OUTAGES[1:]) if outage is None else None
                if outage is not None:
                    outage.begin(world)
            else:
                await change_somebody(world, alive, luck)
        if outage is not None:
            outage.end(world)
        await trio.sleep(2 * TTL_SECONDS + 3 * RENEW_SECONDS)

        for router in (one, other):
            assert {each.id for each in router.fleet.all()} == set(alive)
            for worker in router.fleet.all():
                entry = alive[worker.id]
                assert (worker.engine, worker.models) == (entry.engine, entry.models)
                assert (worker.state is WorkerState.DRAINING) == entry.is_draining
        assert one.shown() == other.shown()

    tell(play)


async def change_somebody(world: Registered, alive: dict[str, Entry], luck: Random) -> None:
    id = f"w{luck.randrange(4)}:8000"
    if id not in alive:
        alive[id] = evolve(X, id=id, version=f"baton {luck.randrange(3)}")
        world.add_agent(alive[id])
    elif (what := luck.randrange(4)) == 0:
        del alive[id]
        world.agents[id].crash()
    elif what == 1:
        del alive[id]
        world.nursery.start_soon(world.agents[id].leave)
    else:
        alive[id] = evolve(
            alive[id],
            is_draining=luck.random() < 0.5,
            models=luck.choice((("m",), ("m", "n"))),
            engine=luck.choice(("vllm", "vllm", "sglang")),
        )
        world.agents[id].become(alive[id])
