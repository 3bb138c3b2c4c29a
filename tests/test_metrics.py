"""The metrics page: its series are those of the charts and the fleet, and nothing else."""

import timeit
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest
from attrs import define, field
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from router.config import Settings, WorkerSpec
from router.metrics import HasState, Histogram, Metrics, WorkerView
from router.reference import blocks
from router.series import DURATION_BOUNDS, RETRIES, ROUTES, TABLE, Label, Metric
from router.worker import Fleet
from statemachines import CHARTS, LEG, REQUEST, Edge
from statemachines.breaker import BreakerState
from statemachines.request import RequestState
from statemachines.worker import WorkerState


@define(eq=False)
class Thing:
    state: RequestState | BreakerState


@define(eq=False)
class Engine:
    id: str
    role: str = "mixed"
    inflight: int = 0
    state: WorkerState = WorkerState.READY
    breaker: Thing = field(factory=lambda: Thing(BreakerState.CLOSED))


@define(eq=False)
class Live:
    """The live objects of a router."""

    requests: list[Thing] = field(factory=list)
    engines: list[Engine] = field(factory=list)

    def open_requests(self) -> Iterable[HasState]:
        return self.requests

    def workers(self) -> Iterable[WorkerView]:
        return self.engines


@define
class Nats:
    is_connected: bool = True
    seconds_since_sync: float = 1.5
    entries: int = 3
    refused: int = 0


def with_workers(*ids: str) -> tuple[Live, Metrics]:
    live = Live(engines=[Engine(id) for id in ids])
    metrics = Metrics(live)
    metrics.follow_nats(Nats)
    for engine in live.engines:
        metrics.worker_joined(engine.id, engine.role)
    return live, metrics


def families(metrics: Metrics) -> dict[str, Family]:
    text = metrics.render().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def series(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Label values, in the order of the table, -> value."""
    [row] = [row for row in TABLE if row.name == name]
    samples = families(metrics)[name.removesuffix("_total")].samples
    return {
        tuple(sample.labels[label.name] for label in row.labels): sample.value
        for sample in samples
        if sample.name == name
    }


def test_the_page_shows_the_metrics_of_the_table_and_the_process() -> None:
    _, metrics = with_workers("w1")

    found = families(metrics)

    own = {name for name in found if not name.startswith("process_")}
    assert own == {row.name.removesuffix("_total") for row in TABLE}
    assert "process_resident_memory_bytes" in found
    assert all(found[row.name.removesuffix("_total")].type == row.kind for row in TABLE)
    assert all(found[row.name.removesuffix("_total")].documentation == row.help for row in TABLE)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_series_of_a_closed_set_is_there_at_zero(row: Metric) -> None:
    _, metrics = with_workers("w1", "w2")
    found = families(metrics)[row.name.removesuffix("_total")].samples

    for sample in found:
        assert set(sample.labels) - {"le"} == {label.name for label in row.labels}
    seen = {tuple(sample.labels[label.name] for label in row.labels) for sample in found}
    assert seen == expected_series(row)
    if row.kind != "gauge":
        assert all(sample.value == 0 for sample in found)


def test_without_nats_there_is_nothing_of_it() -> None:
    found = families(Metrics(Live()))

    names = [row.name.removesuffix("_total") for row in TABLE]
    of_nats = [name for name in names if name.startswith(("baton_nats_", "baton_registry_"))]
    assert len(of_nats) == 6
    assert not any(found[name].samples for name in of_nats)


def test_the_view_of_the_registry_is_shown_as_it_is() -> None:
    _, metrics = with_workers()
    metrics.nats_missed()
    metrics.nats_lost()

    assert series(metrics, "baton_nats_connected") == {(): 1}
    assert series(metrics, "baton_registry_seconds_since_sync") == {(): 1.5}
    assert series(metrics, "baton_registry_entries") == {(): 3}
    assert series(metrics, "baton_registry_lost_total") == {(): 1}
    assert series(metrics, "baton_nats_missed_total") == {(): 1}


def expected_series(row: Metric) -> set[tuple[str, ...]]:
    if row.name == "baton_transitions_total":
        return {
            (chart.name, edge.source.value, edge.fact, edge.target.value)
            for chart in CHARTS
            for edge in chart.edges
        }
    return set(product(*(values_of(label) for label in row.labels)))


def values_of(label: Label) -> Iterable[str]:
    if label.name == "role":
        return ["mixed"]  # the role of both workers
    return label.values or ["w1", "w2"]


def test_an_edge_that_is_taken_is_counted_once() -> None:
    _, metrics = with_workers()
    edge = REQUEST.edges[0]

    metrics.on_edge("request")(object(), edge)
    metrics.on_edge("request")(object(), edge)
    metrics.on_edge("leg")(object(), LEG.edges[0])

    found = series(metrics, "baton_transitions_total")
    key = ("request", edge.source.value, edge.fact, edge.target.value)
    assert found[key] == 2
    assert sum(found.values()) == 3


@pytest.mark.parametrize("edge", RETRIES, ids=lambda edge: edge.fact)
def test_a_request_that_goes_back_to_choosing_is_a_retry(edge: Edge) -> None:
    _, metrics = with_workers()

    metrics.on_edge("request")(object(), edge)

    assert hot(series(metrics, "baton_retries_total")) == {(edge.fact,)}


def test_the_end_of_a_request_is_counted_and_timed() -> None:
    _, metrics = with_workers()

    metrics.request_ended(route="chat", outcome="finished", seconds=0.3, first_token_seconds=0.06)
    metrics.request_ended(route="chat", outcome="failed", seconds=7200, first_token_seconds=None)

    requests = series(metrics, "baton_requests_total")
    assert requests["chat", "finished"] == requests["chat", "failed"] == 1
    assert sum(requests.values()) == 2
    durations = buckets(metrics, "baton_request_duration_seconds", "chat")
    assert durations["0.25"] == 0
    assert durations["0.5"] == durations["1800.0"] == 1
    assert durations["+Inf"] == 2
    assert buckets(metrics, "baton_time_to_first_token_seconds", "chat")["+Inf"] == 1


def buckets(metrics: Metrics, name: str, route: str) -> dict[str, float]:
    return {
        sample.labels["le"]: sample.value
        for sample in families(metrics)[name].samples
        if sample.name == f"{name}_bucket" and sample.labels["route"] == route
    }


def test_an_observation_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram(DURATION_BOUNDS)

    histogram.observe(DURATION_BOUNDS[3])

    assert histogram.counts[3] == 1
    assert len(histogram.counts) == len(DURATION_BOUNDS) + 1


def test_a_label_that_is_in_no_table_is_a_bug() -> None:
    _, metrics = with_workers()

    with pytest.raises(KeyError):
        metrics.request_ended(
            route="/v1/secret", outcome="finished", seconds=1, first_token_seconds=None
        )
    with pytest.raises(KeyError):
        metrics.internal_error("elsewhere")


def test_a_worker_has_series_while_it_is_in_the_fleet() -> None:
    live, metrics = with_workers("w1", "w2")
    metrics.leg_ended(worker="w1", role="mixed", outcome="success")
    metrics.stream_ended(worker="w1", outcome="ok")
    metrics.breaker_overridden("w1")
    assert series(metrics, "baton_worker_requests_total")["w1", "mixed", "success"] == 1
    assert series(metrics, "baton_stream_outcome_total")["w1", "ok"] == 1
    assert series(metrics, "baton_breaker_overridden_total")["w1",] == 1

    live.engines.pop(0)
    metrics.worker_left("w1")
    metrics.leg_ended(worker="w1", role="mixed", outcome="cancelled")
    metrics.stream_ended(worker="w1", outcome="aborted")

    page = metrics.render().decode()
    assert 'worker="w1"' not in page
    assert 'worker="w2"' in page


def test_a_worker_that_is_told_twice_keeps_its_counts() -> None:
    _, metrics = with_workers("w1")
    metrics.leg_ended(worker="w1", role="mixed", outcome="success")

    metrics.worker_joined("w1", "mixed")

    assert series(metrics, "baton_worker_requests_total")["w1", "mixed", "success"] == 1


def test_gauges_are_read_from_the_live_objects() -> None:
    live, metrics = with_workers("w1", "w2")
    live.requests = [Thing(RequestState.STREAMING) for _ in range(3)]
    live.engines[0].inflight = 3
    live.engines[1].state = WorkerState.DRAINING
    live.engines[1].breaker.state = BreakerState.HALF_OPEN

    assert series(metrics, "baton_requests_open")["streaming",] == 3
    assert sum(series(metrics, "baton_requests_open").values()) == 3
    assert series(metrics, "baton_worker_inflight") == {("w1",): 3, ("w2",): 0}
    assert hot(series(metrics, "baton_worker_state")) == {("w1", "ready"), ("w2", "draining")}
    assert hot(series(metrics, "baton_breaker_state")) == {("w1", "closed"), ("w2", "half_open")}

    live.requests.clear()
    live.engines[0].inflight = 0

    assert sum(series(metrics, "baton_requests_open").values()) == 0
    assert sum(series(metrics, "baton_worker_inflight").values()) == 0


def hot(found: dict[tuple[str, ...], float]) -> set[tuple[str, ...]]:
    return {key for key, value in found.items() if value == 1}


def test_workers_of_the_fleet_can_be_scraped() -> None:
    fleet = Fleet(Settings())
    fleet.add(WorkerSpec.parse("http://h:1,id=w1"))

    class Source:
        def open_requests(self) -> Iterable[HasState]:
            return ()

        def workers(self) -> Iterable[WorkerView]:
            return fleet.all()

    metrics = Metrics(Source())

    assert hot(series(metrics, "baton_worker_state")) == {("w1", "probing")}
    assert hot(series(metrics, "baton_breaker_state")) == {("w1", "closed")}
    assert series(metrics, "baton_worker_inflight") == {("w1",): 0}


def test_an_id_with_quotes_cannot_break_the_page() -> None:
    _, metrics = with_workers('a"\n\\b')

    assert series(metrics, "baton_worker_inflight") == {('a"\n\\b',): 0}


def test_the_table_in_the_docs_is_fresh() -> None:
    page = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")

    for name in ("metrics", "duration-bounds", "first-token-bounds"):
        assert f"<!-- generated: {name} -->\n{blocks()[name]}<!-- /generated -->" in page


def test_all_metrics_of_a_request_are_cheap() -> None:
    # 2 to 3 us on the machine it was measured on; children of the library need 9.
    _, metrics = with_workers("w1")
    on_request, on_leg = metrics.on_edge("request"), metrics.on_edge("leg")

    def one_request() -> None:
        for edge in REQUEST.edges[:3]:
            on_request(None, edge)
        for edge in LEG.edges[:3]:
            on_leg(None, edge)
        metrics.request_ended(
            route=ROUTES[0], outcome="finished", seconds=0.3, first_token_seconds=0.1
        )
        metrics.leg_ended(worker="w1", role="mixed", outcome="success")
        metrics.stream_ended(worker="w1", outcome="ok")

    assert min(timeit.repeat(one_request, number=200, repeat=20)) / 200 < 12e-6


def test_thousands_of_workers_leave_without_a_search_and_leave_nothing() -> None:
    metrics = Metrics(Live())
    number = 20_000
    for each in range(number):
        metrics.worker_joined(f"w{each}", "mixed")
    metrics.worker_joined("w1", "prefill")
    began = timeit.default_timer()
    for each in range(number):
        metrics.worker_left(f"w{each}")
        metrics.worker_left(f"w{each}")
    assert timeit.default_timer() - began < 5  # a search for each of them takes minutes
    assert b'worker="w' not in metrics.render()
