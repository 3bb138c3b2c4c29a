"""An answer that needs no rewriting passes byte for byte, whole or cut anywhere."""

from __future__ import annotations

import pytest

from tests.simulate import Client, Engine, Plan, simulate

ANSWERS = {
    "chat": Client(),
    "chat with usage": Client(extra={"stream_options": {"include_usage": True}}),
    "chat with usage in every chunk": Client(
        extra={"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    ),
    "chat with logprobs": Client(extra={"logprobs": True, "top_logprobs": 2}),
    "completion": Client(chat=False),
    "completion with usage": Client(chat=False, extra={"stream_options": {"include_usage": True}}),
    "whole chat": Client(stream=False),
    "whole completion": Client(stream=False, chat=False),
    "many characters": Client(prompt="日本語 🙂", tokens=60),
}
OF_VLLM: dict[str, Client] = {
    "ids": Client(extra={"return_token_ids": True}),
    "three choices": Client(chat=False, extra={"n": 3, "temperature": 0.5}),
    "a stop string": Client(tokens=60, extra={"stop": [" little"]}),
    "a batch": Client(chat=False, extra={"prompt": ["one", "two"]}),
    "a batch, whole": Client(chat=False, stream=False, extra={"prompt": ["one", "two"]}),
}
GENERATE: dict[str, object] = {
    "text": "once",
    "sampling_params": {"max_new_tokens": 6, "temperature": 0},
}


def told_the_same(kind: str, client: Client, cuts: int | None) -> None:
    """What the client got is what this engine says when asked directly."""
    outcome = simulate(Plan(engines=(Engine(kind=kind),), clients=(client,), cuts=cuts))

    direct = outcome.one.direct[0]
    assert outcome.one.status == direct.status
    assert outcome.one.normal == direct.normal
    assert outcome.one.headers["content-type"] == direct.headers["content-type"]


@pytest.mark.parametrize("cuts", [None, 1])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_passes_byte_for_byte(name: str, kind: str, cuts: int | None) -> None:
    told_the_same(kind, ANSWERS[name], cuts)


@pytest.mark.parametrize("name", OF_VLLM)
def test_an_answer_of_vllms_own_passes_byte_for_byte(name: str) -> None:
    told_the_same("vllm", OF_VLLM[name], cuts=2)


@pytest.mark.parametrize("stream", [True, False])
def test_generate_passes_byte_for_byte(stream: bool) -> None:
    outcome = simulate(
        Plan(
            engines=(Engine(kind="sglang"),),
            clients=(Client(path="/generate", extra=GENERATE, stream=stream),),
            cuts=3,
        )
    )

    got = outcome.one
    assert got.normal == got.direct[0].normal
    assert got.ending == "clean"
    assert outcome.facts[-1] == "completed"
    assert got.is_done == stream


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/detokenize", "/score"])
def test_other_paths_pass_byte_for_byte(path: str) -> None:
    asked: dict[str, object] = {
        "input": "a b",
        "prompt": "a b",
        "tokens": [40, 41],
        "text_1": "a",
        "text_2": "b",
    }
    client = Client(path=path, extra=asked, stream=False)

    outcome = simulate(Plan(engines=(Engine(),), clients=(client,)))

    assert outcome.one.status == outcome.one.direct[0].status
    assert outcome.one.normal == outcome.one.direct[0].normal


def test_a_request_passes_byte_for_byte() -> None:
    odd = b'{ "model" : "tiny",\n\t"prompt":"\\u00e9\xc3\xa9", "max_tokens":1 , "unknown":[1e3] }'
    client = Client(path="/v1/completions", raw_body=odd, stream=False)

    outcome = simulate(Plan(engines=(Engine(),), clients=(client,), cuts=4))

    assert outcome.work(0)[0].body == odd
    assert outcome.one.status == 200


@pytest.mark.parametrize("fault", ["comments", "crlf", "lump", "dribble,bytes=3", "padding"])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_odd_but_legal_streams_pass_untouched(kind: str, fault: str) -> None:
    outcome = simulate(Plan(engines=(Engine(kind=kind, faults=fault),), cuts=5))

    assert outcome.one.ending == "clean"
    assert outcome.one.text == outcome.one.direct[0].text
    assert outcome.one.is_done
    assert (b": keep-alive\n\n" in outcome.one.body) == (fault == "comments")
    assert (b"\r\n" in outcome.one.body) == (fault == "crlf")


@pytest.mark.parametrize("what", ["json", "utf8"])
def test_an_event_that_nobody_can_read_is_passed_on(what: str) -> None:
    outcome = simulate(Plan(engines=(Engine(faults=f"garbage,what={what},after_events=4"),)))

    assert outcome.one.ending == "clean"
    assert b'data: {"id":"x","choices":[{"index":0' in outcome.one.body


def test_a_stream_that_is_compressed_unasked_is_unpacked() -> None:
    outcome = simulate(Plan(engines=(Engine(faults="gzip"),)))

    assert outcome.work(0)[0].headers["accept-encoding"] == "identity"
    assert "content-encoding" not in outcome.one.headers
    assert outcome.one.text == simulate(Plan()).one.text
    assert outcome.one.is_done


def test_a_compressed_stream_that_ends_without_a_finish_is_no_clean_end() -> None:
    outcome = simulate(Plan(engines=(Engine(faults="gzip;end,after_events=4"),)))

    assert outcome.one.ending == "cut"
    assert outcome.one.code == "upstream_broken"


@pytest.mark.parametrize(
    ("fault", "status"),
    [("", 200), ("abort,after_events=2", 200), ("status,code=400", 400), ("status,code=500", 200),
     ("error_event,code=500", 200), ("garbage,what=short_body", 200)],
)  # fmt: skip
def test_a_whole_answer_that_is_compressed_unasked_is_unpacked_and_judged(
    fault: str, status: int
) -> None:
    broken = Engine(faults=";".join(filter(None, ["gzip", f"request=1:{fault}" if fault else ""])))

    outcome = simulate(Plan(engines=(broken, Engine()), clients=(Client(stream=False),)))

    assert outcome.one.status == status
    assert "content-encoding" not in outcome.one.headers
    assert (outcome.one.text == outcome.one.direct[0].text) is (status == 200)


def test_an_answer_too_large_to_hold_passes_through() -> None:
    client = Client(stream=False, fault="padding,bytes=300000")

    outcome = simulate(Plan(clients=(client,), settings={"max_body_bytes": 100_000}))

    assert outcome.one.status == 200
    assert len(outcome.one.body) > 300_000
    assert outcome.one.text == outcome.one.direct[0].text
    assert outcome.facts == ["admitted", "answered", "completed"]


def test_an_answer_too_large_to_hold_is_cut_where_its_worker_breaks() -> None:
    client = Client(stream=False, fault="padding,bytes=300000;cut,at=head,inside_bytes=200000")

    outcome = simulate(Plan(clients=(client,), settings={"max_body_bytes": 100_000}))

    assert (outcome.one.status, outcome.one.ending) == (200, "cut")
    assert sum(outcome.sent) == 1


def test_a_body_that_ends_with_its_connection_is_framed_anew() -> None:
    outcome = simulate(Plan(engines=(Engine(faults="close_delimited"),)))

    assert outcome.one.headers["transfer-encoding"] == "chunked"
    assert outcome.one.normal == outcome.one.direct[0].normal


def test_http_1_0_is_answered_until_the_connection_ends() -> None:
    outcome = simulate(Plan(clients=(Client(http_10=True),)))

    assert "transfer-encoding" not in outcome.one.headers
    assert outcome.one.ending == "clean"
    assert outcome.one.normal == outcome.one.direct[0].normal


def test_interim_answers_of_a_worker_stay_here() -> None:
    outcome = simulate(Plan(engines=(Engine(faults="interim,code=103"),)))

    assert outcome.one.status == 200
    assert outcome.one.text == outcome.one.direct[0].text
