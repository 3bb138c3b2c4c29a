"""The metrics as they are documented: names, labels with their closed sets of values, buckets.

Data only, read by the counters in `router.metrics`, by the generated docs and by the tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from attrs import frozen

from router.migration.poison import Poison
from router.workerspec import ROLES
from statemachines import BREAKER, CHARTS, REQUEST, WORKER
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
MIGRATION_REASONS = ("stream_broken", "worker_draining")
MIGRATION_MODES = ("exact", "text", "restart")
MIGRATION_FAILURES = (
    "limit",
    "poisoned",
    "no_candidate",
    "no_first_token",
    "rejected",
    "suspect",
    "too_long",
    "deadline",
)
POISONS = tuple(str(reason.value) for reason in Poison)
ABORTS = ("ok", "error", "timeout")
PREFILL_FAILURES = (
    "rejected",
    "backpressure",
    "status",
    "error_event",
    "gave_up",
    "empty",
    "unreachable",
    "broken",
    "stalled",
    "no_handoff",
    "bug",
)
COMPLETIONS = ("finish_seen", "budget_spent")
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


GAP_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
CARRIED_BOUNDS = (
    16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 32768.0, 65536.0, 131072.0, 262144.0,
)  # fmt: skip


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
FINALS = _values(state for state in REQUEST.states if state in REQUEST.final)
LEG_OUTCOMES = tuple(dict.fromkeys(OUTCOMES.values()))

_ROUTE = Label("route", ROUTES)
_WORKER = Label("worker")

TABLE = (
    Metric(
        "baton_requests_total",
        "counter",
        (_ROUTE, Label("outcome", FINALS)),
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
        (_WORKER, Label("role", ROLES), Label("outcome", LEG_OUTCOMES)),
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
        "baton_migrations_total",
        "counter",
        (Label("reason", MIGRATION_REASONS), Label("mode", MIGRATION_MODES)),
        "Streams that went on on another worker, counted at its first content.",
    ),
    Metric(
        "baton_migrations_failed_total",
        "counter",
        (Label("reason", MIGRATION_FAILURES),),
        "Streams that broke after content and could not go on, with migration on.",
    ),
    Metric(
        "baton_completed_locally_total",
        "counter",
        (Label("reason", COMPLETIONS),),
        "Streams whose worker was lost after their end was delivered; the end mark is ours.",
    ),
    Metric(
        "baton_migration_gap_seconds",
        "histogram",
        (),
        "From the last token before a move to the first one after it.",
    ),
    Metric(
        "baton_migration_carried_tokens",
        "histogram",
        (),
        "Tokens (prompt and output) of a sequence that was carried, where they are known.",
    ),
    Metric(
        "baton_poisoned_total",
        "counter",
        (Label("reason", POISONS),),
        "Streams that can no longer be continued elsewhere, when it happens.",
    ),
    Metric(
        "baton_engine_aborts_total",
        "counter",
        (Label("outcome", ABORTS),),
        "Engines told that nobody waits for a generation any more, by how that went.",
    ),
    Metric(
        "baton_pd_prefill_failures_total",
        "counter",
        (Label("reason", PREFILL_FAILURES),),
        "Prefill legs that failed, whether or not their request was still there.",
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
    Metric(
        "baton_nats_connected",
        "gauge",
        (),
        "1 while the broker is there; only with --nats, as all metrics of NATS and the registry.",
        addition=True,
    ),
    Metric(
        "baton_nats_missed_total",
        "counter",
        (),
        "Answers of which a part was lost between agent and router, and requests likewise.",
        addition=True,
    ),
    Metric(
        "baton_registry_seconds_since_sync",
        "gauge",
        (),
        "How old the view of the registry may be: a few seconds, unless the broker is away.",
        addition=True,
    ),
    Metric("baton_registry_entries", "gauge", (), "Workers that are registered.", addition=True),
    Metric(
        "baton_registry_refused_total",
        "counter",
        (),
        "Times that something in the registry was no entry; the log says what and why.",
        addition=True,
    ),
    Metric(
        "baton_registry_lost_total",
        "counter",
        (),
        "Times that the view of the registry became stale.",
        addition=True,
    ),
)
