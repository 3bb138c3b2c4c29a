"""Workers that behave by luck, and the book in which it stands what was right.

A `Worker` answers well, badly, late, or not at all, as one seed says; a `Visitor` (see
tests/visitors.py) is a client of the same kind. Every worker writes into the `Book` what it has
sent for which request id, and a visitor that stayed holds what it got against it: a whole answer
that some worker has sent, or a failure that it can see.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from random import Random

import trio
from attrs import define, field

from tests.peers import Peer

GONE = (trio.BrokenResourceError, trio.ClosedResourceError)
DONE = b"data: [DONE]\n\n"


def data(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def event(text: str, finish: str | None = None) -> bytes:
    return data({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


ROLE = data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
FINISH = data({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
ABORT = data({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]})
ERROR = data({"error": {"message": "The engine died.", "type": "server_error", "code": 500}})


@define(eq=False)
class Book:
    """Who sent what, by request id; and how often what happened."""

    whole: dict[str, list[bytes]] = field(factory=dict)  # answers that are right as a whole
    begun: dict[str, list[bytes]] = field(factory=dict)  # streams, whatever became of them
    refused: dict[str, list[bytes]] = field(factory=dict)  # bodies of a worker's own errors
    did: dict[str, list[str]] = field(factory=dict)  # what workers did with a request, in order
    seen: dict[str, int] = field(factory=dict)
    #: Who is told of a timeout must have met a silent worker. Not so where time is real.
    judges_time: bool = True

    def count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1


@define(eq=False)
class Luck:
    """All that is left to chance, and how long a second lasts."""

    random: Random
    second: float = 1.0
    #: Seconds within which something that needs no waiting must have happened.
    at_once: float = 0.5

    def one_in(self, number: int) -> bool:
        return self.random.randrange(number) == 0

    async def pause(self, seconds: float) -> None:
        """Up to so long, often not at all."""
        if self.one_in(2):
            await trio.sleep(self.random.random() * seconds * self.second)

    def pieces(self, data: bytes) -> list[bytes]:
        if len(data) < 2 or not self.one_in(4):
            return [data]
        size = max(self.random.choice((1, 7, 100, 5000)), len(data) // 10)
        return [data[start : start + size] for start in range(0, len(data), size)]


async def send(luck: Luck, peer: Peer, data: bytes) -> None:
    for piece in luck.pieces(data):
        await peer.send_all(piece)
        if luck.one_in(8):
            await luck.pause(0.5)


#### workers


@define(eq=False)
class Worker:
    """An engine without any virtue but that of writing down what it did."""

    luck: Luck
    book: Book
    #: Only good answers, for tests that count on somebody being well.
    is_well: bool = False
    #: Requests of which it has answered a byte: none of them may come again.
    answered: set[str] = field(factory=set)

    async def serve(self, peer: Peer) -> None:
        """Serve one connection until luck or the router ends it."""
        unread, headers = b"", dict[str, str]()
        try:
            while True:
                method, path, headers, unread = await self._read_request(peer, unread)
                if not await self._answer(peer, method, path, headers):
                    break
                if self.luck.one_in(12) and not self.is_well:
                    self.book.count("idle connection broken")
                    await self.luck.pause(1)
                    if self.luck.one_in(3):
                        await peer.send_all(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
                    break
        except GONE:
            pass
        except EOFError:
            self.book.count("router ended a connection")
        finally:
            if self.luck.one_in(8) and not self.is_well:
                peer.reset()  # which may destroy an answer that nobody has read
                self.answered.discard(headers.get("x-request-id", ""))
            else:
                await trio.aclose_forcefully(_Closing(peer))

    async def _read_request(
        self, peer: Peer, unread: bytes
    ) -> tuple[str, str, dict[str, str], bytes]:
        while b"\r\n\r\n" not in unread:
            unread += await _some(peer)
        head, _, unread = unread.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        headers = {name.lower(): value for name, value in headers.items()}
        length = int(headers.get("content-length", "0"))
        while len(unread) < length:
            unread += await _some(peer)
        method, path, _ = first.split(" ")
        return method, path, headers, unread[length:]

    async def _answer(self, peer: Peer, method: str, path: str, headers: dict[str, str]) -> bool:
        if method == "GET":
            known = {"/health": {}, "/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}}
            status = 200 if path in known else 404
            await peer.send_all(sized(status, json.dumps(known.get(path, {})).encode()))
            return True
        names = GOOD if self.is_well or self.luck.one_in(2) else BAD
        name, id = self.luck.random.choice(names), headers["x-request-id"]
        self.book.count(name)
        self.book.did.setdefault(id, []).append(name)
        assert id not in self.answered, f"{id} was sent again after its answer had begun"
        if name not in WITHOUT_A_BYTE:
            self.answered.add(id)
        await self.luck.pause(1)
        answer: Callable[[Worker, Peer, str], Awaitable[bool]] = getattr(Worker, f"_{name}")
        return await answer(self, peer, id)

    def _note(self, book: dict[str, list[bytes]], id: str, body: bytes) -> bytes:
        book.setdefault(id, []).append(body)
        return body

    # Whole answers

    def _text(self, id: str) -> bytes:
        words = self.luck.random.choice((0, 10, 10, 20_000))
        text = f"{self.luck.random.random()} " + "word " * words
        return json.dumps({"id": id, "choices": [{"index": 0, "text": text}]}).encode()

    async def _unary(self, peer: Peer, id: str) -> bool:
        await send(self.luck, peer, sized(200, self._note(self.book.whole, id, self._text(id))))
        return True

    async def _unary_chunked(self, peer: Peer, id: str) -> bool:
        body = self._note(self.book.whole, id, self._text(id))
        pieces = b"".join(chunk(piece) for piece in self.luck.pieces(body))
        await send(self.luck, peer, head(200, "transfer-encoding: chunked") + pieces + LAST)
        return True

    async def _unary_until_close(self, peer: Peer, id: str) -> bool:
        body = self._note(self.book.whole, id, self._text(id))
        await send(self.luck, peer, head(200) + body)
        await _hang_up(peer)
        return False

    async def _refuses(self, peer: Peer, id: str) -> bool:
        status = self.luck.random.choice((400, 404, 422, 429, 500, 503))
        error = {"error": {"message": f"{status} of {id}", "code": status}}
        body = self._note(self.book.refused, id, json.dumps(error).encode())
        await send(self.luck, peer, sized(status, body))
        return True

    async def _short(self, peer: Peer, id: str) -> bool:
        await send(self.luck, peer, sized(200, b"x" * 50)[:-10])
        await _hang_up(peer)
        return False

    async def _garbage(self, peer: Peer, id: str) -> bool:
        await send(self.luck, peer, b"\x15\x03\x01 what?\r\n\r\n")
        return not self.luck.one_in(2)

    async def _surplus(self, peer: Peer, id: str) -> bool:
        body = self._note(self.book.whole, id, self._text(id))
        await send(self.luck, peer, sized(200, body) + b"and one thing more")
        return True

    async def _nothing(self, peer: Peer, id: str) -> bool:
        return False

    async def _silence(self, peer: Peer, id: str) -> bool:
        while True:
            await _some(peer)

    async def _empty(self, peer: Peer, id: str) -> bool:
        await send(self.luck, peer, sized(200, b""))
        return True

    # Streams

    async def _stream_head(self, peer: Peer) -> None:
        await send(self.luck, peer, head(200, "content-type: text/event-stream", *TRANSFER_CHUNKED))

    def _events(self, id: str) -> list[bytes]:
        words = self.luck.random.choice((1, 2, 3, 5, 8, 60))
        mark = f"{self.luck.random.random()} 日本 "
        size = 150 if words > 10 else 1  # more than a slow client may owe
        return [b": ping\n\n", ROLE, *(event(f"{mark}{word} " * size) for word in range(words))]

    async def _begin(self, peer: Peer, id: str, events: list[bytes], whole: bytes = b"") -> None:
        """Write a stream without its end; `whole` is what a client may get of it as complete."""
        self._note(self.book.begun, id, b"".join(events))
        if whole:
            self._note(self.book.whole, id, whole)
        await self._stream_head(peer)
        for each in events:
            await send(self.luck, peer, chunk(each))
            if self.luck.one_in(20):
                await self.luck.pause(1)

    async def _stream(self, peer: Peer, id: str) -> bool:
        events = [*self._events(id), FINISH, DONE]
        await self._begin(peer, id, events, b"".join(events))
        await self.luck.pause(3)
        await peer.send_all(LAST)
        return True

    async def _stream_at_once(self, peer: Peer, id: str) -> bool:
        body = b"".join([*self._events(id), FINISH, DONE])
        self._note(self.book.begun, id, body)
        await self._stream_head(peer)
        await peer.send_all(chunk(self._note(self.book.whole, id, body)) + LAST)
        return True

    async def _unmarked(self, peer: Peer, id: str) -> bool:
        events = [*self._events(id), FINISH]
        await self._begin(peer, id, events, b"".join(events) + DONE)
        await peer.send_all(LAST)
        return True

    async def _cut_after_finish(self, peer: Peer, id: str) -> bool:
        events = [*self._events(id), FINISH]
        await self._begin(peer, id, events, b"".join(events) + DONE)
        await self.luck.pause(1)
        return False

    async def _cut(self, peer: Peer, id: str) -> bool:
        await self._begin(peer, id, self._events(id))
        await peer.send_all(b"10\r\ndata: half")
        return False

    async def _reset(self, peer: Peer, id: str) -> bool:
        await self._begin(peer, id, self._events(id))
        await self.luck.pause(1)
        peer.reset()
        return False

    async def _lies(self, peer: Peer, id: str) -> bool:
        events = self._events(id)
        keep = self.luck.random.randrange(len(events) + 1)
        await self._begin(peer, id, events[:keep])
        end = self.luck.random.choice((chunk(ABORT) + chunk(DONE), chunk(DONE), b""))
        await peer.send_all(end + LAST)
        return True

    async def _fails(self, peer: Peer, id: str) -> bool:
        events = self._events(id)
        await self._begin(peer, id, events[: self.luck.random.randrange(len(events) + 1)])
        await peer.send_all(chunk(ERROR) + chunk(DONE) + LAST)
        return True

    async def _stalls(self, peer: Peer, id: str) -> bool:
        await self._begin(peer, id, self._events(id))
        return await self._silence(peer, id)


# fmt: off
GOOD: tuple[str, ...] = (
    "unary", "unary_chunked", "unary_until_close", "stream", "stream_at_once", "unmarked",
)
BAD: tuple[str, ...] = (
    "refuses", "short", "garbage", "nothing", "silence", "empty", "cut_after_finish", "cut",
    "reset", "lies", "fails", "stalls", "surplus",
)
# fmt: on
WITHOUT_A_BYTE = ("nothing", "silence", "reset")
#: What a request may have met that is told to have timed out.
SILENT = frozenset({"silence", "stalls"})

LAST = b"0\r\n\r\n"
TRANSFER_CHUNKED = ("transfer-encoding: chunked",)


def head(status: int, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Whatever", *lines, "", ""]).encode()


def sized(status: int, body: bytes) -> bytes:
    lines = ("content-type: application/json", f"content-length: {len(body)}")
    return head(status, *lines) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _some(peer: Peer) -> bytes:
    found = await peer.receive_some()
    if not found:
        raise EOFError
    return found


async def _hang_up(peer: Peer) -> None:
    """Say that nothing more comes; the connection is closed by whoever serves it."""
    await peer.send_eof()


class _Closing(trio.abc.AsyncResource):
    """Lets Trio close a peer without waiting."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def aclose(self) -> None:
        await self._peer.aclose()


async def close(peer: Peer) -> None:
    """Close at once, also in a cancelled task."""
    await trio.aclose_forcefully(_Closing(peer))
