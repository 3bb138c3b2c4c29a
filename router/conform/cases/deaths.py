"""Engines that die, hang, or end an answer badly (C8, C9, C11, C21 to C23, C36, C37).

What can be hidden is hidden: a failure before the client has got anything is tried elsewhere.
What cannot is told: an answer that is not complete never looks complete.
"""

from __future__ import annotations

from functools import partial

import trio

from router.conform.case import case
from router.conform.heard import Ask, Heard
from router.conform.stage import Actor, Failed, Stage

CUT = "cut,after_events=6"


async def all_are_whole(stage: Stage, count: int, ask: Ask) -> Heard:
    """Ask one after the other; raises Failed unless every client gets a complete answer.

    Returns the last one.
    """
    heard = [await stage.ask(ask) for _ in range(count)]
    bad = [one for one in heard if not one.is_whole]
    if bad:
        raise Failed(f"{len(bad)} of {count} requests failed ({bad[0].summary})")
    return heard[-1]


@case(
    "C8",
    done="An engine closes every kept-alive connection just as the next request comes on it.",
    expected="All are answered, over fresh connections.",
    actors=(Actor("close_reused"),),
)
async def stale_connection(stage: Stage) -> None:
    await all_are_whole(stage, 4, Ask(tokens=2))


@case(
    "C9",
    done="The only engine takes a request and never says a word; limit 3 s.",
    expected="The client gets an error, at the latest after 30 s.",
    actors=(Actor("hang"),),
    needs={"silence": "3"},
)
async def silent_engine(stage: Stage) -> None:
    heard = await stage.ask(patience=30.0)

    stage.must_have_asked([0], heard)
    if not heard.is_told or heard.status == 200:
        raise Failed(f"after 30 s: {heard.summary}")


@case(
    "C23",
    done="The same limit of 3 s; a stream begins after 1 s and takes 8 s, an event every 0.2 s.",
    expected="It is not cut: the limit is for silence.",
    actors=(Actor("delay,first_token=1", token_seconds=0.2),),
    needs={"silence": "3"},
)
async def long_stream(stage: Stage) -> None:
    heard = await stage.ask(Ask(tokens=40))

    if not heard.is_whole:
        raise Failed(f"cut after {heard.seconds:.1f} s ({heard.summary})")


@case(
    "C11",
    done="The engine stops in mid-stream and finishes its answer as aborted, with [DONE].",
    expected="The client can tell: an error, a cut, or the rest of the answer from elsewhere.",
    actors=(Actor("abort,after_events=6"), Actor("abort,after_events=6")),
)
async def abort_is_no_end(stage: Stage) -> None:
    await _is_told(stage)


@case(
    "C21",
    done="The engine's connection is cut in mid-stream.",
    expected="The client can tell: an error event, or a body that is cut, too.",
    actors=(Actor(CUT), Actor(CUT)),
)
async def cut_is_told(stage: Stage) -> None:
    await _is_told(stage)


@case(
    "C21",
    done="The engine's connection is cut in mid-stream.",
    expected="An error event says so, in the shape that clients know.",
    actors=(Actor(CUT), Actor(CUT)),
)
async def cut_is_explained(stage: Stage) -> None:
    heard = await stage.ask(Ask(tokens=20))

    stage.must_have_asked([0, 1], heard)
    if not heard.is_whole and heard.error is None:
        raise Failed(f"no error event in the stream ({heard.summary})")


@case(
    "C21",
    done="The engine ends a stream cleanly in the middle: no finish reason, no [DONE].",
    expected="The client can tell: an error event, or a body that is cut.",
    actors=(Actor("end,after_events=6"), Actor("end,after_events=6")),
)
async def early_end_is_told(stage: Stage) -> None:
    await _is_told(stage)


async def _is_told(stage: Stage) -> None:
    heard = await stage.ask(Ask(tokens=20))

    stage.must_have_asked([0, 1], heard)
    _must_be_told(heard)


def _must_be_told(heard: Heard) -> None:
    if not heard.is_whole and not heard.is_told:
        raise Failed(f"the stream ends as if all were well ({heard.summary})")


@case(
    "C22",
    done="The first engine dies in mid-stream, the second is well.",
    expected="What the client reads is the answer or a beginning of it; nothing comes twice.",
    actors=(Actor(CUT), Actor()),
    wishes={"migration": "3"},
)
async def nothing_twice(stage: Stage) -> None:
    ask = Ask(tokens=20)
    whole = await stage.ask_directly(ask)

    for _ in range(4):
        heard = await stage.ask(ask)
        if not whole.text.startswith(heard.text):
            raise Failed(f"the client read {heard.text!r}, which is not in the answer")
        if heard.is_whole and heard.text != whole.text:
            raise Failed("a part of the answer was taken for all of it")
    stage.must_have_asked([0], heard)
    stage.must_have_asked([1], heard)


@case(
    "C36",
    done="One of two engines is gone: its port is closed.",
    expected="All are answered: twenty requests for a whole answer, then twenty streams.",
)
async def dead_engine(stage: Stage) -> None:
    stage.engines[0].add_faults("now:server_dies")

    await all_are_whole(stage, 20, Ask(tokens=2, stream=False))
    await all_are_whole(stage, 20, Ask(tokens=2))


@case(
    "C36",
    done="One of two engines takes requests and cuts the connection without an answer.",
    expected="Twelve of twelve requests are answered by the other.",
    actors=(Actor("cut"), Actor()),
)
async def cut_before_answer(stage: Stage) -> None:
    await all_are_whole(stage, 6, Ask(tokens=2, stream=False))
    stage.must_have_asked([0], await all_are_whole(stage, 6, Ask(tokens=2)))


@case(
    "C37",
    done="One of two engines answers streams with 200 and nothing.",
    expected="The client gets the other engine's stream.",
    actors=(Actor("empty"), Actor()),
)
async def empty_answer(stage: Stage) -> None:
    stage.must_have_asked([0], await all_are_whole(stage, 6, Ask(tokens=4)))


@case(
    "C37",
    done="One of two engines answers streams with 200 and an error as the first event.",
    expected="The client gets the other engine's stream.",
    actors=(Actor("error_event,after_events=0"), Actor()),
)
async def error_first(stage: Stage) -> None:
    stage.must_have_asked([0], await all_are_whole(stage, 6, Ask(tokens=4)))


@case(
    "C11",
    done="An engine gets SIGTERM while it writes six streams; another one is well.",
    expected="No client takes a part of its answer for all of it.",
    actors=(Actor(token_seconds=0.1), Actor(token_seconds=0.1)),
    wishes={"migration": "3"},
)
async def engine_is_stopped(stage: Stage) -> None:
    whole = await stage.ask_directly(Ask(tokens=20))
    heard = [Heard() for _ in range(6)]
    async with trio.open_nursery() as nursery:
        for one in heard:
            nursery.start_soon(partial(stage.ask, Ask(tokens=20), heard=one))
        await stage.until(
            lambda: all(len(one.events) > 3 for one in heard), 20, "the streams did not begin"
        )
        if not stage.generating_at(0):
            raise Failed("the engine had nothing to write any more when its streams came")
        stage.engines[0].add_faults("now:sigterm_abort")

    for one in heard:
        _must_be_told(one)
        if one.is_whole and one.text != whole.text:
            raise Failed("a part of the answer was taken for all of it")
