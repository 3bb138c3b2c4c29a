"""What the clocks of a request mean: patience, a look at a worker, or an end.

Silence alone is a matter of the deadlines. With a worker that nobody reaches it is the end: a real
vLLM 0.32 hangs with the socket open in a third of its shutdowns, while its port is already closed.
A silence that the broker between was a part of blames no worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.answering import broken
from router.clocks import is_due
from router.errors import Refusal
from router.legs import Leg
from router.ticket import Failure
from router.traces import UNREACHED, no_first_token
from statemachines.leg import LegState

if TYPE_CHECKING:
    from router.exchange import Exchange

#: How often a silent stream's worker is looked at again.
SUSPECT_AGAIN_SECONDS = 1.0


def meet_deadline(exchange: Exchange, now: float) -> None:
    """The moment has come that `exchange` asked for; `now` on Trio's clock, in seconds."""
    clocks, leg = exchange.clocks, exchange.timed
    if is_due(clocks.request_due(), now):
        if leg is not None and exchange.survives(leg, "stalled"):
            return
        message = f"The request took longer than {clocks.deadlines.request:g} seconds."
        exchange.fire("deadline_passed", Failure(Refusal("request_timeout", message)))
    elif is_due(exchange.queue_until, now):
        message = "The request waited too long for its turn."
        exchange.fire("refused", Failure(Refusal("queue_timeout", message, retry_after=1)))
    elif leg is not None and is_due(clocks.leg_due(leg), now):
        _meet_silence(exchange, leg, now)
    elif is_due(clocks.keep_alive_due(), now) and exchange.channel.reply_begun:
        exchange.channel.write(b": keep-alive\n\n")
        clocks.kept_alive_at = now


def _meet_silence(exchange: Exchange, leg: Leg, now: float) -> None:
    """One of the clocks of a leg has run out."""
    is_stalled = is_due(exchange.clocks.stall_due(leg), now)
    if (is_stalled or leg.is_error) and exchange.survives(leg, "stalled"):
        return
    if is_stalled and leg.is_excused():
        return
    if exchange.pair is not None and exchange.pair.meets_silence(leg, is_stalled=is_stalled):
        return
    if is_stalled:
        _meet_stall(exchange, leg)
    elif leg.worker.is_silent:
        if not leg.is_recalled() and not exchange.survives(leg, "stalled"):
            leg.trace.meet(UNREACHED)
            exchange.lose(leg, "stalled", "leg_stalled", Failure(broken()))
    else:
        leg.worker.probe_soon()
        leg.suspect_again_at = now + SUSPECT_AGAIN_SECONDS


def _meet_stall(exchange: Exchange, leg: Leg) -> None:
    leg.worker.probe_soon()
    deadlines = exchange.clocks.deadlines
    if leg.state is LegState.STREAMING:
        seconds = deadlines.stream_idle
        detail = f"silent for {seconds:g} s"
        refusal = Refusal("stream_idle_timeout", f"The worker was silent for {seconds:g} s.")
    else:
        seconds = deadlines.first_token
        detail = no_first_token(seconds)
        refusal = Refusal("first_token_timeout", f"No first token within {seconds:g} s.")
    leg.trace.meet(detail)
    exchange.lose(leg, "stalled", "leg_stalled", Failure(refusal))
