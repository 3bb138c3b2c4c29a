"""Every order in which two legs, a client and a clock can be heard, ties included.

Decode answers at fixed moments; prefill's end, the client's leaving and the deadline come before,
between, after and exactly at them. What has to come of each order is said here in a few lines,
without the charts: within one moment prefill is heard first, then decode, then the client. (The
clock comes last, but what is sent at its very moment may also come after it.)
"""

from __future__ import annotations

import pytest
from attrs import frozen

from tests.pairs import Result, run
from tests.plans import Client

DECODE = {1.0: "head", 2.0: "role", 3.0: "token", 4.0: "done"}
MOMENTS = [0.5 * step for step in range(1, 11)]
DEADLINES = [moment - 0.25 for moment in MOMENTS if moment < 4.5]
#: What prefill says, and what the client is told while it has nothing.
FAILURES = {
    "400": (400, 400),
    "503": (503, 503),
    "500": (502, "prefill_failed"),
    "cut": (502, "upstream_broken"),
}
ROWS = {"400": "client_error", "503": "backpressure", "500": "error", "cut": "error"}


@frozen
class Expected:
    """What an order leads to."""

    state: str
    status: int
    code: object = None
    decode_row: str = "success"
    stream: str = "ok"
    #: Decode was given up before prefill had failed.
    is_left: bool = False


def expected(failure: str, at: float, gone_at: float | None, due_at: float | None) -> Expected:
    """The first fact that ends the request, in the fixed order of one moment."""
    status, code = FAILURES[failure]
    begun = "nothing"
    for moment in sorted({*DECODE, at, *filter(None, (gone_at, due_at))}):
        if moment == at and begun == "nothing":
            state = "failed"
            return Expected(state, status, code, "cancelled", "")
        if moment == at and begun == "head":
            code = "prefill_failed" if isinstance(code, int) else code
            return Expected("aborted", 200, code, "cancelled", "aborted")
        step = DECODE.get(moment)
        if step == "done":
            return Expected("finished", 200)
        begun = {"head": "head", "token": "content"}.get(step or "", begun)
        given = 0 if begun == "nothing" else 200
        stream = "" if begun == "nothing" else "client_disconnect"
        if moment == gone_at:
            return Expected("abandoned", given, None, "cancelled", stream, is_left=at > moment)
        if moment == due_at:
            stream = stream and "expired"
            return Expected(
                "failed", given or 504, "request_timeout", "cancelled", stream, is_left=at > moment
            )
    raise AssertionError


def check(result: Result, failure: str, want: Expected) -> None:
    assert result.state == want.state
    # What SGLang's prefill says when its decode has gone, too: that blames nobody.
    is_blamed = not (failure == "500" and want.is_left and want.decode_row == "cancelled")
    assert result.rows("p0") == [ROWS[failure] if is_blamed else "cancelled"]
    assert result.rows("d0") == [want.decode_row]
    assert result.streams("d0") == [want.stream] * bool(want.stream)
    if result.one.ending != "left":
        assert (result.one.status, result.one.code) == (want.status, want.code)
    if want.state == "finished":
        assert (result.one.ending, result.one.text) == ("clean", "a")
    # One abort for whoever was given up, none for who was not.
    assert len(result.d.aborts) == (want.decode_row == "cancelled")
    assert not result.p.aborts
    assert failure == "cut" or not result.p.left_at, "prefill was closed"


def script() -> str:
    return ",".join(f"{name}@{moment}" for moment, name in DECODE.items())


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("at", MOMENTS)
def test_prefill_fails_at_any_moment_of_decode(failure: str, at: float) -> None:
    result = run(f"{failure}@{at}", script())

    check(result, failure, expected(failure, at, None, None))


@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize("gone_at", [moment for moment in MOMENTS if moment < 4])
def test_the_client_leaves_at_any_moment_of_both(at: float, gone_at: float) -> None:
    result = run(f"500@{at}", script(), Client(leaves_at=gone_at), rest=10.0)

    check(result, "500", expected("500", at, gone_at, None))


@pytest.mark.parametrize(
    ("at", "due_at"),
    # Later than the request's deadline would be later than its own.
    [(at, due_at) for at in MOMENTS for due_at in DEADLINES if at < due_at],
)
def test_the_deadline_passes_at_any_moment_of_both(at: float, due_at: float) -> None:
    result = run(f"500@{at}", script(), settings={"request_timeout_secs": due_at})

    check(result, "500", expected("500", at, None, due_at))


@pytest.mark.parametrize("at", [moment for moment in MOMENTS if moment not in DECODE])
@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_how_bytes_are_cut_changes_nothing(at: float, cuts: int) -> None:
    result = run(f"500@{at}", script(), cuts=cuts)

    check(result, "500", expected("500", at, None, None))


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("at", [0.5, 1.0, 1.5])
def test_a_whole_answer_is_complete_or_prefills_failure(failure: str, at: float) -> None:
    result = run(f"{failure}@{at}", "json@1", Client(stream=False))

    status, code = FAILURES[failure]
    is_answered = at > 1
    assert result.one.status == (200 if is_answered else status)
    assert result.one.code == (None if is_answered else code)
    assert result.rows("p0") == [ROWS[failure]]
    assert result.rows("d0") == ["success" if is_answered else "cancelled"]


@pytest.mark.parametrize("error", ["400", "429", "500", "503"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("at", [0.5, 1.0, 1.5, 1.75, 2.5])
@pytest.mark.parametrize("stream", [True, False])
def test_whoever_fails_first_is_told_and_both_are_booked(
    error: str, failure: str, at: float, stream: bool
) -> None:
    # Decode's error has its head at 1 and its last bytes at 1.75.
    decode = f"errorhead:{error}@1,errorrest:{error}@1.75"
    result = run(f"{failure}@{at}", decode, Client(stream=stream))

    status, code = FAILURES[failure] if at <= 1 else (int(error), int(error))
    assert (result.one.status, result.one.code) == (status, code)
    is_blamed = failure != "500" or at <= 1.75
    assert result.rows("p0") == [ROWS[failure] if is_blamed else "cancelled"]
    assert len(result.d.aborts) == (at <= 1)
    if at > 1:
        assert result.one.error is not None
        assert result.one.error["message"] == "its own words"
