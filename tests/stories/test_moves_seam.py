"""What the client sees where one worker's part of a stream ends and another's begins."""

from __future__ import annotations

import pytest

from tests.moves import completion, is_told, is_whole, lose, more
from tests.simulate import Client, Got, Outcome

#: The whole answer is "本 little day are好 doru": 3 tokens, 3 words, 3 tokens, 1 word.
KINDS = pytest.mark.parametrize("kinds", ["vllm vllm", "sglang sglang", "vllm sglang"])
ENDPOINTS = pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
PROMPT = "<|im_start|>user\nonce upon a time<|im_end|>\n<|im_start|>assistant\n"


def same(chat: bool, **fields: object) -> Client:
    """The same conversation as a chat and as a completion, which have the same answer."""
    return Client(tokens=10, chat=chat, prompt="once upon a time" if chat else PROMPT, extra=fields)


#### Text


@KINDS
@ENDPOINTS
@pytest.mark.parametrize("after", range(2, 10))
@pytest.mark.parametrize(
    "stop",
    [
        ["###"],
        ["are好 d"],
        ["tle day are", "d"],
        ["好"],
        ["doru"],
        ["x", " little day are好 doru!"],
    ],
)
def test_stop_strings_are_found_wherever_the_stream_breaks(
    stop: list[str], after: int, chat: bool, kinds: str
) -> None:
    usage = {"include_usage": True}

    client = same(chat, stop=stop, stream_options=usage)
    if chat and kinds.startswith("sglang") and after == len(unbroken(client).events) - 3:
        pytest.skip("between its last text and its finish nothing tells why SGLang has ended")

    outcome = lose(f"request=1:cut,after_events={after}", client, kinds=kinds)

    assert is_whole(outcome)


def unbroken(client: Client) -> Got:
    """What SGLang answers."""
    return lose("", client, kinds="sglang", limit=0).one


@pytest.mark.parametrize("chat", [True, False])
def test_stop_strings_that_stay_are_found_too(chat: bool) -> None:
    client = same(chat, stop=["day are好"], include_stop_str_in_output=True)

    outcome = lose("request=1:cut,after_events=7", client)

    assert is_whole(outcome)
    assert (outcome.one.finish, outcome.one.text) == ("stop", "本 little day are好")


@pytest.mark.parametrize("kinds", ["vllm vllm", "sglang sglang"])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
@pytest.mark.parametrize("least", range(11))
@pytest.mark.parametrize("stop", ["y are", "本 little"])
def test_min_tokens_spare_what_they_spare_without_a_break(
    stop: str, least: int, chat: bool, kinds: str
) -> None:
    usage = {"include_usage": True}
    client = same(chat, stop=[stop], min_tokens=least, ignore_eos=True, stream_options=usage)
    is_blind = chat and kinds.startswith("sglang")
    untold = len(unbroken(client).events) - 3 if is_blind else None

    for after in set(range(2, 10)) - {untold}:  # see above
        assert is_whole(lose(f"request=1:cut,after_events={after}", client, kinds=kinds)), after


def test_held_back_text_is_asked_for_and_its_ids_are_carried() -> None:
    outcome = lose("request=1:cut,after_events=6", more(stop=["###"]))

    asked = [each.path for each in outcome.work(1)]
    assert is_whole(outcome)
    assert "/detokenize" in asked
    assert outcome.moves == {"stream_broken exact": 1}
    assert outcome.asked(1)[0]["max_tokens"] == 5


@pytest.mark.parametrize("fault", ["status,code=500", "cut", "hang", "status,code=404", "empty"])
def test_where_nobody_detokenizes_the_text_is_carried(fault: str) -> None:
    # Read back, half a word becomes other tokens than it was made of, so the answer is another.
    client = Client(tokens=10, path="/v1/chat/completions", extra={"stop": ["###"]})

    outcome = lose(
        "request=1:cut,after_events=6", client,
        happenings=((0.0, f"faults 1 path=/detokenize:{fault}"),),
    )  # fmt: skip

    delivered = "本 little d"
    messages = outcome.asked(1)[0]["messages"]
    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken text": 1}
    assert isinstance(messages, list)
    assert messages[-1]["content"] == delivered
    assert outcome.one.text.startswith(delivered)
    assert outcome.one.finish == "length"


@pytest.mark.parametrize("fault", ["hang", "status,code=500", "cut", "status,code=404", "garbage"])
def test_where_one_does_not_detokenize_another_is_asked(fault: str) -> None:
    outcome = lose(
        "request=1:cut,after_events=6", more(stop=["###"]), kinds="vllm vllm vllm",
        happenings=((0.0, f"faults 1 path=/detokenize:{fault}"),),
    )  # fmt: skip

    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken exact": 1}
    asked = [[each.path for each in outcome.work(n)].count("/detokenize") for n in (1, 2)]
    assert asked[0] == 1 <= asked[1]


@pytest.mark.parametrize("is_packed", [True, False])
def test_an_answer_that_says_that_it_is_packed_may_be_so(
    is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_packed:
        monkeypatch.setattr("router.sim.answering.compress", lambda data: data)
    outcome = lose(
        "request=1:cut,after_events=6", more(stop=["###"]), kinds="vllm vllm vllm",
        happenings=((0.0, "faults 1 path=/detokenize:gzip"),),
    )  # fmt: skip

    asked = [[each.path for each in outcome.work(n)].count("/detokenize") for n in (1, 2)]
    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken exact": 1}
    assert bool(asked[1]) is not is_packed


def test_the_only_one_is_asked_again() -> None:
    # Behind NATS a question may be lost: 2.5 s later it is put once more.
    outcome = lose(
        "request=1:cut,after_events=6", more(stop=["###"]),
        happenings=((0.0, "faults 1 path=/detokenize,times=1:hang"),),
    )  # fmt: skip

    assert is_whole(outcome)
    assert outcome.moves == {"stream_broken exact": 1}


@KINDS
@pytest.mark.parametrize("after", [5, 6, 7, 8])
def test_no_character_is_cut_in_two(after: int, kinds: str) -> None:
    outcome = lose(f"request=1:cut,after_events={after}", same(False), kinds=kinds)

    assert is_whole(outcome)
    assert "\ufffd" not in outcome.one.text


def test_what_a_worker_said_of_the_next_event_is_not_delivered() -> None:
    outcome = lose("request=1:cut,after_events=5,inside_bytes=100")

    assert is_whole(outcome)


#### Ids, logprobs, usage


@KINDS
@ENDPOINTS
@pytest.mark.parametrize("after", [2, 4, 7])
def test_a_client_that_asked_for_ids_gets_all_of_them_once(
    after: int, chat: bool, kinds: str
) -> None:
    if chat and kinds.startswith("sglang"):
        pytest.skip("SGLang refuses ids in a streaming chat")
    cannot = chat and kinds == "vllm sglang"

    outcome = lose(
        f"request=1:cut,after_events={after}", same(chat, return_token_ids=True), kinds=kinds
    )

    if cannot:  # SGLang would not show them
        assert is_told(outcome)
        assert outcome.stuck == ({} if after == 2 else {"no_candidate": 1})
        return
    assert is_whole(outcome)
    assert len(outcome.one.prompt_ids) == 1
    assert outcome.one.ids == outcome.one.direct[0].ids


@KINDS
def test_ids_that_the_client_refused_are_not_asked_for(kinds: str) -> None:
    outcome = lose(client=completion(return_token_ids=False), kinds=kinds)

    assert is_whole(outcome)
    assert outcome.asked(0)[0]["return_token_ids"] is False
    assert sum(v for k, v in outcome.moves.items() if "text" in k) == 1


@pytest.mark.parametrize("kinds", ["vllm vllm", "sglang sglang"])
@ENDPOINTS
@pytest.mark.parametrize("after", [3, 4, 6])
def test_logprobs_go_on(after: int, chat: bool, kinds: str) -> None:
    fields: dict[str, object] = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}

    outcome = lose(f"request=1:cut,after_events={after}", same(chat, **fields), kinds=kinds)

    got, right = _logprobs(outcome)
    assert is_whole(outcome)
    assert got == right


def _logprobs(outcome: Outcome) -> tuple[list[object], list[object]]:
    """Tokens and offsets that the client was given, and those that it should be."""
    found = []
    for one in (outcome.one, outcome.one.direct[0]):
        parts = [choice.get("logprobs") for choice in one.choices]
        told: list[object] = []
        for part in parts:
            if isinstance(part, dict):
                told += [each["token"] for each in part.get("content") or ()]
                told += zip(part.get("tokens") or (), part.get("text_offset") or (), strict=True)
        found.append(told)
    return found[0], found[1]


@KINDS
@ENDPOINTS
def test_usage_that_comes_with_every_chunk_never_goes_back(chat: bool, kinds: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}

    outcome = lose(client=same(chat, stream_options=options), kinds=kinds)

    told = [usage for each in outcome.one.chunks if isinstance(usage := each.get("usage"), dict)]
    counts = [usage["completion_tokens"] for usage in told]
    assert is_whole(outcome)
    assert counts == sorted(counts)
    assert counts[-1] == 10
    assert len({usage["prompt_tokens"] for usage in told}) == 1


@KINDS
@ENDPOINTS
def test_without_a_break_the_client_reads_what_the_engine_writes(chat: bool, kinds: str) -> None:
    shapes: list[dict[str, object]] = [{}, {"stream_options": {"include_usage": True}}]
    shapes.append({"stop": ["day"]})
    for fields in shapes:
        outcome = lose("", same(chat, **fields), kinds=kinds)

        assert outcome.one.normal == outcome.one.direct[0].normal


#### Ends that are written here


@KINDS
@ENDPOINTS
@pytest.mark.parametrize("fault", ["cut,at=finish", "end,at=finish", "hang,at=finish"])
@pytest.mark.parametrize("usage", [True, False])
def test_a_finish_that_was_seen_is_the_end(usage: bool, fault: str, chat: bool, kinds: str) -> None:
    client = same(chat, stream_options={"include_usage": usage})

    outcome = lose(f"request=1:{fault}", client, kinds=kinds)

    assert is_whole(outcome)
    assert outcome.asked(1) == []
    assert outcome.moves == outcome.stuck == {}
    assert len(outcome.one.usages) == usage
    assert outcome.count("baton_completed_locally_total", reason="finish_seen") == 1


@pytest.mark.parametrize("limit", [1, 2])
def test_a_budget_that_is_spent_is_the_end(limit: int) -> None:
    # SGLang's finish is an event of its own.
    client = same(True, stream_options={"include_usage": True})

    outcome = lose("request=1:cut,after_events=7", client, kinds="sglang sglang", limit=limit)

    assert is_whole(outcome)
    assert outcome.one.finish == "length"
    assert outcome.asked(1) == []
    assert outcome.moves == outcome.stuck == {}
    assert outcome.count("baton_completed_locally_total", reason="budget_spent") == 1
    assert outcome.count("baton_stream_outcome_total", worker="w0", outcome="ok") == 1
    assert outcome.sum("baton_stream_outcome_total") == 1


def test_a_spent_budget_needs_nobody_else() -> None:
    outcome = lose("request=1:cut,after_events=7", same(True), kinds="sglang")

    assert is_whole(outcome)


def test_a_finish_after_a_move_is_the_end_too() -> None:
    outcome = lose(
        client=same(True, stream_options={"include_usage": True}),
        happenings=((0.0, "faults 1 cut,at=finish"),),
    )

    assert is_whole(outcome)
    assert len(outcome.one.usages) == 1
    assert outcome.count("baton_completed_locally_total", reason="finish_seen") == 1
