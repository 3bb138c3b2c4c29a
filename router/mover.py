"""Moving a stream: what happens in `migrating`, in the task of the request's connection.

The reactor has taken the lost leg away. Here it is found out, by asking a worker of the same model
where that must be, how much of what was generated the client's text stands for; then a next worker
is chosen, not one that failed this request, and sent what it needs to go on. All of it ends when
the request does: a client that leaves, or the deadline, cancels the asking.
"""

from __future__ import annotations

import random
from collections import deque

import httpx
import trio
from attrs import define, field

from router.choosing import Choice, Chooser
from router.exchange import Exchange
from router.migration.agreement import (
    Agreed,
    Disagreed,
    Inquiry,
    Question,
    question_body,
    read_answer,
)
from router.migration.continuation import CannotContinue, CompletedLocally, Continuation
from router.migration.settling import Counting, Unsettled, settle
from router.moving import Moving
from router.pd.pairing import PairChoice
from router.pd.pairs import Pairs
from router.wires.client import ask, read
from router.worker import Fleet, Worker
from router.workerspec import ROLES
from statemachines.request import RequestState

#: For all questions of one break together; after that the place is not known.
ASKING_SECONDS = 5.0
#: A worker that says nothing for so long is passed over for the next, or asked once more: its
#: health may not be known yet, and behind NATS a message may have been lost.
ANSWER_SECONDS = 2.5
ANSWER_BYTES_MAX = 4 * 1024 * 1024
#: Moves within the longest spread from which on they are spread, and over how long: a worker that
#: dies with a hundred streams must not hit the next one with a hundred prefills in one instant.
CROWD = 16
SPREAD_SECONDS_EACH = 0.005
SPREAD_SECONDS_MAX = 1.0


@define(eq=False)
class Mover:
    """Finds the next worker for streams that lost theirs."""

    fleet: Fleet
    chooser: Chooser
    transport: httpx.AsyncBaseTransport
    #: Where streams of pairs go on.
    pairs: Pairs = field(init=False)
    rng: random.Random = field(factory=random.Random)
    #: When the last moves began (Trio's clock, seconds).
    _begun: deque[float] = field(factory=deque)

    async def find(
        self, exchange: Exchange, now: float
    ) -> tuple[Choice | PairChoice, Continuation] | None:
        """The next worker and what it is sent; None where the request has come to its end.

        Leaves the request in `migrating` only together with an answer. The permit is the caller's.
        """
        moving = exchange.ticket.moving
        assert moving is not None
        unsettled, tail = moving.unsettled, b""
        try:
            with trio.CancelScope() as exchange.asking:
                if unsettled is not None:
                    tail = await self._settle(exchange, moving, unsettled)
                else:
                    await self._spread()
                    if moving.agreed is None:
                        moving.agreed = await self._agree(exchange, moving)
        finally:
            exchange.asking = None
        if trio.current_time() > now:
            # The reactor may have slept as long: its time is that of its last pass.
            exchange.channel.reactor.turn()
        if exchange.ticket.state is not RequestState.MIGRATING:
            return None
        if unsettled is not None:
            exchange.complete_without_leg("finish_seen", tail)
            return None
        return self._choose(exchange, moving, exchange.now)

    async def _spread(self) -> None:
        """Wait a moment, if many others have just begun to move."""
        now, begun = trio.current_time(), self._begun
        while begun and begun[0] <= now - SPREAD_SECONDS_MAX:
            begun.popleft()
        begun.append(now)
        crowd = len(begun)
        if crowd > CROWD:
            most = min(SPREAD_SECONDS_MAX, crowd * SPREAD_SECONDS_EACH)
            await trio.sleep(self.rng.uniform(0, most))

    # Where ids and text agree

    async def _agree(self, exchange: Exchange, moving: Moving) -> Agreed | Disagreed:
        found, kin = moving.seek(), self._kin(exchange, moving)
        with trio.move_on_after(ASKING_SECONDS):
            while isinstance(found, Inquiry):
                found = found.answer(await self._detokenize(kin, found))
        return found if isinstance(found, Agreed) else Disagreed()

    async def _settle(self, exchange: Exchange, moving: Moving, unsettled: Unsettled) -> bytes:
        """The end of an answer, whose last event had more tokens than the answer."""
        found: Counting | int = unsettled.ask()
        kin = self._kin(exchange, moving)
        with trio.move_on_after(ASKING_SECONDS):
            while isinstance(found, Counting):
                found = found.answer(await self._detokenize(kin, found))
        ids = found if isinstance(found, int) else len(unsettled.ids)
        return settle(moving.record, unsettled, ids)

    async def _detokenize(self, kin: deque[Worker], question: Question) -> str | None:
        """Ask a worker whose tokens are those of the record; None where nobody answers.

        Whoever does not is the last to be asked from then on.
        """
        for _ in range(2 * len(kin)):
            with trio.move_on_after(ANSWER_SECONDS):
                text = await self._detokenize_at(kin[0], question)
                if text is not None:
                    return text
            kin.rotate(-1)
        return None

    async def _detokenize_at(self, worker: Worker, question: Question) -> str | None:
        body = question_body(question, worker.models[0] if worker.models else None)
        asking = ask(
            self.transport, "POST", worker, "/detokenize", content=body, bytes_max=ANSWER_BYTES_MAX
        )
        try:
            async with asking as answer:
                text = await read(answer)
        except httpx.TransportError:
            return None
        return read_answer(text) if answer.status_code == 200 else None

    def _kin(self, exchange: Exchange, moving: Moving) -> deque[Worker]:
        """Who may be asked: workers of the same model, those that failed this request left out."""
        model, tried = exchange.ticket.model, exchange.ticket.tried
        return deque(
            worker
            for role in ROLES
            for worker in self.fleet.ready(role, model)
            if worker not in tried and worker.fingerprint == moving.fingerprint is not None
        )

    # Who goes on

    def _choose(
        self, exchange: Exchange, moving: Moving, now: float
    ) -> tuple[Choice | PairChoice, Continuation] | None:
        excluded = set(exchange.ticket.tried)
        while True:
            choice = self._candidate(exchange, now, excluded)
            worker = None if choice is None else choice.worker
            outcome = None if worker is None else moving.plan(worker)
            if isinstance(outcome, Continuation) and choice is not None and moving.moves_left > 0:
                return choice, outcome
            if choice is not None:
                choice.give_back(now)
            if isinstance(outcome, CompletedLocally):
                exchange.complete_without_leg(outcome.reason, outcome.tail)
                return None
            if isinstance(outcome, CannotContinue) and outcome.reason == "unsuitable":
                assert worker is not None
                excluded.add(worker)
                continue
            if isinstance(outcome, CannotContinue):
                moving.stuck = outcome.reason
            elif (tail := moving.own_end()) is not None:
                # Nobody is left to ask, and nobody is needed.
                exchange.complete_without_leg("budget_spent", tail)
                return None
            exchange.fire("refused")
            return None

    def _candidate(
        self, exchange: Exchange, now: float, excluded: set[Worker]
    ) -> Choice | PairChoice | None:
        ticket = exchange.ticket
        if ticket.is_paired:
            pair = self.pairs.choose(exchange, excluded)
            return pair if isinstance(pair, PairChoice) else None
        ready = self.fleet.ready("mixed", ticket.model)
        return self.chooser.choose(ready, now, excluded, ticket.model, ticket.missed)
