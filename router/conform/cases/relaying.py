"""Bytes that a router has to pass on as they are, and in time (C19, C20, C24, C25)."""

from __future__ import annotations

from router.conform.case import case
from router.conform.heard import Ask, Headers
from router.conform.stage import Actor, Failed, Stage

MIB = 1 << 20


async def _same_text(stage: Stage, faults: str, ask: Ask, what: str) -> None:
    whole = await stage.ask_directly(ask)
    for engine in stage.engines:
        engine.add_faults(faults)
    heard = await stage.ask(ask)
    for engine in stage.engines:
        engine.clear_faults()
    if not heard.is_whole or heard.text != whole.text:
        characters = f"{len(heard.text)} of {len(whole.text)} characters"
        raise Failed(f"{what} does not arrive ({heard.summary}, {characters})")


@case(
    "C19",
    done="Engines compress an answer and a stream that nobody asked to compress, and send a stream "
    "that ends with its connection.",
    expected="Each arrives complete, with headers that fit its bytes.",
)
async def framing_fits(stage: Stage) -> None:
    await _same_text(stage, "gzip", Ask(stream=False), "a compressed answer")
    await _same_text(stage, "gzip", Ask(), "a compressed stream")
    await _same_text(stage, "close_delimited", Ask(), "a stream that ends with its connection")


@case(
    "C19",
    done="A client's Connection header names another one of its headers.",
    expected="That one is for the router; the engine does not see it.",
    actors=(Actor(),),
)
async def hop_by_hop_ends_here(stage: Stage) -> None:
    headers: Headers = (("Connection", "x-for-the-router"), ("X-For-The-Router", "1"))
    heard = await stage.ask(Ask(tokens=1, headers=headers))

    if not stage.asked(0) or not heard.is_whole:
        raise Failed(f"the request was not served ({heard.summary})")
    if "x-for-the-router" in stage.asked(0)[-1].headers:
        raise Failed("the engine has got a hop-by-hop header")


@case(
    "C20",
    done="A stream with characters of several bytes comes byte by byte.",
    expected="The text arrives as it was written.",
)
async def split_characters(stage: Stage) -> None:
    ask = Ask(tokens=60)
    whole = await stage.ask_directly(ask)
    if whole.text.isascii():
        raise Failed("the simulated engine writes nothing but ASCII")
    await _same_text(stage, "dribble,bytes=1", ask, "the text")


@case(
    "C24",
    done="An engine sends an event every 0.2 s for 4 s; the client also takes gzip.",
    expected="They arrive one by one, not in a lump.",
    actors=(Actor(token_seconds=0.2),),
)
async def events_come_one_by_one(stage: Stage) -> None:
    heard = await stage.ask(Ask(tokens=20, headers=(("Accept-Encoding", "gzip"),)))

    if not heard.is_whole:
        raise Failed(f"the stream failed ({heard.summary})")
    spread = heard.arrivals[-1] - heard.arrivals[0]
    if spread < 2.0 or len(heard.arrivals) < 10:
        raise Failed(f"{len(heard.events)} events came within {spread:.1f} s")


@case(
    "C25",
    done="A client sends a prompt of 20 MiB, with default limits; the engine refuses it with 400.",
    expected="The engine gets all of it, and the client gets the engine's answer.",
    actors=(Actor("status,code=400,message=seen"),),
)
async def large_body(stage: Stage) -> None:
    heard = await stage.ask(Ask(stream=False, prompt="x" * (20 * MIB)))

    if heard.status != 400 or b"seen" not in heard.body:
        raise Failed(f"the client got: {heard.summary}")
    stage.must_have_asked([0], heard)
    if len(stage.asked(0)[-1].body) < 20 * MIB:
        raise Failed("the engine got less than was sent")


@case(
    "C25",
    done="The limit is 1 MiB; a client sends 0.5 MiB, another one 3 MiB.",
    expected="The engine gets the first; the second is a 413 with an error object, and no engine "
    "is asked.",
    actors=(Actor("status,code=400,message=seen"),),
    needs={"body_max": str(MIB)},
)
async def too_large_body(stage: Stage) -> None:
    stage.must_have_asked([0], await stage.ask(Ask(stream=False, prompt="x" * (MIB // 2))))
    stage.engines[0].requests.clear()
    heard = await stage.ask(Ask(stream=False, prompt="x" * (3 * MIB)))

    if stage.asked(0):
        raise Failed("an engine got it")
    if heard.status != 413:
        raise Failed(f"the client got: {heard.summary}")
    if heard.error is None:
        raise Failed(f"413 without an error object ({heard.body[:60]!r})")
