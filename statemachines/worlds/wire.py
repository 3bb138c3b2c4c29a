"""One request behind a wire that loses, repeats and reorders: its router, its agents, their drains.

What is on its way may come twice, never, or before what was sent before it; each such fault is
taken from a budget. Every attempt has an agent and an inbox of its own. Frames are numbered, a
cancel is said until it is heard and may overtake its request, and the router is patient for so
long: that all of this is needed is shown by the worlds without it (`Without`).
"""

from collections.abc import Iterable, Iterator

from attrs import evolve, frozen

from statemachines.chart import Chart
from statemachines.explore import Model
from statemachines.handback import HANDBACK
from statemachines.handback import HandbackState as H
from statemachines.leg import LEG, told_by_decode
from statemachines.leg import LegState as L
from statemachines.request import REQUEST
from statemachines.request import RequestState as S
from statemachines.worlds.standin import fire, lives_on
from statemachines.worlds.wire_promises import ALWAYS, BETWEEN, EVENTUALLY, SOMETIMES, WHENEVER
from statemachines.worlds.wire_state import (
    FAULTS,
    Attempt,
    Without,
    World,
    faulty,
    is_busy,
    last_frame,
    place_of,
    says,
    show,
    uncancelled,
    with_attempt,
)

__all__ = ["Without", "wire"]

#: Of the answer; each is a frame of its own.
TOKENS = 2

#: Whether its client may leave, whether it can be continued, and how many agents there are.
Kind = tuple[bool, bool, int]

KINDS: tuple[Kind, ...] = ((False, True, 2), (False, False, 1), (True, True, 1))


def wire(
    request: Chart = REQUEST,
    leg: Chart = LEG,
    handback: Chart = HANDBACK,
    *,
    tokens: int = TOKENS,
    faults: int = FAULTS,
    kinds: Iterable[Kind] = KINDS,
    without: Without = Without.NOTHING,
) -> Model[World]:
    """The model of one request, its router and its agents, on these charts."""
    starts = tuple(World(*kind, request.initial, faults=faults) for kind in kinds)
    return _Wire(request, leg, handback, starts, tokens, without).model()


@frozen(eq=False)
class _Wire:
    request: Chart
    leg: Chart
    handback: Chart
    starts: tuple[World, ...]
    tokens: int
    without: Without

    def model(self) -> Model[World]:
        return Model(
            name="one request behind a bad wire",
            starts=self.starts,
            steps=self.steps,
            is_over=lambda w: w.state in REQUEST.final and not any(map(is_busy, w.attempts)),
            always={
                **ALWAYS,
                "what is finished is whole": lambda w: (
                    w.state is not S.FINISHED or w.tokens == self.tokens
                ),
            },
            between=BETWEEN,
            sometimes=SOMETIMES,
            eventually=EVENTUALLY,
            whenever=WHENEVER,
            show=show,
            budgets={"moves": "moves left"},
        )

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        if world.state not in REQUEST.final:
            yield from self.router_acts(world)
        for place, attempt in enumerate(world.attempts):
            yield from self.messages_come(world, place, attempt)
            if not attempt.is_killed and attempt.agent in HANDBACK.open:
                yield from self.agent_acts(world, place, attempt)
            if world.faults and attempt.is_heard and attempt.agent not in HANDBACK.final:
                yield from self.agent_fails(world, place, attempt)

    #### The router

    def router_acts(self, world: World) -> Iterator[tuple[str, World]]:
        if world.may_leave:
            yield "client left", self.told(world, "client_gone")
        if world.state in (S.QUEUED, S.MIGRATING):
            if world.agents == 0:
                yield "nobody can take it", self.told(world, "refused")
                return
            is_movable = world.is_faithful and world.can_migrate
            sent = Attempt(self.leg.initial, is_movable, carried=world.tokens)
            asked = evolve(world, attempts=(*world.attempts, sent), agents=world.agents - 1)
            yield "request sent", self.told(asked, "admitted")
        elif self.without is not Without.SILENCE:
            last = len(world.attempts) - 1
            # Whoever has shown that he is there is blamed for his silence, nobody else.
            fact = "broke" if world.attempts[last].expected else "let_go"
            yield "silence", self.lost(world, last, fact)

    def lost(self, world: World, place: int, fact: str) -> World:
        """The leg ends by this fact, and what came of it cannot be trusted any more."""
        word = told_by_decode("broke", answer_began=False, end_was_seen=self.is_whole(world))
        return self.told(self.leg_told(world, place, fact), word)

    def is_whole(self, world: World) -> bool:
        return world.tokens == self.tokens

    def leg_told(self, world: World, place: int, fact: str) -> World:
        """The world after a leg was told; whoever gives it up before its end says so."""
        attempt = world.attempts[place]
        edge = fire(self.leg, attempt.leg, fact)
        is_given_up = "connection" in edge.leaves and fact in ("let_go", "broke")
        after = attempt._replace(leg=edge.target, has_cancel=attempt.has_cancel or is_given_up)
        if edge.target in LEG.final and self.without is not Without.CLOSED_INBOXES:
            # Where frames come nobody listens any more, and nobody counts.
            after = after._replace(flying=(), sent=0, expected=0)
        return with_attempt(world, place, after)

    def told(self, world: World, fact: str) -> World:
        """The world after the request was told a fact: its new state, budgets, scopes."""
        edge = fire(
            self.request,
            world.state,
            fact,
            can_retry=world.retries > 0,
            can_continue=world.is_faithful,
            can_migrate=world.can_migrate,
            can_rephrase=False,
        )
        returned = fact == "handed_back"
        is_moved = world.state is S.RESUMING and edge.target in (S.STREAMING, S.POISONED)
        after = evolve(
            world,
            state=edge.target,
            retries=world.retries - (edge.target is S.QUEUED and not returned),
            moves=world.moves - is_moved,
            returns=world.returns + returned,
        )
        last = len(after.attempts) - 1
        if "attempt" in edge.leaves and after.attempts[last].is_heard:
            return self.leg_told(after, last, "let_go")
        return after

    #### The wire

    def messages_come(
        self, world: World, place: int, attempt: Attempt
    ) -> Iterator[tuple[str, World]]:
        who = f"of {place + 1}"
        if attempt.has_request:
            left = with_attempt(world, place, attempt._replace(has_request=False))
            yield f"request {who} comes", self.request_comes(left, place)
            if world.faults:
                yield f"request {who} is lost", faulty(left)
                yield f"request {who} comes twice", faulty(self.request_comes(world, place))
        if attempt.has_cancel:
            yield f"cancel {who} comes", self.cancel_comes(world, place)
            if world.faults and self.without is not Without.REPETITION:
                yield f"cancel {who} is lost and said again", faulty(world)
            elif world.faults:
                lost = with_attempt(world, place, attempt._replace(has_cancel=False))
                yield f"cancel {who} is lost", faulty(lost)
        for frame in attempt.flying:
            yield from self.frame_flies(world, place, frame)

    def frame_flies(self, world: World, place: int, frame: int) -> Iterator[tuple[str, World]]:
        attempt = world.attempts[place]
        rest = tuple(each for each in attempt.flying if each != frame)
        left = with_attempt(world, place, attempt._replace(flying=rest))
        what = f"{attempt.kind(frame)} {frame} of {place + 1}"
        if frame == attempt.flying[0]:
            yield f"{what} comes", self.frame_comes(left, place, frame)
        elif world.faults:
            yield f"{what} comes early", faulty(self.frame_comes(left, place, frame))
        if world.faults:
            is_notice = attempt.kind(frame) == "notice"
            lost = evolve(left, notice_was_lost=left.notice_was_lost or is_notice)
            yield f"{what} is lost", faulty(lost)
            yield f"{what} comes twice", faulty(self.frame_comes(world, place, frame))

    def request_comes(self, world: World, place: int) -> World:
        attempt = world.attempts[place]
        if attempt.is_killed:
            return self.nobody_there(world, place)
        if attempt.agent is not None:
            return world  # an inbox is served once
        taken = attempt._replace(
            agent=self.handback.initial,
            holds_engine=self.handback.initial in self.handback.scopes["engine"],
        )
        if attempt.is_unwanted and self.without is not Without.TOMBSTONES:
            return self.agent_told(with_attempt(world, place, taken), place, "cancel_came")
        return with_attempt(world, place, taken)

    def nobody_there(self, world: World, place: int) -> World:
        """The broker says so at once: nobody is blamed, and the next one is tried."""
        attempt = world.attempts[place]
        if not attempt.is_heard or attempt.expected:
            return world
        gone = uncancelled(self.leg_told(world, place, "let_go"), place)
        return self.told(gone, "handed_back")

    def cancel_comes(self, world: World, place: int) -> World:
        """A cancel that was heard has said it all, so its repetitions are left out."""
        attempt = world.attempts[place]
        heard = attempt._replace(has_cancel=False, is_unwanted=attempt.agent is None)
        if attempt.is_killed or attempt.agent in HANDBACK.final:
            return with_attempt(world, place, heard._replace(is_unwanted=attempt.is_unwanted))
        if attempt.agent is None:
            return with_attempt(world, place, heard)
        return self.agent_told(with_attempt(world, place, heard), place, "cancel_came")

    def frame_comes(self, world: World, place: int, frame: int) -> World:
        attempt = world.attempts[place]
        found = place_of(frame, attempt.expected)
        if self.without is not Without.NUMBERS and found != "next":
            if found == "again" or not attempt.is_heard:
                return world
            return evolve(self.lost(world, place, "let_go"), had_gap=True)
        counted = attempt._replace(expected=max(attempt.expected, frame + 1))
        return self.frame_counts(with_attempt(world, place, counted), place, frame)

    def frame_counts(self, world: World, place: int, frame: int) -> World:
        """The next frame of its answer."""
        attempt = world.attempts[place]
        kind = attempt.kind(frame)
        if not attempt.is_heard:
            return self.token_comes(world, attempt, frame) if kind == "data" else world
        if attempt.leg is L.CONNECTING:
            world = self.leg_told(world, place, "connected")
        if kind == "head":
            is_first = world.attempts[place].leg is L.WAITING
            return self.leg_told(world, place, "head_arrived") if is_first else world
        if kind == "data":
            return self.token_comes(self.content_comes(world, place), attempt, frame)
        if kind == "done":
            return self.told(self.leg_told(world, place, "completed"), "completed")
        fact = "handed_back" if kind == "notice" else "broke"
        ended = self.leg_told(world, place, fact)
        word = told_by_decode(
            fact, answer_began=world.answer_began, end_was_seen=self.is_whole(world)
        )
        return self.told(uncancelled(ended, place), word)

    def content_comes(self, world: World, place: int) -> World:
        if world.attempts[place].leg is L.WAITING:
            world = self.leg_told(world, place, "head_arrived")
        if world.attempts[place].leg is L.ANSWERING:
            return self.told(self.leg_told(world, place, "first_token"), "first_token")
        return world

    def token_comes(self, world: World, attempt: Attempt, frame: int) -> World:
        """The client is given the token that the agent has put into this frame."""
        token = attempt.carried + frame - 1
        return evolve(
            world,
            tokens=max(world.tokens, token + 1),
            had_token_twice=world.had_token_twice or token < world.tokens,
            missed_token=world.missed_token or token > world.tokens,
        )

    #### The agent

    def agent_acts(self, world: World, place: int, attempt: Attempt) -> Iterator[tuple[str, World]]:
        who = f"{place + 1}"
        if self.is_listening(attempt):
            yield f"window of {who} over", self.agent_told(world, place, "window_over")
        if not attempt.holds_engine:
            return
        if attempt.agent is H.QUEUED:
            yield f"engine of {who} asked", self.agent_told(world, place, "sent")
        elif attempt.agent is H.ASKING:
            yield f"engine of {who} answers", self.agent_told(world, place, "answered")
        elif not self.is_listening(attempt):
            return  # it may be at it for ever: nothing but the cancel is relied on
        elif attempt.carried + attempt.sent - 1 < self.tokens:
            yield f"a token at {who}", with_attempt(world, place, says(attempt))
        else:
            yield f"engine of {who} is done", self.agent_told(world, place, "ended")

    def agent_fails(
        self, world: World, place: int, attempt: Attempt
    ) -> Iterator[tuple[str, World]]:
        """What goes wrong at an agent that is heard; of others only what they compute matters."""
        if attempt.is_killed:
            return
        killed = attempt._replace(is_killed=True, holds_engine=False)
        yield f"agent {place + 1} killed", faulty(with_attempt(world, place, killed))
        if attempt.agent is not None:
            broken = self.agent_told(world, place, "broke")
            yield f"engine of {place + 1} broke", faulty(broken)

    def agent_told(self, world: World, place: int, fact: str) -> World:
        attempt = world.attempts[place]
        edge = fire(
            self.handback,
            attempt.agent or self.handback.initial,
            fact,
            is_migratable=attempt.is_movable,
        )
        held = lives_on(edge, "engine", attempt.holds_engine)
        after = attempt._replace(agent=edge.target, holds_engine=held)
        if not self.is_listening(after):
            return with_attempt(world, place, after)
        if fact == "answered" or last_frame(edge.target) != "none":
            after = says(after)
        return with_attempt(world, place, after)

    def is_listening(self, attempt: Attempt) -> bool:
        """Frames of this attempt find somebody."""
        return attempt.is_heard or self.without is Without.CLOSED_INBOXES
