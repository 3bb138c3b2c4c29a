"""Clients that leave, and limits on how many there may be at a time (C1 to C3, C13, C14, C32, C35).

A request that nobody waits for must leave its engine, its place under the cap and its place in
the queue, and be counted once. That is tried only where an engine was still at work when its client
left: a router that holds an answer back until it is complete has nothing left to free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import trio

from router.conform.case import case
from router.conform.heard import Ask, Heard
from router.conform.stage import PATIENCE_SECONDS, Actor, Failed, Stage

NOTICED_SECONDS = 4.0
"""How long an engine may work on for a client that has left."""


async def _is_let_go(stage: Stage, what: str) -> None:
    await stage.until(
        lambda: not stage.running,
        NOTICED_SECONDS,
        f"{what} still runs on its engine {NOTICED_SECONDS:g} s after the client has left",
    )


async def _leave(
    stage: Stage, ask: Ask, when: Callable[[Heard], bool], *, patience: float = PATIENCE_SECONDS
) -> str:
    """A client asks and leaves; if no engine was at work for it then, what happened instead."""
    was_at_work = False

    def leaves(heard: Heard) -> bool:
        nonlocal was_at_work
        if not when(heard):
            return False
        was_at_work = stage.works_on(ask.prompt)
        return True

    heard = await stage.ask(ask, leave_when=leaves, patience=patience)
    if heard.ending == "left" and was_at_work:
        return ""
    if heard.ending == "left" or heard.is_whole:
        return (
            "its engine had finished before the client could leave, since the router had held back"
        )
    return f"the client could not leave in the middle of its answer ({heard.summary})"


def _must_have_left(reasons: Sequence[str]) -> None:
    found = [reason for reason in reasons if reason]
    if found:
        raise Failed(f"this cannot be told: {found[0]}")


def _at_work(stage: Stage, prompt: str) -> Callable[[Heard], bool]:
    """Whether an engine has been at it for a while."""
    since: list[float] = []

    def has_begun(_: Heard) -> bool:
        if stage.works_on(prompt) and not since:
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
    ask = Ask(stream=False, tokens=300)
    _must_have_left([await _leave(stage, ask, _at_work(stage, ask.prompt))])

    await _is_let_go(stage, "the request")


@case(
    "C1",
    done="Twenty clients leave in the middle of their streams.",
    expected="All engines are freed at once.",
    actors=(Actor(token_seconds=0.1), Actor(token_seconds=0.1)),
)
async def leaves_streams(stage: Stage) -> None:
    _must_have_left(await _leave_midway(stage, 20, Ask(tokens=200)))

    await _is_let_go(stage, "a stream")


async def _leave_midway(
    stage: Stage, count: int, ask: Ask, *, patience: float = PATIENCE_SECONDS
) -> list[str]:
    """So many clients leave their streams; what happened instead, where it did."""
    reasons: list[str] = []

    async def visit(prompt: str) -> None:
        one = attrs.evolve(ask, prompt=prompt)
        reasons.append(await _leave(stage, one, _has_begun, patience=patience))

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(visit, f"visitor-{number}.")
    return [reason for reason in reasons if reason]


def _has_begun(heard: Heard) -> bool:
    return len(heard.events) >= 3


@case(
    "C2",
    done="A client leaves before the first token of its stream has come.",
    expected="The engine is freed at once.",
    actors=(Actor("delay,first_token=40"),),
)
async def leaves_before_first_token(stage: Stage) -> None:
    ask = Ask()
    _must_have_left([await _leave(stage, ask, _at_work(stage, ask.prompt))])

    await _is_let_go(stage, "the request")


@case(
    "C3",
    done="A stream goes silent after a few events; then its client leaves.",
    expected="The engine is freed at once, not at its next event.",
    actors=(Actor("hang,after_events=4"),),
)
async def leaves_silent_stream(stage: Stage) -> None:
    _must_have_left([await _leave(stage, Ask(), lambda heard: len(heard.events) >= 4)])

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
        _must_have_left(await _six_of_which_some_leave(stage, turn))
        await _is_let_go(stage, "a stream")
        if not stage.asked(0):
            raise Failed("the first engine was never asked")

    before = len(stage.asked(0))
    for _ in range(2):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(stage.ask, Ask(tokens=20))
    if len(stage.asked(0)) == before:
        raise Failed("the engine whose clients had left gets nothing any more")


async def _six_of_which_some_leave(stage: Stage, turn: int) -> list[str]:
    """What happened instead, where one on the first engine did not leave."""
    reasons: list[str] = []

    def is_on_first(name: str) -> bool:
        return any(name.encode() in one.body for one in stage.asked(0))

    async def visit(name: str) -> None:
        ask = Ask(tokens=20, prompt=name)
        reason = await _leave(stage, ask, lambda heard: _has_begun(heard) and is_on_first(name))
        if is_on_first(name):
            reasons.append(reason)

    async with trio.open_nursery() as nursery:
        for place in range(6):
            nursery.start_soon(visit, f"visitor-{turn}-{place}.")
    return reasons


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
    served = sum(one.is_whole for one in heard)
    if served < 4:
        raise Failed(f"only {served} of 12 were served, although there is room for 4 at a time")


@case(
    "C32",
    done="Four requests at a time are allowed; three times four clients leave in mid-stream, then "
    "four more come.",
    expected="The last four are served without waiting.",
    actors=(Actor(token_seconds=0.1), Actor(token_seconds=0.1)),
    needs={"cap": "4", "queue": "100"},
)
async def cap_is_given_back(stage: Stage) -> None:
    for turn in range(3):
        bad = await _leave_midway(stage, 4, Ask(tokens=300), patience=10)
        if turn == 0:
            _must_have_left(bad)
        if bad:
            raise Failed(f"{len(bad)} of 4 not served after others had left: {bad[0]}")
        await _is_let_go(stage, "a stream")
    await _four_are_served(stage)


async def _four_are_served(stage: Stage) -> None:
    heard = [Heard() for _ in range(4)]
    async with trio.open_nursery() as nursery:
        for one in heard:
            nursery.start_soon(partial(stage.ask, Ask(tokens=3), patience=10, heard=one))
    bad = [one for one in heard if not one.is_whole]
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
