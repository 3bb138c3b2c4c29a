"""A bucket of keys and values over JetStream, and the watch of it.

The layout is that of every NATS client: stream `KV_<bucket>`, subject `$KV.<bucket>.<key>`, a
deletion as an empty value with `KV-Operation`. The server lets entries expire without a word
(unless it was told to leave markers, nats-server 2.11), and up to a second late, so a watch counts
their time itself, and only while it hears.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from secrets import token_hex

import trio
from attrs import define, field

from router.wires.nats.broker import (
    Change,
    ChangeKind,
    Message,
    OnChanges,
    OnLost,
    check_subject,
)
from router.wires.nats.jetstream import Api, Follower, Handed, Pull, Stream, nanoseconds

_BATCH = 256
#: A consumer that nobody pulls from is deleted by the server after this.
_INACTIVE_SECONDS = 30.0
#: How often a watch looks for entries that have expired, in parts of their lives.
_LOOKS_PER_LIFE = 40
_DEDUPLICATION_SECONDS_MAX = 120.0


@define(eq=False)
class KeyValue:
    """One bucket."""

    api: Api
    name: str
    ttl_seconds: float
    stream: Stream = field(init=False)

    def __attrs_post_init__(self) -> None:
        config = {
            "name": f"KV_{self.name}",
            "subjects": [f"$KV.{self.name}.>"],
            "storage": "memory",
            "max_msgs_per_subject": 1,
            "max_age": nanoseconds(self.ttl_seconds),
            "duplicate_window": nanoseconds(min(self.ttl_seconds, _DEDUPLICATION_SECONDS_MAX)),
            "discard": "new",
            "allow_rollup_hdrs": True,
            "allow_direct": True,
            "deny_delete": True,
        }
        self.stream = Stream(self.api, f"KV_{self.name}", config)

    async def put(self, key: str, value: bytes) -> None:
        """Store, for the bucket's TTL."""
        check_subject(key)
        await self.stream.store(f"$KV.{self.name}.{key}", value)

    async def delete(self, key: str) -> None:
        """Remove."""
        check_subject(key)
        await self.stream.store(f"$KV.{self.name}.{key}", b"", {"KV-Operation": "DEL"})

    def watch(self, on_changes: OnChanges, *, on_lost: OnLost) -> Watch:
        """Tell all that is present, then every change."""
        watch = Watch(self.api, on_lost, bucket=self, on_changes=on_changes)
        self.api.spawn(watch.run)
        self.api.spawn(watch.age)
        return watch


@define(eq=False, kw_only=True)
class Watch(Follower):
    """The watch of one bucket."""

    bucket: KeyValue
    on_changes: OnChanges
    _is_synced: bool = False
    #: Of those that are present, not yet told.
    _missing: int = 0
    #: The server's clock (seconds since the epoch) minus Trio's, if it told.
    _ahead: float | None = None
    #: By key: when it expires unless it is put again.
    _ends: dict[str, float] = field(factory=dict)

    async def follow(self) -> None:
        """Over one connection."""
        self._ends.clear()
        self._is_synced = False
        await self.bucket.stream.ensure()
        stream, consumer = self.bucket.stream.name, f"baton-{token_hex(8)}"
        config = {
            "name": consumer,
            "ack_policy": "none",
            "deliver_policy": "all",
            "replay_policy": "instant",
            "mem_storage": True,
            "inactive_threshold": nanoseconds(_INACTIVE_SECONDS),
        }
        try:
            made = await self.api.call(
                f"CONSUMER.CREATE.{stream}.{consumer}", {"stream_name": stream, "config": config}
            )
            self.is_following = True
            self._missing = made.num_pending
            self._ahead = made.ts.timestamp() - trio.current_time() if made.ts else None
            if not self._missing:
                self._sync()
            # Entries that expire before they are told are counted as present, and never come.
            pull = Pull(self.api, stream, consumer, _BATCH, self._on_stored, self._sync)
            await pull.run()
        finally:
            self.api.forget_consumer(stream, consumer)

    def _sync(self) -> None:
        if not self._is_synced:
            self._is_synced = True
            self._tell([Change(ChangeKind.SYNCED)])

    def _on_stored(self, messages: Sequence[Message]) -> None:
        changes = [each for each in map(self._change_of, messages) if each is not None]
        self._missing -= len(messages)
        was_last = self._missing <= 0 or not Handed.read(messages[-1].reply).pending
        if was_last and not self._is_synced:
            self._is_synced = True
            changes.append(Change(ChangeKind.SYNCED))
        self._tell(changes)

    def _change_of(self, message: Message) -> Change | None:
        key = message.subject.removeprefix(f"$KV.{self.bucket.name}.")
        kind = kind_of(message.headers)
        if kind is ChangeKind.PUT:
            end = self._end_of(message)
            if end <= trio.current_time():
                return None
            self._ends[key] = end
            return Change(kind, key, message.payload)
        # The mark of a deletion that this watch never saw the entry of tells nothing.
        return Change(kind, key) if self._ends.pop(key, None) is not None else None

    def _end_of(self, message: Message) -> float:
        """What was there before has lived already; whatever else comes has just been stored."""
        now = trio.current_time()
        if self._is_synced or self._ahead is None:
            return now + self.bucket.ttl_seconds
        stored_at = Handed.read(message.reply).stored_at - self._ahead
        return min(stored_at, now) + self.bucket.ttl_seconds

    def _tell(self, changes: list[Change]) -> None:
        if changes and not self.is_closed:
            self.on_changes(changes)

    async def age(self) -> None:
        """As a task: tell what nobody renewed."""
        while not self.is_closed:
            await trio.sleep(self.bucket.ttl_seconds / _LOOKS_PER_LIFE)
            if self.is_following:
                now = trio.current_time()
                expired = [key for key, end in self._ends.items() if end <= now]
                for key in expired:
                    del self._ends[key]
                self._tell([Change(ChangeKind.EXPIRED, key) for key in expired])

    async def drain(self, seconds: float) -> bool:
        """There is nothing whose loss would matter: the same as `close`."""
        self.close()
        await trio.lowlevel.checkpoint()
        return True


def kind_of(headers: Mapping[str, str]) -> ChangeKind:
    """What a stored message did to its key."""
    if headers.get("KV-Operation") in ("DEL", "PURGE"):
        return ChangeKind.DELETED
    # Left by a server that was asked for markers (nats-server 2.11).
    reason = headers.get("Nats-Marker-Reason")
    if reason is None:
        return ChangeKind.PUT
    return ChangeKind.EXPIRED if reason == "MaxAge" else ChangeKind.DELETED
