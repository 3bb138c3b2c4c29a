"""`baton check` and `baton diagrams`: the state machines proven and drawn, and nothing served.

What they need is imported when they run, so that the help of all commands answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from router.commands.mistakes import complain


def add_check(parser: argparse.ArgumentParser) -> None:
    """Models, and how deep to look."""
    parser.epilog = (
        "In the tables of --explain and of broken promises a row is what happened and what is so "
        "after it. Columns of budgets (untried, ... left) say what is left; - where it is over "
        "and nobody asks."
    )
    parser.add_argument("model", nargs="*", help="only these, by the names that are printed")
    parser.add_argument(
        "--explain",
        metavar="PROPERTY",
        help="instead, show the shortest path on which this promise (or the only one with these "
        "words) is put to the test",
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="the same with larger budgets: more than a million states, in minutes",
    )
    parser.set_defaults(command=_check)


def _check(arguments: argparse.Namespace) -> int:
    from statemachines.check import models, run_checks

    names = [model.name for model in models()]
    if unknown := [name for name in arguments.model if name not in names]:
        return complain("check", f"no model is called {unknown[0]!r}; there are {', '.join(names)}")
    if arguments.explain is not None and arguments.deep:
        return complain("check", "--explain looks for the shortest path, so --deep adds nothing")
    if arguments.explain is not None:
        return _explain(arguments.explain, arguments.model or names)
    is_terminal = sys.stderr.isatty()
    report = run_checks(
        _show_progress if is_terminal else None,
        deep=arguments.deep,
        only=arguments.model or None,
    )
    if is_terminal:
        print(f"\r{'':70}\r", end="", file=sys.stderr, flush=True)
    print(report)
    return 0 if report.is_good else 1


def _show_progress(model: str, seen: int, waiting: int) -> None:
    line = f"{model}: {seen:,} states, {waiting:,} waiting"
    print(f"\r{line:70}", end="", file=sys.stderr, flush=True)


def _explain(words: str, names: Sequence[str]) -> int:
    from statemachines.check import models
    from statemachines.explain import Ambiguous, explain_all

    try:
        print(explain_all([model for model in models() if model.name in names], words))
    except Ambiguous as problem:
        sentence = f"no promise has the words {words!r}; there are"
        if problem.fits:
            sentence = f"several promises have the words {words!r}; write out one of"
        code = complain("check", sentence)
        for model, promises in problem.promises.items():
            print("\n".join([f"{model}:", *(f"  {each}" for each in promises)]), file=sys.stderr)
        return code
    return 0


def add_diagrams(parser: argparse.ArgumentParser) -> None:
    """What to write or to compare, and where."""
    parser.add_argument(
        "--check", action="store_true", help="only compare; exit 1 where a file is not up to date"
    )
    parser.add_argument(
        "--root", default=".", metavar="DIR", help="where diagrams/ and docs/ are (default .)"
    )
    parser.add_argument(
        "--live",
        metavar="URL",
        help="instead, paint the counts of this router's /metrics on the diagrams",
    )
    parser.add_argument(
        "--output",
        default="diagrams-live",
        metavar="DIR",
        help="where the live pictures go (default diagrams-live)",
    )
    parser.set_defaults(command=_diagrams)


def _diagrams(arguments: argparse.Namespace) -> int:
    if arguments.live is not None:
        if arguments.check:
            return complain("diagrams", "--check compares the plain pictures; it is not for --live")
        return _live_diagrams(arguments)
    if not Path(arguments.root).is_dir():
        return complain("diagrams", f"--root {arguments.root}: no such directory")
    from router.reference import blocks
    from statemachines.generated import NotDrawn, UnknownBlock, stale, write

    root = Path(arguments.root)
    try:
        found = stale(root, blocks()) if arguments.check else write(root, blocks())
    except (NotDrawn, UnknownBlock, OSError) as problem:
        return complain("diagrams", problem)
    for path in found:
        print(f"{'not up to date' if arguments.check else 'written'}: {path}")
    return 1 if found and arguments.check else 0


def _live_diagrams(arguments: argparse.Namespace) -> int:
    from router.commands.live import CannotPaint, draw_live
    from router.commands.remote import RemoteError
    from statemachines.generated import NotDrawn

    folder = Path(arguments.output)
    if folder.resolve() == (Path(arguments.root) / "diagrams").resolve():
        return complain("diagrams", f"{folder} is for the plain pictures; choose another --output")
    try:
        drawn = draw_live(arguments.live, folder)
    except (CannotPaint, NotDrawn, RemoteError, OSError) as problem:
        complain("diagrams", problem)
        return 1
    print(drawn)
    return 0
