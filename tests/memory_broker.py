"""A message broker in memory, under virtual time: one server, and brokers that talk through it.

`MemoryServer` is what a nats-server with memory storage is to its clients: subjects with
wildcards, no-responders, a payload limit, buckets whose entries expire, work queues. `broker()`
gives a connection to it. A story takes the server away (`down`), takes one connection away (`cut`),
lets messages be lost (`lose`), makes everything late (`stall`) or silences what is kept
(`is_jetstream_silent`). What is published is delivered
when Trio gets to it, never inside `publish`. The conformance suite in test_nats_brokers.py holds
this and the real one to the same promises.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import TypeVar

import trio
from attrs import define, field

from router.waking import Waker
from router.wires.nats.broker import (
    MAX_PAYLOAD_DEFAULT,
    NO_RESPONDERS,
    QUEUE_AGE_SECONDS,
    STATUS,
    Backlog,
    BrokerAway,
    BrokerError,
    Change,
    ChangeKind,
    Interrupted,
    Message,
    NoConsumer,
    NoJetStream,
    OnChanges,
    OnJobs,
    OnLost,
    OnMessages,
    PayloadTooLarge,
    QueueFull,
    check_subject,
    size_of,
)

T = TypeVar("T")

#: For the server to answer what it is asked.
ASK_SECONDS = 5.0


@define(eq=False)
class Mishap:
    """Messages that will not arrive as they should."""

    pattern: str
    left: int = 1
    #: How many match and still arrive before the first that does not.
    after: int = 0
    #: Of lost ones, as a slow consumer: the subscription is told. Otherwise nobody is.
    told: bool = False
    #: How often it arrives, and how much too late.
    copies: int = 0
    seconds: float = 0.0


ALL_IS_WELL = Mishap("", copies=1)


@define(eq=False)
class Stored:
    """One message of a stream."""

    sequence: int
    message: Message
    #: When it is forgotten.
    until: float


@define(eq=False)
class Durable:
    """One consumer of a stream, as the server knows it."""

    subject: str
    max_deliver: int
    ack_wait_seconds: float
    max_ack_pending: int
    #: By sequence: when it was handed out, and how often.
    handed: dict[int, tuple[float, int]] = field(factory=dict)


@define(eq=False)
class Stream:
    """One work queue, as the server knows it."""

    subjects: tuple[str, ...]
    max_messages: int
    max_age_seconds: float
    #: The number of the one that was stored last.
    last: int = 0
    stored: dict[int, Stored] = field(factory=dict)
    durables: dict[str, Durable] = field(factory=dict)


@define(eq=False)
class Entries:
    """One bucket, as the server knows it: value and end of life by key."""

    ttl_seconds: float
    values: dict[str, tuple[bytes, float]] = field(factory=dict)


class MemoryServer:
    """The server, and the hands of a story on it."""

    def __init__(self) -> None:
        self.is_up = True
        self.max_payload = MAX_PAYLOAD_DEFAULT
        self.brokers: list[MemoryBroker] = []
        self.streams: dict[str, Stream] = {}
        self.buckets: dict[str, Entries] = {}
        #: A server that was started without: what is kept is refused.
        self.has_jetstream = True
        #: As a cluster without a leader: no answer of what is kept, and all else is well.
        self.is_jetstream_silent = False
        #: Everything that was ever published, for a test to look at.
        self.published: list[Message] = []
        self.names = count(1)
        self._mishaps: list[Mishap] = []
        self._queue: deque[tuple[MemoryBroker, Message]] = deque()
        self._work: deque[Callable[[], None]] = deque()
        self._is_stalled = False
        self._waker: Waker | None = None
        self._strikes_at = float("inf")

    def broker(self, *, is_connected: bool = True) -> MemoryBroker:
        """A connection, made now if the server is there."""
        broker = MemoryBroker(self)
        self.brokers.append(broker)
        if is_connected:
            self.mend(broker)
        return broker

    # What a story does to it.

    def down(self, *, forgets: bool = False) -> None:
        """The server is gone: all connections are lost. `forgets` what it had in memory."""
        self.is_up = False
        self._queue.clear()
        if forgets:
            self.streams.clear()
            self.buckets.clear()
        for broker in list(self.brokers):
            broker.lose_connection("the broker is gone")

    def up(self) -> None:
        """It is back, and so are the connections that were not cut."""
        self.is_up = True
        for broker in list(self.brokers):
            if not broker.is_cut:
                self.mend(broker)

    def cut(self, broker: MemoryBroker) -> None:
        """Lose one connection; what was on its way to or from it is lost with it."""
        broker.is_cut = True
        self._queue = deque(each for each in self._queue if each[0] is not broker)
        broker.lose_connection("the connection to the broker was lost")

    def mend(self, broker: MemoryBroker) -> None:
        """Let it connect again."""
        broker.is_cut = False
        if self.is_up and broker in self.brokers:
            broker.find_connection()

    def stall(self) -> None:
        """Nothing arrives until `go_on`, and nobody is told: a network that hangs."""
        self._is_stalled = True

    def go_on(self) -> None:
        """Everything that was held arrives."""
        self._is_stalled = False
        self.wake()

    def lose(self, pattern: str, *, times: int = 1, after: int = 0, told: bool = False) -> None:
        """Do not deliver the next messages to `pattern`; `told` to the subscriber by on_lost."""
        self._mishaps.append(Mishap(pattern, times, after, told))

    def repeat(self, pattern: str, *, after: int = 0) -> None:
        """Deliver a message to `pattern` twice, as a sender that is not sure does."""
        self._mishaps.append(Mishap(pattern, after=after, copies=2))

    def delay(self, pattern: str, seconds: float, *, after: int = 0) -> None:
        """Deliver a message to `pattern` later than those that were published after it."""
        self._mishaps.append(Mishap(pattern, after=after, copies=1, seconds=seconds))

    # What the brokers do with it.

    def take(self, broker: MemoryBroker, message: Message) -> None:
        """A message that was published."""
        self.published.append(message)
        self._queue.append((broker, message))
        self.wake()

    def later(self, work: Callable[[], None]) -> None:
        """Call it in the order of what is delivered."""
        self._work.append(work)
        self.wake()

    def wake(self) -> None:
        """Deliver when Trio gets to it."""
        if self._waker is None:
            self._waker = Waker()
            trio.lowlevel.spawn_system_task(self._deliver_whenever_woken, self._waker)
        self._waker.wake()

    async def _deliver_whenever_woken(self, waker: Waker) -> None:
        # As a thread's `run_sync_soon` would, without the pipe that wakes Trio.
        while True:
            await waker.wait()
            self._deliver()

    def _deliver(self) -> None:
        if self._is_stalled:
            return
        batches: dict[MemorySubscription, list[Message]] = {}
        while self._queue:
            broker, message = self._queue.popleft()
            self._route(broker, message, batches)
        for subscription, messages in batches.items():
            subscription.tell(messages)
        while self._work:
            self._work.popleft()()
        self.hand_out()
        self._schedule()

    def _route(
        self,
        sender: MemoryBroker,
        message: Message,
        batches: dict[MemorySubscription, list[Message]],
    ) -> None:
        interested = list(self._interested(message.subject))
        is_stored = self._store_published(sender, message, batches)
        mishap = self._find_mishap(message.subject) or ALL_IS_WELL
        for each in interested if mishap.told else ():
            each.on_lost("slow consumer: messages were dropped")
        if mishap.seconds:
            trio.lowlevel.spawn_system_task(self._come_late, sender, message, mishap.seconds)
            return
        for each in interested:
            batches.setdefault(each, []).extend([message] * mishap.copies)
        if not interested and not is_stored and message.reply:
            self._answer(batches, message.reply, b"", {STATUS: NO_RESPONDERS})

    def _store_published(
        self,
        sender: MemoryBroker,
        message: Message,
        batches: dict[MemorySubscription, list[Message]],
    ) -> bool:
        # A stream takes what is published to its subjects by whatever means, and acknowledges it
        # to the reply subject. Whoever asks for an answer of another kind there gets this first.
        for name, stream in self.streams.items():
            if any(matches(each, message.subject) for each in stream.subjects):
                sequence = self.store(stream, message)
                answer = {"stream": name, "seq": sequence}
                if message.reply and sequence is not None:
                    self._answer(batches, message.reply, json.dumps(answer).encode(), {})
                return True
        return False

    def _answer(
        self,
        batches: dict[MemorySubscription, list[Message]],
        subject: str,
        payload: bytes,
        headers: Mapping[str, str],
    ) -> None:
        for each in self._interested(subject):
            batches.setdefault(each, []).append(Message(subject, payload, headers))

    def _interested(self, subject: str) -> Iterator[MemorySubscription]:
        for broker in self.brokers:
            if broker.is_connected:
                for each in broker.subscriptions:
                    if matches(each.subject, subject):
                        yield each

    def _find_mishap(self, subject: str) -> Mishap | None:
        for mishap in self._mishaps:
            if matches(mishap.pattern, subject):
                if mishap.after:
                    mishap.after -= 1
                    continue
                mishap.left -= 1
                if not mishap.left:
                    self._mishaps.remove(mishap)
                return mishap
        return None

    async def _come_late(self, sender: MemoryBroker, message: Message, seconds: float) -> None:
        await trio.sleep(seconds)
        if self.is_up:
            self._queue.append((sender, message))
            self.wake()

    # Work queues.

    def store(self, stream: Stream, message: Message) -> int | None:
        """Its number, or None when the stream is full."""
        if len(stream.stored) >= stream.max_messages:
            return None
        stream.last += 1
        until = trio.current_time() + stream.max_age_seconds
        stream.stored[stream.last] = Stored(stream.last, message, until)
        return stream.last

    def hand_out(self) -> None:
        """Give stored messages to those who consume."""
        for broker in self.brokers:
            for each in list(broker.consumptions) if broker.is_connected else ():
                each.hand_out()

    # Time.

    def _schedule(self) -> None:
        """One timer for the next end of a life; one that strikes too early does no harm."""
        moments = [end for each in self.buckets.values() for _, end in each.values.values()]
        moments += [
            at + durable.ack_wait_seconds
            for stream in self.streams.values()
            for durable in stream.durables.values()
            for at, times in durable.handed.values()
            if times < durable.max_deliver
        ]
        moments += [
            stored.until for stream in self.streams.values() for stored in stream.stored.values()
        ]
        until = min(moments, default=float("inf"))
        if until < self._strikes_at:
            self._strikes_at = until
            trio.lowlevel.spawn_system_task(self._age, until)

    async def _age(self, until: float) -> None:
        await trio.sleep_until(until)
        if until == self._strikes_at:
            self._strikes_at = float("inf")
            self.expire()
            self.wake()

    def expire(self) -> None:
        """Forget what nobody renewed."""
        now = trio.current_time()
        for name, entries in self.buckets.items():
            for key in [key for key, (_, end) in entries.values.items() if end <= now]:
                del entries.values[key]
                self.change(name, Change(ChangeKind.EXPIRED, key))
        for stream in self.streams.values():
            for sequence in [key for key, each in stream.stored.items() if each.until <= now]:
                del stream.stored[sequence]

    def change(self, bucket: str, change: Change) -> None:
        """Tell a bucket's watchers."""
        for broker in self.brokers:
            for each in broker.watches if broker.is_connected else ():
                if each.bucket == bucket:
                    each.expect(change)


class MemoryBroker:
    """One connection to a MemoryServer."""

    def __init__(self, server: MemoryServer) -> None:
        self.server = server
        self.on_state: list[Callable[[bool], None]] = []
        self.is_cut = False
        self.is_connected = False
        #: Connections so far.
        self.lives = 0
        self.trouble = ""
        self.subscriptions: list[MemorySubscription] = []
        self.watches: list[MemoryWatch] = []
        self.consumptions: list[MemoryConsumption] = []
        #: What callbacks raised.
        self.errors: list[Exception] = []

    @property
    def max_payload(self) -> int:
        return self.server.max_payload

    def close(self) -> None:
        """As the end of its process: nothing is told to it any more, nor to it alone."""
        self.is_connected = False
        if self in self.server.brokers:
            self.server.brokers.remove(self)
        self.subscriptions.clear()
        self.watches.clear()
        self.consumptions.clear()

    def find_connection(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.lives += 1
            self._tell_state()
            for each in list(self.watches):
                each.begin()
            self.server.wake()

    def lose_connection(self, why: str) -> None:
        if self.is_connected:
            self.is_connected = False
            interested: list[MemorySubscription | MemoryWatch | MemoryConsumption]
            interested = [*self.subscriptions, *self.watches, *self.consumptions]
            for each in interested:
                self.guard(each.on_lost, why)
            self._tell_state()

    def _tell_state(self) -> None:
        for each in list(self.on_state):
            self.guard(each, self.is_connected)

    def guard(self, callback: Callable[[T], None], told: T) -> None:
        """Call what may raise."""
        try:
            callback(told)
        except Exception as error:
            self.errors.append(error)

    def need_life(self, life: int) -> None:
        if not self.is_connected or life != self.lives:
            raise Interrupted("the connection was lost before the answer came")

    def need_connection(self) -> None:
        if not self.is_connected:
            raise BrokerAway("not connected")

    def new_inbox(self) -> str:
        return f"_INBOX.memory{next(self.server.names)}"

    def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        check_subject(subject)
        self.check_size(payload, headers)
        self.need_connection()
        self.server.take(self, Message(subject, payload, dict(headers or {}), reply))

    def check_size(self, payload: bytes, headers: Mapping[str, str] | None) -> None:
        if size_of(payload, headers) > self.max_payload:
            raise PayloadTooLarge(self.max_payload)

    def subscribe(
        self, subject: str, on_messages: OnMessages, *, on_lost: OnLost
    ) -> MemorySubscription:
        check_subject(subject)
        subscription = MemorySubscription(self, subject, on_messages, on_lost)
        self.subscriptions.append(subscription)
        return subscription

    async def flush(self, seconds: float) -> bool:
        return await self.settle(seconds)

    async def settle(self, seconds: float) -> bool:
        """Wait until everything before this has been delivered."""
        if not self.is_connected:
            await trio.lowlevel.checkpoint()
            return False
        done = trio.Event()
        self.server.later(done.set)
        with trio.move_on_after(seconds) as scope:
            await done.wait()
        return not scope.cancelled_caught

    def bucket(self, name: str, *, ttl_seconds: float) -> MemoryBucket:
        return MemoryBucket(self, name, ttl_seconds)

    def work_queue(
        self,
        stream: str,
        subjects: Sequence[str],
        *,
        max_messages: int,
        max_age_seconds: float = QUEUE_AGE_SECONDS,
    ) -> MemoryWorkQueue:
        return MemoryWorkQueue(self, stream, tuple(subjects), max_messages, max_age_seconds)

    @property
    def has_jetstream(self) -> bool | None:
        return self.server.has_jetstream

    async def ask(self) -> None:
        """What a round trip to the server is: it may hang, or break."""
        self.need_connection()
        life = self.lives
        is_answered = await self.settle(ASK_SECONDS)
        if self.server.is_jetstream_silent:
            is_answered = False
            await trio.sleep(ASK_SECONDS)
        self.need_life(life)
        if not is_answered:
            raise BrokerError("no answer in time")
        if not self.server.has_jetstream:
            raise NoJetStream


@define(eq=False)
class MemorySubscription:
    """Interest in a subject."""

    broker: MemoryBroker
    subject: str
    on_messages: OnMessages
    on_lost: OnLost

    def tell(self, messages: list[Message]) -> None:
        if self in self.broker.subscriptions:
            self.broker.guard(self.on_messages, messages)

    def close(self) -> None:
        if self in self.broker.subscriptions:
            self.broker.subscriptions.remove(self)

    async def drain(self, seconds: float) -> bool:
        try:
            return await self.broker.settle(seconds)
        finally:
            self.close()


@define(eq=False)
class MemoryWatch:
    """Interest in a bucket."""

    broker: MemoryBroker
    bucket: str
    ttl_seconds: float
    on_changes: OnChanges
    on_lost: OnLost
    waiting: list[Change] = field(factory=list)

    def begin(self) -> None:
        """Tell all that is present."""
        if not self.broker.server.has_jetstream:
            return
        entries = self.broker.server.buckets.setdefault(self.bucket, Entries(self.ttl_seconds))
        self.waiting.clear()
        for key, (value, _) in entries.values.items():
            self.expect(Change(ChangeKind.PUT, key, value))
        self.expect(Change(ChangeKind.SYNCED))

    def expect(self, change: Change) -> None:
        if not self.waiting:
            self.broker.server.later(self._tell)
        self.waiting.append(change)

    def _tell(self) -> None:
        changes, self.waiting = self.waiting, []
        if changes and self in self.broker.watches and self.broker.is_connected:
            self.broker.guard(self.on_changes, changes)

    def close(self) -> None:
        if self in self.broker.watches:
            self.broker.watches.remove(self)

    async def drain(self, seconds: float) -> bool:
        try:
            return await self.broker.settle(seconds)
        finally:
            self.close()


@define(eq=False)
class MemoryBucket:
    """A bucket as one connection sees it."""

    broker: MemoryBroker
    name: str
    ttl_seconds: float

    async def put(self, key: str, value: bytes) -> None:
        check_subject(key)
        await self.broker.ask()
        server = self.broker.server
        entries = server.buckets.setdefault(self.name, Entries(self.ttl_seconds))
        entries.values[key] = (value, trio.current_time() + entries.ttl_seconds)
        server.change(self.name, Change(ChangeKind.PUT, key, value))
        server.wake()

    async def delete(self, key: str) -> None:
        check_subject(key)
        await self.broker.ask()
        server = self.broker.server
        entries = server.buckets.setdefault(self.name, Entries(self.ttl_seconds))
        if entries.values.pop(key, None) is not None:
            server.change(self.name, Change(ChangeKind.DELETED, key))

    def watch(self, on_changes: OnChanges, *, on_lost: OnLost) -> MemoryWatch:
        watch = MemoryWatch(self.broker, self.name, self.ttl_seconds, on_changes, on_lost)
        self.broker.watches.append(watch)
        if self.broker.is_connected:
            watch.begin()
        return watch


@define(eq=False)
class MemoryJob:
    """A stored message that was handed out."""

    consumption: MemoryConsumption
    number: int
    message: Message

    def ack(self) -> None:
        broker = self.consumption.queue.broker
        if broker.is_connected:
            broker.server.later(self._forget)

    def _forget(self) -> None:
        stream = self.consumption.queue.found()
        durable = stream.durables.get(self.consumption.durable)
        if durable is not None and durable.handed.pop(self.number, None) is not None:
            stream.stored.pop(self.number, None)


@define(eq=False)
class MemoryConsumption:
    """Interest in the jobs of one durable consumer."""

    queue: MemoryWorkQueue
    durable: str
    subject: str
    on_jobs: OnJobs
    on_lost: OnLost
    ack_wait_seconds: float
    max_deliver: int
    max_ack_pending: int

    def hand_out(self) -> None:
        """Take what is stored and not yet in anybody's hands."""
        if self.queue.broker.server.is_jetstream_silent:
            return
        stream = self.queue.found()
        durable = stream.durables.get(self.durable)
        if durable is None:
            durable = Durable(
                self.subject, self.max_deliver, self.ack_wait_seconds, self.max_ack_pending
            )
            stream.durables[self.durable] = durable
        wanted = durable.subject
        is_plain = "*" not in wanted and ">" not in wanted
        jobs = [
            MemoryJob(self, stored.sequence, stored.message)
            for stored in list(stream.stored.values())
            if (stored.message.subject == wanted if is_plain else _is_for(wanted, stored))
            and _take(durable, stored.sequence)
        ]
        if jobs:
            self.queue.broker.guard(self.on_jobs, jobs)

    def close(self) -> None:
        if self in self.queue.broker.consumptions:
            self.queue.broker.consumptions.remove(self)

    async def drain(self, seconds: float) -> bool:
        try:
            if self.queue.broker.server.is_jetstream_silent:
                await trio.sleep(seconds)
                return False
            return await self.queue.broker.settle(seconds)
        finally:
            self.close()


def _is_for(pattern: str, stored: Stored) -> bool:
    return matches(pattern, stored.message.subject)


def _take(durable: Durable, sequence: int) -> bool:
    now = trio.current_time()
    at, times = durable.handed.get(sequence, (float("-inf"), 0))
    is_due = at + durable.ack_wait_seconds <= now and times < durable.max_deliver
    if not is_due or (not times and len(durable.handed) >= durable.max_ack_pending):
        return False
    durable.handed[sequence] = (now, times + 1)
    return True


@define(eq=False)
class MemoryWorkQueue:
    """A work queue as one connection sees it."""

    broker: MemoryBroker
    stream: str
    subjects: tuple[str, ...]
    max_messages: int
    max_age_seconds: float

    def found(self) -> Stream:
        """The server's, made if it is missing."""
        streams = self.broker.server.streams
        made = Stream(self.subjects, self.max_messages, self.max_age_seconds)
        return streams.setdefault(self.stream, made)

    async def publish(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        check_subject(subject)
        self.broker.check_size(payload, headers)
        await self.broker.ask()
        message = Message(subject, payload, dict(headers or {}))
        if not any(matches(each, subject) for each in self.found().subjects):
            raise BrokerError(f"no stream takes {subject}")
        if self.broker.server.store(self.found(), message) is None:
            raise QueueFull("the work queue is full")
        self.broker.server.published.append(message)
        self.broker.server.wake()
        life = self.broker.lives
        await self.broker.settle(ASK_SECONDS)
        self.broker.need_life(life)

    def consume(
        self,
        durable: str,
        subject: str,
        on_jobs: OnJobs,
        *,
        on_lost: OnLost,
        ack_wait_seconds: float = 3600.0,
        max_deliver: int = 1,
        max_ack_pending: int = 1000,
    ) -> MemoryConsumption:
        check_subject(subject)
        consumption = MemoryConsumption(
            *(self, durable, subject, on_jobs, on_lost),
            *(ack_wait_seconds, max_deliver, max_ack_pending),
        )
        self.broker.consumptions.append(consumption)
        self.broker.server.wake()
        return consumption

    async def backlog(self, durable: str) -> Backlog:
        await self.broker.ask()
        stream = self.found()
        consumer = stream.durables.get(durable)
        if consumer is None:
            raise NoConsumer(f"no consumer {durable}")
        ours = [s for s in stream.stored.values() if matches(consumer.subject, s.message.subject)]
        waiting = sum(1 for each in ours if each.sequence not in consumer.handed)
        return Backlog(waiting, len(consumer.handed))

    async def last_number(self) -> int:
        await self.broker.ask()
        return self.found().last

    async def delete_consumer(self, durable: str) -> None:
        await self.broker.ask()
        self.found().durables.pop(durable, None)


@lru_cache(maxsize=4096)
def matches(pattern: str, subject: str) -> bool:
    """Whether a subscription to `pattern` gets what is published to `subject`."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(given) <= len(wanted):
            return False
        given = given[: len(wanted)]
    return len(wanted) == len(given) and all(
        one in ("*", other) for one, other in zip(wanted, given, strict=True)
    )
