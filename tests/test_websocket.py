"""/debug/transitions, spoken by a real WebSocket client over the in-memory network and over TCP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio_websocket

from router.app import App
from router.config import Settings
from router.logs import configure
from router.sim import SimEngine, SimSettings
from router.sockets import Network
from router.tcp import TcpNetwork
from router.websocket import Feed, Transition, Watcher
from router.workerspec import WorkerSpec
from statemachines import REQUEST as CHART
from tests.memory import MemoryNetwork

BODY = b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":3}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\n"
    b"x-request-id: r1\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(BODY), BODY)
)


@asynccontextmanager
async def serving(network: Network, **settings: object) -> AsyncIterator[App]:
    values: dict[str, object] = {"host": "127.0.0.1", "port": 8000 if _is_memory(network) else 0}
    app = App(
        Settings(**(values | settings)),  # type: ignore[arg-type]  # checked by the settings
        network,
        configure(format="text", level="error"),
    )
    app.listen()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.run)
        yield app
        nursery.cancel_scope.cancel()


def _is_memory(network: Network) -> bool:
    return isinstance(network, MemoryNetwork)


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    return b"".join([bytes(piece) async for piece in stream])


async def test_a_watcher_sees_a_request_and_its_leg(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world)
        network.engines["127.0.0.1", 9000] = SimEngine(SimSettings()).serve_connection
        workers = (WorkerSpec.parse("http://127.0.0.1:9000,id=w0"),)
        async with serving(network, worker_urls=workers):
            await trio.sleep(3)
            stream = network.open_client()
            socket = await trio_websocket.wrap_client_stream(
                world,
                stream,  # type: ignore[arg-type]  # annotated narrower than what it needs
                "baton",
                "/debug/transitions",
            )
            asking = network.open_client()
            await asking.send_all(REQUEST)
            await read_all(asking)

            seen = []
            with trio.move_on_after(1):
                while True:
                    seen.append(msgspec.json.decode(await socket.get_message()))

            await socket.aclose()
        world.cancel_scope.cancel()
    facts = [(each["machine"], each["fact"]) for each in seen]
    assert facts == [
        ("request", "admitted"),
        ("leg", "connected"),
        ("leg", "head_arrived"),
        ("leg", "completed"),
        ("request", "completed"),
    ]
    assert {each["id"] for each in seen} == {"r1", "r1.1"}


async def test_a_websocket_leaves_the_reactor_with_its_unread_bytes() -> None:
    network = TcpNetwork()
    async with serving(network) as app:
        assert app.fleet.all() == ()
        host, port = app.address
        # Handshake and first frame (a masked ping, payload "hi") in one packet.
        ping = bytes([0x89, 0x82, 0, 0, 0, 0]) + b"hi"
        stream = await trio.open_tcp_stream(host, port)
        await stream.send_all(HANDSHAKE + ping)

        got = b""
        with trio.fail_after(5):
            while not got.endswith(b"hi"):
                got += await stream.receive_some()

        assert got.startswith(b"HTTP/1.1 101")
        assert got.endswith(b"\x8a\x02hi")
        await stream.aclose()
    network.close()


HANDSHAKE = (
    b"GET /debug/transitions HTTP/1.1\r\nhost: b\r\nupgrade: websocket\r\n"
    b"connection: upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def test_an_answer_before_it_is_written_to_a_slow_client_to_its_end(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world, pipe_bytes=500)
        async with serving(network):
            stream = network.open_client()
            await stream.send_all(b"GET /metrics HTTP/1.1\r\nhost: b\r\n\r\n" + HANDSHAKE)
            await trio.sleep(30)  # more than a handshake may take, less than a stall

            got = b""
            while b"HTTP/1.1 101" not in got:
                got += await stream.receive_some()

        world.cancel_scope.cancel()
    head, _, rest = got.partition(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    assert length > 1000
    assert rest[length:].startswith(b"HTTP/1.1 101")


async def test_who_takes_nothing_of_the_answer_before_it_is_gone(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world, pipe_bytes=500)
        async with serving(network, client_stall_timeout_secs=60.0):
            stream = network.open_client()
            await stream.send_all(b"GET /metrics HTTP/1.1\r\nhost: b\r\n\r\n" + HANDSHAKE)

            await trio.sleep(61)

            assert not network.open_sockets
        world.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("settings", "head", "status"),
    [
        ({"admin_key": "k"}, b"upgrade: websocket\r\nconnection: upgrade\r\n", b"401"),
        ({}, b"", b"400"),
    ],
)
async def test_who_may_not_watch_is_told_so(
    settings: dict[str, object], head: bytes, status: bytes, autojump_clock: trio.abc.Clock
) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world)
        async with serving(network, **settings):
            await trio.sleep(1)
            stream = network.open_client()
            await stream.send_all(
                b"GET /debug/transitions HTTP/1.1\r\nhost: b\r\n%bconnection: close\r\n\r\n" % head
            )

            answer = await read_all(stream)

        world.cancel_scope.cancel()
    assert answer.startswith(b"HTTP/1.1 " + status)


async def test_a_slow_watcher_loses_transitions_and_is_told_how_many() -> None:
    feed = Feed()
    send, receive = trio.open_memory_channel[Transition](1)
    feed.watchers.append(Watcher(send))

    for edge in CHART.edges[:4]:
        feed.publish("request", "r1", edge)
    receive.receive_nowait()
    feed.publish("request", "r1", CHART.edges[4])

    assert receive.receive_nowait().lost == 3
