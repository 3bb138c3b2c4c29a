"""Which headers cross, in both directions, and what becomes of a request id."""

from __future__ import annotations

import pytest

from router.headers import Headers, find, lines_of, request_id_of, to_client, to_worker

HOP_BY_HOP = [
    (b"connection", b"keep-alive"),
    (b"keep-alive", b"timeout=5"),
    (b"proxy-authenticate", b"Basic"),
    (b"proxy-authorization", b"Basic eDp5"),
    (b"proxy-connection", b"keep-alive"),
    (b"te", b"trailers"),
    (b"trailer", b"x-checksum"),
    (b"transfer-encoding", b"chunked"),
    (b"upgrade", b"h2c"),
]


@pytest.mark.parametrize("header", HOP_BY_HOP, ids=lambda header: header[0].decode())
def test_hop_by_hop_headers_never_cross(header: tuple[bytes, bytes]) -> None:
    headers = [(b"x-before", b"1"), header, (b"x-after", b"2")]

    for lines in (
        to_worker(headers, identity=False),
        to_client(headers, stream=False),
    ):
        assert lines == b"x-before: 1\r\nx-after: 2\r\n"


def test_what_connection_names_ends_here() -> None:
    headers = [
        (b"connection", b"close, X-Secret"),
        (b"x-secret", b"1"),
        (b"connection", b" x-other "),
        (b"x-other", b"2"),
        (b"x-kept", b"3"),
    ]

    assert to_worker(headers, identity=False) == b"x-kept: 3\r\n"
    assert to_client(headers, stream=False) == b"x-kept: 3\r\n"


@pytest.mark.parametrize("name", [b"host", b"content-length", b"expect", b"x-request-id"])
def test_what_is_made_anew_for_a_worker_is_not_copied(name: bytes) -> None:
    assert to_worker([(name, b"1")], identity=False) == b""


@pytest.mark.parametrize("name", [b"content-length", b"x-request-id", b"x-router-error-code"])
def test_what_is_made_anew_for_a_client_is_not_copied(name: bytes) -> None:
    assert to_client([(name, b"1")], stream=False) == b""


@pytest.mark.parametrize(
    "name", [b"traceparent", b"tracestate", b"authorization", b"x-data-parallel-rank", b"rid"]
)
def test_everything_else_reaches_the_worker(name: bytes) -> None:
    assert to_worker([(name, b"v")], identity=True).startswith(name + b": v\r\n")


def test_a_key_for_the_router_is_not_for_workers() -> None:
    headers = [(b"authorization", b"Bearer a"), (b"x-kept", b"1"), (b"authorization", b"Bearer b")]

    assert to_worker(headers, identity=False, is_keyed=True) == b"x-kept: 1\r\n"


@pytest.mark.parametrize("name", [b"retry-after", b"set-cookie", b"content-encoding", b"server"])
def test_everything_else_reaches_the_client(name: bytes) -> None:
    twice: Headers = [(name, b"1"), (name, b"2")]

    assert to_client(twice, stream=False) == lines_of(twice)


def test_an_unencoded_answer_is_asked_for_only_where_events_are_read() -> None:
    headers = [(b"accept-encoding", b"gzip, br")]

    assert to_worker(headers, identity=True) == b"accept-encoding: identity\r\n"
    assert to_worker(headers, identity=False) == b"accept-encoding: gzip, br\r\n"


def test_a_stream_tells_every_proxy_not_to_hold_it_back() -> None:
    headers = [(b"cache-control", b"public"), (b"x-accel-buffering", b"yes")]

    assert to_client(headers, stream=True) == (
        b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
    )


@pytest.mark.parametrize(
    "id",
    ["abc", "a" * 128, "7f3a-41.b_c:d@e+f/g=", "chatcmpl-550e8400-e29b-41d4-a716-446655440000"],
)
def test_a_harmless_request_id_is_kept(id: str) -> None:
    assert request_id_of([(b"x-request-id", id.encode())]) == id


@pytest.mark.parametrize(
    "id", [b"", b"a" * 129, b"a b", b"a\x00", b"a\x1b[31m", b'a"', b"a\r\nb: c", b"a\n", b"\xe9"]
)
def test_a_request_id_that_could_do_harm_is_replaced(id: bytes) -> None:
    found = request_id_of([(b"x-request-id", id)])

    assert len(found) == 32
    assert int(found, 16) >= 0


def test_a_missing_request_id_is_made_and_never_twice_the_same() -> None:
    assert len({request_id_of([]) for _ in range(100)}) == 100


def test_find_takes_the_first() -> None:
    assert find([(b"a", b"1"), (b"a", b"2")], b"a") == b"1"
    assert find([], b"a") is None
