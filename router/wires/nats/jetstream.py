"""JetStream as requests over core NATS: its API, streams made when needed, and pulls.

Runs in Trio, above publish and subscribe; subjects and JSON are those of nats-server 2.9 to 2.15
(`$JS.API.…`). A server that keeps streams in memory has forgotten them after a restart, so they are
made when they are first needed on a connection. Whatever follows a stream does so until the
connection is lost or the server says that its consumer is gone, and then begins anew. Reading is
by short pulls: silence beyond the end of one is a failure, and never a wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from itertools import count
from typing import Protocol

import msgspec
import structlog
import trio
from attrs import define, field, frozen

from router.wires.nats.broker import (
    STATUS,
    BrokerAway,
    BrokerError,
    Core,
    Interrupted,
    Message,
    NoJetStream,
    OnLost,
    OnMessages,
    QueueFull,
)
from router.wires.nats.protocol import UNREADABLE

#: For one answer of the API.
ASK_SECONDS = 5.0
#: How long one pull waits for messages.
PULL_SECONDS = 2.0
#: Between two attempts at what the server refuses.
RETRY_SECONDS = 1.0

#: Error codes of the API (nats-server, server/errors.json).
_NAME_IN_USE = 10058
_FULL = frozenset({10047, 10054, 10077})
_NOT_FOUND = frozenset({10014, 10059})
#: Statuses that end a pull without harm: it has expired, or there was nothing.
_PULL_ENDED = frozenset({"404", "408"})
#: Of a stream's configuration: what limits how old a message gets.
_AGES = frozenset({"max_age", "duplicate_window"})

_log = structlog.get_logger("baton")


class Connections(Core, Protocol):
    """What is needed of the connection."""

    @property
    def connections(self) -> int:
        """How many there were; what was made on an earlier one may be gone."""


class ApiError(BrokerError):
    """What the API answered."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(f"{description} ({code})")
        self.code = code

    @property
    def is_not_found(self) -> bool:
        """No such stream or consumer."""
        return self.code in _NOT_FOUND


class _Error(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _State(msgspec.Struct):
    last_seq: int = 0


class Answer(msgspec.Struct):
    """What is read of the API's answers."""

    error: _Error | None = None
    num_pending: int = 0
    num_ack_pending: int = 0
    #: Of a stream.
    state: _State = msgspec.field(default_factory=_State)
    config: dict[str, object] = msgspec.field(default_factory=dict)
    #: The server's time as it answered; of consumers since nats-server 2.10.
    ts: datetime | None = None


@define(eq=False)
class _Asked:
    done: trio.Event = field(factory=trio.Event)
    answer: Message | None = None


@define(eq=False)
class Api:
    """Requests, and the tasks of what follows."""

    core: Connections
    #: What the server has shown when it was last asked.
    has_jetstream: bool | None = None
    _nursery: trio.Nursery | None = None
    _early: list[Callable[[], Awaitable[None]]] = field(factory=list)
    _inbox: str = ""
    _numbers: count[int] = field(factory=count)
    _asked: dict[str, _Asked] = field(factory=dict)

    def begin(self, nursery: trio.Nursery) -> None:
        """Run in it what follows."""
        self._nursery = nursery
        for each in self._early:
            nursery.start_soon(each)
        self._early.clear()

    def spawn(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run it for as long as the connection is kept."""
        if self._nursery is None:
            self._early.append(work)
        else:
            self._nursery.start_soon(work)

    async def wait_connected(self) -> None:
        """Wait until there is a connection."""
        while not self.core.is_connected:
            changed = trio.Event()

            def on_state(_: bool, changed: trio.Event = changed) -> None:
                changed.set()

            self.core.on_state.append(on_state)
            try:
                await changed.wait()
            finally:
                self.core.on_state.remove(on_state)

    async def ask(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> Message:
        """One request, one answer. Raises BrokerAway, Interrupted, BrokerError (none in time)."""
        if not self._inbox:
            self._inbox = self.core.new_inbox()
            self.core.subscribe(f"{self._inbox}.*", self._on_answers, on_lost=self._on_lost)
        reply, asked = f"{self._inbox}.{next(self._numbers)}", _Asked()
        self.core.publish(subject, payload, reply=reply, headers=headers)
        self._asked[reply] = asked
        try:
            with trio.move_on_after(ASK_SECONDS):
                await asked.done.wait()
        finally:
            self._asked.pop(reply, None)
        if not asked.done.is_set():
            raise BrokerError(f"no answer from {subject}")
        if asked.answer is None:
            raise Interrupted("the connection to the broker was lost")
        return asked.answer

    def _on_answers(self, messages: Sequence[Message]) -> None:
        for message in messages:
            asked = self._asked.get(message.subject)
            if asked is not None:
                asked.answer = message
                asked.done.set()

    def _on_lost(self, why: str) -> None:
        for asked in self._asked.values():
            asked.done.set()

    async def call(self, operation: str, body: object = None) -> Answer:
        """One call of the API. Raises BrokerAway, ApiError, BrokerError."""
        payload = b"" if body is None else msgspec.json.encode(body)
        message = await self.ask(f"$JS.API.{operation}", payload)
        if message.is_no_responders:
            self.has_jetstream = False
            raise NoJetStream
        self.has_jetstream = True
        return _checked(message)

    def forget_consumer(self, stream: str, consumer: str) -> None:
        """Let the server delete it; if that is not told now, it does so by itself later."""
        try:
            self.core.publish(f"$JS.API.CONSUMER.DELETE.{stream}.{consumer}", b"")
        except BrokerAway:
            pass


def _checked(message: Message) -> Answer:
    try:
        answer = msgspec.json.decode(message.payload, type=Answer)
    except UNREADABLE as error:
        raise BrokerError("an answer of JetStream cannot be read") from error
    if answer.error is not None:
        raise ApiError(answer.error.err_code, answer.error.description)
    return answer


@define(eq=False)
class Stream:
    """One stream of the server, made when it is missing."""

    api: Api
    name: str
    #: Its configuration, should it have to be made. One of another configuration is left as it is,
    #: but for an age that it does not limit: earlier releases made it so.
    config: Mapping[str, object]
    #: The connection on which it is known to be there.
    _made_on: int = -1
    _has_told: bool = False

    async def ensure(self) -> None:
        """It is there. Raises BrokerAway, BrokerError."""
        connection = self.api.core.connections
        if self._made_on == connection:
            return
        try:
            await self.api.call(f"STREAM.CREATE.{self.name}", self.config)
        except ApiError as error:
            if error.code != _NAME_IN_USE:
                raise
            await self._meet_other()
        self._made_on = connection

    async def _meet_other(self) -> None:
        """It is there, and not as it would have been made."""
        found = (await self.api.call(f"STREAM.INFO.{self.name}")).config
        differing = [key for key, value in self.config.items() if found.get(key, False) != value]
        if differing and set(differing) <= _AGES and not found.get("max_age"):
            ages = {key: value for key, value in self.config.items() if key in _AGES}
            try:
                await self.api.call(f"STREAM.UPDATE.{self.name}", found | ages)
            except ApiError as error:
                self._tell_once("cannot be brought up to date", str(error))
            else:
                _log.info("nats_stream", stream=self.name, told="brought up to date", limits="age")
            return
        if differing:
            theirs = ", ".join(f"{key}: {found.get(key)}" for key in differing)
            self._tell_once("somebody else has made it, and it is used as it is", theirs)

    def _tell_once(self, told: str, details: str) -> None:
        if not self._has_told:
            self._has_told = True
            _log.warning("nats_stream", stream=self.name, told=told, details=details)

    async def store(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Store one message. Raises what `WorkQueue.publish` does."""
        for _ in range(2):
            try:
                await self.ensure()
            except Interrupted as error:
                raise BrokerAway(str(error)) from None  # nothing was sent that could be stored
            message = await self.api.ask(subject, payload, headers)
            if not message.is_no_responders:
                break
            # Somebody has deleted it since.
            self._made_on = -1
        else:
            raise BrokerError(f"no stream takes {subject}")
        try:
            _checked(message)
        except ApiError as error:
            if error.code in _FULL:
                raise QueueFull(str(error)) from None
            raise


@define(eq=False)
class Pull:
    """Reads a consumer of a stream, for as long as `run` runs.

    `on_messages` is given stored messages: their subject as it was, their reply for the
    acknowledgement. `on_idle` is called when a pull has ended with nothing more to give.
    """

    api: Api
    stream: str
    consumer: str
    batch: int
    on_messages: OnMessages
    on_idle: Callable[[], None] = lambda: None
    #: The pull that is running is the last.
    is_ending: bool = False
    _reply: str = ""
    _left: int = 0
    _over: trio.Event = field(factory=trio.Event)
    _failure: Exception | None = None

    async def run(self) -> None:
        """Until `is_ending`. Raises BrokerAway, BrokerError."""
        inbox = self.api.core.new_inbox()
        subscription = self.api.core.subscribe(f"{inbox}.*", self._hear, on_lost=self._on_lost)
        try:
            numbers = count()
            while not self.is_ending:
                await self._pull(f"{inbox}.{next(numbers)}")
        finally:
            subscription.close()

    async def _pull(self, reply: str) -> None:
        self._reply, self._left, self._over = reply, self.batch, trio.Event()
        body = {"batch": self.batch, "expires": nanoseconds(PULL_SECONDS)}
        self.api.core.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self.consumer}",
            msgspec.json.encode(body),
            reply=reply,
        )
        with trio.move_on_after(PULL_SECONDS + ASK_SECONDS):
            await self._over.wait()
        if self._failure is not None:
            raise self._failure
        if not self._over.is_set():
            raise BrokerError(f"no answer from the consumer {self.consumer}")

    def _hear(self, messages: Sequence[Message]) -> None:
        stored = []
        is_idle = False
        for message in messages:
            if message.reply.startswith("$JS.ACK."):
                stored.append(message)
            elif message.subject == self._reply:
                is_idle = self._hear_status(message) or is_idle
        self._left -= len(stored)
        if self._left <= 0:
            self._over.set()
        if stored:
            self.on_messages(stored)
        if is_idle:
            self.on_idle()

    def _hear_status(self, message: Message) -> bool:
        """Whether the pull has ended for want of messages."""
        status = message.headers.get(STATUS, "")
        if status == "100":
            return False
        if status not in _PULL_ENDED:
            description = message.headers.get("Description") or "no such consumer"
            self._failure = BrokerError(f"{self.consumer}: {description} ({status})")
        self._over.set()
        return status in _PULL_ENDED

    def _on_lost(self, why: str) -> None:
        self._failure = BrokerAway(why)
        self._over.set()


@frozen
class Handed:
    """What the reply subject of a stored message says about it.

    `$JS.ACK.<stream>.<consumer>.<times>.<stream seq>.<consumer seq>.<time>.<pending>`, or with
    domain and account before the stream and one more token at the end (nats-server 2.9).
    """

    #: Its number in the stream.
    number: int
    #: When it was stored, by the server's clock, in seconds since the epoch.
    stored_at: float
    #: How many the consumer still had to hand out after it.
    pending: int

    @classmethod
    def read(cls, reply: str) -> Handed:
        """From a reply subject."""
        tokens = reply.split(".")
        number, _, time, pending = tokens[5:9] if len(tokens) == 9 else tokens[7:11]
        return cls(int(number), int(time) / 1e9, int(pending))


@define(eq=False)
class Follower:
    """Something that follows a stream: over one connection after the other, until closed."""

    api: Api
    on_lost: OnLost
    is_closed: bool = False
    is_ending: bool = False
    #: It has begun on this connection: what breaks off now is told.
    is_following: bool = False
    ended: trio.Event = field(factory=trio.Event)
    _scope: trio.CancelScope = field(factory=trio.CancelScope)

    async def run(self) -> None:
        """As a task."""
        with self._scope:
            while not self.is_ending:
                await self.api.wait_connected()
                try:
                    await self.follow()
                except BrokerAway as error:
                    self._break_off(str(error))
                    # Not at once: the connection may be there, only full.
                    await trio.sleep(0.01)
                except BrokerError as error:
                    self._break_off(str(error))
                    await trio.sleep(RETRY_SECONDS)
        self.ended.set()

    async def follow(self) -> None:
        """Over one connection, until it ends or `is_ending`."""
        raise NotImplementedError

    def _break_off(self, why: str) -> None:
        if self.is_following and not self.is_closed:
            self.is_following = False
            self.on_lost(why)

    def close(self) -> None:
        """End it at once."""
        self.is_closed = self.is_ending = True
        self._scope.cancel("closed")


def nanoseconds(seconds: float) -> int:
    """Durations in the API's JSON."""
    return round(seconds * 1e9)
