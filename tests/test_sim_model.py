"""The simulated model: every token of the prefix counts, and text survives its tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.sim import tokens
from router.sim.decoding import SGLANG, VLLM, Choice, Limits, Manner, start_choice
from router.sim.model import Model

IDS = st.lists(st.integers(0, tokens.VOCABULARY_SIZE - 1), min_size=1, max_size=30)


def generate(model: Model, prompt: list[int], count: int) -> list[int]:
    generation = model.start(prompt)
    return [generation.next_token(may_end=False) for _ in range(count)]


def run(choice: Choice, tokens_per_step: int = 1) -> Choice:
    while choice.finish is None:
        choice.step(tokens_per_step)
    return choice


def choose(
    prompt: str | list[int], limits: Limits, manner: Manner = VLLM, model: Model | None = None
) -> Choice:
    ids = tokens.encode(prompt) if isinstance(prompt, str) else prompt
    return start_choice(model or Model(), ids, limits, manner, index=0, way=0)


# --- tokenizer -----------------------------------------------------------------------------------


@given(st.text())
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    shown = text.encode("utf-8", "replace").decode()

    assert tokens.decode(tokens.encode(text), with_special=True) == shown


def test_special_tokens_are_recognised_in_text_and_left_out_of_it() -> None:
    ids = tokens.encode("<|im_start|>user\nhi<|im_end|>")

    assert ids[0] == tokens.TURN_START
    assert ids[-1] == tokens.TURN_END
    assert tokens.decode(ids) == "user\nhi"


@pytest.mark.parametrize("character", tokens.CHARACTERS)
def test_characters_outside_ascii_take_several_tokens(character: str) -> None:
    ids = tokens.encode(character)

    assert len(ids) >= 2
    assert tokens.decode(ids) == character
    assert tokens.decode(ids[:-1]) == "\ufffd"


@given(st.text(min_size=1))
def test_an_unfinished_character_is_found_wherever_bytes_are_cut(text: str) -> None:
    data = text.encode("utf-8", "replace")
    for end in range(len(data) + 1):
        begun = tokens.unfinished_character(data[:end])
        assert data[: end - len(begun)].decode("utf-8")[-1:] != "\ufffd" or "\ufffd" in text


# --- the next token ------------------------------------------------------------------------------


@given(IDS, st.data())
def test_a_lost_doubled_or_changed_token_changes_what_follows(
    prompt: list[int], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(prompt) - 1))
    other = data.draw(
        st.integers(0, tokens.VOCABULARY_SIZE - 1).filter(lambda x: x != prompt[place])
    )
    expected = generate(Model(), prompt, 12)

    assert generate(Model(), prompt[:place] + prompt[place + 1 :], 12) != expected
    assert generate(Model(), [*prompt[: place + 1], *prompt[place:]], 12) != expected
    assert generate(Model(), [*prompt[:place], other, *prompt[place + 1 :]], 12) != expected


@given(IDS, st.integers(0, 40))
def test_a_continuation_from_all_ids_is_the_same_generation(prompt: list[int], cut: int) -> None:
    whole = generate(Model(), prompt, 40)

    assert generate(Model(), prompt + whole[:cut], 40 - cut) == whole[cut:]


def test_the_next_token_of_a_prefix_needs_no_history() -> None:
    whole = generate(Model(), [5, 6, 7], 10)

    assert [Model().next_token([5, 6, 7, *whole[:n]]) for n in range(10)] == whole


def test_other_weights_write_other_text() -> None:
    assert generate(Model(seed=1), [5, 6], 12) != generate(Model(seed=2), [5, 6], 12)


def test_what_the_model_writes_encodes_to_the_tokens_it_wrote() -> None:
    choice = run(choose("Say something: ", Limits(2000)))
    kept = tokens.encode(choice.text)

    assert choice.ids[: len(kept)] == kept
    assert len(choice.ids) - len(kept) < 4


def test_an_ambiguous_model_writes_text_that_encodes_to_other_tokens() -> None:
    choice = run(choose("Say something: ", Limits(200), model=Model(ambiguous=True)))

    assert tokens.encode(choice.text) != choice.ids


def test_the_model_writes_valid_text_with_characters_of_several_tokens() -> None:
    choice = run(choose("Once", Limits(2000)))

    assert "\ufffd" not in choice.text
    assert {len(character.encode()) for character in choice.text} >= {1, 2, 3, 4}


# --- ends ----------------------------------------------------------------------------------------


def test_the_model_ends_by_itself_only_if_asked() -> None:
    talkative = run(choose("Hi", Limits(500)))
    terse = run(choose("Hi", Limits(500), model=Model(eos_every=10)))

    assert (talkative.finish, talkative.count) == ("length", 500)
    assert terse.finish == "stop"
    assert terse.ids[-1] == tokens.TURN_END
    assert terse.count < 200


def test_ignore_eos_and_min_tokens_put_the_end_off() -> None:
    model = Model(eos_every=5)
    ignoring = run(choose("Hi", Limits(300, ignore_eos=True), model=model))
    patient = run(choose("Hi", Limits(300, min_tokens=100), model=model))

    assert (ignoring.finish, ignoring.count) == ("length", 300)
    assert tokens.TURN_END not in ignoring.ids
    assert patient.count > 100


@pytest.mark.parametrize("least", range(8))
def test_vllm_spares_stop_strings_within_min_tokens_and_sglang_none(least: int) -> None:
    """Measured with vLLM 0.32.0 (strictly behind them) and SGLang 0.5.23 (12 of 13 tokens)."""
    plain = run(choose("Hi", Limits(20)))
    text = tokens.decode(plain.ids[4:5])
    assert tokens.decode(plain.ids).count(text) == 1
    limits = Limits(20, min_tokens=least, stop=(text,))

    finish = {manner: run(choose("Hi", limits, manner)).finish for manner in (VLLM, SGLANG)}

    assert finish == {VLLM: "stop" if least < 5 else "length", SGLANG: "stop"}


def test_a_stop_token_ends_without_showing_itself() -> None:
    plain = run(choose("Hi", Limits(20)))
    stopped = run(choose("Hi", Limits(20, stop_ids=frozenset({plain.ids[5]}))))

    assert stopped.finish == "stop"
    assert stopped.stopped_by == plain.ids[5]
    assert stopped.ids == plain.ids[:6]
    assert plain.text.startswith(stopped.text)
    assert stopped.text == tokens.decode(plain.ids[:5])


@pytest.mark.parametrize("manner", [VLLM, SGLANG])
def test_a_stop_string_over_two_tokens_is_cut_out(manner: Manner) -> None:
    plain = run(choose("Hi", Limits(30), manner)).text
    stop = plain[20:27]
    stopped = run(choose("Hi", Limits(30, stop=(stop,)), manner))
    kept = run(choose("Hi", Limits(30, stop=(stop,), keeps_stop_text=True), manner))

    assert (stopped.finish, stopped.stopped_by) == ("stop", stop)
    assert stopped.text == plain[: plain.index(stop)]
    assert kept.text == plain[: plain.index(stop)] + stop


def test_vllm_keeps_back_what_may_become_a_stop_string_while_ids_run_ahead() -> None:
    choice = choose("Hi", Limits(30, stop=("nothing like this",)))
    plain = run(choose("Hi", Limits(30)))

    shown = ""
    for step in range(29):
        piece = choice.step()
        shown += piece.text
        text_so_far = tokens.decode(plain.ids[: step + 1]).rstrip("\ufffd")
        assert piece.ids == (plain.ids[step],)
        assert shown == text_so_far[: max(len(text_so_far) - 16, 0)]
    last = choice.step()

    assert shown + last.text == plain.text


def test_sglang_keeps_back_whole_chunks_that_look_like_a_stop_string() -> None:
    plain = run(choose("Hi", Limits(30), SGLANG))
    begun = tokens.decode([plain.ids[7]])
    choice = choose("Hi", Limits(30, stop=(begun + " never comes",)), SGLANG)

    pieces = [choice.step() for _ in range(30)]

    assert pieces[7].ids == ()
    assert pieces[8].ids == tuple(plain.ids[7:9])
    assert "".join(piece.text for piece in pieces) == plain.text


# --- characters cut in two -----------------------------------------------------------------------


def cut_inside_a_character() -> tuple[Choice, int]:
    """A generation and a number of tokens after which its text is in the middle of a character."""
    whole = run(choose("Hi", Limits(200)))
    for cut in range(1, 200):
        if tokens.unfinished_character(tokens.bytes_of(whole.ids[:cut])):
            return whole, cut
    raise AssertionError("this model writes no long characters")


def test_text_waits_for_the_rest_of_a_character() -> None:
    whole, cut = cut_inside_a_character()
    choice = choose("Hi", Limits(200))

    pieces = [choice.step() for _ in range(cut)]

    assert pieces[-1].text == ""
    assert pieces[-1].ids == (whole.ids[cut - 1],)


def test_at_the_end_vllm_drops_an_unfinished_character_and_sglang_flushes_it() -> None:
    whole, cut = cut_inside_a_character()
    before = tokens.decode(whole.ids[:cut]).rstrip("\ufffd")

    assert run(choose("Hi", Limits(cut), VLLM)).text == before
    assert run(choose("Hi", Limits(cut), SGLANG)).text == before + "\ufffd"


def test_continuing_inside_a_character_vllm_repeats_the_prompt_and_sglang_loses_it() -> None:
    whole, cut = cut_inside_a_character()
    prompt = tokens.encode("Hi")
    carried = prompt + whole.ids[:cut]
    rest = Limits(200 - cut)
    shown = tokens.decode(whole.ids[:cut]).rstrip("\ufffd")
    missing = whole.text[len(shown) :]

    assert run(choose(carried, rest, VLLM)).text == "Hi" + shown + missing
    assert run(choose(carried, rest, SGLANG)).text == missing[1:]


@pytest.mark.parametrize("manner", [VLLM, SGLANG])
@pytest.mark.parametrize("per_step", [1, 3, 7])
def test_several_tokens_a_step_change_no_text(manner: Manner, per_step: int) -> None:
    plain = run(choose("Hi", Limits(50), manner))

    assert run(choose("Hi", Limits(50), manner), per_step).text == plain.text
