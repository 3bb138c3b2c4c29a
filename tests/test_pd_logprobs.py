"""Logprobs of a prompt: prefill's list, then decode's, as the client would have got them of one."""

from __future__ import annotations

import msgspec
import pytest

from router.pd.logprobs import PromptLogprobs
from router.pd.merging import HELD_BYTES_MAX, MergingAnswering


def item(logprobs: str, index: int | None = None) -> bytes:
    place = "" if index is None else f'"index":{index},'
    return (
        f'{{"text":"a",{place}"meta_info":{{"id":"x","input_token_logprobs":{logprobs}}}}}'.encode()
    )


def told(*items: bytes) -> PromptLogprobs:
    found = PromptLogprobs()
    for each in items:
        found.read(each)
    return found


def lists_of(data: bytes) -> list[object]:
    found = msgspec.json.decode(data)
    return [
        each["meta_info"]["input_token_logprobs"]
        for each in (found if isinstance(found, list) else [found])
    ]


def test_prefills_list_comes_first() -> None:
    merged = told(item("[[-0.50,1,null],[-1.0,2,null]]")).merge(item("[[-2.0,3,null]]"))

    assert lists_of(merged) == [[[-0.5, 1, None], [-1.0, 2, None], [-2.0, 3, None]]]
    assert b"[-0.50,1,null]" in merged


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [("[]", "[3]", [3]), ("[1]", "[]", [1]), ("[ 1 ]", "[ 2 ]", [1, 2]), ("[]", "[]", [])],
)
def test_empty_lists_leave_no_comma(first: str, second: str, both: list[int]) -> None:
    assert lists_of(told(item(first)).merge(item(second))) == [both]


def test_items_of_a_batch_are_joined_one_by_one() -> None:
    prefill = b"[%b,%b]" % (item("[1]"), item("[2]"))

    merged = told(prefill).merge(b"[%b,%b]" % (item("[8]"), item("[9]")))

    assert lists_of(merged) == [[1, 8], [2, 9]]


def test_items_of_a_stream_are_known_by_their_index() -> None:
    logprobs = told(item("[1]", 0), item("[2]", 1))

    assert lists_of(logprobs.merge(item("[9]", 1))) == [[2, 9]]
    assert lists_of(logprobs.merge(item("[8]", 0))) == [[1, 8]]


@pytest.mark.parametrize("prefill", [b"", b"nonsense", b"{}", b"[1,2]", b'{"meta_info":3}', b"["])
def test_a_prefill_that_cannot_be_read_changes_nothing(prefill: bytes) -> None:
    decode = item("[3]")

    assert told(prefill).merge(decode) is decode


@pytest.mark.parametrize(
    "decode", [b"", b"nonsense", b'{"text":"a"}', item("null"), b'{"input_token_logprobs":[1]}']
)
def test_a_decode_without_a_list_is_left_as_it_is(decode: bytes) -> None:
    assert told(item("[1]")).merge(decode) == decode


class Inner:
    """What stands behind, and the leg: notes what it is fed."""

    def __init__(self) -> None:
        self.data = b""
        self.ends = 0
        self.is_open = True

    def feed(self, data: bytes) -> None:
        self.data += data

    def end(self) -> None:
        self.ends += 1

    def survives(self, leg_fact: str) -> bool:
        return False


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_stream_waits_for_prefill_and_is_merged_once(cut: int) -> None:
    inner, logprobs = Inner(), PromptLogprobs()
    merging = MergingAnswering(inner, inner, logprobs, is_stream=True)
    stream = event(item("[3]")) + b": ping\n\n" + event(b"[DONE]")

    merging.feed(stream[:cut])
    merging.feed(stream[cut:])
    assert inner.data == b""

    logprobs.read(item("[1,2]"))
    merging.prefill_is_done()
    merging.end()
    assert inner.data == event(item("[1,2,3]")) + b": ping\n\n" + event(b"[DONE]")
    assert inner.ends == 1


def test_a_stream_flows_once_prefill_is_done() -> None:
    inner, logprobs = Inner(), told(item("[1]"))
    merging = MergingAnswering(inner, inner, logprobs, is_stream=True)
    merging.prefill_is_done()

    for piece in (b"dat", b"a: " + item("[3]"), b"\n\n"):
        merging.feed(piece)

    assert inner.data == event(item("[1,3]"))
    assert inner.ends == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_a_whole_answer_is_merged_as_a_whole(is_first: bool) -> None:
    inner, logprobs = Inner(), told(item("[1]"))
    merging = MergingAnswering(inner, inner, logprobs, is_stream=False)

    if is_first:
        merging.prefill_is_done()
    merging.feed(item("[3]")[:9])
    merging.feed(item("[3]")[9:])
    merging.end()
    if not is_first:
        assert inner.data == b""
        merging.prefill_is_done()

    assert inner.data == item("[1,3]")
    assert inner.ends == 1


@pytest.mark.parametrize("is_stream", [True, False])
def test_what_is_too_much_to_hold_goes_on_as_it_is(is_stream: bool) -> None:
    inner, logprobs = Inner(), PromptLogprobs()
    merging = MergingAnswering(inner, inner, logprobs, is_stream=is_stream)
    piece = b"x" * (HELD_BYTES_MAX // 4)

    for _ in range(6):
        merging.feed(piece)
    logprobs.read(item("[1]"))
    merging.prefill_is_done()
    merging.end()

    assert inner.data == piece * 6
    assert inner.ends == 1
