"""Prometheus' text format 0.0.4, written piece by piece.

With thousands of workers the page has hundreds of thousands of lines, and the client library, which
makes an object of each, would stop every stream for seconds. Only that format is written here; what
the lines say is the caller's. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from prometheus_client.utils import floatToGoString

#: Lines of one piece: about a millisecond of work.
PIECE_LINES = 400

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def head_of(name: str, kind: str, help: str) -> str:
    """What stands above a family's lines."""
    shown = help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {shown}\n# TYPE {name} {kind}\n"


def pieces_of(
    name: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
) -> Iterator[str]:
    """The lines of a family; `samples` are label values, in the order of `labels`, and a value."""
    order = sorted(range(len(labels)), key=labels.__getitem__)
    shown = ",".join(f'{labels[each]}="%s"' for each in order)
    begin = f"{name}{{{shown}}}" if labels else name
    lines = (
        f"{begin % tuple([_escape(words[each]) for each in order])} {_number(value)}\n"
        for words, value in samples
    )
    while piece := "".join(islice(lines, PIECE_LINES)):
        yield piece


def _number(value: float) -> str:
    if type(value) is int and 0 <= value < 1_000_000:
        return f"{value}.0"
    shown: str = floatToGoString(value)  # type: ignore[no-untyped-call]  # of prometheus_client
    return shown


def _escape(word: str) -> str:
    return word.translate(_ESCAPES) if '"' in word or "\\" in word or "\n" in word else word
