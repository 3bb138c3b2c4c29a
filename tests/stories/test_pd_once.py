"""What a pair is given is given once: no second copy of a hand-off, of rooms, of a failure."""

from __future__ import annotations

import pytest

from tests.pairs import Half, Pairs, play
from tests.plans import Client

#: Longer than a connection that was closed as idle could be taken for a good one.
LATER = 4.0
ENDS = pytest.mark.parametrize("end", ["cut", "reset"])


@ENDS
@pytest.mark.parametrize("stream", [True, False])
def test_decode_that_dies_over_a_hand_off_does_not_get_it_again(stream: bool, end: str) -> None:
    good = "head@1,token@1,done@1" if stream else "json@1"
    pairs = Pairs(
        prefills=(Half("kv@1 | kv@2", engine="vllm"),),
        decodes=(Half(f"{good} | {end}@{LATER}", engine="vllm"),),
        clients=(Client(stream=stream, then=(Client(stream=stream),)),),
        protocol="vllm-nixl",
    )

    result = play(pairs)

    assert [got.status for got in result.got] == [200, 502]
    assert result.got[1].code == "upstream_broken"
    assert len(result.d.bodies) == 2
    assert result.rows("d0") == ["success", "error"]


@ENDS
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dies", ["prefill", "decode"])
def test_nobody_meets_twice_in_one_room(dies: str, stream: bool, end: str) -> None:
    good = "head@1,token@1,done@1" if stream else "json@1"
    bad = f"{good} | {end}@{LATER}"
    waits = f"{good} | head@9,token@9,done@9"
    pairs = Pairs(
        prefills=(Half(bad if dies == "prefill" else waits),),
        decodes=(Half(bad if dies == "decode" else f"{good} | "),),
        clients=(Client(stream=stream, then=(Client(stream=stream),)),),
        rest=10.0,
    )

    result = play(pairs)

    assert [got.status for got in result.got] == [200, 502]
    assert result.got[1].ended_at == pytest.approx(LATER)
    for engine in (result.p, result.d):
        rooms = [body["bootstrap_room"] for body in engine.bodies]
        assert len(rooms) == len(set(rooms)) == 2
