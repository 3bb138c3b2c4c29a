"""What the rest may ask of a message broker, whichever implementation is behind it.

Everything here is called from the Trio thread, and every callback runs in it: synchronous, with
all that one wake-up brought. A callback that raises is logged and counted by the broker, and never
takes the process with it. Nothing is delivered twice. Whatever may have been missed is told by
`on_lost`, with one exception that core NATS cannot see: what was published while nobody was
subscribed. The subscriber's own sequence numbers are the proof; `on_lost` is the hint.

Subscriptions, watches and consumers outlive the connection: made while the broker is away, or lost
with it, they are there again after it came back, without anybody's doing. So do buckets and work
queues, which a broker that keeps them in memory forgets when it is restarted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from attrs import field, frozen

#: What a broker takes until its server has said otherwise (NATS 2.x: 1 MiB).
MAX_PAYLOAD_DEFAULT = 1 << 20
#: What a work queue holds for longer is for nobody: its worker has gone, and so has who asked.
QUEUE_AGE_SECONDS = 3600.0
#: Header and value of the answer to a message that nobody was subscribed to (NATS 2.2).
STATUS = "Status"
NO_RESPONDERS = "503"

_NOT_IN_SUBJECTS = re.compile(r"[ \t\r\n\0]")
#: `NATS/1.0` and the two line ends around the headers.
_HEADER_FRAME_BYTES = 12


class BrokerAway(Exception):
    """Not connected, never connected, or more is waiting to be sent than the buffer holds."""


class Interrupted(BrokerAway):
    """The connection was lost before the answer came: the broker may have done what was asked."""


class BrokerError(Exception):
    """The broker answered that it cannot, or did not answer in time."""


class NoJetStream(BrokerError):
    """The broker keeps nothing: there are no buckets and no work queues."""

    def __init__(self) -> None:
        super().__init__("the broker has no JetStream")


class NoConsumer(BrokerError):
    """Nobody has made this consumer of a work queue, or it was deleted."""


class QueueFull(BrokerError):
    """A work queue holds all the messages it may; this one was not accepted."""


class PayloadTooLarge(Exception):
    """Headers and payload together are above what the server takes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"more than the {limit} bytes the broker takes")
        self.limit = limit


@frozen(slots=True)
class Message:
    """One message as it was delivered."""

    subject: str
    payload: bytes
    headers: Mapping[str, str] = field(factory=dict)
    #: Where an answer is awaited; empty when none is.
    reply: str = ""

    @property
    def is_no_responders(self) -> bool:
        """The server's answer that nobody is subscribed to what was asked."""
        return not self.payload and self.headers.get(STATUS) == NO_RESPONDERS


class Job(Protocol):
    """One message of a work queue, in the hands of its only consumer."""

    @property
    def message(self) -> Message:
        """What was stored. Its `reply` is the broker's, not the sender's."""

    @property
    def number(self) -> int:
        """Its place in the queue of all; what was stored later has a higher one.

        Counted from 1 in a queue that was made anew.
        """

    def ack(self) -> None:
        """Done: the queue forgets it. Idempotent; never raises; lost if the broker is away."""


class ChangeKind(StrEnum):
    PUT = "put"
    DELETED = "deleted"
    #: Nobody renewed it for as long as the bucket's entries live.
    EXPIRED = "expired"
    #: All that is in the bucket has now been told; told anew after every reconnect.
    SYNCED = "synced"


@frozen(slots=True)
class Change:
    """One change of a bucket; `key` is empty when it is the mark SYNCED."""

    kind: ChangeKind
    key: str = ""
    value: bytes = b""


@frozen(slots=True)
class Backlog:
    """What waits at one consumer of a work queue."""

    #: Stored, not yet handed out.
    pending: int
    #: Handed out, not yet acknowledged.
    ack_pending: int


OnMessages = Callable[[Sequence[Message]], None]
OnJobs = Callable[[Sequence[Job]], None]
OnChanges = Callable[[Sequence[Change]], None]
#: Messages may be missing; the text says why, for the log.
OnLost = Callable[[str], None]


class Subscription(Protocol):
    """Interest in messages, changes or jobs."""

    def close(self) -> None:
        """End it at once: nothing is told afterwards. Idempotent; never raises."""

    async def drain(self, seconds: float) -> bool:
        """Take no more, tell what was already on its way, then close.

        False when the server had not confirmed it in time; then, as when cancelled, it is closed
        all the same.
        """


class Bucket(Protocol):
    """Keys and values whose entries expire unless they are put again."""

    async def put(self, key: str, value: bytes) -> None:
        """Store, for the bucket's TTL. Raises BrokerAway, BrokerError."""

    async def delete(self, key: str) -> None:
        """Remove; a missing key is fine. Raises BrokerAway, BrokerError."""

    def watch(self, on_changes: OnChanges, *, on_lost: OnLost) -> Subscription:
        """Tell all that is present, then SYNCED, then every change.

        `on_lost` says that the view is stale from now on (the connection is gone); after it all
        that is present is told anew, then SYNCED. What is not among it has gone meanwhile, or was
        forgotten by a restarted broker: the watcher decides. Nothing expires in a stale view.
        """


class WorkQueue(Protocol):
    """Messages stored until the one consumer they are meant for has acknowledged them."""

    async def publish(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Store; returns when the broker has it.

        Raises QueueFull, PayloadTooLarge, BrokerAway, BrokerError. After Interrupted, or a
        BrokerError that is no QueueFull, as when cancelled, it may have been stored.
        """

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
    ) -> Subscription:
        """Be handed what is stored for `subject`; `durable` names the consumer at the broker.

        No more than `max_ack_pending` are handed out unacknowledged. Closing it leaves the durable
        consumer at the broker; `delete_consumer` removes that.
        """

    async def backlog(self, durable: str) -> Backlog:
        """What waits there. Raises NoConsumer, BrokerAway, BrokerError."""

    async def last_number(self) -> int:
        """Of what was stored last, by whoever and for whomever; 0 where nothing ever was.

        Raises BrokerAway, BrokerError.
        """

    async def delete_consumer(self, durable: str) -> None:
        """Remove it; missing is fine. Raises BrokerAway, BrokerError.

        What it had not acknowledged stays stored, and is handed to the next of that subject.
        """


class Core(Protocol):
    """Core NATS over one connection."""

    @property
    def is_connected(self) -> bool:
        """Between two calls of `on_state`, what the last one told."""

    @property
    def on_state(self) -> list[Callable[[bool], None]]:
        """Told when the connection is made (True) and lost (False). Add and remove freely."""

    def new_inbox(self) -> str:
        """A subject prefix nobody else has; subscribe to `f"{inbox}.*"`."""

    def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Queue a message; keeps the order, never blocks. Raises PayloadTooLarge, BrokerAway.

        While not connected it raises BrokerAway at once and nothing is kept for later. What was
        accepted in the moment the connection is lost may be delivered after the reconnect, or
        never. Characters that cannot be in a subject are a ValueError.
        """

    def subscribe(self, subject: str, on_messages: OnMessages, *, on_lost: OnLost) -> Subscription:
        """Be told of messages to `subject` (`*` one token, a last `>` one or more).

        One call of `on_messages` a wake-up, in the order in which they came.
        """


class Broker(Core, Protocol):
    """One connection to the broker, kept up for ever: lost, it is tried again every second."""

    @property
    def trouble(self) -> str:
        """Why there is no connection, for people; empty where that is not known, or there is."""

    @property
    def has_jetstream(self) -> bool | None:
        """Whether there are buckets and work queues; None while nobody has asked."""

    @property
    def max_payload(self) -> int:
        """Bytes a message may have, headers included, as the server says."""

    async def flush(self, seconds: float) -> bool:
        """Wait until all that was published and subscribed has reached the server; False if not."""

    def bucket(self, name: str, *, ttl_seconds: float) -> Bucket:
        """Made when first used (in memory, one value a key), and again when it is missing."""

    def work_queue(
        self,
        stream: str,
        subjects: Sequence[str],
        *,
        max_messages: int,
        max_age_seconds: float = QUEUE_AGE_SECONDS,
    ) -> WorkQueue:
        """Made when first used (in memory; full, it refuses), and again when it is missing.

        What nobody has acknowledged after `max_age_seconds` is forgotten. One that somebody else
        made is used as it is.
        """


def check_subject(subject: str) -> None:
    """Refuse what would end the protocol line early: a ValueError."""
    if not subject or _NOT_IN_SUBJECTS.search(subject):
        raise ValueError(f"no subject: {subject!r}")


def size_of(payload: bytes, headers: Mapping[str, str] | None) -> int:
    """Bytes as the server counts them: the payload, and the header block if there is one."""
    if not headers:
        return len(payload)
    lines = sum(len(name) + len(value.encode()) + 4 for name, value in headers.items())
    return len(payload) + _HEADER_FRAME_BYTES + lines
