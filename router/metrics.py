"""What `/metrics` says: labels come from charts and the configuration, never from a request.

All series of a closed set exist from the first scrape, at zero. Counting is a plain addition in a
dict whose keys were all made beforehand, because one request is a dozen of them; a child of the
client library costs six times as much, for a lock that one thread does not need. The page comes in
pieces, so that streams go on while thousands of workers are written. What is true at the moment
(open requests, states, requests on a worker) is not counted at all but read from the live objects
while scraping, so that it cannot drift.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Protocol

from attrs import define, field
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from router.exposition import head_of, pieces_of
from router.migration.poison import Poison
from router.series import (
    ABORTS,
    CARRIED_BOUNDS,
    COMPLETIONS,
    DURATION_BOUNDS,
    ERROR_PLACES,
    FINALS,
    FIRST_TOKEN_BOUNDS,
    GAP_BOUNDS,
    LEG_OUTCOMES,
    MIGRATION_FAILURES,
    MIGRATION_MODES,
    MIGRATION_REASONS,
    POISONS,
    PREFILL_FAILURES,
    RETRIES,
    ROUTES,
    STREAM_OUTCOMES,
    TABLE,
    Metric,
)
from statemachines import BREAKER, CHARTS, REQUEST, WORKER, Edge

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


class NatsView(Protocol):
    """What a scrape reads of the broker and the registry."""

    @property
    def is_connected(self) -> bool: ...
    @property
    def seconds_since_sync(self) -> float: ...
    @property
    def entries(self) -> int: ...
    @property
    def refused(self) -> int: ...


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


Samples = Iterable[tuple[tuple[str, ...], float | Histogram]]
Counts = dict[tuple[str, ...], int]
"""A counter: label values in the order of the table -> how often. All keys are made beforehand."""


@define(eq=False)
class _Only(Collector):
    """One family, for the library to render."""

    family: Family

    def collect(self) -> Iterator[Family]:
        return iter([self.family])


class Metrics(Collector):
    """The counters of one process and the page that shows them."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._of_process = CollectorRegistry(auto_describe=False)
        self._requests: Counts = {(route, final): 0 for route in ROUTES for final in FINALS}
        self._durations = {route: Histogram(DURATION_BOUNDS) for route in ROUTES}
        self._first_tokens = {route: Histogram(FIRST_TOKEN_BOUNDS) for route in ROUTES}
        # Edges are told apart by identity: their hash would be computed from seven fields.
        self._edges: dict[str, dict[int, int]] = {
            chart.name: {id(edge): 0 for edge in chart.edges} for chart in CHARTS
        }
        self._migrations: Counts = {
            (reason, mode): 0 for reason in MIGRATION_REASONS for mode in MIGRATION_MODES
        }
        self._migrations_failed: Counts = {(reason,): 0 for reason in MIGRATION_FAILURES}
        self._completed_locally: Counts = {(reason,): 0 for reason in COMPLETIONS}
        self._gaps = Histogram(GAP_BOUNDS)
        self._carried = Histogram(CARRIED_BOUNDS)
        self._poisoned: Counts = {(reason,): 0 for reason in POISONS}
        self._aborts: Counts = {(outcome,): 0 for outcome in ABORTS}
        self._prefill_failures: Counts = {(reason,): 0 for reason in PREFILL_FAILURES}
        self._internal_errors: Counts = {(place,): 0 for place in ERROR_PLACES}
        self._worker_requests: Counts = {}
        self._streams: Counts = {}
        self._overridden: Counts = {}
        #: Of each worker with series; thousands may leave at once, so nobody searches for theirs.
        self._roles: dict[str, set[str]] = {}
        self._nats_view: Callable[[], NatsView | None] = lambda: None
        self._nats_missed: Counts = {}
        self._nats_lost: Counts = {}
        ProcessCollector(registry=self._of_process)
        #: Counters by the name of their metric.
        self._counted: dict[str, Counts] = {
            "baton_requests_total": self._requests,
            "baton_worker_requests_total": self._worker_requests,
            "baton_stream_outcome_total": self._streams,
            "baton_migrations_total": self._migrations,
            "baton_migrations_failed_total": self._migrations_failed,
            "baton_completed_locally_total": self._completed_locally,
            "baton_poisoned_total": self._poisoned,
            "baton_engine_aborts_total": self._aborts,
            "baton_pd_prefill_failures_total": self._prefill_failures,
            "baton_breaker_overridden_total": self._overridden,
            "baton_internal_errors_total": self._internal_errors,
            "baton_nats_missed_total": self._nats_missed,
            "baton_registry_lost_total": self._nats_lost,
        }

    def taken(self, machine: str) -> dict[int, int]:
        """How often each edge of this machine was taken, by `id(edge)`; listeners add to it."""
        return self._edges[machine]

    def on_edge(self, machine: str) -> Callable[[object, Edge], None]:
        """A listener that counts the edges of every subject of this machine."""
        taken = self.taken(machine)

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

    def migrated(
        self, *, reason: str, mode: str, gap_seconds: float, carried_tokens: int | None
    ) -> None:
        """A stream goes on on another worker."""
        self._migrations[reason, mode] += 1
        self._gaps.observe(gap_seconds)
        if carried_tokens is not None:
            self._carried.observe(carried_tokens)

    def migration_failed(self, reason: str) -> None:
        """A stream broke after content and could not go on."""
        self._migrations_failed[reason,] += 1

    def completed_locally(self, reason: str) -> None:
        """The end of a stream was written here."""
        self._completed_locally[reason,] += 1

    def poisoned(self, reason: Poison) -> None:
        """A stream can no longer be continued elsewhere."""
        self._poisoned[str(reason.value),] += 1

    def engine_abort(self, outcome: str) -> None:
        """An engine was told to abort a generation, with one of ABORTS."""
        self._aborts[outcome,] += 1

    def prefill_failed(self, reason: str) -> None:
        """A prefill leg failed, for one of PREFILL_FAILURES."""
        self._prefill_failures[reason,] += 1

    def internal_error(self, place: str) -> None:
        """A bug of ours was caught in `place`, one of ERROR_PLACES."""
        self._internal_errors[place,] += 1

    def follow_nats(self, view: Callable[[], NatsView | None]) -> None:
        """From here on there are series of the broker and the registry."""
        self._nats_view = view
        self._nats_missed[()] = 0
        self._nats_lost[()] = 0

    def nats_missed(self) -> None:
        """Part of an answer, or a request, was lost on its way over NATS."""
        self._nats_missed[()] += 1

    def nats_lost(self) -> None:
        """The view of the registry became stale."""
        self._nats_lost[()] += 1

    def worker_joined(self, worker: str, role: str) -> None:
        """From here on the worker has series; joining again keeps what was counted."""
        self._roles.setdefault(worker, set()).add(role)
        for leg_outcome in LEG_OUTCOMES:
            self._worker_requests.setdefault((worker, role, leg_outcome), 0)
        for stream_outcome in STREAM_OUTCOMES:
            self._streams.setdefault((worker, stream_outcome), 0)
        self._overridden.setdefault((worker,), 0)

    def worker_left(self, worker: str) -> None:
        """The worker's series vanish; legs of its own that end later are no longer counted."""
        for role in self._roles.pop(worker, ()):
            for leg_outcome in LEG_OUTCOMES:
                del self._worker_requests[worker, role, leg_outcome]
        for stream_outcome in STREAM_OUTCOMES:
            self._streams.pop((worker, stream_outcome), None)
        self._overridden.pop((worker,), None)

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
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The page in pieces, each of about a millisecond's work and true when it is made.

        Between two of them anything may change.
        """
        for row in TABLE:
            if row.kind == "histogram":
                yield generate_latest(_Only(self._family(row)))
                continue
            yield head_of(row.name, row.kind, row.help).encode()
            names = tuple(label.name for label in row.labels)
            for piece in pieces_of(row.name, names, _numbers(self.samples(row.name))):
                yield piece.encode()
        yield generate_latest(self._of_process)

    def collect(self) -> Iterator[Family]:
        """All families in the order of the table."""
        return map(self._family, TABLE)

    def _family(self, row: Metric) -> Family:
        family = Family(row.name.removesuffix("_total"), row.help, row.kind)
        for key, value in self.samples(row.name):
            labels = {label.name: word for label, word in zip(row.labels, key, strict=True)}
            if isinstance(value, Histogram):
                value.add_to(family, labels)
            else:
                family.add_sample(row.name, labels, value)
        return family

    def samples(self, name: str) -> Samples:
        """Label values, in the order of the table, and what is counted or seen now."""
        counts = self._counted.get(name)
        if counts is None:
            return self._seen(name)
        # It may change while the page is made.
        keys = _KEYS_OF_WORKER.get(name)
        if keys is None:
            return list(counts.items())
        found = (keys(worker, sorted(roles)) for worker, roles in list(self._roles.items()))
        return ((key, counts[key]) for some in found for key in some if key in counts)

    def _seen(self, name: str) -> Samples:
        """What is read from live objects, one after the other."""
        source, view = self._source, self._nats_view()
        match name:
            case "baton_request_duration_seconds":
                return (((route,), each) for route, each in self._durations.items())
            case "baton_time_to_first_token_seconds":
                return (((route,), each) for route, each in self._first_tokens.items())
            case "baton_migration_gap_seconds":
                return [((), self._gaps)]
            case "baton_migration_carried_tokens":
                return [((), self._carried)]
            case "baton_requests_open":
                return self._open_requests().items()
            case "baton_transitions_total":
                return self._transitions().items()
            case "baton_retries_total":
                taken = self._edges[REQUEST.name]
                return (((edge.fact,), taken[id(edge)]) for edge in RETRIES)
            case "baton_worker_inflight":
                return (((each.id,), each.inflight) for each in source.workers())
            case "baton_worker_state":
                return _one_hot(((w.id, w.state) for w in source.workers()), WORKER.states)
            case "baton_breaker_state":
                states = ((each.id, each.breaker.state) for each in source.workers())
                return _one_hot(states, BREAKER.states)
        return [] if view is None else [((), _NATS_VIEW[name](view))]

    def _transitions(self) -> Counts:
        found: Counts = {}
        for chart in CHARTS:
            taken = self._edges[chart.name]
            for edge, key in _KEYS_OF_EDGES[chart.name]:
                found[key] = taken[id(edge)]
        return found

    def _open_requests(self) -> Counts:
        found = Counter(request.state for request in self._source.open_requests())
        return {(state.value,): found[state] for state in REQUEST.open}


def _count_for_worker(counts: Counts, key: tuple[str, ...]) -> None:
    # A leg may end after its worker has left; then there is no series to count it in.
    if key in counts:
        counts[key] += 1


def _one_hot(
    subjects: Iterable[tuple[str, Enum]], states: Iterable[Enum]
) -> Iterator[tuple[tuple[str, str], int]]:
    names = list(states)
    for id, state in subjects:
        for each in names:
            yield (id, each.value), int(each is state)


def _numbers(samples: Samples) -> Iterator[tuple[tuple[str, ...], float]]:
    for key, value in samples:
        assert not isinstance(value, Histogram)
        yield key, value


#: The labels of every edge, by chart.
_KEYS_OF_EDGES: dict[str, list[tuple[Edge, tuple[str, ...]]]] = {
    chart.name: [
        (edge, (chart.name, edge.source.value, edge.fact, edge.target.value))
        for edge in chart.edges
    ]
    for chart in CHARTS
}
#: The series of one worker, by metric.
_KEYS_OF_WORKER: dict[str, Callable[[str, list[str]], list[tuple[str, ...]]]] = {
    "baton_worker_requests_total": lambda worker, roles: [
        (worker, role, outcome) for role in roles for outcome in LEG_OUTCOMES
    ],
    "baton_stream_outcome_total": lambda worker, _: [
        (worker, outcome) for outcome in STREAM_OUTCOMES
    ],
    "baton_breaker_overridden_total": lambda worker, _: [(worker,)],
}
_NATS_VIEW: dict[str, Callable[[NatsView], float]] = {
    "baton_nats_connected": lambda view: int(view.is_connected),
    "baton_registry_seconds_since_sync": lambda view: view.seconds_since_sync,
    "baton_registry_entries": lambda view: view.entries,
    "baton_registry_refused_total": lambda view: view.refused,
}
