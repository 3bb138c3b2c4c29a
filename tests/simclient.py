"""A small HTTP client for the simulated engine on in-memory streams.

It reports how an answer ended, which is what the tests of faults are about, and never hides a
byte: what does not parse is in `raw`.
"""

import json
from collections.abc import Mapping
from typing import Literal

import h11
import trio
import trio.testing
from attrs import define, field

from router.sim import SimEngine

Stream = trio.abc.HalfCloseableStream
Ending = Literal["complete", "cut", "malformed", "silent"]


@define(eq=False)
class Heard:
    """An answer as the client got it."""

    status: int = 0
    headers: dict[str, str] = field(factory=dict)
    body: bytes = b""
    raw: bytes = b""
    ending: Ending = "silent"
    seconds: float = 0.0
    arrivals: list[float] = field(factory=list)

    @property
    def json(self) -> dict[str, object]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    @property
    def events(self) -> list[bytes]:
        """The data of every complete event."""
        parts = self.body.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
        lines = [line for part in parts for line in part.split(b"\n")]
        return [line[6:] for line in lines if line.startswith(b"data: ")]

    @property
    def chunks(self) -> list[dict[str, object]]:
        return [json.loads(event) for event in self.events if event != b"[DONE]"]

    @property
    def is_done(self) -> bool:
        return self.events[-1:] == [b"[DONE]"]

    @property
    def text(self) -> str:
        return "".join(_text_of(choice) for chunk in self.chunks for choice in _choices(chunk))

    @property
    def ids(self) -> list[int]:
        return [
            id_
            for chunk in self.chunks
            for choice in _choices(chunk)
            for id_ in choice.get("token_ids") or ()
        ]

    @property
    def finish(self) -> str | None:
        found = [
            choice["finish_reason"]
            for chunk in self.chunks
            for choice in _choices(chunk)
            if choice.get("finish_reason")
        ]
        return found[-1] if found else None


def _choices(chunk: Mapping[str, object]) -> list[dict]:  # type: ignore[type-arg]  # any JSON
    choices = chunk.get("choices") or []
    assert isinstance(choices, list)
    return choices


def _text_of(choice: dict) -> str:  # type: ignore[type-arg]  # any JSON
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("delta", {}).get("content") or "")


@define(eq=False)
class Client:
    """One connection to an engine."""

    stream: Stream
    _parser: h11.Connection = field(factory=lambda: h11.Connection(h11.CLIENT))

    async def ask(
        self,
        path: str,
        body: object = None,
        *,
        method: str = "",
        headers: Mapping[str, str] | None = None,
        patience: float = 100.0,
    ) -> Heard:
        """Send a request and listen until the answer ends or `patience` is over."""
        await self.send(path, body, method=method, headers=headers)
        return await self.listen(patience)

    async def send(
        self,
        path: str,
        body: object = None,
        *,
        method: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        shown = {"host": "sim", "content-length": str(len(data))}
        shown |= {"content-type": "application/json"} | dict(headers or {})
        request = h11.Request(
            method=method or ("GET" if body is None else "POST"),
            target=path,
            headers=list(shown.items()),
        )
        if self._parser.our_state is not h11.IDLE:
            self._parser.start_next_cycle()
        sent = self._parser.send(request) or b""
        sent += self._parser.send(h11.Data(data=data)) or b""
        sent += self._parser.send(h11.EndOfMessage()) or b""
        await self.stream.send_all(sent)

    async def listen(self, patience: float = 100.0) -> Heard:
        heard = Heard()
        began = trio.current_time()
        with trio.move_on_after(patience):
            await self._listen(heard, began)
        heard.seconds = trio.current_time() - began
        return heard

    async def _listen(self, heard: Heard, began: float) -> None:
        is_at_end = False
        while True:
            try:
                event = self._parser.next_event()
            except h11.RemoteProtocolError:
                heard.ending = "cut" if is_at_end else "malformed"
                return
            if event is h11.NEED_DATA:
                try:
                    data = bytes(await self.stream.receive_some(65536))
                except trio.BrokenResourceError:
                    heard.ending = "cut"
                    return
                heard.raw += data
                is_at_end = not data
                self._parser.receive_data(data)
            elif isinstance(event, h11.Response):
                heard.status = event.status_code
                heard.headers = {k.decode(): v.decode() for k, v in event.headers}
            elif isinstance(event, h11.Data):
                heard.body += bytes(event.data)
                heard.arrivals.append(trio.current_time() - began)
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                heard.ending = "complete" if isinstance(event, h11.EndOfMessage) else "cut"
                return

    async def is_closed(self, patience: float = 100.0) -> bool:
        """Whether the engine closes the connection within `patience`."""
        with trio.move_on_after(patience):
            try:
                return await self.stream.receive_some(1) == b""
            except trio.BrokenResourceError:
                return True
        return False


def connect(engine: SimEngine, nursery: trio.Nursery) -> Client:
    """Open a connection to an engine; it is served in `nursery`."""
    ours, theirs = trio.testing.memory_stream_pair()
    nursery.start_soon(engine.serve_connection, theirs)
    return Client(ours)
