"""One probe loop per worker: is it there, what is it, and what does it serve.

The loop reports what it met as facts; the worker's chart decides what follows, and thresholds are
its guards. It lives in the chart's scope `probed`: the edge that leaves that scope cancels it,
also in the middle of a probe. Whatever a worker answers, the loop goes on, and nothing that goes
wrong in it may end the router.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import httpx
import structlog
import trio
from attrs import asdict, define, field

from router.engines import MODELS, Answer, Knowledge, next_question, recognise
from router.migration.fingerprint import fingerprint, question_body, read_ids
from router.wires.client import WireAway, ask, read
from router.worker import Origin, Probe, ProbeOutcome, Worker
from statemachines import Edge
from statemachines.worker import WorkerState

log = structlog.get_logger()

# A fleet that starts together is served as soon as its engines answer, so a worker that has never
# passed is asked more often at first. Afterwards, and never more often than this, the interval.
FIRST_PAUSES_SECS: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
CONFIRM_SECS: Final = 1.0  # between the passes that an ill worker must show to be believed again
SPACING_SECS: Final = 0.5  # from the start of a probe to the next one that is asked for
JITTER: Final = 0.1  # of the interval, so that a large fleet is not probed in one burst
LEARN_EVERY: Final = 6  # probes; an engine may be restarted with another model between two of them
BODY_BYTES_MAX: Final = 4 * 1024 * 1024  # of an answer; SGLang 0.5.23's /server_info has 20 KB

# Between two probes of workers that named themselves. A probe costs a millisecond, and anybody who
# can write to the registry can name thousands: then each is asked less often, and requests are
# served all the same.
TURN_SECS: Final = 0.01

# The health endpoint does not exist, which is no illness: llama.cpp behind a prefix, a gateway
# or an ingress that passes /v1 only. Then the list of models stands in for it.
NO_SUCH_ENDPOINT: Final = frozenset({404, 405, 501})
POST_REFUSED: Final = 405


class ProbeSettings(Protocol):
    """What the operator decides; the configuration's own type fits."""

    @property
    def health_check_interval_secs(self) -> float: ...
    @property
    def health_check_timeout_secs(self) -> float: ...
    @property
    def health_check_endpoint(self) -> str: ...
    @property
    def migration_limit(self) -> int: ...


@define(eq=False)
class Turns:
    """Lets the probes of registered workers begin one after the other, first come first served."""

    _lock: trio.Lock = field(init=False, factory=trio.Lock)
    _next_at: float = field(init=False, default=float("-inf"))

    async def take(self) -> None:
        """Wait for a turn; who is cancelled meanwhile takes up none."""
        async with self._lock:
            await trio.sleep_until(self._next_at)
            self._next_at = trio.current_time() + TURN_SECS


async def probe_forever(
    worker: Worker,
    transport: httpx.AsyncBaseTransport,
    settings: ProbeSettings,
    jitter: Callable[[], float] = random.random,
    turns: Turns | None = None,
) -> None:
    """Probe until the worker is removed.

    `jitter` gives numbers from 0 to 1; 0.5 makes every interval exact. `turns` are shared by all
    workers that have registered.
    """
    with trio.CancelScope() as scope:

        def end_with_scope(_: Worker, edge: Edge) -> None:
            if "probed" in edge.leaves:
                scope.cancel(reason=f"worker is {edge.target.value}")

        loop = ProbeLoop(worker, transport, settings, jitter)
        worker.listeners.append(end_with_scope)
        worker.on_probe_wanted = loop.ask
        try:
            while not worker.is_gone:
                if turns is not None and worker.origin is Origin.REGISTRY:
                    await turns.take()
                await loop.probe()
                await loop.wait()
        finally:
            worker.on_probe_wanted = None
            worker.listeners.remove(end_with_scope)


@define(eq=False)
class ProbeLoop:
    """The steps of one worker's loop, and what it remembers from one probe to the next."""

    worker: Worker
    transport: httpx.AsyncBaseTransport
    settings: ProbeSettings
    jitter: Callable[[], float]
    _asked: trio.Event = field(init=False, factory=trio.Event)
    _started_at: float = field(init=False, default=0.0)
    #: Probes since it was learned from; the first one learns, whatever an agent has registered.
    _since_learned: int = field(init=False, default=LEARN_EVERY)
    _has_endpoint: bool = field(init=False, default=True)

    def ask(self) -> None:
        """Somebody wants to know now; while a probe is under way, one more follows it."""
        self._asked.set()

    async def probe(self) -> None:
        """Probe once, learn if it is time to, and tell the worker."""
        was_asked = self._asked.is_set()
        self._asked = trio.Event()
        self._started_at = trio.current_time()
        try:
            probe = await self._probe(was_asked)
        except WireAway:
            return  # a broker that is away makes no worker ill
        except Exception as error:
            # A bug of ours. It counts against the worker, since a worker that cannot be probed
            # cannot be trusted either, and the next probe may well go through.
            log.exception("probe crashed", worker=self.worker.id)
            probe = _met(ProbeOutcome.CRASHED, type(error).__name__)
        self.worker.probed(probe)

    async def wait(self) -> None:
        """Until the next probe is due or somebody asks for one."""
        with trio.move_on_after(self._pause_secs()):
            await self._asked.wait()
            await trio.sleep_until(self._started_at + SPACING_SECS)

    def _pause_secs(self) -> float:
        worker, interval = self.worker, self.settings.health_check_interval_secs
        if worker.state is WorkerState.PROBING and worker.failures <= len(FIRST_PAUSES_SECS):
            return min(FIRST_PAUSES_SECS[max(worker.failures - 1, 0)], interval)
        if worker.state is WorkerState.UNHEALTHY and worker.passes:
            return min(CONFIRM_SECS, interval)
        return interval * (1 - JITTER + 2 * JITTER * self.jitter())

    async def _probe(self, was_asked: bool) -> Probe:
        probe = await self._timed(self._check_health)
        if not probe.passed:
            return probe
        # After a failure it may be another process that answers, with another model: what it
        # serves must be known before it is given requests. At other times it can wait.
        last = self.worker.last_probe
        must = self.worker.knowledge is None or last is None or not last.passed
        self._since_learned += 1
        if must or was_asked or self._since_learned >= LEARN_EVERY:
            learned = await self._timed(self._learn)
            return learned if must else probe
        return probe

    async def _timed(self, step: Callable[[], Awaitable[Probe]]) -> Probe:
        """Run one step within the timeout, with everything that is expected to go wrong."""
        try:
            with trio.fail_after(self.settings.health_check_timeout_secs):
                return await step()
        except trio.TooSlowError:
            return _met(ProbeOutcome.TIMED_OUT)
        except (socket.gaierror, UnicodeError) as error:
            return _met(ProbeOutcome.UNRESOLVED, str(error))
        except WireAway:
            raise
        except httpx.ConnectError as error:
            return _met(ProbeOutcome.REFUSED, str(error))
        except httpx.RequestError as error:
            return _met(ProbeOutcome.BROKEN, f"{type(error).__name__}: {error}")

    async def _check_health(self) -> Probe:
        await self._resolve()
        answer = await self._get(self.settings.health_check_endpoint)
        if answer.status in NO_SUCH_ENDPOINT:
            self._note_missing_endpoint()
            answer = await self._get(MODELS)
            # A server that wants a key, or is busy, is a server.
            is_there = answer.status < 500 and answer.status not in NO_SUCH_ENDPOINT
            if is_there or self._cannot_be_asked(answer):
                return _met(ProbeOutcome.PASSED, f"{MODELS} answered {answer.status}")
        return _met(_outcome(answer.status), str(answer.status))

    def _cannot_be_asked(self, answer: Answer) -> bool:
        """Infera's own worker turns every request into a POST, and its engine refuses that."""
        return self.worker.is_behind_nats and answer.status == POST_REFUSED

    async def _learn(self) -> Probe:
        answers: dict[str, Answer] = {}
        worker, configured = self.worker, self.worker.configured_engine
        wants_port = worker.role == "prefill" and not worker.has_own_port
        while (path := next_question(answers, configured, wants_port=wants_port)) is not None:
            answer = answers[path] = await self._get(path)
            if path == MODELS and not answer.is_definite:
                return _met(ProbeOutcome.BAD_STATUS, f"{path} answered {answer.status}")
        self._since_learned = 0
        self._take_in(recognise(answers, configured))
        if self.settings.migration_limit:
            await self._learn_fingerprint()
        return _met(ProbeOutcome.PASSED)

    async def _learn_fingerprint(self) -> None:
        """Ask how a fixed text is tokenized; ids are carried only between equal answers."""
        worker = self.worker
        if not worker.models or worker.engine not in ("vllm", "sglang"):
            worker.fingerprint = None
            return
        model = worker.models[0]
        try:
            answer = await self._ask("POST", "/tokenize", question_body(model))
        except httpx.RequestError:
            return  # what was known stays known: a busy engine has not changed its tokenizer
        ids = read_ids(answer.body) if answer.status == 200 else None
        worker.fingerprint = None if ids is None else fingerprint(model, ids)

    def _take_in(self, knowledge: Knowledge) -> None:
        worker = self.worker
        if knowledge != worker.knowledge:
            worker.fingerprint = None  # another model, or another release of the engine
            log.info("worker learned", worker=worker.id, **asdict(knowledge))
        if knowledge.role is not None and knowledge.role != worker.role:
            log.warning(
                "worker says that its role is another",
                worker=worker.id,
                configured=worker.role,
                told=knowledge.role,
            )
        worker.learn(knowledge)

    async def _resolve(self) -> None:
        """Look the host up anew each time: a name may move to another machine."""
        if self.worker.is_behind_nats:
            return  # its broker knows the way
        found = await trio.socket.getaddrinfo(
            self.worker.host, self.worker.port, type=socket.SOCK_STREAM
        )
        # The stubs know a third form of address, that of a Python built without IPv6.
        self.worker.addresses = [(entry[0], entry[4]) for entry in found]  # type: ignore[misc]

    async def _get(self, path: str) -> Answer:
        return await self._ask("GET", path)

    async def _ask(self, method: str, path: str, content: bytes | None = None) -> Answer:
        # Kept up to a bound: an answer may be anything, one without an end included.
        async with ask(self.transport, method, self.worker, path, content=content) as response:
            body = await read(response, kept_max=BODY_BYTES_MAX)
            return Answer(response.status_code, body)

    def _note_missing_endpoint(self) -> None:
        if self._has_endpoint:
            self._has_endpoint = False
            log.warning(
                "worker has no health endpoint, its list of models is probed instead",
                worker=self.worker.id,
                endpoint=self.settings.health_check_endpoint,
            )


def _met(outcome: ProbeOutcome, detail: str = "") -> Probe:
    return Probe(outcome, trio.current_time(), detail)


def _outcome(status: int) -> ProbeOutcome:
    if 200 <= status < 300:
        return ProbeOutcome.PASSED
    return ProbeOutcome.UNAVAILABLE if status == 503 else ProbeOutcome.BAD_STATUS
