"""What a streamed event costs over NATS, beside HTTP: `python -m benchmarks.nats_events`.

The router has core 0 to itself; broker, agents, workers and clients share core 1. Three questions:
the router's CPU per event at 5,000 events a second over either wire (and how much of it is the
bridge's thread, and what the agent adds on its side), and what 10,000 events a second over NATS do
to the latency of streams over HTTP that pass through the same router.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from attrs import define, frozen

from benchmarks import tools
from benchmarks.cases import ENDLESS, Case
from benchmarks.measure import CANDIDATE_CORE, LOAD_CORE, Counts, load, worker
from benchmarks.nats_source import MODEL
from benchmarks.processes import free_port, pinned, usage
from router.commands.demo_nats import MISSING, find_server

RATE = 30.0
WORKERS = 2
EVENTS = Case("5000/s", "167 streams", "stream", 167, ENDLESS, rate=RATE, ramp_seconds=1)
RELAYED = Case("p128", "128 streams", "stream", 128, ENDLESS, rate=RATE, ramp_seconds=1)
HTTP_MODEL = "m"
BESIDE_STREAMS = 334
"""Times RATE: 10,000 events a second."""
READY_SECONDS = 30.0
RATIO_MAX, P99_MAX_US = 3.0, 2000


@define(eq=False)
class Bench:
    """What every measurement here needs."""

    logs: Path
    nice: int
    seconds: float

    @contextlib.contextmanager
    def broker(self) -> Iterator[int]:
        """A NATS server on the load's core; its port."""
        program = find_server()
        if program is None:
            raise SystemExit(MISSING)
        port = free_port()
        words = [program, "--addr", "127.0.0.1", "--port", str(port), "--jetstream"]
        with tempfile.TemporaryDirectory() as store:
            words += ["--store_dir", store]
            with pinned(words, LOAD_CORE, self.logs / "nats-server.log", nice=self.nice):
                time.sleep(0.5)
                yield port

    @contextlib.contextmanager
    def baton(self, name: str, core: int, *words: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "router", *words]
        with pinned(command, core, self.logs / f"{name}.log", nice=self.nice) as process:
            yield process

    @contextlib.contextmanager
    def router(self, *words: str, models: set[str]) -> Iterator[tuple[int, int]]:
        """A router on a core of its own, once it serves these models; its port and process id."""
        port = free_port()
        flags = ["--port", str(port), "--policy", "round_robin", *words]
        with self.baton("router", CANDIDATE_CORE, "serve", *flags) as process:
            _wait_for(port, models)
            time.sleep(0.5)
            yield port, process.pid


def _wait_for(port: int, models: set[str]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as answer:
                if models <= {each["id"] for each in json.load(answer)["data"]}:
                    return
        time.sleep(0.1)
    raise SystemExit(f"the router does not serve {models}; see build/benchmarks/logs")


#### CPU per event


@frozen
class Cost:
    """Microseconds of CPU per event."""

    router: float
    bridge: float
    """The part of the router's that is not its main thread's."""
    agents: float
    counts: Counts

    @property
    def per_second(self) -> float:
        return self.counts.tokens / self.counts.seconds


def over_http(bench: Bench) -> Cost:
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(_worker(bench)) for _ in range(WORKERS)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        port, process = stack.enter_context(bench.router("--worker-urls", *urls, models={"m"}))
        return _cost(bench, port, process, [])


def over_nats(bench: Bench) -> Cost:
    with contextlib.ExitStack() as stack:
        broker = f"nats://127.0.0.1:{stack.enter_context(bench.broker())}"
        agents = []
        for number in range(WORKERS):
            url = f"http://127.0.0.1:{stack.enter_context(_worker(bench))}"
            words = ["agent", "--engine-url", url, "--id", f"w{number}", "--nats", broker]
            agent = bench.baton(f"agent-{number}", LOAD_CORE, *words)
            agents.append(stack.enter_context(agent).pid)
        port, process = stack.enter_context(bench.router("--nats", broker, models={"m"}))
        return _cost(bench, port, process, agents)


@contextlib.contextmanager
def _worker(bench: Bench) -> Iterator[int]:
    with worker(EVENTS, LOAD_CORE, bench.nice, bench.logs) as (port, _):
        yield port


def _cost(bench: Bench, port: int, process: int, agents: list[int]) -> Cost:
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    # load() samples one session at the window's ends; the others are sampled close to them.
    ramp = EVENTS.ramp_seconds + 1.5
    timers = [
        threading.Timer(ramp + 0.3, lambda: before.update(_used(process, agents))),
        threading.Timer(ramp + bench.seconds - 0.3, lambda: after.update(_used(process, agents))),
    ]
    for timer in timers:
        timer.start()
    log = bench.logs / "load.log"
    counts, opened, closed = load(port, EVENTS, process, bench.seconds, bench.nice, log)
    for timer in timers:
        timer.join()
    if counts.errors:
        raise SystemExit(f"{counts.errors} of {counts.answers} answers were not good; see {log}")
    part = (after["at"] - before["at"]) / counts.seconds
    events = max(counts.tokens, 1)
    each = {name: (after[name] - before[name]) / part / events / 1000 for name in after}
    router = (closed.cpu_ns - opened.cpu_ns) / events / 1000
    return Cost(router, each["bridge"], each["agents"], counts)


def _used(process: int, agents: list[int]) -> dict[str, float]:
    """Nanoseconds so far."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return {
        "at": time.monotonic(),
        "bridge": sum(_ran(thread) for thread in threads if thread.name != str(process)),
        "agents": sum(usage(session).cpu_ns for session in agents),
    }


def _ran(thread: Path) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int((thread / "schedstat").read_text(encoding="utf-8").split()[0])
    return 0


#### Latency beside


def beside(bench: Bench, streams: int, model: str = MODEL) -> tuple[Counts, float]:
    """The load over HTTP, while so many other streams run; and how many events those had.

    The model says over which wire: NATS, unless it is that of the workers over HTTP.
    """
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(bench.broker())
        words = [sys.executable, "-m", "benchmarks.nats_source", str(broker), "source", str(RATE)]
        stack.enter_context(pinned(words, LOAD_CORE, bench.logs / "source.log", nice=bench.nice))
        urls = [f"http://127.0.0.1:{stack.enter_context(_worker(bench))}" for _ in range(WORKERS)]
        flags = ["--nats", f"nats://127.0.0.1:{broker}", "--worker-urls", *urls, "nats:source"]
        port, process = stack.enter_context(bench.router(*flags, models={"m", MODEL}))
        others = None
        if streams:
            others = stack.enter_context(_others(bench, port, streams, model))
            time.sleep(2)
        log = bench.logs / "load.log"
        counts, _, _ = load(port, RELAYED, process, bench.seconds, bench.nice, log)
        return counts, 0 if others is None else _rate_of(others)


@contextlib.contextmanager
def _others(bench: Bench, port: int, streams: int, model: str) -> Iterator[subprocess.Popen[str]]:
    """A load client that is at work for as long as the measured one."""
    numbers = [ENDLESS, RELAYED.prompt_bytes, 1, 1, bench.seconds + 1]
    words = [str(tools.build("load")), str(port), str(streams), "stream", *map(str, numbers)]
    log = bench.logs / "others.log"
    with pinned([*words, model], LOAD_CORE, log, nice=bench.nice, pipes=True) as process:
        yield process


def _rate_of(others: subprocess.Popen[str]) -> float:
    assert others.stdin is not None
    assert others.stdout is not None
    for _ in ("open", "closed"):
        others.stdout.readline()
    others.stdin.write("\n")
    others.stdin.flush()
    counts = json.loads(others.stdout.readline())
    return float(counts["tokens"] / counts["seconds"])


#### The report


def main() -> int:
    """Measure, print the tables; 1 with --gate when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nats_events")
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="how often everything is measured (3)")
    add("--seconds", type=float, default=5, help="how long each window is (5)")
    add("--nice", type=int, default=0, help="priority of all processes; below 0 needs rights")
    add("--gate", action="store_true", help="exit 1 when a target is missed")
    given = parser.parse_args()
    logs = tools.BUILD / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for program in ("worker", "load"):
        tools.build(program)
    os.sched_setaffinity(0, {LOAD_CORE})
    bench = Bench(logs, given.nice, given.seconds)
    is_good = report_costs(bench, given.rounds)
    is_good = report_latency(bench, given.rounds) and is_good
    return 0 if is_good or not given.gate else 1


def report_costs(bench: Bench, rounds: int) -> bool:
    rows = [(over_http(bench), over_nats(bench)) for _ in range(rounds)]
    print(
        "| wire | router µs/event | of it the bridge | agents µs/event | events/s | p50 / p99 µs |"
    )
    print("|---|---|---|---|---|---|")
    for number, name in enumerate(("HTTP", "NATS")):
        costs = [row[number] for row in rows]
        best = min(costs, key=lambda cost: cost.router)
        middle = median(cost.router for cost in costs)
        print(
            f"| {name} | {best.router:.1f} ({middle:.1f}) | {best.bridge:.1f} | {best.agents:.1f} "
            f"| {best.per_second:.0f} | {best.counts.p50} / {best.counts.p99} |"
        )
    ratio = median(nats.router / http.router for http, nats in rows)
    print(f"\nNATS costs {ratio:.2f} times HTTP (median of the rounds; target {RATIO_MAX})\n")
    return ratio <= RATIO_MAX


def report_latency(bench: Bench, rounds: int) -> bool:
    cases = (
        ("nothing", 0, MODEL),
        ("HTTP", BESIDE_STREAMS, HTTP_MODEL),
        ("NATS", BESIDE_STREAMS, MODEL),
    )
    print("| beside it | events/s | p50 µs | p99 µs: smallest (median) | errors |")
    print("|---|---|---|---|---|")
    lowest = 0.0
    for name, streams, model in cases:
        found = [beside(bench, streams, model) for _ in range(rounds)]
        best, rate = min(found, key=lambda one: one[0].p99)
        middle = median(counts.p99 for counts, _ in found)
        errors = sum(counts.errors for counts, _ in found)
        print(f"| {name} | {rate:.0f} | {best.p50} | {best.p99} ({middle:.0f}) | {errors} |")
        lowest = best.p99
    return lowest <= P99_MAX_US


if __name__ == "__main__":
    sys.exit(main())
