"""Rows of words as columns, for terminals."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """What is written to a terminal must not drive it."""
    return "".join(character for character in text if character.isprintable())


def counted(number: int, noun: str) -> str:
    """So many of them: one request, two requests."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def cut(text: str, width: int) -> str:
    """The text in at most so many characters. The middle goes first: ids differ at their ends."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[-end:]}"


def columns(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """The rows one below the other, each column as wide as its widest word."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(indent + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
