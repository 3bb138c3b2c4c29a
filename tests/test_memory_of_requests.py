"""What is remembered of ended requests, and what is not: their bodies."""

from __future__ import annotations

import gc
import weakref

import trio
import trio.testing

from router.app import App
from router.config import Settings
from router.exchange import Exchange
from router.logs import configure
from router.sim import SimEngine, SimSettings
from router.workerspec import WorkerSpec
from tests.memory import MemoryNetwork

BODY = b'{"model":"tiny","messages":[{"role":"user","content":"%b"}],"max_tokens":3%b}'


async def _ask(network: MemoryNetwork, app: App, body: bytes) -> weakref.ref[Exchange]:
    stream = network.open_client()
    await stream.send_all(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    await trio.sleep(0.5)
    (exchange,) = app.serving.live.values()
    dying = weakref.ref(exchange)
    del exchange
    await trio.sleep(20)
    assert b" 200 OK" in await stream.receive_some(65536)
    return dying


async def _remember(settings: Settings, tail: bytes) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world)
        engine = SimEngine(SimSettings(first_token_seconds=1))
        network.engines["127.0.0.1", 9000] = engine.serve_connection
        app = App(settings, network, configure(format="text", level="error"))
        app.listen()
        world.start_soon(app.run)
        await trio.sleep(3)

        dying = await _ask(network, app, BODY % (b"x" * 1000, tail))

        (ticket,) = app.serving.ended
        kept = [each for each in gc.get_referents(ticket) if isinstance(each, Exchange)]
        assert kept == []
        left = dying()
        # The parked task of a kept connection may still know its last exchange, without the body.
        assert left is None or left.call.body == b""
        world.cancel_scope.cancel()


def test_an_ended_request_keeps_neither_its_body_nor_its_exchange() -> None:
    workers = (WorkerSpec.parse("http://127.0.0.1:9000"),)
    for limit in (0, 2):
        for tail in (b"", b',"stream":true'):
            settings = Settings(worker_urls=workers, migration_limit=limit)
            clock = trio.testing.MockClock(autojump_threshold=0)
            trio.run(_remember, settings, tail, clock=clock)
