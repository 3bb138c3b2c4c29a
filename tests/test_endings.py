"""How commands end that cannot do what they are asked: one sentence, and one way for all."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from router import cli
from router.metrics import Metrics
from router.reasons import in_words
from statemachines import REQUEST
from tests.routers import Router, standing_in
from tests.test_live import House
from tests.test_replay import MOVED, as_lines, record

NOBODY = "http://127.0.0.1:1"


@pytest.fixture
def router() -> Iterator[Router]:
    with standing_in() as stand_in:
        metrics = Metrics(House())
        metrics.taken(REQUEST.name)[id(REQUEST.edges[0])] += 1
        stand_in.answer = metrics.render()
        stand_in.answers = {
            "/v1/workers": b'{"workers":[{"id":"w0"}]}',
            "/debug/requests": b'{"requests":[]}',
        }
        yield stand_in


#### Nobody answers


@pytest.mark.parametrize(
    "words",
    [
        ["watch", NOBODY],
        ["top", NOBODY],
        ["diagrams", "--live", NOBODY],
        ["workers", "list", "--router-url", NOBODY],
        ["workers", "add", "http://h:1", "--router-url", NOBODY],
        ["workers", "drain", "w0", "--router-url", NOBODY],
        ["workers", "remove", "w0", "--router-url", NOBODY],
    ],
    ids=" ".join,
)
def test_a_router_that_is_not_there_is_told_in_the_same_words(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)

    assert cli.main(words) == 1

    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"baton {words[0]}: {NOBODY}: Connection refused\n")


def wrapped(problem: BaseException) -> Exception:
    """As libraries hand it on."""
    inner = OSError("all attempts have failed")
    inner.__cause__ = ExceptionGroup("", [problem] if isinstance(problem, Exception) else [])
    outer = RuntimeError("[Errno 111] something")
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (ConnectionRefusedError(111, "('h', 1) said no"), "Connection refused"),
        (OSError(-2, "Name or service not known"), "Name or service not known"),
        (FileNotFoundError(2, "No such file or directory", "x"), "x: No such file or directory"),
        (ssl.SSLError(1, "[SSL] wrong version number (_ssl.c:1006)"), "Operation not permitted"),
        (ValueError("odd"), "[Errno 111] something"),
    ],
)  # fmt: skip
def test_what_the_system_has_said_is_found_within(problem: Exception, said: str) -> None:
    if isinstance(problem, ssl.SSLError):
        problem.reason, said = "WRONG_VERSION_NUMBER", "TLS failed: wrong version number"

    assert in_words(wrapped(problem)) == said


def test_an_error_without_a_word_is_told_by_its_name() -> None:
    assert in_words(TimeoutError()) == "TimeoutError"


#### What was to be written cannot be


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["replay", "log", "--draw", "no/x.dot"], 2, "no/x.dot: No such file or directory"),
        (["replay", "log", "--draw", "folder.dot"], 2, "folder.dot: Is a directory"),
        (["replay", "no"], 2, "no: No such file or directory"),
        (["replay", "folder.dot"], 2, "folder.dot: Is a directory"),
        (["diagrams", "--root", "taken"], 2, "taken/diagrams: File exists"),
        (["diagrams", "--live", "URL", "--output", "log/live"], 1, "log/live: Not a directory"),
    ],
    ids=str,
)
def test_a_file_that_cannot_be_written_or_read_is_named(
    words: list[str],
    code: int,
    said: str,
    router: Router,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log").write_bytes(as_lines([record(MOVED[0])]))
    Path("folder.dot").mkdir()
    Path("taken").mkdir()
    Path("taken/diagrams").touch()

    assert cli.main([router.url if word == "URL" else word for word in words]) == code
    assert capsys.readouterr().err == f"baton {words[0]}: {said}\n"


#### Nobody reads


@pytest.mark.slow
@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--print-config"],
        ["check", "the router"],
        ["check", "the router", "--explain", "it stops with nobody cut"],
        ["diagrams"],
        ["diagrams", "--live", "URL"],
        ["replay", "log"],
        ["top", "URL", "--every", "0.1"],
        ["workers", "list", "--router-url", "URL"],
    ],
    ids=" ".join,
)
def test_a_reader_that_is_gone_ends_it_quietly(
    words: list[str], is_buffered: bool, router: Router, tmp_path: Path
) -> None:
    assert unread(words, router, tmp_path, is_buffered=is_buffered) == (141, b"")


@pytest.mark.slow
def test_a_reader_of_help_that_is_gone_ends_it_quietly(router: Router, tmp_path: Path) -> None:
    assert unread(["--help"], router, tmp_path, is_buffered=True) == (141, b"")


def unread(
    words: list[str], router: Router, tmp_path: Path, *, is_buffered: bool
) -> tuple[int, bytes]:
    """Exit code and errors of a command of whose output nothing is read."""
    (tmp_path / "log").write_bytes(as_lines([record(MOVED[0])]))
    reader, writer = os.pipe()
    os.close(reader)

    ended = subprocess.run(
        [sys.executable, "-m", "router", *(router.url if w == "URL" else w for w in words)],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": os.getcwd(), "PYTHONUNBUFFERED": "" if is_buffered else "1"},
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=30,
        check=False,
    )
    os.close(writer)

    return ended.returncode, ended.stderr
