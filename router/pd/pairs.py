"""Requests that go to pairs: which ones, to whom, and with what.

The counterpart of a single dispatch in `router.serving`: choose, take both permits, send, without
an await in between. What an attempt does afterwards is its own business.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Protocol

from attrs import define, field

from router.choosing import make_chooser
from router.config import SAME, Settings
from router.errors import Refusal
from router.exchange import Exchange
from router.legs import LegListener, LegObserver
from router.migration.continuation import Continuation
from router.pd.aborts import Aborts
from router.pd.attempt import Orders, PairAttempt, Places
from router.pd.pairing import NIXL, PairChoice, Pairing
from router.pd.prefill import Counter
from router.pd.ranks import least_loaded
from router.pd.shaping import (
    Meeting,
    Reading,
    mint_rid,
    mint_rooms,
    put,
    rank_members,
    read,
    shape_prefill,
    without_handoff,
)
from router.ticket import Failure, Ticket
from router.waking import Waker
from router.width import WIDTH_MAX
from router.wires.line import Line
from router.worker import Fleet, Worker

#: Routes that generate; whatever else is asked needs one worker only.
_ROUTES = frozenset({"chat", "completions", "generate"})
#: Where the request timeout is off, a prefill that nobody waits for must still end.
PREFILL_SECONDS = 1800.0


class House(Protocol):
    """What pairs need to know of the process they live in."""

    def line(self, worker: Worker) -> Line:
        """The way to a worker."""

    def spawn(self, task: Callable[[], Awaitable[object]]) -> None:
        """Start a task in the router's nursery."""


@define(eq=False)
class Pairs:
    """Dispatches requests to pairs; the surroundings of their attempts."""

    settings: Settings
    fleet: Fleet
    house: House
    aborts: Aborts
    counter: Counter
    leg_observer: LegObserver
    leg_listeners: tuple[LegListener, ...]
    rng: random.Random = field(factory=random.SystemRandom)
    pairing: Pairing = field(init=False)
    prefill_seconds: float = field(init=False)
    cancels_unmatched: bool = field(init=False)
    is_keyed: bool = field(init=False)
    recomputes: bool = field(init=False)
    _running: int = 0
    _idle: Waker = field(factory=Waker)

    def __attrs_post_init__(self) -> None:
        settings = self.settings
        self.choose_by(random.Random())
        self.prefill_seconds = settings.request_timeout_secs or PREFILL_SECONDS
        self.cancels_unmatched = settings.pd_cancel_unmatched_prefill
        self.is_keyed = bool(settings.api_key)
        self.recomputes = settings.pd_recompute

    def choose_by(self, luck: random.Random) -> None:
        """Begin to choose, with this luck."""
        settings = self.settings
        prefill_policy, decode_policy = (
            settings.policy if policy == SAME else policy
            for policy in (settings.prefill_policy, settings.decode_policy)
        )
        self.pairing = Pairing(
            self.fleet,
            settings.pd_protocol,
            prefill_chooser=make_chooser(prefill_policy, luck),
            make_decode_chooser=lambda: make_chooser(decode_policy, luck),
        )

    def line(self, worker: Worker) -> Line:
        """The way to a worker."""
        return self.house.line(worker)

    def spawn(self, task: Callable[[], Awaitable[object]]) -> None:
        """Start a task in the router's nursery."""
        self.house.spawn(partial(self._run, task))

    async def wait_idle(self) -> None:
        """Wait until no prefill is left, those that nobody waits for included. Cancellable."""
        while self._running:
            await self._idle.wait()

    async def _run(self, task: Callable[[], Awaitable[object]]) -> None:
        self._running += 1
        try:
            await task()
        finally:
            self._running -= 1
            self._idle.wake()

    # Which requests

    def takes(self, exchange: Exchange) -> bool:
        """Whether this request goes to pairs; decided once, at its first dispatch.

        A complete pair comes first, then mixed workers; where there is neither, the half that is
        missing is what the client is told.
        """
        ticket = exchange.ticket
        if not ticket.attempts and exchange.route.label in _ROUTES:
            model = ticket.model
            is_complete = self.pairing.is_complete(model)
            ticket.is_paired = is_complete or not self.fleet.ready("mixed", model)
            if ticket.is_paired:
                ticket.retries_left = self.settings.pd_max_retries
        return ticket.is_paired

    def has_other(self, ticket: Ticket, besides: Worker | None = None) -> bool:
        """Some pair could take this request over, without that worker."""
        tried = ticket.tried if besides is None else {*ticket.tried, besides}
        return self.pairing.has_other(ticket.model, tried)

    # Dispatch

    def dispatch(self, exchange: Exchange) -> None:
        """Choose a pair, take both permits and send."""
        ticket = exchange.ticket
        choice = self.choose(exchange, ticket.tried)
        if isinstance(choice, Refusal):
            refusal = unknown_model(self.fleet, ticket.model) or choice
            exchange.fire("refused", ticket.failure or Failure(refusal))
            return
        self._begin(exchange, choice, None)

    def choose(self, exchange: Exchange, tried: Collection[Worker]) -> PairChoice | Refusal:
        """A pair for this request that is not in `tried`."""
        model, now, missed = exchange.ticket.model, exchange.now, exchange.ticket.missed
        if missed:
            choice = self.pairing.choose(model, now, {*tried, *missed})
            if isinstance(choice, PairChoice):
                return choice
        return self.pairing.choose(model, now, tried)

    def go_on(self, exchange: Exchange, choice: PairChoice, continuation: Continuation) -> None:
        """Send what continues a stream: to a pair, as if it were a request of its own."""
        self._begin(exchange, choice, continuation)

    def _begin(
        self, exchange: Exchange, choice: PairChoice, continuation: Continuation | None
    ) -> None:
        places = Places(choice)
        try:
            orders = self._orders(exchange, choice, continuation)
            if isinstance(orders, Refusal):
                places.release(exchange.now)
                exchange.fire("refused", Failure(orders))
                return
            PairAttempt(exchange, choice, orders, self, places).begin()
        except Exception:
            places.release(exchange.now)
            raise

    def _orders(
        self, exchange: Exchange, choice: PairChoice, continuation: Continuation | None
    ) -> Orders | Refusal:
        moving, target, body = exchange.ticket.moving, exchange.call.target, exchange.call.body
        if moving is not None and continuation is not None:
            moving.go_on(choice.worker, continuation)
            target, body = continuation.path.encode(), continuation.body
        elif moving is not None:
            body = moving.begin(choice.worker)
        reading = read(body, exchange.route.family)
        if self.pairing.protocol_of(choice.prefill.worker) == NIXL:
            return _serial(target, body, reading, is_chat=exchange.route.label == "chat")
        if reading.width > WIDTH_MAX:
            # Each would have a room: `"n": 1000000` in 40 bytes must not become megabytes here.
            message = f"At most {WIDTH_MAX} generations (prompts times n) may be asked for at once."
            return Refusal("bad_request", message, param="n")
        return self._at_once(choice, target, body, reading)

    def _at_once(self, choice: PairChoice, target: bytes, body: bytes, reading: Reading) -> Orders:
        prefill, decode = choice.prefill.worker, choice.decode.worker
        rid = mint_rid(self.rng) if reading.may_be_named else None
        # SGLang derives the ranks of samples itself, so a fan-out is not pinned.
        prefill_rank = least_loaded(prefill) if reading.width == 1 else None
        decode_rank = least_loaded(decode)
        rooms = mint_rooms(
            self.rng,
            reading.width,
            rank=prefill_rank or 0,
            ranks=1 if prefill_rank is None else prefill.dp_size,
        )
        meeting = Meeting(prefill.bootstrap_host, prefill.bootstrap_port, rooms, rid)
        shared = meeting.members()
        to_prefill, to_decode = shared, shared
        if prefill.dp_size > 1 or decode.dp_size > 1:
            to_prefill = shared | rank_members(prefill_rank)
            to_decode = shared | rank_members(decode_rank, prefill_rank)
        prefill_body = put(body, to_prefill)
        return Orders(
            target=target,
            prefill_body=prefill_body,
            decode_body=prefill_body if to_decode is to_prefill else put(body, to_decode),
            is_serial=False,
            reading=reading,
            rid=rid,
            prefill_rank=prefill_rank,
            decode_rank=decode_rank,
        )


def _serial(target: bytes, body: bytes, reading: Reading, *, is_chat: bool) -> Orders:
    """A hand-off has one consumer: several samples compute their prompt at decode instead."""
    has_prefill = reading.width == 1
    return Orders(
        target=target,
        prefill_body=shape_prefill(body, is_chat=is_chat) if has_prefill else None,
        decode_body=without_handoff(body),
        is_serial=has_prefill,
        reading=reading,
    )


def unknown_model(fleet: Fleet, model: str | None) -> Refusal | None:
    """What a client is told whose model nobody serves; None where that cannot be said."""
    if model is not None and fleet.all() and not fleet.knows(model):
        return Refusal("model_not_found", "No worker serves this model.", param="model")
    return None
