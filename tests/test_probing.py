"""Probe loops under virtual time, against workers that are well, ill, gone, slow or replaced."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise

import httpx
import pytest
import trio
from attrs import define, evolve, field
from structlog.testing import capture_logs
from trio.testing import MockClock

from router.config import Settings
from router.engines import Knowledge
from router.probing import (
    BODY_BYTES_MAX,
    FIRST_PAUSES_SECS,
    LEARN_EVERY,
    TURN_SECS,
    Turns,
    probe_forever,
)
from router.worker import Fleet, Probe, ProbeOutcome, Worker
from router.workerspec import WorkerSpec
from statemachines import Edge
from statemachines.worker import WorkerState

Answerer = Callable[[httpx.Request], Awaitable[httpx.Response]]


@pytest.fixture
def autojump_clock() -> MockClock:
    return MockClock(autojump_threshold=0)


def models(name: str, owner: str = "vllm") -> httpx.Response:
    return httpx.Response(200, json={"data": [{"id": name, "owned_by": owner}]})


@define(eq=False)
class Engine:
    """A vLLM that answers as it is told; a handler for httpx's mock transport."""

    model: str = "tiny"
    health: int | Answerer = 200
    listing: int | Answerer = 200
    pages: dict[str, dict[str, str]] = field(factory=lambda: {"/version": {"version": "0.32.0"}})
    asked: list[tuple[float, str]] = field(factory=list)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((trio.current_time(), request.url.path))
        path = request.url.path
        if path.endswith("/v1/models"):
            return await self._answer(self.listing, request, models(self.model))
        if path.endswith("/health"):
            return await self._answer(self.health, request, httpx.Response(200))
        for end, page in self.pages.items():
            if path.endswith(end):
                return httpx.Response(200, json=page)
        return httpx.Response(404, json={"detail": "Not Found"})

    async def _answer(
        self, how: int | Answerer, request: httpx.Request, good: httpx.Response
    ) -> httpx.Response:
        if not isinstance(how, int):
            return await how(request)
        return good if how == 200 else httpx.Response(how)

    def times(self, path: str) -> list[float]:
        return [round(at - self.asked[0][0], 3) for at, each in self.asked if each == path]


async def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


async def hang(request: httpx.Request) -> httpx.Response:
    await trio.sleep_forever()


async def cut(request: httpx.Request) -> httpx.Response:
    raise httpx.RemoteProtocolError("cut", request=request)


async def crash(request: httpx.Request) -> httpx.Response:
    raise RuntimeError("nobody foresaw this")


@define(eq=False)
class Bench:
    """A fleet of one, its engine, and its loop."""

    engine: Engine = field(factory=Engine)
    settings: Settings = field(factory=Settings)
    url: str = "http://127.0.0.1:9000"
    kind: str = "auto"
    moves: list[tuple[float, str]] = field(factory=list)
    fleet: Fleet = field(init=False)
    worker: Worker = field(init=False)
    _start: float = field(init=False, factory=trio.current_time)

    def __attrs_post_init__(self) -> None:
        self.fleet = Fleet(self.settings, worker_listeners=(self._moved,))
        self.worker = self.fleet.add(WorkerSpec.of(self.url, id="w1", engine=self.kind))

    def _moved(self, worker: Worker, edge: Edge) -> None:
        if edge.source is not edge.target:
            self.moves.append((round(trio.current_time() - self._start, 3), edge.target.value))

    @asynccontextmanager
    async def probing(self) -> AsyncIterator[None]:
        transport = httpx.MockTransport(self.engine.handle)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(probe_forever, self.worker, transport, self.settings, lambda: 0.5)
            yield
            nursery.cancel_scope.cancel()


def outcome(worker: Worker) -> ProbeOutcome | None:
    return None if worker.last_probe is None else worker.last_probe.outcome


#### Becoming ready


async def test_a_well_worker_is_ready_at_once_and_known(autojump_clock: MockClock) -> None:
    bench = Bench()

    async with bench.probing():
        await trio.sleep(0.1)

    worker = bench.worker
    assert bench.moves == [(0.0, "ready")]
    assert (worker.engine, worker.models) == ("vllm", ("tiny",))
    assert worker.addresses == [(socket.AF_INET, ("127.0.0.1", 9000))]


async def test_it_is_not_ready_before_its_models_are_known(autojump_clock: MockClock) -> None:
    bench = Bench(Engine(listing=503))

    async with bench.probing():
        await trio.sleep(30)
        before = bench.worker.state
        bench.engine.listing = 200
        await trio.sleep(10)

    assert before is WorkerState.PROBING
    assert bench.worker.is_ready


async def test_a_starting_worker_is_asked_often_at_first(autojump_clock: MockClock) -> None:
    bench = Bench(Engine(health=refuse))

    async with bench.probing():
        await trio.sleep(35)

    assert bench.engine.times("/health") == [0.0, 0.2, 0.7, 1.7, 3.7, 8.7, 18.7, 28.7]
    assert bench.worker.state is WorkerState.PROBING


async def test_the_interval_caps_the_first_pauses(autojump_clock: MockClock) -> None:
    settings = evolve(Settings(), health_check_interval_secs=0.7)
    bench = Bench(Engine(health=refuse), settings)

    async with bench.probing():
        await trio.sleep(5)

    gaps = bench.engine.times("/health")
    assert max(after - before for before, after in pairwise(gaps)) < 0.71


#### Falling ill and coming back


@pytest.mark.parametrize(
    ("health", "expected", "silent"),
    [
        (refuse, ProbeOutcome.REFUSED, True),
        (hang, ProbeOutcome.TIMED_OUT, True),
        (cut, ProbeOutcome.BROKEN, False),
        (503, ProbeOutcome.UNAVAILABLE, False),
        (500, ProbeOutcome.BAD_STATUS, False),
        (302, ProbeOutcome.BAD_STATUS, False),
    ],
)
async def test_what_a_probe_met_is_known_and_three_make_it_unhealthy(
    autojump_clock: MockClock, health: int | Answerer, expected: ProbeOutcome, silent: bool
) -> None:
    bench = Bench()

    async with bench.probing():
        await trio.sleep(0.1)
        bench.engine.health = health
        await trio.sleep(24)
        two_failed = bench.worker.state
        await trio.sleep(21)

    assert two_failed is WorkerState.READY
    assert bench.worker.state is WorkerState.UNHEALTHY
    assert outcome(bench.worker) is expected
    assert bench.worker.is_silent is silent


async def test_a_probe_that_hangs_ends_with_its_timeout(autojump_clock: MockClock) -> None:
    bench = Bench(Engine(health=hang))

    async with bench.probing():
        await trio.sleep(5.1)

    assert bench.worker.last_probe is not None
    assert bench.worker.last_probe.outcome is ProbeOutcome.TIMED_OUT
    assert bench.engine.times("/health") == [0.0]


async def test_a_slow_but_good_health_check_passes(autojump_clock: MockClock) -> None:
    # SGLang 0.5.23 generates a token for it.
    async def slow(request: httpx.Request) -> httpx.Response:
        await trio.sleep(2)
        return httpx.Response(200)

    bench = Bench(Engine(health=slow))

    async with bench.probing():
        await trio.sleep(3)

    assert bench.worker.is_ready


async def test_an_ill_worker_is_confirmed_quickly_once_it_answers(
    autojump_clock: MockClock,
) -> None:
    bench = Bench()

    async with bench.probing():
        await trio.sleep(0.1)
        bench.engine.health = refuse
        await trio.sleep(35)
        bench.engine.health = 200
        await trio.sleep(10)

    assert bench.moves == [(0.0, "ready"), (30.0, "unhealthy"), (41.0, "ready")]


async def test_a_flapping_worker_stays_out(autojump_clock: MockClock) -> None:
    bench = Bench()
    answers = iter([200] + [503] * 3 + [200, 503] * 10)

    async def flap(request: httpx.Request) -> httpx.Response:
        return httpx.Response(next(answers))

    bench.engine.health = flap
    async with bench.probing():
        await trio.sleep(120)

    assert bench.moves == [(0.0, "ready"), (30.0, "unhealthy")]


async def test_a_worker_that_returns_with_another_model_serves_that(
    autojump_clock: MockClock,
) -> None:
    bench = Bench()
    served: list[tuple[str, ...]] = []

    def note(worker: Worker, edge: Edge) -> None:
        if edge.target is WorkerState.READY and edge.source is not edge.target:
            served.append(worker.models)

    bench.worker.listeners.append(note)
    async with bench.probing():
        await trio.sleep(0.1)
        bench.engine.health = refuse
        await trio.sleep(35)
        bench.engine.health, bench.engine.model = 200, "other"
        await trio.sleep(15)

    assert served == [("tiny",), ("other",)]
    assert bench.fleet.ready("mixed", "tiny") == ()
    assert bench.fleet.ready("mixed", "other") == (bench.worker,)


async def test_a_restart_seen_by_one_failed_probe_shows_the_new_model(
    autojump_clock: MockClock,
) -> None:
    bench = Bench()

    async with bench.probing():
        await trio.sleep(0.1)
        bench.engine.health = refuse
        await trio.sleep(10)
        bench.engine.health, bench.engine.model = 200, "other"
        await trio.sleep(10)

    assert bench.moves == [(0.0, "ready")]
    assert bench.worker.models == ("other",)


async def test_a_restart_between_two_probes_shows_in_the_end(autojump_clock: MockClock) -> None:
    bench = Bench()

    async with bench.probing():
        await trio.sleep(0.1)
        bench.engine.model = "other"
        await trio.sleep(10 * LEARN_EVERY)

    assert bench.worker.models == ("other",)


async def test_what_is_known_stays_when_a_routine_question_fails(
    autojump_clock: MockClock,
) -> None:
    bench = Bench()

    async with bench.probing():
        await trio.sleep(0.1)
        bench.engine.listing = hang
        await trio.sleep(200)

    assert bench.worker.is_ready
    assert bench.worker.models == ("tiny",)


#### No health endpoint


async def test_a_fingerprint_is_learned_kept_and_forgotten_with_the_model(
    autojump_clock: MockClock,
) -> None:
    bench = Bench(settings=Settings(migration_limit=1))
    bench.engine.pages["/tokenize"] = {"tokens": [1, 2, 3]}  # type: ignore[dict-item]  # JSON

    async with bench.probing():
        await trio.sleep(1)
        known = bench.worker.fingerprint
        bench.engine.pages["/tokenize"] = {"nothing": "here"}
        bench.engine.model = "another"
        await trio.sleep(10 * LEARN_EVERY + 5)
        forgotten = bench.worker.fingerprint

    assert known is not None
    assert forgotten is None


async def test_without_migration_nobody_is_asked_to_tokenize(autojump_clock: MockClock) -> None:
    bench = Bench()

    async with bench.probing():
        await trio.sleep(1)

    assert "/tokenize" not in [path for _, path in bench.engine.asked]


@pytest.mark.parametrize("missing", [404, 405, 501])
async def test_without_a_health_endpoint_the_list_of_models_is_asked(
    autojump_clock: MockClock, missing: int
) -> None:
    bench = Bench(Engine(health=missing))

    with capture_logs() as logs:
        async with bench.probing():
            await trio.sleep(25)

    assert bench.worker.is_ready
    assert [line["worker"] for line in logs if "no health endpoint" in line["event"]] == ["w1"]


async def test_a_server_that_wants_a_key_is_a_server(autojump_clock: MockClock) -> None:
    bench = Bench(Engine(health=404, listing=401), kind="openai")

    async with bench.probing():
        await trio.sleep(1)

    assert bench.worker.is_ready
    assert bench.worker.serves("anything")


@pytest.mark.parametrize("kind", ["auto", "vllm", "sglang"])
async def test_who_can_only_be_posted_to_behind_nats_is_there(
    autojump_clock: MockClock, kind: str
) -> None:
    """Infera's own worker sends on every request as a POST, which engines refuse at these paths."""
    bench = Bench(Engine(health=405, listing=405, pages={}), url="nats:w1", kind=kind)

    async with bench.probing():
        await trio.sleep(30)

    assert bench.worker.is_ready
    assert bench.worker.engine == ("openai" if kind == "auto" else kind)
    assert bench.worker.serves("anything")
    assert bench.worker.addresses == []  # its broker knows the way


@pytest.mark.parametrize("status", [404, 500, 503])
async def test_behind_nats_nothing_else_counts_as_being_there(
    autojump_clock: MockClock, status: int
) -> None:
    bench = Bench(Engine(health=status, listing=status), url="nats:w1")

    async with bench.probing():
        await trio.sleep(30)

    assert bench.worker.state is WorkerState.PROBING


async def test_who_was_vouched_for_is_asked_all_the_same(autojump_clock: MockClock) -> None:
    bench = Bench()
    bench.worker.learn(Knowledge("vllm", ("registered",)))
    bench.worker.probed(Probe(ProbeOutcome.PASSED, trio.current_time(), "registered"))

    async with bench.probing():
        await trio.sleep(0.1)

    assert bench.worker.models == ("tiny",)


@pytest.mark.parametrize("listing", [404, 500])
async def test_a_server_without_either_is_no_worker(
    autojump_clock: MockClock, listing: int
) -> None:
    bench = Bench(Engine(health=404, listing=listing))

    async with bench.probing():
        await trio.sleep(30)

    assert bench.worker.state is WorkerState.PROBING
    assert outcome(bench.worker) is ProbeOutcome.BAD_STATUS


#### Asking for a probe


async def test_a_probe_can_be_asked_for(autojump_clock: MockClock) -> None:
    bench = Bench()

    async with bench.probing():
        await trio.sleep(3)
        bench.engine.health = refuse
        bench.worker.probe_soon()
        await trio.sleep(0.01)

    assert bench.worker.is_silent
    assert bench.engine.times("/health") == [0.0, 3.0]


async def test_asking_often_does_not_probe_often(autojump_clock: MockClock) -> None:
    bench = Bench()

    async with bench.probing():
        for _ in range(300):
            bench.worker.probe_soon()
            await trio.sleep(0.01)

    assert len(bench.engine.times("/health")) <= 7


async def test_asking_during_a_probe_is_followed_by_another(autojump_clock: MockClock) -> None:
    bench = Bench(Engine(health=hang))

    async with bench.probing():
        await trio.sleep(1)
        bench.worker.probe_soon()
        await trio.sleep(4.1)

    assert bench.engine.times("/health") == [0.0, 5.0]


async def test_a_probe_that_was_asked_for_learns_anew(autojump_clock: MockClock) -> None:
    bench = Bench()

    async with bench.probing():
        await trio.sleep(3)
        bench.engine.model = "other"
        bench.worker.probe_soon()
        await trio.sleep(0.01)

    assert bench.worker.models == ("other",)


#### The end of the loop


async def ends(bench: Bench, after: float) -> bool:
    """Run the loop, remove the worker, and say whether the loop ended at once."""
    transport = httpx.MockTransport(bench.engine.handle)
    done = trio.Event()

    async def run() -> None:
        await probe_forever(bench.worker, transport, bench.settings)
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.sleep(after)
        bench.fleet.remove("w1")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return done.is_set()


async def test_removal_ends_the_loop_between_probes(autojump_clock: MockClock) -> None:
    assert await ends(Bench(), after=3)


async def test_removal_ends_the_loop_in_the_middle_of_a_probe(autojump_clock: MockClock) -> None:
    assert await ends(Bench(Engine(health=hang)), after=3)


async def test_a_draining_worker_is_probed_on(autojump_clock: MockClock) -> None:
    bench = Bench()

    async with bench.probing():
        await trio.sleep(3)
        bench.fleet.drain("w1")
        bench.engine.health = refuse
        await trio.sleep(10)

    assert bench.worker.state is WorkerState.DRAINING
    assert bench.worker.is_silent


#### What nobody foresaw


async def test_a_crash_in_a_probe_is_logged_counted_and_survived(
    autojump_clock: MockClock,
) -> None:
    bench = Bench(Engine(health=crash))

    with capture_logs() as logs:
        async with bench.probing():
            await trio.sleep(0.1)
            crashed = outcome(bench.worker)
            bench.engine.health = 200
            await trio.sleep(1)

    assert crashed is ProbeOutcome.CRASHED
    assert bench.worker.is_ready
    assert [line["worker"] for line in logs if line["log_level"] == "error"] == ["w1"]


async def test_an_answer_without_end_is_cut_off_and_not_kept(autojump_clock: MockClock) -> None:
    async def flood(request: httpx.Request) -> httpx.Response:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b" " * BODY_BYTES_MAX
            await trio.sleep_forever()

        return httpx.Response(200, content=chunks())

    bench = Bench(Engine(health=flood))

    async with bench.probing():
        await trio.sleep(6)

    assert outcome(bench.worker) is ProbeOutcome.TIMED_OUT


async def test_another_role_than_configured_is_pointed_out(autojump_clock: MockClock) -> None:
    page = {"model_path": "m", "tokenizer_path": "m", "disaggregation_mode": "prefill"}

    async def listing(request: httpx.Request) -> httpx.Response:
        return models("tiny", "sglang")

    bench = Bench(Engine(listing=listing, pages={"/model_info": page}))
    with capture_logs() as logs:
        async with bench.probing():
            await trio.sleep(1)

    told = [line["told"] for line in logs if "role" in line["event"]]
    assert (bench.worker.engine, told) == ("sglang", ["prefill"])


#### Names


@define(eq=False)
class Names(trio.abc.HostnameResolver):
    """A resolver with one name, which may move or be lost."""

    address: str | None

    async def getaddrinfo(  # type: ignore[override]  # the stubs name one form of entry per family
        self,
        host: bytes | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if self.address is None:
            raise socket.gaierror(errno.ENOENT, "name not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.address, 9000))]

    async def getnameinfo(
        self, sockaddr: tuple[str, int] | tuple[str, int, int, int], flags: int
    ) -> tuple[str, str]:
        raise NotImplementedError


@contextmanager
def resolving(names: Names) -> Iterator[None]:
    before = trio.socket.set_custom_hostname_resolver(names)
    try:
        yield
    finally:
        trio.socket.set_custom_hostname_resolver(before)


async def test_a_name_is_looked_up_anew_at_each_probe(autojump_clock: MockClock) -> None:
    names = Names("10.0.0.1")
    bench = Bench(url="http://engine.example:9000")

    with resolving(names):
        async with bench.probing():
            await trio.sleep(1)
            before = bench.worker.addresses
            names.address = "10.0.0.2"
            await trio.sleep(10)

    assert before == [(socket.AF_INET, ("10.0.0.1", 9000))]
    assert bench.worker.addresses == [(socket.AF_INET, ("10.0.0.2", 9000))]


async def test_a_lost_name_fails_the_probe_and_keeps_the_address(
    autojump_clock: MockClock,
) -> None:
    names = Names("10.0.0.1")
    bench = Bench(url="http://engine.example:9000")

    with resolving(names):
        async with bench.probing():
            await trio.sleep(1)
            names.address = None
            await trio.sleep(10)

    assert outcome(bench.worker) is ProbeOutcome.UNRESOLVED
    assert not bench.worker.is_silent
    assert bench.worker.addresses == [(socket.AF_INET, ("10.0.0.1", 9000))]


def test_the_first_pauses_only_grow() -> None:
    assert list(FIRST_PAUSES_SECS) == sorted(FIRST_PAUSES_SECS)


#### Many that named themselves


async def test_thousands_take_turns(autojump_clock: MockClock) -> None:
    turns, taken = Turns(), list[tuple[int, float]]()
    began_at = trio.current_time()

    async def take(number: int) -> None:
        await turns.take()
        taken.append((number, trio.current_time() - began_at))

    async with trio.open_nursery() as nursery:
        for number in range(1000):
            nursery.start_soon(take, number)
        with trio.move_on_after(0):
            await turns.take()  # leaves no gap behind
    moments = sorted(at for _, at in taken)
    assert len(moments) == 1000
    assert moments[-1] == pytest.approx(999 * TURN_SECS)
    assert all(b - a >= TURN_SECS * 0.99 for a, b in pairwise(moments))
