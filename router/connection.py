"""One client connection: its task, and what is served without waking it.

A call that has arrived whole is begun right where it was read: choosing a worker and sending need
no waiting. The connection's task stays parked and is woken for what does: a place under the cap
that becomes free, another try, a move, a call that is answered here, a bug. Each time it looks at
what there is and does one thing. It owns everything the connection has: when it is cancelled, the
request ends and the socket is closed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from attrs import define

from router.bugs import Bugs
from router.calls import Call
from router.errors import Refusal
from router.exchange import Exchange
from router.feed import BadFilter, Feed, Filter
from router.front import ClientChannel
from router.headers import request_id_of
from router.routes import Route, route_of
from router.websocket import WATCH_PATH, serve_watcher

AnswerLocally = Callable[[ClientChannel, Call], Awaitable[None]]


class Calls(Protocol):
    """Who serves calls."""

    channels: set[ClientChannel]
    feed: Feed
    bugs: Bugs

    @property
    def is_serving(self) -> bool:
        """False once the router is going down."""

    def begin(self, channel: ClientChannel, call: Call, route: Route) -> None:
        """Make the request, and send it if its turn has come."""

    async def advance(self, exchange: Exchange) -> bool:
        """Do what the state of the request asks of a task; False where that is nothing."""

    def may_watch(self, call: Call) -> bool:
        """Whether this call may see what goes on."""

    def end(self, exchange: Exchange) -> None:
        """The router is going down: end a request. Does not raise."""


@define(eq=False)
class Connection:
    """`answer_locally` answers whatever is not proxied."""

    channel: ClientChannel
    calls: Calls
    answer_locally: AnswerLocally

    async def serve(self) -> None:
        """Serve until the connection is closed. Closes it, also when cancelled."""
        channel = self.channel
        self.calls.channels.add(channel)
        channel.begin_call = self._begin_at_once
        try:
            while channel.is_open:
                try:
                    await self._look()
                except Exception as error:
                    self._meet_bug(error)
        finally:
            if (exchange := self._exchange) is not None:  # cancelled: the router is going down
                self.calls.end(exchange)
            self.calls.channels.discard(channel)
            channel.close()

    @property
    def _exchange(self) -> Exchange | None:
        """The request that is open on this connection."""
        watcher = self.channel.watcher
        return watcher if isinstance(watcher, Exchange) and not watcher.ticket.is_over else None

    async def _look(self) -> None:
        """Do the one thing there is to do, or wait until something has happened."""
        channel, exchange = self.channel, self._exchange
        if exchange is not None:
            if not await self.calls.advance(exchange):
                await channel.waker.wait()
        elif channel.has_call:
            await self._answer(channel.take_call())
        else:
            await channel.waker.wait()

    def _begin_at_once(self) -> bool:
        """In a callback: begin the call that has arrived, unless it is one for the task."""
        route = self._route_of(self.channel.next_in_line)
        if route is None or not self.calls.is_serving:
            return False
        self.calls.begin(self.channel, self.channel.take_call(), route)
        return True

    async def _answer(self, call: Call) -> None:
        channel, calls = self.channel, self.calls
        if not calls.is_serving:
            call.keep_alive = False  # so that a drain is not held up by idle clients
        if call.refusal is not None:
            channel.refuse(call.refusal, request_id_of(call.headers))
            channel.finish_call()
        elif call.wants_websocket and call.path == WATCH_PATH and calls.may_watch(call):
            await self._show(call)
        elif (route := self._route_of(call)) is not None:
            calls.begin(channel, call, route)
        else:
            await self.answer_locally(channel, call)
            channel.finish_call()

    async def _show(self, call: Call) -> None:
        """Let a watcher see what goes on, once it has taken all of the answers before."""
        channel = self.channel
        try:
            wanted = Filter.of_query(call.target.partition(b"?")[2].decode("latin-1"))
        except BadFilter as bad:
            channel.refuse(Refusal("bad_request", str(bad)), request_id_of(call.headers))
            channel.finish_call()
            return
        while channel.backlog_bytes and channel.is_open:
            await channel.waker.wait()
        if channel.is_open:
            stream, unread = channel.take_over()
            try:
                await serve_watcher(self.calls.feed, wanted, stream, call, unread)
            except* Exception as bugs:  # beside a cancellation, too, which goes on
                self.calls.bugs.met(bugs)

    def _route_of(self, call: Call) -> Route | None:
        """Where a call goes that is for a worker."""
        if call.method != "POST" or call.refusal is not None:
            return None
        return route_of(call.path)

    def _meet_bug(self, error: Exception) -> None:
        """End what is being served, and nothing else."""
        channel, bugs, served = self.channel, self.calls.bugs, self.channel.watcher
        was_closing = channel.closing
        if isinstance(served, Exchange):
            bugs.met_in(served, error)
        else:
            bugs.met(error)
            bugs.apologise(channel)
        if was_closing:
            channel.close()  # again, while it was ending: there may be no end of this
