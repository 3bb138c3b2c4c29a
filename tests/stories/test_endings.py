"""How a stream that has begun can end, and what of it a client may believe."""

from __future__ import annotations

from itertools import product

import pytest

from router.sim.fault_kinds import KINDS
from router.sim.faults import parse_faults
from tests.simulate import Client, Engine, Plan, simulate

KINDS_OF_ENGINES = pytest.mark.parametrize("kind", ["vllm", "sglang"])

#### Ends that lie


@KINDS_OF_ENGINES
@pytest.mark.parametrize(
    "fault",
    [
        "cut,after_events=5",
        "cut,after_events=5,reset=true",
        "cut,after_events=5,inside_bytes=20",
        "end,after_events=5",
        "end,after_events=5,done=true",
        "abort,after_events=5",
        "abort,after_events=5,done=false",
        "close_delimited;cut,after_events=5",
        "close_delimited;end,after_events=5,done=true",
        "garbage,what=chunk_size,after_events=5",
        "garbage,what=chunk_end,after_events=5",
        "garbage,what=long_body,after_events=5",
    ],
)
def test_an_end_that_is_none_is_said_and_seen(kind: str, fault: str) -> None:
    outcome = simulate(Plan(engines=(Engine(kind=kind, faults=fault),)))

    assert (outcome.one.status, outcome.one.ending) == (200, "cut")
    assert outcome.one.code == "upstream_broken"
    assert not outcome.one.is_done
    assert outcome.one.finish is None
    assert outcome.count("baton_stream_outcome_total", worker="w0", outcome="upstream_error") == 1


@KINDS_OF_ENGINES
def test_an_error_event_ends_the_stream_in_the_workers_words(kind: str) -> None:
    fault = "error_event,after_events=5,message=out%20of%20memory"

    outcome = simulate(Plan(engines=(Engine(kind=kind, faults=fault),)))

    assert (outcome.one.status, outcome.one.ending, outcome.one.code) == (200, "cut", 500)
    assert outcome.one.error is not None
    assert outcome.one.error["message"] == "out of memory"
    assert outcome.count("baton_stream_outcome_total", worker="w0", outcome="error_event") == 1
    assert outcome.facts[-1] == "leg_lied"


@KINDS_OF_ENGINES
def test_a_4xx_event_in_the_middle_is_forwarded_then_cut(kind: str) -> None:
    fault = "error_event,after_events=5,code=400,message=too%20long"

    outcome = simulate(Plan(engines=(Engine(kind=kind, faults=fault),)))

    assert (outcome.one.ending, outcome.one.code) == ("cut", 400)
    assert outcome.facts[-1] == "rejected"
    assert outcome.count(
        "baton_worker_requests_total", worker="w0", role="mixed", outcome="client_error"
    )


def test_comments_are_no_answer() -> None:
    nothing_but_comments = "pause,at=head,seconds=100,comments_every=1"

    outcome = simulate(
        Plan(
            engines=(Engine(faults=nothing_but_comments), Engine()),
            settings={"first_token_timeout_secs": 10.0},
        )
    )

    assert outcome.one.ending == "clean"
    assert outcome.facts[:2] == ["admitted", "leg_stalled"]


#### Ends that are true although something is missing


@KINDS_OF_ENGINES
@pytest.mark.parametrize(
    "fault",
    [
        "end,at=finish",
        "cut,at=finish",
        "close_delimited;end,at=finish",
    ],
)
def test_what_is_missing_after_a_finish_is_written_here(kind: str, fault: str) -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(kind=kind, faults=fault),),
        )
    )

    assert (outcome.one.ending, outcome.one.finish) == ("clean", "length")
    assert outcome.one.is_done
    assert outcome.facts[-1] in ("completed", "lost_after_end")


def test_silence_after_a_finish_is_an_end() -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(faults="hang,at=finish"),),
            settings={"stream_idle_timeout_secs": 10.0},
        )
    )

    assert (outcome.one.ending, outcome.one.finish) == ("clean", "length")
    assert outcome.facts[-1] == "lost_after_end"


def test_one_finish_of_two_is_no_end() -> None:
    two = Client(chat=False, tokens=1, extra={"n": 2, "temperature": 0.5})

    outcome = simulate(Plan(engines=(Engine(faults="cut,after_events=1"),), clients=(two,)))

    assert outcome.one.ending == "cut"
    assert outcome.one.code == "upstream_broken"


@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize("chat", [True, False])
def test_each_of_two_choices_ends_once_or_visibly_not(chat: bool, limit: int) -> None:
    # The standing promises are the test. A finish without a text is no preamble: if all of it were
    # made again on the other worker, it would come twice.
    two = Client(chat=chat, tokens=1, extra={"n": 2, "temperature": 0.5})
    settings: dict[str, object] = {"migration_limit": limit}

    for fault, after in product(("end,done=true", "end,done=false", "cut", "abort"), range(6)):
        broken = Engine(faults=f"request=1:{fault},after_events={after}")
        outcome = simulate(Plan(engines=(broken, Engine()), clients=(two,), settings=settings))

        finishes = len(outcome.one.finishes)
        assert (outcome.one.ending, finishes) == ("clean", 2) or outcome.one.ending == "cut"


def test_an_engine_that_may_not_know_of_choices_is_believed() -> None:
    fields: dict[str, object] = {"prompt": "once", "n": 2, "temperature": 0.5}
    two = Client(path="/v1/completions", chat=False, tokens=1, extra=fields)
    ending = Engine(faults="end,done=true,after_events=1", kind="openai")

    outcome = simulate(Plan(engines=(ending,), clients=(two,)))

    assert (outcome.one.ending, len(outcome.one.finishes)) == ("clean", 1)


def test_what_is_no_prompt_in_a_chat_is_not_counted_as_one() -> None:
    odd = Client(extra={"prompt": ["one", "two"], "text": ["three", "four"]})

    outcome = simulate(Plan(clients=(odd,)))

    assert (outcome.one.ending, outcome.one.is_done) == ("clean", True)


def test_one_finish_of_a_batch_is_no_end() -> None:
    batch = Client(chat=False, tokens=1, extra={"prompt": ["one", "two"]})

    outcome = simulate(Plan(engines=(Engine(faults="end,after_events=1"),), clients=(batch,)))

    assert outcome.one.ending == "cut"


@pytest.mark.parametrize("fault", ["hang,at=done", "cut,at=done", "garbage,what=after_end"])
def test_nothing_after_done_matters(fault: str) -> None:
    outcome = simulate(Plan(engines=(Engine(faults=fault),)))

    assert (outcome.one.ending, outcome.one.is_done) == ("clean", True)
    assert outcome.one.ended_at == pytest.approx(1.7)


def test_an_answer_without_content_is_an_answer() -> None:
    empty = Client(extra={"max_tokens": 0})

    outcome = simulate(Plan(engines=(Engine(kind="sglang"),), clients=(empty,)))

    assert (outcome.one.status, outcome.one.ending, outcome.one.text) == (200, "clean", "")


def test_an_http_1_0_body_that_is_not_whole_ends_by_a_reset() -> None:
    # Such a body ends with its connection; a client that half-closes is gone, and still reads.
    asking = Client(tokens=20, http_10=True)
    going = Client(tokens=20, http_10=True, half_closes_at=2.0)

    broken = simulate(Plan(engines=(Engine(faults="cut,after_events=5"),), clients=(asking,)))
    left = simulate(Plan(clients=(going,)))

    assert (broken.one.status, broken.one.ending) == (200, "cut")
    assert (left.one.status, left.one.ending) == (200, "cut")


#### Every fault there is

#: What to try of each kind: nothing means its defaults.
VARIANTS = {
    "status": ["code=500", "code=429", "code=404"],
    "hang": ["", "at=head", "after_events=3", "at=finish"],
    "cut": ["", "at=head", "after_events=3,inside_bytes=9", "after_events=4,reset=true"],
    "pause": ["after_events=3,seconds=3", "at=head,seconds=50,comments_every=2"],
    "error_event": ["", "after_events=4", "after_events=4,code=400", "at=finish"],
    "abort": ["", "after_events=4,done=false"],
    "end": ["", "after_events=4", "after_events=4,done=true", "at=finish"],
    "garbage": [f"what={what},after_events=3" for what in ("chunk_size", "chunk_end", "long_body")]
    + [f"what={what}" for what in ("status_line", "header", "two_lengths", "short_body")],
    "padding": ["bytes=300000"],
    "slow_reader": ["bytes_per_second=100"],
    **{kind.name: ["", "after_events=3"] for kind in KINDS.values() if kind.family == "engine"},
    "refuse": [""],
}
PATIENCE: dict[str, object] = {
    "first_token_timeout_secs": 20.0,
    "stream_idle_timeout_secs": 10.0,
    "request_timeout_secs": 60.0,
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_no_fault_makes_a_failed_answer_look_like_a_good_one(
    kind: str, engines: int, stream: bool
) -> None:
    # `simulate` holds every run to this; what is drawn here is only that something is tried.
    for number, variant in enumerate(VARIANTS.get(kind, [""])):
        fault = f"{kind},{variant}".rstrip(",")
        assert parse_faults(fault)
        engine = "sglang" if number % 2 else "vllm"
        faulty, well = Engine(kind=engine, faults=fault), Engine(kind=engine)

        outcome = simulate(
            Plan(
                engines=(faulty, well)[:engines],
                clients=(Client(stream=stream, tokens=5),),
                settings=PATIENCE,
                cuts=number,
            )
        )

        assert len(outcome.tickets) == 1


@pytest.mark.parametrize(("engines", "status"), [(1, 502), (2, 200)])
def test_a_whole_answer_that_was_cut_is_none_whatever_its_framing(
    engines: int, status: int
) -> None:
    """Only the end of the connection says where the answer ends, and it comes inside of it."""
    cut = Engine(faults="close_delimited;request=1:cut,after_events=7,inside_bytes=40")

    outcome = simulate(
        Plan(
            engines=(cut, Engine())[:engines],
            clients=(Client(stream=False, tokens=1, prompt="time upon"),),
            settings={"policy": "round_robin"},
        )
    )

    assert "leg_lied" in outcome.facts
    assert outcome.one.status == status
