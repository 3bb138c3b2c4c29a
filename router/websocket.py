"""/debug/transitions: every transition as it happens, over a WebSocket.

The connection leaves the reactor with the bytes that were read already and becomes a Trio stream,
since it is neither hot nor HTTP any more. A watcher that reads too slowly loses transitions, never
time of the router: what was lost is counted and told to it. trio-websocket is used here and
nowhere else.
"""

from __future__ import annotations

import msgspec
import trio
import trio_websocket
from attrs import define, field

from router.calls import Call
from statemachines import Edge

WATCH_PATH = "/debug/transitions"
#: Transitions that may wait for a watcher.
WAITING_MAX = 10_000
#: How long a watcher may take for its handshake, and for the last words.
HANDSHAKE_SECONDS = 10.0
MESSAGE_BYTES_MAX = 4096


class Transition(msgspec.Struct):
    """One message. `seconds` is Trio's clock: differences have a meaning, the value has none."""

    seconds: float
    machine: str
    id: str
    source: str
    fact: str
    target: str
    #: Transitions that this watcher has not been sent before this one.
    lost: int = 0


@define(eq=False)
class Watcher:
    """One WebSocket that wants to see transitions."""

    send: trio.MemorySendChannel[Transition]
    lost: int = 0


@define(eq=False)
class Feed:
    """Where the machines' listeners and the watchers meet."""

    watchers: list[Watcher] = field(factory=list)

    def publish(self, machine: str, subject_id: str, edge: Edge) -> None:
        """Show a transition to all watchers; whoever is behind misses it."""
        now = trio.current_time()
        words = edge.source.value, edge.fact, edge.target.value
        for watcher in self.watchers:
            try:
                watcher.send.send_nowait(
                    Transition(now, machine, subject_id, *words, lost=watcher.lost)
                )
                watcher.lost = 0
            except trio.WouldBlock:
                watcher.lost += 1

    async def serve(self, stream: trio.abc.HalfCloseableStream, call: Call, unread: bytes) -> None:
        """Serve one watcher until it leaves; closes the stream, also when cancelled."""
        handed_on = _Unread(stream, _request_of(call), unread)
        try:
            async with trio.open_nursery() as nursery:
                with trio.fail_after(HANDSHAKE_SECONDS):
                    request = await trio_websocket.wrap_server_stream(
                        nursery, handed_on, max_message_size=MESSAGE_BYTES_MAX
                    )
                    socket = await request.accept()
                nursery.start_soon(_wait_gone, socket, nursery.cancel_scope)
                await self._send_all(socket)
        except* (
            trio_websocket.HandshakeError,
            trio_websocket.ConnectionClosed,
            trio.BrokenResourceError,
            trio.TooSlowError,
        ):
            pass  # a watcher that went, or never was one
        finally:
            await trio.aclose_forcefully(stream)

    async def _send_all(self, socket: trio_websocket.WebSocketConnection) -> None:
        send, receive = trio.open_memory_channel[Transition](WAITING_MAX)
        watcher = Watcher(send)
        self.watchers.append(watcher)
        try:
            async for transition in receive:
                await socket.send_message(msgspec.json.encode(transition).decode())
        finally:
            self.watchers.remove(watcher)


async def _wait_gone(socket: trio_websocket.WebSocketConnection, scope: trio.CancelScope) -> None:
    """Watchers have nothing to say; reading is how their leaving is seen."""
    try:
        while True:
            await socket.get_message()
    except trio_websocket.ConnectionClosed:
        scope.cancel(reason="the watcher left")


def _request_of(call: Call) -> bytes:
    """The request as bytes again: the WebSocket library reads the handshake itself."""
    lines = b"".join([b"%b: %b\r\n" % pair for pair in call.headers])
    return b"GET %b HTTP/1.1\r\n%b\r\n" % (call.target, lines)


class _Unread(trio.abc.Stream):
    """A stream whose request, and perhaps its first frames, have been read already.

    The frames are handed on once the handshake is answered: the library keeps what it reads before
    that, and looks at it only when more comes.
    """

    def __init__(self, stream: trio.abc.Stream, request: bytes, frames: bytes) -> None:
        self._stream = stream
        self._unread = request
        self._frames = frames
        self._answered = trio.Event()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if not self._unread and self._frames:
            await self._answered.wait()
            self._unread, self._frames = self._frames, b""
        if self._unread:
            await trio.lowlevel.checkpoint()
            size = len(self._unread) if max_bytes is None else max_bytes
            found, self._unread = self._unread[:size], self._unread[size:]
            return found
        return await self._stream.receive_some(max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)
        self._answered.set()

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()
