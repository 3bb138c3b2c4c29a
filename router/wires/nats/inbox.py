"""The one reply subscription of a router, and who its messages are for.

Every attempt has a reply subject of its own below one wildcard, so a late frame of an attempt that
was given up finds nobody. Messages come in batches between the reactor's passes; a batch is what a
pass is: the time is read once, the log is written once, and what a callback raises ends the
request it was raised for and nothing else. Requests that could not be published because the broker
is away wait here for it, as others wait for a connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from attrs import define, field

from router.reactor import Rank, Reactor
from router.wires.line import Answered
from router.wires.nats.broker import Broker, BrokerAway, Message, PayloadTooLarge, Subscription
from router.wires.nats.protocol import ACCEPT, ACCEPTED, CANCEL_SECONDS, CANCELS, INBOX
from router.wires.nats.sent import NatsSent
from router.wires.nats.untaken import lose

#: After the broker is back its agents may not be, for a moment (they try once a second): that
#: nobody listens is not believed at once.
SETTLING_SECONDS = 3.0
#: Between two attempts while the broker is there.
AGAIN_SECONDS = 0.25


@define(eq=False)
class Inbox:
    """Demultiplexes replies; publishes requests."""

    broker: Broker
    reactor: Reactor
    #: How long a request waits for a broker that is away.
    connect_seconds: float
    #: Called for each answer of which something may be lost.
    missed: Callable[[], None]
    cancels: Cancels = field(init=False)
    _prefix: str = field(init=False)
    _last: int = 0
    _open: dict[str, NatsSent] = field(factory=dict)
    #: Requests that wait for the broker: what sends them, and until when.
    _waiting: dict[NatsSent, tuple[Callable[[], None], float]] = field(factory=dict)
    #: Requests sent while agents were coming back: subject and payload, to send them again.
    _again: dict[NatsSent, tuple[str, bytes]] = field(factory=dict)
    #: Until then after the broker was away.
    _settled_at: float = 0.0
    _was_lost: bool = False
    #: Open attempts whose frames come first in a batch.
    _first: int = 0
    _subscription: Subscription | None = None

    def __attrs_post_init__(self) -> None:
        self._prefix = self.broker.new_inbox()
        self.cancels = Cancels(self.broker, self.reactor)

    def start(self) -> None:
        """Subscribe; the broker may still be away."""
        self._subscription = self.broker.subscribe(
            f"{self._prefix}.*", self._on_messages, on_lost=self._on_lost
        )
        self.broker.on_state.append(self._on_state)

    def close(self) -> None:
        """Hear nothing more. Idempotent."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
            self.broker.on_state.remove(self._on_state)

    @property
    def is_connected(self) -> bool:
        """Whether anything could be heard."""
        return self.broker.is_connected

    @property
    def is_settling(self) -> bool:
        """The broker was away a moment ago, and not everybody may be back."""
        return self.reactor.now < self._settled_at

    @property
    def open_requests(self) -> int:
        """Attempts that may still get a frame (for tests and for /debug)."""
        return len(self._open)

    # What an attempt asks for

    def open(self, sent: NatsSent) -> str:
        """A reply subject for this attempt alone."""
        self._last += 1
        reply = f"{self._prefix}.{self._last}"
        self._open[reply] = sent
        self._first += sent.rank == Rank.PREFILL
        return reply

    def forget(self, sent: NatsSent) -> None:
        """Nothing more is for this attempt. Idempotent."""
        if self._open.pop(sent.reply, None) is not None:
            self._first -= sent.rank == Rank.PREFILL
        self._waiting.pop(sent, None)
        self._again.pop(sent, None)

    def arrived(self, sent: NatsSent) -> None:
        """The request has reached its worker."""
        self._again.pop(sent, None)

    def sends_again(self, sent: NatsSent) -> bool:
        """Nobody was there to take a request; True if it goes out once more, in a moment."""
        again = self._again.pop(sent, None)
        if again is None:
            return False
        sent.is_published = False
        self.wait(sent, partial(self.publish, sent, *again))
        return True

    def publish(self, sent: NatsSent, subject: str, payload: bytes) -> None:
        """Send a request, now or when the broker is back; fails by what `sent` tells."""
        if not self._publish(sent, subject, payload):
            if sent.is_cold:
                sent.miss("the broker is away")
                return
            self.wait(sent, partial(self.publish, sent, subject, payload))

    def wait(self, sent: NatsSent, send: Callable[[], None]) -> None:
        """It could not be sent: `send` is called when the broker is back, or in a moment.

        A broker that stays away for `connect_seconds` makes it a miss.
        """
        until = self.reactor.now + self.connect_seconds
        self._waiting[sent] = (send, until)
        look_at = self.reactor.now + AGAIN_SECONDS if self.is_connected else until
        self.reactor.sweeper.arm(sent, look_at)

    def wait_on(self, sent: NatsSent, now: float) -> float | None:
        """How long a request still waits for the broker; past that it is lost."""
        waiting = self._waiting.get(sent)
        if waiting is None:
            return None
        send, until = waiting
        if self.is_connected:
            del self._waiting[sent]
            send()
            return None
        if now < until:
            return until
        del self._waiting[sent]
        sent.miss("the broker is away")
        return None

    def _publish(self, sent: NatsSent, subject: str, payload: bytes) -> bool:
        try:
            self.broker.publish(
                subject, payload, reply=sent.reply, headers={ACCEPT: ACCEPTED, INBOX: sent.reply}
            )
        except BrokerAway:
            return False
        except PayloadTooLarge as error:
            sent.meet_limit(error.limit)
            return True
        if self.is_settling and not sent.is_cold:
            self._again[sent] = (subject, payload)
        sent.published()
        return True

    def lose_worker(self, cancel_subject: str, why: str) -> None:
        """A worker has gone without a word; within a batch of the reactor's."""
        every = [each for each in self._open.values() if each.cancel_subject == cancel_subject]
        self._tell_each(every, lambda sent: lose(sent, why))

    # What the broker tells

    def _on_messages(self, messages: Sequence[Message]) -> None:
        with self.reactor.batch():
            if self._first and len(messages) > 1:
                messages = sorted(messages, key=self._rank)
            self._hand_out(messages)

    def _hand_out(self, messages: Sequence[Message]) -> None:
        """Each to its attempt, those in a row together."""
        place, count, found = 0, len(messages), self._open
        while place < count:
            message = messages[place]
            subject, begin = message.subject, place
            place += 1
            while place < count and messages[place].subject == subject:
                place += 1
            sent = found.get(subject)
            if sent is None:
                continue
            answered = sent.answered
            try:
                if place - begin == 1:
                    sent.take(message)
                else:
                    sent.take_all(messages[begin:place])
            except Exception as error:
                self.crash(sent, answered, error)

    def _rank(self, message: Message) -> int:
        sent = self._open.get(message.subject)
        return Rank.WORKER if sent is None else sent.rank

    def _on_lost(self, why: str) -> None:
        with self.reactor.batch():
            self._tell_each(list(self._open.values()), lambda sent: sent.expose(why))

    def _on_state(self, is_connected: bool) -> None:
        with self.reactor.batch():
            if is_connected:
                self._reconnected()
            else:
                self._was_lost = True
                why = "the connection to the broker is lost"
                self._tell_each(list(self._open.values()), lambda sent: sent.expose(why))

    def _reconnected(self) -> None:
        if self._was_lost:  # at the first connection, who is not there is absent
            self._settled_at = self.reactor.now + SETTLING_SECONDS
        self._tell_each(list(self._open.values()), NatsSent.reconnected)
        waiting, self._waiting = self._waiting, {}
        self._tell_each(list(waiting), lambda sent: waiting[sent][0]())

    def _tell_each(self, every: Sequence[NatsSent], tell: Callable[[NatsSent], object]) -> None:
        for sent in every:
            self.guard(sent, tell)

    # Bugs

    def guard(self, sent: NatsSent, tell: Callable[[NatsSent], object]) -> None:
        """Do something that calls back; what it raises ends this attempt's request only."""
        answered = sent.answered
        try:
            tell(sent)
        except Exception as error:
            self.crash(sent, answered, error)

    def crash(self, sent: NatsSent, answered: Answered | None, error: Exception) -> None:
        """A callback raised: a bug of ours, for its owner's task. Does not raise."""
        try:
            sent.close()
            if answered is None:
                raise error
            answered.on_crash(error)
        except Exception as second:
            self.reactor.report(second)


@define(eq=False)
class Cancels:
    """Cancels under way: each is published several times, since a message may be lost."""

    broker: Broker
    reactor: Reactor
    armed_at: float | None = None
    #: When, subject, payload, and how often still; in order of time, as all wait equally long.
    _due: deque[tuple[float, str, bytes, int]] = field(factory=deque)

    def add(self, subject: str, reply: str) -> None:
        """Nobody wants the answer that goes to `reply`. Does not raise."""
        self._publish(subject, reply.encode(), CANCELS)

    def _publish(self, subject: str, payload: bytes, left: int) -> None:
        try:
            self.broker.publish(subject, payload)
            left -= 1
        except BrokerAway:
            pass  # it is said when the broker is back: the engine may still be at it
        if left:
            due = self.reactor.now + CANCEL_SECONDS
            self._due.append((due, subject, payload, left))
            self.reactor.sweeper.arm(self, due)

    def sweep(self, now: float) -> float | None:
        """See `Timed`."""
        while self._due and self._due[0][0] <= now:
            _, subject, payload, left = self._due.popleft()
            self._publish(subject, payload, left)
        return self._due[0][0] if self._due else None

    def crashed(self, error: Exception) -> None:
        """See `Timed`."""
        raise error

    async def flush(self, seconds: float) -> bool:
        """At the end: say each once more, at once, and wait until the broker has it."""
        due, self._due = self._due, deque()
        try:
            for _, subject, payload, _ in due:
                self.broker.publish(subject, payload)
        except BrokerAway:
            return False
        return await self.broker.flush(seconds)
