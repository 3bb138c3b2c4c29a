"""An agent between the broker and a simulated engine, for stories; it shares no code with ours.

Written after the protocol's description: an old one is as Infera's own worker (no numbers, no head,
no heartbeats, every request a POST, the status at the end), a new one has what Baton adds. It dies,
drains and queues as a story wants.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import h11
import msgspec
import trio
from attrs import define, field

from router.wires.nats.broker import BrokerAway, Job, Message
from tests.memory import MemoryStream, Pipe
from tests.memory_broker import MemoryBroker

HEARTBEAT_SECONDS = 2.0
READ_BYTES = 65536
#: What the headers of a frame take at most.
HEADERS_BYTES = 200
NOTICE = b"infera: worker draining"

Dial = Callable[[], MemoryStream]


def token(worker_id: str) -> str:
    return base64.urlsafe_b64encode(worker_id.encode()).decode().rstrip("=")


def pipes() -> tuple[MemoryStream, MemoryStream]:
    """Two ends of a connection."""
    there, back = Pipe(), Pipe()
    return MemoryStream(incoming=back, outgoing=there), MemoryStream(incoming=there, outgoing=back)


@define(eq=False)
class Running:
    """One request that is being served."""

    peer: Peer
    inbox: str
    is_migratable: bool
    accepts: frozenset[str]
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    seq: int = 0
    said_at: float = field(factory=trio.current_time)
    is_over: bool = False

    def say(self, kind: str, payload: bytes = b"", /, **headers: str) -> None:
        """One frame, and its headers without their prefix; what cannot be sent is lost."""
        if self.is_over:
            return
        if kind in ("done", "error"):
            self.is_over = True
        lines = {"rs-type": kind} | {f"rs-{key}": value for key, value in headers.items()}
        if not self.peer.is_old:
            lines["rs-seq"] = str(self.seq)
        self.seq += kind != "still"
        self.said_at = trio.current_time()
        with suppress(BrokerAway):
            self.peer.broker.publish(self.inbox, payload, headers=lines)


@define(eq=False)
class Peer:
    """One agent."""

    nursery: trio.Nursery
    broker: MemoryBroker
    id: str
    #: A connection to the engine; raises ConnectionRefusedError.
    dial: Dial
    is_old: bool = False
    #: It takes requests from the work queue.
    queues: bool = False
    running: dict[str, Running] = field(factory=dict)
    #: Cancels of requests that have not come yet.
    tombstones: set[str] = field(factory=set)
    #: Everything it was asked, decoded, with the headers.
    asked: list[tuple[dict[str, object], Mapping[str, str]]] = field(factory=list)
    #: How many migratable requests it handed back.
    handed_back: int = 0
    is_draining: bool = False

    def start(self) -> None:
        """Begin to take requests."""
        name = token(self.id)
        self.broker.on_state.append(self._state_changed)
        self.broker.subscribe(f"infera.cancel.{name}", self._cancelled, on_lost=lambda _: None)
        subject = f"infera.req.{name}"
        if self.queues:
            queue = self.broker.work_queue(
                "INFERA_REQUESTS", ["infera.req.>"], max_messages=1_000_000
            )
            queue.consume(name, subject, self._handed, on_lost=lambda _: None)
        else:
            self.broker.subscribe(subject, self._taken, on_lost=lambda _: None)

    def _state_changed(self, is_connected: bool) -> None:
        for running in list(self.running.values()) if is_connected else ():
            self.nursery.start_soon(self._show, running)

    async def _show(self, running: Running) -> None:
        """What a router has missed shows in the number of the next frame."""
        for _ in range(3):
            if "still" in running.accepts:
                running.say("still")
            await trio.sleep(1.0)

    # What a story does to it

    def die(self) -> None:
        """As by SIGKILL: its connections are closed, and nobody is told anything."""
        self.broker.close()
        for each in list(self.running.values()):
            each.is_over = True
            each.scope.cancel()

    def give_back(self) -> None:
        """As one that does not ask what can move: everything is handed back, now."""
        for each in list(self.running.values()):
            each.say("error", NOTICE)
            each.scope.cancel()

    def drain(self) -> None:
        """Its window is over: nothing new, and what can move is handed back, the rest ended."""
        self.is_draining = True
        for subscription in list(self.broker.subscriptions):
            if subscription.subject.startswith("infera.req."):
                subscription.close()
        for each in list(self.running.values()):
            if each.is_migratable:
                self.handed_back += 1
                each.say("error", NOTICE + b": window over")
            else:
                each.say("error", b"request cancelled")
            each.scope.cancel()

    # What the broker brings

    def _taken(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._take(message, message.reply, None)

    def _handed(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._take(job.message, job.message.headers.get("rs-inbox", ""), job)

    def _take(self, message: Message, inbox: str, job: Job | None) -> None:
        request = msgspec.json.decode(message.payload)
        self.asked.append((request, message.headers))
        if inbox in self.tombstones:
            if job is not None:
                job.ack()
            return
        accepts = message.headers.get("rs-accept", "").split(",")
        running = Running(
            self,
            inbox,
            bool(request.get("stream") and request.get("migratable")),
            frozenset() if self.is_old else frozenset(accepts),
        )
        self.running[inbox] = running
        self.nursery.start_soon(self._serve, running, request, job)

    def _cancelled(self, messages: Sequence[Message]) -> None:
        for message in messages:
            inbox = message.payload.decode()
            self.tombstones.add(inbox)
            if (running := self.running.get(inbox)) is not None:
                running.is_over = True
                running.scope.cancel()

    # One request

    async def _serve(self, running: Running, request: dict[str, object], job: Job | None) -> None:
        with running.scope:
            async with trio.open_nursery() as nursery:
                if "heartbeat" in running.accepts:
                    running.say("heartbeat")
                    nursery.start_soon(self._beat, running)
                await self._proxy(running, request)
                nursery.cancel_scope.cancel()
        del self.running[running.inbox]
        if job is not None:
            job.ack()

    async def _beat(self, running: Running) -> None:
        while True:
            await trio.sleep_until(running.said_at + HEARTBEAT_SECONDS)
            if trio.current_time() >= running.said_at + HEARTBEAT_SECONDS:
                running.say("still" if "still" in running.accepts else "heartbeat")

    async def _proxy(self, running: Running, request: dict[str, object]) -> None:
        try:
            stream = self.dial()
        except OSError:
            running.say(
                "error", b"engine unreachable", **({} if self.is_old else {"status": "502"})
            )
            return
        try:
            await self._converse(stream, running, request)
        except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError) as error:
            running.say("error", f"engine broke: {error}".encode())
        finally:
            stream.close()

    async def _converse(
        self, stream: MemoryStream, running: Running, request: dict[str, object]
    ) -> None:
        connection = h11.Connection(h11.CLIENT)
        await stream.send_all(self._http(connection, request))
        status = 0
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(bytes(await stream.receive_some(READ_BYTES)))
            elif isinstance(event, h11.Response):
                status = event.status_code
                if "head" in running.accepts:
                    found = {key.decode(): value.decode() for key, value in event.headers}
                    named = ("content-type", "content-encoding", "retry-after")
                    carried = {name: found[name] for name in named if name in found}
                    running.say("head", status=str(status), **carried)
            elif isinstance(event, h11.Data):
                size = self.broker.max_payload - HEADERS_BYTES
                for start in range(0, len(event.data), size):
                    running.say("data", bytes(event.data[start : start + size]))
            elif isinstance(event, h11.EndOfMessage):
                if connection.trailing_data[0]:
                    running.say("error", b"bytes after the end of the answer")
                running.say("done", status=str(status))
                return

    def _http(self, connection: h11.Connection, request: dict[str, object]) -> bytes:
        body = request.get("body")
        content = b"" if body is None else msgspec.json.encode(body)
        if isinstance(packed := request.get("body_base64"), str):
            content = base64.b64decode(packed)
        given = request.get("headers") or {}
        assert isinstance(given, dict)
        headers = [("host", "engine"), ("content-length", str(len(content)))]
        headers += [(name, value) for name, value in given.items() if name not in dict(headers)]
        asked = h11.Request(
            method=str(request.get("method", "POST")),
            target=str(request["path"]),
            headers=[*headers, ("connection", "close")],
        )
        head = connection.send(asked)
        data = connection.send(h11.Data(data=content)) if content else b""
        connection.send(h11.EndOfMessage())
        return (head or b"") + (data or b"")


def dialler(
    nursery: trio.Nursery,
    handler: Callable[[], Callable[[MemoryStream], Awaitable[None]]],
    refuses: Callable[[], bool],
) -> Dial:
    """Connections to an engine in memory."""

    def dial() -> MemoryStream:
        if refuses():
            raise ConnectionRefusedError
        near, far = pipes()
        nursery.start_soon(handler(), far)
        return near

    return dial
