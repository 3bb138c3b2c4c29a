"""The admission limit of workers behind NATS: requests wait in a work queue, up to so many.

What waits is what the broker says of a worker's consumer (stored and handed out), looked at no
more than a few times a second, plus what was sent there since. A worker that has enough refuses
as one that answers 429 does, so the next candidate is tried, for moves as well: a drain moves
many streams at once. A backlog that cannot be read refuses nobody.

A stream stores for workers that are not there as well, so that nobody is there has to be found out
otherwise: no consumer of that name was ever made, and the broker says that nobody listens at the
worker's subject for cancels, which every worker does, old ones included. Probes, which the stream
captures as well, ask for the latter before they are sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import structlog
import trio
from attrs import define, field

from router.wires.nats.broker import (
    BrokerAway,
    BrokerError,
    Interrupted,
    NoConsumer,
    PayloadTooLarge,
    QueueFull,
    WorkQueue,
)
from router.wires.nats.doorbell import Doorbell
from router.wires.nats.inbox import SETTLING_SECONDS, Inbox
from router.wires.nats.protocol import ACCEPT, ACCEPTED, INBOX, token_of
from router.wires.nats.sent import NatsSent
from router.wires.nats.untaken import put_off

#: How long a backlog that was read is believed.
BELIEVED_SECONDS = 0.2
#: Messages that the queue of all workers holds at most.
STORED_MAX = 1_000_000

_log = structlog.get_logger("baton")


@define(eq=False)
class Waiting:
    """What waits at one worker, as far as is known."""

    queue: WorkQueue
    doorbell: Doorbell
    durable: str
    cancel_subject: str
    pending_max: int
    #: Nobody is there, and never was.
    is_absent: bool = field(init=False, default=False)
    #: Without end where it could not be read.
    _count: float = field(init=False, default=0)
    _read_at: float = field(init=False, default=float("-inf"))
    #: One reads, all others wait for what it finds.
    _reading: trio.Lock = field(init=False, factory=trio.Lock)

    def is_known_full(self, now: float) -> bool:
        """It was looked at just now, and there is no room."""
        return self._is_fresh(now) and self._count >= self.pending_max

    async def take_place(self) -> bool:
        """Look if need be; True if one more may be sent, which is counted."""
        async with self._reading:
            if not self._is_fresh(trio.current_time()):
                await self._read()
        if self._count >= self.pending_max:
            return False
        self._count += 1
        return True

    def _is_fresh(self, now: float) -> bool:
        return now - self._read_at < BELIEVED_SECONDS

    async def _read(self) -> None:
        self._count, self.is_absent = float("-inf"), False
        try:
            try:
                backlog = await self.queue.backlog(self.durable)
            except NoConsumer:
                # The bell is answered before what is asked after it.
                rung = self.doorbell.ring(self.cancel_subject)
                try:
                    backlog = await self.queue.backlog(self.durable)
                finally:
                    self.is_absent = not self.doorbell.forget(rung)
            self._count, self.is_absent = backlog.pending + backlog.ack_pending, False
        except (BrokerAway, BrokerError) as error:
            _log.debug("backlog_unreadable", durable=self.durable, error=str(error))
        self._read_at = trio.current_time()


@define(eq=False)
class Queueing:
    """Puts requests into the work queue."""

    inbox: Inbox
    queue: WorkQueue
    pending_max: int
    spawn: Callable[[Callable[[], Awaitable[object]]], None]
    _waiting: dict[str, Waiting] = field(factory=dict)
    #: Since when nobody has answered the knocks at a worker.
    _unheard_since: dict[str, float] = field(factory=dict)
    _doorbell: Doorbell = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._doorbell = Doorbell(self.inbox.broker)

    def submit(self, sent: NatsSent, worker_id: str, subject: str, payload: bytes) -> None:
        """Send a request by way of the queue; how it went is told to `sent`."""
        waiting = self._waiting.get(worker_id)
        if waiting is None:
            waiting = self._waiting[worker_id] = Waiting(
                self.queue,
                self._doorbell,
                token_of(worker_id),
                sent.cancel_subject,
                self.pending_max,
            )
        if waiting.is_known_full(self.inbox.reactor.now):
            sent.meet_full_queue()
            return
        sent.is_stored = True
        self._send_soon(sent, waiting, subject, payload)

    def _send_soon(self, sent: NatsSent, waiting: Waiting, subject: str, payload: bytes) -> None:
        async def send() -> None:
            await self._send(sent, waiting, subject, payload)

        self.spawn(send)

    def knock(self, sent: NatsSent, worker_id: str, subject: str, payload: bytes) -> None:
        """Send a probe by the subject alone, unless nobody is there: a stream would keep it."""
        inbox = self.inbox
        if not inbox.is_connected:
            inbox.publish(sent, subject, payload)
            return

        async def knock() -> None:
            is_there = await self._is_heard(worker_id, sent.cancel_subject)
            if is_there:
                self._tell(sent, lambda sent: inbox.publish(sent, subject, payload))
            elif inbox.is_settling or self._is_gone(worker_id):
                self._tell(sent, NatsSent.meet_absence)
            else:
                self._tell(sent, NatsSent.meet_nobody)

        self.spawn(knock)

    async def _is_heard(self, worker_id: str, cancel_subject: str) -> bool:
        """False when the broker says that nobody listens there."""
        rung = self._doorbell.ring(cancel_subject)
        try:
            await self.queue.backlog(token_of(worker_id))
        except (BrokerAway, BrokerError):
            pass  # any answer of the broker's comes after that of the bell
        finally:
            is_heard = self._doorbell.forget(rung)
        if is_heard:
            self._unheard_since.pop(worker_id, None)
        return is_heard

    def _is_gone(self, worker_id: str) -> bool:
        """Not only between two connections, after which it takes what is stored for it."""
        now = trio.current_time()
        return now - self._unheard_since.setdefault(worker_id, now) >= SETTLING_SECONDS

    def forget(self, worker_id: str) -> None:
        """The worker has left."""
        self._waiting.pop(worker_id, None)
        self._unheard_since.pop(worker_id, None)

    def close(self) -> None:
        """Idempotent."""
        self._doorbell.close()

    async def _send(self, sent: NatsSent, waiting: Waiting, subject: str, payload: bytes) -> None:
        has_place = await waiting.take_place()
        if sent.is_over:
            return
        if waiting.is_absent and not self.inbox.is_settling:
            self._tell(sent, NatsSent.meet_nobody)
            return
        if not has_place:
            self._tell(sent, NatsSent.meet_full_queue)
            return
        # From here on it may be stored, so whoever gives it up has it cancelled.
        sent.is_published = True
        headers = {ACCEPT: ACCEPTED, INBOX: sent.reply}
        try:
            await self.queue.publish(subject, payload, headers=headers)
        except QueueFull:
            self._tell(sent, NatsSent.meet_full_queue)
        except PayloadTooLarge as error:
            limit = error.limit
            self._tell(sent, lambda sent: sent.meet_limit(limit))
        except Interrupted as error:
            # Its frames show that it was stored, or their absence that it was not.
            detail = f"not stored for sure: {error}"
            self._tell(sent, lambda sent: sent.expose(detail))
        except BrokerAway:
            again = partial(self._send_soon, sent, waiting, subject, payload)
            self._tell(sent, lambda sent: self._put_off(sent, again))
        except BrokerError as error:
            detail = f"not stored for sure: {error}"
            self._tell(sent, lambda sent: sent.miss(detail))

    def _put_off(self, sent: NatsSent, again: Callable[[], None]) -> None:
        put_off(sent)
        self.inbox.wait(sent, again)

    def _tell(self, sent: NatsSent, tell: Callable[[NatsSent], None]) -> None:
        """What a task has found out, as if the reactor had."""
        if not sent.is_over:
            with self.inbox.reactor.batch():
                self.inbox.guard(sent, tell)
