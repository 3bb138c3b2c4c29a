"""What `/metrics` says: labels come from charts and the configuration, never from a request.

All series of a closed set exist from the first scrape, at zero. Counting is a plain addition in a
dict whose keys were all made beforehand, because one request is a dozen of them; a child of the
client library costs six times as much, for a lock that one thread does not need. The library
renders. What is true at the moment (open requests, states, requests on a worker) is not counted at
all but read from the live objects while scraping, so that it cannot drift.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Protocol

from attrs import define, field, frozen
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from router.workerspec import ROLES
from statemachines import BREAKER, CHARTS, REQUEST, WORKER, Edge
from statemachines.leg import OUTCOMES
from statemachines.request import RequestState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ROUTES = ("chat", "completions", "generate", "other")
"""`other` is every path that is only proxied: a path is a client's word and never a label."""

STREAM_OUTCOMES = (
    "ok",
    "error_event",
    "upstream_error",
    "client_disconnect",
    "expired",
    "aborted",
    "migrated",
)
ERROR_PLACES = ("request", "background", "reactor")

# From a cached answer to the longest generation that --request-timeout-secs lets through.
DURATION_BOUNDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0,
    300.0, 600.0, 1800.0,
)  # fmt: skip
# Dense where users feel it (tens of milliseconds to seconds), up to the default deadline.
FIRST_TOKEN_BOUNDS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0,
    60.0, 120.0, 300.0, 600.0,
)  # fmt: skip


@frozen
class Label:
    """One label with the values it can have; none means the ids of the workers."""

    name: str
    values: tuple[str, ...] = ()


@frozen
class Metric:
    """One metric as it is documented."""

    name: str
    kind: str
    labels: tuple[Label, ...]
    help: str
    addition: bool = False
    """Not in the published contract."""


def _values(states: Iterable[Enum]) -> tuple[str, ...]:
    return tuple(state.value for state in states)


RETRIES = tuple(
    edge
    for edge in REQUEST.edges
    if edge.source is RequestState.DISPATCHING and edge.target is RequestState.QUEUED
)
"""A retry is a row of the request chart, so nothing counts it a second time."""

_EDGES = tuple(edge for chart in CHARTS for edge in chart.edges)
_FINALS = _values(state for state in REQUEST.states if state in REQUEST.final)
_OUTCOMES = tuple(dict.fromkeys(OUTCOMES.values()))

_ROUTE = Label("route", ROUTES)
_WORKER = Label("worker")

TABLE = (
    Metric(
        "baton_requests_total",
        "counter",
        (_ROUTE, Label("outcome", _FINALS)),
        "Requests that ended, by the final state of the request machine.",
    ),
    Metric(
        "baton_request_duration_seconds",
        "histogram",
        (_ROUTE,),
        "From the request's head to the end of its answer.",
    ),
    Metric(
        "baton_time_to_first_token_seconds",
        "histogram",
        (_ROUTE,),
        "From the request's head to its first event with content; streams only.",
    ),
    Metric(
        "baton_requests_open",
        "gauge",
        (Label("state", _values(REQUEST.open)),),
        "Live requests, by the state of the request machine.",
    ),
    Metric(
        "baton_transitions_total",
        "counter",
        (
            Label("machine", tuple(chart.name for chart in CHARTS)),
            Label("source", _values(edge.source for edge in _EDGES)),
            Label("fact", tuple(edge.fact for edge in _EDGES)),
            Label("target", _values(edge.target for edge in _EDGES)),
        ),
        "Edges taken; one series for every row of every chart.",
    ),
    Metric(
        "baton_worker_requests_total",
        "counter",
        (_WORKER, Label("role", ROLES), Label("outcome", _OUTCOMES)),
        "Legs that ended on a worker; 429 and 503 are backpressure.",
    ),
    Metric(
        "baton_stream_outcome_total",
        "counter",
        (_WORKER, Label("outcome", STREAM_OUTCOMES)),
        "How streams ended, by the worker that carried them last.",
    ),
    Metric("baton_worker_inflight", "gauge", (_WORKER,), "Live legs on a worker."),
    Metric(
        "baton_worker_state",
        "gauge",
        (_WORKER, Label("state", _values(WORKER.states))),
        "1 for the state the worker is in, 0 for the others.",
    ),
    Metric(
        "baton_breaker_state",
        "gauge",
        (_WORKER, Label("state", _values(BREAKER.states))),
        "1 for the state the worker's breaker is in, 0 for the others.",
    ),
    Metric(
        "baton_retries_total",
        "counter",
        (Label("reason", tuple(edge.fact for edge in RETRIES)),),
        "Requests that went back to choosing another worker before the client had received "
        "anything, by the fact that sent them back.",
    ),
    Metric(
        "baton_breaker_overridden_total",
        "counter",
        (_WORKER,),
        "Requests sent to a worker whose breaker was open, because all were.",
        addition=True,
    ),
    Metric(
        "baton_internal_errors_total",
        "counter",
        (Label("place", ERROR_PLACES),),
        "Unexpected exceptions, each a bug of the router's, by where they were caught.",
        addition=True,
    ),
)


# --- what is read while scraping -------------------------------------------------------------


class HasState(Protocol):
    @property
    def state(self) -> Enum: ...


class WorkerView(HasState, Protocol):
    """What a scrape reads of a worker."""

    @property
    def id(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def inflight(self) -> int: ...
    @property
    def breaker(self) -> HasState: ...


class Source(Protocol):
    """The live objects."""

    def open_requests(self) -> Iterable[HasState]: ...
    def workers(self) -> Iterable[WorkerView]: ...


# --- what is counted -------------------------------------------------------------------------


@define(eq=False)
class Histogram:
    """One series of observations."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    """Observations in each bucket alone; the last is everything above the highest bound."""
    total: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_to(self, family: Family, labels: dict[str, str]) -> None:
        below = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, below)
        family.add_sample(f"{family.name}_count", labels, below)
        family.add_sample(f"{family.name}_sum", labels, self.total)


Counts = dict[tuple[str, ...], int]
"""A counter: label values in the order of the table -> how often. All keys are made beforehand."""


class Metrics(Collector):
    """The counters of one process and the page that shows them."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests: Counts = {(route, final): 0 for route in ROUTES for final in _FINALS}
        self._durations = {route: Histogram(DURATION_BOUNDS) for route in ROUTES}
        self._first_tokens = {route: Histogram(FIRST_TOKEN_BOUNDS) for route in ROUTES}
        # Edges are told apart by identity: their hash would be computed from seven fields.
        self._edges: dict[str, dict[int, int]] = {
            chart.name: {id(edge): 0 for edge in chart.edges} for chart in CHARTS
        }
        self._internal_errors: Counts = {(place,): 0 for place in ERROR_PLACES}
        self._worker_requests: Counts = {}
        self._streams: Counts = {}
        self._overridden: Counts = {}
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def on_edge(self, machine: str) -> Callable[[object, Edge], None]:
        """A listener that counts the edges of every subject of this machine."""
        taken = self._edges[machine]

        def count(_: object, edge: Edge) -> None:
            taken[id(edge)] += 1

        return count

    def request_ended(
        self, *, route: str, outcome: str, seconds: float, first_token_seconds: float | None
    ) -> None:
        """A request reached the final state `outcome`; the first token is told of streams only."""
        self._requests[route, outcome] += 1
        self._durations[route].observe(seconds)
        if first_token_seconds is not None:
            self._first_tokens[route].observe(first_token_seconds)

    def internal_error(self, place: str) -> None:
        """A bug of ours was caught in `place`, one of ERROR_PLACES."""
        self._internal_errors[place,] += 1

    def worker_joined(self, worker: str, role: str) -> None:
        """From here on the worker has series; joining again keeps what was counted."""
        for leg_outcome in _OUTCOMES:
            self._worker_requests.setdefault((worker, role, leg_outcome), 0)
        for stream_outcome in STREAM_OUTCOMES:
            self._streams.setdefault((worker, stream_outcome), 0)
        self._overridden.setdefault((worker,), 0)

    def worker_left(self, worker: str) -> None:
        """The worker's series vanish; legs of its own that end later are no longer counted."""
        for counts in (self._worker_requests, self._streams, self._overridden):
            for key in [key for key in counts if key[0] == worker]:
                del counts[key]

    def leg_ended(self, *, worker: str, role: str, outcome: str) -> None:
        """A leg ended on this worker, with an outcome of `statemachines.leg.OUTCOMES`."""
        _count_for_worker(self._worker_requests, (worker, role, outcome))

    def stream_ended(self, *, worker: str, outcome: str) -> None:
        """A stream ended that this worker carried last, with one of STREAM_OUTCOMES."""
        _count_for_worker(self._streams, (worker, outcome))

    def breaker_overridden(self, worker: str) -> None:
        """A request was sent to this worker although its breaker is open."""
        _count_for_worker(self._overridden, (worker,))

    def render(self) -> bytes:
        """The page, in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        """All families in the order of the table; called by the registry while rendering."""
        samples = self._samples()
        for row in TABLE:
            family = Family(row.name.removesuffix("_total"), row.help, row.kind)
            for key, value in samples[row.name].items():
                labels = {label.name: word for label, word in zip(row.labels, key, strict=True)}
                if isinstance(value, Histogram):
                    value.add_to(family, labels)
                else:
                    family.add_sample(row.name, labels, value)
            yield family

    def _samples(self) -> dict[str, Mapping[tuple[str, ...], int | Histogram]]:
        workers = list(self._source.workers())
        return {
            "baton_requests_total": self._requests,
            "baton_request_duration_seconds": {(r,): h for r, h in self._durations.items()},
            "baton_time_to_first_token_seconds": {(r,): h for r, h in self._first_tokens.items()},
            "baton_requests_open": self._open_requests(),
            "baton_transitions_total": self._transitions(),
            "baton_worker_requests_total": self._worker_requests,
            "baton_stream_outcome_total": self._streams,
            "baton_worker_inflight": {(w.id,): w.inflight for w in workers},
            "baton_worker_state": _one_hot(((w.id, w.state) for w in workers), WORKER.states),
            "baton_breaker_state": _one_hot(
                ((w.id, w.breaker.state) for w in workers), BREAKER.states
            ),
            "baton_retries_total": {
                (edge.fact,): self._edges[REQUEST.name][id(edge)] for edge in RETRIES
            },
            "baton_breaker_overridden_total": self._overridden,
            "baton_internal_errors_total": self._internal_errors,
        }

    def _transitions(self) -> Counts:
        found: Counts = {}
        for chart in CHARTS:
            taken = self._edges[chart.name]
            for edge in chart.edges:
                key = (chart.name, edge.source.value, edge.fact, edge.target.value)
                found[key] = taken[id(edge)]
        return found

    def _open_requests(self) -> Counts:
        found = Counter(request.state for request in self._source.open_requests())
        return {(state.value,): found[state] for state in REQUEST.open}


def _count_for_worker(counts: Counts, key: tuple[str, ...]) -> None:
    # A leg may end after its worker has left; then there is no series to count it in.
    if key in counts:
        counts[key] += 1


def _one_hot(subjects: Iterable[tuple[str, Enum]], states: Iterable[Enum]) -> Counts:
    names = list(states)
    return {(id, each.value): int(each is state) for id, state in subjects for each in names}
