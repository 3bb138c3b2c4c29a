"""Who fails when: every row of the table of bootstrap pairs, as streams and as whole answers.

Both halves go by a timetable (tests/pairs.py), so each row is one order of moments. What the client
is told, how each half is booked, and whether decode's engine is told to stop are one line each. The
letters are those of the same table in docs/pd.md.
"""

from __future__ import annotations

import pytest
from attrs import frozen

from tests.pairs import DONE, Half, Pairs, Result, error_body, play, run
from tests.plans import Client

STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
#: The worker's own words, not the router's.
VERBATIM = "verbatim"
#: A client that asks for what takes three more seconds.
UNANSWERED = ""


@frozen
class Row:
    """One row: what happens at which second, and what must come of it."""

    prefill: str
    decode: str
    status: int
    #: The router's code, VERBATIM, or "" for a good answer.
    code: str
    prefill_rows: tuple[str, ...]
    decode_rows: tuple[str, ...]
    aborts: int = 0
    #: Outcomes of decode's stream.
    streams: tuple[str, ...] = ()


def check(result: Result, row: Row) -> None:
    """Hold a run to its row."""
    assert result.one.status == row.status
    if row.code == VERBATIM:
        assert "x-router-error-code" not in result.one.headers
        assert result.one.json == error_body(row.status)
    elif row.code:
        assert result.one.code == row.code
    else:
        assert (result.one.ending, result.one.text) == ("clean", "a")
    assert tuple(result.rows("p0")) == row.prefill_rows
    assert tuple(result.rows("d0")) == row.decode_rows
    assert tuple(result.streams("d0")) == row.streams
    assert len(result.d.aborts) == row.aborts
    assert not result.p.aborts
    assert result.count("baton_worker_inflight", worker="p0") == 0


def failure(prefill: str, status: int, code: str, booked: str) -> Row:
    """Prefill fails while decode says nothing: decode is given up, and its engine told so."""
    return Row(prefill, UNANSWERED, status, code, (booked,), ("cancelled",), aborts=1)


def decides(decode: str, status: int, code: str, booked: str, *, aborts: int = 0) -> Row:
    """Decode fails first: prefill runs on to its own end, four seconds later."""
    prefill = "head@5,token@5,done@5"
    return Row(prefill, decode, status, code, ("success",), (booked,), aborts=aborts)


#### B: prefill fails before decode's head

PREFILL_FAILS = {
    "B1 400": failure("400@1", 400, VERBATIM, "client_error"),
    "B1 404": failure("404@1", 404, VERBATIM, "client_error"),
    "B1 422": failure("422@1", 422, VERBATIM, "client_error"),
    "B2 429": failure("429@1", 429, VERBATIM, "backpressure"),
    "B2 503": failure("503@1", 503, VERBATIM, "backpressure"),
    "B3 302": failure("302@1", 502, "prefill_failed", "error"),
    "B3 500": failure("500@1", 502, "prefill_failed", "error"),
    "B3 502": failure("502@1", 502, "prefill_failed", "error"),
    "B3 504": failure("504@1", 502, "prefill_failed", "error"),
    "B4 cut before its head": failure("cut@1", 502, "upstream_broken", "error"),
    "B4 cut after its head": failure("head@1,cut@1", 502, "upstream_broken", "error"),
    "B4 cut in an event": failure("head@1,half@1,cut@1", 502, "upstream_broken", "error"),
    "B4 reset": failure("head@1,reset@1", 502, "upstream_broken", "error"),
    "B5 error event": failure("head@1,error@1", 502, "prefill_failed", "error"),
    "B5 after a token": failure("head@1,token@1,error@1", 502, "prefill_failed", "error"),
    "B5 with a 4xx": failure("head@1,error:413@1", 413, "", "client_error"),
    "B5 abort finish": failure("head@1,token@1,abort@1", 502, "prefill_failed", "error"),
    "B5 whole abort": failure("jsonabort@1", 502, "prefill_failed", "error"),
    "B7 no body": failure("empty@1", 502, "prefill_failed", "error"),
    "B7 204": failure("204@1", 502, "prefill_failed", "error"),
    "B7 no event": failure("head@1,end@1", 502, "prefill_failed", "error"),
    "B7 comments only": failure("head@1,ping@1,end@1", 502, "prefill_failed", "error"),
    "B7 no JSON": failure("text@1", 502, "prefill_failed", "error"),
}


@STREAMED
@pytest.mark.parametrize("name", PREFILL_FAILS)
def test_prefill_fails_while_decode_says_nothing(name: str, stream: bool) -> None:
    row = PREFILL_FAILS[name]

    result = run(row.prefill, row.decode, Client(stream=stream))

    if name == "B5 with a 4xx":
        assert result.one.status == 413
        assert result.rows("p0") == ["client_error"]
        assert result.rows("d0") == ["cancelled"]
    else:
        check(result, row)
    assert result.one.ended_at == pytest.approx(1)
    assert result.d.left_at == [pytest.approx(1)]
    (abort, headers) = result.d.aborts[0]
    assert abort == {"rid": result.d.bodies[0]["rid"], "abort_all": False}
    assert "authorization" not in headers
    assert sum(result.prefill_failures.values()) == 1


@STREAMED
def test_b4_prefill_that_nobody_reaches(stream: bool) -> None:
    down = Half("", is_down=True)

    result = play(Pairs(prefills=(down,), clients=(Client(stream=stream),)))

    assert (result.one.status, result.one.code) == (502, "upstream_unreachable")
    assert (result.rows("p0"), result.rows("d0")) == (["error"], ["cancelled"])
    # H: whoever was sent nothing is told nothing.
    assert len(result.d.aborts) == len(result.d.bodies)


@pytest.mark.parametrize("schedule", range(6))
@pytest.mark.parametrize(
    ("clock", "stream"), [("first_token", True), ("request", True), ("request", False)]
)
@pytest.mark.parametrize("prefill", [UNANSWERED, "head@1"])
def test_b4_prefill_that_stays_silent(
    prefill: str, clock: str, stream: bool, schedule: int
) -> None:
    """It is closed by its own clock only, which is the request's, from its own dispatch.

    Both clocks run out in one moment, and Trio's scheduler decides which of them is seen first.
    """
    settings = {"request_timeout_secs": 10.0} | {f"{clock}_timeout_secs": 3.0}

    result = run(
        prefill,
        UNANSWERED,
        Client(stream=stream),
        settings=settings,
        looks=(3.5,),
        rest=20.0,
        schedule=schedule,
    )

    assert (result.one.status, result.one.code) == (504, f"{clock}_timeout")
    assert result.one.ended_at == pytest.approx(3)
    assert result.looks[0].inflight == {"p0": int(clock == "first_token"), "d0": 0}
    assert (result.rows("p0"), result.rows("d0")) == (["error"], ["cancelled"])
    assert len(result.d.aborts) == 1


@pytest.mark.parametrize("prefill", [UNANSWERED, "head@1"])
def test_b4_a_prefill_that_began_late_is_not_blamed_for_the_request_s_clock(prefill: str) -> None:
    """Its decode went away with the request, two seconds after it had begun."""
    result = play(
        Pairs(
            prefills=(Half("500@1"), Half(prefill)),
            decodes=(Half(UNANSWERED), Half(UNANSWERED)),
            clients=(Client(),),
            settings={"request_timeout_secs": 3.0, "pd_max_retries": 1},
            rest=20.0,
        )
    )

    assert (result.one.status, result.one.code) == (504, "request_timeout")
    assert (result.rows("p0"), result.rows("p1")) == (["error"], ["cancelled"])


@STREAMED
@pytest.mark.parametrize(
    ("decode", "status", "decode_streams"),
    [(UNANSWERED, 502, []), ("head@1 | head@11", 200, ["aborted"])],
    ids=["B6 before decode's head", "B6 after it"],
)
def test_b6_a_bug_of_ours_is_a_failed_prefill(
    decode: str,
    status: int,
    decode_streams: list[str],
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("router.pd.prefill.reading_of", fails)
    if not stream:
        decode, status, decode_streams = UNANSWERED, 502, []
    pairs = Pairs(
        prefills=(Half("head@2,token@2,done@2 | head@12,token@12,done@12"),),
        decodes=(Half(decode),),
        clients=(Client(stream=stream), Client(stream=stream, at=10.0)),
        has_bug=True,
    )

    result = play(pairs)

    for got in result.got:
        assert (got.status, got.code) == (status, "prefill_failed")
    assert result.rows("d0") == ["cancelled"] * 2
    assert len(result.rows("p0")) == 2
    assert result.streams("d0") == decode_streams * 2


#### A: nothing can be dispatched


@STREAMED
@pytest.mark.parametrize(
    ("prefills", "decodes", "code"),
    [
        ((), (Half(),), "no_prefill_workers"),
        ((Half(),), (), "no_decode_workers"),
        (
            (Half(options="group=a"),),
            (Half(options="group=b"),),
            "no_compatible_pd_group",
        ),
        ((Half(options="group=a"),), (Half(),), "no_compatible_pd_group"),
        ((Half(),), (Half(options="group=b"),), "no_compatible_pd_group"),
    ],
    ids=["A1 no prefill", "A1 no decode", "A2 a and b", "A2 a and none", "A2 none and b"],
)
def test_an_incomplete_pair_gets_nothing(
    prefills: tuple[Half, ...], decodes: tuple[Half, ...], code: str, stream: bool
) -> None:
    ready = Client(method="GET", path="/readyz", stream=False)

    result = play(Pairs(prefills=prefills, decodes=decodes, clients=(Client(stream=stream), ready)))

    assert (result.got[0].status, result.got[0].code) == (503, code)
    assert result.got[1].status == 503
    assert not any(engine.bodies for engine in (*result.prefills, *result.decodes))
    assert not any("baton_worker_requests_total" in key for key in result.metrics)


@STREAMED
@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_a3_a4_an_open_breaker_sends_nothing(half: str, stream: bool) -> None:
    """Both permits are taken before either half is sent."""
    failing = "500@0 | head@0,token@0,done@0"
    pairs = Pairs(
        prefills=(Half(failing if half == "prefill" else DONE),),
        decodes=(Half(failing if half == "decode" else UNANSWERED),),
        clients=(Client(stream=stream), Client(stream=stream, at=1.0)),
        settings={"breaker_failure_threshold": 1},
    )

    result = play(pairs)

    assert (result.got[1].status, result.got[1].code) == (503, "breaker_open")
    assert [len(result.p.bodies), len(result.d.bodies)] == [1, 1]
    assert len(result.rows("p0")) == 1
    assert len(result.rows("d0")) == 1


#### C: decode fails first

DECODE_FAILS = {
    "C1 400": decides("400@1", 400, VERBATIM, "client_error"),
    "C1 429": decides("429@1", 429, VERBATIM, "backpressure"),
    "C1 500": decides("500@1", 500, VERBATIM, "error"),
    "C1 503": decides("503@1", 503, VERBATIM, "backpressure"),
    "C2 cut": decides("cut@1", 502, "upstream_broken", "error"),
    "C2 cut in its head": decides("errorhead:500@1,cut@1", 502, "upstream_broken", "error"),
}


@STREAMED
@pytest.mark.parametrize("name", DECODE_FAILS)
def test_decode_fails_first_and_prefill_runs_on(name: str, stream: bool) -> None:
    row = DECODE_FAILS[name]

    result = run(row.prefill, row.decode, Client(stream=stream), looks=(1.05,))

    assert result.one.ended_at == pytest.approx(1)
    assert result.looks[0].inflight == {"p0": 1, "d0": 0}
    if name.startswith("C1"):
        check(result, row)
    else:
        assert (result.one.status, result.one.code) == (row.status, row.code)
        assert (result.rows("p0"), result.rows("d0")) == (["success"], ["error"])


@STREAMED
def test_c2_decode_that_nobody_reaches(stream: bool) -> None:
    result = play(
        Pairs(
            prefills=(Half("head@5,token@5,done@5"),),
            decodes=(Half("", is_down=True),),
            clients=(Client(stream=stream),),
            rest=20.0,
        )
    )

    assert (result.one.status, result.one.code) == (502, "upstream_unreachable")
    assert (result.rows("p0"), result.rows("d0")) == (["success"], ["error"])


#### D: decode has answered


@pytest.mark.parametrize("before", ["", ",ping@1", ",role@1", ",ping@1,role@1,ping@1,half@1"])
@pytest.mark.parametrize(
    ("prefill", "booked"),
    [
        ("400@2", "client_error"),
        ("503@2", "backpressure"),
        ("500@2", "error"),
        ("cut@2", "error"),
        ("head@2,error@2", "error"),
        ("head@2,token@2,abort@2", "error"),
    ],
)
def test_d1_prefill_fails_between_decodes_head_and_its_first_token(
    prefill: str, booked: str, before: str
) -> None:
    result = run(prefill, f"head@1{before},token@9")

    got = result.one
    assert (got.status, got.ending) == (200, "cut")
    assert got.head_at == pytest.approx(1)
    assert got.ended_at == pytest.approx(2)
    assert got.code in ("prefill_failed", "upstream_broken")
    assert result.state == "aborted"
    assert (result.rows("p0"), result.rows("d0")) == ([booked], ["cancelled"])
    assert result.streams("d0") == ["aborted"]
    assert len(result.d.aborts) == 1
    assert result.d.left_at == [pytest.approx(2)]


@pytest.mark.parametrize(
    ("prefill", "booked"),
    [
        ("400@3", "client_error"),
        ("503@3", "backpressure"),
        ("500@3", "error"),
        ("cut@3", "error"),
        ("reset@3", "error"),
        ("head@3,error@3", "error"),
        ("head@3,token@3,abort@3", "error"),
        ("", "error"),
    ],
)
def test_d2_prefill_fails_after_the_first_token(prefill: str, booked: str) -> None:
    settings = {"request_timeout_secs": 10.0}

    result = run(prefill, "head@1,token@2,token:b@4,done@4", settings=settings, rest=20.0)

    assert (result.one.ending, result.one.text) == ("clean", "ab")
    assert (result.rows("p0"), result.rows("d0")) == ([booked], ["success"])
    assert result.streams("d0") == ["ok"]
    assert not result.d.aborts
    assert not result.d.left_at


@pytest.mark.parametrize("name", PREFILL_FAILS)
def test_d3_prefill_fails_while_decode_writes_a_whole_answer(name: str) -> None:
    """Also where the KV cache has arrived long ago: nobody can know."""
    row = PREFILL_FAILS[name]

    result = run(row.prefill, "json@5", Client(stream=False))

    assert result.one.status == row.status
    assert result.rows("d0") == ["cancelled"]
    assert len(result.d.aborts) == 1


@STREAMED
@pytest.mark.parametrize("prefill", ["400@1.5", "500@1.5", "cut@1.5", "head@1.5,error@1.5"])
def test_d4_prefill_fails_while_decodes_error_comes(prefill: str, stream: bool) -> None:
    result = run(prefill, "errorhead:500@1,errorrest:500@1.75", Client(stream=stream))

    assert (result.one.status, result.one.json) == (500, error_body(500))
    assert result.rows("d0") == ["error"]
    assert not result.d.aborts


#### E: decode fails after its head


@pytest.mark.parametrize(
    ("decode", "settings"),
    [
        ("head@1,cut@2", {}),
        ("head@1,role@1,cut@2", {}),
        ("head@1,token@1,cut@2", {}),
        ("head@1,token@1,reset@2", {}),
        ("head@1,token@1", {"stream_idle_timeout_secs": 1.0}),
    ],
)
def test_e1_decodes_stream_breaks(decode: str, settings: dict[str, object]) -> None:
    result = run("head@5,token@5,done@5", decode, settings=settings, looks=(2.05,))

    assert (result.one.status, result.one.ending) == (200, "cut")
    assert result.one.ended_at == pytest.approx(2)
    assert result.looks[0].inflight == {"p0": 1, "d0": 0}
    assert (result.rows("p0"), result.rows("d0")) == (["success"], ["error"])
    assert result.streams("d0") == ["upstream_error"]
    assert len(result.d.aborts) == 1


def test_e2_an_error_event_of_decode_is_passed_on_and_the_body_cut() -> None:
    result = run(DONE, "head@1,token@1,error@2")

    assert (result.one.ending, result.one.code, result.one.text) == ("cut", 500, "a")
    assert (result.rows("p0"), result.rows("d0")) == (["success"], ["error"])
    assert result.streams("d0") == ["error_event"]
    assert not result.d.aborts


def test_e2_an_error_event_before_the_first_token() -> None:
    """Decode's own, so its client has the head already, and prefill runs on."""
    result = run("head@5,token@5,done@5", "head@1,error@2")

    assert (result.one.status, result.one.ending) == (200, "cut")
    assert (result.rows("p0"), result.rows("d0")) == (["success"], ["error"])
    assert not result.d.aborts


#### F: the client leaves


@STREAMED
@pytest.mark.parametrize("way", ["leaves_at", "half_closes_at", "resets_at"])
def test_f1_the_client_leaves_before_decodes_head(way: str, stream: bool) -> None:
    client = Client(stream=stream, **{way: 1.0})  # type: ignore[arg-type]

    result = run("head@5,token@5,done@5", UNANSWERED, client, looks=(1.5,))

    assert result.state == "abandoned"
    assert result.d.left_at == [pytest.approx(1)]
    assert len(result.d.aborts) == 1
    assert result.looks[0].inflight == {"p0": 1, "d0": 0}
    assert (result.rows("p0"), result.rows("d0")) == (["success"], ["cancelled"])


def test_f2_the_client_leaves_in_mid_stream() -> None:
    result = run("head@5,token@5,done@5", "head@1,token@1", Client(leaves_at=2.0))

    assert result.state == "abandoned"
    assert len(result.d.aborts) == 1
    assert (result.rows("p0"), result.rows("d0")) == (["success"], ["cancelled"])
    assert result.streams("d0") == ["client_disconnect"]


def test_f3_the_client_stops_reading() -> None:
    flood = ",".join(["token:" + "x" * 60000 + "@1"] * 12)

    result = run(
        "head@5,token@5,done@5",
        f"head@1,{flood}",
        Client(reads_from=500.0),
        settings={"client_stall_timeout_secs": 20.0},
    )

    assert result.state == "abandoned"
    assert len(result.d.aborts) == 1
    assert result.rows("p0") == ["success"]
    assert result.streams("d0") == ["client_disconnect"]


#### G: the clocks


@STREAMED
def test_g1_the_deadline_before_decodes_head(stream: bool) -> None:
    result = run(
        "head@5,token@5,done@5",
        UNANSWERED,
        Client(stream=stream),
        settings={"request_timeout_secs": 3.0},
    )

    assert (result.one.status, result.one.code) == (504, "request_timeout")
    assert result.rows("d0") == ["cancelled"]
    assert len(result.d.aborts) == 1


def test_g2_the_deadline_in_mid_stream() -> None:
    result = run(DONE, "head@1,token@1", settings={"request_timeout_secs": 3.0})

    assert (result.one.ending, result.one.code) == ("cut", "request_timeout")
    assert result.rows("p0") == ["success"]
    assert result.streams("d0") == ["expired"]
    assert len(result.d.aborts) == 1


#### OK


@STREAMED
@pytest.mark.parametrize(
    "prefill", [DONE, "json@1", "head@9,token@9,done@9", "head@1,token@1,end@9"]
)
def test_both_are_fine(prefill: str, stream: bool) -> None:
    decode = "head@4,token@4,done@4" if stream else "json@4"

    result = run(prefill, decode, Client(stream=stream), rest=20.0)

    check(result, Row(prefill, decode, 200, "", ("success",), ("success",), 0, ("ok",) * stream))
    assert result.one.ended_at == pytest.approx(4)
