"""Failures before the client has received anything: who is asked again, and what is told."""

from __future__ import annotations

import pytest

from tests.simulate import Client, Engine, Plan, simulate

WAYS = [Client(), Client(chat=False, stream=False)]
NAMES = ["stream", "whole"]

RETRIED = [
    "cut",
    "cut,reset=true",
    "cut,at=head",
    "cut,at=head,inside_bytes=30",
    "empty",
    "status,code=429",
    "status,code=500",
    "status,code=502",
    "status,code=503",
    "error_event,code=500",
    "error_event,code=503,done=false",
    "garbage,what=status_line",
    "garbage,what=header",
    "garbage,what=two_lengths",
    "garbage,what=chunk_size",
    "garbage,what=chunk_end",
    "core_dies",
    "server_dies",
]
FINAL = [400, 401, 403, 404, 409, 413, 422]


@pytest.mark.parametrize("client", WAYS, ids=NAMES)
@pytest.mark.parametrize("fault", RETRIED)
def test_the_next_worker_answers(fault: str, client: Client) -> None:
    outcome = simulate(Plan(engines=(Engine(faults=fault), Engine()), clients=(client,)))

    assert (outcome.one.status, outcome.one.ending) == (200, "clean")
    assert outcome.sent == [1, 1]
    assert outcome.sum("baton_retries_total") == 1
    assert outcome.facts[1] in ("leg_lost", "leg_lied", "overloaded")


@pytest.mark.parametrize("fault", ["end", "end,at=head", "abort", "end,done=true"])
def test_a_stream_that_ends_before_it_began_is_tried_elsewhere(fault: str) -> None:
    outcome = simulate(Plan(engines=(Engine(faults=fault), Engine())))

    assert (outcome.one.status, outcome.one.ending) == (200, "clean")
    assert outcome.facts[:2] == ["admitted", "leg_lied"]


def test_a_whole_answer_is_retried_to_its_last_byte() -> None:
    cut = "cut,at=head,inside_bytes=400"

    outcome = simulate(
        Plan(engines=(Engine(faults=cut), Engine()), clients=(Client(stream=False),))
    )

    assert outcome.one.status == 200
    assert outcome.sent == [1, 1]


def test_a_whole_answer_that_was_aborted_is_no_answer() -> None:
    aborted = Engine(faults="abort,after_events=3")

    outcome = simulate(Plan(engines=(aborted, Engine()), clients=(Client(stream=False),)))

    assert (outcome.one.status, outcome.one.finish) == (200, "length")
    assert outcome.facts[:2] == ["admitted", "leg_lied"]


def test_a_worker_that_refuses_connections_costs_nothing_but_an_attempt() -> None:
    outcome = simulate(
        Plan(happenings=((0.1, "faults 0 now:refuse"),), clients=(Client(at=0.2), Client(at=0.3)))
    )

    assert [got.status for got in outcome.got] == [200, 200]
    assert outcome.sent == [0, 2]
    assert outcome.count("baton_retries_total", reason="leg_lost") >= 1


@pytest.mark.parametrize("client", WAYS, ids=NAMES)
@pytest.mark.parametrize("status", FINAL)
def test_a_4xx_is_the_clients_and_final(status: int, client: Client) -> None:
    fault = f"status,code={status},message=your%20fault"

    outcome = simulate(Plan(engines=(Engine(faults=fault), Engine()), clients=(client,)))

    assert (outcome.one.status, outcome.one.code) == (status, status)
    assert outcome.one.error is not None
    assert outcome.one.error["message"] == "your fault"
    assert "x-router-error-code" not in outcome.one.headers
    assert outcome.sent == [1, 0]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_4xx_event_before_anything_else_is_returned_as_that_status(kind: str) -> None:
    fault = "error_event,code=422,message=no%20such%20template"

    outcome = simulate(Plan(engines=(Engine(kind=kind, faults=fault), Engine(kind=kind))))

    assert (outcome.one.status, outcome.one.code) == (422, 422)
    assert outcome.one.headers["content-type"] == "application/json"
    assert outcome.sent == [1, 0]


def test_the_last_workers_own_answer_is_told_when_all_failed() -> None:
    engines = (
        Engine(faults="status,code=500,message=first"),
        Engine(faults="status,code=503,message=second,retry_after=9"),
    )

    outcome = simulate(Plan(engines=engines))

    assert (outcome.one.status, outcome.one.code) == (503, 503)
    assert outcome.one.error is not None
    assert outcome.one.error["message"] == "second"
    assert outcome.one.headers["retry-after"] == "9"
    assert "x-router-error-code" not in outcome.one.headers


def test_a_5xx_event_is_told_as_that_status_when_nobody_is_left() -> None:
    outcome = simulate(Plan(engines=(Engine(faults="error_event,code=503,message=busy"),)))

    assert (outcome.one.status, outcome.one.code) == (503, 503)
    assert not outcome.one.is_events


def test_retry_after_is_kept() -> None:
    outcome = simulate(Plan(engines=(Engine(faults="status,code=429,retry_after=17"),)))

    assert (outcome.one.status, outcome.one.headers["retry-after"]) == (429, "17")


@pytest.mark.parametrize("status", [400, 500, 503])
def test_flat_errors_of_sglang_are_nested(status: int) -> None:
    fault = f"status,code={status},message=flat"

    outcome = simulate(Plan(engines=(Engine(kind="sglang", faults=fault),)))

    assert set(outcome.one.json) == {"error"}
    assert outcome.one.error is not None
    assert (outcome.one.error["message"], outcome.one.error["code"]) == ("flat", status)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_head_waits_for_the_first_event(kind: str) -> None:
    # vLLM sends its head at once, SGLang with its first event: the client sees no difference.
    outcome = simulate(Plan(engines=(Engine(kind=kind, first_token_seconds=3.0),)))

    assert outcome.one.head_at == pytest.approx(3.0, abs=0.35)
    assert outcome.one.pieces[0][0] == outcome.one.head_at


def test_comments_before_the_first_event_wait_with_the_head() -> None:
    commenting = Engine(faults="pause,at=head,seconds=5,comments_every=1", first_token_seconds=0.0)

    outcome = simulate(Plan(engines=(commenting,)))

    assert outcome.one.head_at == pytest.approx(5.0)
    assert outcome.one.body.startswith(b": ")


def test_retries_are_bounded() -> None:
    outcome = simulate(
        Plan(engines=(Engine(faults="cut"),) * 4, settings={"request_max_retries": 2})
    )

    assert (outcome.one.status, outcome.one.code) == (502, "upstream_broken")
    assert sorted(outcome.sent) == [0, 1, 1, 1]


def test_no_retries_means_one_attempt() -> None:
    outcome = simulate(
        Plan(engines=(Engine(faults="cut"), Engine()), settings={"request_max_retries": 0})
    )

    assert outcome.one.status == 502
    assert outcome.sent == [1, 0]


def test_a_worker_that_failed_a_request_is_not_asked_again() -> None:
    outcome = simulate(
        Plan(engines=(Engine(faults="cut"),) * 2, settings={"request_max_retries": 5})
    )

    assert (outcome.one.status, outcome.one.code) == (502, "upstream_broken")
    assert outcome.sent == [1, 1]


def test_an_only_worker_is_asked_once() -> None:
    outcome = simulate(Plan(engines=(Engine(faults="request=1:status,code=500,message=alone"),)))

    assert outcome.one.status == 500
    assert outcome.sent == [1]
    assert outcome.facts == ["admitted", "overloaded", "refused"]


@pytest.mark.parametrize("fault", ["cut,after_events=3", "error_event,after_events=3"])
def test_nothing_is_retried_once_the_client_has_something(fault: str) -> None:
    outcome = simulate(Plan(engines=(Engine(faults=fault), Engine())))

    assert (outcome.one.status, outcome.one.ending) == (200, "cut")
    assert outcome.sent == [1, 0]


def test_other_paths_are_retried_too() -> None:
    body = b'{"model":"tiny","prompt":"one two three"}'
    client = Client(path="/tokenize", raw_body=body, stream=False)

    outcome = simulate(
        Plan(engines=(Engine(faults="path=/tokenize:cut"), Engine()), clients=(client,))
    )

    assert outcome.one.status == 200
    assert outcome.one.body == outcome.one.direct[0].body
    assert outcome.sent == [1, 1]
