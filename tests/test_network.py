"""One suite for both worlds below the reactor: sockets in memory and sockets of the kernel.

What holds for the first must hold for the second, or tests in memory prove nothing. Nothing here
waits for time to pass: a test either sees the event it waits for or fails.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trio
from attrs import define, field
from trio.testing import wait_all_tasks_blocked

from router.sockets import ERROR, HANGUP, READABLE, WRITABLE, Address, Listening, Network, Socket
from router.tcp import TcpNetwork
from tests.memory import MemoryNetwork, MemoryStream
from tests.peers import Peer, TcpPeer

#: More than both ends of a connection hold.
BIG = 16 * 1024 * 1024


@define(eq=False)
class World:
    """A network, and how to stand on the other side of it."""

    network: Network
    #: An address that a peer listens at, with the peers that were accepted there.
    open_engine: Callable[[], Awaitable[tuple[Address, trio.MemoryReceiveChannel[Peer]]]]
    open_client: Callable[[Listening], Awaitable[Peer]]
    closed_address: Address
    _seen: dict[object, int] = field(factory=dict)
    _owners: dict[Socket | Listening, object] = field(factory=dict)

    def register(self, sock: Socket | Listening) -> None:
        owner = self._owners[sock] = object()
        self.network.register(sock, owner)

    def forget(self, sock: Socket | Listening) -> None:
        self.network.unregister(sock)
        self._seen.pop(self._owners.pop(sock), None)

    def close(self, sock: Socket | Listening) -> None:
        self.forget(sock)
        sock.close()

    def poll(self, limit: int = 100) -> int:
        found = self.network.poll(limit)
        for owner, events in found:
            self._seen[owner] = self._seen.get(owner, 0) | events
        return len(found)

    def take_events(self, sock: Socket | Listening) -> int:
        """What was reported of this socket since the last call."""
        return self._seen.pop(self._owners[sock], 0)

    async def wait_event(self, sock: Socket | Listening, wanted: int) -> int:
        seen = 0
        with trio.fail_after(5):
            while not (seen := seen | self.take_events(sock)) & wanted:
                await self.network.wait()
                self.poll()
        return seen

    async def connect(self) -> tuple[Socket, Peer]:
        address, accepted = await self.open_engine()
        sock = self.network.connect(address, None)
        self.register(sock)
        await self.finish_connecting(sock)
        return sock, await accepted.receive()

    async def finish_connecting(self, sock: Socket) -> None:
        while True:
            try:
                sock.finish_connecting()
                return
            except BlockingIOError:
                await self.wait_event(sock, WRITABLE | ERROR | HANGUP)

    async def accept(self) -> tuple[Socket, Peer]:
        listening = self.network.listen("127.0.0.1", 0)
        self.register(listening)
        peer = await self.open_client(listening)
        await self.wait_event(listening, READABLE)
        sock = listening.accept()
        assert sock is not None
        self.close(listening)
        self.register(sock)
        return sock, peer

    async def receive(self, sock: Socket, amount: int) -> bytes:
        """Exactly so many bytes, or all there are before the end."""
        found = bytearray()
        while len(found) < amount:
            try:
                data = sock.recv(amount - len(found))
            except BlockingIOError:
                await self.wait_event(sock, READABLE | HANGUP | ERROR)
                continue
            if not data:
                break
            found += data
        return bytes(found)

    async def send(self, sock: Socket, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[sock.send(bytes(view[:1000_000])) :]
            except BlockingIOError:
                await self.wait_event(sock, WRITABLE)


def memory_world(nursery: trio.Nursery) -> World:
    network = MemoryNetwork(nursery)

    async def open_engine() -> tuple[Address, trio.MemoryReceiveChannel[Peer]]:
        push, accepted = trio.open_memory_channel[Peer](1000)

        async def handler(stream: MemoryStream) -> None:
            await push.send(stream)

        network.engines["127.0.0.1", 9000] = handler
        return (socket.AF_INET, ("127.0.0.1", 9000)), accepted

    async def open_client(listening: Listening) -> Peer:
        return network.open_client(listening.address[1])

    return World(network, open_engine, open_client, (socket.AF_INET, ("127.0.0.1", 9)))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def tcp_world(nursery: trio.Nursery, network: TcpNetwork) -> World:
    async def open_engine() -> tuple[Address, trio.MemoryReceiveChannel[Peer]]:
        push, accepted = trio.open_memory_channel[Peer](1000)

        async def handler(stream: trio.SocketStream) -> None:
            await push.send(TcpPeer(stream))

        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=1000)

        async def serve() -> None:
            async with listener:
                while True:
                    await handler(await listener.accept())

        nursery.start_soon(serve)
        return (socket.AF_INET, listener.socket.getsockname()), accepted

    async def open_client(listening: Listening) -> Peer:
        return TcpPeer(await trio.open_tcp_stream(*listening.address))

    return World(network, open_engine, open_client, (socket.AF_INET, ("127.0.0.1", free_port())))


@pytest.fixture(params=["memory", "tcp"])
async def world(request: pytest.FixtureRequest, nursery: trio.Nursery) -> AsyncIterator[World]:
    if request.param == "memory":
        yield memory_world(nursery)
    else:
        network = TcpNetwork()
        yield tcp_world(nursery, network)
        network.close()


Opened = tuple[Socket, Peer]


@pytest.fixture(params=["connected", "accepted"])
async def pair(request: pytest.FixtureRequest, world: World) -> AsyncIterator[Opened]:
    """Both ends of a connection, whoever opened it."""
    sock, peer = await (world.connect() if request.param == "connected" else world.accept())
    yield sock, peer
    if sock in world._owners:
        world.close(sock)
    await peer.aclose()


#### bytes


async def test_bytes_arrive_in_order_and_none_is_lost(world: World, pair: Opened) -> None:
    sock, peer = pair
    data = bytes(range(256)) * 2000

    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.send_all, data)
        assert await world.receive(sock, len(data)) == data


async def test_bytes_leave_in_order_and_none_is_lost(world: World, pair: Opened) -> None:
    sock, peer = pair
    data = bytes(range(256)) * 2000

    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.send, sock, data)
        found = b""
        while len(found) < len(data):
            found += await peer.receive_some()
    assert found == data


async def test_nothing_to_read_is_no_end(pair: Opened) -> None:
    with pytest.raises(BlockingIOError):
        pair[0].recv(100)


async def test_a_reader_who_stops_holds_the_writer_back(world: World, pair: Opened) -> None:
    sock, peer = pair
    sent = trio.Event()

    async def send() -> None:
        await peer.send_all(b"x" * BIG)
        sent.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await wait_all_tasks_blocked()
        assert not sent.is_set()
        assert len(await world.receive(sock, BIG)) == BIG
        await sent.wait()


def fill(sock: Socket) -> int:
    """Send until the socket takes no more; how much it took."""
    sent = 0
    while sent < BIG:
        try:
            sent += sock.send(b"x" * 65536)
        except BlockingIOError:
            return sent
    raise AssertionError("nobody reads, and yet everything was taken")


async def test_a_full_socket_blocks_and_is_writable_again_when_it_was_read(
    world: World, pair: Opened
) -> None:
    sock, peer = pair
    sent = fill(sock)
    world.poll()
    world.take_events(sock)

    received = 0
    while received < sent:
        received += len(await peer.receive_some())

    assert await world.wait_event(sock, WRITABLE) & WRITABLE
    assert sock.send(b"x") == 1


async def test_what_the_peer_has_not_taken_is_known(world: World, pair: Opened) -> None:
    sock, peer = pair
    assert sock.untaken_bytes() == 0
    sent = fill(sock)
    assert 0 < sock.untaken_bytes() <= sent

    received = 0
    while received < sent:
        received += len(await peer.receive_some())
    while sock.untaken_bytes():
        await trio.lowlevel.checkpoint()


#### ends


async def test_an_end_comes_after_the_bytes_before_it(world: World, pair: Opened) -> None:
    sock, peer = pair
    await peer.send_all(b"half a fra")
    await peer.send_eof()

    await world.wait_event(sock, HANGUP)

    assert await world.receive(sock, 100) == b"half a fra"
    assert sock.recv(100) == b""
    assert sock.recv(100) == b""


async def test_after_a_half_close_the_other_direction_goes_on(world: World, pair: Opened) -> None:
    sock, peer = pair
    await peer.send_eof()
    await world.wait_event(sock, HANGUP)

    assert sock.send(b"answer") == 6
    assert await peer.receive_some() == b"answer"


async def test_our_half_close_is_an_end_for_the_peer_who_may_go_on(
    world: World, pair: Opened
) -> None:
    sock, peer = pair
    sock.send(b"last")
    sock.shutdown_write()

    assert await peer.receive_some() == b"last"
    assert await peer.receive_some() == b""
    await peer.send_all(b"more")
    assert await world.receive(sock, 4) == b"more"


async def test_nothing_can_be_sent_after_our_half_close(world: World, pair: Opened) -> None:
    sock, _ = pair
    sock.shutdown_write()

    with pytest.raises(BrokenPipeError):
        sock.send(b"x")


async def test_a_close_by_the_peer_is_an_end(world: World, pair: Opened) -> None:
    sock, peer = pair
    await peer.send_all(b"bye")
    await peer.aclose()

    assert await world.wait_event(sock, HANGUP) & HANGUP
    assert await world.receive(sock, 100) == b"bye"
    assert sock.recv(100) == b""


async def test_a_reset_by_the_peer_is_an_error(world: World, pair: Opened) -> None:
    sock, peer = pair
    peer.reset()

    assert await world.wait_event(sock, HANGUP | ERROR)
    with pytest.raises(ConnectionResetError):
        sock.recv(100)


async def test_sending_to_a_peer_that_is_gone_is_an_error(world: World, pair: Opened) -> None:
    sock, peer = pair
    peer.reset()
    await world.wait_event(sock, HANGUP | ERROR)

    with pytest.raises(ConnectionError):
        sock.send(b"x")


async def test_our_reset_breaks_the_peer(world: World, pair: Opened) -> None:
    sock, peer = pair
    world.forget(sock)
    sock.reset()

    with pytest.raises(trio.BrokenResourceError):
        await peer.receive_some()


async def test_our_close_delivers_what_was_sent_and_then_an_end(world: World, pair: Opened) -> None:
    sock, peer = pair
    sock.send(b"x" * 1000)
    world.close(sock)

    received = b""
    while data := await peer.receive_some():
        received += data
    assert received == b"x" * 1000


async def test_a_close_with_unread_bytes_is_a_reset(world: World, pair: Opened) -> None:
    sock, peer = pair
    await peer.send_all(b"unread")
    await world.wait_event(sock, READABLE)
    world.close(sock)

    with pytest.raises(trio.BrokenResourceError):
        await peer.receive_some()


#### readiness


async def test_a_new_connection_is_writable_and_quiet(world: World, pair: Opened) -> None:
    sock, _ = pair

    world.forget(sock)
    world.register(sock)

    assert await world.wait_event(sock, WRITABLE) == WRITABLE
    assert sock.is_quiet()


async def test_readiness_is_told_once_until_more_arrives(world: World, pair: Opened) -> None:
    sock, peer = pair
    await peer.send_all(b"one")
    await world.wait_event(sock, READABLE)

    assert world.poll() == 0
    await wait_all_tasks_blocked()
    assert world.poll() == 0
    assert not sock.is_quiet()

    await peer.send_all(b"two")
    await world.wait_event(sock, READABLE)
    assert await world.receive(sock, 6) == b"onetwo"


async def test_what_happened_before_registration_is_told_at_registration(
    world: World, pair: Opened
) -> None:
    sock, peer = pair
    world.forget(sock)
    await peer.send_all(b"early")
    await peer.send_eof()
    while sock.is_quiet():
        await trio.lowlevel.checkpoint()
    assert world.poll() == 0

    world.register(sock)

    assert await world.wait_event(sock, HANGUP) & READABLE
    assert await world.receive(sock, 100) == b"early"
    assert sock.recv(100) == b""


async def test_an_end_makes_a_connection_unquiet(world: World, pair: Opened) -> None:
    sock, peer = pair
    assert sock.is_quiet()

    await peer.send_eof()
    await world.wait_event(sock, HANGUP)

    assert not sock.is_quiet()


async def test_a_reset_makes_a_connection_unquiet(world: World, pair: Opened) -> None:
    sock, peer = pair
    peer.reset()
    await world.wait_event(sock, HANGUP | ERROR)

    assert not sock.is_quiet()


async def test_nothing_is_told_of_an_unregistered_socket(world: World, pair: Opened) -> None:
    sock, peer = pair
    await peer.send_all(b"x")
    await world.wait_event(sock, READABLE)
    await peer.send_all(b"y")

    world.forget(sock)

    assert world.poll() == 0
    sock.close()


async def test_waiting_returns_when_something_is_to_be_told_and_not_before(
    world: World, pair: Opened
) -> None:
    sock, peer = pair
    while world.poll():
        pass
    returned = trio.Event()

    async def wait() -> None:
        await world.network.wait()
        returned.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        assert not returned.is_set()
        await peer.send_all(b"x")
        await returned.wait()
    assert await world.wait_event(sock, READABLE)


#### listening and connecting


async def test_many_connections_at_once_are_all_accepted(world: World) -> None:
    listening = world.network.listen("127.0.0.1", 0)
    world.register(listening)
    peers = [await world.open_client(listening) for _ in range(200)]

    accepted: list[Socket] = []
    while len(accepted) < len(peers):
        await world.wait_event(listening, READABLE)
        while (sock := listening.accept()) is not None:
            accepted.append(sock)

    assert listening.accept() is None
    for sock in accepted:
        world.register(sock)
        sock.send(b"hello")
    for peer in peers:
        assert await peer.receive_some() == b"hello"
        await peer.aclose()
    for sock in accepted:
        world.close(sock)
    world.close(listening)


async def test_one_poll_tells_of_at_most_so_many_and_the_rest_comes_later(world: World) -> None:
    address, accepted = await world.open_engine()
    socks = [world.network.connect(address, None) for _ in range(50)]
    for sock in socks:
        world.register(sock)
        await world.finish_connecting(sock)
    peers = [await accepted.receive() for _ in socks]
    while world.poll():
        pass
    for sock in socks:
        world.take_events(sock)
    for peer in peers:
        await peer.send_all(b"x")

    told = 0
    while told < len(socks):
        await world.network.wait()
        batch = world.poll(limit=7)
        assert 0 < batch <= 7
        told += batch

    assert all(world.take_events(sock) & READABLE for sock in socks)
    for sock, peer in zip(socks, peers, strict=True):
        world.close(sock)
        await peer.aclose()


async def test_a_refused_connection_is_an_error(world: World) -> None:
    async def connect() -> None:
        sock = world.network.connect(world.closed_address, None)
        world.register(sock)
        try:
            await world.finish_connecting(sock)
        finally:
            world.close(sock)

    with pytest.raises(ConnectionRefusedError):
        await connect()


async def test_an_address_is_listened_at_once(world: World) -> None:
    listening = world.network.listen("127.0.0.1", 0)

    with pytest.raises(OSError) as raised:
        world.network.listen(*listening.address)

    assert raised.value.errno == errno.EADDRINUSE
    listening.close()
    again = world.network.listen(*listening.address)
    again.close()


async def test_nobody_reaches_a_closed_listener(world: World) -> None:
    listening = world.network.listen("127.0.0.1", 0)
    world.register(listening)
    world.close(listening)

    with pytest.raises(OSError):
        await world.open_client(listening)


async def test_a_socket_that_left_lives_on_as_a_trio_stream(world: World) -> None:
    sock, peer = await world.accept()
    await peer.send_all(b"unread")
    await world.wait_event(sock, READABLE)
    world.forget(sock)

    stream = world.network.stream_of(sock)
    assert await stream.receive_some() == b"unread"
    await stream.send_all(b"pong")
    assert await peer.receive_some() == b"pong"
    await peer.send_eof()
    assert await stream.receive_some() == b""
    await stream.aclose()
    assert await peer.receive_some() == b""
    await peer.aclose()
