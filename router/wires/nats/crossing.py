"""From the thread that speaks NATS to Trio's: a bounded deque, and one wake-up a batch.

The other thread tells; Trio takes, in the order of what was told, all that has gathered until it
gets to it. What Trio runs for it (`_deliver`) cannot raise: an exception in a callback of
`run_sync_soon` would end the process. No lock: each counter is written by one thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import structlog
import trio
from attrs import define, field

from router.wires.nats.broker import Message, OnLost, OnMessages

#: What may wait for Trio, per subscription.
MESSAGES_MAX = 65_536
BYTES_MAX = 64 << 20
#: Told in one go; then streams over HTTP have their turn. Each of these may cost a send(), 30 us.
#: With 1024, 10,000 a second made the p99 of what is relayed beside them half as long again.
BATCH_MESSAGES_MAX = 64

_log = structlog.get_logger("baton")
T = TypeVar("T")


@define(eq=False)
class Heard:
    """Who listens to a subject."""

    number: int
    subject: str
    on_messages: OnMessages
    on_lost: OnLost
    #: In Trio's thread: nothing is told any more.
    is_closed: bool = False
    #: What waits is the difference. The other thread counts what it told, Trio what it took.
    told_messages: int = 0
    told_bytes: int = 0
    taken_messages: int = 0
    taken_bytes: int = 0
    #: In the other thread: messages are being dropped, and that has been told.
    is_dropping: bool = False


@define(eq=False)
class Slot:
    """Somebody in Trio who waits for the other thread to have done something."""

    done: trio.Event = field(factory=trio.Event)
    answer: bool = False

    def set(self, answer: bool) -> None:
        """Trio's thread only; the first answer counts."""
        if not self.done.is_set():
            self.answer = answer
            self.done.set()


@define(eq=False)
class Crossing:
    """The way to Trio's thread."""

    #: Callbacks that raised, and messages that were dropped because too many waited.
    callbacks_failed: int = 0
    messages_dropped: int = 0
    #: How the other thread calls something once it has done what it is at.
    call_soon: Callable[[Callable[[], None]], object] | None = None
    _token: trio.lowlevel.TrioToken | None = None
    _waiting: deque[tuple[Heard, Message] | Callable[[], object]] = field(factory=deque)
    _is_woken: bool = False

    def begin(self) -> None:
        """In Trio's thread: deliver to this run."""
        self._token = trio.lowlevel.current_trio_token()

    # In the other thread.

    def tell(self, call: Callable[[], object]) -> None:
        """Call it in Trio's thread, in the order of what is told."""
        self._waiting.append(call)
        self._wake()

    def tell_message(self, heard: Heard, message: Message) -> None:
        """Tell a subscription, unless too much waits for it already."""
        size = len(message.payload)
        if (
            heard.told_messages - heard.taken_messages >= MESSAGES_MAX
            or heard.told_bytes - heard.taken_bytes + size > BYTES_MAX
        ):
            self.drop_message(heard, "slow consumer: too many messages are waiting")
            return
        heard.is_dropping = False
        heard.told_messages += 1
        heard.told_bytes += size
        self._waiting.append((heard, message))
        self._wake()

    def drop_message(self, heard: Heard, why: str) -> None:
        """Tell a subscription that some are missing: once, until a message gets through again."""
        self.messages_dropped += 1
        if not heard.is_dropping:
            heard.is_dropping = True
            self.tell(lambda: self.tell_lost(heard, why))

    def _wake(self) -> None:
        if not self._is_woken and self._token is not None:
            self._is_woken = True
            # Not at once: waking lets go of the interpreter's lock, and then the two threads would
            # take turns message by message instead of batch by batch.
            if self.call_soon is not None:
                self.call_soon(self._wake_now)
            else:
                self._wake_now()

    def _wake_now(self) -> None:
        assert self._token is not None
        try:
            self._token.run_sync_soon(self._deliver)
        except trio.RunFinishedError:
            self._waiting.clear()

    # In Trio's thread.

    def tell_lost(self, heard: Heard, why: str) -> None:
        """Messages to it may be missing."""
        if not heard.is_closed:
            self.guard(heard.on_lost, why)

    def guard(self, callback: Callable[[T], object], told: T) -> None:
        """Call what may raise, which is then a bug of its owner: logged and counted."""
        try:
            callback(told)
        except Exception as error:
            self.callbacks_failed += 1
            _log.error("internal_error", place="nats", exc_info=error)

    def _deliver(self) -> None:
        # The flag goes first: what is told from here on wakes anew.
        self._is_woken = False
        waiting = self._waiting
        owner: Heard | None = None
        batch: list[Message] = []
        for _ in range(min(len(waiting), BATCH_MESSAGES_MAX)):
            told = waiting.popleft()
            if isinstance(told, tuple):
                heard, message = told
                heard.taken_messages += 1
                heard.taken_bytes += len(message.payload)
                if heard is not owner:
                    self._tell_batch(owner, batch)
                    owner, batch = heard, []
                batch.append(message)
            else:
                self._tell_batch(owner, batch)
                owner, batch = None, []
                self.guard(_call, told)
        self._tell_batch(owner, batch)
        if waiting and not self._is_woken:
            self._is_woken = True
            self._wake_now()

    def _tell_batch(self, heard: Heard | None, batch: list[Message]) -> None:
        if heard is not None and batch and not heard.is_closed:
            self.guard(heard.on_messages, batch)


def _call(call: Callable[[], object]) -> None:
    call()
