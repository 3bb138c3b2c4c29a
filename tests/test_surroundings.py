"""The tests themselves, and `.ci/run`, do not depend on where they are run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 120.0

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("ulimit -S -n 200", "test_network.py::test_many_connections_at_once_are_all_accepted"),
        ("export HYPOTHESIS_STORAGE_DIRECTORY=/dev/null/no", "test_sse.py"),
        (
            "export PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 LC_ALL=C",
            "test_tidy.py::test_modules_say_why_they_exist",
        ),
        (
            'export TMPDIR="$HERE/a b"; mkdir "$TMPDIR"',
            "test_conform_loopback.py::test_what_is_no_program_is_told_of",
        ),
        ("export PATH=/nowhere", "test_adding_a_state.py::test_every_step_goes_as_the_page_says"),
    ],
)
def test_tests_pass(script: str, name: str, tmp_path: Path) -> None:
    typed = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{name}"]
    env = {key: value for key, value in os.environ.items() if not is_of_pytest(key)}
    ended = subprocess.run(
        ["/bin/sh", "-c", f'{script}; exec "$@"', "sh", *typed],
        cwd=ROOT,
        env=env | {"HERE": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout.decode(errors="replace")


def is_of_pytest(name: str) -> bool:
    return name == "CI" or name.startswith("PYTEST_")


def test_what_is_asked_before_a_merge_is_asked_alike_everywhere(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$PWD CI=$CI LC_ALL=$LC_ALL" $(cat) "$@"\n', encoding="utf-8")
    make.chmod(0o755)
    ended = subprocess.run(
        [ROOT / ".ci" / "run"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "CI": "no", "LC_ALL": "C"},
        input="of the terminal",
        stdout=subprocess.PIPE,
        encoding="utf-8",
        timeout=SECONDS,
        check=True,
    )

    where = f"{ROOT} CI=true LC_ALL=C.UTF-8"
    targets = ("setup", "lint types check demo", "test")
    assert ended.stdout.splitlines() == [f"{where} {each}" for each in targets]
