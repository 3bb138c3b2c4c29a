"""A plan that fails, made smaller for as long as it still fails in the same way.

One thing at a time is taken away: a client, an engine, a happening, a fault, a setting, a wish.
What is left is what the failure needs, and is short enough to be read and pasted.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import attrs

from tests.outcome import Outcome
from tests.plans import Client, Engine, Plan
from tests.simulate import simulate

#: Runs that a failure may cost.
TRIES_MAX = 300
#: Happenings about engines, whose second word is the engine's place.
OF_ENGINES = {"drain", "undrain", "remove", "add", "faults", "heal", "silent"} | {
    *("die", "leave", "cut_off", "rejoin")
}

T = TypeVar("T", Client, Engine, Plan)
Item = TypeVar("Item")


def simulate_small(plan: Plan) -> Outcome:
    """Simulate it; if it fails, raise what the smallest plan that fails in that way raises."""
    try:
        return simulate(plan)
    except Exception as error:
        way = way_of(error)
    simulate(shrink(plan, simulate, way))
    raise AssertionError(f"failed only once: simulate({plan!r})")


def way_of(error: BaseException) -> str:
    """How it fails: the kind of error, and the function that raised it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {frames[-1].name if frames else ''}"


def shrink(plan: Plan, run: Callable[[Plan], object], way: str) -> Plan:
    """The smallest plan found that fails in that way."""
    tries, place, is_smaller = 0, 0, False
    while tries < TRIES_MAX:
        candidate = next(islice(smaller(plan), place, None), None)
        if candidate is None and not is_smaller:
            break
        if candidate is None:
            place, is_smaller = 0, False  # what could not go before may go now
            continue
        tries += 1
        if _way_of_run(candidate, run) == way:
            plan, is_smaller = candidate, True
        else:
            place += 1
    return plan


def _way_of_run(plan: Plan, run: Callable[[Plan], object]) -> str | None:
    try:
        run(plan)
    except Exception as error:
        return way_of(error)
    return None


def smaller(plan: Plan) -> Iterator[Plan]:
    """Every plan that has one thing less, the largest things first."""
    for clients in _without_one(plan.clients):
        if clients:
            yield attrs.evolve(plan, clients=clients)
    for place in range(len(plan.engines)):
        if len(plan.engines) > 1:
            yield _without_engine(plan, place)
    for happenings in _without_one(plan.happenings):
        yield attrs.evolve(plan, happenings=happenings)
    for place, engine in enumerate(plan.engines):
        for less in _of_engine(engine):
            yield attrs.evolve(plan, engines=_with(plan.engines, place, less))
    for place, client in enumerate(plan.clients):
        for small in _of_client(client):
            yield attrs.evolve(plan, clients=_with(plan.clients, place, small))
    yield from _plainer(plan, {"engines", "clients", "settings", "happenings", "schedule"})
    # Last, since runs without these take their time.
    for name in plan.settings:
        rest = {key: value for key, value in plan.settings.items() if key != name}
        yield attrs.evolve(plan, settings=rest)
    if plan.schedule:
        yield attrs.evolve(plan, schedule=0)


def _of_engine(engine: Engine) -> Iterator[Engine]:
    faults = engine.faults.split(";") if engine.faults else []
    for rest in _without_one(faults):
        yield attrs.evolve(engine, faults=";".join(rest))
    for place, fault in enumerate(faults):
        for less in _of_fault(fault):
            yield attrs.evolve(engine, faults=";".join(_with(faults, place, less)))
    yield from _plainer(engine, {"faults"})


def _of_fault(fault: str) -> Iterator[str]:
    """Without the condition before the colon, and without one of the parameters behind the kind."""
    condition, colon, what = fault.rpartition(":")
    if colon:
        yield what
    kind, *parameters = what.split(",")
    for rest in _without_one(parameters):
        yield condition + colon + ",".join([kind, *rest])


def _of_client(client: Client) -> Iterator[Client]:
    for then in _without_one(client.then):
        yield attrs.evolve(client, then=tuple(then))
    for name in client.extra:
        rest = {key: value for key, value in client.extra.items() if key != name}
        yield attrs.evolve(client, extra=rest)
    for name, wish in client.extra.items():
        for less in _of_wish(wish):
            yield attrs.evolve(client, extra=client.extra | {name: less})
    if client.tokens > 1:
        yield attrs.evolve(client, tokens=client.tokens // 2)
    yield from _plainer(client, {"then", "extra", "tokens"})


def _of_wish(wish: object) -> Iterator[object]:
    """A list without one, an object without one of its members; none of them empty."""
    if isinstance(wish, dict):
        yield from (dict(rest) for rest in _without_one(list(wish.items())) if rest)
    elif isinstance(wish, list):
        yield from (list(rest) for rest in _without_one(wish) if rest)


def _plainer(whole: T, kept: set[str]) -> Iterator[T]:
    """With one more field as it usually is."""
    usual = type(whole)()
    for each in attrs.fields(type(whole)):
        if each.name not in kept and getattr(whole, each.name) != getattr(usual, each.name):
            yield attrs.evolve(whole, **{each.name: getattr(usual, each.name)})


def _without_one(every: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """Without any, if there are several; then without one."""
    if len(every) > 1:
        yield ()
    for place in range(len(every)):
        yield (*every[:place], *every[place + 1 :])


def _with(every: Sequence[Item], place: int, one: Item) -> tuple[Item, ...]:
    return (*every[:place], one, *every[place + 1 :])


def _without_engine(plan: Plan, gone: int) -> Plan:
    """The others move up, and with them what happens to them."""
    happenings = []
    for moment, what in plan.happenings:
        word, *rest = what.split()
        if word in OF_ENGINES:
            place = int(rest[0])
            if place == gone:
                continue
            what = " ".join([word, str(place - (place > gone)), *rest[1:]])
        happenings.append((moment, what))
    engines = (*plan.engines[:gone], *plan.engines[gone + 1 :])
    return attrs.evolve(plan, engines=engines, happenings=tuple(happenings))
