"""A bug anywhere ends the request it is in, and nothing else.

Every function of the router that runs in a scene is made to raise, one after the other. What is
left over, and who else was hurt, is looked at by `tests.crashes`.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from random import Random

import pytest
import trio

from tests.crashes import Scene, World, calls_of, get, play, post

HANDSHAKE = (
    "upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


async def whole(world: World) -> None:
    await world.ask(post(stream=False) + post(stream=False))


async def streamed(world: World) -> None:
    await world.ask(post() + post())


async def moved(world: World) -> None:
    world.fault("times=1:cut,after_events=2")
    await world.ask(post(tokens=6))


async def retried(world: World) -> None:
    world.fault("times=1:status,code=500")
    await world.ask(post())


async def abandoned(world: World) -> None:
    stream = world.open()
    await stream.send_all(post())
    await trio.sleep(0.65)
    stream.close()
    await trio.sleep(1)


async def refused(world: World) -> None:
    await world.ask(post("/v1/nothing", more=', "x-sim-fault": "status,code=404"') + b"nonsense")


async def silent(world: World) -> None:
    world.fault("hang,after_events=0")
    await world.ask(post())


async def read_slowly(world: World) -> None:
    world.fault("padding,bytes=200000")
    await world.ask(post(), after=3)


async def given_back(world: World) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.ask, post(tokens=6) + post(tokens=6))
        await trio.sleep(0.6)
        body = b'{"timeout_secs": 0.2}'
        lines = f"content-length: {len(body)}\r\nconnection: close\r\n"
        await world.ask(get("/v1/workers/w1/drain", "POST", lines) + body)


async def queued(world: World) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(world.ask, post())


async def asked_itself(world: World) -> None:
    body = b'{"url": "http://127.0.0.1:9003", "id": "w9"}'
    add = get("/v1/workers", "POST", f"content-length: {len(body)}\r\n") + body
    for each in (get("/v1/models"), get("/metrics"), get("/debug/requests"), get("/nothing"), add):
        with trio.move_on_after(0.1):
            await world.ask(each)
    with trio.move_on_after(0.1):
        await world.ask(get("/v1/workers/w9", "DELETE"))


async def watched(world: World) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.ask, get("/debug/transitions", lines=HANDSHAKE))
        await trio.sleep(0.1)
        await world.ask(post())
        nursery.cancel_scope.cancel()


async def paired(world: World) -> None:
    await world.ask(post(stream=False) + post())


async def with_a_failed_prefill(world: World) -> None:
    world.fault("times=1:status,code=500", role="prefill")
    await world.ask(post())


async def with_a_lost_decode(world: World) -> None:
    world.fault("times=1:cut,after_events=2", role="decode")
    await world.ask(post(tokens=6))


async def over_an_outage(world: World) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.ask, post(tokens=30))
        await trio.sleep(1.0)
        world.server.down()
        await trio.sleep(1.0)
        nursery.start_soon(world.ask, post())
        await trio.sleep(1.0)
        world.server.up()


def _scene(act: Callable[[World], Awaitable[None]]) -> Scene:
    return Scene(act.__name__, act)


SCENES = {
    scene.name: scene
    for scene in (
        *map(_scene, (whole, streamed, moved, retried, abandoned, refused, read_slowly)),
        *map(_scene, (given_back, asked_itself, watched)),
        Scene("silent", silent, first_token_seconds=3.5),
        *(
            Scene(f"{act.__name__} behind nats", act, is_behind_nats=True)
            for act in (whole, moved, abandoned, over_an_outage)
        ),
        Scene("queued", queued, places=2),
        *(
            Scene(f"{act.__name__} {kind}", act, halves=kind)
            for act in (paired, with_a_failed_prefill, with_a_lost_decode, abandoned)
            for kind in ("sglang", "vllm")
        ),
    )
}
#: The floor on which everything stands; a bug in there may end the router, or leak.
FLOOR = {
    "app.App._accepted",
    "app.App._in_background",
    "channel.Channel.close",
    "logs.LineWriter.hold",
    "logs.LineWriter.release",
    "reactor.Reactor._drain",
    "reactor.Reactor._handle",
    "reactor.Reactor._look_again",
    "reactor.Reactor._sweep",
    "reactor.Reactor._begin_batch",
    "reactor.Reactor._end_batch",
    "reactor.Reactor.batch",
    "reactor.Reactor.forget",
    "reactor.Reactor.turn",
    "reactor.Reactor.turn.<locals>.<genexpr>",
    "reactor._rank",
    "waking.Sweeper.sweep",
    "waking.Sweeper.wait",
    "waking.Waker._abandon",
}
#: One in so many, and others the next time: all of them take five minutes of one core.
SHARE = 8 if os.environ.get("CI") else 16


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.slow
def test_a_bug_ends_the_request_it_is_in_and_nothing_else(name: str) -> None:
    functions = sorted(calls_of(SCENES[name]).keys() - FLOOR)
    for function in functions[Random().randrange(SHARE) :: SHARE]:
        play(SCENES[name], function, 1)


def test_the_next_request_of_a_connection_does_not_pay_for_the_one_before() -> None:
    # The first is over when this raises, and the second is being served on the same connection.
    world = play(SCENES["whole"], "metrics.Metrics.request_ended", 1)

    assert world.heard.count(b"HTTP/1.1 200") == 2
