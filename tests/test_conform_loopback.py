"""`baton conform` on real sockets, with routers as processes: the command itself."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from router.cli import main

#: A relay of bytes, which looks at nothing.
RELAY = "--launch=relay={python} -m benchmarks.relay {port} {workers}"


@pytest.mark.slow
def test_baton_passes_and_the_exit_code_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["baton", "--only", "cut-is-told", "leaves-silent-stream", "prefill-fails"]

    code = main(["conform", *words, "--json", "--logs", str(tmp_path)])

    cases = json.loads(capsys.readouterr().out)["baton"]["cases"]
    assert {name: one["outcome"] for name, one in cases.items()} == {
        "leaves-silent-stream": "pass",
        "cut-is-told": "pass",
        "prefill-fails": "pass",
    }
    assert code == 0
    assert "listening" in (tmp_path / "baton-cut-is-told.log").read_text(encoding="utf-8")


@pytest.mark.slow
def test_any_router_can_be_tried_and_a_failure_is_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["conform", RELAY, "--only", "abort-is-no-end", "cap-holds", "C5"])

    table = capsys.readouterr().out
    assert code == 1
    assert "relay: abort-is-no-end: fail: the stream ends as if all were well" in table
    assert "relay: cap-holds: n/a: no flag for 'cap'" in table
    assert "relay: prefill-fails: n/a: no command line for prefill/decode pairs" in table
    assert "relay: 0 passed, 1 failed, 3 not applicable" in table


DYING = """\
import sys
print("looking for a GPU", flush=True)
sys.exit("no such device: /dev/gpu9")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, said",
    [
        (DYING, "with exit status 1, saying: looking for a GPU | no such device: /dev/gpu9"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9, without a word"),
    ],
)
def test_a_router_that_dies_at_once_is_told_of_with_its_last_words(
    script: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dying.py").write_text(script, encoding="utf-8")
    program = shlex.quote(str(tmp_path / "dying.py"))
    launch = f"--launch=dying={{python}} {program} {{port}} {{workers}}"

    code = main(["conform", launch, "--only", "cut-is-told", "--json"])

    verdict = json.loads(capsys.readouterr().out)["dying"]["cases"]["cut-is-told"]
    assert code == 1
    assert verdict["reason"] == f"it has ended before it served: {said}"
    assert verdict["seconds"] < 20


@pytest.mark.slow
def test_what_is_no_program_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "router"
    script.write_text("not a program\n", encoding="utf-8")
    script.chmod(0o755)

    code = main(
        [
            "conform",
            f"--launch=mine={shlex.quote(str(script))} {{port}} {{workers}}",
            "--only",
            "cut-is-told",
            "--json",
        ]
    )

    verdict = json.loads(capsys.readouterr().out)["mine"]["cases"]["cut-is-told"]
    assert code == 1
    assert verdict["reason"] == f"{script} cannot be started: Exec format error"


def test_a_fleet_that_was_not_described_is_no_case(capsys: pytest.CaptureFixture[str]) -> None:
    launch = "--launch=mine={python} nowhere {port} {fleet}"

    assert main(["conform", launch, "--only", "cut-is-told"]) == 0
    assert "n/a: nothing to put for {fleet} (--set 'mine.mixed=... {workers}')" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "words, said",
    [
        (["nobody"], "there is no router 'nobody'"),
        (["--only", "C99"], "there is no case C99"),
        (["--only", "C17"], "it is left out"),
        (["--launch", "mine=./mine"], "has no {port}"),
        (["--launch", "mine=./not-there {port} {workers}"], "there is no ./not-there"),
        (["--launch", "mine"], "must be NAME=COMMAND"),
        (["--launch", "={port} {workers}"], "must be NAME=COMMAND"),
        (["--launch", "a/b={port} {workers}"], "must be NAME=COMMAND"),
        (["--launch", "a.b={port} {workers}"], "must be NAME=COMMAND"),
        (["--launch", "mine=./mine {port}"], "no {workers}, so it would know of no engine"),
        (
            ["--launch", "mine=./mine {port} --to={workers}"],
            "must be a word of its own, not in --to=",
        ),
        (["--set", "baton.mixed=--to={workers}"], "must be a word of its own, not in --to="),
        (["baton", "--launch", "baton=./mine {port} {workers}"], "two routers are called baton"),
        (["--launch", "mine='./my router {port} {workers}"], "No closing quotation"),
        (["--launch", "mine='./my router' {port} {workers}"], "there is no ./my router"),
        (["--set", "baton.cap='4"], "No closing quotation"),
        (["--set", "mine"], "must be NAME.KEY=VALUE"),
        (["--set", "baton.cap"], "must be NAME.KEY=VALUE"),
        (["--set", "baton=4"], "must be NAME.KEY=VALUE"),
        (["--set", "baton.ready=readyz"], "a path, which begins with /"),
        (["--json", "--markdown"], "not allowed with argument --json"),
        (["--logs", "/proc/nowhere"], "--logs /proc/nowhere: No such file or directory"),
        (["--set", "mine.cap=4"], "not among the routers"),
        (["--set", "baton.colour=red"], "no such word"),
        (["--set", "baton.engine=red"], "one of vllm"),
        (["--jobs", "0"], "at least 1"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code: int | str | None
    try:
        code = main(["conform", *words])
    except SystemExit as ended:
        code = ended.code

    error = capsys.readouterr().err
    assert code == 2
    assert said in error
    assert error.count("\n") == 1
