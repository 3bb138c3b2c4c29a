"""Which headers cross, in both directions, and what a request is called."""

from __future__ import annotations

import re

import pytest

from tests.simulate import Client, Engine, Outcome, Plan, simulate

OURS = re.compile(r"[0-9a-f]{32}")


def asked(**headers: str) -> Client:
    """A client with these headers."""
    return Client(tokens=2, headers=tuple((k.replace("_", "-"), v) for k, v in headers.items()))


def named(outcome: Outcome) -> set[object]:
    """Every name that the one request has: to its client, to its workers, in the log."""
    lines = [line for line in outcome.log if line["event"] == "request"]
    names = {line["id"] for line in lines} | {outcome.one.headers["x-request-id"]}
    for number in range(len(outcome.engines)):
        names |= {each.headers["x-request-id"] for each in outcome.work(number)}
    return names


@pytest.mark.parametrize(
    "engines",
    [
        (Engine(),),
        (Engine(faults="status,code=500"), Engine()),
        (Engine(faults="status,code=500"), Engine(faults="cut")),
        (Engine(faults="status,code=400"),),
        (),
    ],
    ids=["success", "retry", "error", "4xx", "nobody"],
)
def test_a_request_has_one_name_everywhere(engines: tuple[Engine, ...]) -> None:
    outcome = simulate(Plan(engines=engines, clients=(asked(x_request_id="order-66/a"),)))

    assert named(outcome) == {"order-66/a"}


@pytest.mark.parametrize("name", ["", "two words", "x" * 200, "a;b", "semi\tcolon", "ünïcode"])
def test_a_name_that_could_do_harm_is_replaced(name: str) -> None:
    outcome = simulate(Plan(clients=(asked(x_request_id=name),)))

    (made,) = named(outcome)
    assert OURS.fullmatch(str(made))


def test_a_request_without_a_name_gets_one() -> None:
    (made,) = named(simulate(Plan()))

    assert OURS.fullmatch(str(made))


def test_a_workers_own_request_id_does_not_come_twice() -> None:
    outcome = simulate(Plan(clients=(asked(x_request_id="mine"),)))

    assert [value for name, value in outcome.one.header_list if name == "x-request-id"] == ["mine"]


def test_the_trace_goes_along() -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

    outcome = simulate(Plan(clients=(asked(traceparent=trace, tracestate="a=1,b=2"),)))

    (sent,) = outcome.work(0)
    assert (sent.headers["traceparent"], sent.headers["tracestate"]) == (trace, "a=1,b=2")


def test_hop_by_hop_headers_of_a_client_stay_here() -> None:
    client = Client(
        tokens=1,
        headers=(
            ("connection", "keep-alive, x-only-here"),
            ("x-only-here", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("proxy-authorization", "Basic x"),
            ("x-custom", "goes along"),
            ("authorization", "Bearer for-the-engine"),
        ),
    )

    outcome = simulate(Plan(clients=(client,)))

    sent = outcome.work(0)[0].headers
    stopped = {"connection", "x-only-here", "keep-alive", "te", "proxy-authorization"}
    assert not stopped & set(sent)
    assert (sent["x-custom"], sent["authorization"]) == ("goes along", "Bearer for-the-engine")
    assert sent["host"] == "127.0.0.1:9000"


def test_headers_of_a_worker_go_along_but_not_its_framing() -> None:
    outcome = simulate(Plan(engines=(Engine(faults="status,code=429,retry_after=3"),)))

    headers = outcome.one.headers
    assert (headers["server"], headers["retry-after"]) == ("uvicorn", "3")
    assert headers["content-length"] == str(len(outcome.one.body))


def test_hop_by_hop_headers_of_a_worker_stay_there() -> None:
    closing = Engine(faults="close_delimited")  # says `connection: close`

    outcome = simulate(
        Plan(engines=(closing,), clients=(Client(tokens=1, then=(Client(at=3.0),)),))
    )

    assert "connection" not in outcome.got[0].headers
    assert outcome.got[1].ending == "clean"


def test_the_length_of_a_rewritten_error_is_its_own() -> None:
    flat = Engine(kind="sglang", faults="status,code=400")

    outcome = simulate(Plan(engines=(flat,)))

    assert outcome.one.ending == "clean"
    assert outcome.one.headers["content-length"] == str(len(outcome.one.body))
    assert outcome.one.body != outcome.engines[0].dialect.error(400, "simulated error").body


def test_streams_are_told_not_to_be_held_or_compressed() -> None:
    outcome = simulate(Plan(clients=(asked(accept_encoding="gzip, br"),)))

    assert outcome.work(0)[0].headers["accept-encoding"] == "identity"
    assert outcome.one.headers["cache-control"] == "no-cache"
    assert outcome.one.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in outcome.one.headers


def test_a_worker_that_lets_its_streams_be_kept_is_not_believed() -> None:
    eager = Engine(header="cache-control: public, max-age=60")
    clients = (Client(), Client(at=5.0, stream=False))

    outcome = simulate(Plan(engines=(eager,), clients=clients))

    stream, whole = (
        [value for name, value in got.header_list if name == "cache-control"] for got in outcome.got
    )
    assert stream == ["no-cache"]
    assert whole == ["public, max-age=60"]  # that is the worker's to say


def test_other_paths_may_be_compressed() -> None:
    client = Client(
        path="/tokenize",
        raw_body=b'{"model":"tiny","prompt":"a"}',
        headers=(("accept-encoding", "gzip"),),
        stream=False,
        fault="path=/tokenize:gzip",
    )

    outcome = simulate(Plan(clients=(client,)))

    assert outcome.work(0)[0].headers["accept-encoding"] == "gzip"
    assert outcome.one.headers["content-encoding"] == "gzip"
    assert outcome.one.plain == outcome.one.direct[0].body
