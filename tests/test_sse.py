"""The event reader: the grammar, any cut of any stream, and the streams of real engines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.sse import EventReader, EventTooLarge, data_of

TRACES = sorted((Path(__file__).parent / "traces").glob("*.sse"))


def read(pieces: Sequence[bytes], *, event_bytes_max: int = 1 << 20) -> tuple[list[bytes], bytes]:
    """All events of a stream that arrives in these pieces, and what is left over."""
    reader = EventReader(event_bytes_max)
    events = [event for piece in pieces for event in reader.feed(piece)]
    whole = b"".join(pieces)
    assert whole.startswith(b"".join(events))
    left = whole[len(b"".join(events)) :]
    assert len(reader.held) == len(left)
    return events, left


def data_in(events: Sequence[bytes]) -> list[bytes]:
    return [data for event in events if (data := data_of(event)) is not None]


def by_the_standard(stream: bytes) -> list[bytes]:
    """The HTML standard's algorithm, line by line over the whole stream."""
    *lines, _unfinished = re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf"))
    found: list[bytes] = []
    buffer: list[bytes] = []
    for line in lines:
        if not line:
            if buffer:
                found.append(b"\n".join(buffer))
            buffer = []
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            buffer.append(value.removeprefix(b" "))
    return found


@pytest.mark.parametrize(
    "event, data",
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data:  x\n\n", b" x"),  # one space is the separator's, the second is data
        (b"data: \n\n", b""),
        (b"data:\n\n", b""),
        (b"data\n\n", b""),
        (b"data: x\r\n\r\n", b"x"),
        (b"data: x\r\r", b"x"),
        (b"data: x\r\n\n", b"x"),
        (b"data: x\n\r\n", b"x"),
        (b"data: a\rdata: b\n\n", b"a\nb"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: a\n: heartbeat\nid: 7\ndata: b\n\n", b"a\nb"),
        (b"event: error\ndata: x\n\n", b"x"),
        (b"data: x\nevent: error\n\n", b"x"),
        (b"\xef\xbb\xbfdata: x\n\n", b"x"),
        (b"\ndata: x\n\n", b"x"),
        (b"data: a: b\n\n", b"a: b"),
        (b": keep-alive\n\n", None),
        (b":\n\n", None),
        (b"event: ping\n\n", None),
        (b"retry: 1000\n\n", None),
        (b"id: 1\n\n", None),
        (b"Data: x\n\n", None),  # field names are compared as they are
        (b" data: x\n\n", None),
        (b"database: x\n\n", None),
        (b"\n\n", None),
    ],
)
def test_what_an_event_carries(event: bytes, data: bytes | None) -> None:
    assert data_of(event) == data
    assert data_in(read([event])[0]) == ([] if data is None else [data])


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n"])
def test_every_line_end_ends_events(end: bytes) -> None:
    events, left = read([b"data: a" + end + b"data: b" + end + b"data: c"])

    assert data_in(events) == [b"a", b"b"]
    assert left == b"data: c"


def test_an_event_is_returned_as_soon_as_its_last_byte_is_there() -> None:
    reader = EventReader(1000)

    assert reader.feed(b"data: x\n") == []
    assert reader.feed(b"\n") == [b"data: x\n\n"]
    assert not reader.held


def test_an_event_without_an_end_is_never_returned() -> None:
    events, left = read([b"data: a\n\ndata: b\n"])

    assert events == [b"data: a\n\n"]
    assert left == b"data: b\n"


# fmt: off
PIECES = st.sampled_from(
    [b"data", b":", b" ", b"data: ", b"\n", b"\r", b"\r\n", b"\n\n", b"x", "日".encode(), b"[DONE]",
     b"event: e\n", b": ping\n\n", b'data: {"a":1}\n\n', b"data: y\r\n\r\n", b"\x00", b"id"]
)
# fmt: on


@given(st.lists(PIECES, max_size=30).map(b"".join), st.lists(st.integers(0, 200), max_size=8))
def test_any_cut_of_any_stream_gives_the_same_data(stream: bytes, cuts: list[int]) -> None:
    places = sorted({cut for cut in cuts if cut < len(stream)} | {0, len(stream)})
    pieces = [stream[start:end] for start, end in pairwise(places)]

    events, _ = read(pieces)

    assert data_in(events) == data_in(read([stream])[0]) == by_the_standard(stream)


def test_a_byte_order_mark_belongs_to_no_field() -> None:
    stream = b"\xef\xbb\xbfdata: a\n\ndata: b\n\n"

    for cut in range(len(stream)):
        assert data_in(read([stream[:cut], stream[cut:]])[0]) == [b"a", b"b"]


def halves(stream: bytes) -> Iterator[tuple[bytes, bytes]]:
    return ((stream[:cut], stream[cut:]) for cut in range(1, len(stream)))


@pytest.mark.slow
@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)
def test_every_cut_of_a_recorded_stream_gives_the_same_data(trace: Path) -> None:
    stream = trace.read_bytes()
    expected = by_the_standard(stream)
    assert len(expected) > 1

    step = 1 if len(stream) < 4000 else 29
    for first, second in list(halves(stream))[::step]:
        reader = EventReader(1 << 20)
        assert data_in(reader.feed(first) + reader.feed(second)) == expected, len(first)
    assert data_in(read([stream[i : i + 1] for i in range(len(stream))])[0]) == expected


def test_a_character_cut_at_any_byte_arrives_whole() -> None:
    stream = 'data: {"text":"a🙂日é"}\n\n'.encode()

    for first, second in halves(stream):
        assert read([first, second]) == ([stream], b"")


def test_an_event_beyond_the_bound_is_refused_and_no_more_is_held() -> None:
    reader = EventReader(10)

    assert reader.feed(b"data: 1\n\nda") == [b"data: 1\n\n"]
    assert reader.feed(b"ta: 2345") == []
    with pytest.raises(EventTooLarge):
        reader.feed(b"6")


def test_the_bound_is_for_one_event_and_not_for_a_read() -> None:
    events, _ = read([b"data: 1\n\n" * 100 + b"da"], event_bytes_max=10)

    assert len(events) == 100


@pytest.mark.parametrize("size", [5000, 4999, 7])
def test_comments_without_an_end_are_not_looked_at_one_by_one(size: int) -> None:
    reader = EventReader(1000)
    flood = b": xxxxxxxx\n\n" * 1000

    events = []
    for start in range(0, len(flood), size):
        found = reader.feed(flood[start : start + size])
        assert len(found) <= 1
        events += found

    assert b"".join(events) == flood
    assert all(data_of(event) is None for event in events)


def test_data_behind_comments_is_found() -> None:
    reader = EventReader(1000)

    events = reader.feed(b": a\n\n: b\n\ndata: x\n\n: c\ndata: y\n\n: d\n\nda")

    assert [data_of(event) for event in events] == [None, None, b"x", b"y", None]
    assert reader.feed(b"ta: z\n\n") == [b"data: z\n\n"]
