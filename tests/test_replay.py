"""Recorded logs run through the charts: the same states come out, and what is illegal is named."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from router import cli
from router.commands.recordings import read_recording
from statemachines import BREAKER, CHARTS, LEG, REQUEST, WORKER, Chart, Edge
from statemachines.chart import IllegalTransition
from statemachines.draw import arrows, dot, mermaid
from statemachines.paint import counts_paint, path_paint
from statemachines.replay import Lost, Record, replay

every_chart = pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)


def record(edge: Edge, chart: Chart = REQUEST, *, id: str = "r1", at: float = 0.0) -> Record:
    words = str(edge.source.value), edge.fact, str(edge.target.value)
    return Record(chart.name, id, *words, seconds=at)


def row(source: str, fact: str, target: str, chart: Chart = REQUEST) -> Edge:
    """The row with these words."""
    words = source, fact, target
    return next(e for e in chart.edges if (e.source.value, e.fact, e.target.value) == words)


def path_to(chart: Chart, edge: Edge) -> list[Edge]:
    """The shortest path from the initial state that ends with this row."""
    paths: list[list[Edge]] = [[]]
    for path in paths:
        at = path[-1].target if path else chart.initial
        if at is edge.source:
            return [*path, edge]
        seen = {e.source for e in path}
        paths += [[*path, e] for e in chart.edges if e.source is at and e.target not in seen]
    raise AssertionError(f"no way to {edge}")


MOVED = [
    row("queued", "admitted", "dispatching"),
    row("dispatching", "first_token", "streaming"),
    row("streaming", "leg_stalled", "migrating"),
    row("migrating", "admitted", "resuming"),
    row("resuming", "first_token", "streaming"),
    row("streaming", "completed", "finished"),
]

#### The charts judge


@every_chart
def test_every_row_is_replayed_as_it_was_recorded(chart: Chart) -> None:
    for edge in chart.edges:
        path = path_to(chart, edge)

        found = replay([record(each, chart) for each in path], is_whole=True)

        assert not found.refusals, found.refusals
        (life,) = found.lives
        assert [taken for _, taken in life.path] == path
        assert life.state is edge.target


@every_chart
def test_every_fact_without_a_row_is_refused(chart: Chart) -> None:
    for state in chart.states:
        for fact in chart.facts:
            if not chart.legal(state, fact):
                found = replay([Record(chart.name, "x", state.value, fact, state.value)])

                (refusal,) = found.refusals
                assert refusal.state is state
                assert refusal.reason == f"{fact} is illegal in {state.value}"
                assert {edge.fact for edge in refusal.legal} == {
                    known for known in chart.facts if chart.legal(state, known)
                }


@every_chart
def test_every_target_that_no_row_leads_to_is_refused(chart: Chart) -> None:
    for edge in chart.edges:
        rows = chart.legal(edge.source, edge.fact)
        for target in set(chart.states) - {each.target for each in rows}:
            found = replay([Record(chart.name, "x", edge.source.value, edge.fact, target.value)])

            (refusal,) = found.refusals
            assert refusal.legal == rows
            assert refusal.reason.endswith(f"not to {target.value}")


def test_the_first_illegal_fact_is_the_one_that_is_named() -> None:
    records = [record(edge) for edge in MOVED]
    records[2] = Record("request", "r1", "streaming", "overloaded", "migrating")
    records[4] = Record("request", "r1", "resuming", "answered", "streaming")

    found = replay(records, is_whole=True)

    assert [each.record for each in found.refusals] == [records[2]]
    assert found.unjudged == 3
    assert found.lives[0].state is MOVED[1].target


def test_a_state_that_the_facts_do_not_lead_to_is_refused() -> None:
    found = replay([record(edge) for edge in (MOVED[0], MOVED[2])])

    assert found.refusals[0].reason == (
        "it was noted in streaming, but its chart is in dispatching"
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("lamp", "x", "queued", "admitted", "dispatching"), "there is no machine lamp"),
        (("request", "x", "lit", "admitted", "dispatching"), "has no state lit"),
        (("request", "x", "queued", "admitted", "lit"), "has no state lit"),
        (("request", "x", "queued", "switched", "failed"), "the machine knows no such fact"),
    ],
)
def test_a_word_that_no_chart_knows_is_refused(words: Sequence[str], reason: str) -> None:
    machine, id, source, fact, target = words

    (refusal,) = replay([Record(machine, id, source, fact, target)]).refusals

    assert reason in refusal.reason


#### Logs as they are


def test_a_log_may_begin_in_the_middle_of_a_life() -> None:
    found = replay([record(edge) for edge in MOVED[2:]])

    assert not found.refusals
    assert found.lives[0].is_late
    assert found.lives[0].state.value == "finished"


def test_a_whole_record_may_not() -> None:
    found = replay([record(edge) for edge in MOVED[2:]], is_whole=True)

    assert found.refusals[0].reason == "it was noted in streaming, but its chart is in queued"


def test_after_lost_transitions_a_life_goes_on_wherever_it_is_found() -> None:
    found = replay([record(MOVED[0]), Lost(1), *map(record, MOVED[2:])])

    assert not found.refusals
    assert found.lost == 1
    assert [life.is_late for life in found.lives] == [False, True]


def test_lost_transitions_excuse_nothing_that_comes_after_them() -> None:
    found = replay([Lost(1), record(MOVED[0]), record(MOVED[2])])

    assert len(found.refusals) == 1


def test_an_id_may_be_used_again_and_at_the_same_time() -> None:
    """Clients choose the ids of requests."""
    twice = [record(edge) for edge in MOVED for _ in range(2)]
    again = [record(edge) for edge in MOVED]

    found = replay([*twice, *again])

    assert not found.refusals
    assert [life.state.value for life in found.lives] == ["finished"] * 3


def test_a_worker_that_joins_again_has_a_new_breaker() -> None:
    trips = row("closed", "failed", "open", BREAKER)
    ok = row("closed", "succeeded", "closed", BREAKER)

    found = replay([record(trips, BREAKER), record(ok, BREAKER)])

    assert not found.refusals
    assert len(found.lives) == 2


def test_nothing_happens_after_the_end() -> None:
    found = replay([*map(record, MOVED), Record("request", "r1", "finished", "crashed", "failed")])

    assert found.refusals[0].legal == ()


def test_the_chart_itself_is_what_moves_a_life(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Edge:
        raise IllegalTransition("request", None, "admitted")

    monkeypatch.setattr(Chart, "fire", refuse)

    with pytest.raises(IllegalTransition):
        replay([record(MOVED[0])])


#### What is read


def as_lines(records: Sequence[Record], **more: object) -> bytes:
    return b"".join(
        json.dumps(
            {
                "machine": each.machine,
                "id": each.id,
                "source": each.source,
                "fact": each.fact,
                "target": each.target,
                **more,
            }
        ).encode()
        + b"\n"
        for each in records
    )


def test_lines_of_a_log_are_read_and_other_lines_passed_over() -> None:
    moves = as_lines(
        [record(edge) for edge in MOVED],
        time="2026-01-01T00:00:01.500Z",
        level="debug",
        event="transition",
    )
    noise = (
        b"baton: listening on http://127.0.0.1:8000\n\n"
        b'{"time":"x","level":"info","event":"router","fact":"listening","state":"serving"}\n'
        b'{"event":"request","id":"r1","route":"chat","state":"finished","seconds":1.5}\n'
    )

    recording = read_recording(noise + moves)

    assert recording.others == 3
    assert recording.gaps == recording.remarks == ()
    assert len(recording.records) == len(MOVED)
    assert isinstance(first := recording.records[0], Record)
    assert first.seconds == 1767225601.5


def test_what_a_watcher_lost_is_read() -> None:
    recording = read_recording(as_lines([record(MOVED[0])], lost=3, seconds=1.0) + b'{"lost":2}\n')

    lost = [each.count for each in recording.records if isinstance(each, Lost)]
    assert lost == [3, 2]


#### The command


def document(edges: Sequence[Edge], state: str, seconds: object = 2.5) -> str:
    return json.dumps(
        {
            "id": "r1",
            "state": state,
            "route": "chat",
            "seconds": seconds,
            "transitions": [
                {
                    "seconds": 0.5 * number,
                    "machine": "request",
                    "source": edge.source.value,
                    "fact": edge.fact,
                    "target": edge.target.value,
                    "why": edge.why,
                }
                for number, edge in enumerate(edges)
            ],
        }
    )


def test_a_request_is_shown_as_a_table_with_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r1.json").write_text(document(MOVED, "finished"), encoding="utf-8")

    code = cli.main(["replay", str(tmp_path / "r1.json")])

    said = capsys.readouterr().out.splitlines()
    assert code == 0
    assert said[0] == "request r1: 6 facts in 2.500 s, finished"
    assert said[1].split() == ["seconds", "stayed", "in", "fact", "if", "leads", "to", "because"]
    assert said[4].split()[:6] == [
        *("1.000", "0.500", "streaming", "leg_stalled", "can_migrate", "migrating")
    ]
    assert said[-1] == "1 subject, 6 facts; all legal"


def test_the_legs_of_a_request_are_shown_below_its_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"worker": "w0", "role": "mixed", "began": 0.5, "ended": 2.0, "state": "broken"}
    lost |= {"fact": "stalled", "status": 200, "detail": "silent\x1b[2J for 5 s"}
    running = {"worker": "w1", "role": "mixed", "began": 2.0, "state": "streaming"}
    whole = json.loads(document(MOVED, "finished")) | {"legs": [lost, running]}
    (tmp_path / "r1.json").write_text(json.dumps(whole), encoding="utf-8")

    code = cli.main(["replay", str(tmp_path / "r1.json")])

    said = capsys.readouterr().out.splitlines()
    head, *rows = (re.split(r"\s{2,}", line.strip()) for line in said[9:12])
    assert code == 0
    assert head == ["began", "took", "worker", "role", "last fact", "HTTP", "leg", "what was met"]
    assert rows == [
        ["0.500", "1.500", "w0", "mixed", "stalled", "200", "broken", "silent[2J for 5 s"],
        ["2.000", "w1", "mixed", "streaming"],
    ]


@pytest.mark.parametrize("count", range(1, len(MOVED)))
def test_a_live_request_shows_how_long_it_has_been_where_it_is(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = str(MOVED[count - 1].target.value)
    since = 0.5 * (count - 1)
    (tmp_path / "r1.json").write_text(
        document(MOVED[:count], state, since + 60.0), encoding="utf-8"
    )

    code = cli.main(["replay", str(tmp_path / "r1.json"), "--draw", str(tmp_path / "r.dot")])

    said = capsys.readouterr().out.splitlines()
    assert code == 0
    assert said[0].endswith(f" in {since:.3f} s, {state} for 60.000 s")
    assert said[count + 2].split(maxsplit=3) == [
        *(f"{since + 60:.3f}", "60.000", state, "still there when the router was asked")
    ]
    stays = {str(edge.source.value): 0.5 for edge in MOVED[1:count]} | {"queued": 0.0}
    stays[state] = stays.get(state, 0.0) + 60.0
    drawn = re.findall(
        r'^ *\w+ \[label="(\w+)\\n([\d.]+) s"',
        (tmp_path / "r.dot").read_text(encoding="utf-8"),
        re.M,
    )
    assert {state: float(seconds) for state, seconds in drawn} == stays


@pytest.mark.parametrize("seconds", [None, "soon", True])
def test_a_live_request_of_another_version_is_shown_without_that_time(
    seconds: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r1.json").write_text(document(MOVED[:2], "streaming", seconds), encoding="utf-8")

    assert cli.main(["replay", str(tmp_path / "r1.json")]) == 0
    said = capsys.readouterr().out
    assert "2 facts in 0.500 s, streaming\n" in said
    assert "still there" not in said


def test_a_request_that_is_over_or_refused_is_not_still_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for edges, state in ((MOVED, "finished"), (MOVED[1:], "finished"), (MOVED[:2], "failed")):
        (tmp_path / "r1.json").write_text(document(edges, state, 60.0), encoding="utf-8")
        cli.main(["replay", str(tmp_path / "r1.json")])

    assert "still there" not in capsys.readouterr().out


def test_a_request_that_nothing_has_happened_to_says_for_how_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r1.json").write_text(document([], "queued", 60.0), encoding="utf-8")

    assert cli.main(["replay", str(tmp_path / "r1.json")]) == 2
    assert "r1 has no transitions yet: it is queued for 60.000 s" in capsys.readouterr().err


def test_the_first_illegal_fact_is_shown_with_what_was_legal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = document(MOVED, "finished").replace("leg_stalled", "answered")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(bad.encode())))

    code = cli.main(["replay", "-"])

    said = capsys.readouterr().out
    assert code == 1
    assert "refused: request r1: answered is illegal in streaming\n" in said
    assert "  recorded at 1.000 s: streaming --answered--> migrating\n" in said
    assert "  legal in streaming: unreplayable (to poisoned), completed (to finished), " in said
    assert "leg_lost (to migrating or failed)" in said


def test_a_router_that_shows_another_state_than_its_facts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r1.json").write_text(document(MOVED, "failed"), encoding="utf-8")

    assert cli.main(["replay", str(tmp_path / "r1.json")]) == 1
    assert "refused: the router showed it in failed" in capsys.readouterr().out


def test_many_subjects_are_counted_and_one_can_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record(edge, id=f"r{number}") for number in range(30) for edge in MOVED]
    (tmp_path / "log").write_bytes(as_lines(records))

    assert cli.main(["replay", str(tmp_path / "log")]) == 0
    many = capsys.readouterr().out
    assert cli.main(["replay", str(tmp_path / "log"), "--id", "r7"]) == 0
    one = capsys.readouterr().out

    assert "request  finished  30" in many
    assert "request r7" not in many
    assert one.count("request r7: 6 facts, finished") == 1
    assert one.endswith("1 subject, 6 facts; all legal\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.json"], "No such file"),
        (["empty"], "no transitions in it"),
        (["log", "--draw", "x.png"], "pictures are .svg, .dot, .mmd"),
        (["log", "--draw", "x.dot"], "one machine a picture, not request, leg"),
    ],
)
def test_what_cannot_be_replayed_or_drawn_is_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text("nothing\n", encoding="utf-8")
    legs = [record(row("connecting", "connected", "waiting", LEG), LEG, id="r1.1")]
    Path("log").write_bytes(as_lines([record(MOVED[0])] + (legs if "x.dot" in words else [])))

    code = cli.main(["replay", *words])

    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert said.err.startswith("baton replay: ")
    assert message in said.err
    assert said.err.count("\n") == 1


#### Pictures


def drawn_arrows(text: str) -> Iterator[str]:
    return (line.strip() for line in text.splitlines() if "->" in line and "initial" not in line)


def test_the_path_is_drawn_on_the_diagram(tmp_path: Path) -> None:
    (tmp_path / "r1.json").write_text(document(MOVED, "finished"), encoding="utf-8")

    assert cli.main(["replay", str(tmp_path / "r1.json"), "--draw", str(tmp_path / "r.dot")]) == 0
    assert cli.main(["replay", str(tmp_path / "r1.json"), "--draw", str(tmp_path / "r.mmd")]) == 0

    taken = [
        each
        for each in drawn_arrows((tmp_path / "r.dot").read_text(encoding="utf-8"))
        if "#1565c0" in each
    ]
    assert len(taken) == len(MOVED)
    # Ended by `completed` from its own state, though the plain picture draws that from the box.
    assert any(each.startswith("streaming -> finished") and "6. compl" in each for each in taken)
    assert "migrating --> resuming: 4. admitted" in (tmp_path / "r.mmd").read_text(encoding="utf-8")


@every_chart
def test_a_painted_picture_still_shows_every_row(chart: Chart) -> None:
    edge = chart.edges[-1]
    paint = path_paint("a path", [(None, each) for each in path_to(chart, edge)], stays={})

    for text in (dot(chart, paint), mermaid(chart, paint)):
        words = [edge.fact for edge in chart.edges if edge.fact not in grouped(chart)]
        assert [word for word in words if word not in text] == []


def grouped(chart: Chart) -> set[str]:
    return {fact for facts in chart.groups.values() for fact in facts}


def test_where_a_fact_was_refused_is_red() -> None:
    paint = path_paint(
        "x", [(0.0, MOVED[0])], stays={}, refused_in=MOVED[0].target, refused="answered"
    )

    (line,) = [each for each in dot(REQUEST, paint).splitlines() if "refused answered" in each]
    assert "#c62828" in line
    assert "class dispatching refused" in mermaid(REQUEST, paint)


def test_counts_are_painted_on_the_arrows_and_in_the_states() -> None:
    ready = row("probing", "probe_passed", "ready", WORKER)
    state = ready.target
    text = dot(WORKER, counts_paint("live", {ready: 1234}, {state: 2}))

    assert "probe_passed ×1,234" in text
    assert 'ready [label="ready\\n2 now"' in text
    assert sum("#1565c0" in each for each in drawn_arrows(text)) == 1


@every_chart
def test_a_shared_arrow_tells_which_of_its_facts_were_taken(chart: Chart) -> None:
    for arrow in arrows(chart):
        words = sorted({edge.label for edge in arrow.edges})
        for word in words:
            taken = {edge: 3 for edge in arrow.edges if edge.label == word}
            paint = counts_paint("live", taken)
            total = 3 * len(taken)

            (drawn,) = [each for each in drawn_arrows(dot(chart, paint)) if "#1565c0" in each]
            faded = re.findall(r'<font color="#b0bec5"> +(.*?) </font>', drawn)
            others = [each for each in words if each != word]
            told = {line.removesuffix(" ×0") for line in faded}
            assert {*told, *(f for g in told for f in in_group(chart, g))} >= set(others), drawn
            assert f" {word} ×{total}" in re.sub("<font.*?</font>", "", drawn)
            text = mermaid(chart, paint)
            assert f"{word} ×{total}" in text
            assert text.count("×") == 1 + len(faded)


def in_group(chart: Chart, label: str) -> list[str]:
    """The labels of the facts that a group's label stands for."""
    word, space, guard = label.partition(" ")
    return [f"{fact}{space}{guard}" for fact in chart.groups.get(word, ())]


def test_plain_pictures_and_paths_have_no_pale_words() -> None:
    path = path_paint("a path", [(0.0, each) for each in MOVED], stays={})

    assert "<font" not in dot(REQUEST) + dot(REQUEST, path)


def test_a_title_cannot_leave_its_quotes() -> None:
    text = dot(REQUEST, path_paint('a "quote\\', [(None, MOVED[0])], stays={}))

    assert "a 'quote/" in text
