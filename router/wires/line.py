"""What leads to one worker, whichever wire it is: one request out, callbacks back.

The legs above it (deadlines, judging, moving, accounting) do not know the wire. A wire tells what
happens to a request by `Answered`: a head, pieces of body, then one end of some kind, and nothing
after that. Failures are told, never raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router.headers import Headers


def never() -> bool:
    """No promise."""
    return False


class Answered(Protocol):
    """Who is told what comes back. Callbacks are synchronous; none follows an end."""

    def on_connected(self) -> None:
        """The request is on its way."""

    def on_head(self, status: int, headers: Headers) -> None:
        """Status and headers (names in lower case)."""

    @property
    def on_body(self) -> Callable[[bytes], None]:
        """Takes all the body that one read brought; looked up anew each time."""

    def on_end(self) -> None:
        """The answer is complete by its own framing."""

    def on_broken(self, detail: str, *, connecting: bool) -> None:
        """No answer, or no more of it; `detail` is for the log."""

    def on_handed_back(self) -> None:
        """The worker drains and returned the request unfinished."""

    def on_full(self) -> None:
        """The worker's queue holds all that it may; it has got nothing."""

    def on_too_large(self, limit: int) -> None:
        """What was to be sent is more than the wire takes (bytes); nobody has got any of it."""

    def on_unread(self) -> None:
        """More waits behind `pause` than the wire keeps; whoever paused it reads too little."""

    def on_missed(self, detail: str) -> None:
        """The wire itself has failed: no fault of the worker's, which may still be at it."""

    def on_crash(self, error: Exception) -> None:
        """A callback raised: a bug of ours, for the owner's task."""


class Sent(Protocol):
    """One request on its way to a worker: the handle of whoever sent it."""

    def pause(self) -> None:
        """Tell nothing more of the answer until `resume`."""

    def resume(self) -> None:
        """Go on."""

    def close(self) -> None:
        """Nobody wants the rest, and the engine is to be freed. Idempotent; tells nothing."""

    def leave(self) -> None:
        """The answer is known to be over, though its end may still be on its way."""

    def excuse(self, since: float) -> bool:
        """Its worker was silent since then. Whether it may have spoken, and could not be heard.

        Then `on_missed` was told.
        """

    def recall(self) -> bool:
        """Nobody reaches its worker. Whether it still waited for it, and has been taken back.

        Then `on_missed` was told, or `on_broken` where it ran nowhere.
        """


class Direct:
    """A handle with nothing between router and worker: silence is the worker's."""

    __slots__ = ()

    def excuse(self, since: float) -> bool:
        """Never."""
        return False

    def recall(self) -> bool:
        """Never."""
        return False


class Line(Protocol):
    """The way to one worker."""

    def send(
        self,
        method: bytes,
        target: bytes,
        lines: bytes,
        body: bytes,
        answered: Answered,
        *,
        streams: bool = False,
        movable: Callable[[], bool] = never,
        queues: bool = False,
    ) -> Sent:
        """Send a request; how it went may be told before this returns.

        `target` is the path (with its query) below the worker's base path, `lines` are headers as
        bytes, each ended by CRLF, without Host and Content-Length.

        For wires with somebody at the other end who wants to know: `streams`, a stream is asked
        for; `movable`, handed back it would go on elsewhere (asked at once, or not at all);
        `queues`, it may wait in a queue, or be refused because that is full.
        """

    def close(self) -> None:
        """Nothing new will be sent; what runs belongs to its request."""
