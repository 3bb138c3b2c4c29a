"""`baton top URL`: a running router at a glance, drawn anew every few seconds until Ctrl-C.

What is wrong stands first: workers that get no requests, then those that fail some; requests that
look for a worker, then the oldest. Rates are of the time between two looks. A router that does not
answer is said to be silent, and asked again: it may come back.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from attrs import field, frozen

from router.commands.columns import columns, counted, printable
from router.commands.live import METRICS_PATH, read_metrics
from router.commands.remote import Api, RemoteError, add_admin_key
from statemachines import REQUEST
from statemachines.request import RequestState

SECONDS = 2.0
#: Where nothing says how large the terminal is.
SIZE = (120, 40)
#: Lines of the terminal that workers may take, where there are requests to show as well.
WORKERS_SHARE = 0.5
WORKER_COLUMNS = ("worker", "state", "breaker", "load", "ends/s", "bad/s", "last probe", "role",
                  "engine", "models")  # fmt: skip
REQUEST_COLUMNS = ("request", "state", "for s", "seconds", "worker", "attempts")
#: Looks for a worker: what the client waits for most.
_SEEKING = (RequestState.MIGRATING, RequestState.RESUMING, RequestState.QUEUED)
_CLEAR = "\x1b[H\x1b[J"
_BAD = ("error", "backpressure")
#: What is counted in the head, by its word there: a series, and the labels that it must have.
_RATES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "requests": ("baton_requests_total", "outcome", ()),
    "failed": ("baton_requests_total", "outcome", ("failed", "aborted")),
    "abandoned": ("baton_requests_total", "outcome", ("abandoned",)),
    "retries": ("baton_retries_total", "reason", ()),
    "moves": ("baton_migrations_total", "reason", ()),
    "moves failed": ("baton_migrations_failed_total", "reason", ()),
}


class _Worker(msgspec.Struct):
    """What is shown of a worker; fields that another version does not send are left empty."""

    id: str
    state: str = ""
    breaker: str = ""
    inflight: int = 0
    role: str = ""
    engine: str = ""
    models: tuple[str, ...] = ()
    last_probe: str | None = None


class _Request(msgspec.Struct):
    id: str
    state: str = ""
    seconds: float = 0.0
    seconds_in_state: float = 0.0
    worker: str | None = None
    attempts: int = 0


class _Workers(msgspec.Struct):
    workers: tuple[_Worker, ...]


class _Requests(msgspec.Struct):
    requests: tuple[_Request, ...]


@frozen
class Look:
    """What a router said at one moment."""

    at: float  # seconds, on a clock that never jumps
    workers: tuple[_Worker, ...]
    requests: tuple[_Request, ...]
    #: By the words of `_RATES`.
    counts: Mapping[str, float] = field(factory=dict)
    #: Ends of requests by worker: all, and those that are its fault.
    ends: Mapping[str, tuple[float, float]] = field(factory=dict)


def look(api: Api, at: float) -> Look:
    """Ask a router; raises RemoteError with one line."""
    try:
        workers = msgspec.json.decode(api.ask("GET", "/v1/workers"), type=_Workers).workers
        requests = msgspec.json.decode(api.ask("GET", "/debug/requests"), type=_Requests).requests
    except (msgspec.DecodeError, msgspec.ValidationError) as problem:
        raise RemoteError(f"{api.url}: not the answer of a router: {problem}") from problem
    counts = dict.fromkeys(_RATES, 0.0)
    ends: dict[str, tuple[float, float]] = {}
    for sample in read_metrics(api.ask("GET", METRICS_PATH).decode("utf-8", "replace")):
        for word, (name, label, values) in _RATES.items():
            if sample.name == name and (not values or sample.labels.get(label) in values):
                counts[word] += sample.value
        if sample.name == "baton_worker_requests_total":
            worker, outcome = sample.labels.get("worker", ""), sample.labels.get("outcome")
            every, bad = ends.get(worker, (0.0, 0.0))
            bad += sample.value if outcome in _BAD else 0.0
            ends[worker] = every + sample.value, bad
    return Look(at, workers, requests, counts, ends)


#### One picture


def picture(
    url: str, now: Look, before: Look | None = None, size: tuple[int, int] = SIZE
) -> list[str]:
    """The lines to show; rates need a look before. `size` is columns and lines."""
    width, height = size
    lines = [*_head(url, now, before), ""]
    height -= 1  # the last line of a terminal is where its cursor stands
    room = height - len(lines)
    if now.requests:
        room = max(int(room * WORKERS_SHARE), room - len(now.requests) - 2)
    lines += _table(list(_worker_rows(now, before)), room)
    if now.requests:
        lines += ["", *_table(list(_request_rows(now)), height - len(lines) - 1)]
    return [printable(line)[:width] for line in lines]


def _head(url: str, now: Look, before: Look | None) -> Iterator[str]:
    ready = sum(worker.state == "ready" for worker in now.workers)
    workers = f"{ready:,} of {counted(len(now.workers), 'worker')} ready"
    yield f"{url}  {workers}  {counted(len(now.requests), 'request')} open"
    if before is not None:
        rates = {word: _rate(now.counts[word], before.counts[word], now, before) for word in _RATES}
        yield "  ".join(f"{word} {rate}" for word, rate in rates.items()) + "  (a second)"
    states = {str(state.value): 0 for state in REQUEST.open}
    for request in now.requests:
        states[request.state] = states.get(request.state, 0) + 1
    yield "  ".join(f"{state} {count:,}" for state, count in states.items())


def _rate(count: float, earlier: float, now: Look, before: Look) -> str:
    """A second; a router that was started anew counts from nothing."""
    seconds = now.at - before.at
    since = count if count < earlier else count - earlier
    return f"{since / seconds:.1f}" if seconds > 0 else "-"


def _worker_rows(now: Look, before: Look | None) -> Iterator[tuple[str, ...]]:
    yield WORKER_COLUMNS
    for worker in sorted(now.workers, key=_how_well):
        rates = ["-", "-"]
        if before is not None:
            earlier = before.ends.get(worker.id, (0.0, 0.0))
            counts = zip(now.ends.get(worker.id, (0.0, 0.0)), earlier, strict=True)
            rates = [_rate(count, then, now, before) for count, then in counts]
        yield (
            *(worker.id, worker.state, worker.breaker, f"{worker.inflight:,}", *rates),
            *(worker.last_probe or "-", worker.role, worker.engine, ",".join(worker.models) or "-"),
        )


def _how_well(worker: _Worker) -> tuple[bool, bool, int, str]:
    return worker.state == "ready", worker.breaker == "closed", -worker.inflight, worker.id


def _request_rows(now: Look) -> Iterator[tuple[str, ...]]:
    yield REQUEST_COLUMNS
    seeking = [str(state.value) for state in _SEEKING]
    for each in sorted(now.requests, key=lambda one: (one.state not in seeking, -one.seconds)):
        times = f"{each.seconds_in_state:.1f}", f"{each.seconds:.1f}"
        yield each.id, each.state, *times, each.worker or "-", str(each.attempts)


def _table(rows: Sequence[tuple[str, ...]], room: int) -> list[str]:
    """The first rows, and how many more there are; `room` is in lines."""
    room = max(room, 2)
    if len(rows) <= room:
        return columns(rows).split("\n")
    shown = rows[: room - 1]
    return [*columns(shown).split("\n"), f"and {len(rows) - len(shown):,} more"]


#### Again and again


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    """URL and how often to look."""
    parser.epilog = "Where it does not write to a terminal it looks twice and prints one picture."
    parser.add_argument("url", metavar="URL", help="the router, as http://HOST:PORT")
    parser.add_argument(
        "--every",
        type=_seconds,
        default=SECONDS,
        metavar="SECONDS",
        help=f"between two looks (default {SECONDS:g})",
    )
    parser.add_argument(
        "--once", action="store_true", help="look twice, print one picture, and end"
    )
    add_admin_key(parser)
    parser.set_defaults(command=run_top)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: a number of seconds from 0.1 to 3600")
    return seconds


def run_top(arguments: argparse.Namespace) -> int:
    """Look until Ctrl-C; returns the exit code."""
    url = arguments.url.rstrip("/")
    api = Api(url, arguments.admin_key)
    is_once = arguments.once or not sys.stdout.isatty()
    try:
        now = look(api, time.monotonic())
        if not is_once:
            _draw(picture(url, now, None, shutil.get_terminal_size(SIZE)))
        while True:
            time.sleep(arguments.every)
            before = now
            try:
                now = look(api, time.monotonic())
            except RemoteError as problem:
                if is_once:
                    raise
                _draw([f"baton top: {problem}", "", "It is asked again."])
                continue
            if is_once:
                print("\n".join(picture(url, now, before)))
                return 0
            _draw(picture(url, now, before, shutil.get_terminal_size(SIZE)))
    except RemoteError as problem:
        print(f"baton top: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _draw(lines: Sequence[str]) -> None:
    print(_CLEAR + "\n".join(lines), flush=True)
