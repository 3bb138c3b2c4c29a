"""One request's life: choose a worker, send, conclude.

For every proxied call a ticket and an exchange are made. In `queued` and `migrating` a worker is
chosen: at once where the call was read, later by the connection's task (`router.connection`), which
is woken when leaving a scope has brought the request there. In all other states the reactor's
callbacks feed facts to the machine. What a request holds is released here, in one place, however
it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from attrs import define, field

from router.admission import Admission
from router.booking import Booking
from router.books import Books
from router.bugs import Bugs
from router.calls import Call, has_key
from router.choosing import Choice, Chooser
from router.clocks import Clocks, Deadlines
from router.config import Settings
from router.errors import SHUTTING_DOWN, Refusal
from router.exchange import Exchange
from router.feed import Feed
from router.front import ClientChannel
from router.headers import request_id_of, to_worker
from router.legs import Leg, LegListener
from router.metrics import Metrics
from router.migration.shape import examine
from router.mover import Mover
from router.moving import Moving
from router.openai import Asked
from router.pd.aborts import Aborts
from router.pd.pairing import PairChoice
from router.pd.pairs import Pairs, unknown_model
from router.reactor import Reactor
from router.routes import ENDPOINTS, OTHER, Route, read_call
from router.ticket import Failure, Listener, Ticket
from router.waking import Waker
from router.wires.line import Line
from router.worker import Fleet, Worker
from statemachines.request import RequestState
from statemachines.router import RouterState

#: Ended requests that /debug can still tell about.
ENDED_MAX = 1000


class House(Protocol):
    """What serving needs to know of the process it lives in."""

    state: RouterState

    def line(self, worker: Worker) -> Line:
        """The way to a worker."""

    def spawn(self, task: Callable[[], Awaitable[object]]) -> None:
        """Start a task in the router's nursery."""


@define(eq=False)
class Serving:
    """Serves calls; owns the live tickets."""

    settings: Settings
    reactor: Reactor
    fleet: Fleet
    chooser: Chooser
    metrics: Metrics
    books: Books
    house: House
    feed: Feed
    booking: Booking
    mover: Mover
    aborts: Aborts
    pairs: Pairs = field(init=False)
    deadlines: Deadlines = field(init=False)
    admission: Admission = field(init=False)
    #: Every open request by its exchange's identity; nothing else counts them.
    live: dict[Ticket, Exchange] = field(factory=dict)
    #: Every client connection that is served.
    channels: set[ClientChannel] = field(factory=set)
    #: Woken whenever the last live request has ended.
    emptied: Waker = field(factory=Waker)
    ended: deque[Ticket] = field(factory=lambda: deque(maxlen=ENDED_MAX))
    bugs: Bugs = field(init=False)
    _nats_deadlines: Deadlines = field(init=False)
    _soonest: float = field(init=False)
    _book_request: Listener = field(init=False)
    _leg_listeners: tuple[LegListener, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        settings = self.settings
        self.deadlines = Deadlines.of(settings)
        self._nats_deadlines = self.deadlines.behind_nats(settings)
        self._soonest = min(self.deadlines.soonest(), self._nats_deadlines.soonest())
        self.admission = Admission(settings.max_concurrent_requests, settings.queue_size)
        self.bugs = Bugs(self.metrics, self.live, self.ended, self.emptied, self.admission)
        self._book_request = self.booking.listener("request")
        self._leg_listeners = (self.booking.listener("leg"),)
        self.pairs = self.mover.pairs = Pairs(
            settings=settings,
            fleet=self.fleet,
            house=self.house,
            aborts=self.aborts,
            counter=self.metrics,
            leg_observer=self.books,
            leg_listeners=self._leg_listeners,
        )

    @property
    def is_serving(self) -> bool:
        """False once the router is going down."""
        return self.house.state is RouterState.SERVING

    def begin(self, channel: ClientChannel, call: Call, route: Route) -> None:
        """Make the request of a proxied call, and send it if its turn has come.

        The request is concluded where its last fact is fired, mostly in a callback of the reactor.
        """
        asked = self._refusal_of_key(call) or read_call(call, route)
        if isinstance(asked, Refusal):
            exchange = self._open(channel, call, route, Asked())
            exchange.fire("refused", Failure(asked))
            return
        exchange = self._open(channel, call, route, asked)
        self._admit(exchange)
        if exchange in self.admission.holding:
            self._dispatch(exchange)

    async def advance(self, exchange: Exchange) -> bool:
        """Choose again, or move; False where the request waits for something."""
        state = exchange.ticket.state
        if state is RequestState.QUEUED and exchange in self.admission.holding:
            self._dispatch(exchange)
        elif state is RequestState.MIGRATING:
            await self._move(exchange)
        else:
            return False
        return True

    def owes_bytes(self) -> bool:
        """A client has not yet taken all of an answer."""
        return any(channel.backlog_bytes for channel in self.channels)

    def has_open_channels(self) -> bool:
        """Some client connection is open, if only for its last bytes."""
        return any(channel.is_open for channel in self.channels)

    def hand_back(self, worker: Worker) -> None:
        """The drain window of a worker is over: its streams that can move go elsewhere."""
        self.reactor.turn()  # what has arrived by now comes first
        for exchange in list(self.live.values()):
            leg = exchange.leg
            if leg is not None and leg.worker is worker and self._has_other(exchange.ticket):
                try:
                    exchange.hand_back(leg)
                except Exception as error:
                    self.bugs.met_in(exchange, error)

    def _has_other(self, ticket: Ticket) -> bool:
        """Some worker could take this request over; else it is best left where it is."""
        if ticket.is_paired:
            return self.pairs.has_other(ticket)
        ready = self.fleet.ready("mixed", ticket.model)
        return any(worker not in ticket.tried for worker in ready)

    def shut_down(self) -> None:
        """The drain window is over: end what still runs, visibly, and every connection."""
        self.reactor.turn()  # what has arrived by now comes first
        for exchange in list(self.live.values()):
            if not exchange.ticket.is_over:
                self.end(exchange)
        for channel in list(self.channels):
            if channel.backlog_bytes:
                channel.end()
            elif not channel.closing:
                channel.close()

    def end(self, exchange: Exchange) -> None:
        """The router is going down: end a request. Does not raise."""
        try:
            exchange.fire("shut_down", Failure(SHUTTING_DOWN))
        except Exception as error:
            self.bugs.met_in(exchange, error)

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
            clocks=Clocks(
                self.deadlines,
                ticket,
                wants_stream=bool(asked.stream),
                nats_deadlines=self._nats_deadlines,
            ),
            whole_bytes_max=self.settings.max_body_bytes,
            observer=self,
            books=self.books,
        )
        ticket.moving = self._moving_for(call, route, asked)
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

    def _moving_for(self, call: Call, route: Route, asked: Asked) -> Moving | None:
        endpoint = ENDPOINTS.get(route.label)
        if not self.settings.migration_limit or not asked.stream or endpoint is None:
            return None
        return Moving(
            shape=examine(call.body, endpoint),
            body=call.body,
            tokens_max=self.settings.migration_max_tokens,
            moves_left=self.settings.migration_limit,
        )

    def conclude(self, exchange: Exchange) -> None:
        """Called once, in the final state: give up what it holds, reply, write the books."""
        ticket = exchange.ticket
        ticket.ended_at = self.reactor.now
        del self.live[ticket]
        self.ended.append(ticket)
        self.admission.leave(exchange)
        exchange.reply_failure()
        exchange.channel.finish_call()
        moving = ticket.moving
        exchange.forget()
        if not self.live:
            self.emptied.wake()
        self.books.request_ended(ticket, moving)

    # Queued

    def _admit(self, exchange: Exchange) -> None:
        if not self.is_serving:
            exchange.fire("refused", Failure(SHUTTING_DOWN))
        elif not self.admission.enter(exchange, exchange.channel.waker.wake):
            refusal = Refusal("queue_full", "Too many requests are waiting.", retry_after=1)
            exchange.fire("refused", Failure(refusal))
        elif exchange not in self.admission.holding:
            exchange.queue_until = self.reactor.now + self.settings.queue_timeout_secs
            exchange.channel.rearm()

    def _dispatch(self, exchange: Exchange) -> None:
        """Choose, take the permit and send, without an await in between (dynamo#13088)."""
        if self.fleet.has_halves and self.pairs.takes(exchange):
            self.pairs.dispatch(exchange)
            return
        ticket, model = exchange.ticket, exchange.ticket.model
        now = self.reactor.now
        candidates = self.fleet.ready("mixed", model) or self._ready_halves(exchange)
        choice = self.chooser.choose(candidates, now, ticket.tried, model, ticket.missed)
        if choice is None:
            exchange.fire("refused", ticket.failure or Failure(self._nobody(model)))
            return
        leg, worker = self._begin_leg(exchange, choice), choice.worker
        call, moving = exchange.call, ticket.moving
        body = call.body if moving is None else moving.begin(worker)
        self._send(exchange, leg, call.target, body)
        exchange.channel.rearm(not_before=ticket.started_at + self._soonest)

    async def _move(self, exchange: Exchange) -> None:
        """Choose who goes on and send it what it needs; see `Mover`."""
        found = await self.mover.find(exchange, self.reactor.now)
        if found is None:
            return
        choice, continuation = found
        if isinstance(choice, PairChoice):
            self.pairs.go_on(exchange, choice, continuation)
            return
        moving = exchange.ticket.moving
        assert moving is not None
        leg = self._begin_leg(exchange, choice)
        moving.go_on(choice.worker, continuation)
        self._send(exchange, leg, continuation.path.encode(), continuation.body)
        exchange.channel.rearm()

    def _begin_leg(self, exchange: Exchange, choice: Choice) -> Leg:
        """Take the permit and the place on the worker, and tell the request."""
        ticket, worker = exchange.ticket, choice.worker
        ticket.worker = worker
        if choice.forced:
            self.books.overridden(ticket, worker)
        ticket.attempts += 1
        leg = exchange.leg = Leg(
            id=f"{ticket.id}.{ticket.attempts}",
            worker=worker,
            role=worker.role,
            permit=choice.permit,
            owner=exchange,
            observer=self.books,
            listeners=self._leg_listeners,
            now=self.reactor.now,
        )
        exchange.start(leg)
        exchange.fire("admitted")
        return leg

    def _ready_halves(self, exchange: Exchange) -> Sequence[Worker]:
        """Whoever answers what needs no pair: text into tokens and back, say."""
        if not self.fleet.has_halves or exchange.route is not OTHER:
            return ()
        model = exchange.ticket.model
        return self.fleet.ready("prefill", model) or self.fleet.ready("decode", model)

    def _send(self, exchange: Exchange, leg: Leg, target: bytes, body: bytes) -> None:
        headers = to_worker(
            exchange.call.headers,
            identity=exchange.route is not OTHER,
            is_keyed=bool(self.settings.api_key),
        )
        lines = b"%bx-request-id: %b\r\n" % (headers, exchange.ticket.id.encode())
        line = self.house.line(leg.worker)
        sent = line.send(
            b"POST",
            target,
            lines,
            body,
            leg,
            streams=exchange.clocks.wants_stream,
            movable=partial(self._is_movable, exchange.ticket),
            queues=True,
        )
        leg.attach(sent)

    def _is_movable(self, ticket: Ticket) -> bool:
        """The promise that this attempt, handed back by its worker, goes on elsewhere."""
        moving, worker = ticket.moving, ticket.worker
        if moving is None or worker is None or not moving.may_be_handed_back:
            return False
        ready = self.fleet.ready("mixed", ticket.model)
        return any(
            each is not worker and each not in ticket.tried and moving.may_go_to(each)
            for each in ready
        )

    def _nobody(self, model: str | None) -> Refusal:
        if (unknown := unknown_model(self.fleet, model)) is not None:
            return unknown
        return Refusal("no_workers", "No worker is ready.", retry_after=1)

    # What exchanges report

    def has_other_way(self, exchange: Exchange) -> bool:
        """Some worker that could take the request is not behind a message broker."""
        ticket = exchange.ticket
        roles = ("prefill", "decode") if ticket.is_paired else ("mixed",)
        return any(
            not worker.is_behind_nats and worker not in ticket.tried
            for role in roles
            for worker in self.fleet.ready(role, ticket.model)
        )

    def crashed(self, exchange: Exchange, error: Exception) -> None:
        """A bug was met in this request, which may be over by now."""
        self.bugs.met_in(exchange, error)
