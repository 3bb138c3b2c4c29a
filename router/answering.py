"""How a worker's answer is read: whole, as a stream of events, or passed through unread.

One object an attempt, made when the head is there. Each knows what its kind of answer can mean
(complete, an end that lies, an error in-band or as a status), tells the exchange what to write,
and ends by exactly one pair of facts, one for the leg and one for the request.
"""

from __future__ import annotations

from typing import Protocol

from router.errors import Refusal, nest_error
from router.front import ClientChannel
from router.headers import Headers
from router.legs import Leg
from router.openai import BUSY, judge_answer
from router.relay import Ending, StreamRelay, WholeAnswer
from router.ticket import Answer, Failure
from router.traces import GAVE_UP, UNREADABLE, error_event, error_in_body
from router.unpacking import NotPacked, encoding_of, unpack, unpacker_of, without_encoding


class RouteView(Protocol):
    """What an answer needs to know of its route."""

    @property
    def family(self) -> str: ...


class Exchange(Protocol):
    """What an answer may do to its exchange."""

    status: int
    headers: Headers
    whole_bytes_max: int

    @property
    def channel(self) -> ClientChannel: ...
    @property
    def route(self) -> RouteView: ...
    @property
    def now(self) -> float: ...

    def fire(self, fact: str, failure: Failure | None = None) -> None: ...
    def lose(self, leg: Leg, leg_fact: str, fact: str, failure: Failure) -> None: ...
    def complete(self, leg: Leg, leg_fact: str = ..., fact: str = ...) -> None: ...
    def meet_first_token(self, leg: Leg) -> None: ...
    def meet_poison(self) -> None: ...
    def refuse_unfaithful(self, leg: Leg) -> None: ...
    def settle(self, leg: Leg) -> None: ...
    def complete_locally(self, leg: Leg, leg_fact: str, fact: str, *, is_marked: bool) -> None: ...
    def pass_on(self, leg: Leg, answering: Answering) -> None: ...
    def write(self, data: bytes) -> None: ...
    def write_last(self, data: bytes) -> None: ...
    def respond(self, body: bytes) -> None: ...
    def count_tokens(self, prompt_tokens: int | None, completion_tokens: int | None) -> None: ...
    def choices_asked(self) -> int: ...


class Answering(Protocol):
    """One answer being read."""

    def feed(self, data: bytes) -> None:
        """More of the body."""

    def end(self) -> None:
        """The body ended as its framing promised."""

    def survives(self, leg_fact: str) -> bool:
        """The leg is lost by this fact: end with what was there if that is all, or say no."""


class StreamAnswering:
    """A stream of events."""

    __slots__ = ("_exchange", "_leg", "_reactor", "_relay", "_write")

    def __init__(self, exchange: Exchange, leg: Leg, relay: StreamRelay) -> None:
        self._exchange = exchange
        self._leg = leg
        self._relay = relay
        # Bound once: after its head, a stream is written event by event.
        self._write = exchange.channel.write
        self._reactor = exchange.channel.reactor

    def feed(self, data: bytes) -> None:
        relay = self._relay
        if not relay.has_content:
            self._feed_first(data)
            return
        forward = relay.feed(data)
        if relay.progressed:
            self._leg.last_event_at = self._reactor.now
        if relay.ending is not None:
            self._end(forward)
            return
        if forward:
            self._write(forward)
        if relay.is_poisoned:
            self._exchange.meet_poison()

    def _feed_first(self, data: bytes) -> None:
        """The same until content has come: head and first content go out with what brings them."""
        relay, exchange = self._relay, self._exchange
        was_released = relay.released
        forward = relay.feed(data)
        if relay.progressed:
            self._leg.last_event_at = self._reactor.now
        if relay.has_content:
            exchange.meet_first_token(self._leg)
        elif relay.released and not was_released:
            exchange.fire("answered")
        if relay.ending is not None:
            self._end(forward)
            return
        if forward:
            exchange.write(forward)
        if relay.is_poisoned:
            exchange.meet_poison()

    def end(self) -> None:
        was_released = self._relay.released
        rest = self._relay.finish()
        if self._relay.released and not was_released:
            self._exchange.fire("answered")
        self._end(rest)

    def survives(self, leg_fact: str) -> bool:
        if not (self._relay.released and self._is_finished()):
            return False
        if leg_fact == "stalled":
            self._leg.trace.meet("silent between its finish and its end")
        self._complete_locally(leg_fact, "lost_after_end")
        return True

    def _end(self, forward: bytes) -> None:
        ending, exchange = self._relay.ending, self._exchange
        if ending is Ending.WELL:
            exchange.write_last(forward)
            self._count_tokens()
            self._leg.has_rest = self._relay.is_cut_short
            exchange.complete(self._leg)
            return
        if forward:
            exchange.write(forward)
        if ending is Ending.UNMARKED and self._is_finished():
            self._complete_locally("completed", "completed")
        elif ending is Ending.ERROR:
            self._meet_error_event()
        elif self._relay.is_unsettled:
            exchange.settle(self._leg)
        elif self._relay.is_unfaithful:
            exchange.refuse_unfaithful(self._leg)
        else:
            self._leg.trace.meet(self._met_at_end())
            exchange.lose(self._leg, "lied", "leg_lied", Failure(broken()))

    def _met_at_end(self) -> str:
        """What an end that lies was, for the log."""
        if self._relay.ending is Ending.TOO_LARGE:
            return "an event without end"
        if not self._relay.error_event:
            return "no finish before the end"
        return "[DONE] without a finish" if self._relay.judge.done else GAVE_UP

    def _is_finished(self) -> bool:
        """Every choice that was asked for has its finish, not only those that were seen."""
        judge = self._relay.judge
        if not judge.has_finish:
            return self._relay.ending is Ending.UNMARKED
        return judge.finished and judge.choices >= self._exchange.choices_asked()

    def _complete_locally(self, leg_fact: str, fact: str) -> None:
        """The finish is delivered and only `[DONE]` is missing: it is written here."""
        self._count_tokens()
        is_marked = self._relay.judge.has_finish
        self._exchange.complete_locally(self._leg, leg_fact, fact, is_marked=is_marked)

    def _count_tokens(self) -> None:
        self._exchange.count_tokens(*self._relay.tokens)

    def _meet_error_event(self) -> None:
        relay = self._relay
        status = relay.judge.error_status
        self._leg.stream_outcome = "error_event"
        self._leg.trace.meet(error_event(status))
        if relay.released:
            failure = Failure(broken(), event=relay.error_event)
        else:
            body = nest_error(relay.judge.error_body)
            answer = Answer(status, [(b"content-type", b"application/json")], body)
            failure = Failure(broken(), answer=answer)
        fact = "leg_lied" if relay.released else "overloaded"
        if status in BUSY:
            self._exchange.lose(self._leg, "backpressure", fact, failure)
        elif status < 500:
            self._exchange.lose(self._leg, "rejected", "rejected", failure)
        else:
            self._exchange.lose(self._leg, "erred", fact, failure)


class WholeAnswering:
    """A unary answer, or an error: held until it is complete, so that it can still be retried."""

    __slots__ = ("_exchange", "_leg", "_whole")

    def __init__(self, exchange: Exchange, leg: Leg) -> None:
        self._exchange = exchange
        self._leg = leg
        self._whole = WholeAnswer(exchange.whole_bytes_max)
        if not 200 <= exchange.status < 300:
            leg.is_error, leg.last_event_at = True, exchange.now
            exchange.channel.rearm()

    def feed(self, data: bytes) -> None:
        self._whole.feed(data)
        if self._whole.is_too_large:
            self._meet_large_answer()

    def end(self) -> None:
        exchange, body = self._exchange, self._whole.body()
        encoding = encoding_of(exchange.headers)
        if encoding and body and exchange.route.family != "other":
            try:
                body = unpack(encoding, body)
            except NotPacked:
                self._meet_unreadable()
                return
            exchange.headers = without_encoding(exchange.headers)
        if self._leg.is_error:
            self._meet_error(Answer(exchange.status, exchange.headers, body))
        elif not body and (exchange.status == 200 or exchange.route.family != "other"):
            # An empty 200 is no answer (GoModel PR #1015); nothing was sent, so try elsewhere.
            self._leg.trace.meet("an answer without a body")
            exchange.lose(self._leg, "lied", "leg_lost", Failure(broken()))
        else:
            self._judge(body)

    def survives(self, leg_fact: str) -> bool:
        """Of an error the status is enough, where its body does not come in time."""
        is_late = self._leg.is_error and leg_fact == "stalled"
        if is_late:
            self._meet_error(Answer.without_body(self._exchange.status, self._exchange.headers))
        return is_late

    def _meet_unreadable(self) -> None:
        """It is not what its encoding says; of an error the status is enough."""
        exchange = self._exchange
        if self._leg.is_error:
            self._meet_error(Answer.without_body(exchange.status, exchange.headers))
        else:
            self._leg.trace.meet(UNREADABLE)
            exchange.lose(self._leg, "broke", "leg_lost", Failure(broken()))

    def _judge(self, body: bytes) -> None:
        exchange = self._exchange
        verdict = judge_answer(exchange.route.family, body)
        exchange.count_tokens(verdict.prompt_tokens, verdict.completion_tokens)
        if verdict.error_status:
            self._leg.trace.meet(error_in_body(verdict.error_status))
            headers: Headers = [(b"content-type", b"application/json")]
            self._meet_error(Answer(verdict.error_status, headers, body))
        elif verdict.lies:
            is_short = verdict.is_short
            self._leg.trace.meet("JSON that ends too early" if is_short else GAVE_UP)
            exchange.lose(self._leg, "lied", "leg_lied", Failure(broken()))
        else:
            exchange.respond(body)
            exchange.complete(self._leg)

    def _meet_error(self, answer: Answer) -> None:
        failure = Failure(broken(), answer=answer)
        if answer.status < 400:
            self._exchange.lose(self._leg, "erred", "overloaded", Failure(redirected()))
        elif answer.status in BUSY:
            self._exchange.lose(self._leg, "backpressure", "overloaded", failure)
        elif answer.status < 500:
            self._exchange.lose(self._leg, "rejected", "rejected", failure)
        else:
            self._exchange.lose(self._leg, "erred", "overloaded", failure)

    def _meet_large_answer(self) -> None:
        """More than may be held: from here on it goes through, and can no longer be retried."""
        if self._leg.is_error:
            self._meet_error(Answer.without_body(self._exchange.status, self._exchange.headers))
            return
        passing = PassingAnswering(self._exchange, self._leg)
        self._exchange.pass_on(self._leg, passing)
        passing.feed(self._whole.body())


class PackedAnswering:
    """A stream of events that came compressed although nobody asked for that."""

    __slots__ = ("_exchange", "_leg", "_streaming", "_unpacker")

    def __init__(
        self, exchange: Exchange, leg: Leg, streaming: StreamAnswering, encoding: bytes
    ) -> None:
        self._exchange = exchange
        self._leg = leg
        self._streaming = streaming
        self._unpacker = unpacker_of(encoding)

    def feed(self, data: bytes) -> None:
        try:
            if self._unpacker is None:
                raise NotPacked("an unknown encoding")
            events = self._unpacker.feed(data)
        except NotPacked:
            self._leg.trace.meet(UNREADABLE)
            self._exchange.lose(self._leg, "broke", "leg_lost", Failure(broken()))
            return
        if events:
            self._streaming.feed(events)

    def end(self) -> None:
        self._streaming.end()

    def survives(self, leg_fact: str) -> bool:
        return self._streaming.survives(leg_fact)


class PassingAnswering:
    """An answer that goes through unread, since it is too large to hold."""

    __slots__ = ("_exchange", "_has_begun", "_leg")

    def __init__(self, exchange: Exchange, leg: Leg) -> None:
        self._exchange = exchange
        self._leg = leg
        self._has_begun = False

    def feed(self, data: bytes) -> None:
        self._leg.last_event_at = self._exchange.now
        self._begin()
        self._exchange.write(data)

    def end(self) -> None:
        self._begin()
        self._exchange.write_last(b"")
        self._exchange.complete(self._leg)

    def survives(self, leg_fact: str) -> bool:
        return False

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._exchange.fire("answered")


def broken() -> Refusal:
    """A worker's answer that is not whole."""
    return Refusal("upstream_broken", "The worker's answer broke off before its end.")


def redirected() -> Refusal:
    """No answer to any request here; where to would be an address of a worker."""
    return Refusal("upstream_broken", "The worker answered with a redirection.")


def unreachable() -> Refusal:
    """Nobody got the request."""
    return Refusal("upstream_unreachable", "The worker cannot be reached.")


def leaving() -> Refusal:
    """A worker that drains gave the request back."""
    return Refusal("shutting_down", "The worker is shutting down.")


def crowded() -> Refusal:
    """A worker's queue holds all that it may."""
    return Refusal("queue_full", "Too many requests wait at the worker.", retry_after=1)


def too_large(limit: int) -> Refusal:
    """More than the wire takes, in bytes."""
    message = f"The message broker carries at most {limit} bytes, and the request is larger."
    return Refusal("body_too_large", message)
