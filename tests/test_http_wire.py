"""The wire to workers over the network in memory: every malformed answer, reuse, leaving, httpx."""

from __future__ import annotations

import gzip
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from random import Random

import httpx
import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from router.config import Settings
from router.reactor import Reactor
from router.wires.client import LineTransport, ask, read
from router.wires.http import (
    HEAD_BYTES_MAX,
    LINGER_SECONDS,
    STALE_SECONDS,
    Pool,
    Upstream,
    WorkerChannel,
)
from router.worker import Fleet, Worker
from router.workerspec import WorkerSpec
from tests.asked import Asked
from tests.memory import MemoryNetwork, MemorySocket, MemoryStream

ADDRESS = ("10.0.0.1", 8000)
OTHER = ("10.0.0.2", 8000)
ASK = b"POST /v1/x HTTP/1.1\r\nhost: w\r\nx: y\r\ncontent-length: 2\r\n\r\nhi"
BODY = b"hi"
KEEP_ALIVE_SECONDS = 4.0
CONNECT_SECONDS = 5.0

Handler = Callable[[MemoryStream], Awaitable[None]]


@pytest.fixture
def autojump_clock() -> MockClock:
    return MockClock(autojump_threshold=0)


@define(eq=False)
class Sender(Asked):
    """With the handle of what it sent."""

    upstream: Upstream | None = None


@define(eq=False)
class Wire:
    """A pool over a network in memory."""

    network: MemoryNetwork
    reactor: Reactor
    pool: Pool
    bugs: list[Exception]

    async def ask(self, body: bytes = BODY) -> Sender:
        asked = self.send(body)
        await wait_all_tasks_blocked()
        return asked

    def send(self, body: bytes = BODY, asked: Sender | None = None) -> Sender:
        asked = asked or Sender()
        self.reactor.refresh()  # as everybody does who was not woken by it
        asked.upstream = self.pool.send(b"POST", b"/v1/x", b"x: y\r\n", body, asked)
        return asked

    @property
    def open_channels(self) -> int:
        return self.reactor.statistics()["channels"]


@asynccontextmanager
async def wired(engine: Handler | None, *, cuts: Random | None = None) -> AsyncIterator[Wire]:
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery, cuts=cuts)
        bugs: list[Exception] = []
        reactor = Reactor(network, bugs.append)
        if engine is not None:
            network.engines[ADDRESS] = tolerant(engine)
        nursery.start_soon(reactor.run)
        await wait_all_tasks_blocked()
        pool = Pool(
            reactor=reactor,
            authority=b"w",
            base_path=b"",
            addresses=lambda: [(socket.AF_INET, ADDRESS)],
            tls=None,
            connect_timeout_seconds=CONNECT_SECONDS,
            keep_alive_seconds=KEEP_ALIVE_SECONDS,
        )
        yield Wire(network, reactor, pool, bugs)
        pool.close()
        nursery.cancel_scope.cancel()
    assert bugs == []


def tolerant(engine: Handler) -> Handler:
    """An engine to which it does not matter when its client breaks the connection."""

    async def handle(stream: MemoryStream) -> None:
        try:
            await engine(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    return handle


async def read_request(stream: MemoryStream) -> bytes:
    """One request, or what came before the end."""
    data = b""
    while not data.endswith(ASK[-6:]):
        more = await stream.receive_some()
        if not more:
            break
        data += more
    return data


@define(eq=False)
class Script:
    """An engine that answers every request with these bytes, and may close after it."""

    answer: bytes
    closes: bool = False
    requests: list[bytes] = field(factory=list)
    connections: int = 0
    streams: list[MemoryStream] = field(factory=list)

    async def __call__(self, stream: MemoryStream) -> None:
        self.connections += 1
        self.streams.append(stream)
        while (request := await read_request(stream)) != b"":
            self.requests.append(request)
            await stream.send_all(self.answer)
            if self.closes:
                stream.close()
                return


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


#### good answers


@pytest.mark.parametrize(
    "answer, closes, keeps",
    [
        (OK, False, True),
        (OK, True, False),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello", False, False),
        (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", False, True),
        (CHUNKED + b"2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\nx-t: trailer\r\n\r\n", False, True),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", True, False),
        (b"HTTP/1.0 200 OK\r\n\r\nhello", True, False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", False, False),
        (
            b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 5\r\n\r\nhello",
            False,
            True,
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, False, True),
        (b"HTTP/1.1 102 Processing\r\nx: y\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + OK, 0, True),
        (b"HTTP/1.1 200\r\ncontent-length: 5\r\n\r\nhello", False, True),
    ],
)
async def test_good_answers(answer: bytes, closes: bool, keeps: bool) -> None:
    for cuts in (None, *(Random(seed) for seed in range(5))):
        async with wired(Script(answer, closes), cuts=cuts) as wire:
            asked = await wire.ask()

            assert asked.told == ["connected", 200, "body", "end"]
            assert asked.body == b"hello"
            assert len(wire.pool.idle) == wire.open_channels == keeps


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        CHUNKED + b"0\r\n\r\n",
    ],
)
async def test_answers_without_a_body(answer: bytes) -> None:
    async with wired(Script(answer)) as wire:
        asked = await wire.ask()

        assert asked.told == ["connected", int(answer[9:12]), "end"]
        assert len(wire.pool.idle) == 1


async def test_headers_are_told_in_lower_case_and_in_order() -> None:
    answer = b"HTTP/1.1 429 Slow\r\nRetry-After: 3\r\nX-A: b\r\nX-A: c\r\nContent-Length: 0\r\n\r\n"
    async with wired(Script(answer)) as wire:
        asked = await wire.ask()

        assert asked.headers == [
            (b"retry-after", b"3"),
            (b"x-a", b"b"),
            (b"x-a", b"c"),
            (b"content-length", b"0"),
        ]


async def answer_in_pieces(wire: Wire, *pieces: bytes) -> Sender:
    """Send a request, and answer it with one read for each piece."""
    streams: list[MemoryStream] = []

    async def engine(stream: MemoryStream) -> None:
        streams.append(stream)
        await trio.sleep_forever()

    wire.network.engines[ADDRESS] = engine
    asked = await wire.ask()
    for piece in pieces:
        streams[0].outgoing.put(piece)
        wire.reactor.turn()
    return asked


@pytest.mark.slow
async def test_every_pair_of_cuts_of_chunks_gives_the_same_body() -> None:
    # A read may begin within a size and end within a body, and look like one whole chunk.
    looks_whole = b"hello\r\n3\r\nabc\r\n555555"
    assert len(looks_whole) == 0x15
    chunks = [b"x", looks_whole, b"0\r\n\r\n", b"y" * 17, b"\r\n", looks_whole, b"z" * 5]
    framed = b"".join([b"%x\r\n%b\r\n" % (len(data), data) for data in chunks])
    framed += b"05\r\nabcde\r\n2;x=y\r\nok\r\n0\r\n\r\n"
    body = b"".join(chunks) + b"abcdeok"
    async with wired(None) as wire:
        wire.pool.keep_alive_seconds = 0
        for first in range(1, len(framed)):
            for second in range(first, min(first + 12, len(framed))):
                pieces = CHUNKED, framed[:first], framed[first:second], framed[second:]
                asked = await answer_in_pieces(wire, *[piece for piece in pieces if piece])
                assert asked.body == body, pieces
                assert asked.told[-1] == "end", pieces


async def test_a_chunk_in_the_place_of_a_trailer_is_none() -> None:
    async with wired(None) as wire:
        asked = await answer_in_pieces(wire, CHUNKED + b"1\r\na\r\n", b"0\r\n", b"5\r\nhello\r\n")

        assert asked.body == b"a"
        assert asked.told[-1] == "broken"


#### answers that are none

MALFORMED = {
    "nothing": (b"", True),
    "no HTTP": (b"hello\r\n\r\n", False),
    "TLS": (b"\x15\x03\x01\x00\x02\x02\x46", False),
    "half a status line": (b"HTTP/1.1 2", True),
    "a status that is no number": (b"HTTP/1.1 OK\r\n\r\n", False),
    "a status with two digits": (b"HTTP/1.1 20 OK\r\n\r\n", True),
    "a status of zero": (b"HTTP/1.1 000 OK\r\ncontent-length: 0\r\n\r\n", False),
    "another version": (b"HTTP/3.0 200 OK\r\ncontent-length: 0\r\n\r\n", False),
    "half a head": (b"HTTP/1.1 200 OK\r\ncontent-le", True),
    "a header without a colon": (b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n", False),
    "a space in a header's name": (b"HTTP/1.1 200 OK\r\nx y: z\r\n\r\n", False),
    "two lengths": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        False,
    ),
    "both framings": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        False,
    ),
    "a length that is no number": (b"HTTP/1.1 200 OK\r\ncontent-length: five\r\n\r\nhello", False),
    "a negative length": (b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello", False),
    "a body that is too short": (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello", True),
    "a body that is too long": (OK + b"!", False),
    "garbage behind the end": (OK + b"\x00\xff", False),
    "another answer behind the end": (OK + OK, False),
    "a bad chunk size": (CHUNKED + b"xyz\r\nhello\r\n0\r\n\r\n", False),
    "a negative chunk size": (CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n", False),
    "a huge chunk size": (CHUNKED + b"fffffffffffffffff\r\nhello", False),
    "a chunk longer than it says": (CHUNKED + b"3\r\nhello\r\n0\r\n\r\n", False),
    "a cut in a chunk": (CHUNKED + b"5\r\nhel", True),
    "a cut between chunks": (CHUNKED + b"5\r\nhello\r\n", True),
    "a cut in the last chunk": (CHUNKED + b"5\r\nhello\r\n0\r\n", True),
    "garbage behind the last chunk": (CHUNKED + b"5\r\nhello\r\n0\r\n\r\nmore", False),
    "a coding that is not known": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nhello",
        False,
    ),
    "a second coding": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        False,
    ),
    "a switch of protocols": (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nxx",
        False,
    ),
    "continue and nothing more": (b"HTTP/1.1 100 Continue\r\n\r\n", True),
    "a head without end": (b"HTTP/1.1 200 OK\r\n" + b"x: yyyyyyyy\r\n" * 40_000, False),
    "a header without end": (b"HTTP/1.1 200 OK\r\nx: " + b"y" * HEAD_BYTES_MAX * 2, False),
    "a trailer without end": (CHUNKED + b"0\r\nx: " + b"y" * HEAD_BYTES_MAX * 2, False),
}


@pytest.mark.parametrize("answer, closes", MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_answer_is_a_break_and_its_connection_is_closed(
    answer: bytes, closes: bool
) -> None:
    small = len(answer) < 1000
    for cuts in (None, *(Random(seed) for seed in range(6 if small else 0))):
        async with wired(Script(answer, closes), cuts=cuts) as wire:
            asked = await wire.ask()

            assert asked.told[-1] == "broken" or _ended_before(asked, wire), (asked.told, cuts)
            assert asked.told.count("broken") + asked.told.count("end") == 1
            assert asked.detail or asked.told[-1] == "end"
            assert wire.pool.idle == []
            assert wire.open_channels == 0
            assert asked.upstream is not None
            assert asked.upstream.channel is None


def _ended_before(asked: Sender, wire: Wire) -> bool:
    """A whole answer was read before the garbage behind it came, as with two requests."""
    return asked.told[-1] == "end" and asked.body == b"hello" and wire.network.cuts is not None


async def test_a_reset_is_a_break() -> None:
    async def engine(stream: MemoryStream) -> None:
        await read_request(stream)
        await stream.send_all(CHUNKED + b"5\r\nhello\r\n")
        await wait_all_tasks_blocked()
        stream.reset()

    async with wired(engine) as wire:
        asked = wire.send()
        await wait_all_tasks_blocked()
        await wait_all_tasks_blocked()

        assert asked.told == ["connected", 200, "body", "broken"]


async def test_a_reset_does_not_end_a_body_that_ends_with_the_connection() -> None:
    async def engine(stream: MemoryStream) -> None:
        await read_request(stream)
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\nhello")
        await wait_all_tasks_blocked()
        stream.reset()

    async with wired(engine) as wire:
        asked = wire.send()
        await wait_all_tasks_blocked()
        await wait_all_tasks_blocked()

        assert asked.told[-1] == "broken"


#### connecting


async def test_a_refused_connection_is_unreachable() -> None:
    async with wired(None) as wire:
        asked = await wire.ask()

        assert asked.told == ["unreachable"]
        assert wire.open_channels == 0


async def test_a_host_without_an_address_is_unreachable_at_once() -> None:
    async with wired(None) as wire:
        wire.pool.addresses = list
        assert wire.send().told == ["unreachable"]


async def test_a_connection_that_is_not_made_in_time_is_unreachable(
    autojump_clock: MockClock,
) -> None:
    async with wired(None) as wire:
        wire.network.silent.add(ADDRESS)
        asked = await wire.ask()
        await trio.sleep(CONNECT_SECONDS - 0.1)
        assert asked.told == []
        await trio.sleep(0.2)

        assert asked.told == ["unreachable"]
        assert wire.open_channels == 0


async def test_a_connection_has_all_its_time_also_after_a_long_silence(
    autojump_clock: MockClock,
) -> None:
    """A probe may be the first thing that happens in a minute."""
    async with wired(None) as wire:
        wire.network.silent.add(ADDRESS)
        await trio.sleep(60)
        asked = await wire.ask()
        await trio.sleep(CONNECT_SECONDS - 0.1)
        assert asked.told == []
        await trio.sleep(0.2)

        assert asked.told == ["unreachable"]


async def test_the_next_attempt_takes_the_next_address() -> None:
    async with wired(None) as wire:
        wire.network.engines[OTHER] = Script(OK)
        wire.pool.addresses = lambda: [(socket.AF_INET, ADDRESS), (socket.AF_INET, OTHER)]

        told = [(await wire.ask()).told[-1] for _ in range(2)]

        assert told == ["unreachable", "end"]


#### reuse


async def test_a_connection_is_used_again_and_the_last_one_first() -> None:
    script = Script(OK)
    async with wired(script) as wire:
        first, second = wire.send(), wire.send()
        await wait_all_tasks_blocked()
        assert script.connections == 2
        last = wire.pool.idle[-1]

        third = wire.send()
        assert third.upstream is not None
        assert third.upstream.channel is last
        await wait_all_tasks_blocked()

        assert [asked.told[-1] for asked in (first, second, third)] == ["end"] * 3
        assert script.connections == 2


async def test_an_idle_connection_is_closed_before_the_engine_closes_it(
    autojump_clock: MockClock,
) -> None:
    script = Script(OK)
    async with wired(script) as wire:
        await wire.ask()
        await trio.sleep(KEEP_ALIVE_SECONDS - 0.1)
        assert len(wire.pool.idle) == 1
        await trio.sleep(0.2)

        assert wire.pool.idle == []
        assert script.streams[0].incoming.ended
        assert KEEP_ALIVE_SECONDS < 5  # uvicorn's


async def test_an_idle_connection_that_was_used_meanwhile_has_its_time_anew(
    autojump_clock: MockClock,
) -> None:
    async with wired(Script(OK)) as wire:
        for _ in range(5):
            await wire.ask()
            await trio.sleep(KEEP_ALIVE_SECONDS - 0.5)
        assert len(wire.pool.idle) == 1


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 408 Request Timeout\r\n\r\n", b"x"])
async def test_an_idle_connection_that_the_engine_ends_or_breaks_is_dropped(says: bytes) -> None:
    script = Script(OK)
    async with wired(script) as wire:
        await wire.ask()
        if says:
            await script.streams[0].send_all(says)
        else:
            script.streams[0].close()
        await wait_all_tasks_blocked()

        assert wire.pool.idle == []
        assert wire.open_channels == 0


async def test_a_connection_that_was_closed_this_very_moment_is_not_used(
    autojump_clock: MockClock,
) -> None:
    """The reactor has not heard of it yet: one look before reuse."""
    script = Script(OK)
    async with wired(script) as wire:
        await wire.ask()
        await trio.sleep(1)
        wire.reactor.turn()
        script.streams[0].close()

        asked = await wire.ask()

        assert asked.told[-1] == "end"
        assert script.connections == 2
        assert len(script.requests) == 2


class ClosesOnReuse(Script):
    """Reads the second request on a connection, says `parting`, and closes (complaint C8)."""

    parting: bytes = b""
    by_reset: bool = False
    after_seconds: float = 0.0

    async def __call__(self, stream: MemoryStream) -> None:
        self.connections += 1
        self.requests.append(await read_request(stream))
        await stream.send_all(self.answer)
        if more := await read_request(stream):
            self.requests.append(more)
            await stream.send_all(self.parting)
            await trio.sleep(self.after_seconds)
            stream.reset() if self.by_reset else stream.close()


@pytest.mark.parametrize("by_reset", [False, True])
async def test_a_reused_connection_that_closes_without_a_byte_is_replaced_once(
    by_reset: bool,
) -> None:
    script = ClosesOnReuse(OK)
    script.by_reset = by_reset
    async with wired(script) as wire:
        await wire.ask()
        asked = await wire.ask()

        assert asked.told == ["connected", "connected", 200, "body", "end"]
        assert script.connections == 2
        assert script.requests == [ASK] * 3


async def test_a_reused_connection_that_closes_after_a_byte_is_a_break() -> None:
    script = ClosesOnReuse(OK)
    script.parting = b"H"
    async with wired(script) as wire:
        await wire.ask()
        asked = await wire.ask()

        assert asked.told == ["connected", "broken"]
        assert script.connections == 1


@pytest.mark.parametrize("by_reset", [False, True])
@pytest.mark.parametrize(
    ("after_seconds", "connections"),
    [(0.5 * STALE_SECONDS, 2), (STALE_SECONDS, 1), (60 * STALE_SECONDS, 1)],
)
async def test_a_reused_connection_that_closes_later_was_not_stale(
    after_seconds: float, connections: int, by_reset: bool, autojump_clock: MockClock
) -> None:
    script = ClosesOnReuse(OK)
    script.by_reset, script.after_seconds = by_reset, after_seconds
    async with wired(script) as wire:
        await wire.ask()
        asked = await wire.ask()
        await trio.sleep(after_seconds + 1)

        assert asked.told[-1] == ("end" if connections == 2 else "broken")
        assert script.connections == connections


async def test_a_fresh_connection_that_closes_without_a_byte_is_a_break() -> None:
    script = Script(b"", closes=True)
    async with wired(script) as wire:
        asked = await wire.ask()

        assert asked.told == ["connected", "broken"]
        assert script.connections == 1


async def test_a_replacement_is_not_replaced_again() -> None:
    connections = 0

    async def engine(stream: MemoryStream) -> None:
        nonlocal connections
        connections += 1
        await read_request(stream)
        if connections == 1:
            await stream.send_all(OK)
            await read_request(stream)
        stream.close()

    async with wired(engine) as wire:
        await wire.ask()
        asked = await wire.ask()

        assert asked.told == ["connected", "connected", "broken"]
        assert connections == 2


async def test_a_replacement_that_cannot_connect_is_unreachable() -> None:
    script = ClosesOnReuse(OK)
    async with wired(script) as wire:
        await wire.ask()
        del wire.network.engines[ADDRESS]
        asked = await wire.ask()

        assert asked.told == ["connected", "unreachable"]


async def test_without_keep_alive_no_connection_is_kept() -> None:
    script = Script(OK)
    async with wired(script) as wire:
        wire.pool.keep_alive_seconds = 0
        await wire.ask()
        await wire.ask()

        assert script.connections == 2
        assert wire.open_channels == 0


async def test_a_connection_whose_request_was_not_fully_taken_is_not_kept() -> None:
    async def engine(stream: MemoryStream) -> None:
        await stream.receive_some(100)
        await stream.send_all(OK)
        await trio.sleep_forever()

    async with wired(engine) as wire:
        asked = await wire.ask(b"x" * 200_000)

        assert asked.told[-1] == "end"
        assert wire.open_channels == 0


#### letting go


async def test_closing_frees_the_engine_at_once_and_nothing_is_told_afterwards() -> None:
    script = Script(CHUNKED + b"5\r\nhello\r\n")
    async with wired(script) as wire:
        asked = await wire.ask()
        assert asked.upstream is not None
        asked.upstream.close()
        asked.upstream.close()
        await wait_all_tasks_blocked()

        assert asked.told == ["connected", 200, "body"]
        assert script.streams[0].incoming.ended
        assert wire.open_channels == 0


@pytest.mark.parametrize("moment", ["connected", "head", "body", "end"])
async def test_closing_in_a_callback_is_the_last_thing_that_is_told(moment: str) -> None:
    async with wired(Script(OK)) as wire:
        asked = Sender()

        def close() -> None:
            assert asked.upstream is not None
            asked.upstream.close()

        asked.when[moment] = close
        wire.send(BODY, asked)
        await wait_all_tasks_blocked()

        assert asked.told[-1] == (200 if moment == "head" else moment)
        assert wire.open_channels == len(wire.pool.idle) == (moment == "end")


async def test_leaving_keeps_the_connection_when_the_end_comes(autojump_clock: MockClock) -> None:
    script = Script(CHUNKED + b"5\r\nhello\r\n")
    async with wired(script) as wire:
        asked = await wire.ask()
        assert asked.upstream is not None
        asked.upstream.leave()
        await trio.sleep(LINGER_SECONDS / 2)
        await script.streams[0].send_all(b"1\r\n!\r\n0\r\n\r\n")
        await wait_all_tasks_blocked()

        assert asked.told == ["connected", 200, "body"]
        assert len(wire.pool.idle) == 1
        await trio.sleep(2)
        assert len(wire.pool.idle) == 1  # the lingering is over


async def test_leaving_closes_the_connection_when_no_end_comes(autojump_clock: MockClock) -> None:
    script = Script(CHUNKED + b"5\r\nhello\r\n")
    async with wired(script) as wire:
        asked = await wire.ask()
        assert asked.upstream is not None
        asked.upstream.leave()
        await trio.sleep(LINGER_SECONDS + 0.1)

        assert wire.open_channels == 0


async def test_leaving_in_a_callback_whose_read_brought_the_end_keeps_the_connection() -> None:
    for answer in (OK, CHUNKED + b"5\r\nhello\r\n0\r\n\r\n"):
        async with wired(Script(answer)) as wire:
            asked = Sender()

            def leave(asked: Sender = asked) -> None:
                assert asked.upstream is not None
                asked.upstream.leave()

            asked.when["body"] = leave
            wire.send(BODY, asked)
            await wait_all_tasks_blocked()

            assert asked.told == ["connected", 200, "body"]
            assert len(wire.pool.idle) == wire.open_channels == 1
            assert (await wire.ask()).told[-1] == "end"


async def test_leaving_where_garbage_follows_closes_the_connection() -> None:
    async with wired(Script(OK + b"garbage")) as wire:
        asked = Sender()

        def leave() -> None:
            assert asked.upstream is not None
            asked.upstream.leave()

        asked.when["body"] = leave
        wire.send(BODY, asked)
        await wait_all_tasks_blocked()

        assert asked.told == ["connected", 200, "body"]
        assert wire.pool.idle == []
        assert wire.open_channels == 0


async def test_a_paused_answer_is_held_back_and_loses_nothing() -> None:
    body = bytes(range(256)) * 1000

    async def engine(stream: MemoryStream) -> None:
        await read_request(stream)
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n" + body)
        sent.set()
        stream.close()

    sent = trio.Event()
    async with wired(engine) as wire:
        asked = Sender()

        def pause() -> None:
            assert asked.upstream is not None
            asked.upstream.pause()

        asked.when["body"] = pause
        wire.send(BODY, asked)
        rounds = 0
        while asked.told[-1:] != ["end"]:
            await wait_all_tasks_blocked()
            assert asked.upstream is not None
            asked.upstream.resume()
            rounds += 1
            assert rounds < 20
            if rounds == 1:
                assert not sent.is_set()

        assert asked.body == body
        assert rounds > 2


@pytest.mark.parametrize("moment", ["connected", "head", "body", "end", "broken", "unreachable"])
async def test_a_crash_in_any_callback_is_told_to_the_owner(moment: str) -> None:
    engine = {"broken": Script(b"", closes=True), "unreachable": None}.get(moment, Script(OK))
    async with wired(engine) as wire:
        asked = Sender()
        error = ZeroDivisionError(moment)

        def crash() -> None:
            raise error

        asked.when[moment] = crash
        wire.send(BODY, asked)
        await wait_all_tasks_blocked()

        assert asked.told[-1] == ("crash", error)
        assert wire.open_channels == len(wire.pool.idle) == 0


async def test_closing_the_pool_closes_what_is_idle_or_leaving() -> None:
    async with wired(Script(OK)) as wire:
        wire.send()
        wire.send()
        await wait_all_tasks_blocked()
        wire.pool.addresses = lambda: [(socket.AF_INET, OTHER)]
        wire.network.engines[OTHER] = Script(CHUNKED + b"5\r\nhello\r\n")
        kept, wire.pool.idle = wire.pool.idle, []
        asked = await wire.ask()
        wire.pool.idle = kept
        assert asked.upstream is not None
        asked.upstream.leave()
        assert (len(wire.pool.idle), len(wire.pool.leaving)) == (2, 1)
        assert all(isinstance(channel, WorkerChannel) for channel in wire.pool.idle)
        wire.pool.close()

        assert wire.open_channels == 0
        assert not wire.network.open_sockets


async def test_an_idle_connection_that_has_just_spoken_unasked_is_not_used() -> None:
    script = Script(CHUNKED + b"5\r\nhello\r\n0\r\n\r\n")
    async with wired(script) as wire:
        await wire.ask()
        (idle,) = wire.pool.idle
        assert isinstance(idle.sock, MemorySocket)
        # Read in this pass, and not made anything of yet when another's callback sends.
        idle.sock.incoming.data += b"out of step"
        idle.fetch()

        asked = await wire.ask()

        assert asked.told[-1] == "end"
        assert script.connections == 2


#### httpx over the pool


def over(wire: Wire) -> LineTransport:
    return LineTransport(lambda _: wire.pool, wire.reactor.refresh)


def some_worker() -> Worker:
    return Fleet(Settings()).add(WorkerSpec.of("http://w:1"))


async def post(transport: LineTransport, path: str) -> httpx.Response:
    content, headers = b"\r\n\r\nhi", {b"k": b"v"}
    asking = ask(transport, "POST", some_worker(), path, content=content, headers=headers)
    async with asking as response:
        await response.aread()
        return response


async def test_httpx_speaks_over_the_pool() -> None:
    script = Script(CHUNKED + b"5\r\nhello\r\n0\r\n\r\n")
    async with wired(script) as wire:
        for _ in range(2):
            response = await post(over(wire), "/v1/x?a=b")

            assert (response.status_code, response.text) == (200, "hello")
        assert script.connections == 1
        sent = script.requests[0].lower()
        assert sent.startswith(b"post /v1/x?a=b http/1.1\r\nhost: w\r\n")
        assert sent.count(b"host:") == sent.count(b"content-length:") == 1
        assert b"k: v\r\n" in sent
        assert b"content-type: application/json\r\n" in sent
        assert sent.endswith(b"content-length: 6\r\n\r\n\r\n\r\nhi")


async def test_a_cookie_of_one_worker_is_not_told_to_another() -> None:
    script = Script(b"HTTP/1.1 200 OK\r\nset-cookie: sticky=1\r\ncontent-length: 0\r\n\r\n")
    async with wired(script) as wire:
        for _ in range(2):
            await post(over(wire), "/health")

        assert b"cookie" not in script.requests[1].lower()


PACKED = gzip.compress(b"\0" * 20_000_000, mtime=0)


@pytest.mark.parametrize(
    "encoding, body, told",
    [
        (b"gzip", gzip.compress(b"hello", mtime=0), b"hello"),
        (b"deflate", zlib.compress(b"hello"), b"hello"),
        (b"identity", b"hello", b"hello"),
        (b"gzip", b"", b""),
        (b"gzip", b"hello", None),
        (b"gzip", gzip.compress(b"hello", mtime=0)[:-4], None),
        (b"br", b"hello", None),
        (b"gzip", PACKED, None),
    ],
)
async def test_a_body_is_unpacked_as_it_says_and_within_bounds(
    encoding: bytes, body: bytes, told: bytes | None
) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: %b\r\ncontent-length: %d\r\n\r\n"
    async with wired(Script(head % (encoding, len(body)) + body)) as wire:
        with nullcontext() if told is not None else pytest.raises(httpx.RemoteProtocolError):
            async with ask(over(wire), "POST", some_worker(), "/", content=b"\r\n\r\nhi") as answer:
                assert await read(answer) == told


async def test_paths_begin_with_the_base_path() -> None:
    script = Script(CHUNKED + b"0\r\n\r\n")
    async with wired(script) as wire:
        wire.pool.base_path = b"/llm"

        await post(over(wire), "/health")

        assert script.requests[0].startswith(b"POST /llm/health HTTP/1.1\r\n")


async def test_httpx_reaches_nobody_without_a_worker() -> None:
    async with wired(None) as wire:
        with pytest.raises(httpx.UnsupportedProtocol):
            await over(wire).handle_async_request(httpx.Request("GET", "http://w/"))


async def test_httpx_does_not_take_a_long_silence_for_a_moment(autojump_clock: MockClock) -> None:
    script = Script(CHUNKED + b"5\r\nhello\r\n0\r\n\r\n")
    async with wired(script) as wire:
        await post(over(wire), "/")
        (idle,) = wire.pool.idle
        await trio.sleep(KEEP_ALIVE_SECONDS / 2)
        # Arrived, and not told to the reactor yet: only a look at the socket finds it.
        assert isinstance(idle.sock, MemorySocket)
        idle.sock.incoming.data += b"out of step"

        await post(over(wire), "/")

        assert script.connections == 2


async def test_httpx_has_the_head_before_the_body_and_may_stop_there() -> None:
    script = Script(CHUNKED + b"5\r\nhello\r\n")
    async with wired(script) as wire:
        async with ask(over(wire), "POST", some_worker(), "/", content=b"\r\n\r\nhi") as response:
            assert response.status_code == 200
        await wait_all_tasks_blocked()

        assert script.streams[0].incoming.ended
        assert wire.open_channels == 0


@pytest.mark.parametrize(("bytes_max", "fits"), [(1_000_000, True), (999_999, False), (10, False)])
async def test_httpx_reads_no_more_than_it_was_told_to(bytes_max: int, fits: bool) -> None:
    async def engine(stream: MemoryStream) -> None:
        await read_request(stream)
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1_000_000)
        if fits:
            stream.close()
        await trio.sleep_forever()

    async with wired(engine) as wire:
        with nullcontext() if fits else pytest.raises(httpx.RemoteProtocolError):
            asking = ask(over(wire), "POST", some_worker(), "/", content=b"hi", bytes_max=bytes_max)
            async with asking as response:
                assert len(await response.aread()) == 1_000_000
        await wait_all_tasks_blocked()

        assert wire.open_channels == 0


async def test_httpx_hears_of_every_kind_of_failure(autojump_clock: MockClock) -> None:
    async def fetch(engine: Handler | None, error: type[Exception]) -> None:
        async with wired(engine) as wire:
            with pytest.raises(error):
                await post(over(wire), "/")
            await wait_all_tasks_blocked()
            assert wire.open_channels == 0

    await fetch(None, httpx.ConnectError)
    await fetch(Script(b"nonsense"), httpx.RemoteProtocolError)
    await fetch(Script(CHUNKED + b"5\r\nhel", closes=True), httpx.RemoteProtocolError)


async def test_cancelling_httpx_closes_the_connection(autojump_clock: MockClock) -> None:
    script = Script(b"")
    async with wired(script) as wire:
        with trio.move_on_after(2):
            await post(over(wire), "/")
        await wait_all_tasks_blocked()

        assert script.streams[0].incoming.ended
        assert wire.open_channels == 0


async def test_httpx_holds_back_an_engine_that_is_not_read() -> None:
    body = b"x" * 2_000_000
    sent = trio.Event()

    async def engine(stream: MemoryStream) -> None:
        await read_request(stream)
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n" + body)
        sent.set()
        stream.close()

    async with wired(engine) as wire:
        async with ask(over(wire), "POST", some_worker(), "/", content=b"\r\n\r\nhi") as response:
            await wait_all_tasks_blocked()
            assert not sent.is_set()
            assert await response.aread() == body
