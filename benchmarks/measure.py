"""One measurement: one candidate under one case, with fresh processes.

The candidate has core 0 to itself; workers, load client and this program share core 1. CPU time and
memory are sampled when the load client says that its window opens and closes.
"""

import contextlib
import http.client
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from attrs import frozen

from benchmarks import tools
from benchmarks.candidates import Candidate
from benchmarks.cases import Case
from benchmarks.processes import Usage, free_port, pinned, usage

CANDIDATE_CORE, LOAD_CORE = 0, 1
WORKERS = 2
READY_SECONDS = 60.0
SETTLE_SECONDS = 0.5
WARM_SECONDS = 1.5
PATIENCE_SECONDS = 30.0


class MeasurementFailed(Exception):
    """The candidate did not start, died or answered nothing; says where its log is."""


class Counts(msgspec.Struct, frozen=True):
    """What the load client prints; latencies in microseconds.

    Answers and errors are counted from the start, all else in the window.
    """

    seconds: float
    answers: int
    errors: int
    requests: int
    tokens: int
    bytes: int
    p50: int
    p99: int
    p999: int
    first_p50: int
    first_p99: int


@frozen
class Sample:
    """One candidate under one case, once."""

    candidate: str
    case: str
    operations: int
    per_second: float
    cpu_us: float
    """CPU microseconds per operation (a unary request or a streamed event)."""
    cpu_share: float
    """Of one core, over the window."""
    waited_share: float
    """Of the window, spent ready to run while somebody else had the core."""
    system_share: float
    """Of the CPU time, spent in the kernel."""
    idle_bytes: int
    loaded_bytes: int
    counts: Counts


def measure(candidate: Candidate, case: Case, *, seconds: float, nice: int, logs: Path) -> Sample:
    """Starts everything, loads it, ends everything. Raises MeasurementFailed."""
    log = logs / f"{candidate.name}-{case.name}.log"
    log.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        worker_core = LOAD_CORE if candidate.command else CANDIDATE_CORE
        workers = [
            stack.enter_context(worker(case, worker_core, nice, logs))
            for _ in range(WORKERS if candidate.command else 1)
        ]
        port, session = workers[0]
        if candidate.command:
            port = free_port()
            words = candidate.words(
                port=port,
                metrics_port=free_port(),
                workers=[f"http://127.0.0.1:{port}" for port, _ in workers],
            )
            session = stack.enter_context(pinned(words, CANDIDATE_CORE, log, nice=nice)).pid
        wait_ready(port, log)
        time.sleep(SETTLE_SECONDS)
        idle = usage(session)
        counts, opened, closed = load(port, case, session, seconds, nice, log)
    if counts.requests + counts.tokens == 0:
        raise MeasurementFailed(f"{counts.errors} errors and nothing else; see {log}")
    return _sample(candidate, case, counts, idle, opened, closed)


@contextlib.contextmanager
def worker(case: Case, core: int, nice: int, logs: Path) -> Iterator[tuple[int, int]]:
    """A simulated worker; its port and its session."""
    port = free_port()
    words = [
        str(tools.build("worker")),
        str(port),
        str(case.rate),
        "stepped" if case.stepped else "",
    ]
    with pinned(words, core, logs / "workers.log", nice=nice) as process:
        yield port, process.pid


def wait_ready(port: int, log: Path) -> None:
    """Until a whole request succeeds; a listening port alone says little about a router."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            status = connection.getresponse().status
            connection.close()
            if status == http.client.OK:
                return
        time.sleep(0.1)
    raise MeasurementFailed(f"not ready after {READY_SECONDS:.0f} s; see {log}")


def load(
    port: int, case: Case, session: int, seconds: float, nice: int, log: Path
) -> tuple[Counts, Usage, Usage]:
    """Loads a candidate; what came of it, and what its session had used before and after."""
    numbers = [case.tokens, case.prompt_bytes, case.ramp_seconds, WARM_SECONDS, seconds]
    words = [str(tools.build("load")), str(port), str(case.connections), case.mode]
    with (
        pinned([*words, *map(str, numbers)], LOAD_CORE, log, nice=nice, pipes=True) as process,
        _watched(process, sum(numbers[2:]) + PATIENCE_SECONDS),
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "open\n":
            raise MeasurementFailed(f"the load client could not go on; see {log}")
        opened = usage(session)
        if process.stdout.readline() != "closed\n":
            raise MeasurementFailed(f"the load client could not go on; see {log}")
        closed = usage(session)
        process.stdin.write("\n")
        process.stdin.flush()
        return msgspec.json.decode(process.stdout.readline(), type=Counts), opened, closed


@contextlib.contextmanager
def _watched(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    """Kills a process that takes much longer than it should, which ends its output."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _sample(
    candidate: Candidate, case: Case, counts: Counts, idle: Usage, opened: Usage, closed: Usage
) -> Sample:
    operations = counts.requests if case.mode == "unary" else counts.tokens
    cpu_ns = closed.cpu_ns - opened.cpu_ns
    system = closed.system_ticks - opened.system_ticks
    ticks = system + closed.user_ticks - opened.user_ticks
    return Sample(
        candidate=candidate.name,
        case=case.name,
        operations=operations,
        per_second=operations / counts.seconds,
        cpu_us=cpu_ns / 1000 / max(operations, 1),
        cpu_share=cpu_ns / 1e9 / counts.seconds,
        waited_share=(closed.waited_ns - opened.waited_ns) / 1e9 / counts.seconds,
        system_share=system / max(ticks, 1),
        idle_bytes=idle.resident_bytes,
        loaded_bytes=closed.resident_bytes,
        counts=counts,
    )
