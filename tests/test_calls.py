"""Bytes of a client in, calls out: framing, every cut, limits, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.calls import UNREAD_BYTES_MAX, Call, CallReader, Limits, Reading

LIMITS = Limits(
    head_bytes_max=4096, body_bytes_max=1000, head_seconds=30, idle_seconds=75, stall_seconds=10
)


def read(*pieces: bytes, limits: Limits = LIMITS) -> list[Call]:
    reader = CallReader(limits)
    for piece in pieces:
        reader.feed(piece, 0.0)
    return list(reader.calls)


def shown(call: Call) -> object:
    """What matters of a call, to compare."""
    if call.refusal is not None:
        return call.refusal.code
    return call.method, call.target, call.headers, call.body, call.keep_alive, call.http_10


POST = b"POST /v1/x?a=b HTTP/1.1\r\nHost: a\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


#### framing


def test_a_sized_body() -> None:
    [call] = read(POST + b"Content-Length: 5\r\nX-Y: z\r\n\r\nhello")

    assert (call.method, call.target, call.path) == ("POST", b"/v1/x?a=b", "/v1/x")
    assert call.headers == [(b"host", b"a"), (b"content-length", b"5"), (b"x-y", b"z")]
    assert call.body == b"hello"
    assert call.keep_alive


@pytest.mark.parametrize(
    "body",
    [
        b"5\r\nhello\r\n0\r\n\r\n",
        b"1\r\nh\r\n4\r\nello\r\n0\r\n\r\n",
        b"005\r\nhello\r\n000\r\n\r\n",
        b"5;name=value\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\r\n0\r\nX-Trailer: dropped\r\n\r\n",
    ],
)
def test_a_chunked_body(body: bytes) -> None:
    [call] = read(CHUNKED + body)

    assert call.body == b"hello"
    assert call.headers == [(b"host", b"a"), (b"transfer-encoding", b"chunked")]


def test_no_body() -> None:
    assert [call.body for call in read(GET + POST + b"\r\n")] == [b"", b""]


@pytest.mark.parametrize(
    "line, headers, keep_alive",
    [
        (b"HTTP/1.1", b"Host: a\r\n", True),
        (b"HTTP/1.1", b"Host: a\r\nConnection: close\r\n", False),
        (b"HTTP/1.1", b"Host: a\r\nConnection: x, Close\r\n", False),
        (b"HTTP/1.0", b"", False),
        (b"HTTP/1.0", b"Connection: keep-alive\r\n", True),
    ],
)
def test_who_may_stay(line: bytes, headers: bytes, keep_alive: bool) -> None:
    [call] = read(b"GET / " + line + b"\r\n" + headers + b"\r\n")

    assert call.keep_alive is keep_alive
    assert call.http_10 is (line == b"HTTP/1.0")


def test_pipelined_calls_come_in_order() -> None:
    calls = read(GET + POST + b"Content-Length: 2\r\n\r\nhi" + CHUNKED + b"0\r\n\r\n" + GET)

    assert [call.method for call in calls] == ["GET", "POST", "POST", "GET"]
    assert [call.body for call in calls] == [b"", b"hi", b"", b""]


def test_an_absolute_target_is_a_path_here() -> None:
    targets = [b"http://h:1/v1/models?a=b", b"HTTPS://h/v1/models", b"http://h", b"http://h?a"]

    calls = [read(b"GET " + target + b" HTTP/1.1\r\nHost: h\r\n\r\n")[0] for target in targets]

    assert [call.target for call in calls] == [b"/v1/models?a=b", b"/v1/models", b"/", b"/?a"]
    assert calls[0].path == "/v1/models"


STREAM = (
    b"\r\n"
    + POST
    + b'Content-Length: 7\r\nAccept-Encoding: gzip\r\n\r\n{"a":1}'
    + GET
    + CHUNKED
    + b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nT: t\r\n\r\n"
    + b"POST / HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n"
    + b"Content-Length: 2\r\n\r\nhi"
    + b"GET / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
)


def test_every_cut_gives_the_same_calls() -> None:
    whole = [shown(call) for call in read(STREAM)]
    assert len(whole) == 5

    for cut in range(1, len(STREAM)):
        assert [shown(call) for call in read(STREAM[:cut], STREAM[cut:])] == whole, cut
    assert [shown(call) for call in read(*(bytes([byte]) for byte in STREAM))] == whole


#### what is not plainly one request with one framing

MALFORMED = {
    # two framings, or none that can be trusted
    "both framings": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both, the other way": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "the same length twice": POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "a list of lengths": POST + b"Content-Length: 5, 5\r\n\r\nhello",
    "a length with a sign": POST + b"Content-Length: +5\r\n\r\nhello",
    "a negative length": POST + b"Content-Length: -5\r\n\r\nhello",
    "a length in hex": POST + b"Content-Length: 0x5\r\n\r\nhello",
    "a length with a point": POST + b"Content-Length: 5.0\r\n\r\nhello",
    "a length with a space": POST + b"Content-Length: 5 5\r\n\r\nhello",
    "a length with an underscore": POST + b"Content-Length: 1_0\r\n\r\nhellohello",
    "an empty length": POST + b"Content-Length: \r\n\r\n",
    "a length that overflows": POST + b"Content-Length: 18446744073709551617\r\n\r\nx",
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\nhello",
    "gzip": POST + b"Transfer-Encoding: gzip\r\n\r\nhello",
    "gzip, chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked, gzip": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "two codings": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
    "xchunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding behind a control": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a folded coding": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a coding in 1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a length in the trailer": CHUNKED + b"0\r\nContent-Length: 7\r\n\r\n",
    # chunks
    "a chunk size that is none": CHUNKED + b"zz\r\nhello\r\n0\r\n\r\n",
    "a negative chunk size": CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "a chunk size with 0x": CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n",
    "a chunk size with a space": CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n",
    "an empty chunk size": CHUNKED + b"\r\nhello\r\n0\r\n\r\n",
    "a chunk size that overflows": CHUNKED + b"fffffffffffffffff\r\nhello",
    "LF behind a chunk size": CHUNKED + b"5\nhello\r\n0\r\n\r\n",
    "LF behind a chunk": CHUNKED + b"5\r\nhello\n0\r\n\r\n",
    "LF in an extension": CHUNKED + b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    "a chunk longer than it says": CHUNKED + b"5\r\nhelloX\r\n0\r\n\r\n",
    # lines and headers
    "LF instead of CRLF": b"GET / HTTP/1.1\nHost: a\n\n",
    "LF behind a header": b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n",
    "CR behind a header": b"GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n",
    "a folded header": POST + b"X-A: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "a folded first header": b"GET / HTTP/1.1\r\n Host: a\r\n\r\n",
    "NUL in a value": POST + b"X: a\x00b\r\n\r\n",
    "a control in a value": POST + b"X: a\x01b\r\n\r\n",
    "a space in a name": POST + b"X y: b\r\n\r\n",
    "an empty name": POST + b": b\r\n\r\n",
    "no colon": POST + b"XYZ\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    # request lines
    "no version": b"GET /\r\n\r\n",
    "HTTP/2": b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no method": b"/ HTTP/1.1\r\nHost: a\r\n\r\n",
    "an unknown method": b"FOO / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a method in lower case": b"get / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    "a tab in the target": b"GET /a\tb HTTP/1.1\r\nHost: a\r\n\r\n",
    "a control in the target": b"GET /a\x01b HTTP/1.1\r\nHost: a\r\n\r\n",
    "a byte above ASCII in the target": b"GET /a\xffb HTTP/1.1\r\nHost: a\r\n\r\n",
    "no target": b"GET  HTTP/1.1\r\nHost: a\r\n\r\n",
    "a relative target": b"GET a HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed_requests_are_refused_and_nothing_is_read_after_them(data: bytes) -> None:
    for pieces in ([data, GET], [data[:20], data[20:] + GET], [bytes([byte]) for byte in data]):
        reader = CallReader(LIMITS)
        for piece in pieces:
            reader.feed(piece, 0.0)

        assert [shown(call) for call in reader.calls] == ["bad_request"]
        assert reader.is_refused


def test_a_refusal_keeps_its_place_behind_the_calls_before_it() -> None:
    calls = read(GET + GET + MALFORMED["two lengths"] + GET)

    assert [shown(call) for call in calls][2:] == ["bad_request"]
    assert [call.method for call in calls[:2]] == ["GET", "GET"]


def test_what_follows_a_closing_request_is_no_request() -> None:
    closing = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"

    assert [shown(call) for call in read(closing + GET)][1:] == ["bad_request"]


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_no_bytes_whatever_raise(first: bytes, second: bytes) -> None:
    read(first, second)
    read(POST + b"Content-Length: 3\r\n\r\n" + first, second)
    read(CHUNKED + first, second)


#### upgrades that nobody asked for

UPGRADE = (
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAARAAAAA\r\n"
)


@pytest.mark.parametrize(
    "framed",
    [
        b"Content-Length: 5\r\n\r\nhello",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ],
)
def test_a_body_behind_an_offer_to_upgrade_is_that_requests_body(framed: bytes) -> None:
    """Java's HttpClient offers h2c with every request, curl with --http2 as well."""
    calls = read(POST + UPGRADE + framed + GET)

    assert [call.method for call in calls] == ["POST", "GET"]
    assert [call.body for call in calls] == [b"hello", b""]
    assert calls[0].keep_alive


def test_a_smuggled_request_in_such_a_body_is_only_a_body() -> None:
    inner = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"

    [call] = read(POST + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(inner) + inner)

    assert call.body == inner


def test_the_limit_holds_for_such_a_body() -> None:
    assert [shown(call) for call in read(POST + UPGRADE + b"Content-Length: 1001\r\n\r\n")] == [
        "body_too_large"
    ]


def test_many_such_requests_at_once() -> None:
    one = b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"

    assert len(read(one * 1000)) == 1000


def test_a_tunnel_is_refused() -> None:
    calls = read(b"CONNECT h:443 HTTP/1.1\r\nHost: h\r\n\r\n" + GET)

    assert [shown(call) for call in calls] == ["method_not_allowed"]


ASKS = b"GET /x HTTP/1.1\r\nHost: a\r\nUpgrade: WebSocket\r\nConnection: upgrade\r\n\r\n"


def test_a_websocket_keeps_what_comes_behind_its_request() -> None:
    reader = CallReader(LIMITS)
    reader.feed(ASKS + b"\x81", 0.0)
    reader.feed(b"\x00", 0.0)

    [call] = reader.calls
    assert call.wants_websocket
    assert not call.keep_alive
    assert reader.unread == b"\x81\x00"


def test_a_websocket_keeps_only_so_much() -> None:
    reader = CallReader(LIMITS)
    reader.feed(ASKS, 0.0)
    for _ in range(100):
        reader.feed(b"x" * 10_000, 0.0)

    assert len(reader.unread) < UNREAD_BYTES_MAX + 10_000
    assert shown(reader.calls[-1]) == "bad_request"


#### limits


def test_a_head_of_just_the_limit_is_read_and_a_longer_one_refused() -> None:
    head = b"GET / HTTP/1.1\r\nHost: a\r\nX: %b\r\n\r\n"

    assert shown(read(head % (b"a" * 4000))[0]) != "headers_too_large"
    assert [shown(call) for call in read(head % (b"a" * 4096))] == ["headers_too_large"]


def test_many_small_headers_are_a_large_head() -> None:
    assert [shown(call) for call in read(POST + b"A: b\r\n" * 1000 + b"\r\n")] == [
        "headers_too_large"
    ]


def test_a_head_that_never_ends_is_refused_soon() -> None:
    for endless in (b"GET /" + b"a" * 100, POST + b"X: " + b"a" * 100, POST + b"A: b\r\n" * 20):
        reader = CallReader(LIMITS)
        reader.feed(endless, 0.0)
        fed = 0
        while not reader.calls:
            reader.feed(b"b" * 100, 0.0)
            fed += 100
            assert fed < 2 * LIMITS.head_bytes_max
        assert [shown(call) for call in reader.calls] == ["headers_too_large"]


def test_a_body_of_just_the_limit_is_read_and_a_longer_one_refused() -> None:
    def bodies(size: int) -> list[bytes]:
        return [
            POST + b"Content-Length: %d\r\n\r\n" % size + b"a" * size,
            CHUNKED + b"%x\r\n" % size + b"a" * size + b"\r\n0\r\n\r\n",
            CHUNKED + b"1\r\na\r\n" * size + b"0\r\n\r\n",
        ]

    for data in bodies(1000):
        assert len(read(data)[0].body) == 1000
    for data in bodies(1001):
        assert [shown(call) for call in read(data)] == ["body_too_large"]


def test_a_body_that_is_too_long_is_refused_before_it_comes() -> None:
    assert [shown(call) for call in read(POST + b"Content-Length: 1001\r\n\r\n")] == [
        "body_too_large"
    ]


@pytest.mark.parametrize("start", [b"0\r\nX: ", b"0\r\n", b"5;"])
def test_trailers_and_extensions_without_end_are_refused(start: bytes) -> None:
    reader = CallReader(LIMITS)
    reader.feed(CHUNKED + start, 0.0)
    line = b"T: b\r\n" * 20 if start == b"0\r\n" else b"b" * 120

    for _ in range(100):
        reader.feed(line, 0.0)

    assert [shown(call) for call in reader.calls] == ["headers_too_large"]


def test_a_body_that_trickles_is_not_mistaken_for_that() -> None:
    data = b"1;some=extension\r\na\r\n" * 900 + b"0\r\n\r\n"
    reader = CallReader(LIMITS)
    reader.feed(CHUNKED, 0.0)
    for byte in data:
        reader.feed(bytes([byte]), 0.0)

    assert len(reader.calls[0].body) == 900


def test_where_reading_stands() -> None:
    reader = CallReader(LIMITS)
    stands = []
    for piece in (b"GE", b"T / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n", b"h", b"i"):
        reader.feed(piece, 7.0)
        stands.append(reader.reading)

    assert stands == [Reading.HEAD, Reading.BODY, Reading.BODY, Reading.NOTHING]
    assert reader.head_since == 7.0
