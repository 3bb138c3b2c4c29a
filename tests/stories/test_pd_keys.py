"""Whose key a client shows: a worker's is passed on to both halves, the router's to neither."""

from __future__ import annotations

import pytest

from tests.pairs import Result, run
from tests.plans import Client

CLIENT = Client(headers=(("authorization", "Bearer k"), ("x-data-parallel-rank", "3")))


def shown(result: Result) -> list[str | None]:
    """The key in prefill's request, in decode's, and in the abort."""
    (_, abort), *_ = result.d.aborts
    return [each.get("authorization") for each in (*result.p.headers, *result.d.headers, abort)]


@pytest.mark.parametrize("prefill", ["500@1", "400@1"])
def test_a_workers_key_reaches_both_halves_and_the_abort(prefill: str) -> None:
    assert shown(run(prefill, "", CLIENT)) == ["Bearer k"] * 3


def test_the_routers_key_reaches_neither() -> None:
    result = run("500@1", "", CLIENT, settings={"api_key": ("k",)})

    assert shown(result) == [None] * 3


def test_a_clients_rank_reaches_neither() -> None:
    result = run("500@1", "", CLIENT)

    assert not any(
        "x-data-parallel-rank" in each for each in (*result.p.headers, *result.d.headers)
    )
