"""The asyncio thread that speaks NATS: nats-py behind a portal, beside Trio.

With `natspy` the only file that imports nats, asyncio or anyio. Two deques join the threads: orders
to this one, and what is told to Trio (`Crossing`), each with one wake-up for all that gathers until
the other side gets to it, and each bounded.

A connection is used until its first trouble and then replaced, once a second, by another client;
nats-py's own reconnecting is off. It would send what it still holds to whoever is there by then
(requests whose router has long gone elsewhere), and it gives up for good after some errors of the
server. Subscriptions are kept here and made anew.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import nats.errors
import structlog
from anyio.from_thread import BlockingPortal, start_blocking_portal
from attrs import define, field
from nats.aio.subscription import Subscription as NatsSubscription

from router.wires.nats.broker import Message
from router.wires.nats.crossing import Crossing, Heard, Slot
from router.wires.nats.natspy import FAILURES, Listener, NatsClient, dispose, look_at

#: What nats-py may hold of it, unsent.
UNSENT_BYTES_MAX = 4 << 20
#: Orders carried out in one go; then other tasks have their turn.
TURN_ORDERS_MAX = 256
RECONNECT_SECONDS = 1.0
CONNECT_SECONDS = 2
#: A connection that does not answer a ping for this long is lost.
PING_SECONDS = 3.0
PONG_SECONDS = 3.0
#: At the end, for what is still to be sent.
LAST_WORDS_SECONDS = 1.0

#: The limit for waiting is elsewhere; a wait that nats-py ends would leave a trace in it.
_FOR_EVER = 86_400

_log = structlog.get_logger("baton")


class Owner(Protocol):
    """Who is told of the connection, in Trio's thread."""

    def found(self, life: int, max_payload: int) -> None:
        """It is there."""

    def lost(self) -> None:
        """It is gone."""

    def troubled(self, trouble: str) -> None:
        """Why it cannot be made, for people."""


class Order(Protocol):
    """What the asyncio thread is to do; it does so in the order given."""

    async def carry_out(self, far: _Far) -> None: ...


@define(eq=False, slots=True)
class Publish:
    life: int
    subject: str
    payload: bytes
    reply: str
    headers: dict[str, str] | None
    size: int

    async def carry_out(self, far: _Far) -> None:
        far.taken_bytes += self.size
        client = far.client
        if client is None or self.life != far.life:
            # Accepted for a connection that was lost since.
            return
        if client.pending_data_size > UNSENT_BYTES_MAX:
            await far.wait_for_room(client)
        try:
            await client.publish(self.subject, self.payload, self.reply, self.headers)
        except FAILURES as error:
            far.complain("publish", error)


@define(eq=False)
class Subscribe:
    heard: Heard

    async def carry_out(self, far: _Far) -> None:
        far.wanted[self.heard.number] = self.heard
        if far.client is not None:
            await far.subscribe(far.client, self.heard)


@define(eq=False)
class Unsubscribe:
    heard: Heard

    async def carry_out(self, far: _Far) -> None:
        far.wanted.pop(self.heard.number, None)
        theirs = far.theirs.pop(self.heard.number, None)
        if theirs is not None:
            await _unsubscribe(theirs)


@define(eq=False)
class Drain:
    heard: Heard
    slot: Slot

    async def carry_out(self, far: _Far) -> None:
        far.wanted.pop(self.heard.number, None)
        theirs = far.theirs.pop(self.heard.number, None)
        far.in_background(_drain(theirs), self.slot)


@define(eq=False)
class Flush:
    slot: Slot

    async def carry_out(self, far: _Far) -> None:
        client = far.client
        far.in_background(client.flush(_FOR_EVER) if client else _drain(None), self.slot)


async def _unsubscribe(theirs: NatsSubscription) -> None:
    try:
        await theirs.unsubscribe()
    except FAILURES:
        pass


async def _drain(theirs: NatsSubscription | None) -> None:
    if theirs is None:
        raise nats.errors.ConnectionClosedError
    # Not annotated in nats-py.
    await theirs.drain()  # type: ignore[no-untyped-call]


@define(eq=False)
class _Far:
    """The side in the asyncio thread. Nothing here is touched from Trio's, but the two deques."""

    crossing: Crossing
    owner: Owner
    servers: list[str]
    name: str
    orders: deque[Order]
    client: NatsClient | None = None
    #: Counts connections. What Trio sends is meant for the one it knows.
    life: int = 0
    wanted: dict[int, Heard] = field(factory=dict)
    theirs: dict[int, NatsSubscription] = field(factory=dict)
    taken_bytes: int = 0
    #: Set by Trio's thread, cleared here: a wake-up is on its way.
    is_woken: bool = False
    wake: asyncio.Event = field(factory=asyncio.Event)
    stop: asyncio.Event = field(factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(factory=set)
    #: Clients that are being closed.
    _disposals: set[asyncio.Task[None]] = field(factory=set)
    _has_complained: bool = False

    async def run(self) -> None:
        """Until `stop`, or cancelled. What one of its tasks raises is a bug, and raised here."""
        stop = asyncio.create_task(self.stop.wait())
        tasks = [asyncio.create_task(each) for each in (self._send(), self._stay_connected())]
        try:
            ended, _ = await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for each in ended:
                each.result()
            await self._last_words()
        finally:
            await _cancel({stop, *tasks, *self._tasks})
            if self._disposals:
                await asyncio.wait(self._disposals)

    async def _last_words(self) -> None:
        if self.client is not None:
            await self._is_done_within(self._flush_all(self.client), LAST_WORDS_SECONDS)

    async def _flush_all(self, client: NatsClient) -> None:
        while self.orders:  # noqa: ASYNC110 -- once, at the end
            await asyncio.sleep(0)
        await client.flush(_FOR_EVER)

    # What is to be sent.

    async def _send(self) -> None:
        orders = self.orders
        while True:
            await self.wake.wait()
            self.wake.clear()
            self.is_woken = False
            turn = 0
            while orders:
                await orders.popleft().carry_out(self)
                turn += 1
                if not turn % TURN_ORDERS_MAX:
                    await asyncio.sleep(0)

    async def wait_for_room(self, client: NatsClient) -> None:
        """Until the server has taken some of what is unsent, or the connection is another."""
        # nats-py has no event for it.
        while client is self.client and client.pending_data_size > UNSENT_BYTES_MAX:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def in_background(self, work: Awaitable[None], slot: Slot) -> None:
        """Do it, and tell whether it was done."""
        task = asyncio.create_task(self._answer(work, slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, work: Awaitable[None], slot: Slot) -> None:
        is_done = False
        try:
            await work
            is_done = True
        except FAILURES:
            pass
        finally:
            self.crossing.tell(partial(slot.set, is_done))

    # The connection.

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            client = NatsClient()
            try:
                await self._live(client)
            except FAILURES as error:
                self.complain("connection", error, client.server)
            finally:
                self._forget(client)
                disposal = asyncio.create_task(dispose(client))
                self._disposals.add(disposal)
                disposal.add_done_callback(self._disposals.discard)
            await asyncio.wait({disposal})
            await asyncio.sleep(began + RECONNECT_SECONDS - loop.time())

    async def _connect(self, client: NatsClient) -> None:
        try:
            await client.connect(
                self.servers,
                name=self.name,
                error_cb=partial(self._on_error, client),
                allow_reconnect=False,
                # Inside `connect` it goes on trying for ever, one second apart.
                max_reconnect_attempts=-1,
                reconnect_time_wait=1,
                connect_timeout=CONNECT_SECONDS,
                ping_interval=_FOR_EVER,
                # Unsent bytes are bounded here: above its own limit nats-py waits in `publish`, and
                # for ever if the connection is lost meanwhile.
                pending_size=0,
                skip_subject_validation=True,
            )
        except Exception as error:
            # Whatever answers there need not be a server, and nats-py raises whatever comes of it.
            raise nats.errors.Error(say(error)) from error

    async def _live(self, client: NatsClient) -> None:
        await self._connect(client)
        client.watch_loops()
        while missing := [each for each in self.wanted.values() if each.number not in self.theirs]:
            for each in missing:
                await self.subscribe(client, each)
            if client.lost.is_set():
                return
        self.life += 1
        self.client = client
        self._has_complained = False
        self.crossing.tell(partial(self.owner.found, self.life, client.max_payload))
        while not client.lost.is_set():
            if not await _is_lost_within(client, PING_SECONDS):
                await self._ping(client)

    async def _ping(self, client: NatsClient) -> None:
        seen = client.stats["in_msgs"]
        is_answered = await self._is_done_within(client.flush(_FOR_EVER), PONG_SECONDS)
        # The answer stands in line behind the messages; while these come, the server is there.
        if not is_answered and client.stats["in_msgs"] == seen:
            client.lost.set()

    async def _is_done_within(self, work: Coroutine[None, None, None], seconds: float) -> bool:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(look_at)
        await asyncio.wait({task}, timeout=seconds)
        is_done = task.done() and not task.cancelled() and task.exception() is None
        task.cancel()
        return is_done

    def _forget(self, client: NatsClient) -> None:
        self.theirs.clear()
        if self.client is client:
            self.client = None
            for each in self._tasks:
                each.cancel()
            self.crossing.tell(self.owner.lost)

    async def subscribe(self, client: NatsClient, heard: Heard) -> None:
        """Make it at this connection."""
        if heard.number in self.theirs:
            return
        try:
            self.theirs[heard.number] = await client.listen(heard.subject, self._listener(heard))
        except FAILURES as error:
            self.complain("subscribe", error)
            client.lost.set()

    def _listener(self, heard: Heard) -> Listener:
        tell = self.crossing.tell_message

        def listen(
            subject: str, payload: bytes, headers: dict[str, str] | None, reply: str
        ) -> None:
            tell(heard, Message(subject, payload, headers or {}, reply))

        return listen

    async def _on_error(self, client: NatsClient, error: Exception) -> None:
        self.complain("connection", error, client.server)

    def complain(self, place: str, error: Exception, server: str = "") -> None:
        """Once between two connections; the next attempts fail in the same way."""
        if self.client is None:
            self.crossing.tell(partial(self.owner.troubled, f"{server}: {say(error)}"))
        if not self._has_complained:
            self._has_complained = True
            told = {"place": place, "server": server or None, "error": say(error)}
            self.crossing.tell(partial(_log.warning, "nats_error", **told))


def say(error: Exception) -> str:
    """For people who have to find out what is wrong with a server or with its address."""
    # nats-py 2.16 knows the server's words in another spelling than servers write them.
    is_named = isinstance(error, nats.errors.AuthorizationError)
    if is_named or "authorization violation" in str(error).lower():
        return "it refuses the user, the password or the token, or wants one"
    if isinstance(error, socket.gaierror):
        return f"its name leads nowhere ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return str(error) if type(error) is nats.errors.Error else repr(error)


async def _is_lost_within(client: NatsClient, seconds: float) -> bool:
    try:
        await asyncio.wait_for(client.lost.wait(), seconds)
    except TimeoutError:
        return False
    return True


async def _cancel(tasks: set[asyncio.Task[None] | asyncio.Task[bool]]) -> None:
    """Cancel until they have ended. Once is not enough: `asyncio.wait_for`, on which nats-py
    rests, drops a cancellation that comes when what it waits for has just failed (Python 3.11)."""
    while pending := {each for each in tasks if not each.done()}:
        for each in pending:
            each.cancel()
        await asyncio.wait(pending, timeout=0.1)
    for each in tasks:
        look_at(each)


class NatsThread:
    """The thread, as Trio's sees it."""

    def __init__(self, servers: list[str], name: str, crossing: Crossing, owner: Owner) -> None:
        self.orders: deque[Order] = deque()
        self._make_far = partial(_Far, crossing, owner, servers, name, self.orders)
        self._crossing = crossing
        self._far: _Far | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scope: AbstractContextManager[BlockingPortal] | None = None
        self._portal: BlockingPortal | None = None

    @property
    def taken_bytes(self) -> int:
        """Of all that was ever to be published, what is no longer waiting here."""
        return self._far.taken_bytes if self._far is not None else 0

    def start(self, on_failed: Callable[[Exception], None]) -> None:
        """Begin. Waits for the thread: not for Trio's. `on_failed` is a bug, told in Trio's."""
        # uvloop halves what a message costs here; it is there where it can be installed.
        options = {"use_uvloop": find_spec("uvloop") is not None}
        self._scope = start_blocking_portal("asyncio", options, name="nats")
        self._portal = self._scope.__enter__()
        self._portal.call(self._begin)
        self._portal.start_task_soon(self._run, on_failed)

    async def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._crossing.call_soon = self._loop.call_soon
        self._far = self._make_far()
        self._wake()

    async def _run(self, on_failed: Callable[[Exception], None]) -> None:
        assert self._far is not None
        try:
            await self._far.run()
        except Exception as error:
            self._crossing.tell(partial(on_failed, error))

    def send_off(self, order: Order) -> None:
        """Carry it out, after all that was sent off before."""
        self.orders.append(order)
        self._wake()

    def _wake(self) -> None:
        far, loop = self._far, self._loop
        if far is not None and loop is not None and not far.is_woken:
            far.is_woken = True
            try:
                loop.call_soon_threadsafe(far.wake.set)
            except RuntimeError:
                # The thread has ended; so has everything it was to do.
                self.orders.clear()

    def stop(self) -> None:
        """End it, and wait for that: not for Trio's thread. No longer than LAST_WORDS_SECONDS
        and what closing a connection takes."""
        scope, portal, far = self._scope, self._portal, self._far
        if scope is None or portal is None:
            return
        try:
            if far is not None:
                portal.call(far.stop.set)
        finally:
            scope.__exit__(None, None, None)
