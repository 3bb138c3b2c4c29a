"""How agents of one id hear of each other, so that there is only one.

Two would both take every request, and two engines would compute each answer. All of them publish
to, and listen at, one subject. Who starts says so and is told who is there already; who serves asks
now and then, since two may have started where a broken network kept them apart. A draining one is
waited for: it takes nothing new, but what it deletes at its end would be the other's. Of two that
start at once the one with the smaller instance goes on.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import structlog
import trio
from attrs import define, field

from router.wires.nats.broker import Broker, BrokerAway, Message, Subscription
from router.wires.nats.protocol import UNREADABLE, Names

_log = structlog.get_logger("baton")

#: For others to answer who is about to serve.
ANSWER_SECONDS = 0.3
#: Between two looks at one that drains.
AGAIN_SECONDS = 1.0
#: Between two questions of one that serves.
ASK_SECONDS = 5.0
#: Who has not been heard of for so long has gone.
GONE_SECONDS = 3 * ASK_SECONDS
#: Others that are kept in mind. There should be none.
OTHERS_MAX = 100


class Stage(StrEnum):
    """Where an agent is in its life, as it tells others of its id."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Hello(msgspec.Struct, frozen=True):
    """What one says of itself."""

    instance: str
    stage: Stage
    #: Whoever hears this is to say who he is.
    asks: bool = False
    #: Where it runs, for people.
    host: str = ""


@define(eq=False)
class Presence:
    """What one agent knows of others with its id, and lets them know."""

    broker: Broker
    names: Names
    worker_id: str
    instance: str
    stage: Stage = field(init=False, default=Stage.STARTING)
    _others: dict[str, tuple[Hello, float]] = field(init=False, factory=dict)
    _complained: set[str] = field(init=False, factory=set)
    _subscription: Subscription | None = field(init=False, default=None)

    @property
    def is_shared(self) -> bool:
        """Another one serves under this id, as far as is known."""
        return any(each.stage is Stage.SERVING for each in self._present())

    def begin(self) -> None:
        """Listen, and answer."""
        self._subscription = self.broker.subscribe(
            self.names.agent(self.worker_id), self._heard, on_lost=lambda _: None
        )

    def drain(self) -> None:
        """It takes nothing new from here on, and others are told."""
        self.stage = Stage.DRAINING
        self._say(asks=False)

    def close(self) -> None:
        """Listen no more. Idempotent."""
        if self._subscription is not None:
            self._subscription.close()

    async def claim(self) -> Hello | None:
        """Wait for the broker, and for who drains; then serve, or return who is in the way."""
        is_told = False
        while True:
            await wait_connected(self.broker)
            self._others.clear()
            if self._say(asks=True):
                await trio.sleep(ANSWER_SECONDS)
            if not self.broker.is_connected:
                continue
            others = self._present()
            for other in others:
                if self._is_in_the_way(other):
                    return other
            if not any(each.stage is Stage.DRAINING for each in others):
                self.stage = Stage.SERVING
                return None
            if not is_told:
                is_told = True
                _log.info("waits for the agent of this id that drains", worker=self.worker_id)
            await trio.sleep(AGAIN_SECONDS)

    async def run(self) -> None:
        """Ask now and then, until cancelled."""
        while True:
            self._say(asks=True)
            await trio.sleep(ASK_SECONDS)

    def _is_in_the_way(self, other: Hello) -> bool:
        if other.stage is Stage.STARTING:
            return other.instance < self.instance
        return other.stage is Stage.SERVING

    def _present(self) -> list[Hello]:
        after = trio.current_time() - GONE_SECONDS
        return [hello for hello, at in self._others.values() if at > after]

    def _heard(self, messages: Sequence[Message]) -> None:
        for message in messages:
            try:
                hello = msgspec.json.decode(message.payload, type=Hello)
            except UNREADABLE:
                continue
            if hello.instance == self.instance:
                continue
            if hello.instance in self._others or len(self._others) < OTHERS_MAX:
                self._others[hello.instance] = hello, trio.current_time()
                self._complain(hello)
            if hello.asks:
                self._say(asks=False)

    def _complain(self, other: Hello) -> None:
        both = self.stage is other.stage is Stage.SERVING
        if both and other.instance not in self._complained:
            self._complained.add(other.instance)
            _log.error(
                "two agents have one id, and both compute every answer: stop one of them",
                worker=self.worker_id,
                other=other.instance,
                other_host=other.host[:100],
            )

    def _say(self, *, asks: bool) -> bool:
        hello = Hello(self.instance, self.stage, asks, socket.gethostname())
        try:
            self.broker.publish(self.names.agent(self.worker_id), msgspec.json.encode(hello))
        except BrokerAway:
            return False
        return True


async def wait_connected(broker: Broker) -> None:
    """Until there is a connection."""
    connected = trio.Event()

    def told(is_connected: bool) -> None:
        if is_connected:
            connected.set()

    broker.on_state.append(told)
    try:
        if broker.is_connected:
            await trio.lowlevel.checkpoint()
        else:
            await connected.wait()
    finally:
        broker.on_state.remove(told)
