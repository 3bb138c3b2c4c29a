"""Workers that join, drain, leave and return while requests run."""

from __future__ import annotations

import msgspec
import pytest

from tests.simulate import Client, Engine, Outcome, Plan, simulate


def get(path: str, at: float) -> Client:
    """A client that asks the router itself."""
    return Client(method="GET", path=path, at=at, stream=False)


def call(method: str, path: str, at: float, **fields: object) -> Client:
    """A client that tells the router itself something."""
    body = msgspec.json.encode(fields) if fields else b""
    return Client(method=method, path=path, at=at, stream=False, raw_body=body)


def states(outcome: Outcome) -> list[str | None]:
    """The first worker's state at each look."""
    return [look.workers.get("w0") for look in outcome.looks]


def test_a_draining_worker_gets_nothing_new_and_finishes_what_it_has() -> None:
    others = tuple(Client(at=2.0 + turn, tokens=2) for turn in range(4))

    outcome = simulate(
        Plan(
            clients=(Client(tokens=100), call("POST", "/v1/workers/w0/drain", 1.5), *others),
            looks=(3.0,),
        )
    )

    assert outcome.got[0].ending == "clean"
    assert outcome.got[1].json["state"] == "draining"
    assert outcome.sent[0] == 1
    assert states(outcome) == ["draining"]


def test_a_drain_takes_a_window_and_is_asked_for_twice_without_harm() -> None:
    outcome = simulate(
        Plan(
            clients=(
                call("POST", "/v1/workers/w0/drain", 1.0, timeout_secs=5),
                call("POST", "/v1/workers/w0/drain", 2.0, timeout_secs=5),
                call("POST", "/v1/workers/nobody/drain", 3.0),
            )
        )
    )

    assert [got.status for got in outcome.got] == [200, 200, 404]


@pytest.mark.parametrize("at", [0.5, 1.5])
def test_no_connection_to_a_removed_worker_is_kept(at: float) -> None:
    """A stop finds none, neither that of a stream that ran on nor that of one that was over."""
    plan = Plan(
        engines=(Engine(),),
        clients=(Client(tokens=1),),
        happenings=((at, "remove 0"), (1.6, "stop")),
    )

    assert simulate(plan).one.ending == "clean"  # and no socket was left open


def test_streams_of_a_removed_worker_run_on() -> None:
    outcome = simulate(
        Plan(
            clients=(
                Client(tokens=50),
                call("DELETE", "/v1/workers/w0", 2.0),
                get("/v1/workers", 3.0),
                Client(at=3.0),
            ),
        )
    )

    assert [got.ending for got in outcome.got] == ["clean"] * 4
    workers = outcome.got[2].json["workers"]
    assert isinstance(workers, list)
    assert [worker["id"] for worker in workers] == ["w1"]
    assert outcome.sent == [1, 1]


def test_removing_a_worker_in_the_moment_of_choosing_hurts_nobody() -> None:
    # Choosing and sending are one step, so there is nothing in between (dynamo#13088).
    for luck in range(6):
        outcome = simulate(
            Plan(
                clients=tuple(Client(at=1.0, tokens=2) for _ in range(4)),
                happenings=((1.0, "remove 0"),),
                luck=luck,
            )
        )

        assert {got.status for got in outcome.got} == {200}


def test_a_worker_that_joins_is_probed_and_used() -> None:
    engines = (Engine(), Engine())
    asks = tuple(Client(at=10.0 + turn, tokens=1) for turn in range(4))

    outcome = simulate(
        Plan(
            engines=engines,
            clients=(
                call("DELETE", "/v1/workers/w1", 0.5),
                call("POST", "/v1/workers", 5.0, url="http://127.0.0.1:9001", id="w1"),
                *asks,
            ),
            looks=(3.0, 9.0),
        )
    )

    assert [got.status for got in outcome.got[:2]] == [200, 201]
    assert [look.workers.get("w1") for look in outcome.looks] == [None, "ready"]
    assert outcome.sent == [2, 2]


def test_a_worker_that_returns_is_asked_what_it_serves_before_it_is_used() -> None:
    # It may be another process, with another model.
    comes_back = "now:server_dies,restart_after=20"
    asks = tuple(Client(at=36.0 + turn, tokens=1) for turn in range(4))

    outcome = simulate(
        Plan(
            engines=(Engine(), Engine()),
            clients=(Client(tokens=1), *asks),
            settings={"health_check_interval_secs": 2.0},
            happenings=((3.0, f"faults 0 {comes_back}"),),
            looks=(20.0, 36.0),
        )
    )

    assert states(outcome) == ["unhealthy", "ready"]
    asked = [each.path for each in outcome.engines[0].requests]
    first, again, *_ = (i for i, path in enumerate(asked) if path == "/v1/chat/completions")
    assert "/v1/models" in asked[first:again]


def returned(*, restart_after: float, asks: tuple[Client, ...]) -> Outcome:
    """The first worker dies; who answers at its address then serves another model."""
    return simulate(
        Plan(
            engines=(Engine(), Engine(model="other")),
            clients=(Client(tokens=1), *asks, get("/v1/models", 60.0)),
            settings={"health_check_interval_secs": 2.0},
            happenings=(
                (3.0, f"faults 0 now:server_dies,restart_after={restart_after}"),
                (3.1, "replace 0 1"),
            ),
            looks=(50.0,),
        )
    )


def test_a_worker_that_returns_with_another_model_is_asked_for_that_one_only() -> None:
    # Anything that names the old one would be refused there, if it were sent.
    new = tuple(Client(at=50.0 + turn, tokens=1, model="other") for turn in range(4))
    old = Client(at=55.0, tokens=1)

    outcome = returned(restart_after=20, asks=(*new, old))

    assert states(outcome) == ["ready"]
    assert [got.status for got in outcome.got[:5]] == [200] * 5
    assert outcome.got[5].code == "model_not_found"
    models = outcome.got[6].json["data"]
    assert isinstance(models, list)
    assert [model["id"] for model in models] == ["other"]


def test_another_model_between_two_probes_is_found_out_within_some() -> None:
    # Nobody has noticed that it was away, so only the regular question tells.
    outcome = returned(restart_after=0.5, asks=(Client(at=30.0, tokens=1),))

    assert outcome.got[1].code == "model_not_found"


def test_the_worker_api() -> None:
    url = "http://127.0.0.1:9001"

    outcome = simulate(
        Plan(
            engines=(Engine(), Engine(kind="sglang")),
            clients=(
                get("/v1/workers/w1", 1.0),
                get("/v1/workers/w7", 1.0),
                call("POST", "/v1/workers", 2.0, url=url, id="w1"),
                call("POST", "/v1/workers", 2.0, url="not a url"),
                call("POST", "/v1/workers", 2.0, url=url, id="x", engine="tpu"),
                call("POST", "/v1/workers", 2.0, url=url, unknown=1),
                call("POST", "/v1/workers", 2.0),
                call("PUT", "/v1/workers", 2.0),
                call("DELETE", "/v1/workers/w7", 2.0),
            ),
        )
    )

    shown, *others = outcome.got
    assert (shown.json["id"], shown.json["engine"], shown.json["state"]) == (
        "w1",
        "sglang",
        "ready",
    )
    assert (shown.json["models"], shown.json["inflight"]) == (["tiny"], 0)
    assert [got.code for got in others] == [
        "not_found",
        "worker_exists",
        "bad_request",
        "bad_request",
        "bad_request",
        "bad_request",
        "method_not_allowed",
        "not_found",
    ]
    assert others[1].status == 409
