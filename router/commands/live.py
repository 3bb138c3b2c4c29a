"""`baton diagrams --live URL`: the counts of a running router painted on the diagrams.

How often each row was taken stands on its arrow, which is the wider the more often that was; how
many requests, workers and breakers are in a state right now stands in its box. The pictures go into
a folder of their own, never over those that are committed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from attrs import frozen

from router.commands.columns import columns
from router.commands.remote import Api
from statemachines import BREAKER, REQUEST, ROUTER_CHARTS, WORKER, Chart, Edge
from statemachines.draw import dot, mermaid
from statemachines.generated import svg
from statemachines.paint import Paint, counts_paint

OUTPUT = "diagrams-live"
METRICS_PATH = "/metrics"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SERIES = re.compile(rf"(?P<name>\w+)\{{(?P<labels>(?:{_LABEL.pattern},?)*)\}} (?P<value>\S+)")
#: The series that say what is where at the moment.
_INSIDE = {
    REQUEST: "baton_requests_open",
    WORKER: "baton_worker_state",
    BREAKER: "baton_breaker_state",
}


class CannotPaint(Exception):
    """Where it should go, or what came, is not what it has to be; the message is one line."""


@frozen
class Sample:
    """One series of a page of metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


def draw_live(url: str, folder: Path) -> str:
    """Fetch, paint and write; returns what to print. Raises RemoteError, CannotPaint, OSError."""
    if folder.exists() and not folder.is_dir():
        raise CannotPaint(f"{folder} is no directory; choose another --output")
    if any(_is_plain(folder / f"{chart.name}.dot", chart) for chart in ROUTER_CHARTS):
        raise CannotPaint(f"{folder} holds the plain pictures; choose another --output")
    router = url.rstrip("/").removesuffix(METRICS_PATH)
    page = Api(router, None).ask("GET", METRICS_PATH).decode("utf-8", "replace")
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    samples = list(read_metrics(page))
    if not any(sample.name == "baton_transitions_total" for sample in samples):
        raise CannotPaint(f"{url}: no counts of transitions in its /metrics")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for chart in ROUTER_CHARTS:
        paint = live_paint(chart, samples, f"{url} at {now}")
        written = [_write(folder, chart, suffix, paint) for suffix in (".dot", ".mmd", ".svg")]
        files = " ".join(str(path) for path in written if path is not None)
        rows.append((chart.name, f"{sum(paint.counts.values()):,}", files))
    return columns([("machine", "transitions", "pictures"), *rows])


def live_paint(chart: Chart, samples: list[Sample], title: str) -> Paint:
    """How often each row of this chart was taken, and what is in each state."""
    counts: dict[tuple[str, ...], float] = {}
    inside: dict[str, float] = {}
    for sample in samples:
        if sample.name == "baton_transitions_total" and sample.labels.get("machine") == chart.name:
            row = tuple(sample.labels.get(key, "") for key in ("source", "fact", "target"))
            counts[row] = counts.get(row, 0) + sample.value
        elif sample.name == _INSIDE.get(chart):
            state = sample.labels.get("state", "")
            inside[state] = inside.get(state, 0) + sample.value
    return counts_paint(
        title,
        {edge: int(counts.get(_row(edge), 0)) for edge in chart.edges},
        {state: int(inside.get(str(state.value), 0)) for state in chart.states},
    )


def read_metrics(page: str) -> Iterator[Sample]:
    """The series of a page that have labels; their values as they are written there."""
    for line in page.splitlines():
        if (found := _SERIES.fullmatch(line)) is not None:
            try:
                value = float(found["value"])
            except ValueError:
                continue
            yield Sample(found["name"], dict(_LABEL.findall(found["labels"])), value)


def _row(edge: Edge) -> tuple[str, str, str]:
    return str(edge.source.value), edge.fact, str(edge.target.value)


def _write(folder: Path, chart: Chart, suffix: str, paint: Paint) -> Path | None:
    """Write one picture; None for an SVG where Graphviz is not installed."""
    path = folder / f"{chart.name}{suffix}"
    text = mermaid(chart, paint) if suffix == ".mmd" else dot(chart, paint)
    drawn = svg(text) if suffix == ".svg" else text
    if drawn is None:
        return None
    path.write_text(drawn, encoding="utf-8")
    return path


def _is_plain(path: Path, chart: Chart) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == dot(chart)
