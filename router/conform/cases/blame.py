"""Whom a circuit breaker blames (C15, C16)."""

from __future__ import annotations

from router.conform.case import case
from router.conform.heard import Ask
from router.conform.stage import Actor, Failed, Stage


async def _well_after(stage: Stage, status: int) -> None:
    for _ in range(8):
        heard = await stage.ask(Ask(tokens=1))
        if heard.status != status:
            raise Failed(f"the engine's {status} became: {heard.summary}")
    stage.engines[0].clear_faults()

    heard = await stage.ask(Ask(tokens=2))
    if not heard.is_whole:
        raise Failed(f"the next good request got: {heard.summary}")


@case(
    "C15",
    done="Eight clients send what the engine refuses with 400, then one sends a good request. The "
    "breaker opens at three failures.",
    expected="Each gets its 400, and the good request is served.",
    actors=(Actor("status,code=400"),),
    needs={"breaker": "3"},
)
async def bad_requests_are_no_failures(stage: Stage) -> None:
    await _well_after(stage, 400)


@case(
    "C15",
    done="The engine is full and says 429 to eight clients, then it has room again. The breaker "
    "opens at three failures.",
    expected="Each gets its 429, and the next request is served.",
    actors=(Actor("status,code=429"),),
    needs={"breaker": "3"},
)
async def a_full_engine_is_no_failure(stage: Stage) -> None:
    await _well_after(stage, 429)


@case(
    "C16",
    done="One of two engines answers 200 and dies after some events, each time; 24 streams, one "
    "after the other. The breaker opens at three failures.",
    expected="It is left alone: it gets at most eight of the 24.",
    actors=(Actor("cut,after_events=4"), Actor()),
    needs={"breaker": "3"},
)
async def deaths_behind_the_head_count(stage: Stage) -> None:
    heard = [await stage.ask(Ask(tokens=8)) for _ in range(24)]

    stage.must_have_asked([0], heard[-1])
    got = len(stage.asked(0))
    if got > 8:
        raise Failed(f"it got {got} of 24 streams and broke all of them")
    served = sum(one.is_whole for one in heard)
    if served < 24 - got:
        raise Failed(f"the other one got {len(stage.asked(1))} of 24 streams, {served} were served")
