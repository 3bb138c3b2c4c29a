"""Streams that lose their engine go on elsewhere, and their clients read the right answer.

Most breaks are cuts by a relay (tests/real/cutting.py); some are real deaths. Breaks are judged in
tests/real/moves.py; the table is printed and written to build/real-migration.md.
"""

import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from itertools import islice

import pytest
import trio
from attrs import define

from tests.real.cutting import Cuts, Relay
from tests.real.engines import ENGINES, Engine
from tests.real.moves import Judge, References, Verdict, break_streams, moves_in, plans
from tests.real.processes import log_of
from tests.real.router import routed
from tests.real.tally import Tally

pytestmark = pytest.mark.real

BREAKS = int(os.environ.get("BATON_REAL_BREAKS", "150"))
SEED = int(os.environ.get("BATON_REAL_SEED", "1"))
AT_ONCE = 4
FLAGS = (
    "--migration-limit 3 --policy random --breaker-failure-threshold 0 --log-format json"
    " --health-check-interval-secs 2 --health-check-timeout-secs 4"
)
#: Who is broken with whom, in which share of all breaks; both directions of a mixed pair.
PAIRS = {("vllm", "vllm"): 0.3, ("sglang", "sglang"): 0.2, ("vllm", "sglang"): 0.5}


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    counting = Tally()
    yield counting
    counting.publish()


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
        router = routed(*(relay.url for relay in relays), flags=FLAGS)
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

    with ENGINES[kinds[0]]() as first, ENGINES[kinds[1]]() as second:
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
