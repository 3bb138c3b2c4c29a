"""The bridge between Trio and NATS: what a Broker is, over the asyncio thread beside it.

All of it runs in Trio's thread and none of it waits for the other one: orders go there, and what
happens there is told here in the order in which it happened. A cancelled owner still ends the
thread, in bounded time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from secrets import token_hex

import trio
from attrs import define

from router.wires.nats.broker import (
    MAX_PAYLOAD_DEFAULT,
    QUEUE_AGE_SECONDS,
    BrokerAway,
    Bucket,
    OnLost,
    OnMessages,
    PayloadTooLarge,
    WorkQueue,
    check_subject,
    size_of,
)
from router.wires.nats.crossing import Crossing, Heard, Slot
from router.wires.nats.jetstream import Api
from router.wires.nats.keyvalue import KeyValue
from router.wires.nats.thread import (
    Drain,
    Flush,
    NatsThread,
    Order,
    Publish,
    Subscribe,
    Unsubscribe,
)
from router.wires.nats.workqueue import StoredQueue

#: What may wait on its way to the other thread.
ORDERS_MAX = 65_536
WAITING_BYTES_MAX = 64 << 20
#: For the end of the thread: its last words, and closing the connection.
CLOSE_SECONDS = 4.0


class Bridge:
    """A Broker over nats-py; `run` is its life."""

    def __init__(self, servers: str, *, name: str = "baton") -> None:
        """`servers`: URLs, separated by commas. Nothing happens before `run`."""
        self.on_state: list[Callable[[bool], None]] = []
        self.is_connected = False
        self.trouble = ""
        self.max_payload = MAX_PAYLOAD_DEFAULT
        #: Connections made so far.
        self.connections = 0
        self.crossing = Crossing()
        self._thread = NatsThread(_listed(servers), name, self.crossing, self)
        self._published_bytes = 0
        self._numbers = count(1)
        self._slots: set[Slot] = set()
        self._heard: dict[int, Heard] = {}
        self._closing = trio.Event()
        #: A bug in the other thread.
        self._failure: Exception | None = None
        self._api = Api(self)

    # Its life.

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a connection until `close` or cancelled; at its end the thread is gone.

        Started as soon as the thread is there, whether or not a server is. The end takes no longer
        than CLOSE_SECONDS, cancelled or not; what was published is sent first if that is possible.
        """
        self.crossing.begin()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._thread.start, self._fail)
        try:
            async with trio.open_nursery() as nursery:
                self._api.begin(nursery)
                task_status.started()
                await self._closing.wait()
                nursery.cancel_scope.cancel("the bridge was closed")
        finally:
            self._end()
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await trio.to_thread.run_sync(self._thread.stop, abandon_on_cancel=True)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End `run`. Idempotent."""
        self._closing.set()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._closing.set()

    def _end(self) -> None:
        """Nobody is told anything any more."""
        self.is_connected = False
        for slot in self._slots:
            slot.set(False)
        for heard in self._heard.values():
            heard.is_closed = True
        self._heard.clear()

    def found(self, life: int, max_payload: int) -> None:
        """Told by the other thread: a connection is there."""
        if not self._closing.is_set():
            self.connections, self.max_payload, self.is_connected = life, max_payload, True
            self.trouble = ""
            self._tell_state()

    def lost(self) -> None:
        """Told by the other thread: it is gone."""
        if self.is_connected:
            self.is_connected = False
            for slot in self._slots:
                slot.set(False)
            for heard in list(self._heard.values()):
                self.crossing.tell_lost(heard, "the connection to the broker was lost")
            self._tell_state()

    def troubled(self, trouble: str) -> None:
        """Told by the other thread: why there is none."""
        if not self.is_connected:
            self.trouble = trouble

    def _tell_state(self) -> None:
        for each in list(self.on_state):
            self.crossing.guard(each, self.is_connected)

    # What a Broker does.

    @property
    def has_jetstream(self) -> bool | None:
        """Whether there are buckets and work queues."""
        return self._api.has_jetstream

    def new_inbox(self) -> str:
        """A subject prefix nobody else has."""
        return f"_INBOX.{token_hex(11)}"

    def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Queue a message."""
        check_subject(subject)
        if reply:
            check_subject(reply)
        size = size_of(payload, headers)
        if size > self.max_payload:
            raise PayloadTooLarge(self.max_payload)
        if not self.is_connected:
            raise BrokerAway("not connected")
        waiting_bytes = self._published_bytes - self._thread.taken_bytes
        if len(self._thread.orders) >= ORDERS_MAX or waiting_bytes + size > WAITING_BYTES_MAX:
            raise BrokerAway("too much is waiting to be sent")
        self._published_bytes += size
        copied = dict(headers) if headers else None
        self._thread.send_off(Publish(self.connections, subject, payload, reply, copied, size))

    def subscribe(
        self, subject: str, on_messages: OnMessages, *, on_lost: OnLost
    ) -> BridgeSubscription:
        """Be told of messages."""
        check_subject(subject)
        heard = Heard(next(self._numbers), subject, on_messages, on_lost)
        self._heard[heard.number] = heard
        self._thread.send_off(Subscribe(heard))
        return BridgeSubscription(self, heard)

    def unsubscribe(self, heard: Heard) -> None:
        """Tell it nothing any more."""
        if not heard.is_closed:
            heard.is_closed = True
            self._heard.pop(heard.number, None)
            self._thread.send_off(Unsubscribe(heard))

    async def flush(self, seconds: float) -> bool:
        """Wait until all that was published and subscribed has reached the server."""
        return await self.ask(Flush, seconds)

    def bucket(self, name: str, *, ttl_seconds: float) -> Bucket:
        """A bucket of JetStream."""
        return KeyValue(self._api, name, ttl_seconds)

    def work_queue(
        self,
        stream: str,
        subjects: Sequence[str],
        *,
        max_messages: int,
        max_age_seconds: float = QUEUE_AGE_SECONDS,
    ) -> WorkQueue:
        """A work queue of JetStream."""
        return StoredQueue(self._api, stream, tuple(subjects), max_messages, max_age_seconds)

    async def ask(self, order: Callable[[Slot], Order], seconds: float) -> bool:
        """Whether the other thread has done it in time. False at once while not connected."""
        if not self.is_connected:
            await trio.lowlevel.checkpoint()
            return False
        slot = Slot()
        self._slots.add(slot)
        try:
            self._thread.send_off(order(slot))
            with trio.move_on_after(seconds):
                await slot.done.wait()
            return slot.answer
        finally:
            self._slots.discard(slot)


@define(eq=False)
class BridgeSubscription:
    """The handle of one subscription."""

    _bridge: Bridge
    _heard: Heard

    def close(self) -> None:
        """End it at once."""
        self._bridge.unsubscribe(self._heard)

    async def drain(self, seconds: float) -> bool:
        """Take no more, tell what was already on its way, then close."""
        if self._heard.is_closed:
            await trio.lowlevel.checkpoint()
            return True
        try:
            return await self._bridge.ask(partial(Drain, self._heard), seconds)
        finally:
            self.close()


def _listed(servers: str) -> list[str]:
    return [each.strip() for each in servers.split(",") if each.strip()]
