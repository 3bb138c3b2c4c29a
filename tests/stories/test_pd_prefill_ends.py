"""What may end a bootstrap prefill before its answer: an option of the operator's, and the end."""

from __future__ import annotations

import pytest

from tests.pairs import Half, Result, run
from tests.plans import Client

SLOW = "head@9,token@9,done@9"


def decode_is_down(*, cancels: bool) -> Result:
    return run(
        SLOW,
        client=Client(),
        decodes=(Half(is_down=True),),
        settings={"pd_max_retries": 0, "pd_cancel_unmatched_prefill": cancels},
        rest=15.0,
    )


def test_a_prefill_whose_decode_got_nothing_is_closed_where_that_was_asked_for() -> None:
    result = decode_is_down(cancels=True)

    assert result.one.status == 502
    assert len(result.p.left_at) == 1
    assert result.rows("p0") == ["cancelled"]
    assert not result.prefill_failures or not any(result.prefill_failures.values())


def test_it_runs_to_its_end_where_nobody_asked() -> None:
    result = decode_is_down(cancels=False)

    assert result.one.status == 502
    assert result.p.left_at == []
    assert result.rows("p0") == ["success"]


@pytest.mark.parametrize("decode", ["head@3,token@4", "500@1"])
def test_a_prefill_whose_decode_may_have_begun_is_left_alone_all_the_same(decode: str) -> None:
    settings = {"pd_max_retries": 0, "pd_cancel_unmatched_prefill": True}
    result = run(SLOW, decode, Client(leaves_at=2.0), settings=settings, rest=15.0)

    assert result.p.left_at == []
    assert result.rows("p0") == ["success"]


def test_a_stopped_router_does_not_wait_for_a_prefill_that_nobody_waits_for() -> None:
    happenings = ((3.0, "stop"),)
    result = run("head@900,done@900", "head@60", Client(leaves_at=2.0), happenings=happenings)

    assert len(result.p.left_at) == 1
    assert result.p.left_at[0] < 10.0
    assert result.rows("p0") == ["cancelled"]
