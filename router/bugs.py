"""What a bug of ours leaves behind: the request it was met in ends, and nothing of it is left.

Every request gives back what it holds in one place, when its machine comes to its end. A bug may be
met in that very place, or before the machine has heard of what the task has just taken. So here the
same things are given back once more, each whatever became of the others; after any other end
there is nothing left to give.
"""

from __future__ import annotations

from collections import deque

import structlog
from attrs import define

from router.admission import Admission
from router.errors import Refusal
from router.exchange import Exchange
from router.front import ClientChannel
from router.metrics import Metrics
from router.ticket import Failure, Ticket
from router.waking import Waker

_log = structlog.get_logger("baton")


@define(eq=False)
class Bugs:
    """Meets them, with everything that a request may have left its traces in."""

    _metrics: Metrics
    _live: dict[Ticket, Exchange]
    _ended: deque[Ticket]
    _emptied: Waker
    _admission: Admission

    def met(self, error: BaseException) -> None:
        """Count and log it."""
        self._metrics.internal_error("request")
        _log.error("internal_error", place="request", exc_info=error)

    def met_in(self, exchange: Exchange, error: Exception) -> None:
        """End the request, if it is not over, and clear up behind it. Does not raise."""
        self.met(error)
        for step in (self._end, self._drop_leg, self._drop_pair, self._forget, self._end_reply):
            try:
                step(exchange)
            except Exception as another:
                self.met(another)

    def apologise(self, channel: ClientChannel) -> None:
        """Tell the client where nothing was told yet, and end the connection. Does not raise."""
        try:
            if channel.is_open and channel.current is not None and not channel.reply_begun:
                channel.current.keep_alive = False
                channel.refuse(_own_failure())
                channel.end()
            else:
                channel.cut(b"")
        except Exception as error:
            self.met(error)
            channel.close()

    def _end(self, exchange: Exchange) -> None:
        if not exchange.ticket.is_over:
            exchange.fire("crashed", Failure(_own_failure()))

    def _drop_leg(self, exchange: Exchange) -> None:
        leg, exchange.leg = exchange.leg, None
        if leg is not None:
            leg.drop("upstream_error")

    def _drop_pair(self, exchange: Exchange) -> None:
        pair, exchange.pair = exchange.pair, None
        if pair is not None:
            pair.drop()

    def _forget(self, exchange: Exchange) -> None:
        if self._live.pop(exchange.ticket, None) is not None:
            self._ended.append(exchange.ticket)
        if not self._live:
            self._emptied.wake()
        self._admission.leave(exchange)

    def _end_reply(self, exchange: Exchange) -> None:
        channel = exchange.channel
        if channel.watcher is exchange:
            channel.watcher = None
            self.apologise(channel)
        channel.waker.wake()


def _own_failure() -> Refusal:
    return Refusal("internal_error", "The router has failed; this is a bug in it.")
