"""docs/adding-a-state.md is true: its diffs fit, and its commands print what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "adding-a-state.md"
COPIED = ("statemachines", "router", "tests", "docs", "diagrams", "pyproject.toml")
SECONDS = 120.0
KEPT = ("PATH", "HOME", "TMPDIR")
_BLOCK = re.compile(r"^```(diff|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def terminal(root: Path) -> dict[str, str]:
    """The environment of a person at a plain terminal in `root`.

    Nothing else of ours: pytest cuts its lines by `COLUMNS`, and not at all where `CI` is set.
    """
    kept = {name: value for name, value in os.environ.items() if name in KEPT}
    return kept | {
        "COLUMNS": "80",
        "PYTHONPATH": str(root),
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
    }


@frozen
class Diff:
    """Lines to find in a file, once, and what they become."""

    path: str
    before: str
    after: str

    @classmethod
    def read(cls, text: str) -> Diff:
        head, _, body = text.partition("\n")
        lines = body.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        return cls(head.removeprefix("# "), before, after)

    def apply(self, root: Path) -> None:
        path = root / self.path
        text = path.read_text(encoding="utf-8")
        assert text.count(self.before) == 1, f"{self.path} has not once:\n{self.before}"
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")


@frozen
class Command:
    """What is typed, and lines of what is printed; `...` stands for any others."""

    words: tuple[str, ...]
    printed: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Command:
        typed, *printed = text.splitlines()
        command = typed.removeprefix("$ ").replace(".venv/bin/baton", ".venv/bin/python -m router")
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command)]
        assert words[0] == ".venv/bin/python", typed
        return cls(tuple(words[1:]), tuple(line for line in printed if line != "..."))

    def run(self, root: Path) -> str:
        done = subprocess.run(
            [sys.executable, *self.words],
            cwd=root,
            env=terminal(root),
            encoding="utf-8",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
        )
        return done.stdout


def steps() -> Iterator[Diff | Command]:
    for kind, text in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        yield Diff.read(text) if kind == "diff" else Command.read(text)


def why_not(root: Path) -> str:
    """Why the steps cannot be taken there: somebody has begun to take them; or nothing."""
    first = next(step for step in steps() if isinstance(step, Diff))
    if first.after not in (root / first.path).read_text(encoding="utf-8"):
        return ""
    return f"{first.path} is past the first step of docs/{PAGE.name}: it needs another example"


def test_who_takes_the_steps_is_told_of_the_page(tmp_path: Path) -> None:
    first = next(step for step in steps() if isinstance(step, Diff))
    path = tmp_path / first.path
    path.parent.mkdir()
    path.write_text(first.before, encoding="utf-8")
    before = why_not(tmp_path)
    first.apply(tmp_path)

    assert before == ""
    assert "past the first step of docs/adding-a-state.md" in why_not(tmp_path)


FAILING = """
def test_of_a_long_name_that_takes_up_most_of_the_line_of_a_plain_terminal() -> None:
    assert "what fails" == "does so with many words"
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CI", "true"),
        ("BUILD_NUMBER", "7"),
        ("COLUMNS", "300"),
        ("FORCE_COLOR", "1"),
        ("PYTEST_ADDOPTS", "-rN"),
        ("PYTHONPATH", "elsewhere"),
    ],
)
def test_what_a_command_prints_is_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    (tmp_path / "test_it.py").write_text(FAILING, encoding="utf-8")
    command = Command.read("$ .venv/bin/python -m pytest -q test_it.py")
    monkeypatch.setenv(name, value)
    failed = [line for line in command.run(tmp_path).splitlines() if line.startswith("FAILED")]

    assert failed == [
        "FAILED test_it.py::test_of_a_long_name_that_takes_up_most_of_the_line_of_a_plain_terminal"
    ]


@pytest.mark.slow
def test_every_step_goes_as_the_page_says(tmp_path: Path) -> None:
    if reason := why_not(ROOT):
        pytest.skip(reason)
    if shutil.which("dot") is None:
        pytest.skip("no Graphviz here, and the steps draw")
    for name in COPIED:
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(place, tmp_path / name)

    for step in steps():
        if isinstance(step, Diff):
            step.apply(tmp_path)
            continue
        lines = iter(step.run(tmp_path).splitlines())
        seen: list[str] = []
        for expected in step.printed:
            for line in lines:
                seen.append(line)
                if line.rstrip() == expected.rstrip():
                    break
            else:
                pytest.fail(
                    f"{' '.join(step.words)} did not print {expected!r}:\n" + "\n".join(seen)
                )
