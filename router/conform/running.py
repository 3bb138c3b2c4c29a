"""A case tried on a router: engines up, router up, warm, then the faults, then the clients.

Every case gets a router of its own, so that nothing it has learnt is left over from another one.
It is warm when each engine has been asked once: what is tried is not how a router starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Literal

import trio
from attrs import frozen

from router.conform.case import Case
from router.conform.heard import CHAT, Ask
from router.conform.stage import (
    Actor,
    Failed,
    NotApplicable,
    NotServing,
    Order,
    Place,
    Router,
    Seat,
    Stage,
)
from router.sim.engine import SimEngine
from router.sim.settings import EngineKind, SimSettings

WARM_SECONDS = 60.0
WARM_ASKS = 30
"""Asked so often in vain for an engine to be chosen, a router is taken to be warm."""
CONTEXT_LENGTH = 1 << 20
Outcome = Literal["pass", "fail", "n/a"]


@frozen
class Verdict:
    """How a case went; `reason` is empty where it passed."""

    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0


async def try_case(
    case: Case,
    open_place: Callable[[], AbstractAsyncContextManager[Place]],
    knobs: Mapping[str, str],
    engine: EngineKind,
) -> Verdict:
    """Try a case, in a place of its own; never raises for what a router does."""
    began = trio.current_time()
    outcome: Outcome = "pass"
    reason = ""
    try:
        async with open_place() as place:
            stage = await _set_up(case, place, knobs, engine)
            outcome, reason = await _play(case, stage)
    except* NotServing as problems:
        outcome, reason = "fail", str(_first(problems))
    return Verdict(outcome, reason, trio.current_time() - began)


async def _play(case: Case, stage: Stage) -> tuple[Outcome, str]:
    found: list[tuple[Outcome, str]] = []
    try:
        with trio.move_on_after(case.seconds) as bounded:
            await case.play(stage)
        if bounded.cancelled_caught:
            found.append(("fail", f"not over after {case.seconds:g} s"))
    except* Failed as failed:
        found.append(("fail", str(_first(failed))))
    except* NotApplicable as missing:
        found.append(("n/a", str(_first(missing))))
    return found[0] if found else ("pass", "")


def _first(group: BaseExceptionGroup[Exception]) -> BaseException:
    """What a task of a case has raised, however many nurseries it was in."""
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


async def _set_up(case: Case, place: Place, knobs: Mapping[str, str], engine: EngineKind) -> Stage:
    engines = [SimEngine(_settings(actor, n, engine)) for n, actor in enumerate(case.actors)]
    urls = [await place.host(each) for each in engines]
    seats = tuple(
        Seat(url, actor.role, each.kv_port)
        for url, actor, each in zip(urls, case.actors, engines, strict=True)
    )
    model_url = await place.host(SimEngine(_settings(Actor(token_seconds=0.0), 99, engine)))
    router = await place.launch(Order(seats, knobs, engine))
    stage = Stage(place, router, engines, model_url)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch_for_its_end, router)
        await _warm_up(case, stage)
        nursery.cancel_scope.cancel("it serves")
    for each, actor in zip(engines, case.actors, strict=True):
        each.requests.clear()
        if actor.faults:
            each.add_faults(actor.faults)
    return stage


def _settings(actor: Actor, number: int, engine: EngineKind) -> SimSettings:
    return SimSettings(
        engine=engine,
        name=f"w{number}",
        model=actor.model,
        role=actor.role,
        token_seconds=actor.token_seconds,
        context_length=CONTEXT_LENGTH,
    )


async def _watch_for_its_end(router: Router) -> None:
    """Raises NotServing when it is gone; one that serves from the background is not."""
    await router.wait_exited()
    try:
        stream = await router.connect()
    except OSError:
        raise NotServing(f"it has ended before it served: {router.last_words()}") from None
    await stream.aclose()


async def _warm_up(case: Case, stage: Stage) -> None:
    models = sorted({actor.model for actor in case.actors})
    answered, last = 0, "nothing"
    with trio.move_on_after(WARM_SECONDS):
        while not _all_asked(stage) and answered < WARM_ASKS:
            for model in models:
                ask = Ask(tokens=1, stream=False, model=model, prompt=f"warm up {answered}")
                heard = await stage.ask(ask, patience=5.0)
                last = heard.summary
                answered += heard.is_whole
            if not heard.is_whole:
                await trio.sleep(0.25)
        return
    if not answered:
        raise NotServing(f"it does not serve after {WARM_SECONDS:g} s ({last})")


def _all_asked(stage: Stage) -> bool:
    return all(any(_is_chat(one.path) for one in each.requests) for each in stage.engines)


def _is_chat(path: str) -> bool:
    return path == CHAT
