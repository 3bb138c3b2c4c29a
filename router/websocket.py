"""/debug/transitions: every transition as it happens, over a WebSocket. Both of its ends.

The connection leaves the reactor with the bytes that were read already and becomes a Trio stream,
since it is neither hot nor HTTP any more. What is shown to whom is the feed's business.
trio-websocket is used here and nowhere else.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from urllib.parse import urlencode, urlsplit

import msgspec
import trio
import trio_websocket

from router.calls import Call
from router.feed import Feed, Filter, Watcher
from router.reasons import in_words

WATCH_PATH = "/debug/transitions"
#: How long a watcher may take for its handshake, and for the last words.
HANDSHAKE_SECONDS = 10.0
MESSAGE_BYTES_MAX = 4096
#: The close code of an end that is going away (RFC 6455, 7.4.1), and what we say with it.
GOING_AWAY = 1001
STOPPED = "the router has stopped"

#### The router's end


async def serve_watcher(
    feed: Feed, wanted: Filter, stream: trio.abc.HalfCloseableStream, call: Call, unread: bytes
) -> None:
    """Serve one watcher until it leaves or the router stops; closes the stream in any case."""
    handed_on = _Unread(stream, _request_of(call), unread)
    try:
        async with trio.open_nursery() as nursery:
            with trio.fail_after(HANDSHAKE_SECONDS):
                request = await trio_websocket.wrap_server_stream(
                    nursery, handed_on, max_message_size=MESSAGE_BYTES_MAX
                )
                socket = await request.accept()
            nursery.start_soon(_wait_gone, socket, nursery.cancel_scope)
            await _send_all(feed, Watcher(wanted), socket)
            await socket.aclose(GOING_AWAY, STOPPED)
            nursery.cancel_scope.cancel(reason=STOPPED)
    except* (
        trio_websocket.HandshakeError,
        trio_websocket.ConnectionClosed,
        trio.BrokenResourceError,
        trio.TooSlowError,
    ):
        pass  # a watcher that went, or never was one
    finally:
        await trio.aclose_forcefully(stream)


async def _send_all(
    feed: Feed, watcher: Watcher, socket: trio_websocket.WebSocketConnection
) -> None:
    feed.watchers.append(watcher)
    try:
        while (message := await watcher.take()) is not None:
            await socket.send_message(msgspec.json.encode(message).decode())
    finally:
        if watcher in feed.watchers:
            feed.watchers.remove(watcher)


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


#### The watcher's end


Connected = trio.SocketStream | trio.SSLStream[trio.SocketStream]


class WatchError(Exception):
    """The router cannot be watched, or no longer; the message is one line."""


class WatchRefused(Exception):
    """The router answered with an error instead."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"refused with {status}")
        self.status = status
        self.body = body


async def watch(
    url: str,
    *,
    query: dict[str, list[str]],
    admin_key: str | None,
    opened: Callable[[], None],
    show: Callable[[str], None],
) -> None:
    """Show every message of a router until it stops. Raises WatchError and WatchRefused.

    What `opened` and `show` raise comes out as it is.
    """
    stream, host, resource = await _connect(url, query)
    headers = [(b"authorization", b"Bearer " + admin_key.encode())] if admin_key else []
    problem: Exception | None = None
    try:
        async with stream, trio.open_nursery() as nursery:
            with trio.fail_after(HANDSHAKE_SECONDS):
                socket = await trio_websocket.wrap_client_stream(
                    nursery, stream, host, resource, extra_headers=headers
                )
            try:
                opened()
                while True:
                    message = await socket.get_message()
                    show(message if isinstance(message, str) else message.decode())
            except trio_websocket.ConnectionClosed:
                raise
            except Exception as error:  # the caller's; a group would hide it
                problem = error
                nursery.cancel_scope.cancel(reason="the caller has had enough")
    except* (
        trio_websocket.HandshakeError,
        trio_websocket.ConnectionClosed,
        trio.TooSlowError,
    ) as ended:
        problem = _problem_of(url, _first(ended))
    if problem is not None:
        raise problem


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _problem_of(url: str, error: BaseException) -> Exception | None:
    """What the end of a connection means for its watcher; None for a good end."""
    if isinstance(error, trio_websocket.ConnectionRejected):  # a kind of HandshakeError
        return WatchRefused(error.status_code, error.body or b"")
    if isinstance(error, trio_websocket.HandshakeError):
        return WatchError(f"{url}: no WebSocket ({type(error).__name__})")
    if isinstance(error, trio.TooSlowError):
        return WatchError(f"{url}: no answer within {HANDSHAKE_SECONDS:g} s")
    reason = error.reason if isinstance(error, trio_websocket.ConnectionClosed) else None
    if reason is not None and reason.code == GOING_AWAY:
        return None
    return WatchError(f"{url}: the connection to the router was lost")


async def _connect(url: str, query: dict[str, list[str]]) -> tuple[Connected, str, str]:
    """The connection, its Host header, and what to ask for there."""
    try:
        parts = urlsplit(url.rstrip("/"))
        host, port = parts.hostname, parts.port
    except ValueError:
        raise WatchError(f"{url}: not the URL of a router (http://HOST:PORT)") from None
    if parts.scheme not in ("http", "https") or not host:
        raise WatchError(f"{url}: not the URL of a router (http://HOST:PORT)")
    if parts.query:
        raise WatchError(
            f"{url}: filters are options (--machine, --worker, --request), not a query"
        )
    is_tls = parts.scheme == "https"
    try:
        with trio.fail_after(HANDSHAKE_SECONDS):
            stream = await _dial(host, port or (443 if is_tls else 80), is_tls=is_tls)
    except trio.TooSlowError:
        raise WatchError(f"{url}: no connection within {HANDSHAKE_SECONDS:g} s") from None
    except (OSError, trio.BrokenResourceError) as problem:
        raise WatchError(f"{url}: {in_words(problem)}") from None
    wanted = urlencode(query, doseq=True)
    path = parts.path.removesuffix(WATCH_PATH)
    return stream, parts.netloc, f"{path}{WATCH_PATH}" + (wanted and f"?{wanted}")


async def _dial(host: str, port: int, *, is_tls: bool) -> Connected:
    sock = await trio.open_tcp_stream(host, port)
    if not is_tls:
        return sock
    context = ssl.create_default_context()
    stream = trio.SSLStream(sock, context, server_hostname=host, https_compatible=True)
    try:
        # Here and not at the first byte: the library above waits for ever where this fails.
        await stream.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream
