"""The known hazards of the reactor, each with a story, in memory or on real sockets."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from router.reactor import ACCEPT_AGAIN_SECONDS, RECV_BYTES, Channel, Listener, Rank, Reactor
from router.sockets import Network, Socket
from router.tcp import TcpNetwork, TcpSocket
from tests.memory import MemoryListening, MemoryNetwork, MemoryStream

PORT = 8000


@pytest.fixture
def autojump_clock() -> MockClock:
    return MockClock(autojump_threshold=0)


class Tape(Channel):
    """A channel that writes down what it hears, and does more when it is told to."""

    __slots__ = ("heard", "name", "on_received", "on_sweep")

    def __init__(
        self,
        reactor: Reactor,
        sock: Socket,
        heard: list[tuple[str, object]],
        name: str = "tape",
        rank: Rank = Rank.CLIENT,
        *,
        connecting: bool = False,
    ) -> None:
        self.heard = heard
        self.name = name
        self.on_received: Callable[[bytes], None] = lambda data: None
        self.on_sweep: Callable[[float], float | None] = lambda now: None
        super().__init__(reactor, sock, rank, connecting=connecting)

    def note(self, what: object) -> None:
        self.heard.append((self.name, what))

    def connected(self) -> None:
        self.note("connected")

    def received(self, data: bytes) -> None:
        self.note(data if len(data) < 100 else len(data))
        self.on_received(data)

    def ended(self) -> None:
        self.note("ended")

    def lost(self, error: OSError) -> None:
        self.note("lost")

    def hung_up_while_paused(self) -> None:
        self.note("hung up")

    def progressed(self) -> None:
        self.note("progressed")

    def drained(self) -> None:
        self.note("drained")

    def closed(self) -> None:
        self.note("closed")

    def crashed(self, error: Exception) -> None:
        self.note(error)

    def sweep(self, now: float) -> float | None:
        self.note("swept")
        return self.on_sweep(now)


@define(eq=False)
class Bench:
    """A running reactor over a network in memory."""

    network: MemoryNetwork
    reactor: Reactor
    bugs: list[Exception]
    heard: list[tuple[str, object]] = field(factory=list)
    accepted: list[Socket] = field(factory=list)

    async def open(self, name: str = "tape", rank: Rank = Rank.CLIENT) -> tuple[Tape, MemoryStream]:
        """A channel and its peer."""
        stream = self.network.open_client(PORT)
        await wait_all_tasks_blocked()
        return Tape(self.reactor, self.accepted.pop(0), self.heard, name, rank), stream

    def of(self, name: str) -> list[object]:
        return [what for who, what in self.heard if who == name]


def _raise(error: Exception) -> None:
    raise error


def put(peer: MemoryStream, data: bytes) -> None:
    """Send what there is room for, without giving the reactor a turn."""
    try:
        peer.outgoing.put(data)
    except BlockingIOError:
        pass


@asynccontextmanager
async def reacting(**options: int | Random) -> AsyncIterator[Bench]:
    bugs: list[Exception] = []
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery, **options)  # type: ignore[arg-type]  # by name
        reactor = Reactor(network, bugs.append)
        bench = Bench(network, reactor, bugs)
        nursery.start_soon(reactor.run)
        Listener(reactor, network.listen("127.0.0.1", PORT), bench.accepted.append)
        yield bench
        nursery.cancel_scope.cancel()


#### events of one pass


async def test_a_channel_closed_in_the_same_pass_hears_nothing_more() -> None:
    async with reacting() as bench:
        first, first_peer = await bench.open("first", Rank.WORKER)
        second, second_peer = await bench.open("second", Rank.CLIENT)
        first.on_received = lambda data: second.close()

        put(second_peer, b"b")
        put(first_peer, b"a")
        await wait_all_tasks_blocked()

        assert bench.of("first") == [b"a"]
        assert bench.of("second") == ["closed"]


async def test_an_event_belongs_to_a_channel_and_not_to_a_descriptor_number() -> None:
    """Epoll's answer for a closed socket must not reach the one that got its number."""
    heard: list[tuple[str, object]] = []
    network = TcpNetwork()
    reactor = Reactor(network, _raise)
    ours, theirs = zip(*(nonblocking_pair() for _ in range(2)), strict=True)
    first = Tape(reactor, TcpSocket(ours[0]), heard, "first", Rank.WORKER)
    second = Tape(reactor, TcpSocket(ours[1]), heard, "second", Rank.CLIENT)
    number = ours[1].fileno()
    newcomers: list[Tape] = []

    def replace_second(_data: bytes) -> None:
        second.close()
        pair = nonblocking_pair()
        assert number in (pair[0].fileno(), pair[1].fileno())
        for name, sock in zip(("new", "peer"), pair, strict=True):
            newcomers.append(Tape(reactor, TcpSocket(sock), heard, name))

    first.on_received = replace_second
    theirs[0].send(b"a")
    theirs[1].send(b"b")
    reactor.turn()

    assert heard == [("first", b"a"), ("second", "closed")]
    for channel in (first, *newcomers):
        channel.close()
    for sock in theirs:
        sock.close()
    network.close()


def nonblocking_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(False)
    return pair


async def test_facts_of_one_pass_come_in_a_fixed_order(autojump_clock: MockClock) -> None:
    for seed in range(20):
        async with reacting(cuts=Random(seed)) as bench:
            ranks = list(Rank)
            Random(seed).shuffle(ranks)
            peers = []
            for rank in ranks:
                channel, peer = await bench.open(rank.name, rank)
                bench.reactor.sweeper.arm(channel, trio.current_time() + 5)
                peers.append(peer)
            autojump_clock.jump(5)
            for peer in peers:
                put(peer, b"x")
            await wait_all_tasks_blocked()

            order = [name for name, what in bench.heard if what == b"x"]
            assert order == ["PREFILL", "WORKER", "CLIENT"]
            assert [what for _, what in bench.heard] == [b"x"] * 3 + ["swept"] * 3


async def test_what_is_said_in_a_pass_is_written_at_its_end_in_one_piece() -> None:
    async with reacting() as bench:
        (first, near), (second, far) = await bench.open("a", Rank.WORKER), await bench.open("b")
        seen: list[int] = []

        def answer(data: bytes) -> None:
            second.send(b"said ")
            second.send(data)
            seen.append(len(far.incoming.data))

        first.on_received = answer
        second.on_received = answer
        put(near, b"one")
        put(far, b"two")
        await wait_all_tasks_blocked()

        assert seen == [0, 0]
        assert bytes(far.incoming.data) == b"said onesaid two"
        assert not second.owes


async def test_an_end_in_a_pass_comes_after_what_was_said_in_it() -> None:
    class Last(Tape):
        __slots__ = ()

        def flushed_last(self) -> None:
            self.note("flushed")
            self.close()

    async with reacting() as bench:
        stream = bench.network.open_client(PORT)
        await wait_all_tasks_blocked()
        last = Last(bench.reactor, bench.accepted.pop(0), bench.heard, "last")
        other, peer = await bench.open("other")

        def end(_: bytes) -> None:
            last.send(b"good bye")
            last.closing = True
            assert last.owes

        last.on_received = end
        put(stream, b"x")
        put(peer, b"y")
        await wait_all_tasks_blocked()

        assert bytes(stream.incoming.data) == b"good bye"
        assert bench.of("last")[-2:] == ["flushed", "closed"]
        assert other.is_open


async def test_what_does_not_fit_at_the_end_of_a_pass_is_backlog() -> None:
    class Full(Tape):
        __slots__ = ()

        def backlogged(self) -> None:
            self.note("backlogged")

    async with reacting(pipe_bytes=10) as bench:
        stream = bench.network.open_client(PORT)
        await wait_all_tasks_blocked()
        full = Full(bench.reactor, bench.accepted.pop(0), bench.heard, "full")
        full.on_received = lambda data: full.send(b"0123456789abcdef")
        put(stream, b"x")
        await wait_all_tasks_blocked()

        assert full.backlog_bytes == 6
        assert bench.of("full")[-1] == "backlogged"
        assert await stream.receive_some(10) == b"0123456789"
        await wait_all_tasks_blocked()
        assert await stream.receive_some(10) == b"abcdef"
        assert bench.of("full")[-1] == "drained"


async def test_a_bug_at_the_end_of_a_pass_is_its_channels_alone() -> None:
    class Torn(Tape):
        __slots__ = ()

        def flushed_last(self) -> None:
            raise RuntimeError("torn")

    async with reacting() as bench:
        stream = bench.network.open_client(PORT)
        await wait_all_tasks_blocked()
        torn = Torn(bench.reactor, bench.accepted.pop(0), bench.heard, "torn")
        other, peer = await bench.open("other")

        def end(_: bytes) -> None:
            torn.send(b"x")
            torn.closing = True
            other.send(b"y")

        torn.on_received = end
        put(stream, b"x")
        put(peer, b"y")
        await wait_all_tasks_blocked()

        assert isinstance(bench.of("torn")[-1], RuntimeError)
        assert bytes(peer.incoming.data) == b"y"


async def test_who_is_paused_by_another_in_the_pass_keeps_what_was_read_of_it() -> None:
    async with reacting() as bench:
        (first, near), (second, far) = await bench.open("a", Rank.WORKER), await bench.open("b")
        first.on_received = lambda data: second.pause()
        put(near, b"one")
        put(far, b"two")
        await wait_all_tasks_blocked()
        assert bench.of("b") == []
        assert second.has_news

        put(far, b"three")
        await wait_all_tasks_blocked()
        second.resume()
        await wait_all_tasks_blocked()

        assert b"".join(each for each in bench.of("b") if isinstance(each, bytes)) == b"twothree"
        assert not second.has_news


async def test_a_bug_in_reading_ahead_is_its_channels_alone() -> None:
    async with reacting() as bench:
        (first, near), (_, far) = await bench.open("a", Rank.WORKER), await bench.open("b")
        error = RuntimeError("cannot read")
        first.sock.recv = lambda n: _raise(error)  # type: ignore[assignment, return-value]
        put(near, b"one")
        put(far, b"two")
        await wait_all_tasks_blocked()

        assert bench.of("a")[0] is error
        assert bench.of("b") == [b"two"]


async def test_an_answer_beats_a_deadline_of_the_same_moment(autojump_clock: MockClock) -> None:
    async with reacting() as bench:
        channel, peer = await bench.open()
        bench.reactor.sweeper.arm(channel, trio.current_time() + 5)
        autojump_clock.jump(5)
        put(peer, b"just in time")
        await wait_all_tasks_blocked()

        assert bench.of("tape") == [b"just in time", "swept"]


async def test_a_crash_of_a_callback_reaches_its_owner_and_nobody_else() -> None:
    async with reacting() as bench:
        first, first_peer = await bench.open("first", Rank.WORKER)
        _, second_peer = await bench.open("second", Rank.CLIENT)
        error = ValueError("a bug")
        first.on_received = lambda data: _raise(error)

        put(second_peer, b"b")
        put(first_peer, b"a")
        await wait_all_tasks_blocked()
        await second_peer.send_all(b"c")
        await wait_all_tasks_blocked()

        assert bench.of("first") == [b"a", error]
        assert bench.of("second") == [b"b", b"c"]
        assert bench.bugs == []


async def test_a_crash_that_nobody_takes_closes_the_channel_and_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with reacting() as bench:
        channel, peer = await bench.open()
        error = ValueError("a bug")
        channel.on_received = lambda data: _raise(error)
        monkeypatch.setattr(Tape, "crashed", Channel.crashed)

        await peer.send_all(b"a")
        await wait_all_tasks_blocked()

        assert bench.bugs == [error]
        assert not channel.is_open
        assert await peer.receive_some() == b""


#### reading


async def test_what_came_while_paused_is_read_after_the_pause_without_an_edge() -> None:
    async with reacting() as bench:
        channel, peer = await bench.open()
        channel.pause()
        await peer.send_all(b"early")
        await wait_all_tasks_blocked()
        assert bench.heard == []

        channel.resume()
        await wait_all_tasks_blocked()

        assert bench.of("tape") == [b"early"]


async def test_a_read_that_filled_the_buffer_is_followed_by_another() -> None:
    async with reacting(pipe_bytes=4 * RECV_BYTES) as bench:
        _, peer = await bench.open()

        await peer.send_all(b"x" * (2 * RECV_BYTES + 5000))
        await wait_all_tasks_blocked()

        assert bench.of("tape") == [RECV_BYTES, RECV_BYTES, 5000]


async def test_a_pause_in_the_middle_of_a_full_buffer_loses_nothing() -> None:
    async with reacting(pipe_bytes=4 * RECV_BYTES) as bench:
        channel, peer = await bench.open()
        channel.on_received = lambda data: channel.pause()
        await peer.send_all(b"x" * (2 * RECV_BYTES + 5000))
        await wait_all_tasks_blocked()
        assert bench.of("tape") == [RECV_BYTES]

        channel.resume()
        await wait_all_tasks_blocked()
        channel.resume()
        await wait_all_tasks_blocked()

        assert bench.of("tape") == [RECV_BYTES, RECV_BYTES, 5000]


async def test_a_resume_in_the_same_pass_as_the_pause_reads_on() -> None:
    async with reacting(pipe_bytes=4 * RECV_BYTES) as bench:
        channel, peer = await bench.open()

        def blink(_data: bytes) -> None:
            channel.pause()
            channel.resume()

        channel.on_received = blink
        await peer.send_all(b"x" * (RECV_BYTES + 5000))
        await wait_all_tasks_blocked()

        assert bench.of("tape") == [RECV_BYTES, 5000]


async def test_an_end_is_told_while_paused_and_again_in_its_place() -> None:
    async with reacting() as bench:
        channel, peer = await bench.open()
        channel.pause()
        await peer.send_all(b"last words")
        await peer.send_eof()
        await wait_all_tasks_blocked()
        assert set(bench.of("tape")) == {"hung up"}

        channel.resume()
        await wait_all_tasks_blocked()

        assert bench.of("tape")[-2:] == [b"last words", "ended"]


async def test_an_end_that_was_seen_before_the_pause_is_told_as_well() -> None:
    async with reacting() as bench:
        channel, peer = await bench.open()
        channel.on_received = lambda data: channel.pause()
        await peer.send_all(b"last words")
        await peer.send_eof()
        await wait_all_tasks_blocked()

        assert bench.of("tape") == [b"last words", "hung up"]


async def test_an_end_is_told_once() -> None:
    async with reacting() as bench:
        channel, peer = await bench.open()
        await peer.send_eof()
        await wait_all_tasks_blocked()
        peer.close()
        await wait_all_tasks_blocked()

        assert bench.of("tape").count("ended") == 1
        assert channel.is_open


async def test_a_reset_is_a_loss_and_closes_the_channel() -> None:
    async with reacting() as bench:
        channel, peer = await bench.open()
        peer.reset()
        await wait_all_tasks_blocked()

        assert bench.of("tape") == ["closed", "lost"]
        assert not channel.is_open


#### writing


async def test_what_the_kernel_does_not_take_is_kept_and_written_in_order() -> None:
    async with reacting(pipe_bytes=1000) as bench:
        channel, peer = await bench.open()
        data = bytes(range(250)) * 10
        channel.send(data)
        channel.send(b"tail")
        assert channel.backlog_bytes == 1504

        found = b""
        while len(found) < len(data) + 4:
            found += await peer.receive_some(600)
            await wait_all_tasks_blocked()

        assert found == data + b"tail"
        assert channel.backlog_bytes == 0
        assert bench.of("tape")[-1] == "drained"
        assert set(bench.of("tape")[:-1]) == {"progressed"}


async def test_a_closing_channel_writes_its_backlog_first() -> None:
    async with reacting(pipe_bytes=1000) as bench:
        channel, peer = await bench.open()
        channel.send(b"x" * 1500)
        channel.closing = True
        await wait_all_tasks_blocked()
        assert channel.is_open

        assert len(await peer.receive_some()) == 1000
        assert len(await peer.receive_some()) == 500
        assert await peer.receive_some() == b""
        assert not channel.is_open


async def test_a_write_to_a_peer_that_is_gone_is_a_loss_told_later() -> None:
    async with reacting() as bench:
        channel, peer = await bench.open()
        peer.reset()
        channel.send(b"x")
        assert bench.heard == []  # never from within `send`
        await wait_all_tasks_blocked()

        assert bench.of("tape") == ["closed", "lost"]


async def test_what_is_sent_while_connecting_goes_out_when_connected() -> None:
    async with reacting() as bench:
        received: list[bytes] = []

        async def engine(stream: MemoryStream) -> None:
            received.append(await stream.receive_some())

        bench.network.engines["10.0.0.1", 80] = engine
        sock = bench.reactor.connect((socket.AF_INET, ("10.0.0.1", 80)), None)
        channel = Tape(bench.reactor, sock, bench.heard, connecting=True)
        channel.send(b"first")
        channel.send(b"second")
        await wait_all_tasks_blocked()

        assert bench.of("tape") == ["connected", "drained"]
        assert received == [b"firstsecond"]


async def test_a_refused_connection_is_a_loss() -> None:
    async with reacting() as bench:
        sock = bench.reactor.connect((socket.AF_INET, ("10.0.0.1", 80)), None)
        Tape(bench.reactor, sock, bench.heard, connecting=True)
        await wait_all_tasks_blocked()

        assert bench.of("tape") == ["closed", "lost"]


#### what the kernel does and memory does not: an answer before a reset


@asynccontextmanager
async def reacting_on_sockets() -> AsyncIterator[Reactor]:
    network = TcpNetwork()
    reactor = Reactor(network, _raise)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reactor.run)
        yield reactor
        nursery.cancel_scope.cancel()
    network.close()


async def connected_pair(reactor: Reactor, heard: list[tuple[str, object]]) -> tuple[Tape, Socket]:
    listening = reactor.network.listen("127.0.0.1", 0)
    sock = reactor.connect((socket.AF_INET, listening.address), None)
    channel = Tape(reactor, sock, heard, connecting=True)
    with trio.fail_after(5):
        while ("tape", "connected") not in heard:
            await trio.lowlevel.checkpoint()
    peer = listening.accept()
    assert peer is not None
    listening.close()
    return channel, peer


async def wait_for(condition: Callable[[], bool]) -> None:
    with trio.fail_after(5):
        while not condition():
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("waits_for_room", [False, True])
async def test_an_answer_that_came_before_a_reset_is_read(waits_for_room: bool) -> None:
    """A worker may refuse a large body before it has read it, and close."""
    heard: list[tuple[str, object]] = []
    async with reacting_on_sockets() as reactor:
        channel, peer = await connected_pair(reactor, heard)
        channel.pause()
        channel.send(b"x" * (64 * 1024 * 1024 if waits_for_room else 1000))
        assert bool(channel.backlog_bytes) is waits_for_room
        peer.send(b"413")
        await wait_for(lambda: not peer.is_quiet())
        peer.close()  # with unread bytes: a reset
        await wait_for(lambda: channel._hung_up)
        if not waits_for_room:
            channel.send(b"more")
        channel.resume()
        await wait_for(lambda: not channel.is_open)

    told = [what for _, what in heard if what not in ("connected", "hung up", "progressed")]
    assert told == [b"413", "closed", "lost"]


async def test_a_reset_that_a_write_has_met_is_a_loss_and_never_an_end() -> None:
    """The kernel tells an error once: to the write, and then the read finds a plain end."""
    heard: list[tuple[str, object]] = []
    async with reacting_on_sockets() as reactor:
        channel, peer = await connected_pair(reactor, heard)
        channel.pause()
        peer.reset()
        await wait_for(lambda: channel._hung_up)
        channel.send(b"x")
        channel.resume()
        await wait_for(lambda: not channel.is_open)

    assert [what for _, what in heard if what != "hung up"][1:] == ["closed", "lost"]


#### ends


async def test_closing_twice_closes_once_and_nothing_is_heard_afterwards() -> None:
    async with reacting() as bench:
        channel, peer = await bench.open()
        await peer.send_all(b"unread")
        channel.close()
        channel.close()
        channel.reset()
        await wait_all_tasks_blocked()

        assert bench.of("tape") == ["closed"]
        assert bench.reactor.statistics() == {"channels": 0, "listeners": 1}
        assert not bench.network.open_sockets


async def test_a_reset_of_ours_is_no_clean_end_for_the_peer() -> None:
    async with reacting() as bench:
        channel, peer = await bench.open()
        channel.reset()

        with pytest.raises(trio.BrokenResourceError):
            await peer.receive_some()


async def test_a_detached_channel_keeps_its_socket_and_its_unread_bytes() -> None:
    async with reacting() as bench:
        channel, peer = await bench.open()
        channel.pause()
        await peer.send_all(b"unread")
        await wait_all_tasks_blocked()

        sock = channel.detach()
        channel.resume()
        await wait_all_tasks_blocked()

        assert bench.heard == []
        assert sock.recv(100) == b"unread"
        assert sock.send(b"answer") == 6
        assert await peer.receive_some() == b"answer"
        assert bench.reactor.statistics()["channels"] == 0
        sock.close()


#### passes


@define(eq=False)
class CountingNetwork(MemoryNetwork):
    """Writes down how many events each pass took."""

    batches: list[int] = field(factory=list)

    def poll(self, limit: int, seconds: float = 0.0) -> Sequence[tuple[object, int]]:
        found = MemoryNetwork.poll(self, limit)
        self.batches.append(len(found))
        return found


async def test_a_pass_takes_a_bounded_number_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.reactor.EVENTS_PER_PASS", 10)
    async with trio.open_nursery() as nursery:
        network = CountingNetwork(nursery)
        reactor = Reactor(network, _raise)
        bench = Bench(network, reactor, [])
        Listener(reactor, network.listen("127.0.0.1", PORT), bench.accepted.append)
        nursery.start_soon(reactor.run)
        pairs = [await bench.open() for _ in range(35)]
        network.batches.clear()
        for _, peer in pairs:
            network.note(peer_socket(peer, network), 0)  # all of them in one batch
            peer.outgoing.put(b"x")
        await wait_all_tasks_blocked()

        assert max(network.batches) == 10
        assert [what for _, what in bench.heard] == [b"x"] * 35
        nursery.cancel_scope.cancel()


def peer_socket(stream: MemoryStream, network: MemoryNetwork) -> Socket:
    [sock] = [each for each in network.open_sockets if each.incoming is stream.outgoing]
    return sock


async def test_one_who_never_stops_sending_does_not_keep_other_tasks_from_running() -> None:
    async with reacting(pipe_bytes=4 * RECV_BYTES) as bench:
        channel, peer = await bench.open()
        flood = b"x" * (2 * RECV_BYTES)
        # Whenever it was read, as much is there again: every read fills the buffer.
        channel.on_received = lambda data: None if len(bench.heard) > 1000 else put(peer, flood)

        await peer.send_all(flood)
        for _ in range(20):
            await trio.lowlevel.checkpoint()

        assert 0 < len(bench.heard) < 100


async def test_accepts_of_one_pass_are_bounded_and_none_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.reactor.ACCEPTS_PER_PASS", 4)
    async with reacting() as bench:
        for _ in range(11):
            bench.network.open_client(PORT)
        await wait_all_tasks_blocked()

        assert len(bench.accepted) == 11


@define(eq=False)
class Exhausted(MemoryListening):
    """A listening socket of a process that has no descriptors left."""

    failures: int = 0

    def accept(self) -> Socket | None:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return MemoryListening.accept(self)


async def test_accepting_recovers_when_descriptors_are_free_again(
    autojump_clock: MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        bugs: list[Exception] = []
        accepted: list[Socket] = []
        reactor = Reactor(network, bugs.append)
        listening = Exhausted(network, ("127.0.0.1", PORT), failures=3)
        network.listening[listening.address] = listening
        listener = Listener(reactor, listening, accepted.append)
        nursery.start_soon(reactor.run)
        network.open_client(PORT)
        await wait_all_tasks_blocked()
        assert (len(bugs), accepted) == (1, [])

        await trio.sleep(3 * ACCEPT_AGAIN_SECONDS + 0.01)

        assert (len(bugs), len(accepted)) == (3, 1)
        assert listener.is_open
        nursery.cancel_scope.cancel()


async def test_the_reactor_is_an_ordinary_task_that_can_be_cancelled() -> None:
    async with trio.open_nursery() as nursery:
        network: Network = MemoryNetwork(nursery)
        reactor = Reactor(network, _raise)
        with trio.CancelScope() as scope:
            nursery.start_soon(_cancel_soon, scope)
            await reactor.run()

    assert scope.cancelled_caught


async def _cancel_soon(scope: trio.CancelScope) -> None:
    await wait_all_tasks_blocked()
    scope.cancel()
