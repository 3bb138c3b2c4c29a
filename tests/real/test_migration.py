"""Streams that lose their engine go on elsewhere, and their clients read the right answer.

Most breaks are cuts by a relay (tests/real/cutting.py); some are real deaths. Breaks are judged in
tests/real/judging.py; the table is printed and written to build/real-migration.md.
"""

import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from itertools import groupby, islice

import pytest
import trio
from attrs import define

from tests.real.calls import get
from tests.real.cutting import Cuts, Relay
from tests.real.deaths import Dying, Stream, deaths, judge_death, long_cases, outlive
from tests.real.engines import Engine, sglang, vllm
from tests.real.judging import Break, Judge, Verdict, last_workers_in, moves_in
from tests.real.moves import References, break_streams, plans
from tests.real.processes import log_of, wait_until
from tests.real.router import routed
from tests.real.tally import Tally

pytestmark = pytest.mark.real

BREAKS = int(os.environ.get("BATON_REAL_BREAKS", "150"))
DEATHS = int(os.environ.get("BATON_REAL_DEATHS", "6"))
SEED = int(os.environ.get("BATON_REAL_SEED", "1"))
AT_ONCE = 4
FLAGS = (
    "--migration-limit 3 --breaker-failure-threshold 0 --log-format json"
    " --health-check-interval-secs 2 --health-check-timeout-secs 4"
)
#: Who is broken with whom, in which share of all breaks; both directions of a mixed pair.
PAIRS = {("vllm", "vllm"): 0.3, ("sglang", "sglang"): 0.2, ("vllm", "sglang"): 0.5}

PAIRS_OF_DEATHS = {
    kinds: list(group)
    for kinds, group in groupby(
        sorted(deaths(DEATHS), key=lambda each: each.pair),
        key=lambda each: (each.kind, each.survivor),
    )
}


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    counting = Tally()
    yield counting
    counting.publish()


def started(kind: str) -> contextlib.AbstractContextManager[Engine]:
    """An idle SGLang takes a whole core unless it is told not to, which the other one needs."""
    return vllm() if kind == "vllm" else sglang("--sleep-on-idle")


@contextlib.contextmanager
def routed_to_all(*workers: str, flags: str) -> Iterator[int]:
    """A router that has found all of its workers, and not only one that serves the model."""
    with routed(*workers, flags=flags) as port:

        def knows_all() -> bool:
            ready = f'"workers":{len(workers)}'.encode()
            return ready in get(port, "/readyz").body.replace(b" ", b"")

        assert wait_until(knows_all, 60)
        yield port


@define(eq=False)
class Stage:
    """Two engines, relays in front of them, a router in front of those."""

    engines: tuple[Engine, Engine]
    cuts: Cuts
    port: int


@contextlib.asynccontextmanager
async def stage(engines: tuple[Engine, Engine], relays_each: int) -> AsyncIterator[Stage]:
    cuts = Cuts()
    async with trio.open_nursery() as nursery:
        relays = [
            await nursery.start(Relay(engine, cuts).serve)
            for engine in engines
            for _ in range(relays_each)
        ]
        urls = [relay.url for relay in relays]
        router = routed_to_all(*urls, flags=f"{FLAGS} --policy random")
        # In a thread, since the relays must answer the router's probes meanwhile.
        port = await trio.to_thread.run_sync(router.__enter__)
        try:
            yield Stage(engines, cuts, port)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(router.__exit__, None, None, None)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
async def test_cut_streams_tell_the_right_answer(tally: Tally, kinds: tuple[str, str]) -> None:
    is_one_kind = kinds[0] == kinds[1]
    endless = plans(kinds, is_one_kind, random.Random(SEED))
    wanted = list(islice(endless, round(BREAKS * PAIRS[kinds])))

    with started(kinds[0]) as first, started(kinds[1]) as second:
        async with stage((first, second), relays_each=2 if is_one_kind else 1) as on:
            references = References()
            outcomes = await break_streams(
                references,
                on.cuts,
                on.port,
                first,
                wanted,
                at_once=AT_ONCE,
                label="-".join(kinds),
            )
            judge = Judge(references, on.cuts, moves_in(log_of(f"router-{on.port}")))
            breaks = [each for outcome in outcomes for each in await judge.judge(outcome)]

    tally.add(breaks)
    assert [each for each in breaks if each.verdict is Verdict.WRONG] == []


@pytest.mark.parametrize("kinds", PAIRS_OF_DEATHS, ids="-".join)
async def test_streams_outlive_their_engine(tally: Tally, kinds: tuple[str, str]) -> None:
    references, breaks = References(), list[Break]()

    with started(kinds[1]) as survivor:
        answering: Engine | None = None
        for number, death in enumerate(PAIRS_OF_DEATHS[kinds]):
            with started(death.kind) as dying:
                answering = answering or dying
                for case in long_cases(kinds):
                    await references.right(answering, case)
                    await references.counted(answering, case)
                found = await _die(number, death, dying, survivor, answering, references)
            tally.add(found)
            breaks += found

    assert [each for each in breaks if each.verdict is Verdict.WRONG] == []
    assert any(each.mode in ("exact", "text") for each in breaks)


async def _die(
    number: int,
    death: Dying,
    dying: Engine,
    survivor: Engine,
    answering: Engine,
    references: References,
) -> list[Break]:
    """One death; the streams of the engine that lives are not counted."""
    streams = [
        Stream(f"{death.kind}-{death.survivor}-{number}-{place}", case)
        for place, case in enumerate(long_cases((death.kind, death.survivor)))
    ]
    router = routed_to_all(dying.url, survivor.url, flags=FLAGS)
    port = await trio.to_thread.run_sync(router.__enter__)
    try:
        await outlive(dying, death.how, port, streams, references)
    finally:
        router.__exit__(None, None, None)
    log = log_of(f"router-{port}")
    moves, last = moves_in(log), last_workers_in(log)
    return [
        await judge_death(stream, death, answering, references, moves.get(stream.id, []))
        for stream in streams
        if stream.id in moves or last.get(stream.id) == dying.url.removeprefix("http://")
    ]
