"""Verdicts as people and programs read them: a table, Markdown, JSON."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence

from router.conform.case import KNOBS, Case
from router.conform.cases import LEFT_OUT
from router.conform.routers import Candidate
from router.conform.running import Verdict
from router.conform.stage import Order, Seat

Results = Mapping[str, Mapping[str, Verdict]]
"""Verdicts by the names of router and case."""
_SHOWN_SEATS = {
    False: (Seat("ENGINE1", "mixed"), Seat("ENGINE2", "mixed")),
    True: (Seat("PREFILL", "prefill"), Seat("DECODE", "decode")),
}


def as_table(cases: Sequence[Case], results: Results) -> str:
    """A line a case, a column a router, then the reasons."""
    names = list(results)
    width = max(len(one.name) for one in cases)
    lines = ["  ".join([f"{'case':{width}}", f"{'':4}", *names])]
    reasons = []
    for one in cases:
        verdicts = [results[name].get(one.name) for name in names]
        shown = [
            f"{verdict.outcome if verdict else '':{len(name)}}"
            for name, verdict in zip(names, verdicts, strict=True)
        ]
        lines.append("  ".join([f"{one.name:{width}}", f"{one.complaint:4}", *shown]).rstrip())
        reasons += [
            f"{name}: {one.name}: {verdict.outcome}: {verdict.reason}"
            for name, verdict in zip(names, verdicts, strict=True)
            if verdict and verdict.reason
        ]
    return "\n".join([*lines, "", *reasons, *_sums(results)])


def _sums(results: Results) -> list[str]:
    return [f"{name}: {counted(verdicts)}" for name, verdicts in results.items()]


def counted(verdicts: Mapping[str, Verdict]) -> str:
    """How many passed, failed, and could not be tried."""
    found = [verdict.outcome for verdict in verdicts.values()]
    tried = f"{found.count('pass')} passed, {found.count('fail')} failed"
    return f"{tried}, {found.count('n/a')} not applicable"


def as_json(candidates: Sequence[Candidate], results: Results) -> str:
    """All verdicts, by router and case."""
    shown = {
        one.name: {
            "version": one.version,
            "cases": {
                name: {
                    "outcome": verdict.outcome,
                    "reason": verdict.reason,
                    "seconds": round(verdict.seconds, 2),
                }
                for name, verdict in results[one.name].items()
            },
        }
        for one in candidates
    }
    return json.dumps(shown, indent=2)


def as_markdown(cases: Sequence[Case], candidates: Sequence[Candidate], results: Results) -> str:
    """The matrix, what each case does, why cases failed, the flags, and what is left out."""
    return "\n\n".join(
        [
            _markdown_matrix(cases, candidates, results),
            "## What is done and what is expected",
            _markdown_cases(cases),
            "## Why",
            *(_markdown_reasons(one, results[one.name]) for one in candidates),
            "## How each router was started",
            *(_markdown_commands(one) for one in candidates),
            "### What single cases add",
            _markdown_knobs(candidates),
            "## What is not tried",
            _markdown_left_out(),
        ]
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _markdown_matrix(
    cases: Sequence[Case], candidates: Sequence[Candidate], results: Results
) -> str:
    heads = [f"{one.name} {one.version}".strip() for one in candidates]
    lines = [_row("case", "", *heads), _row(*["---"] * (2 + len(heads)))]
    for one in cases:
        shown = [
            _MARKS[verdict.outcome] if (verdict := results[each.name].get(one.name)) else ""
            for each in candidates
        ]
        lines.append(_row(one.name, one.complaint, *shown))
    lines.append(_row("", "", *(_passed(results[each.name]) for each in candidates)))
    return "\n".join(lines)


_MARKS = {"pass": "pass", "fail": "**fail**", "n/a": "n/a"}


def _passed(verdicts: Mapping[str, Verdict]) -> str:
    tried = [one.outcome for one in verdicts.values() if one.outcome != "n/a"]
    return f"{tried.count('pass')} of {len(tried)}"


def _markdown_cases(cases: Sequence[Case]) -> str:
    lines = [_row("case", "done", "expected"), _row("---", "---", "---")]
    lines += [_row(one.name, one.done, one.expected) for one in cases]
    return "\n".join(lines)


def _markdown_left_out() -> str:
    lines = [_row("complaint", "why"), _row("---", "---")]
    return "\n".join([*lines, *(_row(complaint, why) for complaint, why in LEFT_OUT.items())])


def _markdown_reasons(one: Candidate, verdicts: Mapping[str, Verdict]) -> str:
    lines = [f"### {one.name} {one.version}".rstrip(), ""]
    told = [f"- {name}: {each.reason}" for name, each in verdicts.items() if each.reason]
    return "\n".join([*lines, *(told or ["Nothing failed."])])


def _markdown_commands(one: Candidate) -> str:
    """The command lines, without what single cases add."""
    pd = [_command(one, is_pd=True)] if one.pd is not None else []
    head = f"### {one.name} {one.version}".rstrip()
    lines = [head, "", f"Engines: {_engines(one)}.", "", "```"]
    return "\n".join([*lines, _command(one, is_pd=False), *pd, "```"])


def _engines(one: Candidate) -> str:
    return f"{one.engine}; pairs: {one.pd_engine}" if one.pd is not None else one.engine


def _command(one: Candidate, *, is_pd: bool) -> str:
    order = Order(_SHOWN_SEATS[is_pd], {}, one.engine)
    words = one.words(order, port=0, metrics_port=0, folder="")
    program = "python" if words[0] == sys.executable else words[0]
    text = " ".join([program, *("PORT" if word == "0" else word for word in words[1:])])
    return textwrap.fill(text, 100, subsequent_indent="    ", break_on_hyphens=False)


def _markdown_knobs(candidates: Sequence[Candidate]) -> str:
    """What cases may want, and the flags for it."""
    lines = [_row("what a case may want", *(one.name for one in candidates))]
    lines.append(_row(*["---"] * (1 + len(candidates))))
    for knob, text in KNOBS.items():
        flags = [one.flags.get(knob) for one in candidates]
        lines.append(_row(f"{knob}: {text}", *map(_shown_flags, flags)))
    return "\n".join(lines)


def _shown_flags(flags: str | None) -> str:
    if flags is None:
        return "none"
    return f"`{flags}`" if flags else "by default"
