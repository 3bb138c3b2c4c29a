"""One request's life, in Trio: choose a worker, attend to the attempt, conclude.

Each client connection is one task of the front's nursery. For every call it makes a ticket and an
exchange and then does what the state of the ticket asks for, until the state is final: it chooses
in `queued` and `migrating`, and is parked in all the others, where the reactor's callbacks feed
facts to the machine and leaving a scope wakes the task. What a request holds is released here, in
one place, however it ends.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
from attrs import define, field

from router.admission import Admission
from router.booking import Booking
from router.calls import Call
from router.choosing import Chooser
from router.config import Settings
from router.errors import Refusal
from router.exchange import Deadlines, Exchange, Route
from router.front import ClientChannel, Gone
from router.headers import find, request_id_of, to_worker
from router.legs import Leg, LegListener
from router.logs import Logs
from router.metrics import Metrics
from router.openai import Asked, read_request
from router.reactor import Reactor
from router.ticket import Failure, Listener, Ticket
from router.waking import Waker
from router.websocket import WATCH_PATH, Feed
from router.wires.http import Pool
from router.worker import Fleet, Worker
from statemachines.request import RequestState
from statemachines.router import RouterState

#: Ended requests that /debug can still tell about.
ENDED_MAX = 1000

CHAT = Route("chat", "openai")
COMPLETIONS = Route("completions", "openai")
GENERATE = Route("generate", "generate")
OTHER = Route("other", "other")
_ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/generate": GENERATE,
    "/tokenize": OTHER,
    "/detokenize": OTHER,
    "/rerank": OTHER,
    "/score": OTHER,
}
#: Below /v1/, but answered here.
_LOCAL = ("/v1/models", "/v1/workers")
#: Bodies of these kinds are not JSON and are not looked into.
_OPAQUE_BODIES = (b"multipart/", b"application/octet-stream", b"audio/", b"image/")

_log = structlog.get_logger("baton")


class House(Protocol):
    """What serving needs to know of the process it lives in."""

    state: RouterState

    def pool(self, worker: Worker) -> Pool:
        """The connections to a worker."""


def route_of(path: str) -> Route | None:
    """The route of a path that is proxied when it is posted to, or None."""
    route = _ROUTES.get(path)
    if route is None and path.startswith("/v1/") and not path.startswith(_LOCAL):
        return OTHER
    return route


def has_key(call: Call, keys: Sequence[str]) -> bool:
    """Whether a call carries one of these keys as its bearer token; compared in constant time."""
    scheme, _, token = (find(call.headers, b"authorization") or b"").partition(b" ")
    found = [hmac.compare_digest(token.strip(), key.encode()) for key in keys]
    return scheme.lower() == b"bearer" and any(found)


@define(eq=False)
class Serving:
    """Serves calls; owns the live tickets."""

    settings: Settings
    reactor: Reactor
    fleet: Fleet
    chooser: Chooser
    metrics: Metrics
    logs: Logs
    house: House
    feed: Feed
    booking: Booking
    deadlines: Deadlines = field(init=False)
    admission: Admission = field(init=False)
    #: Every open request by its exchange's identity; nothing else counts them.
    live: dict[Ticket, Exchange] = field(factory=dict)
    #: Every client connection that is served.
    channels: set[ClientChannel] = field(factory=set)
    #: Woken whenever the last live request has ended.
    emptied: Waker = field(factory=Waker)
    ended: deque[Ticket] = field(factory=lambda: deque(maxlen=ENDED_MAX))
    _book_request: Listener = field(init=False)
    _leg_listeners: tuple[LegListener, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        settings = self.settings
        self.deadlines = Deadlines(
            request=settings.request_timeout_secs,
            first_token=settings.first_token_timeout_secs,
            stream_idle=settings.stream_idle_timeout_secs,
            suspect_idle=settings.suspect_idle_secs,
        )
        self.admission = Admission(settings.max_concurrent_requests, settings.queue_size)
        self._book_request = self.booking.listener("request")
        self._leg_listeners = (self.booking.listener("leg"),)

    # One connection

    async def serve_connection(
        self, channel: ClientChannel, answer_locally: Callable[[ClientChannel, Call], None]
    ) -> None:
        """Serve the calls of one client connection until it ends. Closes it, also when cancelled.

        `answer_locally` answers whatever is not proxied.
        """
        self.channels.add(channel)
        try:
            while True:
                call = await channel.next_call()
                if self.house.state is not RouterState.SERVING:
                    call.keep_alive = False  # so that a drain is not held up by idle clients
                if call.refusal is not None:
                    channel.refuse(call.refusal, request_id_of(call.headers))
                    channel.finish_call()
                elif call.wants_websocket and call.path == WATCH_PATH and self.may_watch(call):
                    stream, unread = channel.take_over()
                    await self.feed.serve(stream, call, unread)
                    return
                elif call.method == "POST" and (route := route_of(call.path)) is not None:
                    await self.serve_call(channel, call, route)
                else:
                    answer_locally(channel, call)
                    channel.finish_call()
        except Gone:
            await channel.wait_closed()
        except Exception as error:
            self._meet_bug(error, "request")
            if channel.is_open and channel.current is not None and not channel.reply_begun:
                channel.current.keep_alive = False
                channel.refuse(_own_failure())
                channel.end()
                await channel.wait_closed()
        finally:
            self.channels.discard(channel)
            channel.close()

    # One call

    async def serve_call(self, channel: ClientChannel, call: Call, route: Route) -> None:
        """Serve one proxied call to its final state; the reply is written or cut on return.

        The request is concluded where its last fact is fired, mostly in a callback of the reactor,
        and this task stays parked until there is something for it to do: the next call, or the
        end of the connection.
        """
        asked = self._refusal_of_key(call) or _read(call, route)
        refusal = asked if isinstance(asked, Refusal) else None
        read = Asked() if isinstance(asked, Refusal) else asked
        exchange = self._open(channel, call, route, read)
        ticket, waker, holding = exchange.ticket, channel.waker, self.admission.holding
        try:
            if refusal is not None:
                exchange.fire("refused", Failure(refusal))
            else:
                self._admit(exchange)
            while not ticket.is_over:
                if ticket.state is RequestState.QUEUED and exchange in holding:
                    self._dispatch(exchange)
                else:
                    await waker.wait()
        except Exception as error:
            self._meet_bug(error, "request")
            if not ticket.is_over:
                exchange.fire("crashed", Failure(_own_failure()))
        finally:
            if not ticket.is_over:  # cancelled: the router is going down
                exchange.fire("shut_down", Failure(_shutting_down()))

    def owes_bytes(self) -> bool:
        """A client has not yet taken all of an answer."""
        return any(channel.backlog_bytes for channel in self.channels)

    def has_open_channels(self) -> bool:
        """Some client connection is open, if only for its last bytes."""
        return any(channel.is_open for channel in self.channels)

    def shut_down(self) -> None:
        """The drain window is over: end what still runs, visibly, and every connection."""
        self.reactor.turn()  # what has arrived by now comes first
        for exchange in list(self.live.values()):
            if not exchange.ticket.is_over:
                exchange.fire("shut_down", Failure(_shutting_down()))
        for channel in list(self.channels):
            if channel.backlog_bytes:
                channel.end()
            elif not channel.closing:
                channel.close()

    def _open(self, channel: ClientChannel, call: Call, route: Route, asked: Asked) -> Exchange:
        ticket = Ticket(
            id=request_id_of(call.headers),
            route=route.label,
            model=asked.model,
            started_at=self.reactor.now,
            retries_left=self.settings.request_max_retries,
            listeners=(),
        )
        exchange = Exchange(
            ticket=ticket,
            call=call,
            channel=channel,
            route=route,
            deadlines=self.deadlines,
            whole_bytes_max=self.settings.max_body_bytes,
            wants_stream=bool(asked.stream),
            conclude=self._conclude,
        )
        ticket.listeners = (self._book_request, exchange.on_edge)
        self.live[ticket] = exchange
        channel.watcher = exchange
        return exchange

    def may_watch(self, call: Call) -> bool:
        """/debug needs the admin key where there is one."""
        key = self.settings.admin_key
        return key is None or has_key(call, (key,))

    def _refusal_of_key(self, call: Call) -> Refusal | None:
        keys = self.settings.api_key
        if not keys or has_key(call, keys):
            return None
        return Refusal("unauthorized", "A valid API key is required: Authorization: Bearer KEY.")

    def _conclude(self, exchange: Exchange) -> None:
        """Called once, in the final state: give up what it holds, reply, write the books."""
        ticket = exchange.ticket
        now = ticket.ended_at = self.reactor.now
        del self.live[ticket]
        self.ended.append(ticket)
        self.admission.leave(exchange)
        exchange.reply_failure()
        exchange.channel.finish_call()
        if not self.live:
            self.emptied.wake()
        seconds = now - ticket.started_at
        first = ticket.first_token_at
        first_seconds = None if first is None else first - ticket.started_at
        self.metrics.request_ended(
            route=ticket.route,
            outcome=ticket.state.value,
            seconds=seconds,
            first_token_seconds=first_seconds,
        )
        self.logs.request_line(
            id=ticket.id,
            route=ticket.route,
            worker=None if ticket.worker is None else ticket.worker.id,
            attempts=ticket.attempts,
            state=ticket.state.value,
            status=ticket.status,
            prompt_tokens=ticket.prompt_tokens,
            completion_tokens=ticket.completion_tokens,
            first_token_seconds=first_seconds,
            seconds=seconds,
        )

    # Queued

    def _admit(self, exchange: Exchange) -> None:
        if self.house.state is not RouterState.SERVING:
            exchange.fire("refused", Failure(_shutting_down()))
        elif not self.admission.enter(exchange, exchange.channel.waker.wake):
            refusal = Refusal("queue_full", "Too many requests are waiting.", retry_after=1)
            exchange.fire("refused", Failure(refusal))
        elif exchange not in self.admission.holding:
            exchange.queue_until = self.reactor.now + self.settings.queue_timeout_secs
            exchange.channel.rearm()

    def _dispatch(self, exchange: Exchange) -> None:
        """Choose, take the permit and send, without an await in between (dynamo#13088)."""
        ticket, model = exchange.ticket, exchange.ticket.model
        now = self.reactor.now
        candidates = self.fleet.ready("mixed", model)
        choice = self.chooser.choose(candidates, now, ticket.tried, model)
        if choice is None:
            exchange.fire("refused", ticket.failure or Failure(self._nobody(model)))
            return
        worker = ticket.worker = choice.worker
        if choice.forced:
            self.metrics.breaker_overridden(worker.id)
            _log.warning("breaker_overridden", id=ticket.id, worker=worker.id)
        ticket.attempts += 1
        leg = Leg(
            id=f"{ticket.id}.{ticket.attempts}",
            worker=worker,
            role="mixed",
            permit=choice.permit,
            owner=exchange,
            observer=self,
            listeners=self._leg_listeners,
            now=now,
        )
        exchange.start(leg)
        exchange.fire("admitted")
        pool = self.house.pool(worker)
        leg.attach(pool.send(_request_for(pool, exchange), leg))
        exchange.channel.rearm()

    def _nobody(self, model: str | None) -> Refusal:
        if model is not None and self.fleet.all() and not self.fleet.knows(model):
            return Refusal("model_not_found", "No worker serves this model.", param="model")
        return Refusal("no_workers", "No worker is ready.", retry_after=1)

    # What legs report

    def now(self) -> float:
        """Time of the current pass."""
        return self.reactor.now

    def leg_settled(self, leg: Leg, outcome: str) -> None:
        """Book one leg; called once by the leg itself."""
        self.metrics.leg_ended(worker=leg.worker.id, role=leg.role, outcome=outcome)
        if leg.is_stream:
            self.metrics.stream_ended(worker=leg.worker.id, outcome=leg.stream_outcome)

    def _meet_bug(self, error: Exception, place: str) -> None:
        self.metrics.internal_error(place)
        _log.error("internal_error", place=place, exc_info=error)


def _read(call: Call, route: Route) -> Asked | Refusal:
    if route is OTHER:
        kind = find(call.headers, b"content-type") or b""
        if kind.startswith(_OPAQUE_BODIES):
            return Asked()
    return read_request(call.body)


def _request_for(pool: Pool, exchange: Exchange) -> bytes:
    call = exchange.call
    return (
        b"POST %b%b HTTP/1.1\r\nhost: %b\r\n%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b"
        % (
            pool.base_path,
            call.target,
            pool.authority,
            to_worker(call.headers, identity=exchange.route is not OTHER),
            exchange.ticket.id.encode(),
            len(call.body),
            call.body,
        )
    )


def _own_failure() -> Refusal:
    return Refusal("internal_error", "The router has failed; this is a bug in it.")


def _shutting_down() -> Refusal:
    return Refusal("shutting_down", "The router is shutting down.", retry_after=1)
