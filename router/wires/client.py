"""An httpx transport over the lines to the workers, for everything that is not hot.

Probes, model lists and aborts speak httpx; their bytes travel through the same wires and the same
reactor as inference traffic, so that what a probe says of a worker is true of the path
that requests take. Stock httpx would also work, but its pool slows down with every connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

import httpx

from router.headers import Headers
from router.unpacking import NotPacked, encoding_of, unpack
from router.waking import Waker
from router.wires.line import Line, Sent
from router.worker import Worker

#: Unread bytes of an answer beyond which its worker is not read any further.
UNREAD_BYTES_HIGH = 256 * 1024
#: Where a request's extensions name its worker, and the largest body of its answer.
WORKER = "worker"
BYTES_MAX = "bytes_max"
ALWAYS: Mapping[bytes, bytes] = MappingProxyType(
    {b"accept": b"*/*", b"accept-encoding": b"identity", b"user-agent": b"baton"}
)


class WireAway(httpx.TransportError):
    """The wire itself has failed, which says nothing about the worker."""


class _Inbox(httpx.AsyncByteStream):
    """What came back of one request, until somebody reads it."""

    def __init__(self, request: httpx.Request) -> None:
        self.request = request
        self._bytes_max: float = request.extensions.get(BYTES_MAX, float("inf"))
        self._bytes = 0
        self.upstream: Sent | None = None
        self.status = 0
        self.headers: Headers = []
        self._pieces: deque[bytes] = deque()
        self._unread = 0
        self._ended = False
        self._error: httpx.TransportError | None = None
        self._waker = Waker()

    # What the wire tells

    def on_connected(self) -> None:
        pass

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self._waker.wake()

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._unread += len(data)
        self._bytes += len(data)
        if self._bytes > self._bytes_max:
            message = f"an answer of more than {self._bytes_max:g} bytes"
            self._fail(httpx.RemoteProtocolError(message, request=self.request))
        elif self._unread > UNREAD_BYTES_HIGH and self.upstream is not None:
            self.upstream.pause()
        self._waker.wake()

    def on_end(self) -> None:
        self._ended = True
        self._waker.wake()

    def on_broken(self, detail: str, *, connecting: bool) -> None:
        kind = httpx.ConnectError if connecting else httpx.RemoteProtocolError
        self._fail(kind(detail, request=self.request))

    def on_handed_back(self) -> None:
        self._fail(httpx.RemoteProtocolError("handed back", request=self.request))

    def on_full(self) -> None:
        self._fail(httpx.RemoteProtocolError("its queue is full", request=self.request))

    def on_too_large(self, limit: int) -> None:
        message = f"more than {limit} bytes"
        self._fail(httpx.LocalProtocolError(message, request=self.request))

    def on_unread(self) -> None:
        self._fail(httpx.ReadError("more waits than is kept", request=self.request))

    def on_missed(self, detail: str) -> None:
        self._fail(WireAway(detail, request=self.request))

    def on_crash(self, error: Exception) -> None:
        self._waker.throw(error)

    def _fail(self, error: httpx.TransportError) -> None:
        self._error = error
        self._waker.wake()

    # What httpx asks for

    async def wait_head(self) -> None:
        """Wait for status and headers; raises httpx.TransportError."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._waker.wait()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._unread -= len(piece)
                yield piece
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            if self.upstream is not None:
                self.upstream.resume()
            await self._waker.wait()

    async def aclose(self) -> None:
        if self.upstream is not None:
            self.upstream.close()


@asynccontextmanager
async def ask(
    transport: httpx.AsyncBaseTransport,
    method: str,
    worker: Worker,
    path: str,
    *,
    content: bytes | None = None,
    bytes_max: float = float("inf"),
    headers: Mapping[bytes, bytes] = MappingProxyType({}),
) -> AsyncIterator[httpx.Response]:
    """A request to one worker, through a `LineTransport`; raises its errors, and has no time limit.

    `path` is below the worker's base path. The answer is read by whoever enters the context; one
    that is larger than `bytes_max` is an error of the worker's. A client of httpx is not between:
    it would tell the cookies of one worker to all the others.
    """
    headers = {**ALWAYS, **headers}
    if content is not None:
        headers[b"content-type"] = b"application/json"
    request = httpx.Request(
        method,
        f"http://worker{path}",
        headers=headers,
        content=content,
        extensions={WORKER: worker, BYTES_MAX: bytes_max},
    )
    response = await transport.handle_async_request(request)
    response.request = request
    try:
        yield response
    finally:
        await response.aclose()


async def read(response: httpx.Response, *, kept_max: float = float("inf")) -> bytes:
    """The body of an answer, unpacked where it was compressed unasked; raises httpx.TransportError.

    It is read to its end; of one that is longer than `kept_max` bytes the rest is dropped. httpx
    would unpack as well, but without a bound.
    """
    body, stream = bytearray(), response.stream
    assert isinstance(stream, httpx.AsyncByteStream)
    async for piece in stream:
        if len(body) <= kept_max:
            body += piece
    encoding = encoding_of(response.headers.raw)
    if not encoding or not body:
        return bytes(body)
    try:
        return unpack(encoding, bytes(body))
    except NotPacked as error:
        raise httpx.RemoteProtocolError(str(error), request=response.request) from error


class LineTransport(httpx.AsyncBaseTransport):
    """Sends over the line to the worker that is named in a request's extensions."""

    def __init__(self, line_of: Callable[[Worker], Line], refresh: Callable[[], None]) -> None:
        self._line_of = line_of
        self._refresh = refresh

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send; returns once the head is there. Cancelling closes the connection."""
        worker = request.extensions.get(WORKER)
        if not isinstance(worker, Worker):
            raise httpx.UnsupportedProtocol("no such worker", request=request)
        body = await request.aread()
        inbox = _Inbox(request)
        self._refresh()  # a probe may be the first thing that happens in a minute
        inbox.upstream = self._line_of(worker).send(
            request.method.encode(), request.url.raw_path, _lines_of(request), body, inbox
        )
        try:
            await inbox.wait_head()
        except BaseException:
            inbox.upstream.close()
            raise
        return httpx.Response(inbox.status, headers=inbox.headers, stream=inbox)


def _lines_of(request: httpx.Request) -> bytes:
    return b"".join(
        b"%b: %b\r\n" % pair
        for pair in request.headers.raw
        if pair[0].lower() not in (b"host", b"content-length")
    )
