"""How an agent stops so that nobody is hurt: the order of a drain, and who may ask for one.

The order is Infera's (`Drain` below); what is ours is a moment for routers to hear what the entry
says before the door closes, that the entry goes only at the end, so that routers show what still
runs, and that a work queue which cannot be emptied in time is handed back as well, instead of being
left with nobody to take it.

Nothing of this waits for the broker without a limit: what runs goes back when the window is over,
whatever the broker does, and AFTER_SECONDS later the drain is over as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import structlog
import trio
from attrs import define, field

from router.agent.intake import Intake
from router.agent.presence import wait_connected
from router.agent.registration import Registration
from router.wires.nats.broker import (
    Broker,
    BrokerAway,
    BrokerError,
    Message,
    Subscription,
)
from router.wires.nats.protocol import UNREADABLE, Names

_log = structlog.get_logger("baton")

#: To change the entry, and to remove it; it ends by itself where the broker is away.
LEAVE_SECONDS = 2.0
#: Of the window: from the word in the entry to the closing of the door. Routers hear of it in
#: milliseconds; what they have sent until then is served. A window that is shorter waits as long
#: for the word to be said, where the broker does not take it at once: what is handed back before
#: might come again.
HEARD_SECONDS = 0.5
#: Between two looks at what waits in the work queue.
LOOK_SECONDS = 0.2
#: For what is under way as its time ends: a look, the last word to who asked. Where all is well
#: that takes milliseconds.
ANSWER_SECONDS = 1.0
#: For the server to confirm that nothing more will come.
DOOR_SECONDS = 2.0
#: After the window, for what the work queue still holds to come and be handed back.
LEFTOVER_SECONDS = 2.0
#: For the last frames to go out.
FLUSH_SECONDS = 2.0
#: For the durable consumer to be deleted.
FORGET_SECONDS = 2.0
#: From the end of the window to that of the drain at the latest. A broker that is well needs next
#: to nothing of it, and of one to which nothing gets through, neither LEAVE nor FORGET is asked.
AFTER_SECONDS = LEFTOVER_SECONDS + DOOR_SECONDS + FLUSH_SECONDS + LEAVE_SECONDS + FORGET_SECONDS
#: After the end was told to who asked over NATS: in a container that ends with its agent, the
#: command that asked would be killed before it could return.
LINGER_SECONDS = 1.0
#: Who asked for a drain and waits for its end.
ASKERS_MAX = 16


@define(eq=False)
class Drain:
    """One drain of one agent, from the word in its entry to the removal of that."""

    intake: Intake
    registration: Registration
    broker: Broker
    window_seconds: float
    _door_closed: trio.Event = field(init=False, factory=trio.Event)

    async def run(self) -> None:
        """Drain; returns when nothing is open. Cancelling leaves what is open to `Intake.stop`."""
        until = trio.current_time() + self.window_seconds
        word_seconds = max(HEARD_SECONDS, self.window_seconds)
        await self.registration.drain(min(LEAVE_SECONDS, word_seconds))
        with trio.move_on_at(min(until, trio.current_time() + HEARD_SECONDS)):
            await trio.sleep_forever()
        with trio.move_on_at(until + LEFTOVER_SECONDS + DOOR_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._close_door, until)
                # The end of the window waits for nobody: not for a queue that gives no answer, and
                # not for a server that is slow to close the door.
                with trio.move_on_at(until):
                    await self._door_closed.wait()
                    await self.intake.wait_empty()
                self.intake.hand_back()
            await self._hand_back_queue()
        await self.intake.close_door(0.0)
        await self._leave()

    async def _close_door(self, until: float) -> None:
        if await self._empty_queue(until):
            await self.intake.close_door(DOOR_SECONDS)
            self._door_closed.set()

    async def _empty_queue(self, until: float) -> bool:
        """Whether the work queue has handed out all; one that cannot be read counts as empty."""
        while self.intake.is_queued:
            try:
                with trio.fail_at(until + ANSWER_SECONDS):
                    if not await self.intake.count_waiting():
                        return True
            except (BrokerAway, BrokerError, trio.TooSlowError) as problem:
                why = str(problem) or "no answer in time"
                _log.warning("work queue not readable", problem=why)
                return True
            if trio.current_time() >= until:
                return False
            await trio.sleep_until(min(until, trio.current_time() + LOOK_SECONDS))
        return True

    async def _hand_back_queue(self) -> None:
        """What the queue still holds comes now, as others have left, and goes back at once.

        That is what did not get a place within the window, or was stored as the door closed. The
        door may still be open where the places came free at the very end of the window; it would
        make the consumer anew when that is deleted.
        """
        if not await self._empty_queue(trio.current_time()):
            self.intake.open_door()
            await self._empty_queue(trio.current_time() + LEFTOVER_SECONDS)
        await self.intake.close_door(DOOR_SECONDS)

    async def _leave(self) -> None:
        """Take the entry and the consumer back, where anything gets through to the broker.

        The entry goes by itself, and the next agent of this id deletes the consumer.
        """
        is_reached = await self.broker.flush(FLUSH_SECONDS)
        await self.registration.leave(LEAVE_SECONDS if is_reached else 0.0)
        if is_reached and not self.registration.is_shared():
            with trio.move_on_after(FORGET_SECONDS):
                await self.intake.forget_queue()


class Said(msgspec.Struct):
    """What an agent answers to who asks it to drain: `draining` at once, at the end `drained`."""

    state: str
    #: How long it may take at most, all in all (seconds).
    seconds: float = 0.0


@define(eq=False)
class DrainDoor:
    """Lets a preStop command ask for a drain over NATS, and tells it when that is done."""

    broker: Broker
    names: Names
    worker_id: str
    window_seconds: float
    on_asked: Callable[[], None]
    _askers: list[str] = field(init=False, factory=list)
    _subscription: Subscription | None = field(init=False, default=None)

    def begin(self) -> None:
        """Listen."""
        self._subscription = self.broker.subscribe(
            self.names.drain(self.worker_id), self._asked, on_lost=lambda _: None
        )

    @property
    def is_asked(self) -> bool:
        """Somebody has asked over NATS, and waits for the end."""
        return bool(self._askers)

    def tell_drained(self) -> None:
        """Nothing is open any more."""
        for asker in self._askers:
            self._say(asker, Said("drained"))

    def close(self) -> None:
        """Listen no more. Idempotent."""
        if self._subscription is not None:
            self._subscription.close()

    def _asked(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.reply and len(self._askers) < ASKERS_MAX:
                self._askers.append(message.reply)
                self._say(message.reply, Said("draining", self.window_seconds + AFTER_SECONDS))
            self.on_asked()

    def _say(self, asker: str, said: Said) -> None:
        try:
            self.broker.publish(asker, msgspec.json.encode(said))
        except (BrokerAway, ValueError):
            pass  # it waits no longer than it was told


async def ask_to_drain(broker: Broker, names: Names, worker_id: str, seconds: float) -> str:
    """Ask the agent of that id to drain and wait until it has.

    Returns `drained`, `absent` (nobody of that id is there), `away` (the broker could not be
    reached within `seconds`) or `late` (it has not said that it is done in the time it named).
    """
    heard = _Heard()
    inbox = broker.new_inbox()
    subscription = broker.subscribe(f"{inbox}.*", heard.take, on_lost=lambda _: None)
    try:
        with trio.move_on_after(seconds):
            await wait_connected(broker)
        try:
            broker.publish(names.drain(worker_id), b"", reply=f"{inbox}.1")
        except BrokerAway:
            return "away"
        with trio.move_on_after(seconds):
            await heard.first.wait()
        if not heard.first.is_set():
            return "late"
        with trio.move_on_after(heard.seconds + ANSWER_SECONDS):
            await heard.last.wait()
        return heard.end
    finally:
        subscription.close()


@define(eq=False)
class _Heard:
    first: trio.Event = field(factory=trio.Event)
    last: trio.Event = field(factory=trio.Event)
    seconds: float = 0.0
    end: str = "late"

    def take(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.is_no_responders:
                self._over("absent")
                continue
            try:
                said = msgspec.json.decode(message.payload, type=Said)
            except UNREADABLE:
                continue
            self.seconds = max(self.seconds, said.seconds)
            self.first.set()
            if said.state == "drained":
                self._over("drained")

    def _over(self, end: str) -> None:
        self.end = end
        self.first.set()
        self.last.set()
