"""Choosing the worker for a request, by policy, among those whose breaker lets it through.

Choosing and taking the permit are one step without an await in it, so nothing can happen to a
worker between the two. A policy never counts: load is the number of live legs, and what a worker's
agent says that other routers have there. When every breaker is shut the request goes out anyway
and the choice says so, since a router that refuses everything on old evidence is worse than one
that tries.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import Final, NamedTuple, Protocol

from attrs import define, field

from router.breaker import Permit
from router.worker import Worker

LINES_MAX: Final = 1024  # models whose order of turns is kept; beyond, all start anew


class Choice(NamedTuple):
    """A worker and the leave to send one request to it; a tuple since one is made per dispatch."""

    worker: Worker
    permit: Permit
    forced: bool = False  # every breaker was shut, this one included

    def give_back(self, now: float) -> None:
        """Nothing is sent after all."""
        self.permit.close("neutral", now)


class Policy(Protocol):
    """Orders candidates; stateful, and asked again with more excluded when a breaker refuses."""

    def pick(
        self, candidates: Sequence[Worker], excluded: Collection[Worker], model: str | None
    ) -> Worker | None:
        """The best of the candidates that are not excluded; None when there is none."""
        ...


@define(eq=False)
class Chooser:
    """Chooses by one policy. Each role has its own, so that their turns do not mix."""

    policy: Policy

    def choose(
        self,
        candidates: Sequence[Worker],
        now: float,
        tried: Collection[Worker] = (),
        model: str | None = None,
        last: Collection[Worker] = (),
    ) -> Choice | None:
        """A worker and its permit, or None when all the candidates have been tried.

        Those in `last` are for when no other takes anything. Closing the permit, once, is the
        caller's duty. Turns are taken per model.
        """
        if last:
            choice = self.choose_open(candidates, now, {*tried, *last}, model)
            if choice is not None:
                return choice
        worker = self.policy.pick(candidates, tried, model)
        if worker is None:
            return None
        permit = worker.breaker.try_acquire(now)
        if permit is not None:
            return Choice(worker, permit)
        return self._choose_around(worker, candidates, now, tried, model)

    def choose_open(
        self,
        candidates: Sequence[Worker],
        now: float,
        tried: Collection[Worker] = (),
        model: str | None = None,
    ) -> Choice | None:
        """The same, but None as well when every breaker is shut."""
        excluded = tried
        while (worker := self.policy.pick(candidates, excluded, model)) is not None:
            permit = worker.breaker.try_acquire(now)
            if permit is not None:
                return Choice(worker, permit)
            excluded = {*excluded, worker}
        return None

    def _choose_around(
        self,
        refused: Worker,
        candidates: Sequence[Worker],
        now: float,
        tried: Collection[Worker],
        model: str | None,
    ) -> Choice | None:
        choice = self.choose_open(candidates, now, {*tried, refused}, model)
        if choice is not None:
            return choice
        forced = self.policy.pick(candidates, tried, model)
        if forced is None:
            return None
        return Choice(forced, forced.breaker.acquire_anyway(now), forced=True)


def make_chooser(policy: str, rng: Random | None = None) -> Chooser:
    """The chooser for a policy by its configured name; raises ValueError for an unknown one."""
    rng = Random() if rng is None else rng
    if policy == "round_robin":
        return Chooser(RoundRobin())
    if policy == "random":
        return Chooser(Randomly(rng))
    if policy == "least_load":
        return Chooser(LeastLoad())
    if policy == "power_of_two":
        return Chooser(PowerOfTwo(rng))
    raise ValueError(f"unknown policy: {policy}")


@define(eq=False)
class _Line:
    """Workers in the order in which they were last picked, longest ago first."""

    candidates: Sequence[Worker] = ()  # the sequence that `order` was last made from
    order: list[Worker] = field(factory=list)


@define(eq=False)
class _Lines:
    """One line per model. Turns survive a change of the candidates: who stays keeps its place."""

    _lines: dict[str | None, _Line] = field(factory=dict)

    def of(self, candidates: Sequence[Worker], model: str | None) -> list[Worker]:
        line = self._lines.get(model)
        if line is None:
            if len(self._lines) >= LINES_MAX:
                self._lines.clear()
            line = self._lines[model] = _Line()
        if line.candidates is not candidates:
            there, known = set(candidates), set(line.order)
            # Newcomers wait for one round: a worker that comes and goes would otherwise be served
            # at each return before those that never left.
            line.order = [worker for worker in line.order if worker in there]
            line.order += [worker for worker in candidates if worker not in known]
            line.candidates = candidates
        return line.order


@define(eq=False)
class RoundRobin:
    """Everybody in turn: the one that was picked longest ago."""

    _lines: _Lines = field(factory=_Lines)

    def pick(
        self, candidates: Sequence[Worker], excluded: Collection[Worker], model: str | None
    ) -> Worker | None:
        order = self._lines.of(candidates, model)
        for place, worker in enumerate(order):
            if worker not in excluded:
                order.append(order.pop(place))
                return worker
        return None


@define(eq=False)
class LeastLoad:
    """The fewest live legs; among equals the one that was picked longest ago."""

    _lines: _Lines = field(factory=_Lines)

    def pick(
        self, candidates: Sequence[Worker], excluded: Collection[Worker], model: str | None
    ) -> Worker | None:
        order = self._lines.of(candidates, model)
        best: Worker | None = None
        fewest = 0
        for worker in order:
            load = len(worker.legs) + worker.elsewhere
            if (best is None or load < fewest) and worker not in excluded:
                best, fewest = worker, load
        if best is not None:
            order.remove(best)
            order.append(best)
        return best


@define(eq=False)
class Randomly:
    """Anybody, with equal chances."""

    rng: Random

    def pick(
        self, candidates: Sequence[Worker], excluded: Collection[Worker], model: str | None
    ) -> Worker | None:
        pool = _without(candidates, excluded)
        return pool[int(self.rng.random() * len(pool))] if pool else None


@define(eq=False)
class PowerOfTwo:
    """Two at random, and of these the one with fewer live legs: no herd runs to the idlest."""

    rng: Random

    def pick(
        self, candidates: Sequence[Worker], excluded: Collection[Worker], model: str | None
    ) -> Worker | None:
        pool = _without(candidates, excluded)
        if len(pool) < 2:
            return pool[0] if pool else None
        first = int(self.rng.random() * len(pool))
        second = int(self.rng.random() * (len(pool) - 1))
        # Drawn from the places that remain: the two differ, and all pairs are equally likely.
        one, other = pool[first], pool[second + (second >= first)]
        is_lighter = len(one.legs) + one.elsewhere <= len(other.legs) + other.elsewhere
        return one if is_lighter else other


def _without(candidates: Sequence[Worker], excluded: Collection[Worker]) -> Sequence[Worker]:
    if not excluded:
        return candidates
    return [worker for worker in candidates if worker not in excluded]
