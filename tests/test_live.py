"""A running router's counts on the diagrams: what its page says is what the pictures show."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest
from attrs import frozen

from router import cli
from router.commands.live import live_paint, read_metrics
from router.metrics import Metrics
from statemachines import BREAKER, REQUEST, ROUTER_CHARTS, WORKER, Chart
from statemachines.breaker import BreakerState
from statemachines.draw import arrows, dot
from statemachines.request import RequestState
from statemachines.worker import WorkerState
from tests.routers import Router, standing_in
from tests.test_replay import as_lines, record


@pytest.fixture
def router() -> Iterator[Router]:
    with standing_in() as stand_in:
        yield stand_in


@frozen
class Live:
    state: Enum


@frozen
class LiveWorker:
    id: str
    state: Enum
    breaker: Live
    role: str = "mixed"
    inflight: int = 0


@frozen
class House:
    """Two requests, and two workers of which one has a name that the page has to escape."""

    def open_requests(self) -> list[Live]:
        return [Live(RequestState.STREAMING), Live(RequestState.STREAMING)]

    def workers(self) -> list[LiveWorker]:
        closed, half_open = Live(BreakerState.CLOSED), Live(BreakerState.HALF_OPEN)
        return [
            LiveWorker("w0", WorkerState.READY, closed),
            LiveWorker('w"1\\,state="gone"', WorkerState.DRAINING, half_open),
        ]


def page_of(chart: Chart) -> tuple[str, dict[str, int]]:
    """The page after every row was taken, each a number of times of its own."""
    metrics = Metrics(House())
    expected = {}
    for number, edge in enumerate(chart.edges, 1):
        metrics.taken(chart.name)[id(edge)] += number
        expected[f"{edge.source.value} {edge.fact} {edge.target.value}"] = number
    return metrics.render().decode(), expected


@pytest.mark.parametrize("chart", ROUTER_CHARTS, ids=lambda chart: chart.name)
def test_every_row_is_painted_with_its_own_count(chart: Chart) -> None:
    page, expected = page_of(chart)

    paint = live_paint(chart, list(read_metrics(page)), "now")

    assert {
        f"{edge.source.value} {edge.fact} {edge.target.value}": count
        for edge, count in paint.counts.items()
    } == expected


@pytest.mark.parametrize("chart", ROUTER_CHARTS, ids=lambda chart: chart.name)
def test_what_the_legend_says_of_lines_holds_of_painted_ones(chart: Chart) -> None:
    paint = live_paint(chart, list(read_metrics(page_of(chart)[0])), "now")

    lines = [line for line in dot(chart, paint).splitlines() if " -> " in line]

    drawn = arrows(chart)
    assert sum("style=dashed" in line for line in lines) == sum(each.is_fallback for each in drawn)
    for scope in chart.scopes:
        boxed = [line for line in lines if f'ltail="cluster_{scope}"' in line]
        assert len(boxed) == sum(each.box == scope for each in drawn)
        assert all(f"anywhere in {scope}:" in line for line in boxed)


@pytest.mark.parametrize(
    ("chart", "notes"),
    [
        (REQUEST, {RequestState.STREAMING: "2 now"}),
        (WORKER, {WorkerState.READY: "1 now", WorkerState.DRAINING: "1 now"}),
        (BREAKER, {BreakerState.CLOSED: "1 now", BreakerState.HALF_OPEN: "1 now"}),
    ],
)
def test_states_say_how_many_are_in_them(chart: Chart, notes: dict[Enum, str]) -> None:
    page, _ = page_of(chart)

    paint = live_paint(chart, list(read_metrics(page)), "now")

    assert paint.notes == notes


def test_live_pictures_go_into_their_own_folder(
    router: Router, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router.answer = page_of(REQUEST)[0].encode()
    folder = tmp_path / "live"

    code = cli.main(["diagrams", "--live", router.url, "--output", str(folder)])

    said = capsys.readouterr().out
    assert code == 0
    drawn = {each.name for each in folder.iterdir() if each.suffix == ".dot"}
    assert drawn == {f"{chart.name}.dot" for chart in ROUTER_CHARTS}
    assert "admitted ×1" in (folder / "request.mmd").read_text(encoding="utf-8")
    assert ["request", f"{sum(range(1, len(REQUEST.edges) + 1)):,}"] in [
        line.split()[:2] for line in said.splitlines()
    ]


def test_they_never_replace_the_plain_ones(
    router: Router, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router.answer = page_of(REQUEST)[0].encode()
    (tmp_path / "diagrams").mkdir()
    committed = tmp_path / "elsewhere" / "request.dot"
    committed.parent.mkdir()
    committed.write_text(dot(REQUEST), encoding="utf-8")

    by_name = ["--root", str(tmp_path), "--output", str(tmp_path / "diagrams")]
    by_content = ["--output", str(committed.parent)]
    for words in (by_name, by_content):
        assert cli.main(["diagrams", "--live", router.url, *words]) != 0
        assert "is for the plain" in (said := capsys.readouterr().err) or "holds the plain" in said

    assert committed.read_text(encoding="utf-8") == dot(REQUEST)


def test_the_address_of_the_metrics_is_understood_too(router: Router, tmp_path: Path) -> None:
    router.answer = page_of(REQUEST)[0].encode()

    assert cli.main(["diagrams", "--live", f"{router.url}/metrics", "--output", str(tmp_path)]) == 0
    assert router.asked == [("GET", "/metrics", None, None)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--check", "--live", "http://h"], "it is not for --live"),
        (["--root", "nowhere"], "--root nowhere: no such directory"),
        (["--check", "--root", "nowhere"], "--root nowhere: no such directory"),
        (["--live", ""], "nothing: not the URL of a router (http://HOST:PORT)"),
        (["--live", "h:1"], "h:1: not the URL of a router (http://HOST:PORT)"),
        (["--live", "http://127.0.0.1:1"], "diagrams: http://127.0.0.1:1: Connection refused"),
        (["--live", "http://h", "--output", "file"], "file is no directory; choose another"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()

    assert cli.main(["diagrams", *words]) != 0

    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_what_graphviz_complains_of_is_one_line(
    router: Router,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = tmp_path / "dot"
    program.write_text(
        "#!/bin/sh\ncat > /dev/null\necho 'Error: no expat,\nsorry' >&2\nexit 3\n", encoding="utf-8"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    router.answer = page_of(REQUEST)[0].encode()
    edge = REQUEST.edges[0]
    log = tmp_path / "log"
    log.write_bytes(as_lines([record(edge)]))

    for words in (
        ["diagrams", "--live", router.url, "--output", str(tmp_path / "live")],
        ["diagrams", "--root", str(tmp_path)],
        ["replay", str(log), "--draw", str(tmp_path / "x.svg")],
    ):
        assert cli.main(words) != 0
        said = f"baton {words[0]}: {program} has failed (3): Error: no expat, sorry\n"
        assert capsys.readouterr().err == said


def test_a_document_that_asks_for_no_such_block_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text(
        "<!-- generated: moon -->\n<!-- /generated -->\n", encoding="utf-8"
    )

    assert cli.main(["diagrams", "--check", "--root", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "baton diagrams: README.md: no generated block is called moon\n"
    )


def test_a_page_of_somebody_else_is_refused(
    router: Router, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router.answer = b'up 1\nvllm:num_requests{model="x"} nonsense\n'

    code = cli.main(["diagrams", "--live", router.url, "--output", str(tmp_path)])

    assert code == 1
    assert "no counts of transitions" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
