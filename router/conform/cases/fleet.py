"""The router itself: whether it is ready, how it goes, and what a thousand streams do to it."""

from __future__ import annotations

from functools import partial

import trio

from router.conform.case import case
from router.conform.heard import Ask, Heard
from router.conform.stage import Actor, Failed, NotApplicable, Stage

STREAMS = 1000
HEALTH_SECONDS = 10.0
CHANGED_SECONDS = 30.0


async def wait_ready(stage: Stage, ready: bool, otherwise: str) -> None:
    """Until readiness is that; raises Failed, or NotApplicable where there is none."""
    path = stage.router.ready_path
    if path is None:
        raise NotApplicable("no readiness endpoint is known")
    with trio.move_on_after(CHANGED_SECONDS):
        while ((await stage.get(path)).status == 200) is not ready:  # noqa: ASYNC110
            await trio.sleep(0.2)
        return
    raise Failed(otherwise)


async def readiness_follows(stage: Stage, place: int) -> None:
    """An engine goes and comes back."""
    await wait_ready(stage, True, "never ready, although every engine is")
    stage.engines[place].add_faults("now:server_dies,restart_after=3600")
    await wait_ready(stage, False, f"ready {CHANGED_SECONDS:g} s after the engine was gone")
    stage.engines[place].clear_faults()
    await wait_ready(stage, True, f"not ready {CHANGED_SECONDS:g} s after the engine came back")


@case(
    "C28",
    done="The only engine goes and comes back; health checks every second.",
    expected="Readiness goes and comes with it.",
    actors=(Actor(),),
    needs={"health": "1"},
    seconds=100,
)
async def readiness(stage: Stage) -> None:
    await readiness_follows(stage, 0)


@case(
    "C29",
    done="The router gets SIGTERM while it carries ten streams of 4 s.",
    expected="All ten are complete; then the process ends.",
    actors=(Actor(token_seconds=0.2), Actor(token_seconds=0.2)),
    wishes={"drain": "30"},
)
async def shutdown_waits(stage: Stage) -> None:
    heard = [Heard() for _ in range(10)]
    async with trio.open_nursery() as nursery:
        for one in heard:
            nursery.start_soon(partial(stage.ask, Ask(tokens=20), heard=one))
        await stage.until(
            lambda: all(len(one.events) > 3 for one in heard), 20, "the streams did not begin"
        )
        ended = 10 - stage.generating
        if ended:
            raise Failed(f"{ended} of 10 streams had ended at their engines before they began here")
        stage.router.terminate()

    bad = [one for one in heard if not one.is_whole]
    if bad:
        raise Failed(f"{len(bad)} of 10 streams did not complete ({bad[0].summary})")
    with trio.move_on_after(20):
        await stage.router.wait_exited()
        return
    raise Failed("the process is still there 20 s after its last stream")


@case(
    "C30",
    done=f"{STREAMS} streams at a time, an event a second each, while /health is asked.",
    expected=f"All complete, and /health answers within {HEALTH_SECONDS:g} s.",
    actors=(Actor(token_seconds=1.0), Actor(token_seconds=1.0)),
    seconds=150,
    is_heavy=True,
)
async def many_streams(stage: Stage) -> None:
    heard = [Heard() for _ in range(STREAMS)]
    slowest = 0.0
    async with trio.open_nursery() as nursery:
        for one in heard:
            nursery.start_soon(partial(stage.ask, Ask(tokens=20), heard=one, patience=100.0))
            await trio.sleep(0.01)
        while not all(one.ending for one in heard):
            health = await stage.get("/health")
            slowest = max(slowest, health.seconds)
            await trio.sleep(0.25)

    bad = [one for one in heard if not one.is_whole]
    if bad:
        raise Failed(f"{len(bad)} of {STREAMS} streams failed ({bad[0].summary})")
    if slowest > HEALTH_SECONDS:
        raise Failed(f"/health took {slowest:.1f} s")
