"""One client request between its connection and its legs: bytes become facts here.

The exchange is what the reactor's callbacks talk to. It hands a worker's bytes to a relay, writes
what may be forwarded, and fires facts at the request's machine. Leaving the attempt's states
closes the leg before `fire` returns, so that nothing of a given-up attempt can still reach the
client. It never decides what follows from a fact: the chart does, and the task in
`router.serving` acts on the state.
"""

from __future__ import annotations

from attrs import define, field, frozen

from router.calls import Call
from router.errors import Refusal, nest_error
from router.front import ClientChannel
from router.headers import Headers, find, to_client
from router.legs import Leg
from router.openai import judge_answer
from router.relay import DONE_EVENT, Ending, StreamRelay, WholeAnswer
from router.ticket import Answer, Failure, Ticket
from statemachines import REQUEST, Edge
from statemachines.leg import LegState
from statemachines.request import RequestState

S = RequestState

#: What a stream that was let go counts as, by the fact that ended its attempt.
_LET_GO = {
    "client_gone": "client_disconnect",
    "deadline_passed": "expired",
    "prefill_failed": "aborted",
    "shut_down": "aborted",
}
#: How often a silent stream's worker is looked at again.
_SUSPECT_AGAIN_SECONDS = 1.0
_WAITING = frozenset({LegState.CONNECTING, LegState.WAITING, LegState.ANSWERING})
#: Statuses of a worker that has no room now.
_BUSY = frozenset({429, 503})


@frozen
class Deadlines:
    """Seconds; 0 is off. The fifth deadline, connecting, is kept by the pool."""

    request: float
    first_token: float
    stream_idle: float
    #: Silence after which it matters what the worker's probes say.
    suspect_idle: float


@frozen
class Route:
    """A path that is proxied: its metric label, and how its events are judged."""

    label: str
    family: str


@define(eq=False)
class Exchange:
    """One request; implements what the client's channel and the legs tell."""

    ticket: Ticket
    call: Call
    channel: ClientChannel
    route: Route
    deadlines: Deadlines
    whole_bytes_max: int
    #: The client asked for a stream: then silence before the first event is judged, too.
    wants_stream: bool
    leg: Leg | None = None
    #: The end of the wait under the admission cap, or None.
    queue_until: float | None = None
    _relay: StreamRelay | None = None
    _whole: WholeAnswer | None = None
    #: The answer goes through unread: too large to hold, or encoded against our wish.
    _passing: bool = False
    _status: int = 0
    _headers: Headers = field(factory=list)

    # Facts

    def fire(self, fact: str, failure: Failure | None = None) -> None:
        """Report a fact of this request, with what to tell the client if it is the last."""
        if failure is not None:
            self.ticket.failure = failure
        REQUEST.fire(self.ticket, fact)

    def on_edge(self, _ticket: Ticket, edge: Edge) -> None:
        """Listener of the request's machine: scopes end here, synchronously."""
        if "attempt" in edge.leaves:
            leg, self.leg = self.leg, None
            self._relay = self._whole = None
            if leg is not None:
                leg.let_go(_LET_GO.get(edge.fact, "upstream_error"))
            self.channel.waker.wake()
        elif "request" in edge.leaves:
            self.channel.waker.wake()

    def start(self, leg: Leg) -> None:
        """A leg begins; the deadlines of the attempt begin with it."""
        self.leg = leg
        self._relay = self._whole = None
        self._passing = False
        self.queue_until = None

    def _lose(self, leg: Leg, leg_fact: str, fact: str, failure: Failure) -> None:
        """The leg ended badly: its own fact, then the request's."""
        self.ticket.tried.add(leg.worker)
        leg.fire(leg_fact)
        self.fire(fact, failure)

    # What the leg tells

    def on_leg_head(self, leg: Leg, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = headers
        kind = find(headers, b"content-type") or b""
        if not 200 <= status < 300 or not kind.startswith(b"text/event-stream"):
            self._whole = WholeAnswer(self.whole_bytes_max)
            return
        leg.is_stream = True
        if (find(headers, b"content-encoding") or b"identity").lower() == b"identity":
            self._relay = StreamRelay(self.route.family)
        else:
            self._passing = True

    def on_leg_body(self, leg: Leg, data: bytes) -> None:
        if self._relay is not None:
            self._feed_stream(leg, self._relay, data)
        elif self._passing:
            self._pass(data)
        elif self._whole is not None:
            self._whole.feed(data)
            if self._whole.is_too_large:
                self._meet_large_answer(leg, self._whole)

    def on_leg_end(self, leg: Leg) -> None:
        if self._relay is not None:
            self._relay.finish()
            self._end_stream(leg, self._relay, b"")
        elif self._passing:
            self._end_passing(leg)
        elif self._whole is not None:
            self._end_whole(leg, self._whole.body())

    def on_leg_broken(self, leg: Leg, detail: str, *, connecting: bool) -> None:
        if connecting:
            leg.worker.probe_soon()
            refusal = Refusal("upstream_unreachable", "The worker cannot be reached.")
            self._lose(leg, "broke", "leg_lost", Failure(refusal))
        elif self._relay is not None and self._relay.released and self._relay.judge.finished:
            self._complete_locally(leg, "broke", "lost_after_end")
        else:
            leg.worker.probe_soon()
            self._lose(leg, "broke", "leg_lost", Failure(_broken()))

    # Streams

    def _feed_stream(self, leg: Leg, relay: StreamRelay, data: bytes) -> None:
        had_content, was_released = relay.has_content, relay.released
        forward = relay.feed(data)
        if relay.progressed:
            leg.last_event_at = self.channel.reactor.now
        if relay.has_content and not had_content:
            self._meet_first_token(leg)
        elif relay.released and not was_released:
            self.fire("answered")
        if relay.ending is not None:
            self._end_stream(leg, relay, forward)
        elif forward:
            if was_released:
                self.channel.write(forward)
            else:
                self._begin(forward)

    def _meet_first_token(self, leg: Leg) -> None:
        if self.ticket.first_token_at is None:
            self.ticket.first_token_at = self.channel.reactor.now
        leg.fire("first_token")
        self.fire("first_token")
        self.channel.rearm()

    def _end_stream(self, leg: Leg, relay: StreamRelay, forward: bytes) -> None:
        ending = relay.ending
        if ending is Ending.WELL:
            self._write_last(forward)
            self._complete(leg, relay)
            return
        if forward:
            self._write(forward)
        if ending is Ending.UNMARKED:
            self._complete_locally(leg, "completed", "completed")
        elif ending is Ending.ERROR:
            self._meet_error_event(leg, relay)
        else:
            self._lose(leg, "lied", "leg_lied", Failure(_broken()))

    def _complete(self, leg: Leg, relay: StreamRelay) -> None:
        judge = relay.judge
        self.ticket.prompt_tokens = judge.prompt_tokens
        self.ticket.completion_tokens = judge.completion_tokens
        leg.stream_outcome = "ok"
        leg.fire("completed")
        self.fire("completed")

    def _complete_locally(self, leg: Leg, leg_fact: str, fact: str) -> None:
        """The finish is delivered and only `[DONE]` is missing: it is written here."""
        assert self._relay is not None
        is_marked = self.route.family != "other"
        self._write_last(DONE_EVENT if is_marked else b"")
        self.ticket.prompt_tokens = self._relay.judge.prompt_tokens
        self.ticket.completion_tokens = self._relay.judge.completion_tokens
        leg.stream_outcome = "ok"
        leg.fire(leg_fact)
        self.fire(fact)

    def _meet_error_event(self, leg: Leg, relay: StreamRelay) -> None:
        status = relay.judge.error_status
        leg.stream_outcome = "error_event"
        if relay.released:
            failure = Failure(_broken(), event=relay.error_event)
        else:
            body = nest_error(relay.judge.error_body)
            answer = Answer(status, [(b"content-type", b"application/json")], body)
            failure = Failure(_broken(), answer=answer)
        if status in _BUSY:
            leg_fact, fact = "backpressure", "leg_lied" if relay.released else "overloaded"
        elif status < 500:
            leg_fact, fact = "rejected", "rejected"
        else:
            leg_fact, fact = "erred", "leg_lied" if relay.released else "overloaded"
        self._lose(leg, leg_fact, fact, failure)

    def _write(self, data: bytes) -> None:
        if self.channel.reply_begun:
            self.channel.write(data)
        else:
            self._begin(data)

    def _write_last(self, data: bytes) -> None:
        if not self.channel.reply_begun:
            self._begin(b"")
        self.channel.write_last(data)

    def _begin(self, data: bytes) -> None:
        self.ticket.status = self._status
        self.channel.begin(self._status, self._reply_lines(stream=True), data)

    # Whole answers

    def _end_whole(self, leg: Leg, body: bytes) -> None:
        status = self._status
        if status >= 400:
            self._meet_error_answer(leg, Answer(status, self._headers, body))
        elif status == 200 and not body:
            # An empty 200 is no answer (GoModel PR #1015); nothing was sent, so try elsewhere.
            self._lose(leg, "lied", "leg_lost", Failure(_broken()))
        elif self.route.family == "openai" and self._lies(body):
            self._lose(leg, "lied", "leg_lied", Failure(_broken()))
        else:
            self.ticket.status = status
            self.channel.respond(status, self._reply_lines(stream=False), body)
            leg.fire("completed")
            self.fire("completed")

    def _lies(self, body: bytes) -> bool:
        verdict = judge_answer(body)
        self.ticket.prompt_tokens = verdict.prompt_tokens
        self.ticket.completion_tokens = verdict.completion_tokens
        return verdict.lies

    def _meet_error_answer(self, leg: Leg, answer: Answer) -> None:
        failure = Failure(_broken(), answer=answer)
        if answer.status in _BUSY:
            self._lose(leg, "backpressure", "overloaded", failure)
        elif answer.status < 500:
            self._lose(leg, "rejected", "rejected", failure)
        else:
            self._lose(leg, "erred", "overloaded", failure)

    def _meet_large_answer(self, leg: Leg, whole: WholeAnswer) -> None:
        """More than may be held: from here on it goes through, and can no longer be retried."""
        self._whole = None
        if self._status >= 400:
            self._lose(leg, "broke", "leg_lost", Failure(_broken()))
            return
        self._passing = True
        self._pass(whole.body())

    def _pass(self, data: bytes) -> None:
        if not self.channel.reply_begun:
            self.fire("answered")
        self._write(data)

    def _end_passing(self, leg: Leg) -> None:
        self._write_last(b"")
        leg.stream_outcome = "ok"
        leg.fire("completed")
        self.fire("completed")

    def _reply_lines(self, *, stream: bool) -> bytes:
        lines = to_client(self._headers, stream=stream)
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
        self.channel.waker.throw(error)

    # Deadlines

    def next_deadline(self) -> float | None:
        """The nearest of the request's, the queue's and the leg's (Trio's clock, seconds)."""
        if self.ticket.is_over:
            return None  # its task has yet to run; a due moment that stays would never let it
        nearest = self._request_due()
        for due in (self.queue_until, self._leg_due()):
            if due is not None and (nearest is None or due < nearest):
                nearest = due
        return nearest

    def on_deadline(self, now: float) -> None:
        if self.ticket.is_over:
            return
        if (due := self._request_due()) is not None and due <= now:
            message = f"The request took longer than {self.deadlines.request:g} seconds."
            self.fire("deadline_passed", Failure(Refusal("request_timeout", message)))
        elif self.queue_until is not None and self.queue_until <= now:
            message = "The request waited too long for its turn."
            self.fire("refused", Failure(Refusal("queue_timeout", message, retry_after=1)))
        elif self.leg is not None and (due := self._leg_due()) is not None and due <= now:
            self._meet_silence(self.leg, now)

    def _request_due(self) -> float | None:
        seconds = self.deadlines.request
        return self.ticket.started_at + seconds if seconds else None

    def _leg_due(self) -> float | None:
        leg = self.leg
        if leg is None or not self.wants_stream or leg.paused:
            return None
        stall, suspect = self._stall_due(leg), self._suspect_due(leg)
        if stall is None or (suspect is not None and suspect < stall):
            return suspect
        return stall

    def _stall_due(self, leg: Leg) -> float | None:
        if leg.state in _WAITING:
            seconds = self.deadlines.first_token
            return leg.sent_at + seconds if seconds else None
        if leg.state is LegState.STREAMING and self.deadlines.stream_idle:
            return leg.last_event_at + self.deadlines.stream_idle
        return None

    def _suspect_due(self, leg: Leg) -> float | None:
        seconds = self.deadlines.suspect_idle
        if not seconds:
            return None
        return max(leg.last_event_at + seconds, leg.suspect_again_at)

    def _meet_silence(self, leg: Leg, now: float) -> None:
        """Silence alone is patience's matter; with a worker that nobody reaches, it is the end.

        A real vLLM 0.32 hangs with the socket open in a third of its shutdowns, while its port is
        already closed.
        """
        stall = self._stall_due(leg)
        if stall is not None and stall <= now:
            self._meet_stall(leg)
        elif leg.worker.is_silent:
            self._lose(leg, "stalled", "leg_stalled", Failure(_broken()))
        else:
            leg.worker.probe_soon()
            leg.suspect_again_at = now + _SUSPECT_AGAIN_SECONDS

    def _meet_stall(self, leg: Leg) -> None:
        leg.worker.probe_soon()
        if leg.state is LegState.STREAMING:
            seconds = self.deadlines.stream_idle
            refusal = Refusal("stream_idle_timeout", f"The worker was silent for {seconds:g} s.")
        else:
            seconds = self.deadlines.first_token
            refusal = Refusal("first_token_timeout", f"No first token within {seconds:g} s.")
        self._lose(leg, "stalled", "leg_stalled", Failure(refusal))

    # The end

    def conclude(self) -> None:
        """Tell the client how it ended, where the good answer has not told already."""
        ticket, channel = self.ticket, self.channel
        if ticket.state not in (S.FAILED, S.ABORTED) or not channel.is_open:
            return
        failure = ticket.failure or Failure(Refusal("internal_error", "The router has failed."))
        if channel.reply_begun:
            channel.cut(failure.event or failure.refusal.event())
        elif failure.answer is not None:
            answer = failure.answer
            self._headers = answer.headers
            ticket.status = answer.status
            lines = self._reply_lines(stream=False)
            channel.respond(answer.status, lines, nest_error(answer.body))
        else:
            ticket.status = failure.refusal.status
            channel.refuse(failure.refusal, ticket.id)


def _broken() -> Refusal:
    return Refusal("upstream_broken", "The worker's answer broke off before its end.")
