"""A relay between router and engine that breaks a stream after any of its events.

A thousand engines cannot be killed in minutes, but a thousand streams can be cut: to the router a
cut by a relay is a worker that was lost there. What is cut is planned by the request's id, which
the router hands on, so that the second attempt of a request can have a cut of its own. Everything
that an engine was sent, and all that was let through, is kept for the comparison afterwards.
"""

import contextlib
import socket
import struct
from collections import defaultdict
from enum import Enum

import h11
import trio
from attrs import Factory, define, frozen

from tests.real.calling import RECEIVE_BYTES, Broken, Coming, calling
from tests.real.engines import Engine

SEPARATOR = b"\n\n"
REQUEST_ID = b"x-request-id"
_OF_A_HOP = (b"connection", b"transfer-encoding", b"content-length", b"host")


class How(Enum):
    """The end that the router sees."""

    END = "the body ends well, without [DONE]"
    FIN = "the connection ends between two events"
    TORN = "the connection ends inside an event"
    RESET = "the connection is reset"


@frozen
class Cut:
    """Where to break: after so many complete events."""

    after: int
    how: How


@define(eq=False)
class Sent:
    """One request as an engine got it, and what was let through of the answer."""

    engine: Engine
    path: str
    body: bytes
    received: bytearray = Factory(bytearray)
    cut: How | None = None

    @property
    def was_cut(self) -> bool:
        return self.cut is not None

    def events(self) -> list[bytes]:
        """The complete events."""
        return bytes(self.received).split(SEPARATOR)[:-1]


@define(eq=False)
class Cuts:
    """The plan and the diary of all relays, by request id."""

    planned: dict[str, list[Cut]] = Factory(dict)
    sent: dict[str, list[Sent]] = Factory(lambda: defaultdict(list))


class _Cut(Exception):
    """The connection was broken as planned."""


@define(eq=False)
class Relay:
    """One worker, as the router sees it."""

    engine: Engine
    cuts: Cuts
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, task_status: trio.TaskStatus["Relay"] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen on a free port until cancelled."""
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self._serve_connection, [listener])
            task_status.started(self)

    async def _serve_connection(self, stream: trio.SocketStream) -> None:
        peer = _Peer(stream)
        gone = (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError)
        with contextlib.suppress(*gone, Broken, _Cut):
            while await self._serve_request(peer):
                peer.connection.start_next_cycle()
        await trio.aclose_forcefully(stream)

    async def _serve_request(self, peer: "_Peer") -> bool:
        """Whether the connection can be used again."""
        request, body = await peer.receive_request()
        if request is None:
            return False
        path = request.target.decode()
        sent, cut = Sent(self.engine, path, body), None
        name = dict(request.headers).get(REQUEST_ID, b"").decode()
        if name in self.cuts.planned:
            self.cuts.sent[name].append(sent)
            plan = self.cuts.planned[name]
            cut = plan.pop(0) if plan else None
        headers = [pair for pair in request.headers if pair[0] not in _OF_A_HOP]
        method = request.method.decode()
        async with calling(self.engine.port, method, path, headers, body) as answer:
            await self._answer(peer, answer, sent, cut)
        return peer.connection.our_state is h11.DONE is peer.connection.their_state

    async def _answer(self, peer: "_Peer", answer: Coming, sent: Sent, cut: Cut | None) -> None:
        headers = [pair for pair in answer.headers if pair[0] not in _OF_A_HOP]
        headers.append((b"transfer-encoding", b"chunked"))
        await peer.send(h11.Response(status_code=answer.status, headers=headers))
        place, waiting = 0, b""
        while data := await answer.receive():
            if not answer.is_stream:
                await peer.send(h11.Data(data=data))
                continue
            # Both engines separate events by an empty line.
            *events, waiting = (waiting + data).split(SEPARATOR)
            for event in events:
                if cut is not None and place == cut.after:
                    sent.cut = cut.how
                    await peer.break_off(cut.how, event)
                    return
                sent.received += event + SEPARATOR
                await peer.send(h11.Data(data=event + SEPARATOR))
                place += 1
        await peer.send(h11.EndOfMessage())


class _Peer:
    """The router's connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.connection = h11.Connection(h11.SERVER)

    async def receive_request(self) -> tuple[h11.Request | None, bytes]:
        request, body = None, bytearray()
        while True:
            event = self.connection.next_event()
            if event is h11.NEED_DATA:
                self.connection.receive_data(await self.stream.receive_some(RECEIVE_BYTES))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                return request, bytes(body)

    async def send(self, event: h11.Response | h11.Data | h11.EndOfMessage) -> None:
        await self.stream.send_all(self.connection.send(event) or b"")

    async def break_off(self, how: How, next_event: bytes) -> None:
        """End the answer before its next event. Returns only after an end that looks good."""
        if how is How.END:
            await self.send(h11.EndOfMessage())
            return
        if how is How.TORN:
            await self.send(h11.Data(data=next_event[: len(next_event) // 2]))
        elif how is How.RESET:
            linger = struct.pack("ii", 1, 0)
            self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.stream.socket.close()
        raise _Cut
