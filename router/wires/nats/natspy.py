"""nats-py's client, for one connection, with some things put right (2.16.0).

It must say at once that its connection is lost, answer `flush` only when everything before it has
reached the server, and be closed in bounded time whatever the other side does. Its methods with an
underscore are not promised to anybody: test_nats_bridge.py fails where another release differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

#: For closing a connection; then it is aborted.
DISPOSE_SECONDS = 0.5
#: What may come of using a connection that is ending; uvloop raises a RuntimeError then.
FAILURES = (nats.errors.Error, OSError, RuntimeError)

#: Subject, payload, headers if there are any, reply.
Listener = Callable[[str, bytes, dict[str, str] | None, str], None]


class NatsClient(Client):
    """nats-py's client, with some things put right."""

    def __init__(self) -> None:
        super().__init__()
        #: By the number of a subscription: who takes its messages, past nats-py's own queue and
        #: task for each, which cost as much again as reading a message.
        self._listeners: dict[int, Listener] = {}
        #: The connection is of no use any more; told before anything else.
        self.lost = asyncio.Event()

    @property
    def server(self) -> str:
        """Host and port of the server it is at, or has tried last."""
        found = self._current_server or (self._server_pool[-1] if self._server_pool else None)
        return found.uri.netloc.rpartition("@")[2] if found is not None else ""

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        # The original writes the PING past what is still pending, so that the PONG proves nothing
        # about it: `flush` and `drain` would return too early. And when somebody has stopped
        # waiting, it sets the result of a cancelled future, which silently ends the read loop.
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if future is not None:
            pong.add_done_callback(partial(_pass_on, future))
        self._pongs.append(pong)
        await self._send_command(b"PING\r\n")
        await self._flush_pending()

    async def listen(self, subject: str, listener: Listener) -> Subscription:
        """Subscribe, and be told at once, in the order of what comes."""

        async def on_early(msg: Msg) -> None:
            # Came before its number was known.
            listener(msg.subject, msg.data, msg.headers, msg.reply)

        subscription = await self.subscribe(subject, cb=on_early)
        self._listeners[subscription._id] = listener
        return subscription

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._listeners.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        listener = self._listeners.get(sid)
        if listener is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        listener(subject.decode(), data, await self._process_headers(headers), reply.decode())

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        # Told first, since closing may fail. What is unsent is not written any more: that would
        # wait where the peer hangs, and raise where it has gone.
        self.lost.set()
        self._pending.clear()
        self._pending_data_size = 0
        for pong in self._pongs:
            pong.cancel()
        self._pongs.clear()
        await super()._close(status, do_cbs)

    def watch_loops(self) -> None:
        """They may end without a word when something unexpected is raised in them."""
        for task in (self._reading_task, self._flusher_task):
            if task is not None:
                task.add_done_callback(self._on_loop_ended)

    def _on_loop_ended(self, task: asyncio.Task[None]) -> None:
        look_at(task)
        self.lost.set()

    def abort(self) -> None:
        """Drop the connection, whatever is still to be sent."""
        writer = getattr(self._transport, "_io_writer", None)
        if isinstance(writer, asyncio.StreamWriter):
            writer.transport.abort()


def look_at(task: asyncio.Task[None] | asyncio.Task[bool]) -> None:
    """What it raised is of no interest; not to have looked would be logged."""
    if not task.cancelled():
        task.exception()


def _pass_on(future: asyncio.Future[bool], pong: asyncio.Future[bool]) -> None:
    if pong.cancelled():
        future.cancel()
    elif not future.done():
        future.set_result(True)


async def dispose(client: NatsClient) -> None:
    """Close it without waiting for a peer that hangs. Never raises; not to be cancelled."""
    closing = asyncio.create_task(client.close())
    closing.add_done_callback(look_at)
    await asyncio.wait({closing}, timeout=DISPOSE_SECONDS)
    client.abort()
    await asyncio.wait({closing}, timeout=DISPOSE_SECONDS)
    closing.cancel()
