"""What comes to the agent from NATS: requests, by subject or out of a work queue, and cancels.

A request is asked of the engine in the very callback that brings it; the engine has a queue of its
own. Whatever a message holds, it ends at most its own request: what has no usable inbox is dropped
with a line in the log, what is no request is answered with an error. One inbox is served once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import structlog
import trio
from attrs import define, field

from router.agent.audience import Audience
from router.agent.presence import wait_connected
from router.agent.proxied import Beside, Proxied
from router.agent.replies import LastFrames, Replies
from router.agent.tombstones import Tombstones
from router.wires.nats.broker import (
    Broker,
    BrokerAway,
    BrokerError,
    Job,
    Message,
    Subscription,
    WorkQueue,
    check_subject,
)
from router.wires.nats.doorbell import Doorbell
from router.wires.nats.protocol import INBOX, Names, accepted, token_of

_log = structlog.get_logger("baton")

#: Cancels kept for requests that have not come yet, and for how long: as long as the work queue
#: waits for an acknowledgement.
CANCELS_MAX = 10_000
CANCELS_SECONDS = 3600.0
#: Inboxes of requests that are over, kept while the repetitions of their cancels come (3 of them,
#: a second apart), which must not take the place of cancels that still wait for a request.
OVER_MAX = 10_000
OVER_SECONDS = 60.0
INBOX_BYTES_MAX = 512
#: Messages the work queue may hold. Full, it refuses; it never forgets what it has accepted.
QUEUE_MESSAGES_MAX = 1_000_000
#: Between two attempts to begin with a work queue that the broker does not give.
QUEUE_AGAIN_SECONDS = 1.0
#: Jobs in hand at once, and more where the admission limit is higher.
JOBS_MAX = 1000


@define(eq=False)
class Intake:
    """The subscriptions of one agent and the requests that are open."""

    broker: Broker
    names: Names
    worker_id: str
    beside: Beside
    #: Above 0, requests come out of the work queue.
    max_pending: int
    #: Names this process in its frames.
    instance: str
    open: dict[str, Proxied] = field(init=False, factory=dict)
    emptied: trio.Event = field(init=False, factory=trio.Event)
    last_frames: LastFrames = field(init=False)
    doorbell: Doorbell = field(init=False)
    #: The window of a drain is over: what comes now goes back at once.
    is_over: bool = field(init=False, default=False)
    cancelled: Tombstones = field(
        init=False, factory=lambda: Tombstones(CANCELS_MAX, CANCELS_SECONDS)
    )
    over: Tombstones = field(init=False, factory=lambda: Tombstones(OVER_MAX, OVER_SECONDS))
    _queue: WorkQueue | None = field(init=False, default=None)
    #: What was stored up to this number was not for this agent; 0 once that is behind it.
    _left_until: int = field(init=False, default=0)
    _requests: Subscription | None = field(init=False, default=None)
    _cancels: Subscription | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.last_frames = LastFrames(self.broker, self.beside.reactor)
        self.doorbell = Doorbell(self.broker)

    # Life

    async def renew_queue(self) -> None:
        """Before `begin`: have the durable consumer made anew, and know what is left over.

        An agent that was killed has left a consumer whose jobs count for as long as the queue waits
        for them, and requests that nobody waits for, or who does is better off elsewhere. Tries
        until it succeeds.
        """
        if not self.max_pending:
            await trio.lowlevel.checkpoint()
            return
        queue, is_told = self._make_queue(), False
        while True:
            await wait_connected(self.broker)
            try:
                await queue.delete_consumer(self._durable)
                self._left_until = await queue.last_number()
                return
            except (BrokerAway, BrokerError) as problem:
                if not is_told:
                    _log.warning("waits for the work queue", problem=str(problem))
                is_told = True
            await trio.sleep(QUEUE_AGAIN_SECONDS)

    def begin(self) -> None:
        """Take cancels and requests from now on, also across reconnects."""
        self.broker.on_state.append(self._state_changed)
        self.doorbell.begin()
        self._cancels = self.broker.subscribe(
            self.names.cancel(self.worker_id), self._on_cancels, on_lost=self._reporter("cancels")
        )
        if self.max_pending:
            self._queue = self._make_queue()
        self.open_door()

    @property
    def is_queued(self) -> bool:
        """Requests come out of a work queue."""
        return self._queue is not None

    def open_door(self) -> None:
        """Take requests, if it does not yet."""
        if self._requests is not None:
            return
        request = self.names.request(self.worker_id)
        if self._queue is None:
            self._requests = self.broker.subscribe(
                request, self._on_messages, on_lost=self._reporter("requests")
            )
            return
        self._requests = self._queue.consume(
            self._durable,
            request,
            self._on_jobs,
            on_lost=self._on_queue_lost,
            max_ack_pending=max(JOBS_MAX, self.max_pending),
        )

    async def count_waiting(self) -> int:
        """Requests of the work queue that were not handed out yet; raises what a broker does."""
        if self._queue is None:
            return 0
        return (await self._queue.backlog(self._durable)).pending

    async def close_door(self, seconds: float) -> None:
        """Take no more requests; those that were on their way are still taken."""
        requests, self._requests = self._requests, None
        if requests is not None:
            await requests.drain(seconds)

    async def forget_queue(self) -> None:
        """Delete the durable consumer: nobody comes back for what is sent to it."""
        if self._queue is not None:
            try:
                await self._queue.delete_consumer(self._durable)
            except (BrokerAway, BrokerError) as problem:
                _log.warning("durable consumer not deleted", problem=str(problem))

    async def wait_empty(self) -> None:
        """Until no request is open."""
        while self.open:
            self.emptied = trio.Event()
            await self.emptied.wait()

    def hand_back(self) -> None:
        """The window is over: everything open ends, and what still comes ends at once."""
        self.is_over = True
        for proxied in list(self.open.values()):
            proxied.hand_back()

    def stop(self) -> None:
        """End everything open at once, and take nothing more. Idempotent."""
        for subscription in (self._requests, self._cancels):
            if subscription is not None:
                subscription.close()
        for proxied in list(self.open.values()):
            proxied.stop()
        self.doorbell.close()
        if self._state_changed in self.broker.on_state:
            self.broker.on_state.remove(self._state_changed)

    def request_over(self, proxied: Proxied) -> None:
        """A request has reached its end."""
        inbox = proxied.replies.inbox
        if self.open.pop(inbox, None) is not None:
            self.over.put(inbox, self.beside.reactor.now)
        if not self.open:
            self.emptied.set()

    # What the broker tells

    def _on_messages(self, messages: Sequence[Message]) -> None:
        self.beside.reactor.refresh()
        for message in messages:
            self._take(message, message.headers.get(INBOX) or message.reply, None)

    def _on_jobs(self, jobs: Sequence[Job]) -> None:
        self.beside.reactor.refresh()
        left = 0
        for job in jobs:
            left += self._is_left_over(job)
            # The reply field is the broker's own here.
            self._take(job.message, job.message.headers.get(INBOX, ""), job)
        if left:
            _log.info("stored before this agent began, and not served", requests=left)

    def _on_cancels(self, messages: Sequence[Message]) -> None:
        self.beside.reactor.refresh()
        now = self.beside.reactor.now
        for message in messages:
            inbox = _read_inbox(message.payload)
            if inbox is None or self.over.has(inbox, now):
                continue
            if (proxied := self.open.get(inbox)) is not None:
                self._guard(proxied, proxied.cancel)
            else:
                self.cancelled.put(inbox, now)

    def _take(self, message: Message, inbox: str, job: Job | None) -> None:
        now = self.beside.reactor.now
        if (known := self.open.get(inbox)) is not None:
            # Handed out again, as a queue does whose consumer was made anew: the new copy is what
            # is to be acknowledged at the end.
            known.job = job or known.job
            return
        if not self._is_inbox(inbox) or self.over.has(inbox, now):
            _log.warning("request dropped", inbox=inbox[:INBOX_BYTES_MAX])
            if job is not None:
                job.ack()
            return
        replies = Replies(
            self.broker, inbox, accepted(message.headers), self.last_frames, self.instance
        )
        proxied = self.open[inbox] = Proxied(self.beside, replies, job, inbox)
        replies.audience = Audience(
            self.doorbell,
            self.beside.reactor,
            replies.are_numbers_read,
            proxied.unheard,
            partial(self._guard, proxied),
        )
        if self.cancelled.take(inbox, now):
            self._guard(proxied, proxied.cancel)
        elif job is not None and self._is_left_over(job):
            self._guard(proxied, lambda: proxied.hand_back_unasked(message.payload))
        else:
            self._guard(proxied, lambda: proxied.begin(message.payload))
            if self.is_over and not proxied.is_over:
                self._guard(proxied, proxied.hand_back)

    def _is_inbox(self, inbox: str) -> bool:
        """Whether it is a place for frames, and not one where others take them for something else.

        Clients of NATS let everybody choose the prefix of inboxes, so nothing but the server's own
        subjects and ours is excluded.
        """
        own = f"{self.names.prefix}."
        is_elsewhere = not inbox.startswith(("$", own)) or inbox.startswith(f"{own}inbox.")
        return is_elsewhere and _is_subject(inbox)

    def _is_left_over(self, job: Job) -> bool:
        """It was stored before this agent began."""
        if self._left_until and job.number > self._left_until:
            self._left_until = 0  # they come in order
        return job.number <= self._left_until

    def _on_queue_lost(self, why: str) -> None:
        # It may be made anew, and count from 1 again.
        self._left_until = 0
        _log.warning("messages may be missing", of="requests", why=why)

    def _guard(self, proxied: Proxied, call: Callable[[], None]) -> None:
        """A bug with one message of a batch must not cost the others."""
        try:
            call()
        except Exception as error:
            proxied.crashed(error)

    def _state_changed(self, is_connected: bool) -> None:
        self.beside.reactor.refresh()
        tell = Proxied.connection_found if is_connected else Proxied.connection_lost
        if is_connected:
            self.last_frames.connection_found()
        else:
            self.last_frames.connection_lost()
            self._left_until = 0
        for proxied in list(self.open.values()):
            self._guard(proxied, partial(tell, proxied))

    def _make_queue(self) -> WorkQueue:
        return self.broker.work_queue(
            self.names.stream, [self.names.requests], max_messages=QUEUE_MESSAGES_MAX
        )

    def _reporter(self, what: str) -> Callable[[str], None]:
        return lambda why: _log.warning("messages may be missing", of=what, why=why)

    @property
    def _durable(self) -> str:
        return token_of(self.worker_id)


def _read_inbox(payload: bytes) -> str | None:
    if not 0 < len(payload) <= INBOX_BYTES_MAX:
        return None
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return None


def _is_subject(inbox: str) -> bool:
    """Whether frames can be published there."""
    if len(inbox) > INBOX_BYTES_MAX or not inbox.isprintable():
        return False
    try:
        check_subject(inbox)
    except ValueError:
        return False
    return all(token and token not in ("*", ">") for token in inbox.split("."))
