"""Clients that behave by luck, and what the answers to those who stayed must be.

A reader of HTTP of its own, strict and small, so that the router is not judged by the library it
reads with itself.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import trio
from attrs import define, field, frozen

from router.errors import STATUS_OF
from tests.lifecycles import DONE, ERROR, GONE, SILENT, Book, Luck, chunk, close, send
from tests.peers import Peer

_ERROR_EVENT = b'data: {"error"'
_CHAT = "/v1/chat/completions"
#: Where time is real, whoever waited so long may have met a deadline of the router.
LATE_SECONDS = 1.0


#### answers


@define
class Reply:
    """One answer as it was read; `ending` is complete, cut, or none (not a byte came)."""

    status: int = 0
    headers: dict[str, str] = field(factory=dict)
    body: bytes = b""
    ending: str = "none"

    @property
    def closes(self) -> bool:
        """No further answer comes on this connection."""
        return self.ending != "complete" or self.headers.get("connection") == "close"


@define(eq=False)
class Incoming:
    """What arrives on a connection."""

    peer: Peer
    unread: bytes = b""
    was_reset: bool = False

    async def _more(self) -> None:
        try:
            found = await self.peer.receive_some()
        except GONE:
            self.was_reset = True
            raise EOFError from None
        if not found:
            raise EOFError
        self.unread += found

    async def line(self, end: bytes = b"\r\n") -> bytes:
        """Up to and without `end`."""
        while end not in self.unread:
            await self._more()
        line, _, self.unread = self.unread.partition(end)
        return line

    async def into(self, reply: Reply, amount: int | None) -> None:
        """So many bytes into the reply's body, or all up to the end."""
        try:
            while amount is None or len(self.unread) < amount:
                await self._more()
        except EOFError:
            amount = len(self.unread)
            raise
        finally:
            reply.body += self.unread[:amount]
            self.unread = self.unread[amount:] if amount is not None else b""

    async def reply(self, method: str) -> Reply:
        """The next answer; raises AssertionError for what is no HTTP."""
        reply = Reply()
        try:
            await self._read_head(reply)
            await self._read_body(reply, method)
            reply.ending = "complete"
        except EOFError:
            is_framed = "transfer-encoding" in reply.headers or "content-length" in reply.headers
            if reply.status and not is_framed and not self.was_reset:
                reply.ending = "complete"
            elif reply.status or self.unread:
                reply.ending = "cut"
        return reply

    async def _read_head(self, reply: Reply) -> None:
        status = 100
        while status == 100:
            first, *lines = (await self.line(b"\r\n\r\n")).decode().split("\r\n")
            assert first.startswith("HTTP/1.1 "), first
            status = int(first[9:12])
        for line in lines:
            name, colon, value = line.partition(": ")
            assert colon, line
            assert name not in reply.headers, f"{name} twice"
            reply.headers[name] = value
        reply.status = status

    async def _read_body(self, reply: Reply, method: str) -> None:
        if method == "HEAD" or reply.status == 204:
            return
        if "transfer-encoding" in reply.headers:
            assert reply.headers["transfer-encoding"] == "chunked"
            while size := int(await self.line(), 16):
                await self.into(reply, size)
                assert await self.line() == b""
            assert await self.line() == b""
        elif "content-length" in reply.headers:
            await self.into(reply, int(reply.headers["content-length"]))
        else:
            await self.into(reply, None)


#### requests


@frozen
class Request:
    """One request; `expect` is a status, or 0 where workers decide."""

    id: str
    raw: bytes
    method: str = "POST"
    expect: int = 0
    is_old: bool = False
    has_id: bool = True

    def check(self, book: Book, reply: Reply, *, is_lenient: bool = False) -> None:
        """What one who stayed may get for it; one who did not read in time may be cut anywhere."""
        if is_lenient and reply.ending != "complete":
            return
        if self.is_old and reply.ending != "complete":
            book.count("a reset for an old client")  # which may destroy what was on its way
            return
        assert reply.ending != "none", f"{self.id}: no answer"
        if self.expect:
            late = () if book.judges_time else (408,)
            assert reply.status in (self.expect, *late), (self.id, reply)
        elif reply.ending == "complete" and reply.status == 200:
            assert reply.body in book.whole.get(self.id, ()), f"{self.id}: {reply.body[-300:]!r}"
        elif reply.ending == "complete":
            self._check_error(book, reply)
        else:
            self._check_cut(book, reply)
        if self.has_id and reply.status != 408:
            assert reply.headers.get("x-request-id") == self.id, (self.id, reply)

    def _check_error(self, book: Book, reply: Reply) -> None:
        code = reply.headers.get("x-router-error-code")
        if code is not None:
            assert STATUS_OF[code] == reply.status
            assert json.loads(reply.body)["error"]["code"] == code
            assert code != "internal_error", reply.body
            self._check_code(book, code)
            return
        theirs = [*book.refused.get(self.id, ()), ERROR[6:-2]]
        assert reply.body in theirs, f"{self.id}: {reply.body!r}"
        book.count("a worker's own error")

    def _check_code(self, book: Book, code: str) -> None:
        if not book.judges_time:
            return
        assert code in POSSIBLE, f"{self.id}: {code}"
        if code in ("first_token_timeout", "stream_idle_timeout", "request_timeout"):
            met = book.did.get(self.id, ())
            assert SILENT & set(met), f"{self.id}: {code}, but workers did {met}"

    def _check_cut(self, book: Book, reply: Reply) -> None:
        assert reply.status == 200, (self.id, reply)
        delivered, mark, error = reply.body.rpartition(_ERROR_EVENT)
        assert mark, f"{self.id}: cut without a word: {reply.body[-200:]!r}"
        assert error.endswith(b"\n\n")
        assert DONE not in reply.body
        if mark + error != ERROR:  # a worker's own last words are passed on
            self._check_code(book, json.loads(mark[6:] + error)["error"]["code"])
        assert any(sent.startswith(delivered) for sent in book.begun.get(self.id, ())), self.id
        book.count("a stream that failed visibly")


@define(eq=False)
class Visitor:
    """One client connection, from its first byte to its last."""

    luck: Luck
    book: Book
    number: int
    connect: Callable[[], Awaitable[Peer]]
    #: The router is going down, which may cut any answer.
    is_stopping: Callable[[], bool] = lambda: False
    #: Whether the router still serves a request whose id begins so.
    is_served: Callable[[str], bool] = lambda id: False
    #: When it last connected or got a whole answer.
    _heard_at: float = 0.0

    async def visit(self) -> None:
        """Connect, and do what luck says; raises AssertionError where an answer is wrong."""
        await self.luck.pause(5)
        fate = self.luck.random.choice(FATES)
        self.book.count(fate)
        requests = [self._request(place) for place in range(self.luck.random.choice((1, 1, 2, 4)))]
        try:
            peer = await self.connect()
        except OSError:
            assert self.is_stopping()
            return
        self._heard_at = trio.current_time()
        try:
            await FATE[fate](self, peer, requests)
        except GONE:
            stays = fate in ("asks in turn", "pipelines")
            assert not stays or self._may_be_cut(), "broken before it was answered"
        finally:
            await close(peer)

    def _may_be_cut(self) -> bool:
        """The router goes down, or a busy machine has let it idle or hurry for too long."""
        was_late = trio.current_time() - self._heard_at > LATE_SECONDS
        return self.is_stopping() or (was_late and not self.book.judges_time)

    # Requests

    def _request(self, place: int) -> Request:
        id, luck = f"v{self.number}-{place}", self.luck
        kind = luck.random.choice(KINDS)
        if kind == "local":
            target, expect = luck.random.choice(LOCAL)
            return self._get(id, "HEAD" if luck.one_in(4) else "GET", target, expect)
        if kind == "malformed":
            raw = luck.random.choice(MALFORMED)
            return Request(id, raw, expect=400, has_id=False)
        if kind == "not JSON":
            return self._post(id, _CHAT, b"{not json", 400)
        body = {
            "model": "m",
            "stream": not luck.one_in(3),
            "messages": ["x" * luck.random.choice(SIZES)],
        }
        path = luck.random.choice((_CHAT, _CHAT, "/v1/completions"))
        return self._post(id, path, json.dumps(body).encode())

    def _get(self, id: str, method: str, target: str, expect: int) -> Request:
        raw = f"{method} {target} HTTP/1.1\r\nHost: b\r\nX-Request-Id: {id}\r\n\r\n".encode()
        return Request(id, raw, method, expect)

    def _post(self, id: str, path: str, body: bytes, expect: int = 0) -> Request:
        luck = self.luck
        is_old = luck.one_in(12)
        version = "1.0" if is_old else "1.1"
        lines = [f"POST {path} HTTP/{version}", "Host: b", f"X-Request-Id: {id}"]
        if luck.one_in(8):
            lines.append("Upgrade: h2c\r\nConnection: Upgrade")
        elif luck.one_in(8):
            lines.append("Connection: close")
        if luck.one_in(8):
            lines.append("Expect: 100-continue")
        if luck.one_in(3) and not is_old:
            lines.append("Transfer-Encoding: chunked")
            framed = b"".join(chunk(piece) for piece in luck.pieces(body)) + b"0\r\n\r\n"
        else:
            lines.append(f"Content-Length: {len(body)}")
            framed = body
        return Request(
            id,
            "\r\n".join([*lines, "", ""]).encode() + framed,
            expect=expect,
            is_old=is_old,
        )

    # Fates

    async def _ask_in_turn(self, peer: Peer, requests: list[Request]) -> None:
        incoming = Incoming(peer)
        for request in requests:
            await send(self.luck, peer, request.raw)
            reply = await incoming.reply(request.method)
            request.check(self.book, reply, is_lenient=self._may_be_cut())
            self.book.count("answered")
            self._heard_at = trio.current_time()
            if reply.closes:
                break
            await self.luck.pause(2)

    async def _pipeline(self, peer: Peer, requests: list[Request]) -> None:
        async with trio.open_nursery() as nursery:
            # Who reads only when all is sent would lose answers that come with a close.
            nursery.start_soon(self._send_all, peer, requests)
            await self._read_replies(Incoming(peer), requests)
            nursery.cancel_scope.cancel()

    async def _send_all(self, peer: Peer, requests: list[Request]) -> None:
        try:
            await send(self.luck, peer, b"".join(request.raw for request in requests))
        except GONE:
            self.book.count("closed while it was still asking")

    async def _read_replies(
        self, incoming: Incoming, requests: list[Request], *, is_lenient: bool = False
    ) -> None:
        for request in requests:
            reply = await incoming.reply(request.method)
            request.check(self.book, reply, is_lenient=is_lenient or self._may_be_cut())
            self.book.count("answered")
            if reply.closes:
                return

    async def _read_slowly(self, peer: Peer, requests: list[Request]) -> None:
        started_at = trio.current_time()
        await self._send_all(peer, requests)
        await trio.sleep(self.luck.random.choice((1, 5, 30)) * self.luck.second)
        was_patient = trio.current_time() - started_at > 9 * self.luck.second  # 10 is the limit
        await self._read_replies(Incoming(peer), requests, is_lenient=was_patient)

    async def _leave(self, peer: Peer, requests: list[Request]) -> None:
        await self._send_all(peer, requests)
        await trio.sleep(self.luck.random.choice((0, 0.1, 1, 3, 10)) * self.luck.second)
        if self.luck.one_in(2):
            await self._read_something(peer)
        await self._part(peer)

    async def _stop_in_the_middle(self, peer: Peer, requests: list[Request]) -> None:
        whole = b"".join(request.raw for request in requests)
        await send(self.luck, peer, whole[: self.luck.random.randrange(len(whole))])
        if self.luck.one_in(2):
            await self._part(peer)
            return
        while await peer.receive_some():
            pass  # until the router has had enough

    async def _come_and_wait(self, peer: Peer, requests: list[Request]) -> None:
        assert await peer.receive_some() == b"", "an answer that nobody asked for"

    async def _read_something(self, peer: Peer) -> None:
        with trio.move_on_after(self.luck.second):
            await peer.receive_some(self.luck.random.choice((1, 100, 10_000)))

    async def _part(self, peer: Peer) -> None:
        """Leave in one of three ways, and be let go of at once."""
        if self.luck.one_in(3):
            peer.reset()
        elif self.luck.one_in(2):
            await peer.send_eof()
            with trio.fail_after(self.luck.at_once):
                while await peer.receive_some():
                    pass
        else:
            await close(peer)
        await trio.sleep(0.001)
        assert not self.is_served(f"v{self.number}-"), "served although it has left"


FATE: dict[str, Callable[[Visitor, Peer, list[Request]], Awaitable[None]]] = {
    "asks in turn": Visitor._ask_in_turn,
    "pipelines": Visitor._pipeline,
    "reads slowly": Visitor._read_slowly,
    "leaves": Visitor._leave,
    "stops in the middle": Visitor._stop_in_the_middle,
    "only comes": Visitor._come_and_wait,
}
FATES = ["asks in turn"] * 4 + ["pipelines"] * 3 + ["leaves"] * 3 + list(FATE)
#: Why one may be refused in a fleet of which one worker is always well.
POSSIBLE = {"queue_full", "queue_timeout", "upstream_broken", "shutting_down"}
POSSIBLE |= {"first_token_timeout", "stream_idle_timeout", "request_timeout"}
KINDS = ["work"] * 8 + ["local", "malformed", "not JSON"]
SIZES = (1, 1, 1, 1, 2000, 100_000)
LOCAL = [("/health", 200), ("/v1/models", 200), ("/nothing", 404), (_CHAT, 405)]
MALFORMED = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"nonsense\r\n\r\n",
    b"POST /v1/x HTTP/1.1\r\nHost: b\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    b"POST /v1/x HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\nHost: b\n\n",
]
