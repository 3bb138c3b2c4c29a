"""What may be forwarded of a worker's stream, when, and how its end is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.openai import Judge
from router.relay import HELD_BYTES_MAX, Ending, StreamRelay, WholeAnswer

TRACES = Path(__file__).parent / "traces"


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chat(delta: dict[str, object], finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


PING = b": ping\n\n"
ROLE = chat({"role": "assistant", "content": ""})
A = chat({"content": "a"})
B = chat({"content": "b"})
FINISH = chat({}, "stop")
ABORT = chat({"content": ""}, "abort")
ERROR = event({"error": {"message": "x", "code": 500}})
DONE = b"data: [DONE]\n\n"


def relayed(*pieces: bytes, family: str = "openai") -> tuple[list[bytes], StreamRelay]:
    relay = StreamRelay(Judge(family))
    return [relay.feed(piece) for piece in pieces], relay


#### holding back


def test_comments_are_held_until_an_event_with_data_comes() -> None:
    forward, relay = relayed(PING, b": more\n\n", ROLE)

    assert forward == [b"", b"", PING + b": more\n\n" + ROLE]
    assert (relay.released, relay.has_content) == (True, False)


def test_a_flood_of_comments_before_the_first_event_is_not_kept() -> None:
    flood = [b": %d\n\n" % number for number in range(30_000)]

    forward, _ = relayed(*flood, ROLE)

    assert forward[-1].endswith(ROLE)
    assert len(forward[-1]) < HELD_BYTES_MAX + 100 + len(ROLE)


def test_where_only_the_framing_tells_the_end_an_unfinished_event_is_passed_on() -> None:
    forward, relay = relayed(b"data: 1\n\n", b"data: last\n", family="other")

    assert relay.finish() == b"data: last\n"
    assert (forward, relay.ending) == ([b"data: 1\n\n", b""], Ending.UNMARKED)


def test_half_an_event_is_held() -> None:
    forward, relay = relayed(ROLE[:-1], ROLE[-1:] + A[:5], A[5:])

    assert forward == [b"", ROLE, A]
    assert relay.has_content


def test_once_released_comments_go_through_at_once() -> None:
    forward, relay = relayed(A, PING)

    assert forward == [A, PING]
    assert not relay.progressed  # a heartbeat is no progress


def test_progress_is_an_event_with_data() -> None:
    relay = StreamRelay(Judge("openai"))
    seen = []
    for piece in (PING, ROLE, A[:3], A[3:], PING, FINISH, DONE):
        relay.feed(piece)
        seen.append(relay.progressed)

    assert seen == [False, True, False, True, False, True, True]


#### ends


def test_a_good_stream_passes_byte_for_byte() -> None:
    forward, relay = relayed(ROLE, A + B, FINISH + DONE)

    assert b"".join(forward) == ROLE + A + B + FINISH + DONE
    assert relay.ending is Ending.WELL


def test_a_whole_stream_in_one_read_passes_byte_for_byte() -> None:
    stream = PING + ROLE + A + FINISH + DONE

    forward, relay = relayed(stream)

    assert forward == [stream]
    assert (relay.ending, relay.released, relay.has_content) == (Ending.WELL, True, True)


def test_nothing_is_read_after_an_end() -> None:
    forward, relay = relayed(A + FINISH + DONE + B, B)

    assert forward == [A + FINISH + DONE, b""]
    assert relay.ending is Ending.WELL
    assert not relay.progressed


@pytest.mark.parametrize("lie, ending", [(ABORT, Ending.LIE), (ERROR, Ending.ERROR)])
def test_an_end_that_lies_is_withheld_and_what_came_before_is_not(
    lie: bytes, ending: Ending
) -> None:
    forward, relay = relayed(ROLE, A, B + lie + DONE)

    assert forward == [ROLE, A, B]
    assert (relay.ending, relay.error_event) == (ending, lie)


@pytest.mark.parametrize("lie, ending", [(ABORT, Ending.LIE), (ERROR, Ending.ERROR)])
@pytest.mark.parametrize("before", [b"", PING, ROLE, ROLE + A, PING + A + B])
def test_a_lie_in_the_first_read_releases_nothing(
    before: bytes, lie: bytes, ending: Ending
) -> None:
    forward, relay = relayed(before + lie + DONE)

    assert forward == [b""]
    assert (relay.ending, relay.released, relay.has_content) == (ending, False, False)


def test_done_without_a_finish_is_withheld() -> None:
    forward, relay = relayed(A, B + DONE)

    assert forward == [A, B]
    assert relay.ending is Ending.LIE


def test_done_alone_releases_nothing() -> None:
    forward, relay = relayed(DONE)

    assert (forward, relay.ending, relay.released) == ([b""], Ending.LIE, False)


@pytest.mark.parametrize(
    "pieces, ending",
    [
        ([A, FINISH], Ending.UNMARKED),
        ([A + FINISH, PING], Ending.UNMARKED),
        ([A], Ending.LIE),
        ([ROLE], Ending.LIE),
        ([PING], Ending.LIE),
        ([], Ending.LIE),
        ([A, FINISH[:-1]], Ending.LIE),  # an unfinished event was never delivered
        ([A, FINISH, DONE[:-1]], Ending.UNMARKED),
    ],
)
def test_what_a_clean_end_without_done_means(pieces: list[bytes], ending: Ending) -> None:
    _, relay = relayed(*pieces)
    relay.finish()

    assert relay.ending is ending


def test_a_finish_that_was_never_delivered_is_no_finish() -> None:
    relay = StreamRelay(Judge("openai"))

    assert relay.feed(FINISH[:-1]) == b""
    relay.finish()

    assert relay.ending is Ending.LIE


def test_the_end_that_was_met_first_counts() -> None:
    _, relay = relayed(A, ABORT)
    relay.finish()

    assert relay.ending is Ending.LIE


def test_other_streams_end_with_their_body_and_a_cut_one_is_not_finished() -> None:
    _, relay = relayed(event({"type": "response.created"}), family="other")

    assert not relay.judge.finished
    relay.finish()
    assert relay.ending is Ending.UNMARKED


def test_an_event_without_end_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.relay.EVENT_BYTES_MAX", 100)

    forward, relay = relayed(A, b"data: " + b"x" * 100, b"\n\n")

    assert forward == [A, b"", b""]
    assert relay.ending is Ending.TOO_LARGE


def test_an_unreadable_event_is_forwarded_untouched() -> None:
    odd = b"event: what\ndata: {not json\n\n"

    assert relayed(odd, A)[0] == [odd, A]


#### recorded streams

ENDINGS = {
    "sglang-abort-request": Ending.LIE,
    "sglang-kill-scheduler": Ending.LIE,
    "sglang-pd-decode-timeout": Ending.ERROR,
    "sglang-pd-prefill-timeout": Ending.ERROR,
    "vllm-kill-apiserver": Ending.LIE,
    "vllm-kill-enginecore": Ending.ERROR,
    "vllm-sigterm-abort": Ending.LIE,
    "vllm-sigterm-abort-chat": Ending.LIE,
}


@pytest.mark.parametrize("trace", sorted(TRACES.glob("*.sse")), ids=lambda path: path.stem)
def test_recorded_streams_cut_anywhere_are_forwarded_up_to_their_honest_end(trace: Path) -> None:
    stream = trace.read_bytes()
    expected = ENDINGS.get(trace.stem, Ending.WELL)

    for size in (1, 7, 1000):
        relay = StreamRelay(Judge("openai"))
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        forward = b"".join([relay.feed(piece) for piece in pieces])
        relay.finish()

        assert relay.ending is expected
        assert stream.startswith(forward)
        left = stream[len(forward) :]
        if expected is Ending.WELL:
            assert left == b""
        elif left:  # the lie, and what the engine wrote after it
            assert left.startswith(relay.error_event)


def test_a_whole_answer_is_its_pieces() -> None:
    answer = WholeAnswer(5)

    answer.feed(b"abc")
    answer.feed(b"de")
    assert not answer.is_too_large
    answer.feed(b"f")
    assert answer.is_too_large
    assert answer.body() == b"abcdef"
    assert answer.body() == b""
