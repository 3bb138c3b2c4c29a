"""One request on prefill/decode pairs, in both topologies: who fails when, and who hears of it.

With the bootstrap protocol both legs are sent at once; prefill's leg is nobody's to cancel, and
one that its request has left behind runs on as an orphan. With the serial protocol decode is sent
only when prefill is done, and a prefill that nobody waits for any more is closed. A decode that has
answered with an error has the last word, whatever its prefill says while that error is being read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, StrEnum

from attrs import evolve, frozen

from statemachines.chart import Chart
from statemachines.explore import Model
from statemachines.leg import LEG, told_by_decode, told_by_prefill
from statemachines.leg import LegState as L
from statemachines.request import REQUEST
from statemachines.request import RequestState as S
from statemachines.worlds.standin import fire

__all__ = ["pair"]

#: Retries, moves and pairs to start with: one thing is spent at a time, and one pair more than it
#: takes is there, so that a second candidate is needed and found. The other world mixes them.
BUDGETS = ((0, 0, 1), (1, 0, 2), (0, 1, 3))


class Topology(StrEnum):
    BOOTSTRAP = "bootstrap"
    SERIAL = "serial"


@frozen(cache_hash=True)
class World:
    topology: Topology
    retries: int
    moves: int
    untried: int
    state: Enum
    #: The legs of the current attempt, or of the last one once the request is over.
    prefill: Enum | None = None
    decode: Enum | None = None
    #: Decode has answered with an error status; its body is still to come.
    decode_erred: bool = False
    #: Bootstrap prefills whose attempt has ended before them.
    orphans: int = 0
    forms: int = 1
    client_has_head: bool = False
    client_has_content: bool = False
    client_left: bool = False

    # Ghosts
    was_retried: bool = False
    was_moved: bool = False
    prefill_failed_late: bool = False
    #: Nobody was there to receive the prefill of the current attempt.
    prefill_absent: bool = False
    was_passed_over: bool = False
    #: Legs that were sent and have no outcome yet, counted up and down one by one.
    unbooked: int = 0
    #: Statuses that the client was given.
    answers: int = 0
    last_fact: str = ""

    @property
    def can_migrate(self) -> bool:
        return self.moves > 0 and self.untried > 0

    @property
    def answer_began(self) -> bool:
        return self.state in (S.COMMITTED, S.STREAMING, S.POISONED)


#: A choice of what workers do; the other ways to lose a leg are all asked in the other world.
PREFILL_DOES: Mapping[Enum | None, tuple[str, ...]] = {
    L.CONNECTING: ("connected", "broke"),
    L.WAITING: ("head_arrived", "stalled"),
    L.ANSWERING: ("completed", "rejected", "backpressure", "erred", "lied", "bug"),
}
DECODE_DOES: Mapping[Enum | None, tuple[str, ...]] = {
    L.CONNECTING: ("connected", "broke"),
    L.WAITING: ("head_arrived", "broke"),
    L.ANSWERING: ("first_token", "completed", "rejected", "broke"),
    L.STREAMING: ("completed", "broke"),
}
ERRED_DECODE_DOES = ("rejected", "backpressure", "erred", "broke")


Budget = tuple[int, int, int]


def pair(
    request: Chart = REQUEST, leg: Chart = LEG, *, budgets: Iterable[Budget] = BUDGETS
) -> Model[World]:
    """The model of one request on pairs, on these charts; budgets are retries, moves and pairs."""
    starts = tuple(
        World(topology, retries, moves, pairs, request.initial)
        for topology in Topology
        for retries, moves, pairs in budgets
    )
    return _Pair(request, leg, starts).model()


@frozen(eq=False)
class _Pair:
    request: Chart
    leg: Chart
    starts: tuple[World, ...]

    def model(self) -> Model[World]:
        return Model(
            name="one request on pairs",
            starts=self.starts,
            steps=self.steps,
            is_over=lambda w: w.state in REQUEST.final and w.orphans == 0 and not _open(w),
            always=ALWAYS,
            between=BETWEEN,
            sometimes=SOMETIMES,
            eventually=EVENTUALLY,
            whenever=WHENEVER,
            show=show,
            budgets={"retries": "retries left", "moves": "moves left"},
            forgets=lambda w: w.state in REQUEST.final,
        )

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        if world.orphans > 0:
            # It ends as it likes, at the latest by its own deadline, and tells no request.
            yield (
                "an orphaned prefill ended",
                evolve(world, orphans=world.orphans - 1, unbooked=world.unbooked - 1),
            )
        if world.state in REQUEST.final or world.state not in self.request.scopes["request"]:
            return
        yield "client left", self.told(evolve(world, client_left=True), "client_gone")
        yield "deadline_passed", self.told(world, "deadline_passed")
        if world.state in (S.QUEUED, S.MIGRATING):
            yield "no pair can take it", self.told(world, "refused")
            if world.untried > 0:
                yield "pair chosen", self.admitted(world)
        else:
            yield from self.prefill_acts(world)
            yield from self.decode_acts(world)

    def admitted(self, world: World) -> World:
        at_once = world.topology is Topology.BOOTSTRAP
        sent = evolve(
            world,
            untried=world.untried - 1,
            prefill=self.leg.initial,
            decode=self.leg.initial if at_once else None,
            decode_erred=False,
            prefill_absent=False,
            unbooked=world.unbooked + 1 + at_once,
        )
        return self.told(sent, "admitted")

    def prefill_acts(self, world: World) -> Iterator[tuple[str, World]]:
        for fact in PREFILL_DOES.get(world.prefill, ()):
            yield f"prefill {fact}", self.prefill_told(world, fact)
        if world.prefill is L.CONNECTING:
            yield "nobody is there for prefill", self.prefill_told(world, "let_go")
        if world.prefill is L.SUCCEEDED and world.decode is None:
            sent = evolve(world, decode=self.leg.initial, unbooked=world.unbooked + 1)
            yield "decode is sent", sent

    def prefill_told(self, world: World, fact: str) -> World:
        state = fire(self.leg, world.prefill or L.CONNECTING, fact).target
        is_absent = fact == "let_go"
        absent = world.prefill_absent or is_absent
        after = _booked(evolve(world, prefill=state, prefill_absent=absent), state)
        if state in LEG.open or state is L.SUCCEEDED or world.decode_erred:
            return after
        word = told_by_prefill(fact, answer_began=world.answer_began, was_received=not is_absent)
        late = world.state in (S.STREAMING, S.POISONED)
        return evolve(self.told(after, word), prefill_failed_late=late)

    def decode_acts(self, world: World) -> Iterator[tuple[str, World]]:
        if world.decode_erred:
            for fact in ERRED_DECODE_DOES:
                if world.decode is L.ANSWERING:
                    yield f"decode {fact}", self.decode_told(world, fact)
            return
        if world.decode is L.WAITING:
            erred = evolve(world, decode=L.ANSWERING, decode_erred=True)
            yield "decode answers with an error", erred
        if world.decode is L.CONNECTING and world.state in (S.DISPATCHING, S.RESUMING):
            closed = fire(self.leg, world.decode, "let_go").target
            absent = _booked(evolve(world, decode=closed), closed)
            yield "nobody is there for decode", self.told(absent, "passed_over")
        if world.state is S.DISPATCHING and world.decode is L.ANSWERING:
            yield "head forwarded", self.told(_given_head(world), "answered")
        for fact in DECODE_DOES.get(world.decode, ()):
            # Without its KV cache decode computes nothing.
            if fact != "first_token" or world.prefill not in (L.CONNECTING, L.WAITING):
                yield f"decode {fact}", self.decode_told(world, fact)
        if world.decode is L.ANSWERING:
            yield "decode unreplayable", self.decode_told(world, "first_token", faithful=False)
        if world.decode is L.SUCCEEDED:
            yield "last byte taken", self.told(world, "completed")

    def decode_told(self, world: World, fact: str, *, faithful: bool = True) -> World:
        state = fire(self.leg, world.decode or L.CONNECTING, fact).target
        after = _booked(evolve(world, decode=state), state)
        if fact == "first_token":
            after = evolve(_given_head(after), client_has_content=True)
            return self.told(after, fact, faithful=faithful)
        if state in LEG.open or state is L.SUCCEEDED:
            return after
        word = told_by_decode(fact, answer_began=world.answer_began, end_was_seen=False)
        return self.told(after, word)

    def told(self, world: World, fact: str, *, faithful: bool = True) -> World:
        """The world after the request was told a fact: its new state, budgets, scopes."""
        edge = fire(
            self.request,
            world.state,
            fact,
            can_retry=world.retries > 0,
            can_continue=faithful,
            can_migrate=world.can_migrate,
            can_rephrase=world.forms > 0,
        )
        after = _spent(world, fact, edge.target)
        return self.without_attempt(after) if "attempt" in edge.leaves else after

    def without_attempt(self, world: World) -> World:
        """Decode closes with its attempt; a bootstrap prefill is left to itself."""
        decode, prefill, orphans = world.decode, world.prefill, world.orphans
        unbooked = world.unbooked
        if decode is not None and decode in LEG.open:
            decode = fire(self.leg, decode, "let_go").target
            unbooked -= decode in LEG.final
        if prefill is not None and prefill in LEG.open:
            if world.topology is Topology.BOOTSTRAP:
                prefill, orphans = None, orphans + 1
            else:
                prefill = fire(self.leg, prefill, "let_go").target
                unbooked -= prefill in LEG.final
        return evolve(world, decode=decode, prefill=prefill, orphans=orphans, unbooked=unbooked)


def _booked(world: World, state: Enum) -> World:
    """One leg has an outcome, if this state is the end of one."""
    return evolve(world, unbooked=world.unbooked - (state in LEG.final))


def _given_head(world: World) -> World:
    given = not world.client_has_head
    return evolve(world, client_has_head=True, answers=world.answers + given)


def _open(world: World) -> bool:
    return world.prefill in LEG.open or world.decode in LEG.open


def _spent(world: World, fact: str, target: Enum) -> World:
    """Budgets and ghosts after the request went from `world.state` to `target`."""
    retries, moves, forms, untried = world.retries, world.moves, world.forms, world.untried
    retried = target is S.QUEUED and fact != "passed_over"
    retries -= retried
    moved = world.state is S.RESUMING and target in (S.STREAMING, S.POISONED, S.FINISHED)
    moves -= moved
    forms -= world.state is S.RESUMING and fact == "rejected" and target is S.MIGRATING
    if target in REQUEST.final:
        # What is over has no use for budgets; one that was overdrawn stays so, to be seen.
        retries, moves, forms, untried = (min(b, 0) for b in (retries, moves, forms, untried))
    told = target in (S.FINISHED, S.FAILED) and not world.client_has_head
    return evolve(
        world,
        state=target,
        answers=world.answers + told,
        retries=retries,
        moves=moves,
        forms=forms,
        untried=untried,
        was_retried=world.was_retried or retried,
        was_passed_over=world.was_passed_over or fact == "passed_over",
        was_moved=world.was_moved or moved,
        last_fact=fact if target in REQUEST.final else "",
    )


def show(world: World) -> Mapping[str, str]:
    """The columns of a printed path."""
    return {
        "topology": world.topology.value,
        "request": str(world.state.value),
        "prefill": "" if world.prefill is None else str(world.prefill.value),
        "decode": "" if world.decode is None else str(world.decode.value),
        "orphans": str(world.orphans),
        "retries": str(world.retries),
        "moves": str(world.moves),
        "client has": "content" if world.client_has_content else "head" * world.client_has_head,
    }


#### What must hold

ATTEMPT = REQUEST.scopes["attempt"]
FAILED_LEG = (L.REFUSED, L.PUSHED_BACK, L.BROKEN, L.CRASHED)


def _has_failed(world: World) -> bool:
    """Nothing will come of the prefill of this attempt."""
    return world.prefill in FAILED_LEG or world.prefill_absent


ALWAYS: Mapping[str, Callable[[World], bool]] = {
    "no decode leg outlives its attempt": lambda w: w.state in ATTEMPT or w.decode not in LEG.open,
    "a bootstrap prefill is never cancelled": lambda w: (
        w.topology is Topology.SERIAL or w.prefill is not L.CLOSED or w.prefill_absent
    ),
    "a serial prefill does not outlive its attempt": lambda w: (
        w.topology is Topology.BOOTSTRAP or w.orphans == 0
    ),
    "serial decode is not contacted before its prefill is done": lambda w: (
        w.topology is Topology.BOOTSTRAP or w.decode is None or w.prefill is L.SUCCEEDED
    ),
    "no decode outlives its prefill's failure before the first token": lambda w: (
        not _has_failed(w)
        or w.decode not in LEG.open
        or w.decode_erred
        or w.state in (S.STREAMING, S.POISONED)
    ),
    "each leg has one outcome, and none has two": lambda w: (
        w.unbooked == w.orphans + (w.prefill in LEG.open) + (w.decode in LEG.open)
    ),
    "the client gets one answer, and only one that left gets none": lambda w: (
        w.answers == w.client_has_head
        if w.state not in REQUEST.final or w.state is S.ABANDONED
        else w.answers == 1
    ),
    "aborted is what had a head, no token, and a failed prefill": lambda w: (
        w.state is not S.ABORTED
        or (w.client_has_head and not w.client_has_content and _has_failed(w))
    ),
    "a retry means that the client received nothing": lambda w: (
        w.state is not S.QUEUED or not w.client_has_head
    ),
    "no budget is overdrawn": lambda w: min(w.retries, w.moves, w.forms, w.untried) >= 0,
    "only a whole good answer is finished": lambda w: (
        w.state is not S.FINISHED or w.decode is L.SUCCEEDED
    ),
    "abandoned is what its client left, and nothing else": lambda w: (
        w.client_left is (w.state is S.ABANDONED)
    ),
}


ABSENCES = ("nobody is there for prefill", "nobody is there for decode")


def _prefill_failed(world: World, after: World) -> bool:
    return world.prefill in LEG.open and after.prefill in FAILED_LEG


BETWEEN: Mapping[str, Callable[[World, str, World], bool]] = {
    "after the first token prefill cannot hurt the stream": lambda w, _, after: (
        not (_prefill_failed(w, after) and w.state in (S.STREAMING, S.POISONED))
        or (after.state, after.decode) == (w.state, w.decode)
    ),
    "a decode that answered with an error has the last word": lambda w, _, after: (
        not (_prefill_failed(w, after) and w.decode_erred)
        or (after.state, after.decode) == (w.state, w.decode)
    ),
    "with retries left, a failed prefill fails nothing before the head": lambda w, word, after: (
        not (_prefill_failed(w, after) and w.state is S.DISPATCHING and w.retries > 0)
        or after.state is S.QUEUED
        or w.decode_erred
        or word == "prefill rejected"
    ),
    "a prefill's 4xx before the head is the client's": lambda w, word, after: (
        not (word == "prefill rejected" and w.state is S.DISPATCHING and not w.decode_erred)
        or after.last_fact == "rejected"
    ),
    "a move begins only while one is left and a pair is untried": lambda w, word, after: (
        after.state is not S.MIGRATING
        or w.state is S.MIGRATING
        or w.can_migrate
        or word.endswith("rejected")
        or word in ABSENCES
    ),
    "where half a pair is not there, the next pair is asked, and nothing is spent": (
        lambda w, word, after: (
            word not in ABSENCES
            or w.decode_erred
            or w.state not in (S.DISPATCHING, S.RESUMING)
            or (
                after.state is (S.QUEUED if w.state is S.DISPATCHING else S.MIGRATING)
                and (after.retries, after.moves) == (w.retries, w.moves)
            )
        )
    ),
    "with moves left, a failed prefill fails nothing that resumes": lambda w, word, after: (
        not (_prefill_failed(w, after) and w.state is S.RESUMING and w.can_migrate)
        or after.state is S.MIGRATING
        or w.decode_erred
        or word == "prefill rejected"
    ),
}

SOMETIMES: Mapping[str, Callable[[World], bool]] = {
    "a pair finishes a request": lambda w: w.state is S.FINISHED and not w.was_retried,
    "a fresh pair finishes a request whose prefill failed": lambda w: (
        w.state is S.FINISHED and w.was_retried
    ),
    "a pair finishes a request after one that was not there": lambda w: (
        w.state is S.FINISHED and w.was_passed_over and not w.was_retried
    ),
    "a request is aborted because its prefill failed": lambda w: w.state is S.ABORTED,
    "a stream finishes although its prefill failed late": lambda w: (
        w.state is S.FINISHED and w.prefill_failed_late
    ),
    "a lost decode resumes on a fresh pair and finishes": lambda w: (
        w.state is S.FINISHED and w.was_moved
    ),
    "a client leaves and the prefill runs on": lambda w: w.state is S.ABANDONED and w.orphans > 0,
    "a client leaves and the serial prefill is closed": lambda w: (
        w.state is S.ABANDONED and w.prefill is L.CLOSED and w.decode is None
    ),
    "a decode's error is told although its prefill failed meanwhile": lambda w: (
        w.state is S.FAILED and w.decode_erred and w.prefill in FAILED_LEG
    ),
    "decode answers before its prefill does": lambda w: (
        w.state is S.STREAMING and w.prefill in LEG.open
    ),
}

EVENTUALLY: Mapping[str, Callable[[World], bool]] = {
    "a request on pairs is over": lambda w: w.state in REQUEST.final,
    "every leg has its outcome, left behind or not": lambda w: (
        w.state in REQUEST.final and w.unbooked == 0
    ),
}

WHENEVER: Mapping[str, tuple[Callable[[World], bool], Callable[[World], bool]]] = {
    "a prefill that was left behind ends": (lambda w: w.orphans > 0, lambda w: w.orphans == 0),
    "whoever left has nobody compute for him": (
        lambda w: w.client_left,
        lambda w: w.orphans == 0 and not _open(w),
    ),
    "a decode whose prefill has failed ends": (
        lambda w: _has_failed(w) and w.decode in LEG.open,
        lambda w: w.decode not in LEG.open,
    ),
    "a request that is between two pairs gets one, or is over": (
        lambda w: w.state in (S.QUEUED, S.MIGRATING),
        lambda w: w.state in ATTEMPT or w.state in REQUEST.final,
    ),
}
