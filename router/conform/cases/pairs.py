"""Prefill/decode pairs (C5, C6, C28): one half fails, and the other must not wait for it."""

from __future__ import annotations

import msgspec

from router.conform.case import case
from router.conform.cases.fleet import readiness_follows
from router.conform.heard import Ask
from router.conform.stage import Actor, Failed, NotApplicable, Stage
from router.sim.wire import Received

TOLD_SECONDS = 10.0
FREED_SECONDS = 10.0
"""SGLang's halves look for their client every four seconds."""
PREFILL, DECODE = Actor(role="prefill"), Actor(role="decode")


async def _is_told(stage: Stage, place: int) -> None:
    """Of a failure of this engine."""
    heard = await stage.ask(patience=TOLD_SECONDS)
    stage.must_have_asked([place], heard)
    if heard.is_whole or not heard.is_told:
        raise Failed(f"the client got: {heard.summary}")


@case(
    "C5",
    done="Prefill refuses every request with 500, decode waits for its KV cache.",
    expected="The client is told within 10 s, and decode is freed.",
    actors=(Actor("status,code=500", role="prefill"), DECODE),
)
async def prefill_fails(stage: Stage) -> None:
    await _is_told(stage, 0)
    await stage.until(
        lambda: not stage.engines[1].inflight,
        FREED_SECONDS,
        f"decode still waits for its prefill {FREED_SECONDS:g} s after the client was told",
    )


@case(
    "C5",
    done="Decode refuses every request with 500, prefill waits for it.",
    expected="The client is told within 10 s. (Whether prefill is closed is not judged: it may be "
    "in the middle of a transfer.)",
    actors=(PREFILL, Actor("status,code=500", role="decode")),
)
async def decode_fails(stage: Stage) -> None:
    await _is_told(stage, 1)


@case(
    "C6",
    done="One of two prefills refuses each request, and the pair is tried again with the other.",
    expected="The second attempt has a room of its own.",
    actors=(Actor("status,code=500", role="prefill"), PREFILL, DECODE),
    needs={"pd_retries": "2"},
)
async def rooms_are_used_once(stage: Stage) -> None:
    rooms: list[list[object]] = []
    for _ in range(2):
        for engine in stage.engines:
            engine.requests.clear()
        heard = await stage.ask(Ask(tokens=2), patience=20.0)
        rooms.append([_room(one) for place in (0, 1) for one in stage.asked(place)])

    found = max(rooms, key=len)
    if not any(found):
        raise NotApplicable("its protocol knows no rooms")
    if len(found) < 2:
        raise NotApplicable(f"no second attempt ({heard.summary})")
    if len(set(found)) < len(found):
        raise Failed("two attempts were in the same room")


def _room(request: Received) -> object:
    return msgspec.json.decode(request.body).get("bootstrap_room")


@case(
    "C28",
    done="Prefill goes and comes back while decode is well; health checks every second.",
    expected="Readiness goes and comes with it.",
    actors=(PREFILL, DECODE),
    needs={"health": "1"},
    seconds=100,
)
async def readiness_of_pairs(stage: Stage) -> None:
    await readiness_follows(stage, 0)
