"""Clients that leave, and limits on how many there may be at a time (C1 to C3, C13, C14, C32, C35).

A request that nobody waits for must leave its engine, its place under the cap and its place in
the queue, and be counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from router.conform.case import case
from router.conform.heard import Ask, Heard
from router.conform.stage import Actor, Failed, Stage

NOTICED_SECONDS = 4.0
"""How long an engine may work on for a client that has left."""


async def _is_let_go(stage: Stage, what: str) -> None:
    await stage.until(
        lambda: not stage.running,
        NOTICED_SECONDS,
        f"{what} still runs on its engine {NOTICED_SECONDS:g} s after the client has left",
    )


def _at_work(stage: Stage) -> Callable[[Heard], bool]:
    """Whether an engine has been at it for a while."""
    since: list[float] = []

    def has_begun(_: Heard) -> bool:
        if stage.running and not since:
            since.append(trio.current_time())
        return bool(since) and trio.current_time() >= since[0] + 0.3

    return has_begun


@case(
    "C1",
    done="A client leaves while its answer, which is not streamed, is being written.",
    expected="The engine is freed at once.",
    actors=(Actor(token_seconds=0.1),),
)
async def leaves_whole_answer(stage: Stage) -> None:
    await stage.ask(Ask(stream=False, tokens=300), leave_when=_at_work(stage))

    await _is_let_go(stage, "the request")


@case(
    "C1",
    done="Twenty clients leave in the middle of their streams.",
    expected="All engines are freed at once.",
    actors=(Actor(token_seconds=0.1), Actor(token_seconds=0.1)),
)
async def leaves_streams(stage: Stage) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(_leave_midway, stage)

    await _is_let_go(stage, "a stream")


async def _leave_midway(stage: Stage) -> None:
    await stage.ask(Ask(tokens=300), leave_when=_has_begun)


def _has_begun(heard: Heard) -> bool:
    return len(heard.events) >= 3


@case(
    "C2",
    done="A client leaves before the first token of its stream has come.",
    expected="The engine is freed at once.",
    actors=(Actor("delay,first_token=40"),),
)
async def leaves_before_first_token(stage: Stage) -> None:
    await stage.ask(leave_when=_at_work(stage))

    await _is_let_go(stage, "the request")


@case(
    "C3",
    done="A stream goes silent after a few events; then its client leaves.",
    expected="The engine is freed at once, not at its next event.",
    actors=(Actor("hang,after_events=4"),),
)
async def leaves_silent_stream(stage: Stage) -> None:
    await stage.ask(leave_when=lambda heard: len(heard.events) == 4)

    await _is_let_go(stage, "the stream")


@case(
    "C13",
    done="Five times six streams, to the engine with the fewest; whoever is on the first engine "
    "leaves, the others read to the end. Then four more streams, twice.",
    expected="The first engine still gets some of the last: it is not thought to be busy.",
    actors=(Actor(token_seconds=0.05), Actor(token_seconds=0.05)),
    needs={"least_load": ""},
)
async def load_is_given_back(stage: Stage) -> None:
    for turn in range(5):
        await _six_of_which_some_leave(stage, turn)
        await _is_let_go(stage, "a stream")

    before = len(stage.asked(0))
    for _ in range(2):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(stage.ask, Ask(tokens=20))
    if len(stage.asked(0)) == before:
        raise Failed("the engine whose clients had left gets nothing any more")


async def _six_of_which_some_leave(stage: Stage, turn: int) -> None:
    def is_on_first(name: str) -> bool:
        return any(name.encode() in one.body for one in stage.asked(0))

    async def visit(name: str) -> None:
        await stage.ask(
            Ask(tokens=20, prompt=name),
            leave_when=lambda heard: _has_begun(heard) and is_on_first(name),
        )

    async with trio.open_nursery() as nursery:
        for place in range(6):
            nursery.start_soon(visit, f"visitor-{turn}-{place}.")


@case(
    "C14",
    done="Twelve streams of three seconds each while four requests at a time are allowed.",
    expected="Never more than four run on the engines; the others wait or are refused.",
    actors=(Actor(token_seconds=0.1), Actor(token_seconds=0.1)),
    needs={"cap": "4", "queue": "100"},
)
async def cap_holds(stage: Stage) -> None:
    most = 0
    heard: list[Heard] = []

    async def visit() -> None:
        heard.append(await stage.ask(Ask(tokens=30)))

    async with trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(visit)
        while len(heard) < 12:
            most = max(most, stage.generating)
            await trio.sleep(0.02)
    if most > 4:
        raise Failed(f"{most} requests at a time, although 4 are allowed")
    bad = [one for one in heard if not one.is_whole and one.status not in (408, 429, 503)]
    if bad:
        raise Failed(f"{len(bad)} of 12 streams failed ({bad[0].summary})")


@case(
    "C32",
    done="Four requests at a time are allowed; three times four clients leave in mid-stream, then "
    "four more come.",
    expected="The last four are served without waiting.",
    actors=(Actor(token_seconds=0.1), Actor(token_seconds=0.1)),
    needs={"cap": "4", "queue": "100"},
)
async def cap_is_given_back(stage: Stage) -> None:
    for _ in range(3):
        await _four(stage, Ask(tokens=300), leaves=True)
        await _is_let_go(stage, "a stream")
    await _four(stage, Ask(tokens=3), leaves=False)


async def _four(stage: Stage, ask: Ask, *, leaves: bool) -> None:
    heard = [Heard() for _ in range(4)]
    leave_when = _has_begun if leaves else None
    async with trio.open_nursery() as nursery:
        for one in heard:
            nursery.start_soon(
                partial(stage.ask, ask, patience=10, leave_when=leave_when, heard=one)
            )
    bad = [one for one in heard if not (one.ending == "left" if leaves else one.is_whole)]
    if bad:
        raise Failed(f"{len(bad)} of 4 not served after others had left ({bad[0].summary})")


@case(
    "C35",
    done="One request at a time is allowed and one may wait. While the first runs, the second "
    "leaves the queue and a third comes.",
    expected="The third takes the place in the queue; the second never reaches an engine.",
    actors=(Actor(token_seconds=0.2),),
    needs={"cap": "1", "queue": "1"},
)
async def leaves_queue(stage: Stage) -> None:
    first, third = Heard(), Heard()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: stage.ask(Ask(tokens=20), heard=first))
        await stage.until(lambda: stage.running == 1, 10, "the first request was not served")
        await stage.ask(Ask(prompt="the one who leaves"), patience=0.5)
        if stage.running > 1 or first.ending:
            raise Failed("the second did not have to wait, although one at a time is allowed")
        nursery.start_soon(lambda: stage.ask(Ask(tokens=1), heard=third))

    await trio.sleep(1.0)  # who left may come after all
    if any(b"the one who leaves" in one.body for one in stage.asked(0)):
        raise Failed("the request whose client had left was sent to an engine")
    # 408: it had its place in the queue, and waited too long for the router's taste.
    if not first.is_whole or not (third.is_whole or third.status == 408):
        raise Failed(f"the first got {first.summary}; the third got {third.summary}")
