"""The line to a worker behind NATS, and what all such lines of a router share.

A request is one message to the worker's subject, its answer are messages to a reply subject of its
own. There is no connection to one worker: that nobody listens is said by the server at once, and
everything else by the frames or by their absence (`router.wires.nats.sent`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
from attrs import define, field

from router.reactor import Rank, Reactor
from router.wires.line import Answered, never
from router.wires.nats.broker import Broker
from router.wires.nats.inbox import Inbox
from router.wires.nats.protocol import Names, write_request
from router.wires.nats.queueing import STORED_MAX, Queueing
from router.wires.nats.sent import NatsSent
from router.wires.nats.silence import Peer

#: At the very end, how long the broker may take for the last cancels.
FLUSH_SECONDS = 2.0


def _nothing() -> None:
    pass


@define(eq=False)
class NatsWire:
    """Everything that the lines of one router have in common.

    `spawn` starts a background task; it is used only where there is an admission limit
    (`pending_max`, requests a worker; 0 is none). `connect_seconds`: how long a request waits for a
    broker that is away.
    """

    broker: Broker
    reactor: Reactor
    spawn: Callable[[Callable[[], Awaitable[object]]], None]
    names: Names = field(factory=Names)
    pending_max: int = 0
    connect_seconds: float = 5.0
    #: Called for each answer of which something may be lost on its way, for the metrics.
    missed: Callable[[], None] = _nothing
    inbox: Inbox = field(init=False)
    queueing: Queueing | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.inbox = Inbox(self.broker, self.reactor, self.connect_seconds, self.missed)
        if self.pending_max:
            queue = self.broker.work_queue(
                self.names.stream, [self.names.requests], max_messages=STORED_MAX
            )
            self.queueing = Queueing(self.inbox, queue, self.pending_max, self.spawn)

    async def start(self) -> None:
        """Subscribe to replies; before the first request. The broker may still be away."""
        self.inbox.start()
        await trio.lowlevel.checkpoint()

    def line(self, worker_id: str, *, is_prefill: bool = False) -> NatsLine:
        """The way to one worker."""
        rank = Rank.PREFILL if is_prefill else Rank.WORKER
        return NatsLine(
            self, worker_id, self.names.request(worker_id), self.names.cancel(worker_id), rank
        )

    def lose_worker(self, worker_id: str) -> None:
        """It has gone without a word: what waits for it in the work queue goes elsewhere."""
        with self.reactor.batch():
            self.inbox.lose_worker(self.names.cancel(worker_id), "the worker's entry has expired")

    async def flush(self) -> None:
        """At the end: what was cancelled is told to its workers. Takes FLUSH_SECONDS at most."""
        await self.inbox.cancels.flush(FLUSH_SECONDS)

    def close(self) -> None:
        """Hear nothing more. Idempotent; the broker is its owner's."""
        if self.queueing is not None:
            self.queueing.close()
        self.inbox.close()


@define(eq=False)
class NatsLine:
    """The way to one worker; see `Line`."""

    wire: NatsWire
    worker_id: str
    subject: str
    cancel_subject: str
    rank: Rank
    peer: Peer = field(factory=Peer)

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
    ) -> NatsSent:
        """Publish a request; see `Line.send`."""
        wire = self.wire
        sent = NatsSent(
            wire.inbox,
            answered,
            self.cancel_subject,
            streams=streams,
            is_cold=not queues,
            rank=self.rank,
            peer=self.peer,
        )
        limit = wire.broker.max_payload
        if len(body) > limit:
            sent.meet_limit(limit)  # found out before all of it is copied
            return sent
        payload = write_request(
            method, target, lines, body, stream=streams, migratable=streams and movable()
        )
        if wire.queueing is None:
            wire.inbox.publish(sent, self.subject, payload)
        elif queues:
            wire.queueing.submit(sent, self.worker_id, self.subject, payload)
        else:
            wire.queueing.knock(sent, self.worker_id, self.subject, payload)
        return sent

    def close(self) -> None:
        """Nothing new will be sent; what runs belongs to its request."""
        if self.wire.queueing is not None:
            self.wire.queueing.forget(self.worker_id)
