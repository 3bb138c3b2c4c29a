"""What was typed makes no sense: one line on standard error and exit code 2."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from router.reasons import in_words


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: sixty flags of usage would bury it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def complain(command: str, problem: object) -> int:
    """Say on standard error what is wrong and return the exit code of a mistake."""
    said = in_words(problem) if isinstance(problem, OSError) else problem
    print(f"baton {command}: {said}", file=sys.stderr)
    return 2
