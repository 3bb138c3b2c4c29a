"""An engine that says the right thing at chosen moments, for plans that permute moments.

The simulated engine has a pace; this one has a timetable, in seconds after the plan's begin:
`event@3,cut@5` sends one more event at 3 and closes the connection at 5. What it says is what the
simulated engine of its kind says to the same request. A moment that has passed when a request
comes is now.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import h11
import msgspec
import trio
from attrs import define

from router.sim.engine import SimEngine
from router.sim.wire import chunk, head
from tests.memory import MemoryStream

READ_BYTES = 65536
STREAM_HEAD = head(
    200,
    [("content-type", "text/event-stream; charset=utf-8"), ("transfer-encoding", "chunked")],
    0.0,
)
#: Its steps: only the head; one more event; all the others and a clean end; the connection closed;
#: an error as the answer; and the events of `ODD`.
STEPS = ("head", "event", "rest", "cut", "error")


def chat(*choices: dict[str, object]) -> bytes:
    """One event of a chat."""
    body = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    return msgspec.json.encode(body | {"choices": choices})


#: Events that no simulated engine has: two choices with nothing in them.
ODD = {"two": chat({"index": 0, "delta": {}}, {"index": 1, "delta": {}})}


@define(eq=False)
class ScriptedEngine:
    """Answers probes like its simulated twin, and work by its timetable."""

    twin: SimEngine
    script: str
    begin: float
    #: What a healthy engine says to a path and a body: the data of its events.
    ask: Callable[[str, bytes], Awaitable[list[bytes]]]

    async def serve_connection(self, stream: MemoryStream) -> None:
        """Serve HTTP/1.1 until either side ends it."""
        try:
            while (found := await self._read(stream)) is not None:
                if b"completions" in found[0].target:
                    events = await self.ask(found[0].target.decode(), found[1])
                    await self._play(stream, events)
                else:
                    await self._answer_probe(stream, *found)
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            pass
        finally:
            stream.close()

    async def _read(self, stream: MemoryStream) -> tuple[h11.Request, bytes] | None:
        connection, request, body = h11.Connection(h11.SERVER), None, b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(READ_BYTES))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None
                return request, body
            elif isinstance(event, h11.ConnectionClosed):
                return None

    async def _answer_probe(self, stream: MemoryStream, request: h11.Request, body: bytes) -> None:
        method, path = request.method.decode(), request.target.decode()
        reply = self.twin.dialect.fixed(method, path, body, self.twin.situation())
        lines = [("content-type", "application/json"), ("content-length", str(len(reply.body)))]
        await stream.send_all(head(reply.status, lines, 0.0) + reply.body)

    async def _play(self, stream: MemoryStream, answer: list[bytes]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, stream, nursery.cancel_scope)
            with suppress(trio.BrokenResourceError):  # the router left in this moment
                await self._play_steps(stream, answer)
            nursery.cancel_scope.cancel(reason="answered")

    async def _play_steps(self, stream: MemoryStream, answer: list[bytes]) -> None:
        events = [b"data: " + data + b"\n\n" for data in answer]
        is_begun = False
        for step in self.script.split(","):
            name, _, moment = step.partition("@")
            await trio.sleep_until(self.begin + float(moment))
            if name == "cut":
                stream.close()
                return
            if name == "error":
                error = self.twin.dialect.error(500, "scripted")
                lines = [("content-length", str(len(error.body)))]
                await stream.send_all(head(500, lines, 0.0) + error.body)
                return
            if name == "rest":
                said, events = events, []
            elif name in ODD:
                said = [b"data: " + ODD[name] + b"\n\n"]
            else:
                said, events = events[:1], events[1:]
            body = b"" if name == "head" else b"".join(map(chunk, said))
            end = b"0\r\n\r\n" if name == "rest" else b""
            await stream.send_all((b"" if is_begun else STREAM_HEAD) + body + end)
            is_begun = True
            if name == "rest":
                return
        await trio.sleep_forever()


async def _watch(stream: MemoryStream, scope: trio.CancelScope) -> None:
    try:
        while await stream.receive_some(READ_BYTES):
            pass
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    scope.cancel(reason="the router left")
