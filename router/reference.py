"""The parts of docs/ that are written from tables: options, metrics, reasons not to move.

`baton diagrams` puts them between the markers in docs/, next to what comes from the charts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from router.agent.settings import OPTIONS as AGENT_OPTIONS
from router.config import OPTIONS, unavailable_notes
from router.migration.poison import Poison
from router.options import Option
from router.series import DURATION_BOUNDS, FIRST_TOKEN_BOUNDS, TABLE, Label, Metric


def blocks() -> dict[str, str]:
    """The generated blocks, by the name that documents ask for."""
    bounds = {"duration-bounds": DURATION_BOUNDS, "first-token-bounds": FIRST_TOKEN_BOUNDS}
    made = {
        "options": _lines(_options(OPTIONS)),
        "agent-options": _lines(_options(AGENT_OPTIONS)),
        "metrics": _lines(_metrics()),
        "poison": _lines(_poison()),
    }
    return made | {name: ", ".join(f"{b:g}" for b in of) + "\n" for name, of in bounds.items()}


def _options(table: Iterable[Option]) -> Iterator[str]:
    notes = unavailable_notes()
    for section, rows in groupby(table, key=lambda each: each.section):
        yield f"### {section}\n"
        yield "| flag | default | meaning |"
        yield "|---|---|---|"
        for each in rows:
            yield _option_row(each, notes.get(each.key))
        yield ""


def _option_row(each: Option, note: str | None) -> str:
    values = " ".join(
        word if i == 0 else f"[{word}]" for i, word in enumerate(each.kind.metavar.split())
    )
    meaning = each.help[0].upper() + each.help[1:]
    if each.kind.choices:
        meaning += f": {', '.join(f'`{choice}`' for choice in each.kind.choices)}"
    remarks = [
        *([f"Also `{'`, `'.join(each.aliases)}`."] if each.aliases else []),
        *(["*(addition)*"] if each.addition else []),
        *([f"*({note})*"] if note else []),
    ]
    default = f"`{each.default_text}`" if each.default_text else ""
    meaning = " ".join([f"{meaning}.", *remarks]).replace("|", "\\|")
    return f"| `{each.flag} {values}` | {default} | {meaning} |"


def _metrics() -> Iterator[str]:
    yield "| metric | kind | labels | what it counts |"
    yield "|---|---|---|---|"
    for row in TABLE:
        labels = "; ".join(map(_label, row.labels))
        yield f"| `{row.name}` | {row.kind} | {labels} | {_metric_text(row)} |"


def _poison() -> Iterator[str]:
    yield "| reason | why it does not move |"
    yield "|---|---|"
    for reason in Poison:
        yield f"| `{reason.value}` | {reason.why} |"


def _label(label: Label) -> str:
    # The rows of all charts are a page of their own.
    if not label.values or label.name in ("machine", "source", "fact", "target"):
        return f"`{label.name}`"
    return f"`{label.name}` = {', '.join(f'`{value}`' for value in label.values)}"


def _metric_text(row: Metric) -> str:
    return f"{row.help} *(addition)*" if row.addition else row.help


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"
