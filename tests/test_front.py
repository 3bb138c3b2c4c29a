"""Client connections over the network in memory: order, ends, slowness, leaving at any moment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from attrs import define, evolve, field
from trio.testing import MockClock, wait_all_tasks_blocked

from router.calls import Call, Limits
from router.errors import Refusal
from router.front import BACKLOG_BYTES_HIGH, LINGER_SECONDS, ClientChannel
from router.reactor import Listener, Reactor
from router.sockets import Socket
from tests.memory import PIPE_BYTES, MemoryNetwork, MemoryStream

PORT = 8000
LIMITS = Limits(
    head_bytes_max=4096, body_bytes_max=1000, head_seconds=30, idle_seconds=75, stall_seconds=10
)
Reply = Callable[[ClientChannel, Call], Awaitable[None]]


@pytest.fixture
def autojump_clock() -> MockClock:
    return MockClock(autojump_threshold=0)


async def echo(channel: ClientChannel, call: Call) -> None:
    channel.respond(200, b"", call.body or call.target)


@define(eq=False)
class Watching:
    """Writes down what happens to a client; a call may have a deadline."""

    channel: ClientChannel
    seen: list[object] = field(factory=list)
    deadline: float | None = None

    def on_client_gone(self) -> None:
        self.seen.append("gone")
        self.channel.waker.wake()

    def on_client_slow(self) -> None:
        self.seen.append("slow")

    def on_client_ready(self) -> None:
        self.seen.append("ready")

    def next_deadline(self) -> float | None:
        return self.deadline

    def on_deadline(self, now: float) -> None:
        self.seen.append("deadline")
        self.deadline = None
        self.channel.waker.wake()

    def on_crash(self, error: Exception) -> None:
        self.channel.waker.throw(error)


@define(eq=False)
class Front:
    """A front whose connections are served by one small task each, and its clients."""

    network: MemoryNetwork
    reactor: Reactor
    reply: Reply
    channels: list[ClientChannel] = field(factory=list)
    watchings: list[Watching] = field(factory=list)
    bugs: list[Exception] = field(factory=list)

    async def serve(self, channel: ClientChannel) -> None:
        """As the router does: one call after the other, until the connection ends."""
        try:
            while channel.is_open:
                if not channel.has_call:
                    await channel.waker.wait()
                    continue
                call = channel.take_call()
                if call.refusal is not None:
                    channel.refuse(call.refusal)
                else:
                    await self.reply(channel, call)
                channel.finish_call()
        finally:
            channel.close()

    def watch(self, channel: ClientChannel) -> Watching:
        watching = Watching(channel)
        channel.watcher = watching
        self.watchings.append(watching)
        return watching

    async def open(self) -> MemoryStream:
        stream = self.network.open_client(PORT)
        await wait_all_tasks_blocked()
        return stream

    async def ask(self, *pieces: bytes) -> bytes:
        """All that is answered to this on a new connection."""
        stream = await self.open()
        for piece in pieces:
            await stream.send_all(piece)
            await wait_all_tasks_blocked()
        return heard(stream)

    @property
    def are_all_closed(self) -> bool:
        return not self.network.open_sockets and not self.reactor.statistics()["channels"]


def heard(stream: MemoryStream) -> bytes:
    """What has arrived, without waiting."""
    found = b""
    while stream.incoming.data:
        found += stream.incoming.take(1 << 20)
    return found


def ended(stream: MemoryStream) -> str:
    """How the stream stands for the client, once everything is read."""
    if stream.incoming.broken:
        return "reset"
    return "end" if stream.incoming.ended and not stream.incoming.data else "open"


@asynccontextmanager
async def fronting(
    reply: Reply = echo, limits: Limits = LIMITS, pipe_bytes: int = PIPE_BYTES
) -> AsyncIterator[Front]:
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery, pipe_bytes=pipe_bytes)
        bugs: list[Exception] = []
        reactor = Reactor(network, bugs.append)
        front = Front(network, reactor, reply, bugs=bugs)
        nursery.start_soon(reactor.run)

        def accepted(sock: Socket) -> None:
            channel = ClientChannel(reactor, sock, limits)
            front.channels.append(channel)
            nursery.start_soon(front.serve, channel)

        listener = Listener(reactor, network.listen("127.0.0.1", PORT), accepted)
        yield front
        listener.close()
        nursery.cancel_scope.cancel()
    assert front.are_all_closed
    assert bugs == []


GET = b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"


def ok(body: bytes, lines: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (lines, len(body), body)


CLOSE = b"connection: close\r\n"


#### one call after the other


async def test_a_connection_is_kept_for_the_next_request() -> None:
    async with fronting() as front:
        stream = await front.open()
        for name in (b"one", b"two", b"three"):
            await stream.send_all(GET % name)
            await wait_all_tasks_blocked()
            assert heard(stream) == ok(b"/" + name)
        assert ended(stream) == "open"
        assert len(front.channels) == 1


@pytest.mark.parametrize(
    "request_, lines, end",
    [
        (b"GET /a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", CLOSE, "end"),
        (b"GET /a HTTP/1.0\r\n\r\n", CLOSE, "end"),
        (
            b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
            b"connection: keep-alive\r\n",
            "open",
        ),
    ],
)
async def test_who_asks_for_it_is_closed_after_the_answer(
    request_: bytes, lines: bytes, end: str
) -> None:
    async with fronting() as front:
        stream = await front.open()
        await stream.send_all(request_)
        await wait_all_tasks_blocked()

        assert heard(stream) == ok(b"/a", lines)
        assert ended(stream) == end


async def test_pipelined_requests_are_answered_in_order(autojump_clock: MockClock) -> None:
    async def slower_and_slower(channel: ClientChannel, call: Call) -> None:
        await trio.sleep(10 - len(call.target))
        await echo(channel, call)

    async with fronting(slower_and_slower) as front:
        stream = await front.open()
        names = [b"a", b"bb", b"ccc", b"dddd"]
        await stream.send_all(b"".join([GET % name for name in names]))
        await trio.sleep(60)

        assert heard(stream) == b"".join([ok(b"/" + name) for name in names])
        assert ended(stream) == "open"


async def test_what_comes_while_a_request_is_served_is_answered_after_it(
    autojump_clock: MockClock,
) -> None:
    async def slowly(channel: ClientChannel, call: Call) -> None:
        await trio.sleep(5)
        await echo(channel, call)

    async with fronting(slowly) as front:
        stream = await front.open()
        second = GET % b"b"
        await stream.send_all(GET % b"a" + second[:10])
        await trio.sleep(1)
        await stream.send_all(second[10:] + POST + b"Content-Length: 2\r\n\r\nh")
        await trio.sleep(1)
        await stream.send_all(b"i")
        await trio.sleep(60)

        assert heard(stream) == ok(b"/a") + ok(b"/b") + ok(b"hi")


async def test_every_cut_of_a_request_gets_the_same_answer() -> None:
    request = POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    async with fronting() as front:
        for cut in range(1, len(request)):
            assert await front.ask(request[:cut], request[cut:]) == ok(b"abcde"), cut


async def test_a_head_request_is_answered_without_a_body() -> None:
    async with fronting() as front:
        assert await front.ask(b"HEAD /abc HTTP/1.1\r\nHost: a\r\n\r\n") == ok(b"/abc")[:-4]


async def test_an_answer_that_has_no_body_has_no_length() -> None:
    async def nothing(channel: ClientChannel, call: Call) -> None:
        channel.respond(204, b"", b"")

    async with fronting(nothing) as front:
        assert await front.ask(GET % b"a") == b"HTTP/1.1 204 No Content\r\n\r\n"


#### streamed replies


async def stream_abc(channel: ClientChannel, call: Call) -> None:
    channel.begin(200, b"x: y\r\n", b"a")
    channel.write(b"")
    channel.write(b"bc")
    channel.write_last(b"d")


async def test_a_reply_of_unknown_length_is_chunked_and_the_connection_kept() -> None:
    async with fronting(stream_abc) as front:
        stream = await front.open()
        for _ in range(2):
            await stream.send_all(GET % b"a")
            await wait_all_tasks_blocked()
            assert heard(stream) == (
                b"HTTP/1.1 200 OK\r\nx: y\r\ntransfer-encoding: chunked\r\n\r\n"
                b"1\r\na\r\n2\r\nbc\r\n1\r\nd\r\n0\r\n\r\n"
            )


async def test_to_an_old_client_it_ends_with_the_connection() -> None:
    async with fronting(stream_abc) as front:
        stream = await front.open()
        await stream.send_all(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        await wait_all_tasks_blocked()

        assert heard(stream) == b"HTTP/1.1 200 OK\r\nx: y\r\nconnection: close\r\n\r\nabcd"
        assert ended(stream) == "end"


async def cut_after_a(channel: ClientChannel, call: Call) -> None:
    channel.begin(200, b"", b"a")
    channel.cut(b"data: error\n\n")


async def test_a_cut_reply_has_its_last_words_and_no_last_chunk() -> None:
    async with fronting(cut_after_a) as front:
        stream = await front.open()
        await stream.send_all(GET % b"a" + GET % b"b")
        await wait_all_tasks_blocked()

        assert heard(stream) == (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            b"1\r\na\r\nd\r\ndata: error\n\n\r\n"
        )
        assert ended(stream) == "end"  # without the last chunk no client takes it for complete


async def test_to_an_old_client_a_cut_is_a_reset() -> None:
    async with fronting(cut_after_a) as front:
        stream = await front.open()
        await stream.send_all(b"GET / HTTP/1.0\r\n\r\n")
        await wait_all_tasks_blocked()

        assert ended(stream) == "reset"


async def test_a_whole_reply_before_it_does_not_make_a_cut_one_whole() -> None:
    async def whole_then_cut(channel: ClientChannel, call: Call) -> None:
        await (cut_after_a if call.http_10 else stream_abc)(channel, call)

    async with fronting(whole_then_cut) as front:
        stream = await front.open()
        await stream.send_all(GET % b"a" + b"GET / HTTP/1.0\r\n\r\n")
        await wait_all_tasks_blocked()

        assert ended(stream) == "reset"


#### refusals


@pytest.mark.parametrize(
    "request_, status",
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"400 Bad Request"),
        (POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400 Bad Request"),
        (POST + b"Content-Length: 1001\r\n\r\n", b"413 Content Too Large"),
        (POST + b"X: " + b"a" * 5000 + b"\r\n\r\n", b"431 Request Header Fields Too Large"),
        (b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", b"405 Method Not Allowed"),
    ],
)
async def test_a_refused_request_is_answered_and_the_connection_closed(
    request_: bytes, status: bytes, autojump_clock: MockClock
) -> None:
    async with fronting() as front:
        stream = await front.open()
        await stream.send_all(request_)
        await wait_all_tasks_blocked()

        answer = heard(stream)
        assert answer.startswith(b"HTTP/1.1 " + status + b"\r\n")
        assert b"\r\nx-router-error-code: " in answer
        assert b"\r\nconnection: close\r\n" in answer
        assert ended(stream) == "end"
        await trio.sleep(LINGER_SECONDS + 0.1)
        assert front.are_all_closed


async def test_a_refusal_comes_after_the_answers_before_it() -> None:
    async with fronting() as front:
        answer = await front.ask(GET % b"a" + GET % b"b" + b"nonsense\r\n\r\n" + GET % b"c")

        assert answer.startswith(ok(b"/a") + ok(b"/b") + b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 3


async def test_the_rest_of_a_refused_body_does_not_destroy_the_answer(
    autojump_clock: MockClock,
) -> None:
    async with fronting() as front:
        stream = await front.open()
        await stream.send_all(POST + b"Content-Length: 500000\r\n\r\n")
        for _ in range(10):
            await stream.send_all(b"x" * 50_000)  # as clients do that read only when all is sent
            await trio.sleep(0.1)

        assert heard(stream).startswith(b"HTTP/1.1 413 ")
        assert ended(stream) == "end"
        stream.close()
        await wait_all_tasks_blocked()
        assert front.are_all_closed


async def test_a_client_that_sends_for_ever_is_closed_all_the_same(
    autojump_clock: MockClock,
) -> None:
    async with fronting() as front:
        stream = await front.open()
        await stream.send_all(POST + b"Content-Length: 500000\r\n\r\n")
        started_at = trio.current_time()
        while not stream.outgoing.broken:
            await stream.send_all(b"x" * 1000)
            await trio.sleep(0.05)

        assert LINGER_SECONDS <= trio.current_time() - started_at < LINGER_SECONDS + 0.2


#### 100-continue


CAREFUL = POST + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


async def test_a_client_that_waits_for_leave_gets_it() -> None:
    async with fronting() as front:
        stream = await front.open()
        await stream.send_all(CAREFUL)
        await wait_all_tasks_blocked()
        assert heard(stream) == CONTINUE

        await stream.send_all(b"hello")
        await wait_all_tasks_blocked()
        assert heard(stream) == ok(b"hello")


async def test_leave_is_given_once() -> None:
    async with fronting() as front:
        answer = await front.ask(CAREFUL, b"he", b"l", b"lo")

        assert answer == CONTINUE + ok(b"hello")


async def test_leave_is_not_given_where_the_body_is_there_or_refused() -> None:
    async with fronting() as front:
        assert await front.ask(CAREFUL + b"hello") == ok(b"hello")
        too_long = POST + b"Content-Length: 1001\r\nExpect: 100-continue\r\n\r\n"
        assert (await front.ask(too_long)).startswith(b"HTTP/1.1 413 ")
        old = b"POST / HTTP/1.0\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
        assert await front.ask(old) == b""


async def test_leave_comes_after_the_answer_before_it(autojump_clock: MockClock) -> None:
    async def slowly(channel: ClientChannel, call: Call) -> None:
        await trio.sleep(1)
        await echo(channel, call)

    async with fronting(slowly) as front:
        for pieces in ([GET % b"a" + CAREFUL], [GET % b"a", CAREFUL]):
            stream = await front.open()
            for piece in pieces:
                await stream.send_all(piece)
                await wait_all_tasks_blocked()
            assert heard(stream) == b""
            await trio.sleep(1.5)
            assert heard(stream) == ok(b"/a") + CONTINUE
            await stream.send_all(b"hello")
            await trio.sleep(1.5)
            assert heard(stream) == ok(b"hello")


#### time


async def closed_after(stream: MemoryStream, seconds: float) -> bool:
    """Whether the connection is open just before that time and over just after it."""
    await trio.sleep(seconds - 0.1)
    was_open = ended(stream) == "open"
    await trio.sleep(0.2)
    heard(stream)
    return was_open and ended(stream) != "open"


async def test_an_idle_connection_is_closed(autojump_clock: MockClock) -> None:
    async with fronting() as front:
        assert await closed_after(await front.open(), 75)

        used = await front.open()
        await trio.sleep(50)
        await used.send_all(GET % b"a")
        await wait_all_tasks_blocked()
        assert heard(used) == ok(b"/a")
        assert await closed_after(used, 75)


@pytest.mark.parametrize("first", [b"", GET % b"a"])
async def test_a_head_must_arrive_in_time(first: bytes, autojump_clock: MockClock) -> None:
    async with fronting() as front:
        stream = await front.open()
        await stream.send_all(first)
        await wait_all_tasks_blocked()
        heard(stream)
        await trio.sleep(20)
        await stream.send_all(b"GET / HTTP/1.1\r\n")
        for _ in range(29):
            await trio.sleep(1)
            await stream.send_all(b"a")
        assert heard(stream) == b""
        await trio.sleep(1.1)

        assert heard(stream).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert ended(stream) == "end"


async def test_a_head_that_came_in_part_behind_another_request_must_arrive_in_time(
    autojump_clock: MockClock,
) -> None:
    async with fronting() as front:
        stream = await front.open()
        await stream.send_all(GET % b"a" + b"GET / HT")
        await trio.sleep(29)
        assert heard(stream) == ok(b"/a")
        await trio.sleep(1.1)

        assert heard(stream).startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_stops_coming_is_given_up(autojump_clock: MockClock) -> None:
    async with fronting() as front:
        stream = await front.open()
        await stream.send_all(POST + b"Content-Length: 50\r\n\r\n")
        for _ in range(3):
            await trio.sleep(70)
            await stream.send_all(b"x")
        assert heard(stream) == b""
        await trio.sleep(75.1)

        assert heard(stream).startswith(b"HTTP/1.1 408 ")
        assert ended(stream) == "end"


async def test_a_body_that_dribbles_in_has_the_time_of_the_whole_request(
    autojump_clock: MockClock,
) -> None:
    async with fronting(limits=evolve(LIMITS, call_seconds=100)) as front:
        stream = await front.open()
        await stream.send_all(POST + b"Content-Length: 500\r\n\r\n")
        for _ in range(99):
            await trio.sleep(1)
            await stream.send_all(b"x")
        assert heard(stream) == b""
        await trio.sleep(1.1)

        answer = heard(stream)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_timeout" in answer


async def test_empty_lines_before_a_call_keep_no_connection_alive(
    autojump_clock: MockClock,
) -> None:
    async with fronting() as front:
        stream = await front.open()
        for _ in range(14):
            await trio.sleep(5)
            await stream.send_all(b"\r\n")
        await trio.sleep(5.1)

        assert ended(stream) != "open"


async def test_times_can_be_turned_off(autojump_clock: MockClock) -> None:
    limits = evolve(LIMITS, head_seconds=0, idle_seconds=0)
    async with fronting(limits=limits) as front:
        idle = await front.open()
        partial = await front.open()
        await partial.send_all(b"GET")
        await trio.sleep(80_000)

        assert ended(idle) == ended(partial) == "open"


async def test_no_time_of_the_front_runs_while_a_call_is_served(autojump_clock: MockClock) -> None:
    async def very_slowly(channel: ClientChannel, call: Call) -> None:
        front.watch(channel).deadline = trio.current_time() + 10_000
        channel.rearm()
        await channel.waker.wait()
        await echo(channel, call)

    async with fronting(very_slowly) as front:
        stream = await front.open()
        await stream.send_all(GET % b"a" + b"GET /")
        await trio.sleep(10_029)
        assert heard(stream) == ok(b"/a")  # and the head behind it has its time from then on
        await trio.sleep(2)
        assert heard(stream).startswith(b"HTTP/1.1 408 ")


async def test_a_calls_own_deadline_is_told_to_its_watcher(autojump_clock: MockClock) -> None:
    async def with_deadline(channel: ClientChannel, call: Call) -> None:
        watching = front.watch(channel)
        watching.deadline = trio.current_time() + 7
        channel.rearm()
        await trio.sleep(20)
        await echo(channel, call)

    async with fronting(with_deadline) as front:
        stream = await front.open()
        await stream.send_all(GET % b"a")
        await trio.sleep(6.9)
        assert front.watchings[0].seen == []
        await trio.sleep(0.2)
        assert front.watchings[0].seen == ["deadline"]


#### leaving


async def never(channel: ClientChannel, call: Call) -> None:
    await trio.sleep_forever()


LEAVING: dict[str, Callable[[MemoryStream], None]] = {
    "closes": MemoryStream.close,
    "resets": MemoryStream.reset,
    "half-closes": lambda stream: stream.outgoing.end(),
}


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)
@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", POST + b"Content-Length: 5\r\n\r\nhe", GET % b"a"],
    ids=["idle", "in the head", "in the body", "after an answer"],
)
async def test_a_client_may_leave_while_it_is_not_served(
    sent: bytes, leave: Callable[[MemoryStream], None]
) -> None:
    async with fronting() as front:
        stream = await front.open()
        await stream.send_all(sent)
        await wait_all_tasks_blocked()
        heard(stream)
        leave(stream)
        await wait_all_tasks_blocked()

        assert front.are_all_closed


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)
@pytest.mark.parametrize("pipelined", [b"", GET % b"b", b"GET /"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_who_serves_a_client_that_leaves_is_told_at_once(
    leave: Callable[[MemoryStream], None],
    pipelined: bytes,
    streaming: bool,
    autojump_clock: MockClock,
) -> None:
    told_after: list[float] = []

    async def wait_for_the_end(channel: ClientChannel, call: Call) -> None:
        watching = front.watch(channel)
        if streaming:
            channel.begin(200, b"", b"a")
        while "gone" not in watching.seen:
            await channel.waker.wait()
        told_after.append(trio.current_time() - left_at)

    async with fronting(wait_for_the_end) as front:
        stream = await front.open()
        await stream.send_all(GET % b"a" + pipelined)
        await trio.sleep(10)
        heard(stream)
        left_at = trio.current_time()
        leave(stream)
        await wait_all_tasks_blocked()

        assert told_after == [0.0]
        assert [watching.seen for watching in front.watchings] == [["gone"]]
        assert front.are_all_closed


async def test_a_client_that_leaves_with_its_request_is_not_served() -> None:
    async with fronting(never) as front:
        stream = front.network.open_client(PORT)
        await stream.send_all(GET % b"a")
        stream.reset()
        await wait_all_tasks_blocked()

        assert front.are_all_closed


async def test_a_cancelled_task_closes_its_connection() -> None:
    async with fronting(never) as front:
        stream = await front.open()
        await stream.send_all(GET % b"a")
        await wait_all_tasks_blocked()
    assert ended(stream) != "open"


#### slow clients


async def test_a_slow_client_is_told_of_and_when_it_has_caught_up() -> None:
    async def pour(channel: ClientChannel, call: Call) -> None:
        watching = front.watch(channel)
        channel.begin(200, b"", b"")
        while "slow" not in watching.seen:
            channel.write(b"x" * 10_000)
        assert channel.backlog_bytes < BACKLOG_BYTES_HIGH + 11_000
        await channel.waker.wait()

    async with fronting(pour) as front:
        stream = await front.open()
        await stream.send_all(GET % b"a")
        await wait_all_tasks_blocked()
        [watching] = front.watchings
        assert watching.seen == ["slow"]

        taken = 0
        while watching.seen == ["slow"]:
            taken += len(await stream.receive_some())
            await wait_all_tasks_blocked()

        assert watching.seen == ["slow", "ready"]
        assert taken + len(stream.incoming.data) > BACKLOG_BYTES_HIGH
        assert front.channels[0].backlog_bytes == 0


async def test_a_client_that_reads_nothing_for_too_long_is_gone(autojump_clock: MockClock) -> None:
    async def pour(channel: ClientChannel, call: Call) -> None:
        watching = front.watch(channel)
        channel.begin(200, b"", b"x" * 200_000)
        while "gone" not in watching.seen:
            await channel.waker.wait()

    async with fronting(pour) as front:
        stream = await front.open()
        await stream.send_all(GET % b"a")
        for _ in range(5):
            await trio.sleep(9)
            await stream.receive_some(10_000)  # slow, but alive
        assert front.watchings[0].seen == ["slow"]
        await trio.sleep(10.1)

        assert front.watchings[0].seen == ["slow", "gone"]
        assert ended(stream) == "reset"
        assert front.are_all_closed


async def test_a_stalled_end_is_given_up_as_well(autojump_clock: MockClock) -> None:
    async def answer_much(channel: ClientChannel, call: Call) -> None:
        channel.respond(200, b"", b"x" * 200_000)

    async with fronting(answer_much) as front:
        stream = await front.open()
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        await trio.sleep(10.1)

        assert ended(stream) == "reset"
        assert front.are_all_closed


async def test_the_last_bytes_are_written_before_the_connection_is_closed(
    autojump_clock: MockClock,
) -> None:
    async def answer_much(channel: ClientChannel, call: Call) -> None:
        channel.respond(200, b"", b"x" * 200_000)

    async with fronting(answer_much) as front:
        stream = await front.open()
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        found = b""
        while data := await stream.receive_some():
            found += data
            await trio.sleep(0.5)

        assert found == ok(b"x" * 200_000, CLOSE)


async def test_the_last_words_of_a_cut_reply_are_written_behind_the_backlog() -> None:
    async def pour_and_cut(channel: ClientChannel, call: Call) -> None:
        channel.begin(200, b"", b"x" * 200_000)
        channel.cut(b"last words")

    async with fronting(pour_and_cut) as front:
        stream = await front.open()
        await stream.send_all(GET % b"a")
        found = b""
        while data := await stream.receive_some():
            found += data

        assert found.endswith(b"x\r\na\r\nlast words\r\n")


async def test_replies_to_a_client_that_has_left_go_nowhere(autojump_clock: MockClock) -> None:
    async def go_on_regardless(channel: ClientChannel, call: Call) -> None:
        channel.begin(200, b"", b"a")
        stream.reset()
        channel.write(b"b")
        await trio.sleep(1)
        channel.cut(b"c")

    async with fronting(go_on_regardless) as front:
        stream = await front.open()
        await stream.send_all(GET % b"a")
        await trio.sleep(2)

        assert front.are_all_closed


async def test_a_crash_in_a_callback_is_raised_in_the_task_that_serves() -> None:
    raised: list[Exception] = []

    async def serve(channel: ClientChannel, call: Call) -> None:
        channel.watcher = Crashing(channel)
        try:
            await channel.waker.wait()
        except ZeroDivisionError as error:
            raised.append(error)

    async with fronting(serve) as front:
        stream = await front.open()
        await stream.send_all(GET % b"a")
        await wait_all_tasks_blocked()
        stream.close()
        await wait_all_tasks_blocked()

        assert len(raised) == 1
        assert front.are_all_closed


class Crashing(Watching):
    def on_client_gone(self) -> None:
        raise ZeroDivisionError


async def test_refusals_carry_the_request_id() -> None:
    async def refuse(channel: ClientChannel, call: Call) -> None:
        channel.refuse(Refusal("not_found", "Nothing."), "id-1")

    async with fronting(refuse) as front:
        answer = await front.ask(GET % b"a")

        assert answer.startswith(b"HTTP/1.1 404 Not Found\r\n")
        assert b"\r\nx-request-id: id-1\r\n" in answer
        assert b"\r\nconnection: close" not in answer
