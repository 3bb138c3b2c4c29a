"""The workers: what is known of each, how many legs it carries, and who of them is ready.

Everything here is pure: probes and streams report what they saw, and the chart decides what
follows from it. Our load is the size of the set of live legs and nothing else, so it cannot drift;
what other routers add to it is what an agent says.
Nothing here may open a socket, sleep, or keep a worker alive that has been removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Protocol

from attrs import define, field, frozen

from router.breaker import Breaker
from router.engines import Knowledge
from router.workerspec import WorkerSpec
from statemachines import WORKER, Edge
from statemachines.worker import WorkerState

Address = tuple[int, tuple[str, int] | tuple[str, int, int, int]]


class Origin(Enum):
    """Who named a worker."""

    STATIC = "static"  # the settings
    API = "api"
    REGISTRY = "registry"


class DuplicateWorker(ValueError):
    """A worker with this id is in the fleet already."""


class UnknownWorker(KeyError):
    """No worker with this id is in the fleet."""

    def __str__(self) -> str:
        return f"worker {self.args[0]}: not in the fleet"


#### worker


class ProbeOutcome(Enum):
    """What one health probe met."""

    PASSED = "passed"
    REFUSED = "refused"  # nothing accepts connections at that address
    TIMED_OUT = "timed_out"
    UNAVAILABLE = "unavailable"  # a 503: starting, ill, or draining with its streams alive
    BAD_STATUS = "bad_status"
    BROKEN = "broken"  # accepted, then cut or answered with something that is not HTTP
    UNRESOLVED = "unresolved"  # the host has no address
    CRASHED = "crashed"  # the probe itself failed in a way nobody foresaw: a bug of ours


@frozen
class Probe:
    """One health probe: what it met, and when it was answered or given up."""

    outcome: ProbeOutcome
    at: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome is ProbeOutcome.PASSED


@frozen(eq=False)
class DrainWindow:
    """How long a drain lets streams run before those that can move are taken away; one a drain."""

    seconds: float


@define(eq=False)
class Worker:
    """One engine; subject of the worker chart. Removed and added again, it is another Worker."""

    id: str
    url: str  # scheme://host:port and the base path
    scheme: str
    host: str
    port: int
    base_path: str
    configured_engine: str
    role: str
    group: str | None
    bootstrap_port: int | None
    bootstrap_host: str  # where decode workers find a prefill worker's KV cache
    breaker: Breaker
    is_behind_nats: bool = False
    origin: Origin = Origin.STATIC
    dp_size: int = 1
    failure_threshold: int = 3
    success_threshold: int = 2
    listeners: list[Callable[[Worker, Edge], None]] = field(factory=list)
    state: WorkerState = WorkerState.PROBING
    # Invariant: exactly the legs that are between dispatch and their final state. Whoever starts
    # a leg adds it, its final state discards it; load is read from here and counted nowhere else.
    legs: set[object] = field(factory=set)
    #: Requests of other routers, as its agent last told; 0 where nobody tells.
    elsewhere: int = 0
    engine: str = field(init=False)
    models: tuple[str, ...] = ()
    context_length: int | None = None
    #: Equal for workers of one model whose tokens are the same; None while that is not known.
    fingerprint: str | None = None
    addresses: list[Address] = field(factory=list)
    knowledge: Knowledge | None = None  # as last learned; None until then
    last_probe: Probe | None = None
    #: Of the drain that it is in; None where it is in none, or in one that takes no streams away.
    window: DrainWindow | None = None
    passes: int = 0  # probes passed in a row
    failures: int = 0  # probes failed in a row
    timeouts: int = 0  # probes timed out in a row
    on_probe_wanted: Callable[[], None] | None = None  # set by the probe loop while it runs
    on_learned: Callable[[], None] | None = None  # set by the fleet

    #: The bootstrap port was configured, and is not to be learned.
    has_own_port: bool = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.engine = self.configured_engine
        self.has_own_port = self.bootstrap_port is not None

    def __repr__(self) -> str:
        return f"<Worker {self.id}: {self.state.value}>"

    @property
    def authority(self) -> bytes:
        """Host and port as they stand in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode()

    @property
    def inflight(self) -> int:
        return len(self.legs)

    @property
    def passed_enough(self) -> bool:
        """Guard: this many passed probes in a row show that an ill worker has recovered."""
        return self.passes >= self.success_threshold

    @property
    def failed_enough(self) -> bool:
        """Guard: this many failed probes in a row are an illness, fewer a hiccup."""
        return self.failures >= self.failure_threshold

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def is_gone(self) -> bool:
        return self.state is WorkerState.GONE

    @property
    def is_silent(self) -> bool:
        """Whether its probes say that nobody is there any more.

        A refusal says so at once, timeouts only after the failure threshold. A 503 does not: SGLang
        0.5.23 answers it while it drains and still finishes its streams.
        """
        refused = self.last_probe is not None and self.last_probe.outcome is ProbeOutcome.REFUSED
        return refused or self.timeouts >= self.failure_threshold

    def serves(self, model: str | None) -> bool:
        """Whether requests for this model may go here; a worker that names no models takes any."""
        return model is None or not self.models or model in self.models

    def probed(self, probe: Probe) -> None:
        """Take in the result of a health probe; the chart decides what follows."""
        timed_out = probe.outcome is ProbeOutcome.TIMED_OUT
        self.last_probe = probe
        self.passes = self.passes + 1 if probe.passed else 0
        self.failures = 0 if probe.passed else self.failures + 1
        self.timeouts = self.timeouts + 1 if timed_out else 0
        if not self.is_gone:  # removed while its probe was under way
            WORKER.fire(self, "probe_passed" if probe.passed else "probe_failed")

    def learn(self, knowledge: Knowledge) -> None:
        """Take in what the engine says of itself; what was configured stays."""
        if not self.has_own_port and knowledge.bootstrap_port is not None:
            self.bootstrap_port = knowledge.bootstrap_port
        if self.configured_engine == "auto":
            self.engine = knowledge.engine
        self.knowledge = knowledge
        self.models = knowledge.models
        self.context_length = knowledge.context_length
        if self.on_learned is not None:
            self.on_learned()

    def probe_soon(self) -> None:
        """Ask for a probe now rather than at the end of the interval; costs nothing to repeat."""
        if self.on_probe_wanted is not None:
            self.on_probe_wanted()


#### fleet


class FleetSettings(Protocol):
    """The settings that every worker of a fleet shares; the configuration's own type fits."""

    @property
    def breaker_failure_threshold(self) -> int: ...
    @property
    def breaker_cooldown_secs(self) -> float: ...
    @property
    def breaker_max_cooldown_secs(self) -> float: ...
    @property
    def health_failure_threshold(self) -> int: ...
    @property
    def health_success_threshold(self) -> int: ...


@define(eq=False)
class Fleet:
    """The workers there are. Asking who is ready costs a lookup until something changes."""

    settings: FleetSettings
    worker_listeners: tuple[Callable[[Worker, Edge], None], ...] = ()
    breaker_listeners: tuple[Callable[[Breaker, Edge], None], ...] = ()
    on_joined: list[Callable[[Worker], None]] = field(factory=list)
    on_left: list[Callable[[Worker], None]] = field(factory=list)
    #: There are prefill or decode workers, in whatever state.
    has_halves: bool = field(init=False, default=False)
    _workers: dict[str, Worker] = field(init=False, factory=dict)
    # Answers of `ready`, thrown away whole when a worker moves, learns, joins or leaves. Only
    # models that some worker has named get a place, so clients cannot make it grow.
    _ready: dict[tuple[str, str | None], tuple[Worker, ...]] = field(init=False, factory=dict)

    def __repr__(self) -> str:
        return f"<Fleet: {list(self._workers.values())}>"

    def add(self, spec: WorkerSpec, origin: Origin = Origin.STATIC) -> Worker:
        """A new worker, not yet probed; raises DuplicateWorker for an id that is taken."""
        if spec.id in self._workers:
            raise DuplicateWorker(f"worker {spec.id}: already in the fleet")
        worker = self._workers[spec.id] = self._make(spec, origin)
        self._forget()
        self.has_halves = self.has_halves or worker.role != "mixed"
        _tell(self.on_joined, worker)
        return worker

    def remove(self, worker_id: str) -> Worker:
        """Take a worker out at once; its live legs run on. Raises UnknownWorker."""
        worker = self.get(worker_id)
        del self._workers[worker_id]
        WORKER.fire(worker, "removed")
        self._forget()
        if worker.role != "mixed":
            self.has_halves = any(each.role != "mixed" for each in self._workers.values())
        _tell(self.on_left, worker)
        return worker

    def drain(self, worker_id: str) -> Worker:
        """Send a worker nothing new from now on. Raises UnknownWorker; draining twice is fine."""
        worker = self.get(worker_id)
        WORKER.fire(worker, "drain_asked")
        return worker

    def cancel_drain(self, worker_id: str) -> Worker:
        """Let a draining worker serve again once it passes a probe. Raises UnknownWorker."""
        worker = self.get(worker_id)
        if worker.state is WorkerState.DRAINING:
            worker.window = None
            WORKER.fire(worker, "drain_cancelled")
            worker.probe_soon()
        return worker

    def get(self, worker_id: str) -> Worker:
        """The worker of that id; raises UnknownWorker."""
        try:
            return self._workers[worker_id]
        except KeyError:
            raise UnknownWorker(worker_id) from None

    def all(self) -> tuple[Worker, ...]:
        """Every worker in the fleet, whatever its state, in the order they joined."""
        return tuple(self._workers.values())

    def ready(self, role: str, model: str | None = None) -> tuple[Worker, ...]:
        """The ready workers of that role that may serve that model (None = any).

        The same tuple until something changes, so its identity tells whether anything did.
        """
        try:
            return self._ready[role, model]
        except KeyError:
            return self._find_ready(role, model)

    def models(self) -> tuple[str, ...]:
        """The models that ready workers name, each once, first come first."""
        return tuple(dict.fromkeys(m for w in self.all() if w.is_ready for m in w.models))

    def knows(self, model: str) -> bool:
        """Whether a missing worker for that model is an outage rather than a wrong name.

        True when a worker in whatever state names it, and while a worker that might name it has
        not been asked yet.
        """
        return any(_may_serve(worker, model) for worker in self.all())

    def _make(self, spec: WorkerSpec, origin: Origin) -> Worker:
        breaker = Breaker(
            id=spec.id,
            threshold=self.settings.breaker_failure_threshold,
            cooldown_secs=self.settings.breaker_cooldown_secs,
            max_cooldown_secs=self.settings.breaker_max_cooldown_secs,
            listeners=list(self.breaker_listeners),
        )
        return Worker(
            id=spec.id,
            url=spec.url,
            scheme=spec.scheme,
            host=spec.host,
            port=spec.port,
            base_path=spec.base_path,
            configured_engine=spec.engine,
            role=spec.role,
            group=spec.group,
            bootstrap_port=spec.bootstrap_port,
            bootstrap_host=spec.meeting_host,
            breaker=breaker,
            is_behind_nats=spec.is_behind_nats,
            origin=origin,
            dp_size=spec.dp_size,
            failure_threshold=self.settings.health_failure_threshold,
            success_threshold=self.settings.health_success_threshold,
            listeners=[self._moved, *self.worker_listeners],
            on_learned=self._forget,
        )

    def _moved(self, worker: Worker, edge: Edge) -> None:
        if edge.source is not edge.target:
            self._forget()

    def _forget(self) -> None:
        self._ready.clear()

    def _find_ready(self, role: str, model: str | None) -> tuple[Worker, ...]:
        found = tuple(
            worker
            for worker in self._workers.values()
            if worker.is_ready and worker.role == role and worker.serves(model)
        )
        if model is None or any(model in worker.models for worker in found):
            self._ready[role, model] = found
        return found


def _may_serve(worker: Worker, model: str) -> bool:
    if worker.knowledge is None:
        return worker.state is WorkerState.PROBING
    return worker.serves(model)


def _tell(listeners: Iterable[Callable[[Worker], None]], worker: Worker) -> None:
    for listen in listeners:
        listen(worker)
