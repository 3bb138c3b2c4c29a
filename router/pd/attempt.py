"""One request on one pair: two legs, and the one thing that couples them.

Both permits are taken before this begins. In the bootstrap topology both legs are sent at once and
prefill is left to itself when the attempt ends; in the serial one decode is sent when prefill has
handed over, and a prefill that nobody waits for is closed. That a failed prefill ends its decode
is no code path here: the failure is a fact for the request, and a row that leaves the attempt
closes what lives in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from attrs import define, field

from router.answering import Answering
from router.breaker import Permit
from router.choosing import Choice
from router.errors import Refusal
from router.exchange import Exchange
from router.headers import Headers, find, to_worker
from router.legs import Leg, LegListener, LegObserver
from router.patience import SUSPECT_AGAIN_SECONDS
from router.pd.aborts import Aborts, DecodeWatch
from router.pd.logprobs import PromptLogprobs
from router.pd.merging import MergingAnswering
from router.pd.pairing import PairChoice
from router.pd.prefill import Counter, Prefill
from router.pd.shaping import Reading, shape_decode
from router.pd.verdict import Handoff, Verdict
from router.ticket import Failure, Ticket
from router.traces import UNREACHED, no_first_token
from router.wires.line import Line, never
from router.worker import Worker
from statemachines.leg import LegState, told_by_prefill
from statemachines.request import RequestState

_RANK_HEADER = b"x-data-parallel-rank"
#: The client has been given something of this attempt.
_BEGUN = frozenset({RequestState.COMMITTED, RequestState.STREAMING, RequestState.POISONED})


class Surroundings(Protocol):
    """What an attempt needs of the process it lives in."""

    aborts: Aborts
    counter: Counter
    leg_observer: LegObserver
    leg_listeners: tuple[LegListener, ...]
    #: How long a prefill may take, from its own dispatch.
    prefill_seconds: float
    cancels_unmatched: bool
    #: The client's key is the router's, and no business of a worker.
    is_keyed: bool
    recomputes: bool

    def line(self, worker: Worker) -> Line:
        """The way to a worker."""

    def spawn(self, task: Callable[[], Awaitable[object]]) -> None:
        """Start a task in the router's nursery."""

    def has_other(self, ticket: Ticket, besides: Worker | None = None) -> bool:
        """Some pair could take this request over, without that worker."""


@define(eq=False)
class Reservation:
    """A permit and a place on a worker, for a leg that is not sent yet."""

    choice: Choice
    is_open: bool = True

    def __attrs_post_init__(self) -> None:
        self.choice.worker.legs.add(self)

    def redeem(self) -> Permit:
        """The permit, for the leg that takes the place over."""
        self.is_open = False
        self.choice.worker.legs.discard(self)
        return self.choice.permit

    def release(self, now: float) -> None:
        """Nothing was sent. Idempotent."""
        if self.is_open:
            self.redeem().close("neutral", now)


class Places:
    """A place on each worker of a pair, until the legs take them over."""

    def __init__(self, choice: PairChoice) -> None:
        self.prefill = Reservation(choice.prefill)
        self.decode = Reservation(choice.decode)

    def release(self, now: float) -> None:
        """Whatever was not used. Idempotent."""
        self.prefill.release(now)
        self.decode.release(now)


@define(eq=False)
class Orders:
    """What the legs are sent."""

    target: bytes
    prefill_body: bytes | None
    decode_body: bytes
    #: Decode waits for the hand-off.
    is_serial: bool
    reading: Reading
    #: The engine's name for the request, if the router minted it.
    rid: str | None = None
    prefill_rank: int | None = None
    decode_rank: int | None = None


class RankedLeg(Leg):
    """A leg of a pair, on a rank of its worker where one was chosen."""

    __slots__ = ("rank",)
    rank: int | None


@define(eq=False)
class PairAttempt:
    """See the module."""

    exchange: Exchange
    choice: PairChoice
    orders: Orders
    around: Surroundings
    places: Places
    watch: DecodeWatch = field(init=False)
    prefill: Prefill | None = field(init=False, default=None)
    #: What prefill tells that the client is to get, and decode's answer that waits for it.
    logprobs: PromptLogprobs | None = field(init=False, default=None)
    _merging: MergingAnswering | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        if self.orders.reading.wants_logprobs and not self.orders.is_serial:
            self.logprobs = PromptLogprobs()
        key = find(self.exchange.call.headers, b"authorization")
        authorization = None if self.around.is_keyed else key
        self.watch = DecodeWatch(self.around.aborts, self.orders.rid, authorization)

    def begin(self) -> None:
        """Tell the request and send what can be sent."""
        exchange, orders, ticket = self.exchange, self.orders, self.exchange.ticket
        ticket.worker = self.choice.decode.worker
        ticket.prefill_worker = self.choice.prefill.worker
        ticket.attempts += 1
        exchange.pair = self
        exchange.queue_until = None
        body, leg = orders.prefill_body, None
        if body is not None:
            leg = self._make_prefill()
        else:
            self.places.prefill.release(exchange.now)
        exchange.fire("admitted")
        if leg is not None and body is not None:
            self._send(leg, body, orders.prefill_rank)
        if not orders.is_serial:
            self._send_decode(orders.decode_body)
        exchange.channel.rearm()

    # What the exchange asks and tells

    @property
    def awaited(self) -> Leg | None:
        """The leg that the request waits for before decode is sent."""
        return None if self.prefill is None else self.prefill.leg

    def leave(self, fact: str) -> None:
        """The attempt is over, by this fact of the request; decode is closed already."""
        ticket = self.exchange.ticket
        if self.orders.reading.has_rid and not ticket.is_over:
            # An engine refuses a name that it knows (sglang #19035), and this one is the client's.
            ticket.tried |= {self.choice.prefill.worker, self.choice.decode.worker}
        self.places.release(self.exchange.now)
        if self.prefill is not None:
            if fact == "deadline_passed" and self.prefill.is_due(self.exchange.now):
                # Its own clock comes at once, too: it had all its time with decode.
                self.prefill.was_silent = True
            is_unmatched = self.around.cancels_unmatched and not self.watch.was_sent
            is_unsent = self.prefill.leg.upstream is None
            self.prefill.leave(
                closes=self.orders.is_serial or is_unmatched or is_unsent,
                lost_decode=not self.watch.succeeded,
            )

    def drop(self) -> None:
        """The same after a bug of ours; a prefill that was never sent has nothing to protect."""
        self.places.release(self.exchange.now)
        if self.prefill is not None:
            is_unsent = self.prefill.leg.upstream is None
            self.prefill.leave(closes=self.orders.is_serial or is_unsent, lost_decode=True)

    def on_decode_head(self, leg: Leg, status: int, answering: Answering) -> Answering:
        """Decode has answered. With an error it has the last word, whatever prefill says."""
        self.watch.has_error = not 200 <= status < 300
        if self.logprobs is None or self.watch.has_error:
            return answering
        self._merging = merging = MergingAnswering(
            answering, leg, self.logprobs, is_stream=leg.is_stream
        )
        if self.prefill is not None and not self.prefill.leg.is_open:
            merging.prefill_is_done()
        return merging

    def meets_silence(self, leg: Leg, *, is_stalled: bool) -> bool:
        """The awaited leg, or decode, was silent; whether prefill explains it."""
        prefill = self.prefill
        if prefill is None or not prefill.leg.is_open or leg.state is LegState.STREAMING:
            return False
        if prefill.leg.worker.is_silent:
            if not prefill.leg.is_recalled():
                message = "The prefill worker does not answer."
                prefill.lose("stalled", Refusal("upstream_broken", message), UNREACHED)
            return True
        prefill.leg.worker.probe_soon()
        if is_stalled:
            self._meet_stall(prefill)
        elif leg is prefill.leg:
            leg.suspect_again_at = self.exchange.now + SUSPECT_AGAIN_SECONDS
        return is_stalled or leg is prefill.leg

    def _meet_stall(self, prefill: Prefill) -> None:
        """Nothing came in time, and decode may still be waiting for its prefill."""
        if prefill.leg.is_excused():
            return
        seconds = self.exchange.clocks.deadlines.first_token
        message = f"No first token within {seconds:g} s."
        if self.orders.is_serial:
            detail = no_first_token(seconds)
            prefill.lose("stalled", Refusal("first_token_timeout", message), detail)
            return
        # Decode is not to blame, and prefill's own time is not over: it books its end itself.
        ticket = self.exchange.ticket
        ticket.tried.add(self.choice.prefill.worker)
        prefill.was_silent = True
        self.exchange.give_up("leg_stalled", Failure(Refusal("first_token_timeout", message)))

    # What prefill tells

    def on_prefill(self, verdict: Verdict) -> None:
        """The prefill has ended, or is known to have failed."""
        if verdict.fact == "completed":
            if self.orders.is_serial:
                self._hand_over(verdict.handoff)
            elif self._merging is not None:
                self._merging.prefill_is_done()
        elif not self.watch.has_error and not self._ends_well():
            self._fail(verdict)

    def on_crash(self, error: Exception) -> None:
        """A bug of ours in what the request made of a prefill's end."""
        self.exchange.on_crash(error)

    def _ends_well(self) -> bool:
        """An answer without content may be over but for `[DONE]`: a finish is never taken back."""
        leg = self.exchange.leg
        if leg is None or leg.state is not LegState.ANSWERING:
            return False
        leg.has_rest = True  # it waits for a prefill that will not come
        return self.exchange.survives(leg, "completed")

    def _fail(self, verdict: Verdict) -> None:
        ticket = self.exchange.ticket
        assert verdict.failure is not None
        word = told_by_prefill(
            verdict.fact,
            answer_began=ticket.state in _BEGUN,
            was_received=verdict.was_received,
        )
        if verdict.fact == "let_go" and verdict.was_received:
            # Lost on its way: no fault of the worker's.
            ticket.note_miss(self.choice.prefill.worker)
        elif word != "rejected":  # a 4xx is a verdict on what was sent, and blames nobody
            ticket.tried.add(self.choice.prefill.worker)
        self.exchange.give_up(word, verdict.failure)

    def _hand_over(self, handoff: bytes | None) -> None:
        """The hand-off is used once: a second decode with it would read another's KV cache."""
        body = self.orders.decode_body
        self._send_decode(body if handoff is None else shape_decode(body, handoff))
        self.exchange.channel.rearm()

    # Sending

    def _make_prefill(self) -> Leg:
        around, exchange, orders = self.around, self.exchange, self.orders
        self.prefill = prefill = Prefill(
            waiting=self,
            counter=around.counter,
            reactor=exchange.channel.reactor,
            family=exchange.route.family,
            seconds=around.prefill_seconds,
            handoff=self._handoff_wanted(),
            listener=self.logprobs,
            drains=not orders.is_serial,
        )
        prefill.leg = leg = RankedLeg(
            id=f"{exchange.ticket.id}.{exchange.ticket.attempts}.prefill",
            worker=self.choice.prefill.worker,
            role="prefill",
            permit=self.places.prefill.redeem(),
            owner=prefill,
            observer=around.leg_observer,
            listeners=around.leg_listeners,
            now=exchange.now,
        )
        leg.rank = orders.prefill_rank
        exchange.ticket.traces.append(leg.trace)
        around.spawn(prefill.live)
        return leg

    def _handoff_wanted(self) -> Handoff:
        if not self.orders.is_serial:
            return "none"
        return "optional" if self.around.recomputes else "required"

    def _send_decode(self, body: bytes) -> None:
        if not self.places.decode.is_open:
            return  # prefill could not even be sent, and the attempt is over
        exchange, around = self.exchange, self.around
        leg = exchange.leg = RankedLeg(
            id=f"{exchange.ticket.id}.{exchange.ticket.attempts}",
            worker=self.choice.decode.worker,
            role="decode",
            permit=self.places.decode.redeem(),
            owner=exchange,
            observer=around.leg_observer,
            listeners=(*around.leg_listeners, self.watch.on_edge),
            now=exchange.now,
        )
        leg.rank = self.orders.decode_rank
        exchange.start(leg)
        self._send(leg, body, self.orders.decode_rank)

    def _send(self, leg: Leg, body: bytes, rank: int | None) -> None:
        exchange = self.exchange
        headers: Headers = [each for each in exchange.call.headers if each[0] != _RANK_HEADER]
        if rank is not None:
            headers.append((_RANK_HEADER, b"%d" % rank))
        lines = b"%bx-request-id: %b\r\n" % (
            to_worker(headers, identity=True, is_keyed=self.around.is_keyed),
            self._engine_id().encode(),
        )
        line = self.around.line(leg.worker)
        sent = line.send(
            b"POST",
            self.orders.target,
            lines,
            body,
            leg,
            # A bootstrap prefill answers with a stream, too, if one was asked for.
            streams=exchange.clocks.wants_stream and not self._is_handoff(leg),
            movable=self._is_movable if leg is exchange.leg else never,
            queues=True,
        )
        leg.attach(sent)

    def _is_handoff(self, leg: Leg) -> bool:
        return self.orders.is_serial and leg.role == "prefill"

    def _is_movable(self) -> bool:
        """The promise that decode, handed back by its worker, goes on with another pair."""
        ticket = self.exchange.ticket
        moving, decode = ticket.moving, self.choice.decode.worker
        if moving is None or not moving.may_be_handed_back or not moving.may_go_to(decode):
            return False
        return self.around.has_other(ticket, besides=decode)

    def _engine_id(self) -> str:
        """vLLM takes the header as its name; a lease keeps the last attempt's name alive."""
        ticket = self.exchange.ticket
        if self.orders.is_serial and ticket.attempts > 1:
            return f"{ticket.id}-{ticket.attempts}"
        return ticket.id
