"""A work queue over JetStream: what is stored until its one consumer has acknowledged it.

WorkQueue retention, in memory; full, it refuses what is new, because an old message that gives way
is a request that was accepted and is lost without a word. What is too old for anybody to wait for
is forgotten: a consumer that is never made takes nothing. The consumers are durable and pulled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog
import trio
from attrs import define, field

from router.wires.nats.broker import (
    Backlog,
    BrokerAway,
    Message,
    NoConsumer,
    OnJobs,
    OnLost,
    check_subject,
)
from router.wires.nats.jetstream import (
    Api,
    ApiError,
    Follower,
    Handed,
    Pull,
    Stream,
    nanoseconds,
)

_BATCH = 256

_log = structlog.get_logger("baton")


@define(eq=False)
class StoredQueue:
    """One work queue."""

    api: Api
    name: str
    subjects: tuple[str, ...]
    max_messages: int
    max_age_seconds: float
    stream: Stream = field(init=False)

    def __attrs_post_init__(self) -> None:
        config = {
            "name": self.name,
            "subjects": list(self.subjects),
            "retention": "workqueue",
            "storage": "memory",
            "discard": "new",
            "max_msgs": self.max_messages,
            "max_age": nanoseconds(self.max_age_seconds),
        }
        self.stream = Stream(self.api, self.name, config)

    async def publish(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Store."""
        await self.stream.store(subject, payload, headers)

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
    ) -> Consumption:
        """Be handed what is stored."""
        check_subject(subject)
        config = {
            "durable_name": durable,
            "filter_subject": subject,
            "ack_policy": "explicit",
            "ack_wait": nanoseconds(ack_wait_seconds),
            "max_deliver": max_deliver,
            "max_ack_pending": max_ack_pending,
            "deliver_policy": "all",
            "replay_policy": "instant",
        }
        consumption = Consumption(
            self.api, on_lost, stream=self.stream, durable=durable, config=config, on_jobs=on_jobs
        )
        self.api.spawn(consumption.run)
        return consumption

    async def backlog(self, durable: str) -> Backlog:
        """What waits there."""
        await self.stream.ensure()
        try:
            info = await self.api.call(f"CONSUMER.INFO.{self.name}.{durable}")
        except ApiError as error:
            if error.is_not_found:
                raise NoConsumer(str(error)) from None
            raise
        return Backlog(info.num_pending, info.num_ack_pending)

    async def last_number(self) -> int:
        """Of what was stored last."""
        await self.stream.ensure()
        return (await self.api.call(f"STREAM.INFO.{self.name}")).state.last_seq

    async def delete_consumer(self, durable: str) -> None:
        """Remove it."""
        try:
            await self.api.call(f"CONSUMER.DELETE.{self.name}.{durable}")
        except ApiError as error:
            if not error.is_not_found:
                raise


@define(eq=False)
class StoredJob:
    """One message of a work queue, handed out."""

    api: Api
    message: Message
    _is_acked: bool = False

    @property
    def number(self) -> int:
        """Its place in the queue of all."""
        return Handed.read(self.message.reply).number

    def ack(self) -> None:
        """Done."""
        if not self._is_acked:
            self._is_acked = True
            try:
                self.api.core.publish(self.message.reply, b"+ACK")
            except BrokerAway as error:
                # It stays in the queue; with max_deliver 1 nobody is handed it again.
                _log.warning("nats_ack_lost", error=str(error))


@define(eq=False, kw_only=True)
class Consumption(Follower):
    """The reading of one durable consumer."""

    stream: Stream
    durable: str
    config: Mapping[str, object]
    on_jobs: OnJobs
    _pull: Pull | None = None

    async def follow(self) -> None:
        """Over one connection."""
        await self.stream.ensure()
        await self._make()
        self.is_following = True
        self._pull = Pull(self.api, self.stream.name, self.durable, _BATCH, self._on_stored)
        self._pull.is_ending = self.is_ending
        await self._pull.run()

    async def _make(self) -> None:
        body = {"stream_name": self.stream.name, "config": self.config}
        try:
            await self.api.call(f"CONSUMER.DURABLE.CREATE.{self.stream.name}.{self.durable}", body)
        except ApiError:
            # One of another configuration: used as it is, if it can be.
            await self.api.call(f"CONSUMER.INFO.{self.stream.name}.{self.durable}")

    def _on_stored(self, messages: Sequence[Message]) -> None:
        if not self.is_closed:
            self.on_jobs([StoredJob(self.api, each) for each in messages])

    async def drain(self, seconds: float) -> bool:
        """Pull no more. What the last pull still brings is told; it ends by itself, soon."""
        self.is_ending = True
        if self._pull is not None:
            self._pull.is_ending = True
        try:
            if not self.api.core.is_connected:
                await trio.lowlevel.checkpoint()
                return False
            with trio.move_on_after(seconds):
                await self.ended.wait()
            return self.ended.is_set()
        finally:
            self.close()
