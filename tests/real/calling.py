"""An HTTP client for Trio that shows an answer as it comes, and how its body ended.

One connection a request, so that leaving it is leaving the engine.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import h11
import trio
from attrs import define

from tests.real.calls import CALL_SECONDS, Answer

RECEIVE_BYTES = 65536
Headers = Sequence[tuple[bytes, bytes]]


class Broken(Exception):
    """The other side ended an answer before it was complete."""


@define(eq=False)
class Coming:
    """An answer whose body is still to be received."""

    status: int
    headers: Headers
    _stream: trio.SocketStream
    _connection: h11.Connection

    @property
    def is_stream(self) -> bool:
        kind = dict(self.headers).get(b"content-type", b"")
        return kind.startswith(b"text/event-stream")

    async def receive(self) -> bytes:
        """More of the body; empty at its good end. Raises Broken."""
        event = await _next_event(self._stream, self._connection)
        return bytes(event.data) if isinstance(event, h11.Data) else b""


@contextlib.asynccontextmanager
async def calling(
    port: int, method: str, path: str, headers: Headers, body: bytes
) -> AsyncIterator[Coming]:
    """Leaving closes the connection."""
    try:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
    except OSError as error:
        raise Broken from error
    try:
        connection = h11.Connection(h11.CLIENT)
        named = (b"host", b"127.0.0.1:%d" % port), (b"content-length", b"%d" % len(body))
        request = h11.Request(method=method, target=path, headers=[*named, *headers])
        sent = [connection.send(event) for event in (request, h11.Data(body), h11.EndOfMessage())]
        with _translated():
            await stream.send_all(b"".join(part for part in sent if part))
        head = await _next_event(stream, connection)
        if not isinstance(head, h11.Response):
            raise Broken
        yield Coming(head.status_code, [*head.headers], stream, connection)
    finally:
        await trio.aclose_forcefully(stream)


async def ask(
    port: int,
    path: str,
    body: bytes,
    *,
    request_id: str = "",
    heard: Callable[[], None] = lambda: None,
) -> Answer:
    """Posts JSON and reads the answer to its end, also one that is cut; `heard` for each part."""
    headers = [(b"content-type", b"application/json")]
    if request_id:
        headers.append((b"x-request-id", request_id.encode()))
    parts, whole = [], True
    with trio.fail_after(CALL_SECONDS):
        async with calling(port, "POST", path, headers, body) as coming:
            try:
                while part := await coming.receive():
                    parts.append(part)
                    heard()
            except Broken:
                whole = False
    texts = {name.decode(): value.decode() for name, value in coming.headers}
    return Answer(coming.status, texts, b"".join(parts), whole)


async def _next_event(stream: trio.SocketStream, connection: h11.Connection) -> h11.Event:
    with _translated():
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(RECEIVE_BYTES))
        assert isinstance(event, h11.Event)
        return event


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (trio.BrokenResourceError, h11.RemoteProtocolError) as error:
        raise Broken from error
