"""HTTP/1.1 to workers: a pool of connections a worker, in the reactor.

A request is sent as ready bytes and answered by callbacks (`Answered`): a head, pieces of body,
then an end or a break, and nothing after that. Whatever is not HTTP, or does not fit its own
framing, is a break and never an exception: a bad status line, a bad chunk size, a wrong length,
bytes after the end.

Idle connections live shorter than the engines keep theirs (uvicorn: 5 s), are looked at before
reuse, and one that closes at once without having answered a byte is replaced once by a fresh one:
the worker closed it as idle in the very moment of reuse, which is nobody's failure (smg PR #2162,
sglang #20851).
"""

from __future__ import annotations

from collections.abc import Callable

import httptools
from attrs import define, field

from router.headers import Headers
from router.reactor import Channel, Rank, Reactor
from router.sockets import Address, Socket, TlsTarget
from router.wires.line import Answered, Direct, never

#: An idle connection used again within this time is not looked at first (a system call each).
FRESH_SECONDS = 0.1
#: A stale connection is known within a round trip. One that closes later had brought the request to
#: the worker: a second copy would use its hand-off or its rooms twice, and hide a broken worker.
STALE_SECONDS = 1.0
#: The sizes of small chunks as servers write them. Looked up, as `int` takes more for a number.
_SIZES = {b"%x" % size: size for size in range(1, 4096)}
#: Largest head of an answer.
HEAD_BYTES_MAX = 256 * 1024
#: After `[DONE]`, how long the end of the body may take before the connection is given up.
LINGER_SECONDS = 1.0


class Upstream(Direct):
    """One request on its way to a worker: the handle of whoever sent it."""

    __slots__ = ("answered", "channel", "pool", "request")

    def __init__(self, pool: Pool, request: bytes, answered: Answered) -> None:
        self.pool = pool
        self.answered = answered
        #: Kept until the first byte of the answer, for a stale connection's replacement.
        self.request: bytes | None = request
        self.channel: WorkerChannel | None = None

    def pause(self) -> None:
        """Read nothing more of the answer until `resume`."""
        if self.channel is not None:
            self.channel.pause()

    def resume(self) -> None:
        """Read on."""
        if self.channel is not None:
            self.channel.resume()

    def close(self) -> None:
        """Nobody wants the rest: close the connection, which frees the engine. Idempotent."""
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.upstream, channel.told_last = None, self
            channel.close()

    def leave(self) -> None:
        """The answer is known to be over: let its end come, and keep the connection if it does."""
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.upstream, channel.told_last = None, self
            if channel.is_open and channel.complete:
                channel.give_back()
            elif channel.is_open:
                channel.leaving_since = channel.reactor.now
                channel.pool.leaving.add(channel)
                channel.resume()
                channel.reactor.sweeper.arm(channel, channel.reactor.now + LINGER_SECONDS)


class WorkerChannel(Channel):
    """One connection to a worker: connecting, busy with one request, leaving, or idle."""

    __slots__ = (
        "_beside_bytes",
        "_between_chunks",
        "_body",
        "_head_done",
        "_headers",
        "_informational",
        "_parser",
        "_surplus",
        "_told_head",
        "bytes_in",
        "complete",
        "connect_until",
        "idle_since",
        "keep",
        "leaving_since",
        "pool",
        "reused",
        "started_at",
        "status",
        "told_last",
        "upstream",
    )

    def __init__(self, pool: Pool, sock: Socket, connect_until: float) -> None:
        self.pool = pool
        self.upstream: Upstream | None = None
        self.connect_until: float | None = connect_until
        self.idle_since: float | None = None
        self.leaving_since: float | None = None
        self.reused = False
        self.started_at = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        #: Who was told how it ended, or has left; a crash in there is theirs to hear of.
        self.told_last: Upstream | None = None
        self._forget_answer()
        super().__init__(pool.reactor, sock, Rank.WORKER, connecting=True)

    def start(self, upstream: Upstream) -> None:
        """Send a request; the connection is connecting or idle."""
        assert upstream.request is not None
        self.upstream, self.told_last = upstream, None
        upstream.channel = self
        self.started_at = self.reactor.now
        self.rank = self.pool.rank
        self.send(upstream.request)

    def give_back(self) -> None:
        """The answer is complete: idle again, or closed where the worker does not keep it."""
        spent = self._surplus or self.owes or self.pool.keep_alive_seconds <= 0
        if self.keep and not spent:
            self.reused = True
            self.idle_since = self.reactor.now
            self._forget_answer()
            self.resume()
            self.pool.idle.append(self)
            self.reactor.sweeper.arm(self, self.reactor.now + self.pool.keep_alive_seconds)
        else:
            self.close()

    def _forget_answer(self) -> None:
        self.status = 0
        self.bytes_in = 0
        self.complete = False
        self.keep = False
        self._headers: Headers = []
        self._beside_bytes = 0
        self._head_done = False
        #: The head is told, and the parser stands where a chunk begins.
        self._between_chunks = False
        self._told_head = False
        self._informational = False
        self._surplus = False

    # The reactor's callbacks

    def connected(self) -> None:
        self.connect_until = None
        if self.upstream is not None:
            self.upstream.answered.on_connected()

    def received(self, data: bytes) -> None:
        if self.idle_since is not None:
            # Nobody asked for anything: whatever it says, the connection is out of step.
            self._drop_idle()
            return
        self.bytes_in += len(data)
        if self._between_chunks and (payload := _one_chunk(data)) is not None:
            # The parser stands between two chunks, and does so again behind this one.
            if (upstream := self.upstream) is not None:
                upstream.answered.on_body(payload)
            return
        problem = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _NotPlain):
                raise  # a bug of ours, not the worker's
            problem = "the status is none, or the transfer coding not chunked"
        except httptools.HttpParserError as error:
            problem = f"not HTTP: {error}"  # llhttp's own phrases, none of the worker's
        except httptools.HttpParserUpgrade:
            problem = "the worker switched protocols unasked"
        if self._between_chunks and not data.endswith(b"\n"):
            self._between_chunks = False  # the first digits of the next size have been read, too
        if self._body:
            self._beside_bytes = 0
        elif not self.complete:
            # A head, or trailers and extensions of chunks: none of them may go on for ever.
            self._beside_bytes += len(data)
            if self._beside_bytes > HEAD_BYTES_MAX:
                problem = "the head of the answer is too large"
        if self.complete and (problem or self._surplus):
            self._surplus = True
            problem = "bytes after the end of the answer"
        self._deliver(problem)

    def ended(self) -> None:
        if self.idle_since is not None:
            self._drop_idle()
        elif self._head_done and not self._informational and self._ends_by_closing():
            self.complete = True
            self._deliver(None)
        else:
            self._break("the worker closed the connection")

    def lost(self, error: OSError) -> None:
        if self.idle_since is not None:
            self._drop_idle()
        elif self.connect_until is not None:
            self._break(f"no connection: {error}", connecting=True)
        else:
            self._break(f"connection lost: {error}")

    def closed(self) -> None:
        if self.leaving_since is not None:
            self.pool.leaving.discard(self)

    def crashed(self, error: Exception) -> None:
        upstream = self.upstream or self.told_last
        self.upstream = self.told_last = None
        self._drop_idle()
        if upstream is None:
            raise error
        upstream.channel = None
        upstream.answered.on_crash(error)

    def sweep(self, now: float) -> float | None:
        if not self.is_open:
            return None
        if self.connect_until is not None:
            if now < self.connect_until:
                return self.connect_until
            self._break("no connection in time", connecting=True)
        elif self.idle_since is not None:
            until = self.idle_since + self.pool.keep_alive_seconds
            if now < until:
                return until
            self._drop_idle()
        elif self.leaving_since is not None:
            until = self.leaving_since + LINGER_SECONDS
            if now < until:
                return until
            self.close()
        return None

    def _ends_by_closing(self) -> bool:
        framing = (b"content-length", b"transfer-encoding")
        return not any(name in framing for name, _ in self._headers)

    # What httptools reports; nothing but notes is taken here, so that no callback of ours raises

    def on_message_begin(self) -> None:
        if self.complete:
            self._surplus = True
        self._informational = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done and not self.complete:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        status = self._parser.get_status_code()
        if status < 100:
            raise _NotPlain
        for name, value in self._headers:
            if name == b"transfer-encoding" and value.lower() != b"chunked":
                raise _NotPlain
        if status < 200:
            self._informational = True
            self._headers = []
            return
        self.status = status
        self._head_done = True

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = not self.complete

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self._informational or self.complete:
            return
        self.complete = True
        self._between_chunks = False
        self.keep = self._parser.should_keep_alive()

    # Telling whoever asked

    def _deliver(self, problem: str | None) -> None:
        """Head, body, end, in this order; each may end our relation to the one who is told."""
        if (upstream := self.upstream) is not None:
            answered = upstream.answered
            if self._head_done and not self._told_head:
                self._told_head = True
                upstream.request = None
                answered.on_head(self.status, self._headers)
            if self._body:
                body, self._body = self._body, []
                if self.upstream is upstream:
                    answered.on_body(body[0] if len(body) == 1 else b"".join(body))
        self._body.clear()
        if not self.is_open:
            return
        if problem is not None:
            self._break(problem)
        elif self.complete:
            self._finish()

    def _finish(self) -> None:
        upstream, self.upstream = self.upstream, None
        self.told_last = upstream  # who is to hear of a bug on the way as well
        if self.leaving_since is not None:
            self.leaving_since = None
            self.pool.leaving.discard(self)
        self.give_back()
        if upstream is not None:
            upstream.channel = None
            upstream.answered.on_end()
        self.told_last = None

    def _break(self, detail: str, *, connecting: bool = False) -> None:
        upstream, self.upstream = self.upstream, None
        is_stale = self.reused and self.bytes_in == 0
        self.close()
        if upstream is None:
            return
        upstream.channel = None
        self.told_last = upstream
        if is_stale and self.reactor.now - self.started_at < STALE_SECONDS:
            upstream.pool.start_fresh(upstream)
        else:
            upstream.answered.on_broken(detail, connecting=connecting)
        self.told_last = None

    def _drop_idle(self) -> None:
        self.idle_since = None
        if self in self.pool.idle:
            self.pool.idle.remove(self)
        self.close()


def _one_chunk(data: bytes) -> bytes | None:
    """The payload, where a read brought exactly one small chunk, as most reads of a stream do."""
    start = data.find(b"\r\n", 1, 6)
    if len(data) - start - 4 != _SIZES.get(data[:start]) or not data.endswith(b"\r\n"):
        return None
    return data[start + 2 : -2]


class _NotPlain(Exception):
    """Stops the parser at what llhttp lets through and nobody here can read."""


@define(eq=False)
class Pool:
    """The connections to one worker. There is no limit of its own below the admission limit."""

    reactor: Reactor
    #: The `Host` header, and what is put before every path.
    authority: bytes
    base_path: bytes
    addresses: Callable[[], list[Address]]
    tls: TlsTarget | None
    connect_timeout_seconds: float
    keep_alive_seconds: float
    rank: Rank = Rank.WORKER
    #: Idle connections, the one used last at the end, so that the others may grow old and go.
    idle: list[WorkerChannel] = field(factory=list)
    #: Connections whose answer is known to be over and whose end is still to come.
    leaving: set[WorkerChannel] = field(factory=set)
    _turn: int = 0

    def send(
        self,
        method: bytes,
        target: bytes,
        lines: bytes,
        body: bytes,
        answered: Answered,
        *,
        streams: bool = False,
        movable: Callable[[], bool] = never,
        queues: bool = False,
    ) -> Upstream:
        """Send on an idle or a new connection; see `Line.send`. What only others want is unused."""
        request = b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (
            method,
            self.base_path,
            target,
            self.authority,
            lines,
            len(body),
            body,
        )
        upstream = Upstream(self, request, answered)
        channel = self._take_idle()
        if channel is None:
            self.start_fresh(upstream)
        else:
            answered.on_connected()
            channel.start(upstream)
        return upstream

    def start_fresh(self, upstream: Upstream) -> None:
        """Send on a new connection."""
        addresses = self.addresses()
        if not addresses:
            upstream.answered.on_broken("the host name is not resolved", connecting=True)
            return
        # Every attempt takes the next address; a dead one costs one attempt, not all.
        address = addresses[self._turn % len(addresses)]
        self._turn += 1
        try:
            sock = self.reactor.connect(address, self.tls)
        except OSError as error:
            upstream.answered.on_broken(f"no connection: {error}", connecting=True)
            return
        until = self.reactor.now + self.connect_timeout_seconds
        channel: WorkerChannel | None = None
        try:
            channel = WorkerChannel(self, sock, until)
            self.reactor.sweeper.arm(channel, until)
            channel.start(upstream)
        except BaseException:
            (sock if channel is None else channel).close()  # a bug of ours must not leak it
            raise

    def close(self) -> None:
        """Close the connections that nobody uses; busy ones close after their requests."""
        self.keep_alive_seconds = 0.0
        for channel in list(self.leaving):
            channel.close()
        while self.idle:
            (channel := self.idle.pop()).idle_since = None
            channel.close()

    def _take_idle(self) -> WorkerChannel | None:
        now = self.reactor.now
        while self.idle:
            channel = self.idle.pop()
            idle_since, channel.idle_since = channel.idle_since, None
            if channel.is_open and idle_since is not None:
                is_fresh = now - idle_since < FRESH_SECONDS or channel.sock.is_quiet()
                if is_fresh and not channel.has_news:
                    return channel
                channel.close()
        return None
