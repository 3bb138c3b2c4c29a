"""The page is what the client library would write, and comes in small pieces."""

from __future__ import annotations

import time
from collections.abc import Iterator
from enum import Enum

import pytest
from attrs import define
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from router.exposition import PIECE_LINES, head_of, pieces_of
from router.metrics import Metrics
from statemachines.breaker import BreakerState
from statemachines.worker import WorkerState

WORDS = st.text(alphabet='ab"\\\n%{}é', max_size=8)
VALUES = st.integers(0, 10**17) | st.floats()


@define(eq=False)
class Sheet(Collector):
    """What the library is given."""

    family: Family

    def collect(self) -> Iterator[Family]:
        yield self.family


@given(
    st.lists(st.tuples(st.tuples(WORDS, WORDS), VALUES), max_size=5), st.sampled_from(["z", "a"])
)
def test_a_family_is_written_as_the_library_does(
    samples: list[tuple[tuple[str, str], float]], second: str
) -> None:
    family = Family("baton_things", 'What a "thing" \\ is\nfor.', "counter")
    for words, value in samples:
        family.add_sample("baton_things_total", dict(zip(("m", second), words, strict=True)), value)
    registry = CollectorRegistry()
    registry.register(Sheet(family))

    pieces = pieces_of("baton_things_total", ("m", second), samples)
    page = head_of("baton_things_total", "counter", family.documentation) + "".join(pieces)

    assert page.encode() == generate_latest(registry)


@define
class State:
    state: Enum


@define
class Worker:
    id: str
    role: str
    state: Enum
    inflight: int
    breaker: State


@define
class House:
    """Many workers."""

    count: int

    def open_requests(self) -> list[State]:
        return []

    def workers(self) -> list[Worker]:
        breaker = State(BreakerState.CLOSED)
        return [Worker(f'w"{n}', "mixed", WorkerState.READY, n, breaker) for n in range(self.count)]


def made(count: int) -> Metrics:
    house = House(count)
    metrics = Metrics(house)
    for each in house.workers():
        metrics.worker_joined(each.id, each.role)
    metrics.worker_joined('w"1', "prefill")  # it came back as another
    return metrics


def test_the_whole_page_is_what_the_library_would_write() -> None:
    metrics = made(30)
    metrics.request_ended(route="chat", outcome="finished", seconds=2.5, first_token_seconds=0.1)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)

    page = metrics.render()

    ours = page[: page.index(b"# HELP process_")]
    assert ours == generate_latest(registry)


def test_no_piece_grows_with_the_fleet() -> None:
    metrics = made(2000)

    lines = [piece.count(b"\n") for piece in metrics.pieces()]

    assert max(lines) <= PIECE_LINES
    assert sum(lines) > 2000 * 15


def test_workers_may_come_and_go_while_the_page_is_made() -> None:
    metrics = made(500)

    for number, _ in enumerate(metrics.pieces()):
        metrics.worker_joined(f"late{number}", "mixed")
        metrics.worker_left(f'w"{number}')


@pytest.mark.slow
def test_a_page_of_thousands_of_workers_takes_a_second_and_stops_nobody() -> None:
    metrics = made(9500)
    # Of the CPU: what else the machine does is not the page's fault.
    slowest, began = 0.0, time.process_time()
    moment = began
    for _ in metrics.pieces():
        now = time.process_time()
        slowest, moment = max(slowest, now - moment), now
    print(f"{moment - began:.2f} s, the slowest piece {slowest * 1000:.1f} ms")
    assert moment - began < 5
