"""What may end a bootstrap prefill before its answer: an option of the operator's, and the end."""

from __future__ import annotations

import pytest

from tests.pairs import Half, Result, run
from tests.plans import Client, Engine, Plan
from tests.simulate import simulate

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


@pytest.mark.parametrize("protocol", ["sglang-bootstrap", "vllm-nixl"])
def test_a_stopped_router_lets_prefills_end_within_its_window(protocol: str) -> None:
    """A serial prefill that nobody waits for has nothing to protect, and is closed at once."""
    happenings = ((3.0, "stop"),)
    prefill = "head@20,token@20,done@20"
    client = Client(leaves_at=2.0)

    result = run(prefill, "head@60", client, protocol=protocol, happenings=happenings, rest=30.0)

    is_serial = protocol == "vllm-nixl"
    assert result.p.left_at == ([pytest.approx(2)] if is_serial else [])
    assert result.rows("p0") == ["cancelled" if is_serial else "success"]
    assert result.stopped_at == pytest.approx(3 if is_serial else 20, abs=0.2)


def test_a_prefill_that_breaks_off_is_looked_at_soon() -> None:
    """Whoever comes next should not have to find out as well."""

    def probes(fault: str) -> int:
        outcome = simulate(
            Plan(
                engines=(
                    Engine(kind="sglang", role="prefill", options="engine=sglang", faults=fault),
                    Engine(kind="sglang", role="decode", options="engine=sglang"),
                ),
                settings={"health_check_interval_secs": 900.0},
            )
        )
        return [each.path for each in outcome.engines[0].requests].count("/health")

    assert probes("cut") == probes("") + 1


def test_it_waits_no_longer_than_its_window() -> None:
    happenings = ((3.0, "stop"),)

    result = run("head@900", "head@60", Client(leaves_at=2.0), happenings=happenings, rest=60.0)

    assert result.p.left_at == [pytest.approx(33, abs=0.2)]
    assert result.rows("p0") == ["cancelled"]


def test_a_second_signal_ends_it_at_once() -> None:
    happenings = ((3.0, "stop"), (5.0, "stop"))

    result = run("head@900", "head@60", Client(leaves_at=2.0), happenings=happenings, rest=60.0)

    assert result.p.left_at == [pytest.approx(5, abs=0.2)]


#### What follows from a lost decode


LEAVES: dict[str, dict[str, object]] = {
    "the client leaves": {"decode": "", "client": Client(leaves_at=1.0)},
    "it leaves after the head": {"decode": "head@1", "client": Client(leaves_at=2.0)},
    "decode rejects": {"decode": "400@1"},
    "decode is busy": {"decode": "503@1"},
    "decode fails": {"decode": "500@1"},
    "decode breaks": {"decode": "cut@1"},
    "decode breaks after its head": {"decode": "head@1,cut@2"},
    "decode cannot be reached": {"decodes": (Half(is_down=True),)},
    "decode gives up": {"decode": "jsonabort@1", "client": Client(stream=False)},
}


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("prefill", ["", "head@0.5", "500@4", "head@0.5,abort@4"])
def test_a_prefill_whose_decode_has_gone_blames_nobody(name: str, prefill: str) -> None:
    """Its own clock is no exception: it waits for a decode that will never come."""
    more: dict[str, object] = {"client": Client()} | LEAVES[name]
    settings = {"request_timeout_secs": 20.0, "breaker_failure_threshold": 1}

    result = run(prefill, settings=settings, rest=30.0, looks=(25.0,), **more)  # type: ignore[arg-type]

    assert result.rows("p0") == ["cancelled"]
    assert not any(result.prefill_failures.values())
    assert result.looks[0].breakers["p0"] == "closed"
    assert result.p.left_at == [] or result.p.left_at == [pytest.approx(20, abs=0.1)]


#### What a prefill says last


@pytest.mark.parametrize("extra", [{}, {"n": 2}], ids=["one item", "two items"])
@pytest.mark.parametrize(
    ("event", "status", "row"),
    [
        ("error", 502, "error"),
        ("error:400", 400, "client_error"),
        ("error:503", 503, "backpressure"),
    ],
)
def test_a_prefill_is_read_to_its_end_behind_an_error(
    event: str, status: int, row: str, extra: dict[str, object]
) -> None:
    says = f"head@1,open{event}@2,token@3,end@4"

    result = run(says, "", Client(extra=extra), looks=(3.5,))

    assert result.one.status == status
    assert result.one.ended_at == pytest.approx(2)
    assert result.looks[0].inflight == {"p0": 1, "d0": 0}
    assert result.p.left_at == []
    assert result.rows("p0") == [row]
    assert sum(result.prefill_failures.values()) == 1


def test_a_prefill_that_never_ends_behind_an_error_has_its_own_time() -> None:
    settings = {"request_timeout_secs": 20.0}

    result = run("head@1,openerror@2", "", settings=settings, rest=30.0)

    assert result.p.left_at == [pytest.approx(20, abs=0.1)]
    assert result.rows("p0") == ["error"]
    assert sum(result.prefill_failures.values()) == 1
