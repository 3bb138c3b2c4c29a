"""Bad input: a clear error, nothing sent to a worker, and the connection in a known state."""

from __future__ import annotations

import pytest

from tests.simulate import Client, Engine, Plan, simulate

#### Bodies: the request is refused, the connection goes on

BODIES = {
    "nothing": b"",
    "no JSON": b"hello",
    "half of it": b'{"model": "tiny", "messages": [',
    "a list": b"[1, 2]",
    "a text": b'"model"',
    "a number": b"7",
    "null": b"null",
    "too deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a bomb of lists": b"[" * 200_000,
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "a model that is no text": b'{"model": 7}',
    "a model that is a list": b'{"model": ["tiny"]}',
    "a stream that is no bool": b'{"model": "tiny", "stream": "yes"}',
    "something behind it": b'{"model": "tiny"} {"model": "tiny"}',
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_cannot_be_read_is_refused(name: str) -> None:
    bad = Client(path="/v1/chat/completions", raw_body=BODIES[name], then=(Client(tokens=1),))

    outcome = simulate(Plan(clients=(bad,)))

    refused, next_one = outcome.got
    assert (refused.status, refused.code) == (400, "bad_request")
    assert next_one.ending == "clean"
    assert sum(outcome.sent) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/tokenize", "/v1/embeddings"])
def test_so_it_is_on_every_path(path: str) -> None:
    outcome = simulate(Plan(clients=(Client(path=path, raw_body=b"{"),)))

    assert (outcome.one.status, outcome.one.code) == (400, "bad_request")
    assert outcome.sent == [0, 0]


def test_the_field_at_fault_is_named() -> None:
    outcome = simulate(
        Plan(clients=(Client(path="/v1/completions", raw_body=b'{"model": "tiny", "stream": 1}'),))
    )

    assert outcome.one.error is not None
    assert outcome.one.error["param"] == "stream"


def test_what_the_router_does_not_read_is_the_engines_matter() -> None:
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": "many"}'

    outcome = simulate(Plan(clients=(Client(path="/v1/completions", raw_body=body),)))

    assert (outcome.one.status, outcome.sent) == (400, [1, 0])
    assert outcome.one.body == outcome.one.direct[0].body
    assert "x-router-error-code" not in outcome.one.headers


def test_bodies_that_are_no_json_pass_on_other_paths() -> None:
    form = (("content-type", "multipart/form-data; boundary=x"),)
    client = Client(path="/v1/audio/transcriptions", raw_body=b"--x--", headers=form)

    outcome = simulate(Plan(clients=(client,)))

    assert outcome.work(0)[0].body == b"--x--"


@pytest.mark.parametrize("size", [1001, 10_000_000])
def test_a_body_beyond_the_limit_is_refused_before_it_is_read(size: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size

    outcome = simulate(Plan(clients=(Client(raw=head),), settings={"max_body_bytes": 1000}))

    assert (outcome.one.status, outcome.one.code) == (413, "body_too_large")
    assert outcome.sent == [0, 0]


def test_a_body_that_grows_beyond_the_limit_is_refused() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"258\r\n" + b"x" * 600 + b"\r\n"

    outcome = simulate(
        Plan(clients=(Client(raw=head + 3 * chunk),), settings={"max_body_bytes": 1000})
    )

    assert (outcome.one.status, outcome.one.code) == (413, "body_too_large")


#### HTTP: the connection is closed, since nobody knows where the next request begins

START = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no version": b"GET /health\r\n\r\n",
    "another version": b"GET /health HTTP/2.0\r\nhost: a\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\nhost: a\r\nbroken\r\n\r\n",
    "a space in a name": b"GET /health HTTP/1.1\r\nhost: a\r\nbad name: 1\r\n\r\n",
    "a space before the colon": START + b"content-length : 2\r\n\r\n{}",
    "length and chunks": START
    + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": START
    + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n0\r\n\r\n",
    "two lengths": START + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "a length below zero": START + b"content-length: -1\r\n\r\n",
    "a length that is no number": START + b"content-length: two\r\n\r\n{}",
    "a chunk that is no number": START + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a chunk that is too long": START + b"transfer-encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
    "another transfer encoding": START + b"transfer-encoding: gzip\r\n\r\n{}",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_request_is_refused_and_the_connection_closed(name: str) -> None:
    smuggled = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"

    outcome = simulate(Plan(clients=(Client(raw=MALFORMED[name] + smuggled),)))

    assert outcome.one.raw.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"HTTP/1.1 200" not in outcome.one.raw
    assert b"connection: close\r\n" in outcome.one.raw
    assert outcome.one.code == "bad_request"
    assert outcome.sent == [0, 0]


def test_headers_beyond_the_limit_are_refused() -> None:
    head = b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 200_000

    outcome = simulate(Plan(clients=(Client(raw=head),)))

    assert (outcome.one.status, outcome.one.code) == (431, "headers_too_large")


def test_a_request_that_never_arrives_is_given_up() -> None:
    outcome = simulate(
        Plan(
            clients=(Client(raw=b"GET /health HTTP/1.1\r\nhost:"), Client(raw=START)),
            settings={"header_timeout_secs": 5.0},
        )
    )

    assert [got.code for got in outcome.got] == ["header_timeout", "header_timeout"]
    assert max(got.ended_at for got in outcome.got) < 8


def test_a_connection_that_says_nothing_is_closed() -> None:
    outcome = simulate(Plan(clients=(Client(raw=b""),), settings={"keep_alive_timeout_secs": 5.0}))

    assert outcome.one.raw == b""
    assert outcome.one.ended_at == pytest.approx(5)


#### Connections that are used well, but not in the plainest way


def test_pipelined_requests_are_answered_in_order() -> None:
    health = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    models = b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"

    outcome = simulate(Plan(clients=(Client(raw=health + models),)))

    assert outcome.one.raw.count(b"HTTP/1.1 200 OK") == 2
    assert outcome.one.raw.index(b'"status"') < outcome.one.raw.index(b'"data"')


def test_a_chunked_request_is_read_whole() -> None:
    head = START + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b'c\r\n{"model":"ti\r\n26\r\nny","prompt":"once","max_tokens":1   }\r\n0\r\n\r\n'

    outcome = simulate(Plan(clients=(Client(raw=head + body),), cuts=1))

    assert outcome.one.status == 200
    assert b'"prompt":"once"' in outcome.work(0)[0].body


def test_an_expectation_ends_here() -> None:
    outcome = simulate(Plan(clients=(Client(tokens=1, headers=(("expect", "100-continue"),)),)))

    assert outcome.one.ending == "clean"
    assert "expect" not in outcome.work(0)[0].headers


def expecting(body_at: float) -> Client:
    """A client that waits for leave before it sends its body."""
    return Client(tokens=1, headers=(("expect", "100-continue"),), body_at=body_at)


@pytest.mark.parametrize("body_at", [0.0, 0.5, 45.0])
def test_a_body_may_come_long_after_its_leave(body_at: float) -> None:
    # Later than a head may: from here on the whole request's deadline is the only one.
    settings: dict[str, object] = {"header_timeout_secs": 30.0}

    outcome = simulate(Plan(clients=(expecting(body_at),), settings=settings))

    assert outcome.one.interim == [100]
    assert outcome.one.ending == "clean"
    assert outcome.one.head_at > body_at


def test_a_body_that_never_comes_after_its_leave_is_given_up() -> None:
    settings: dict[str, object] = {"request_timeout_secs": 60.0}

    outcome = simulate(Plan(clients=(expecting(61.0),), settings=settings))

    assert outcome.one.status == 408
    assert outcome.sent == [0, 0]


def test_leave_is_not_given_for_a_body_that_would_be_refused() -> None:
    large = Client(
        raw_body=b"x" * 2000, headers=(("expect", "100-continue"),), body_at=1.0, stream=False
    )

    outcome = simulate(Plan(clients=(large,), settings={"max_body_bytes": 1000}))

    assert outcome.one.interim == []
    assert outcome.one.status == 413


def test_many_requests_on_one_connection() -> None:
    following = tuple(Client(at=5.0 * turn, tokens=2, stream=turn % 2 == 0) for turn in range(1, 6))

    outcome = simulate(Plan(clients=(Client(then=following),), cuts=2))

    assert {got.ending for got in outcome.got} == {"clean"}
    assert sum(outcome.sent) == 6


#### Answers of workers that are no HTTP


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "what",
    ["status_line", "header", "two_lengths", "chunk_size", "chunk_end", "short_body", "after_end"],
)
def test_a_malformed_answer_is_a_lost_leg(what: str, stream: bool) -> None:
    faulty = Engine(faults=f"garbage,what={what}")

    outcome = simulate(Plan(engines=(faulty,), clients=(Client(stream=stream),), cuts=3))

    bad = outcome.one.code == "upstream_broken"
    is_past_the_end = stream and what in ("short_body", "after_end")
    assert bad != is_past_the_end
