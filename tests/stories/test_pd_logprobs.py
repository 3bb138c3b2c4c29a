"""Logprobs of a prompt: the one answer of decode that waits for its prefill."""

from __future__ import annotations

import pytest

from tests.outcome import Got
from tests.pairs import Result, run
from tests.plans import Client

STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
ASKS = {"text": "ab", "return_logprob": True}


def asking(*, stream: bool, **more: object) -> Client:
    return Client(path="/generate", stream=stream, extra=ASKS | more)


def told(got: Got) -> list[str]:
    """The letters of the list in each event, or in the whole answer."""
    found = []
    for each in got.chunks if got.is_events else [got.json]:
        meta = each["meta_info"]
        assert isinstance(meta, dict)
        found.append("".join(letter for _, _, letter in meta["input_token_logprobs"]))
    return found


def answered(prefill: str, decode: str, *, stream: bool, cuts: int | None = None) -> Result:
    result = run(prefill, decode, asking(stream=stream), cuts=cuts)
    assert (result.one.status, result.one.ending) == (200, "clean")
    assert result.rows("p0") == result.rows("d0") == ["success"]
    assert not result.d.aborts
    return result


@pytest.mark.parametrize("prefill_at", [1, 2, 3, 5])
@pytest.mark.parametrize("cuts", [None, 1, 2])
def test_every_event_has_prefills_list_before_its_own(prefill_at: int, cuts: int | None) -> None:
    prefill = f"head@1,gendone:ab@{prefill_at}"

    result = answered(prefill, "head@2,gen:c@3,gendone:c@4", stream=True, cuts=cuts)

    assert told(result.one) == ["abc", "abc"]
    assert result.one.head_at == 2
    assert result.one.pieces[0][0] == max(prefill_at, 3)


@pytest.mark.parametrize("prefill_at", [1, 2, 3])
def test_a_whole_answer_has_both_lists(prefill_at: int) -> None:
    result = answered(f"genjson:ab@{prefill_at}", "genjson:c@2", stream=False)

    assert told(result.one) == ["abc"]
    assert result.one.ended_at == max(prefill_at, 2)


@pytest.mark.parametrize("prefill", ["json@1", "head@1,token@1,end@1", "head@1,done@3"])
@STREAMED
def test_a_prefill_that_tells_nothing_changes_nothing(prefill: str, stream: bool) -> None:
    decode = "head@2,gen:c@2,gendone:c@2" if stream else "genjson:c@2"

    result = answered(prefill, decode, stream=stream)

    assert set(told(result.one)) == {"c"}


@STREAMED
def test_who_does_not_ask_does_not_wait(stream: bool) -> None:
    decode = "head@2,gendone:c@2" if stream else "genjson:c@2"
    client = Client(path="/generate", stream=stream, extra={"text": "ab"})

    result = run("head@1,gendone:ab@9", decode, client, rest=10.0)

    assert told(result.one) == ["c"]
    assert result.one.ended_at == 2


@STREAMED
def test_what_is_held_back_is_no_token_yet(stream: bool) -> None:
    decode = "head@2,gen:c@2,gendone:c@4" if stream else "genjson:c@2"

    result = run("500@3", decode, asking(stream=stream))

    assert result.one.code == "prefill_failed"
    assert result.one.status == (200 if stream else 502)
    assert (result.rows("p0"), result.rows("d0")) == (["error"], ["cancelled"])


@STREAMED
def test_an_error_of_decode_waits_for_nobody(stream: bool) -> None:
    result = run("head@1,gendone:ab@9", "400@2", asking(stream=stream), rest=10.0)

    assert (result.one.status, result.one.ended_at) == (400, 2)


def test_a_decode_that_breaks_off_while_it_is_held_back_has_failed() -> None:
    result = run("head@1,gendone:ab@9", "head@2,gen:c@2,cut@3", asking(stream=True), rest=10.0)

    assert (result.one.code, result.one.ending) == ("upstream_broken", "cut")
    assert (result.rows("p0"), result.rows("d0")) == (["success"], ["error"])


def test_items_of_a_batch_have_rooms_of_their_own_and_no_minted_name() -> None:
    client = Client(path="/generate", stream=False, extra=ASKS | {"text": ["a", "b"]})

    result = run("genjson:ab@1", "genjson:c@2", client)

    (body,) = result.d.bodies
    assert body["bootstrap_host"] == ["127.0.0.1"] * 2
    assert "rid" not in body
