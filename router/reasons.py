"""What the system has said, as a reader of one line wants it: in words and without its numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator


def in_words(problem: BaseException) -> str:
    """What went wrong, and before it the file that it is about, where it is about one.

    Libraries wrap what the system has said, more than once; that is looked for within.
    """
    for each in _within(problem):
        if isinstance(each, OSError) and (said := _said_by(each)):
            return f"{each.filename}: {said}" if each.filename else said
    return str(problem) or type(problem).__name__


def _within(problem: BaseException | None) -> Iterator[BaseException]:
    while problem is not None:
        yield problem
        if isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        else:
            # httpx says `from None` on its way, and then only the context is left.
            problem = problem.__cause__ or problem.__context__


def _said_by(problem: OSError) -> str | None:
    # Of TLS, without importing it: its numbers are not those of the system.
    if (reason := getattr(problem, "reason", None)) is not None:
        return f"TLS failed: {str(reason).replace('_', ' ').lower()}"
    if problem.errno is not None and problem.errno > 0:
        return os.strerror(problem.errno)  # what stands in it can be a longer sentence
    return problem.strerror
