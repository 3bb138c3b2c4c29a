"""`baton check --explain`: every promise has an example, and the example is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import frozen

from router import cli
from statemachines import worlds
from statemachines.check import models, run_checks
from statemachines.explain import NEVER, NEVER_DUE, Ambiguous, explain, explain_all, explanations
from statemachines.explore import CYCLE, RAISED, STUCK, Model
from statemachines.graph import Graph
from tests.test_explore import counter, up

MODELS = models()


@frozen
class Count:
    number: int = 0


def counted(**promises: Any) -> Model[Count]:
    """A world of a name, from 0 to 5, in which promises can be broken."""
    return Model(
        name="count",
        starts=(Count(),),
        steps=lambda w: [("one more", Count(w.number + 1))] if w.number < 5 else [],
        is_over=lambda w: w.number == 5,
        show=lambda w: {"number": str(w.number)},
        **({"always": {}, "sometimes": {}} | promises),
    )


def lines(model: Model[Any], promise: str) -> list[str]:
    return explain(model, promise).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_promise_is_put_to_the_test_somewhere(model: Model[Any]) -> None:
    explained = explanations(model)

    assert [
        promise for promise, text in explained.items() if NEVER in text or NEVER_DUE in text
    ] == []
    for promise, text in explained.items():
        assert text.startswith(f"{model.name}: {promise}\n")
        assert "promise is broken" not in text
        assert "does not hold" not in text
        assert "does not come true" not in text


def test_what_sometimes_holds_is_shown_where_it_first_does() -> None:
    model = counted(sometimes={"three": lambda w: w.number >= 3})

    said = lines(model, "sometimes three")

    assert said[1] == "  The shortest way there, 3 steps:"
    assert said[-1].split() == ["3", "one", "more", "3"]


def test_what_always_holds_is_shown_where_one_change_would_break_it() -> None:
    model = counted(always={"no six": lambda w: w.number != 6})

    said = lines(model, "no six")

    assert said[1] == "  Put to the test after 1 step; it would break if `number` were 6 and not 1:"


def test_a_step_is_put_to_the_test_by_either_of_its_ends() -> None:
    model = counted(
        between={
            "by one": lambda w, _, after: after.number == w.number + 1,
            "from no six": lambda w, _word, _after: w.number != 6,
        }
    )

    assert lines(model, "by one")[1] == (
        "  Put to the test by the last of 1 step; it would break if `number` were 0 and not 1:"
    )
    assert lines(model, "from no six")[1] == (
        "  Put to the test by the last of 1 step; before it, it would break if `number` were 6 "
        "and not 0:"
    )


def test_a_promise_that_nothing_could_break_promises_nothing() -> None:
    model = counted(always={"below ten": lambda w: w.number < 10})

    assert lines(model, "below ten") == ["count: below ten", f"  {NEVER}"]


def test_a_broken_promise_is_shown_broken() -> None:
    model = counted(
        always={"below two": lambda w: w.number < 2},
        between={"never to three": lambda _w, _s, after: after.number != 3},
        sometimes={"nine": lambda w: w.number == 9},
    )

    assert lines(model, "below two")[1] == "  It does not hold after 2 steps:"
    assert lines(model, "never to three")[1] == "  It does not hold after 3 steps:"
    assert lines(model, "sometimes nine")[1] == "  It never does: this promise is broken."


def test_what_eventually_comes_true_is_shown_where_it_does() -> None:
    model = counted(
        eventually={"three is reached": lambda w: w.number == 3},
        whenever={"two is followed by four": (lambda w: w.number == 2, lambda w: w.number == 4)},
    )

    assert lines(model, "eventually three is reached")[1] == (
        "  It comes true with the last of 3 steps, as late as it can:"
    )
    said = lines(model, "eventually two is followed by four")
    assert said[1] == "  Due since step 2, it comes true with the last of 4 steps:"
    assert said[-1].split() == ["4", "one", "more", "4"]


def test_what_is_never_due_promises_nothing() -> None:
    model = counted(
        eventually={"nothing is asked": lambda w: True},
        whenever={"nine is followed by ten": (lambda w: w.number == 9, lambda w: w.number == 10)},
    )

    assert lines(model, "eventually nothing is asked")[1:] == [f"  {NEVER_DUE}"]
    assert lines(model, "eventually nine is followed by ten")[1:] == [f"  {NEVER_DUE}"]


def test_what_never_comes_true_is_shown_broken() -> None:
    model = counted(eventually={"nine is reached": lambda w: w.number == 9})

    said = lines(model, "eventually nine is reached")
    assert said[1] == "  It does not come true in 5 steps, and there it ends:"


@pytest.mark.parametrize("promise", [STUCK, CYCLE, RAISED])
def test_that_things_end_is_shown_by_the_furthest_end(promise: str) -> None:
    said = lines(counted(), promise)

    assert said[1] == "  6 worlds, 1 of them ends. The furthest one, 5 steps:"


def test_worlds_without_names_can_be_explained_too() -> None:
    assert lines(counter(up, always={"small": lambda n: n < 9}), "small")[1] == f"  {NEVER}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [model for model in MODELS if model.budgets], ids=lambda model: model.name
)
def test_what_a_model_forgets_is_not_shown_as_spent(model: Model[Any]) -> None:
    """At most one of a budget goes with one step, also with the last one."""
    graph = Graph(model.starts, model.steps).complete()
    spent: set[str] = set()
    for world in graph.worlds:
        before = model.columns(world)
        for word, after in model.steps(world):
            now = model.columns(after)
            for name in model.budgets.values():
                if "-" not in (before[name], now[name]):
                    fewer = int(before[name]) - int(now[name])
                    assert fewer in (0, 1), (name, before, word, now)
                    spent |= {name} if fewer else set()
                else:
                    assert model.forgets(after)

    assert spent == set(model.budgets.values())


def test_a_budget_that_was_overdrawn_is_shown_also_where_it_is_over() -> None:
    model = attrs.evolve(counted(), budgets={"number": "left"}, forgets=lambda _: True)

    assert [model.columns(Count(number)) for number in (0, -1)] == [{"left": "-"}, {"left": "-1"}]


@pytest.mark.slow
def test_the_examples_of_the_page_are_what_is_printed() -> None:
    page = (Path(__file__).parent.parent / "docs" / "statemachines.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```\n([\w ]+): (.+)\n((?:.*\n)+?)```$", page, re.MULTILINE)

    assert len(examples) == 2
    for name, promise, shown in examples:
        (model,) = (each for each in MODELS if each.name == name)
        assert explain(model, promise) == f"{name}: {promise}\n{shown}".rstrip("\n")


def test_a_promise_is_found_by_some_of_its_words() -> None:
    text = explain_all(MODELS, "A NEUTRAL end")

    assert text.startswith("one breaker: a neutral end moves nothing\n")


def test_a_whole_sentence_is_meant_even_if_others_contain_it() -> None:
    model = counted(always={"small": lambda w: w.number < 3, "very small": lambda w: w.number < 1})

    assert explain_all([model], "small").startswith("count: small\n")
    with pytest.raises(Ambiguous) as problem:
        explain_all([model], "sma")
    assert problem.value.promises == {"count": ["small", "very small"]}


def test_a_promise_of_several_models_is_explained_in_each() -> None:
    text = explain_all(MODELS[:3], STUCK)

    assert text.count(STUCK) == 3


#### The command


def test_the_command_prints_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--explain", "it trips"]) == 0

    said = capsys.readouterr().out.splitlines()
    assert said[0] == "one breaker: sometimes it trips"
    assert said[-1].split() == ["4", "plain", "failed", "open", "2"]


@pytest.mark.parametrize(
    ("words", "sentence", "listed"),
    [
        (
            ["no such promise"],
            "no promise has the words 'no such promise'; there are",
            sum(len(model.promises) for model in MODELS),
        ),
        (
            ["a request finishes"],
            "several promises have the words 'a request finishes'; write out one of",
            3,
        ),
        (
            ["no such", "the router"],
            "no promise has the words 'no such'; there are",
            len(worlds.router().promises),
        ),
    ],
)
def test_a_name_that_is_no_promise_lists_those_that_exist(
    words: list[str], sentence: str, listed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "--explain", *words]) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"baton check: {sentence}\n")
    assert len([line for line in said.err.splitlines() if line.startswith("  ")]) == listed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["the rooter", "--explain", "it trips"], "no model is called 'the rooter'; there are one"),
        (["the router", "--explain", "it trips"], "no promise has the words 'it trips'"),
        (["--deep", "--explain", "it trips"], "so --deep adds nothing"),
    ],
)
def test_nothing_that_was_typed_is_passed_over(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def on_pairs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has one model to look at."""
    monkeypatch.setattr("statemachines.check.models", lambda: [worlds.pair()])


@pytest.mark.slow
@pytest.mark.usefixtures("on_pairs_only")
def test_progress_is_told_of_long_explorations() -> None:
    told: list[tuple[str, int, int]] = []

    run_checks(lambda model, seen, waiting: told.append((model, seen, waiting)))

    assert {model for model, _, _ in told} == {"one request on pairs"}
    seen = [seen for _, seen, _ in told]
    assert seen == list(range(0, 7000, 1000))


@pytest.mark.slow
@pytest.mark.usefixtures("on_pairs_only")
@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_for_terminals_and_leaves_nothing_behind(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)

    assert cli.main(["check"]) == 0

    said = capsys.readouterr()
    assert "states" not in said.err.rpartition("\r")[2]
    assert ("one request on pairs: 1,000 states" in said.err) is is_terminal
    assert "\r" not in said.out
