"""One client request between its connection and its legs: bytes become facts here.

The exchange is what the reactor's callbacks talk to. It fires facts at the request's machine and
writes the answer; how an answer is read is `router.answering`'s matter. Leaving the attempt's
states closes the leg before `fire` returns, so that nothing of a given-up attempt can still reach
the client. It never decides what follows from a fact: the chart does, and the task in
`router.serving` acts on the state.
"""

from __future__ import annotations

import trio
from attrs import define, field

from router.answering import (
    Answering,
    PackedAnswering,
    StreamAnswering,
    WholeAnswering,
    broken,
    crowded,
    leaving,
    too_large,
    unreachable,
)
from router.books import Books
from router.calls import Call
from router.clocks import Clocks
from router.errors import Refusal, nest_error
from router.front import ClientChannel
from router.headers import Headers, find, to_client
from router.legs import Leg
from router.moving import Moving
from router.openai import Judge
from router.partners import Observer, Pair
from router.patience import meet_deadline
from router.relay import DONE_EVENT, MovingRelay, StreamRelay
from router.routes import Route
from router.ticket import Failure, Ticket
from router.unpacking import encoding_of, without_encoding
from router.width import choices_asked
from statemachines import REQUEST, Edge
from statemachines.leg import LegState
from statemachines.request import RequestState

S = RequestState

#: What a stream that was let go counts as, by the fact that ended its attempt.
_LET_GO = {
    "client_gone": "client_disconnect",
    "deadline_passed": "expired",
    "prefill_failed": "aborted",
    "rejected": "aborted",  # by its prefill: a leg that was rejected itself is over already
    "shut_down": "aborted",
}
#: The client has something, so that a lost leg is a break and not another try.
_MOVABLE = frozenset({S.COMMITTED, S.STREAMING, S.POISONED, S.RESUMING})
#: A leg in these states may be given back by its worker.
_GIVEN_BACK_FROM = frozenset({LegState.WAITING, LegState.ANSWERING, LegState.STREAMING})


@define(eq=False)
class Exchange:
    """One request; implements what the client's channel and the legs tell."""

    ticket: Ticket
    call: Call
    channel: ClientChannel
    route: Route
    clocks: Clocks
    whole_bytes_max: int
    observer: Observer
    books: Books
    leg: Leg | None = None
    #: The pair of the attempt, where it takes two workers; `leg` is decode's then.
    pair: Pair | None = None
    #: The end of the wait under the admission cap, or None.
    queue_until: float | None = None
    #: Status and headers of the answer, once they are there.
    status: int = 0
    headers: Headers = field(factory=list)
    _answering: Answering | None = None
    #: Cancels what the task does for the request outside the reactor, when the request ends.
    asking: trio.CancelScope | None = None
    _is_poison_told: bool = False
    #: The reply that was begun is a stream of events, so that an error can be one of them.
    _replies_events: bool = False

    @property
    def now(self) -> float:
        """Time of the current pass (Trio's clock, seconds)."""
        return self.channel.reactor.now

    # Facts

    def fire(self, fact: str, failure: Failure | None = None) -> None:
        """Report a fact of this request, with what to tell the client if it is the last."""
        if failure is not None:
            self.ticket.failure = failure
        REQUEST.fire(self.ticket, fact)

    def on_edge(self, ticket: Ticket, edge: Edge) -> None:
        """Listener of the request's machine: scopes end here, synchronously."""
        ticket.note(self.channel.reactor.now, edge)
        leaves = edge.leaves
        if not leaves:
            return
        if "attempt" in leaves:
            self._answering = None
            if self.leg is not None:
                self.leg.let_go(_LET_GO.get(edge.fact, "upstream_error"))
                self.leg = None
            if self.pair is not None:
                self.pair.leave(edge.fact)
                self.pair = None
        if "request" in leaves:
            if self.asking is not None:
                self.asking.cancel(reason="the request is over")
            self.observer.conclude(self)
        else:
            self.clocks.kept_alive_at = self.now
            self.channel.waker.wake()
            self.channel.rearm()

    def start(self, leg: Leg) -> None:
        """A leg begins; the deadlines of the attempt begin with it."""
        self.leg = leg
        self.ticket.traces.append(leg.trace)
        self._answering = None
        self.queue_until = None
        self.clocks.go_to(behind_nats=leg.worker.is_behind_nats)
        if self.channel.is_slow:
            leg.pause()

    # What the leg tells

    def on_leg_head(self, leg: Leg, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        answering = self._choose_answering(leg)
        if self.pair is not None:
            answering = self.pair.on_decode_head(leg, status, answering)
        self._answering = answering
        # From here on the wire feeds the answer directly: nothing lies between on every event.
        leg.on_body = answering.feed

    def on_leg_end(self, leg: Leg) -> None:
        if self._answering is not None:
            self._answering.end()

    def on_leg_broken(self, leg: Leg, detail: str, *, connecting: bool) -> None:
        if leg.is_absent:
            leg.trace.was_in_vain = True
            leg.worker.probe_soon()
            self.lose(leg, "let_go", "passed_over", Failure(unreachable()), was_sent=False)
        elif connecting:
            leg.worker.probe_soon()
            self.lose(leg, "broke", "leg_lost", Failure(unreachable()), was_sent=False)
        elif not self.survives(leg, "broke"):
            leg.worker.probe_soon()
            self.lose(leg, "broke", "leg_lost", Failure(broken()))

    def on_leg_handed_back(self, leg: Leg) -> None:
        if not self.survives(leg, "handed_back"):
            self.lose(leg, "handed_back", "handed_back", Failure(leaving()))

    def on_leg_full(self, leg: Leg) -> None:
        self.lose(leg, "backpressure", "overloaded", Failure(crowded()))

    def on_leg_too_large(self, leg: Leg, limit: int) -> None:
        """No verdict on anybody: another form of it, or a worker that is reached by another way."""
        moving = self.ticket.moving
        if moving is not None and moving.can_rephrase:
            self._refuse_form(leg)
            return
        failure = Failure(too_large(limit))
        if self.ticket.state is S.DISPATCHING and not self.observer.has_other_way(self):
            self.lose(leg, "let_go", "rejected", failure)
            return
        self.ticket.tried.add(leg.worker)
        if self.ticket.state is S.RESUMING:
            failure = Failure(broken())  # what is too large is not what the client wrote
        leg.fire("let_go")
        self.fire("passed_over", failure)

    def on_leg_unread(self, leg: Leg) -> None:
        """The client reads too little, and nobody holds the worker back: the same as a stall."""
        self.channel.give_up()

    def on_leg_missed(self, leg: Leg, detail: str) -> None:
        leg.trace.was_in_vain = True
        if not self.survives(leg, "let_go"):
            refusal = unreachable() if leg.state is LegState.CONNECTING else broken()
            self.ticket.note_miss(leg.worker)
            self.lose(leg, "let_go", "leg_lost", Failure(refusal), is_blamed=False)

    def survives(self, leg: Leg, leg_fact: str) -> bool:
        """The leg is lost by this fact; whether that ended the request as it should."""
        return self._answering is not None and self._answering.survives(leg_fact)

    def _choose_answering(self, leg: Leg) -> Answering:
        kind = find(self.headers, b"content-type") or b""
        if not 200 <= self.status < 300 or not kind.startswith(b"text/event-stream"):
            return WholeAnswering(self, leg)
        leg.is_stream = True
        relay = self._make_relay()
        # Others may leave out what they do not know of, `n` for example.
        if self.route.family == "openai" and leg.worker.engine in ("vllm", "sglang"):
            relay.judge.due = self.choices_asked
        streaming = StreamAnswering(self, leg, relay)
        encoding = encoding_of(self.headers)
        if encoding:
            # We asked for none: streams are never compressed, and their events must be read.
            self.headers = without_encoding(self.headers)
        if self.pair is not None and self.ticket.state is S.DISPATCHING:
            self._forward_head(relay)
        return PackedAnswering(self, leg, streaming, encoding) if encoding else streaming

    def _forward_head(self, relay: StreamRelay) -> None:
        """Decode has answered: its client need not wait for the first token to know."""
        relay.released = True
        self.fire("answered")
        self.write(b"")

    def _make_relay(self) -> StreamRelay:
        moving = self.ticket.moving
        if moving is None or moving.attempt is None:
            return StreamRelay(Judge(self.route.family))
        return MovingRelay(moving.attempt, resumed=self.ticket.state is S.RESUMING)

    # What an answer needs

    def lose(
        self,
        leg: Leg,
        leg_fact: str,
        fact: str,
        failure: Failure,
        *,
        was_sent: bool = True,
        is_blamed: bool = True,
    ) -> None:
        """The leg ended badly: its own fact, then the request's.

        `is_blamed`: the worker is not given this request again.
        """
        ticket, moving = self.ticket, self.ticket.moving
        if fact != "rejected":  # a 4xx is a verdict on what was sent, and blames nobody
            if is_blamed:
                ticket.tried.add(leg.worker)
            if moving is not None:
                self._note_break(leg, moving, leg_fact, was_sent=was_sent)
        leg.fire(leg_fact)
        self.give_up(fact, failure)

    def give_up(self, fact: str, failure: Failure) -> None:
        """The attempt failed, by this fact of the request."""
        ticket, moving = self.ticket, self.ticket.moving
        if fact == "rejected" and moving is not None and ticket.state is S.RESUMING:
            # It answers a continuation that the client never wrote, so it is not for the client.
            failure = Failure(broken())
            if not moving.can_rephrase:
                moving.stuck = "rejected"
        self.fire(fact, failure)
        if fact == "rejected" and moving is not None and ticket.state is S.MIGRATING:
            moving.refuse_form()

    def _note_break(self, leg: Leg, moving: Moving, leg_fact: str, *, was_sent: bool) -> None:
        # A status is an answer, and an abort is orderly: by neither has anybody died.
        died = (leg_fact == "broke" and was_sent) or (leg_fact == "erred" and leg.is_stream)
        reason = "worker_draining" if leg_fact == "handed_back" else "stream_broken"
        if self.ticket.state in _MOVABLE:
            moving.lose(leg.worker, last_event_at=leg.last_event_at, died=died, reason=reason)
            if moving.can_migrate and leg.stream_outcome is not None and leg.is_stream:
                moving.undecided.append((leg.worker.id, leg.stream_outcome))
                leg.stream_outcome = None

    def refuse_unfaithful(self, leg: Leg) -> None:
        """The worker went on with something else."""
        leg.trace.was_in_vain = True
        leg.trace.meet("did not go on where the stream had ended")
        self._refuse_form(leg)

    def _refuse_form(self, leg: Leg) -> None:
        """This form of the continuation will not do; there may be another."""
        self.lose(leg, "let_go", "rejected", Failure(broken()))

    def hand_back(self, leg: Leg) -> None:
        """The drain window of this leg's worker is over: a stream that can move goes elsewhere."""
        can_move = self.ticket.moving is not None and (
            self.ticket.state in (S.DISPATCHING, S.RESUMING) or self.ticket.can_migrate
        )
        if self.leg is leg and leg.is_open and can_move:
            # Without a sign of the worker there was nothing that it could give back.
            leg_fact = "handed_back" if leg.state in _GIVEN_BACK_FROM else "let_go"
            self.lose(leg, leg_fact, "handed_back", Failure(leaving()))

    def complete(self, leg: Leg, leg_fact: str = "completed", fact: str = "completed") -> None:
        """The client has the whole good answer."""
        leg.stream_outcome = "ok"
        leg.fire(leg_fact)
        self.fire(fact)

    def meet_first_token(self, leg: Leg) -> None:
        """The first content of this attempt is about to be written."""
        if self.ticket.first_token_at is None:
            self.ticket.first_token_at = self.channel.reactor.now
        self.ticket.missed.clear()
        is_resumed = self.ticket.state is S.RESUMING
        leg.fire("first_token")
        self.fire("first_token")
        self.channel.rearm()
        if is_resumed:
            self.books.arrived(self)

    def meet_poison(self) -> None:
        """What was just read can no longer be continued elsewhere."""
        if self._is_poison_told:
            return
        if self.ticket.state is S.STREAMING:
            self.fire("unreplayable")
        if self.ticket.state is S.POISONED:
            self._is_poison_told = True
            self.books.poisoned(self)

    def complete_locally(self, leg: Leg, leg_fact: str, fact: str, *, is_marked: bool) -> None:
        """The finish is delivered; what is missing of the end is written here."""
        moving = self.ticket.moving
        if moving is not None:
            self.write_last(moving.tail())
        else:
            self.write_last(DONE_EVENT if is_marked else b"")
        self.books.completed_locally("finish_seen")
        self.complete(leg, leg_fact, fact)

    def settle(self, leg: Leg) -> None:
        """The worker has done its part; how much of its last event counts is asked without it."""
        leg.stream_outcome = "ok"
        leg.has_rest = True
        leg.fire("completed")
        self.fire("leg_lost", Failure(broken()))

    def complete_without_leg(self, reason: str, tail: bytes) -> None:
        """Between two workers it turned out that nothing was missing but the end."""
        self.write_last(tail)
        self.books.completed_locally(reason)
        self.fire("lost_after_end")

    def pass_on(self, leg: Leg, answering: Answering) -> None:
        """What is left of the answer is handled by another."""
        self._answering = answering
        leg.on_body = answering.feed

    def write(self, data: bytes) -> None:
        """More of the answer, after its head."""
        if self.channel.reply_begun:
            self.channel.write(data)
        else:
            self._begin(data)

    def write_last(self, data: bytes) -> None:
        """The last of the answer and its clean end."""
        if not self.channel.reply_begun:
            self._begin(b"")
        self.channel.write_last(data)

    def respond(self, body: bytes) -> None:
        """The whole answer at once."""
        self.ticket.status = self.status
        self.channel.respond(self.status, self._reply_lines(stream=False), body)

    def count_tokens(self, prompt_tokens: int | None, completion_tokens: int | None) -> None:
        """What the engine said of its usage, for the log."""
        self.ticket.prompt_tokens = prompt_tokens
        self.ticket.completion_tokens = completion_tokens

    def choices_asked(self) -> int:
        """How many choices a whole answer has."""
        return choices_asked(self.call.body, self.route.label)

    def _begin(self, data: bytes) -> None:
        kind = find(self.headers, b"content-type") or b""
        self._replies_events = kind.startswith(b"text/event-stream")
        self.ticket.status = self.status
        self.channel.begin(self.status, self._reply_lines(stream=True), data)

    def _reply_lines(self, *, stream: bool) -> bytes:
        lines = to_client(self.headers, stream=stream)
        return b"%bx-request-id: %b\r\n" % (lines, self.ticket.id.encode())

    # What the client's channel tells

    def on_client_gone(self) -> None:
        if not self.ticket.is_over:
            self.fire("client_gone")

    def on_client_slow(self) -> None:
        if self.leg is not None:
            self.leg.pause()

    def on_client_ready(self) -> None:
        if self.leg is not None:
            self.leg.resume(self.channel.reactor.now)
            self.channel.rearm()

    def on_crash(self, error: Exception) -> None:
        # Told at once, and not through the task: it may be serving the next request by then.
        self.observer.crashed(self, error)

    # Deadlines

    def next_deadline(self) -> float | None:
        """The nearest of this request's clocks (Trio's clock, seconds)."""
        if self.ticket.is_over:
            return None  # its task has yet to run; a due moment that stays would never let it
        return self.clocks.nearest(self.timed, self.queue_until)

    @property
    def timed(self) -> Leg | None:
        """The leg whose silence is judged."""
        if self.leg is None and self.pair is not None:
            return self.pair.awaited
        return self.leg

    def on_deadline(self, now: float) -> None:
        if not self.ticket.is_over:
            meet_deadline(self, now)

    # The end

    def forget(self) -> None:
        """Let go of what the client sent: the request is over, and may be long remembered."""
        self.ticket.listeners = ()
        self.ticket.moving = None
        self.call.body = b""

    def reply_failure(self) -> None:
        """Tell the client how it ended, where the good answer has not told already."""
        ticket, channel = self.ticket, self.channel
        if ticket.state not in (S.FAILED, S.ABORTED) or not channel.is_open:
            return
        failure = ticket.failure or Failure(Refusal("internal_error", "The router has failed."))
        if channel.reply_begun:
            ticket.code = None if failure.event else failure.refusal.code
            last_words = failure.event or failure.refusal.event()
            channel.cut(last_words if self._replies_events else b"")
        elif failure.answer is not None:
            answer = failure.answer
            self.headers = answer.headers
            ticket.status = answer.status
            lines = self._reply_lines(stream=False)
            channel.respond(answer.status, lines, nest_error(answer.body))
        else:
            ticket.status, ticket.code = failure.refusal.status, failure.refusal.code
            channel.refuse(failure.refusal, ticket.id)
