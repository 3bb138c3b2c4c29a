"""Whether anybody still listens where the frames of a request go.

A router that is killed cancels nothing, and its engines would compute for nobody. The broker knows:
a message with a reply subject that nobody is subscribed to is answered by it at once. So now and
then a frame bears a reply subject of the agent's own, which no router looks at, old ones included.
One such answer proves little, since a router that was cut off is back within seconds. What proves
enough depends on what was not heard: a piece of the answer is gone for good, a heartbeat is none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attrs import define, field

from router.reactor import Reactor
from router.wires.nats.doorbell import Doorbell
from router.wires.nats.protocol import HEARTBEAT_LOST_SECONDS, HEARTBEAT_SECONDS

#: Between two frames that ask, and while it seems that nobody is there.
ASK_SECONDS = HEARTBEAT_SECONDS
AGAIN_SECONDS = 1.0
#: Without a hole: a router that cannot reach the broker waits for it no longer than this (6 s of
#: silence and 10 s more), and then wants nothing any more.
ABSENT_SECONDS = HEARTBEAT_LOST_SECONDS + 12.0


@define(eq=False)
class Audience:
    """Who listens to one request's frames, as far as is known."""

    doorbell: Doorbell
    reactor: Reactor
    #: Whoever listens sees by numbers what he has missed.
    sees_holes: bool
    is_gone: Callable[[], None]
    #: Call what may raise, at the expense of this request alone.
    guard: Callable[[Callable[[], None]], None]
    #: Nobody has been there since.
    _absent_since: float | None = field(init=False, default=None)
    #: And a piece of the answer went out meanwhile.
    _has_hole: bool = field(init=False, default=False)
    _reply: str = field(init=False, default="")
    _is_piece: bool = field(init=False, default=False)
    _asked_at: float = field(init=False, default=float("-inf"))

    def reply(self, now: float, *, is_piece: bool) -> str:
        """The reply subject for a frame that goes out now; empty where it need not ask.

        `is_piece`: the frame has a number, so that the answer has a hole without it.
        """
        if now - self._asked_at < (ASK_SECONDS if self._absent_since is None else AGAIN_SECONDS):
            return ""
        if self.doorbell.forget(self._reply):
            self._absent_since, self._has_hole = None, False
        self._asked_at, self._is_piece = now, is_piece
        self._reply = self.doorbell.ask(self._on_nobody)
        return self._reply

    def close(self) -> None:
        """The request is over."""
        self.doorbell.forget(self._reply)

    def _on_nobody(self) -> None:
        """The broker says that nobody was there."""
        self.reactor.refresh()
        self.guard(partial(self._miss, self.reactor.now))

    def _miss(self, now: float) -> None:
        is_first = self._absent_since is None
        if self._absent_since is None:
            self._absent_since = now
        self._has_hole = self._has_hole or self._is_piece
        if self._has_hole:
            # Who cannot see the hole must not get what follows, so it is not asked twice.
            is_enough = not is_first or not self.sees_holes
        else:
            is_enough = now - self._absent_since >= ABSENT_SECONDS
        if is_enough:
            self.is_gone()
