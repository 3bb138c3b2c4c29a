"""A router as one writes it on the first day, and worse ones: each is caught by a case.

`Naive` relays and looks at nothing: it does not see clients leave, takes whatever ends a body for
its end, decodes what it relays piece by piece, retries nothing and limits nothing. The others go
wrong in one more way each.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import AsyncIterator
from typing import ClassVar

import h11
import trio
from attrs import define, field

from router.conform.stage import Order, Place, Seat

READ_BYTES = 65536
PLAIN = "text/plain"
UNWELL = b'{"error":{"message":"It is not well.","type":"server_error","code":"unwell"}}'


@define(eq=False)
class Asked:
    """A request of a client."""

    method: str = "GET"
    path: str = ""
    headers: list[tuple[str, str]] = field(factory=list)
    body: bytes = b""


@define(eq=False)
class Leg:
    """A request to an engine: its head, then its pieces."""

    stream: trio.abc.HalfCloseableStream
    status: int = 0
    headers: dict[str, str] = field(factory=dict)
    was_cut: bool = False
    _parser: h11.Connection = field(factory=lambda: h11.Connection(h11.CLIENT))

    async def send(self, asked: Asked) -> None:
        lines = [f"{asked.method} {asked.path} HTTP/1.1", "host: engine"]
        lines.append(f"content-length: {len(asked.body)}")
        for name, value in asked.headers:
            if name not in ("host", "content-length", "accept-encoding"):
                lines.append(f"{name}: {value}")
        self._parser.send(
            h11.Request(method=asked.method, target=asked.path, headers=[("host", "engine")])
        )
        self._parser.send(h11.EndOfMessage())
        await self.stream.send_all("\r\n".join([*lines, "", ""]).encode() + asked.body)
        await self._read_head()

    async def _read_head(self) -> None:
        event = await self._next()
        if isinstance(event, h11.Response):
            self.status = event.status_code
            self.headers = {k.decode(): v.decode() for k, v in event.headers}

    async def pieces(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def _next(self) -> object:
        while True:
            try:
                event = self._parser.next_event()
                if event is not h11.NEED_DATA:
                    return event
                self._parser.receive_data(bytes(await self.stream.receive_some(READ_BYTES)))
            except (h11.RemoteProtocolError, trio.BrokenResourceError):
                self.was_cut = True
                return None


@define(eq=False)
class Naive:
    """Relays to one engine after the other."""

    place: Place
    seats: tuple[Seat, ...]
    turn: int = 0

    async def serve(self, stream: trio.abc.HalfCloseableStream) -> None:
        asked = await _read_request(stream)
        if asked.method == "GET":
            await _answer(stream, 200, b"fine", PLAIN)
        else:
            await self.work(stream, asked)

    async def work(self, stream: trio.abc.HalfCloseableStream, asked: Asked) -> None:
        prefills = [seat for seat in self.seats if seat.role == "prefill"]
        if prefills:
            await self.work_with_pair(stream, asked, prefills)
        else:
            await self.relay(stream, self.choose(), asked)

    def choose(self) -> Seat:
        self.turn += 1
        return self.seats[self.turn % len(self.seats)]

    async def relay(self, stream: trio.abc.HalfCloseableStream, seat: Seat, asked: Asked) -> None:
        leg = await self.reach(stream, seat, asked)
        if leg is not None:
            async with leg.stream:
                await self.pass_on(stream, leg)

    async def reach(
        self, stream: trio.abc.HalfCloseableStream, seat: Seat, asked: Asked
    ) -> Leg | None:
        try:
            # Whoever it was written for knows this stream.
            leg = Leg(await self.place.connect(seat.url))  # type: ignore[arg-type]
        except OSError:
            await _answer(stream, 500, b"Internal Server Error", PLAIN)
            return None
        try:
            await leg.send(asked)
        except trio.Cancelled:
            await trio.aclose_forcefully(leg.stream)
            raise
        if not leg.status:
            await _answer(stream, 500, b"Internal Server Error", PLAIN)
            return None
        return leg

    async def pass_on(self, stream: trio.abc.HalfCloseableStream, leg: Leg) -> None:
        decoder = codecs.getdecoder("utf-8")
        kind = leg.headers.get("content-type", PLAIN)
        await _begin(stream, leg.status, kind)
        async for piece in leg.pieces():
            await self.put(stream, decoder(piece, "replace")[0].encode())
        await _send(stream, b"0\r\n\r\n")

    async def put(self, stream: trio.abc.HalfCloseableStream, data: bytes) -> None:
        await _send(stream, b"%x\r\n%b\r\n" % (len(data), data))

    # Pairs

    async def work_with_pair(
        self, stream: trio.abc.HalfCloseableStream, asked: Asked, prefills: list[Seat]
    ) -> None:
        decode = next(seat for seat in self.seats if seat.role == "decode")
        await self.ask_pair(stream, asked, prefills[0], decode, 7)

    async def ask_pair(
        self,
        stream: trio.abc.HalfCloseableStream,
        asked: Asked,
        prefill: Seat,
        decode: Seat,
        room: int,
    ) -> bool:
        """Wait for both halves, as if both could only succeed; whether prefill has."""
        met = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port}
        body = json.dumps(json.loads(asked.body) | met | {"bootstrap_room": room}).encode()
        both = Asked(asked.method, asked.path, asked.headers, body)
        legs: dict[str, Leg] = {}

        async def ask(seat: Seat) -> None:
            leg = Leg(await self.place.connect(seat.url))  # type: ignore[arg-type]  # as above
            await leg.send(both)
            legs[seat.role] = leg

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, prefill)
            nursery.start_soon(ask, decode)
        await self.pass_on(stream, legs["decode"])
        return legs["prefill"].status == 200


async def _read_request(stream: trio.abc.HalfCloseableStream) -> Asked:
    parser, asked = h11.Connection(h11.SERVER), Asked()
    while True:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            parser.receive_data(bytes(await stream.receive_some(READ_BYTES)))
        elif isinstance(event, h11.Request):
            asked.method, asked.path = event.method.decode(), event.target.decode()
            asked.headers = [(k.decode().lower(), v.decode()) for k, v in event.headers]
        elif isinstance(event, h11.Data):
            asked.body += bytes(event.data)
        else:
            return asked


async def _begin(stream: trio.abc.HalfCloseableStream, status: int, kind: str) -> None:
    lines = [f"HTTP/1.1 {status} .", f"content-type: {kind}", "transfer-encoding: chunked"]
    await _send(stream, "\r\n".join([*lines, "connection: close", "", ""]).encode())


async def _answer(
    stream: trio.abc.HalfCloseableStream, status: int, body: bytes, kind: str = "application/json"
) -> None:
    head = f"HTTP/1.1 {status} .\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    await _send(stream, head.encode() + body)


async def _send(stream: trio.abc.HalfCloseableStream, data: bytes) -> None:
    """Whether anybody still reads is not looked at."""
    try:
        await stream.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        await trio.lowlevel.checkpoint()


#### Worse ones


class Watching(Naive):
    """Lets go of what clients have left; the others build on it."""

    async def work(self, stream: trio.abc.HalfCloseableStream, asked: Asked) -> None:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await stream.receive_some(1)
                nursery.cancel_scope.cancel("the client has left")

            nursery.start_soon(watch)
            await super().work(stream, asked)
            nursery.cancel_scope.cancel("answered")


class LeakingLoad(Watching):
    """Counts requests of clients that have left for ever; fewest first."""

    loads: dict[str, int]

    def choose(self) -> Seat:
        self.turn += 1
        order = self.seats[self.turn % len(self.seats) :] + self.seats
        return min(order, key=lambda seat: self.loads.get(seat.url, 0))

    async def relay(self, stream: trio.abc.HalfCloseableStream, seat: Seat, asked: Asked) -> None:
        self.loads[seat.url] = self.loads.get(seat.url, 0) + 1
        await super().relay(stream, seat, asked)
        self.loads[seat.url] -= 1


class LeakingCap(Watching):
    """Four at a time, and a place of one that has left is gone."""

    places: int = 4

    async def relay(self, stream: trio.abc.HalfCloseableStream, seat: Seat, asked: Asked) -> None:
        while not self.places:  # noqa: ASYNC110
            await trio.sleep(0.01)
        self.places -= 1
        await super().relay(stream, seat, asked)
        self.places += 1


class GhostQueue(Naive):
    """One at a time; who has left the queue is served all the same."""

    lock: trio.Lock

    async def relay(self, stream: trio.abc.HalfCloseableStream, seat: Seat, asked: Asked) -> None:
        async with self.lock:
            await super().relay(stream, seat, asked)


class Pooling(Naive):
    """Asks on connections that were used, and takes their end for the engine's."""

    pool: list[trio.abc.HalfCloseableStream]

    async def reach(
        self, stream: trio.abc.HalfCloseableStream, seat: Seat, asked: Asked
    ) -> Leg | None:
        if not self.pool:
            return await super().reach(stream, seat, asked)
        leg = Leg(self.pool.pop())
        await leg.send(asked)
        if not leg.status:
            await _answer(stream, 502, b"Bad Gateway", PLAIN)
            return None
        return leg

    async def relay(self, stream: trio.abc.HalfCloseableStream, seat: Seat, asked: Asked) -> None:
        leg = await self.reach(stream, seat, asked)
        if leg is not None:
            await self.pass_on(stream, leg)
            self.pool.append(leg.stream)


class OneClock(Naive):
    """Three seconds for all of a request."""

    async def work(self, stream: trio.abc.HalfCloseableStream, asked: Asked) -> None:
        with trio.move_on_after(3):
            await super().work(stream, asked)


class StartingOver(Naive):
    """A stream that was cut is asked for again, from its beginning."""

    async def pass_on(self, stream: trio.abc.HalfCloseableStream, leg: Leg) -> None:
        await _begin(stream, leg.status, leg.headers.get("content-type", PLAIN))
        async for piece in leg.pieces():
            await self.put(stream, piece)
        if not leg.was_cut:
            await _send(stream, b"0\r\n\r\n")

    async def relay(self, stream: trio.abc.HalfCloseableStream, seat: Seat, asked: Asked) -> None:
        leg = await self.reach(stream, seat, asked)
        if leg is None:
            return
        await self.pass_on(stream, leg)
        while leg.was_cut:
            again = await self.reach(stream, self.choose(), asked)
            assert again is not None
            leg = again
            async for piece in leg.pieces():
                await self.put(stream, piece)
            if not leg.was_cut:
                await _send(stream, b"0\r\n\r\n")


class BlamingAll(Naive):
    """Three statuses that are not 200 open the breaker, whosever fault they are."""

    bad: int = 0

    async def work(self, stream: trio.abc.HalfCloseableStream, asked: Asked) -> None:
        if self.bad >= 3:
            await _answer(stream, 503, b"breaker open", PLAIN)
        else:
            await super().work(stream, asked)

    async def pass_on(self, stream: trio.abc.HalfCloseableStream, leg: Leg) -> None:
        self.bad = 0 if leg.status == 200 else self.bad + 1
        await super().pass_on(stream, leg)


class Lumping(Naive):
    """Reads an answer to its end before it passes anything on."""

    async def pass_on(self, stream: trio.abc.HalfCloseableStream, leg: Leg) -> None:
        data = b"".join([piece async for piece in leg.pieces()])
        await _answer(stream, leg.status, data, leg.headers.get("content-type", PLAIN))


class Undone(Naive):
    """Takes the end of a stream for no business of its client's."""

    ends: ClassVar[bytes] = b""

    async def pass_on(self, stream: trio.abc.HalfCloseableStream, leg: Leg) -> None:
        data = b"".join([piece async for piece in leg.pieces()])
        data = data.replace(b"data: [DONE]\n\n", self.ends)
        await _answer(stream, leg.status, data, leg.headers.get("content-type", PLAIN))


class Overdone(Undone):
    """Ends each stream on its own behalf, too."""

    ends = 2 * b"data: [DONE]\n\n"


class Hoarding(Watching):
    """Takes care of much, and passes nothing on before it has read all of it.

    What it cannot read to its end it tries once more, elsewhere.
    """

    async def relay(self, stream: trio.abc.HalfCloseableStream, seat: Seat, asked: Asked) -> None:
        for turn in range(2):
            leg = await self.reach(stream, self.choose() if turn else seat, asked)
            if leg is None:
                return
            async with leg.stream:
                data = b"".join([piece async for piece in leg.pieces()])
            if not leg.was_cut:
                kind = leg.headers.get("content-type", PLAIN)
                await _answer(stream, leg.status, data, kind)
                return
        await _answer(stream, 502, UNWELL)


class Idle(Naive):
    """Serves while it is looked at, and then refuses everything, well-mannered."""

    status: int = 500

    async def work(self, stream: trio.abc.HalfCloseableStream, asked: Asked) -> None:
        if b"warm up" in asked.body:
            await super().work(stream, asked)
        else:
            await _answer(stream, self.status, UNWELL)


class Small(Naive):
    """Refuses a body beyond a megabyte, which nobody has asked for."""

    async def work(self, stream: trio.abc.HalfCloseableStream, asked: Asked) -> None:
        if len(asked.body) > 1 << 20:
            await _answer(stream, 413, b"length limit exceeded", PLAIN)
        else:
            await super().work(stream, asked)


class Masking(Naive):
    """Whatever an engine refuses is an Internal Server Error."""

    async def pass_on(self, stream: trio.abc.HalfCloseableStream, leg: Leg) -> None:
        if leg.status == 200:
            await super().pass_on(stream, leg)
        else:
            await _answer(stream, 500, b"Internal Server Error", PLAIN)


class Few(Naive):
    """Has room for ten."""

    inside: int = 0

    async def work(self, stream: trio.abc.HalfCloseableStream, asked: Asked) -> None:
        if self.inside >= 10:
            await _answer(stream, 503, b"too many", PLAIN)
            return
        self.inside += 1
        await super().work(stream, asked)
        self.inside -= 1


class SameRoom(Naive):
    """Tries another pair in the room of the first."""

    async def work_with_pair(
        self, stream: trio.abc.HalfCloseableStream, asked: Asked, prefills: list[Seat]
    ) -> None:
        decode = next(seat for seat in self.seats if seat.role == "decode")
        self.turn += 1
        for prefill in prefills:
            with trio.move_on_after(1):
                await self.ask_pair(stream, asked, prefill, decode, 100 + self.turn)


def start(kind: type[Naive], place: Place, order: Order) -> Naive:
    """One of these routers."""
    server = kind(place, order.seats)
    if isinstance(server, LeakingLoad):
        server.loads = {}
    elif isinstance(server, Pooling):
        server.pool = []
    elif isinstance(server, GhostQueue):
        server.lock = trio.Lock()
    return server
