"""`baton conform` under virtual time: Baton passes every case, and every case can fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from router.conform import matrix
from router.conform.case import KNOBS, Case
from router.conform.cases import CASES, LEFT_OUT, fleet
from router.conform.routers import BATON, PRESETS
from router.conform.running import Verdict
from router.conform.stage import Order, Router
from router.sim.settings import EngineKind
from tests import naive
from tests.conforming import Memory, ServerInMemory, start_baton, try_in_memory
from tests.naive import Naive

ROOT = Path(__file__).resolve().parent.parent
#: Who is caught by a case, and what is said of it.
CAUGHT: dict[str, tuple[type[Naive], str]] = {
    "leaves-whole-answer": (Naive, "still runs"),
    "leaves-streams": (Naive, "still runs"),
    "leaves-before-first-token": (Naive, "still runs"),
    "leaves-silent-stream": (Naive, "still runs"),
    "load-is-given-back": (naive.LeakingLoad, "gets nothing any more"),
    "cap-holds": (Naive, "12 requests at a time"),
    "cap-is-given-back": (naive.LeakingCap, "of 4 not served"),
    "leaves-queue": (naive.GhostQueue, "was sent to an engine"),
    "stale-connection": (naive.Pooling, "requests failed (502"),
    "silent-engine": (Naive, "after 30 s: no answer"),
    "long-stream": (naive.OneClock, "cut after 3.0 s"),
    "abort-is-no-end": (Naive, "as if all were well (200, finish abort)"),
    "cut-is-told": (Naive, "as if all were well (200, no finish)"),
    "cut-is-explained": (Naive, "no error event"),
    "early-end-is-told": (Naive, "as if all were well"),
    "nothing-twice": (naive.StartingOver, "which is not in the answer"),
    "dead-engine": (Naive, "10 of 20 requests failed (500"),
    "cut-before-answer": (Naive, "3 of 6 requests failed (500"),
    "empty-answer": (Naive, "3 of 6 requests failed (200, no finish"),
    "error-first": (Naive, "3 of 6 requests failed (200, no finish, an error event"),
    "engine-is-stopped": (Naive, "as if all were well"),
    "bad-requests-are-no-failures": (naive.BlamingAll, "the engine's 400 became: 503"),
    "a-full-engine-is-no-failure": (naive.BlamingAll, "the engine's 429 became: 503"),
    "deaths-behind-the-head-count": (Naive, "it got 12 of 24"),
    "framing-fits": (Naive, "a compressed answer does not arrive"),
    "hop-by-hop-ends-here": (Naive, "hop-by-hop"),
    "split-characters": (Naive, "the text does not arrive"),
    "events-come-one-by-one": (naive.Lumping, "came within 0.0 s"),
    "large-body": (naive.Small, "the client got: 413"),
    "too-large-body": (naive.Small, "413 without an error object"),
    "errors-have-one-shape": (Naive, "500 with b'Internal Server Error'"),
    "an-engine-s-error-passes": (naive.Masking, "the engine's 400 became 500"),
    "ids-are-kept": (Naive, "the answer has no id"),
    "ids-survive-retries": (Naive, "one saw"),
    "unknown-model": (Naive, "was asked of an engine"),
    "readiness": (Naive, "ready 30 s after"),
    "shutdown-waits": (Naive, "10 of 10 streams did not complete"),
    "many-streams": (naive.Few, "streams failed (503)"),
    "prefill-fails": (Naive, "the client got: no answer"),
    "decode-fails": (Naive, "the client got: no answer"),
    "rooms-are-used-once": (naive.SameRoom, "in the same room"),
    "readiness-of-pairs": (Naive, "ready 30 s after"),
}
#: Some have more than one way to go wrong.
ALL_CAUGHT = [
    *CAUGHT.items(),
    ("leaves-queue", (Naive, "the second did not have to wait")),
    ("too-large-body", (Naive, "an engine got it")),
    ("errors-have-one-shape", (naive.Masking, "500 with")),
    ("split-characters", (naive.Undone, "[DONE] not once and last, 200 of 200")),
    ("split-characters", (naive.Overdone, "[DONE] not once and last, 200 of 200")),
]


@pytest.fixture(autouse=True)
def _fewer_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "STREAMS", 40)


def tried(name: str, kind: type[Naive]) -> Verdict:
    case = next(each for each in CASES if each.name == name)

    def start(place: Memory, order: Order) -> Router:
        return ServerInMemory(naive.start(kind, place, order), place.nursery)

    return try_in_memory(case, start, "sglang", {})


def ids(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_baton_passes_every_case(case: Case, engine: EngineKind) -> None:
    verdict = try_in_memory(case, start_baton, engine, BATON.knobs(case))

    is_without_rooms = case.name == "rooms-are-used-once" and engine == "vllm"
    expected = "n/a" if is_without_rooms else "pass"
    assert (verdict.outcome, verdict.reason) == (expected, verdict.reason), verdict


@pytest.mark.parametrize("name, kind, reason", [(name, *how) for name, how in ALL_CAUGHT])
def test_every_case_catches_somebody(name: str, kind: type[Naive], reason: str) -> None:
    verdict = tried(name, kind)

    assert verdict.outcome == "fail"
    assert reason in verdict.reason


#: What a router that holds every answer back until it is complete passes, and why that is right.
PASSED_BY_HOARDING = {
    "leaves-whole-answer": "any router holds this one back; its engine is freed at once",
    "leaves-before-first-token": "there is nothing yet to hold back; its engine is freed at once",
    "stale-connection": "every request has a connection of its own",
    "long-stream": "it has no limit in time, and the client gets all of the answer",
    "cut-is-told": "it notices a cut, and its client gets a 502",
    "cut-is-explained": "of which the body is an error object",
    "nothing-twice": "what was cut is asked for again before anything was passed on",
    "bad-requests-are-no-failures": "it has no breaker",
    "a-full-engine-is-no-failure": "it has no breaker",
    "split-characters": "what is not looked at is not broken",
    "large-body": "it has no limit for bodies",
    "many-streams": "they are complete, and complete is all that is asked",
}


def passed_by(start_server: Callable[[Memory, Order], Naive], engine: EngineKind) -> set[str]:
    """The cases that such a router passes."""

    def start(place: Memory, order: Order) -> Router:
        return ServerInMemory(start_server(place, order), place.nursery)

    return {case.name for case in CASES if try_in_memory(case, start, engine, {}).outcome == "pass"}


@pytest.mark.slow
def test_who_holds_answers_back_passes_only_where_that_does_not_matter() -> None:
    passed = passed_by(partial(naive.start, naive.Hoarding), "sglang")

    assert passed == set(PASSED_BY_HOARDING)


@pytest.mark.slow
@pytest.mark.parametrize("status", [404, 413, 500, 503])
def test_who_does_nothing_passes_no_case(status: int) -> None:
    def start(place: Memory, order: Order) -> Naive:
        server = naive.start(naive.Idle, place, order)
        assert isinstance(server, naive.Idle)
        server.status = status
        return server

    assert passed_by(start, "sglang") == set()


HELD_BACK = "its engine had finished before the client could leave"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, reason",
    [
        ("leaves-streams", HELD_BACK),
        ("load-is-given-back", HELD_BACK),
        ("engine-is-stopped", "the engine had nothing to write any more"),
        ("shutdown-waits", "10 of 10 streams had ended at their engines before"),
        ("cap-is-given-back", "the client could not leave in the middle"),
    ],
)
def test_a_case_that_cannot_tell_says_so(name: str, reason: str) -> None:
    verdict = tried(name, naive.Hoarding)

    assert verdict.outcome == "fail"
    assert reason in verdict.reason


def test_a_router_that_ends_before_it_serves_is_told_of_at_once() -> None:
    def start(place: Memory, order: Order) -> Router:
        router = ServerInMemory(naive.start(Naive, place, order), place.nursery)
        router.terminate()
        return router

    verdict = try_in_memory(CASES[0], start, "vllm", {})

    assert verdict.outcome == "fail"
    assert verdict.reason == (
        "it has ended before it served: with exit status 7, saying: no room | goodbye"
    )
    assert verdict.seconds < 1


def test_no_case_is_without_somebody_it_catches() -> None:
    assert set(CAUGHT) == {case.name for case in CASES}


def test_every_complaint_is_tried_or_left_out_for_a_reason() -> None:
    tried = {case.complaint for case in CASES}

    assert tried | set(LEFT_OUT) == {f"C{number}" for number in range(1, 38)}
    assert not tried & set(LEFT_OUT)
    assert len({case.name for case in CASES}) == len(CASES)


def test_knobs_are_known_words_and_baton_has_them_all() -> None:
    for case in CASES:
        assert not set(case.needs) - set(KNOBS), case.name
        assert not set(case.wishes) - set(KNOBS), case.name
        assert BATON.lacks(case) is None
    for preset in PRESETS:
        assert not set(preset.flags) - set(KNOBS), preset.name


def test_the_document_tells_of_every_case_and_baton_passes_them_all() -> None:
    text = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    matrix = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    column = next(row for row in matrix if row[0] == "| case").index(f"baton {BATON.version}")

    for case in CASES:
        assert f"| {case.name} | {case.done} | {case.expected} |" in text
        row = next(row for row in matrix if row[:2] == [f"| {case.name}", case.complaint])
        assert row[column] == "pass"
    for complaint, reason in LEFT_OUT.items():
        assert f"| {complaint} | {reason} |" in text


def test_a_matrix_is_the_same_in_every_form() -> None:
    case = CASES[0]
    results = {"baton": {case.name: Verdict("fail", "a reason | with a bar", 1.25)}}

    table = matrix.as_table([case], results)
    shown = json.loads(matrix.as_json([BATON], results))
    text = matrix.as_markdown([case], [BATON], results)

    assert f"baton: {case.name}: fail: a reason" in table
    assert "baton: 0 passed, 1 failed, 0 not applicable" in table
    assert shown["baton"]["cases"][case.name]["seconds"] == 1.25
    assert f"| {case.name} | {case.complaint} | **fail** |" in text
    assert "| 0 of 1 |" in text
    assert "`--max-concurrent-requests {}`" in text
