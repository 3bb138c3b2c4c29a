"""What `baton replay` says of files that are not what it reads, or not all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router import cli
from statemachines import LEG
from tests.test_replay import MOVED, as_lines, document, record, row

#### Nothing to replay


def line(**changed: object) -> bytes:
    """A line of a log, changed."""
    return as_lines([record(MOVED[0])], **changed)


#: What each kind of file is told, if there is nothing in it to replay.
NOTHING: dict[str, tuple[bytes, str]] = {
    "nothing at all": (b"", "it is empty"),
    "blank": (b"\n \n", "it is empty"),
    "an answer that is cut off": (b'{"id":"r1","transi', "its JSON is cut off after 18 bytes"),
    "one that jq has laid out": (b'{\n  "id": "r1",\n  "tr', "its JSON is cut off after 21 bytes"),
    "a list that is cut off": (b"[" * 20, "its JSON is cut off after 20 bytes"),
    "nesting without end": (b"[" * 100_000, "no transitions in it (1 line)"),
    "broken JSON": (b'{"id":}', "its JSON is broken: JSON is malformed: "),
    "a list": (b"[]", "JSON of another kind: a list, "),
    "a number": (b"7", "JSON of another kind: a number, "),
    "null": (b"null", "JSON of another kind: null, "),
    "true": (b"true", "JSON of another kind: true or false, "),
    "a text": (b'"x"', "JSON of another kind: a text, "),
    "an object": (b"{}", "JSON of another kind: an object, "),
    "workers": (
        b'{"workers":[],"x":1}',
        "an object with workers, x, neither a request's answer nor",
    ),
    "a list of requests": (b'{"requests":[]}', "record one with /debug/requests/ID"),
    "an error": (
        b'{"error":{"message":"No such request.","code":"not_found"}}',
        "the router's answer is an error: No such request.",
    ),
    "a request that waits": (
        b'{"id":"r1","state":"queued","transitions":[]}',
        "request r1 has no transitions yet: it is queued",
    ),
    "a request without a state": (
        b'{"id":"r1","transitions":[]}',
        "not the answer of /debug/requests/ID: Object missing required field `state`",
    ),
    "a request with a strange transition": (
        b'{"id":"r1","state":"queued","transitions":[{"machine":1}]}',
        "Expected `str`, got `int` - at `$.transitions[0].machine`",
    ),
    "a log at info": (
        b"baton: listening\n{}\n",
        "no transitions in it (2 lines); a router's log has",
    ),
    "a strange line": (line(id=7), "no whole transition in it: line 1: Expected `str`, got `int`"),
    "only what is missing": (b'{"lost":2}\n', "no transitions in it (1 line)"),
    "strangely missing": (b'{"lost":"x"}', "no transitions in it (1 line)"),
    "one cut line": (line()[:40], "its JSON is cut off after 40 bytes"),
    "a cut line alone": (b"baton: listening\n" + line()[:40], "no transitions in it (2 lines)"),
    "compressed": (b"\x1f\x8b\x08\x00", "it is compressed; "),
    "what watch shows": (
        b"time (UTC)    machine  id  \n08:23 request 7\n",
        "with --json it writes",
    ),
    "no text": (b"\xff\xfe{\x00", "it is no text"),
    "half of a character": (b'{"id":"\xc3', "it is no text"),
}


@pytest.mark.parametrize(("data", "said"), NOTHING.values(), ids=NOTHING)
def test_what_holds_nothing_to_replay_is_told_in_one_line(
    data: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(data)

    code = cli.main(["replay", str(tmp_path / "file")])

    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"baton replay: {tmp_path}/file: ")
    assert said in err


def replayed(
    data: bytes, capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str
) -> tuple[int, list[str]]:
    """Exit code and lines."""
    (tmp_path / "file").write_bytes(data)
    code = cli.main(["replay", str(tmp_path / "file"), *words])
    return code, capsys.readouterr().out.splitlines()


def test_a_refusal_says_where_it_stands_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = line(fact="overloaded", time="2026-01-01T00:00:01.500Z", id="r1\u001b[31m")

    code, said = replayed(b"baton: listening\n" + wrong, capsys, tmp_path)

    assert code == 1
    assert any(each.startswith("  recorded in line 2, 2026-01-01T00:00:01.500Z: ") for each in said)
    assert not any("\u001b" in each for each in said)


LOG = as_lines([record(edge) for edge in MOVED], time="2026-01-01T00:00:01.500Z")
CUT = "note: the last line is cut off, and what stood there is missing"


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_log_whose_last_line_is_cut_is_replayed_up_to_there(
    kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = line().rstrip()

    code, said = replayed(LOG + last[:kept], capsys, tmp_path)

    assert code == 3
    assert said[0] == "request r1: 6 facts in 0.000 s, finished"
    assert said[-3:] == [CUT, "", "1 subject, 6 facts; all legal"]


def test_a_last_line_without_its_newline_is_not_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = replayed(LOG.rstrip(), capsys, tmp_path)

    assert (code, said[-1]) == (0, "1 subject, 6 facts; all legal")
    assert "note" not in "".join(said)


def test_a_refusal_outweighs_a_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = replayed(line() + line() + line(source="lit") + b'{"ti', capsys, tmp_path)

    assert code == 1
    assert CUT in said


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (b'{"machine":"request","id"\n', "line 2 is broken JSON, and what stood there is missing"),
        (b'{"a":\n' * 3, "3 lines from 2 on are broken JSON, and what stood there is missing"),
        (
            line(fact=None),
            "1 line is no whole transition, and missing (line 2: Expected `str`, got",
        ),
    ],
)
def test_a_broken_line_is_told_of_and_excuses_what_it_may_have_held(
    broken: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (as_lines([record(MOVED[place])]) for place in (0, 2))

    code, lines = replayed(first + broken + second, capsys, tmp_path)

    assert code == 3
    assert any(each.startswith(f"note: {said}") for each in lines)
    assert lines[-1].startswith("2 subjects, 2 facts; all legal; ")


#### Times

#: Times of the first three facts, and what is said of them.
TIMES: dict[str, tuple[list[object], str]] = {
    "missing": ([0.5, None, 1.5], "1 fact without a time"),
    "all missing": ([None, None, None], "3 facts without a time"),
    "going back": ([0.5, 1.5, 1.0], "1 time before the one before, the first of request r1"),
    "before the beginning": ([-1.0, 0.5, 1.0], "1 time before the one before, "),
    "dates": (["2026-01-01T00:00:01Z", "2026-01-01 00:00:02", "2026-01-01T00:00:03+00:00"], ""),
    "a date among seconds": ([0.5, "2026-01-01T00:00:02Z", 1.5], "1 time before the one before"),
    "no date": ([0.5, "yesterday", 1.5], "1 time not readable, the first is 'yesterday'"),
    "a number as a text": ([0.5, "1.0", 1.5], "1 time not readable, the first is '1.0'"),
    "the year one": ([0.5, "0001-01-01T00:00:00+14:00", 1.5], "1 time "),
    "true": ([0.5, True, 1.5], "1 time not readable, the first is 'True'"),
    "a list": ([[], {}, 1.5], "2 times not readable, the first is '[]'"),
    "without end": ([0.5, 1e300, 1.5], "1 time not readable, "),
    "an integer without end": ([0.5, 10**400, 1.5], "1 time not readable, "),
    "lines in it": (["x\n\x1b[2J" * 99, 1, 2], "1 time not readable, the first is 'x [2Jx"),
}


@pytest.mark.parametrize(("times", "said"), TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("form", ["answer", "lines", "log"])
def test_odd_times_are_told_in_a_sentence(
    form: str, times: list[object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "time" if form == "log" else "seconds"
    if form == "answer":
        whole = json.loads(document(MOVED[:3], "migrating"))
        for each, time in zip(whole["transitions"], times, strict=True):
            each[key] = time
        data = json.dumps(whole).encode()
    else:
        pairs = zip(MOVED, times, strict=False)
        data = b"".join(as_lines([record(edge)], **{key: time}) for edge, time in pairs)

    code, lines = replayed(data, capsys, tmp_path)

    assert code == 0
    assert lines[0].startswith("request r1: 3 facts")
    notes = [each for each in lines if each.startswith("note: ")]
    is_before = said.startswith("1 time before the one") and times[0] == -1.0
    if not said or (is_before and form != "answer"):
        assert notes == []  # a log begins with its first fact, whenever that was
    else:
        assert any(each.startswith(f"note: {said}") for each in notes), notes


def test_lines_of_two_clocks_are_shown_by_the_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    day = "2026-01-01T00:00:0"
    watched = as_lines([record(MOVED[0])], seconds=9000.0, time=f"{day}1Z")
    logged = as_lines([record(MOVED[1])], time=f"{day}3Z")
    bare = as_lines([record(MOVED[2])], seconds=9009.0)

    _, both = replayed(watched + logged, capsys, tmp_path)
    _, mixed = replayed(watched + logged + bare, capsys, tmp_path)

    assert both[0] == "request r1: 2 facts in 2.000 s, streaming"
    assert both[-1] == "1 subject, 2 facts; all legal"
    assert "note: its times are of two clocks, and only those of the day are shown" in mixed
    assert "note: 1 fact without a time" in mixed


@pytest.mark.parametrize(("count", "said"), [(1, "1 other line"), (2, "2 other lines")])
def test_lines_that_were_passed_over_are_counted(
    count: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, shown = replayed(b"baton: listening\n" * count + line(), capsys, tmp_path)

    assert shown[-1] == f"1 subject, 1 fact; all legal; {said}"


#### Nothing that was asked for


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--machine", "lamp"], "--machine lamp: there is no such machine; there are request, leg"),
        (["--machine", "router"], "--machine router: none is recorded; there are request, leg"),
        (
            ["--id", "x"],
            "--id x: none is recorded; there are r0, r1, r2, r3, r4, r5, r6, r7 and 23",
        ),
        (["--machine", "leg", "--id", "r0"], "--id r0: none is recorded; there are r9.1"),
    ],
)
def test_who_asks_for_what_is_not_there_is_told_what_is(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    legs = [record(row("connecting", "connected", "waiting", LEG), LEG, id="r9.1")]
    (tmp_path / "log").write_bytes(
        as_lines([*(record(MOVED[0], id=f"r{number}") for number in range(30)), *legs])
    )

    code = cli.main(["replay", str(tmp_path / "log"), *words])

    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"baton replay: {said}")
