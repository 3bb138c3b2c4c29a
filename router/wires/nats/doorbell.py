"""Whether anybody listens at a subject, found out by what the broker says when nobody does.

A message with a reply subject that nobody is there to take is answered by the broker at once. So
whoever wants to know sends something with a reply subject of its own; silence proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from attrs import define, field

from router.wires.nats.broker import Broker, BrokerAway, Message, Subscription


def _nothing() -> None:
    pass


@define(eq=False)
class Doorbell:
    """Finds out that nobody listens at a subject; that somebody does is said by nothing."""

    broker: Broker
    _inbox: str = field(init=False)
    _numbers: count[int] = field(init=False, factory=count)
    #: By reply subject, what to call where nobody is there.
    _asked: dict[str, Callable[[], None]] = field(init=False, factory=dict)
    _subscription: Subscription | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._inbox = self.broker.new_inbox()

    def begin(self) -> None:
        """Listen. Idempotent; whoever asks does it, too."""
        if self._subscription is None:
            self._subscription = self.broker.subscribe(
                f"{self._inbox}.*", self._on_messages, on_lost=lambda _: None
            )

    def close(self) -> None:
        """Listen no more. Idempotent."""
        if self._subscription is not None:
            self._subscription.close()

    def ask(self, on_nobody: Callable[[], None] = _nothing) -> str:
        """A reply subject for the next message; `on_nobody` is called once, or never."""
        self.begin()
        reply = f"{self._inbox}.{next(self._numbers)}"
        self._asked[reply] = on_nobody
        return reply

    def ring(self, subject: str) -> str:
        """Ask; the answer, if one comes, comes before that of anything asked later."""
        reply = self.ask()
        try:
            # A cancel of a request that nobody ever had.
            self.broker.publish(subject, self._inbox.encode(), reply=reply)
        except BrokerAway:
            pass
        return reply

    def forget(self, reply: str) -> bool:
        """Nobody wants to know any more; True where it was asked, and nothing said so far."""
        return self._asked.pop(reply, None) is not None

    def _on_messages(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.is_no_responders:
                self._asked.pop(message.subject, _nothing)()
