"""TLS to workers, inside the seam: handshake, names, big transfers, truncation. Real sockets."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trio
import trustme
from attrs import define
from trio.testing import wait_all_tasks_blocked

from router.sockets import ERROR, HANGUP, READABLE, WRITABLE, Address, TlsTarget
from router.tcp import TcpNetwork
from router.tls import TlsSocket

BIG = 12 * 1024 * 1024
EITHER = WRITABLE | READABLE | HANGUP | ERROR

Handler = Callable[[trio.SSLStream[trio.SocketStream]], Awaitable[None]]


@define(eq=False)
class TlsWorld:
    """An authority, a network, and engines that speak TLS."""

    nursery: trio.Nursery
    authority: trustme.CA
    network: TcpNetwork

    def client_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context

    async def serve(self, handler: Handler, name: str = "engine.test") -> Address:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.authority.issue_cert(name).configure_cert(context)
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def accept() -> None:
            async with listener, await listener.accept() as stream:
                tls = trio.SSLStream(stream, context, server_side=True)
                try:
                    await handler(tls)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass

        self.nursery.start_soon(accept)
        return socket.AF_INET, listener.socket.getsockname()

    def connect(self, address: Address, name: str = "engine.test") -> TlsSocket:
        sock = self.network.connect(address, TlsTarget(self.client_context(), name))
        assert isinstance(sock, TlsSocket)
        self.network.register(sock, sock)
        return sock

    async def wait(self) -> int:
        """The next events of the one socket there is."""
        with trio.fail_after(5):
            while True:
                await self.network.wait()
                for _, events in self.network.poll(10):
                    return events

    async def shake_hands(self, sock: TlsSocket) -> None:
        while True:
            try:
                sock.finish_connecting()
                return
            except BlockingIOError:
                await self.wait()

    async def receive(self, sock: TlsSocket) -> bytes:
        while True:
            try:
                return sock.recv(65536)
            except BlockingIOError:
                await self.wait()

    def close(self, sock: TlsSocket) -> None:
        self.network.unregister(sock)
        sock.close()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
async def world(nursery: trio.Nursery, authority: trustme.CA) -> AsyncIterator[TlsWorld]:
    network = TcpNetwork()
    yield TlsWorld(nursery, authority, network)
    nursery.cancel_scope.cancel()
    network.close()


async def echo(stream: trio.SSLStream[trio.SocketStream]) -> None:
    async for data in stream:
        await stream.send_all(data)


async def test_bytes_go_both_ways(world: TlsWorld) -> None:
    sock = world.connect(await world.serve(echo))

    await world.shake_hands(sock)
    assert sock.send(b"hello") == 5

    assert await world.receive(sock) == b"hello"
    assert sock.is_quiet()
    world.close(sock)


async def test_a_certificate_for_another_name_is_refused(world: TlsWorld) -> None:
    sock = world.connect(await world.serve(echo, "other.test"))

    with pytest.raises(OSError, match="Hostname mismatch"):
        await world.shake_hands(sock)
    world.close(sock)


async def test_a_certificate_of_a_stranger_is_refused(world: TlsWorld) -> None:
    address = await world.serve(echo)
    target = TlsTarget(ssl.create_default_context(), "engine.test")
    sock = world.network.connect(address, target)
    assert isinstance(sock, TlsSocket)
    world.network.register(sock, sock)

    with pytest.raises(OSError, match="certificate verify failed"):
        await world.shake_hands(sock)
    world.close(sock)


async def test_an_engine_that_speaks_no_tls_is_refused(
    world: TlsWorld, nursery: trio.Nursery
) -> None:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def talk_plainly() -> None:
        async with listener:
            async with await listener.accept() as stream:
                await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                await trio.sleep_forever()

    nursery.start_soon(talk_plainly)
    sock = world.connect((socket.AF_INET, listener.socket.getsockname()))

    with pytest.raises(ssl.SSLError):
        await world.shake_hands(sock)
    world.close(sock)


async def test_an_engine_that_closes_in_the_handshake_is_refused(
    world: TlsWorld, nursery: trio.Nursery
) -> None:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def close_at_once() -> None:
        async with listener:
            async with await listener.accept() as stream:
                await stream.receive_some()

    nursery.start_soon(close_at_once)
    sock = world.connect((socket.AF_INET, listener.socket.getsockname()))

    with pytest.raises(OSError):
        await world.shake_hands(sock)
    world.close(sock)


async def test_much_can_be_received(world: TlsWorld) -> None:
    data = bytes(range(256)) * (BIG // 256)

    async def pour(stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.send_all(data)
        await stream.aclose()

    sock = world.connect(await world.serve(pour))
    await world.shake_hands(sock)
    found = bytearray()
    while piece := await world.receive(sock):
        found += piece

    assert bytes(found) == data
    world.close(sock)


async def test_much_can_be_sent(world: TlsWorld) -> None:
    data = bytes(range(256)) * (BIG // 256)
    found = bytearray()
    complete = trio.Event()

    async def drink(stream: trio.SSLStream[trio.SocketStream]) -> None:
        while len(found) < len(data):
            found.extend(await stream.receive_some())
        complete.set()

    sock = world.connect(await world.serve(drink))
    await world.shake_hands(sock)
    view = memoryview(data)
    while view or sock.has_unsent:
        try:
            view = view[sock.send(bytes(view[:1_000_000])) :]
        except BlockingIOError:
            pass
        if sock.has_unsent:
            await world.wait()
    await complete.wait()

    assert bytes(found) == data
    world.close(sock)


async def test_a_slow_reader_holds_the_engine_back_and_little_is_kept(world: TlsWorld) -> None:
    sent = trio.Event()

    async def pour(stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.send_all(b"x" * BIG)
        sent.set()
        await trio.sleep_forever()

    sock = world.connect(await world.serve(pour))
    await world.shake_hands(sock)
    total = len(await world.receive(sock))
    await wait_all_tasks_blocked()
    assert not sent.is_set()

    while total < BIG:
        total += len(await world.receive(sock))
        await wait_all_tasks_blocked()  # let the engine fill the kernel's buffers again
        assert sock._incoming.pending <= 128 * 1024
    world.close(sock)


async def test_a_full_read_means_that_more_may_be_there_and_a_short_one_that_not(
    world: TlsWorld,
) -> None:
    """The rule that lets the reactor wait for an edge after a short read."""
    data = b"x" * 1_000_000
    go_on = trio.Event()

    async def pour(stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.send_all(data)
        await go_on.wait()

    sock = world.connect(await world.serve(pour))
    await world.shake_hands(sock)
    total = 0
    while total < len(data):
        piece = await world.receive(sock)
        total += len(piece)
        while len(piece) == 65536:
            try:
                piece = sock.recv(65536)
            except BlockingIOError:
                break
            total += len(piece)
        # From here on only an edge tells: `wait` fails the test if none comes.
    assert total == len(data)
    go_on.set()
    world.close(sock)


async def test_an_orderly_end_is_an_end_also_behind_the_last_bytes(world: TlsWorld) -> None:
    async def say_goodbye(stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.send_all(b"bye")
        await stream.unwrap()  # close_notify, and the TCP connection stays open
        await trio.sleep_forever()

    sock = world.connect(await world.serve(say_goodbye))
    await world.shake_hands(sock)

    assert await world.receive(sock) == b"bye"
    assert await world.receive(sock) == b""
    world.close(sock)


async def test_an_end_without_notice_is_an_error(world: TlsWorld) -> None:
    async def cut(stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.send_all(b"half a fra")
        await stream.transport_stream.aclose()

    sock = world.connect(await world.serve(cut))
    await world.shake_hands(sock)

    assert await world.receive(sock) == b"half a fra"
    with pytest.raises(OSError):
        await world.receive(sock)
    world.close(sock)


async def test_an_idle_connection_that_the_engine_closed_is_not_quiet(world: TlsWorld) -> None:
    close = trio.Event()

    async def close_later(stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.do_handshake()
        await close.wait()
        await stream.aclose()

    sock = world.connect(await world.serve(close_later))
    await world.shake_hands(sock)
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    close.set()
    while not (await world.wait()) & HANGUP:
        pass

    assert not sock.is_quiet()
    world.close(sock)
