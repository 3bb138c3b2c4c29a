"""Where ids and text agree: proved event by event, or asked; never guessed."""

from __future__ import annotations

import json
import random

import pytest

from router.migration.agreement import (
    Agreed,
    Disagreed,
    Inquiry,
    question_body,
    read_answer,
    releases_all,
    seek,
)
from router.migration.asking import Asking
from router.migration.attempt import Attempt
from router.migration.record import Record
from router.migration.shape import examine

#: A vocabulary: ids to bytes.
WORDS = {1: b"<p>", 2: b"a", 3: b"b", 4: b" c", 5: b"\xf0\x9f", 6: b"\x99", 7: b"\x82", 8: b"EN"}
WORDS |= {9: b"", 10: b"<tool", 11: b"_call>", 12: b"<special>"}


def text_of(ids: tuple[int, ...] | list[int]) -> str:
    return b"".join(WORDS[id_] for id_ in ids).decode("utf-8", "replace")


def event(text: str | None, *ids: int, prompt: list[int] | None = None) -> bytes:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": ids}
    chunk = {"id": "x", "choices": [choice], "prompt_token_ids": prompt}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def recorded(*events: bytes, engine: str = "vllm", **more: object) -> Record:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 50} | more
    record = Record(examine(json.dumps(body).encode(), "chat"))
    attempt = Attempt(record, engine, Asking(ids=True))
    attempt.read(event("", prompt=[1]))
    for one in events:
        attempt.read(one)
    return record


def found(record: Record) -> tuple[Agreed | Disagreed, int]:
    """Where they agree, and how many questions it took."""
    place, asked = seek(record), 0
    while isinstance(place, Inquiry):
        asked += 1
        place = place.answer(text_of(place.tokens))
    return place, asked


def test_one_id_with_text_proves_the_place() -> None:
    assert found(recorded(event("a", 2), event("b", 3))) == (Agreed(2), 0)


def test_case_21_ids_without_text_at_the_end_are_rolled_back() -> None:
    assert found(recorded(event("a", 2), event("", 5), event("", 6))) == (Agreed(1), 0)


def test_case_28_several_ids_in_an_event_have_to_be_asked_for() -> None:
    assert found(recorded(event("ab", 2, 3))) == (Agreed(2), 2)


def test_an_unfinished_character_after_text_in_one_event_is_found() -> None:
    assert found(recorded(event("a", 2, 5, 6))) == (Agreed(1), 4)


def test_a_finished_character_is_carried() -> None:
    assert found(recorded(event("a🙂", 2, 5, 6, 7))) == (Agreed(4), 2)


def test_case_22_text_held_for_a_stop_string_is_found() -> None:
    events = [event("", 2), event("", 3), event("a", 4)]
    shown = recorded(*events, stop=["wxyz"], return_token_ids=True)

    assert found(shown) == (Agreed(3, "b c"), 2)
    assert found(recorded(*events, stop=["wxyz"])) == (Agreed(1), 4)


def test_of_held_text_the_rest_of_a_token_is_carried() -> None:
    record = recorded(event("", 8), event("E", 2), stop=["xyz"])

    assert found(record) == (Agreed(1, "N"), 4)


def test_held_text_that_ends_inside_a_character_is_carried_up_to_it() -> None:
    events = [event("", 2), event("a", 3), event("", 5), event("", 6)]

    assert found(recorded(*events, stop=["xyz"], return_token_ids=True)) == (Agreed(2, "b"), 4)
    assert found(recorded(*events, stop=["xyz"]))[0] == Agreed(1)


@pytest.mark.parametrize("shows_ids", [False, True])
def test_special_tokens_before_the_place_are_left_out(shows_ids: bool) -> None:
    events = [event("", 2), event("", 12), event("", 3), event("", 12), event("ab c", 4)]
    record = recorded(*events, event("", 2), stop=["xyz"], return_token_ids=shows_ids)

    place, asked = found(record)

    assert place == (Agreed(6, "a") if shows_ids else Agreed(5))
    assert asked < 15


def test_an_unfinished_character_is_not_taken_for_one_that_was_read() -> None:
    record = recorded(event("", 5), event("", 2), event("\ufffd", 3), stop=["xyz"])

    assert found(record)[0] == Agreed(2, "a")


def test_broken_characters_in_a_row_are_rolled_back() -> None:
    record = recorded(event("a", 2), *[event("", id_) for id_ in (7, 7, 7, 7, 7, 6)])

    assert found(record)[0] == Agreed(1)


def test_a_special_token_is_left_out_also_before_a_place_that_is_known() -> None:
    record = recorded(event("", 2), event("", 12), event("a", 3), stop=["xyz"])
    record.carry(3, "b")
    record.waiting = ""

    Attempt(record, "vllm", Asking(ids=True)).read(event("", 4))

    assert found(record)[0] == Agreed(3)


SPECIAL = 12


def said(ids: list[int]) -> str:
    """What vLLM's stream makes of ids: no special tokens, and no end in a broken character."""
    plain = [id_ for id_ in ids if id_ != SPECIAL]
    while text_of(plain).endswith("\ufffd"):
        plain.pop()
    return text_of(plain)


@pytest.mark.parametrize("seed", range(40))
def test_every_cut_of_any_answer_has_a_place_to_go_on_from(seed: int) -> None:
    chance = random.Random(seed)
    ids: list[int] = []
    while len(ids) < 24:
        # A special token after a broken character cannot be told from text that was held.
        is_whole = not text_of(ids).endswith("\ufffd")
        ids.append(chance.choice([2, 3, 4, 5, 6, 7, 8, SPECIAL if is_whole else 2]))
    stop = chance.choice([["xyz"], ["never said"], []])
    held = max([len(one) - 1 for one in stop], default=0)
    shows = chance.random() < 0.5
    events, sent = [], ""
    for count in range(1, len(ids)):
        now = said(ids[:count])
        now = now[: max(len(now) - held, len(sent))]
        events.append(event(now[len(sent) :], ids[count - 1]))
        sent = now
        if not sent:
            continue

        place, asked = found(recorded(*events, stop=stop, temperature=0, return_token_ids=shows))

        # Each hunt for a special token takes a few questions, and there may be some tokens.
        assert asked <= 40
        if isinstance(place, Disagreed):
            # A special token is known by its absence, and not where broken characters surround it.
            assert sent.endswith("\ufffd") or ids[:count].count(SPECIAL) > 4
            continue
        assert isinstance(place, Agreed)
        carried = text_of([id_ for id_ in ids[: place.ids] if id_ != SPECIAL])
        assert carried == sent + place.held
        assert not carried.endswith("\ufffd")


def test_a_special_token_is_not_spelled_to_the_client() -> None:
    record = recorded(event("", 2), event("a", 12), event("", 3), stop=["xyz"])

    assert found(record)[0] == Agreed(1)


def test_ids_that_were_shown_are_made_again_only_where_they_come_again() -> None:
    events = [event("", 2), event("a", 12), event("", 3)]
    greedy = recorded(*events, stop=["xyz"], return_token_ids=True, temperature=0)
    sampled = recorded(*events, stop=["xyz"], return_token_ids=True, temperature=0.5)

    assert found(greedy)[0] == Agreed(1)
    assert found(sampled)[0] == Disagreed()


def test_a_special_token_behind_a_broken_character_is_no_place_to_go_on_from() -> None:
    """vLLM leaves it out of the prompt's text, too, and repeats a prompt that ends broken."""
    record = recorded(event("", 5), event("", SPECIAL), event("\ufffd", 2, 2), stop=["xyz"])

    assert found(record)[0] == Disagreed()


def test_what_is_held_is_carried_where_nobody_makes_it_again() -> None:
    record = recorded(event("", 2), event("a", 3), stop=["xyz"], max_tokens=2)

    assert found(record)[0] == Agreed(2, "b")


def test_a_search_that_is_not_answered_to_its_end_has_found_something() -> None:
    place = seek(recorded(event("", 2), event("", 3), event("a", 4), stop=["wxyz"]))

    for text in ("<p>", "<p>ab c", None):
        assert isinstance(place, Inquiry)
        place = place.answer(text)
    assert place == Agreed(3, "b c")


def test_a_parsers_leavings_are_not_shown() -> None:
    record = recorded(event("a", 2), event("b", 3), event(None, 10), tools=[{"type": "function"}])

    assert found(record)[0] == Agreed(2)


def test_swallowed_tokens_reveal_a_parser() -> None:
    record = recorded(event("a", 2), event(None, 9), event("b", 3), event("", 10), event("", 11))

    assert record.has_parser
    assert found(record)[0] == Agreed(3)


@pytest.mark.parametrize("length", range(1, 40))
def test_the_place_is_found_in_few_questions(length: int) -> None:
    events = [event("ab" * length, *[2, 3] * length), event(None, *[10] * 30)]

    place, asked = found(recorded(*events))

    assert place == Agreed(2 * length)
    assert asked < 12


def test_text_that_the_ids_do_not_give_is_no_agreement() -> None:
    assert found(recorded(event("aX", 2, 3)))[0] == Disagreed()


def test_no_answer_is_no_agreement() -> None:
    place = seek(recorded(event("ab", 2, 3)))

    assert isinstance(place, Inquiry)
    assert place.answer(None) == Disagreed()
    assert isinstance(then := place.answer("<p>"), Inquiry)
    assert then.answer("something else") == Disagreed()


def test_case_24_without_all_ids_there_is_none() -> None:
    record = recorded(event("a", 2))
    record.lose_exactness()

    assert seek(record) == Disagreed()


def test_case_26_without_prompt_ids_there_is_none() -> None:
    record = recorded(event("a", 2))
    record.prompt_json = None

    assert seek(record) == Disagreed()


@pytest.mark.parametrize(
    "text, is_proof",
    [("a", True), ("a ", False), (" a", True), ("中", False), ("é", True), ("🙂", True)],
)
def test_what_sglang_may_hold_back_is_no_proof(text: str, is_proof: bool) -> None:
    assert releases_all(text) is is_proof


def test_sglang_is_asked_where_an_event_proves_nothing() -> None:
    record = recorded(event("a ", 2), engine="sglang")

    assert isinstance(seek(record), Inquiry)


def test_the_wire_form() -> None:
    place = seek(recorded(event("ab", 2, 3)))

    assert isinstance(place, Inquiry)
    assert json.loads(question_body(place, "m")) == {"model": "m", "tokens": [1]}
    assert json.loads(question_body(place, None)) == {"tokens": [1]}
    assert read_answer(b'{"prompt":"a"}') == "a"
    assert read_answer(b'{"text":""}') == ""
    assert read_answer(b'{"detail":"Not Found"}') is None
    assert read_answer(b"no") is None
