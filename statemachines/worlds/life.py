"""One request on mixed workers: its attempts, its client, its clock, in every order.

The world plays the shell: it opens a leg when the request is admitted, tells the request how the
leg ended, and closes the leg when the request leaves the attempt's scope. Everything else is the
charts' verdict. A worker's engine computes from the moment it is asked, and learns by the closing
of the connection that nobody wants the rest. Budgets are what makes it end. Ghost fields, which no
shell has, record what a promise needs to know afterwards.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from enum import Enum

from attrs import evolve, frozen

from statemachines.chart import Chart
from statemachines.explore import Model
from statemachines.leg import LEG, OUTCOMES, VERDICTS, LegState, told_by_decode
from statemachines.request import REQUEST
from statemachines.request import RequestState as S
from statemachines.worlds.standin import fire, lives_on

__all__ = ["life"]

L = LegState

#: Enough for a failed start, a move, and a candidate that fails the move.
WORKERS = 3


@frozen(cache_hash=True)
class World:
    retries: int
    moves: int
    state: Enum
    leg: Enum | None = None
    #: The connection of the leg: what lives in the scope of its chart.
    is_connected: bool = False
    #: Engines that compute for this request; one whose connection has closed notices it soon.
    busy: int = 0
    #: Workers that this request has not tried; a failed one is never asked again.
    untried: int = WORKERS
    #: Other forms of a continuation that a worker rejected.
    forms: int = 1
    client_has_head: bool = False
    client_has_content: bool = False
    #: Nothing was delivered that a continuation could not reproduce.
    is_faithful: bool = True
    end_was_seen: bool = False
    client_left: bool = False

    # Ghosts
    was_retried: bool = False
    was_moved: bool = False
    #: The fact that ended it.
    last_fact: str = ""

    @property
    def leg_is_open(self) -> bool:
        return self.leg in LEG.open

    @property
    def is_served(self) -> bool:
        """An engine computes, and its connection is there."""
        return self.is_connected and self.leg_is_open and self.leg is not L.CONNECTING

    @property
    def can_migrate(self) -> bool:
        return self.moves > 0 and self.untried > 0

    @property
    def answer_began(self) -> bool:
        return self.state in (S.COMMITTED, S.STREAMING, S.POISONED)


#: What a worker may do in each state of its leg; `first_token` and others have variants below.
WORKER_DOES: Mapping[Enum, tuple[str, ...]] = {
    L.CONNECTING: ("connected", "broke", "stalled"),
    L.WAITING: ("head_arrived", "broke", "stalled", "handed_back"),
    L.ANSWERING: ("completed", "rejected", "backpressure", "erred", "broke", "stalled", "lied",
                  "handed_back"),
    L.STREAMING: ("completed", "rejected", "backpressure", "erred", "broke", "stalled", "lied",
                  "handed_back"),
}  # fmt: skip

#: Ends by which the engine is done with it; by any other it has to notice.
ENGINE_ENDS = ("completed", "rejected", "backpressure", "erred", "broke", "lied", "handed_back")


def life(
    request: Chart = REQUEST,
    leg: Chart = LEG,
    *,
    retries: int = 1,
    moves: int = 1,
    workers: int = WORKERS,
) -> Model[World]:
    """The model of one request's life, on these charts, with budgets up to these."""
    budgets = itertools.product(range(retries + 1), range(moves + 1))
    starts = tuple(World(r, m, request.initial, untried=workers) for r, m in budgets)
    return _Life(request, leg, starts).model()


@frozen(eq=False)
class _Life:
    request: Chart
    leg: Chart
    starts: tuple[World, ...]

    def model(self) -> Model[World]:
        return Model(
            name="one request",
            starts=self.starts,
            steps=self.steps,
            is_over=lambda w: w.state in self.request.final and not w.leg_is_open and not w.busy,
            always=ALWAYS,
            between=BETWEEN,
            sometimes=SOMETIMES,
            eventually=EVENTUALLY,
            whenever=WHENEVER,
            show=show,
            budgets={"untried": "untried", "retries": "retries left", "moves": "moves left"},
            forgets=lambda w: w.state in REQUEST.final,
        )

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        if world.busy > world.is_served:
            yield "an engine noticed that it is not wanted", evolve(world, busy=world.busy - 1)
        if world.state in REQUEST.final or world.state not in self.request.scopes["request"]:
            return
        yield "client left", self.told(evolve(world, client_left=True), "client_gone")
        for fact in ("deadline_passed", "shut_down", "crashed"):
            yield fact, self.told(world, fact)
        if world.state in (S.QUEUED, S.MIGRATING):
            yield from self.choose(world)
        elif world.leg_is_open:
            yield from self.worker_acts(world)
        elif world.leg is L.SUCCEEDED:
            # The leg is over long before a slow client has taken the last byte.
            yield "last byte taken", self.told(world, "completed")

    def choose(self, world: World) -> Iterator[tuple[str, World]]:
        yield "nobody can take it", self.told(world, "refused")
        if world.state is S.MIGRATING and world.client_has_content:
            yield "budget was spent", self.told(evolve(world, end_was_seen=True), "lost_after_end")
        if world.untried > 0:
            sent = evolve(
                world,
                untried=world.untried - 1,
                leg=self.leg.initial,
                is_connected=self.leg.initial in self.leg.scopes["connection"],
            )
            yield "worker chosen", self.told(sent, "admitted")

    def worker_acts(self, world: World) -> Iterator[tuple[str, World]]:
        if world.leg is not None:
            for fact in WORKER_DOES[world.leg]:
                yield fact, self.leg_told(world, fact)
        if world.leg is L.ANSWERING:
            yield from self.answers(world)
        if world.leg is L.STREAMING:
            yield from self.streams(world)
        if world.leg in (L.CONNECTING, L.WAITING) and world.state in (S.DISPATCHING, S.RESUMING):
            yield "passed over", self.told(world, "passed_over")
        yield "bug in the leg", self.leg_told(world, "bug")

    def answers(self, world: World) -> Iterator[tuple[str, World]]:
        if world.state is S.DISPATCHING:
            yield "head forwarded", self.told(evolve(world, client_has_head=True), "answered")
        elif not world.end_was_seen:
            yield "end seen", evolve(world, end_was_seen=True)
        if not world.end_was_seen:
            yield "first content", self.first_token(world)
            yield (
                "first content, of a kind of its own",
                self.first_token(evolve(world, is_faithful=False)),
            )

    def first_token(self, world: World) -> World:
        begun = evolve(world, client_has_head=True, client_has_content=True)
        return self.told(self.leg_moved(begun, "first_token"), "first_token")

    def streams(self, world: World) -> Iterator[tuple[str, World]]:
        if world.end_was_seen:
            return
        if world.state is S.STREAMING:
            yield (
                "content of a kind of its own",
                self.told(evolve(world, is_faithful=False), "unreplayable"),
            )
        yield "end seen", evolve(world, end_was_seen=True)

    def leg_told(self, world: World, fact: str) -> World:
        after = self.leg_moved(world, fact)
        if after.leg_is_open or after.leg is L.SUCCEEDED:
            return after
        word = told_by_decode(
            fact, answer_began=world.answer_began, end_was_seen=world.end_was_seen
        )
        return self.told(after, word)

    def leg_moved(self, world: World, fact: str) -> World:
        """The world after the leg was told a fact, and nobody else."""
        edge = fire(self.leg, world.leg or L.CONNECTING, fact)
        busy = world.busy + (edge.target is L.WAITING)
        if world.is_served and fact in ENGINE_ENDS:
            busy -= 1
        connected = lives_on(edge, "connection", world.is_connected)
        return evolve(world, leg=edge.target, is_connected=connected, busy=busy)

    def told(self, world: World, fact: str) -> World:
        """The world after the request was told a fact: its new state, budgets, scopes."""
        edge = fire(
            self.request,
            world.state,
            fact,
            can_retry=world.retries > 0,
            can_continue=world.is_faithful,
            can_migrate=world.can_migrate,
            can_rephrase=world.forms > 0,
        )
        after = _spent(world, fact, edge.target)
        if "attempt" in edge.leaves and after.leg_is_open and after.leg is not None:
            after = self.leg_moved(after, "let_go")
        return after


def _spent(world: World, fact: str, target: Enum) -> World:
    """Budgets and ghosts after the request went from `world.state` to `target`."""
    retries, moves, forms = world.retries, world.moves, world.forms
    retried = target is S.QUEUED and fact not in ("handed_back", "passed_over")
    if retried:
        retries -= 1
    # A move is spent when it succeeds, not when it is tried.
    moved = world.state is S.RESUMING and target in (S.STREAMING, S.POISONED, S.FINISHED)
    if moved:
        moves -= 1
    if world.state is S.RESUMING and fact == "rejected" and target is S.MIGRATING:
        forms -= 1
    untried = world.untried
    if target in REQUEST.final:
        # What is over has no use for budgets; forgetting them halves the number of worlds. One
        # that was overdrawn stays so, to be seen.
        retries, moves, forms, untried = (min(b, 0) for b in (retries, moves, forms, untried))
    return evolve(
        world,
        state=target,
        untried=untried,
        retries=retries,
        moves=moves,
        forms=forms,
        was_retried=world.was_retried or retried,
        was_moved=world.was_moved or moved,
        last_fact=fact if target in REQUEST.final else "",
    )


def show(world: World) -> Mapping[str, str]:
    """The columns of a printed path."""
    return {
        "request": str(world.state.value),
        "leg": "" if world.leg is None else str(world.leg.value),
        "untried": str(world.untried),
        "retries": str(world.retries),
        "moves": str(world.moves),
        "client has": "content" if world.client_has_content else "head" * world.client_has_head,
    }


#### What must hold

ATTEMPT = REQUEST.scopes["attempt"]
#: Facts that may end a good answer all the same.
STRONGER = ("client_gone", "deadline_passed", "shut_down", "crashed")
LOSSES = ("broke", "stalled", "lied", "erred", "backpressure", "handed_back")
AT_ONCE = ("client left", "deadline_passed", "shut_down", "crashed", "bug in the leg")
#: What the worker's metrics and its breaker should read for what it did; all else is our doing.
BOOKED = {
    "completed": "success",
    "rejected": "client_error",
    "backpressure": "backpressure",
    **dict.fromkeys(("erred", "broke", "stalled", "lied", "bug in the leg"), "error"),
}
JUDGED = {
    "completed": "success",
    **dict.fromkeys(("erred", "broke", "stalled", "lied"), "failure"),
}


def _leg_end(world: World, after: World) -> LegState | None:
    """The final state that the leg has entered between the two worlds."""
    ended = world.leg_is_open and not after.leg_is_open
    return after.leg if ended and isinstance(after.leg, L) else None


def _budgets(world: World) -> tuple[int, int, int]:
    return world.retries, world.moves, world.forms


ALWAYS: Mapping[str, Callable[[World], bool]] = {
    "no leg outlives its attempt": lambda w: w.state in ATTEMPT or not w.leg_is_open,
    "an open leg has its connection, and one that is over has none": lambda w: (
        w.is_connected is w.leg_is_open
    ),
    "an attempt has a leg that is open or ended well": lambda w: (
        w.state not in ATTEMPT or w.leg_is_open or w.leg is L.SUCCEEDED
    ),
    "a retry means that the client received nothing": lambda w: (
        w.state is not S.QUEUED or not w.client_has_head
    ),
    "a move means that the client received something": lambda w: (
        w.state is not S.MIGRATING or w.client_has_head
    ),
    "only what could be continued faithfully is carried": lambda w: (
        w.state not in (S.MIGRATING, S.RESUMING) or w.is_faithful
    ),
    "poisoned is what could not be continued, streaming what could": lambda w: (
        w.state not in (S.STREAMING, S.POISONED) or w.is_faithful is (w.state is S.STREAMING)
    ),
    "no budget is overdrawn": lambda w: min(w.retries, w.moves, w.forms, w.untried) >= 0,
    "only a whole good answer is finished": lambda w: (
        w.state is not S.FINISHED or w.leg is L.SUCCEEDED or w.end_was_seen
    ),
    "a whole good answer is finished, unless something stronger came before": lambda w: (
        w.state in ATTEMPT
        or not (w.leg is L.SUCCEEDED or w.end_was_seen)
        or w.state is S.FINISHED
        or w.last_fact in STRONGER
    ),
    "abandoned is what its client left, and nothing else": lambda w: (
        w.client_left is (w.state is S.ABANDONED)
    ),
    "nothing is aborted without a prefill": lambda w: w.state is not S.ABORTED,
}

BETWEEN: Mapping[str, Callable[[World, str, World], bool]] = {
    "with retries left, a loss before the head fails nothing": lambda w, word, after: (
        not (w.state is S.DISPATCHING and word in LOSSES and w.retries > 0)
        or after.state is S.QUEUED
    ),
    "a hand-back before the head is never an error": lambda w, word, after: (
        not (w.state is S.DISPATCHING and word == "handed_back") or after.state is S.QUEUED
    ),
    "who never got it costs nothing": lambda w, word, after: (
        word != "passed over"
        or (after.state in (S.QUEUED, S.MIGRATING) and _budgets(w) == _budgets(after))
    ),
    "with moves left, a loss after the head fails nothing": lambda w, word, after: (
        not (w.state in (S.COMMITTED, S.STREAMING, S.RESUMING) and word in LOSSES)
        or not w.can_migrate
        or after.state in (S.MIGRATING, S.FINISHED)
    ),
    "a 4xx before the head is the client's": lambda w, word, after: (
        not (w.state is S.DISPATCHING and word == "rejected") or after.last_fact == "rejected"
    ),
    "a rejected form of a continuation is followed by another": lambda w, word, after: (
        not (w.state is S.RESUMING and word == "rejected" and w.forms > 0)
        or after.state in (S.MIGRATING, S.FINISHED)
    ),
    "a move begins only while one is left and somebody is untried": lambda w, word, after: (
        after.state is not S.MIGRATING
        or w.state is S.MIGRATING
        or w.can_migrate
        or word in ("handed_back", "rejected", "passed over")
    ),
    "content that came flows on": lambda w, word, after: (
        not word.startswith("first content") or after.state in (S.STREAMING, S.POISONED)
    ),
    "content of a kind of its own poisons, and nothing worse": lambda w, word, after: (
        word != "content of a kind of its own" or after.state is S.POISONED
    ),
    "a client, a clock, a shutdown or a bug ends it at once": lambda w, word, after: (
        word not in AT_ONCE or after.state in REQUEST.final
    ),
    "a spent budget needs no other worker": lambda w, word, after: (
        word != "budget was spent" or after.state is S.FINISHED
    ),
    "a leg is booked as what its worker did": lambda w, word, after: (
        (end := _leg_end(w, after)) is None or OUTCOMES[end] == BOOKED.get(word, "cancelled")
    ),
    "a worker is blamed for what it did, and for nothing else": lambda w, word, after: (
        (end := _leg_end(w, after)) is None or VERDICTS[end] == JUDGED.get(word, "neutral")
    ),
    "handed back is what its worker handed back": lambda w, word, after: (
        (end := _leg_end(w, after)) is None or (word == "handed_back") is (end is L.HANDED_BACK)
    ),
    "what is over stays over": lambda w, word, after: (
        w.state not in REQUEST.final or after.state is w.state
    ),
}

SOMETIMES: Mapping[str, Callable[[World], bool]] = {
    "a request finishes with nothing spent": lambda w: (
        w.state is S.FINISHED and not w.was_retried and not w.was_moved
    ),
    "a request finishes after a retry": lambda w: w.state is S.FINISHED and w.was_retried,
    "a request finishes after a move": lambda w: w.state is S.FINISHED and w.was_moved,
    "a request is retried, moves, and finishes": lambda w: (
        w.state is S.FINISHED and w.was_retried and w.was_moved
    ),
    "a request of which only the head was delivered restarts": lambda w: (
        w.state is S.RESUMING and not w.client_has_content
    ),
    "a poisoned request finishes": lambda w: w.state is S.FINISHED and not w.is_faithful,
    "a lost stream is completed locally": lambda w: (
        w.state is S.FINISHED and w.last_fact == "lost_after_end"
    ),
    "a move needs a second candidate": lambda w: w.state is S.RESUMING and w.untried == 0,
    "a continuation is put in another form": lambda w: w.state is S.RESUMING and w.forms == 0,
    "a client leaves between two workers": lambda w: w.state is S.ABANDONED and w.leg is L.BROKEN,
}

EVENTUALLY: Mapping[str, Callable[[World], bool]] = {
    "a request is over": lambda w: w.state in REQUEST.final,
    "no engine computes for it any more": lambda w: w.state in REQUEST.final and w.busy == 0,
}

WHENEVER: Mapping[str, tuple[Callable[[World], bool], Callable[[World], bool]]] = {
    "a client that left frees its engine": (lambda w: w.client_left, lambda w: w.busy == 0),
    "a deadline that passed frees its engine": (
        lambda w: w.last_fact == "deadline_passed",
        lambda w: w.busy == 0,
    ),
    "a request that is between two workers gets one, or is over": (
        lambda w: w.state in (S.QUEUED, S.MIGRATING),
        lambda w: w.state in ATTEMPT or w.state in REQUEST.final,
    ),
    "a client that has a head gets an end": (
        lambda w: w.client_has_head,
        lambda w: w.state in REQUEST.final,
    ),
    "a leg that is open ends": (lambda w: w.leg_is_open, lambda w: not w.leg_is_open),
}
