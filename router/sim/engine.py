"""The simulated engine: its state, its connections, and which request gets which answer.

One `SimEngine` is one engine, whether real sockets or in-memory streams lead to it. It starts
no tasks of its own beyond those of a connection, so whoever calls `serve_connection` owns
every lifetime; what happens later (a death in three stages, a restart) is a plan read against
Trio's clock.
"""

import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable
from urllib.parse import quote

import h11
import msgspec
import trio
from attrs import define, field

from router.sim import deaths
from router.sim.answering import Answer
from router.sim.condition import Mode, Schedule
from router.sim.decoding import start_choice
from router.sim.dialect import Dialect, Situation
from router.sim.faults import (
    MARKER,
    BadFault,
    Fault,
    FaultBook,
    Script,
    Sighting,
    parse_fault,
    parse_faults,
)
from router.sim.jobs import Job
from router.sim.kv import Caches, Dial
from router.sim.model import Model
from router.sim.plain import PlainDialect
from router.sim.running import Running
from router.sim.settings import SimSettings
from router.sim.sglang import SglangDialect
from router.sim.vllm import VllmDialect
from router.sim.wire import ClientGone, Received, Stream, Wire, head, received

REQUESTS_KEPT = 10_000
HEAD_BYTES_MAX = 65536
_IDLE_CHECK_SECONDS = 5.0
POLL_SECONDS = 4.0
"""How long SGLang's halves of a pair work on for a client that left (0.5.23; up to 8 s)."""
_DIALECTS: dict[str, type[Dialect]] = {
    "vllm": VllmDialect,
    "sglang": SglangDialect,
    "openai": PlainDialect,
}
# Small requests beside the work: no fault that does not name their path is meant for them.
_BESIDES = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/abort_request")


@define(eq=False)
class Connection:
    """One connection and the scope in which it is served."""

    wire: Wire
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    ends_with_reset: bool = False
    is_idle: bool = True


@define(eq=False)
class SimEngine:
    """One engine.

    `requests` is what was received, in order; `aborted` the request ids that were aborted;
    `disconnects` how many clients left while their generation was running.
    """

    settings: SimSettings = field(factory=SimSettings)
    dial: Dial = trio.open_tcp_stream
    """How it reaches the engine that holds the KV cache it waits for."""
    caches: Caches = field(factory=Caches, init=False)
    kv_port: int = field(default=0, init=False)
    """Where others reach what it holds."""
    dialect: Dialect = field(init=False)
    model: Model = field(init=False)
    faults: FaultBook = field(factory=FaultBook, init=False)
    schedule: Schedule = field(factory=Schedule, init=False)
    requests: deque[Received] = field(init=False)
    running: set[Running] = field(factory=set, init=False)
    connections: set[Connection] = field(factory=set, init=False)
    aborted: list[str] = field(factory=list, init=False)
    disconnects: int = field(default=0, init=False)
    restart_at: float = field(default=float("inf"), init=False)
    _drain_began: float = field(default=0.0, init=False)
    _started_at: float | None = field(default=None, init=False)
    _pending: list[Fault] = field(factory=list, init=False)
    _random: random.Random = field(init=False)

    def __attrs_post_init__(self) -> None:
        settings = self.settings
        self.requests = deque(maxlen=REQUESTS_KEPT)
        self.kv_port = settings.bootstrap_port
        self.dialect = _DIALECTS[settings.engine]()
        self.model = Model(settings.seed, settings.eos_every, settings.ambiguous)
        self._random = random.Random(f"{settings.name}/{settings.seed}")
        for text in settings.faults:
            self._pending += parse_faults(text)

    # What a test or the control API looks at.

    @property
    def inflight(self) -> int:
        """Generations that are running, as the engine's load endpoint counts them."""
        return len(self.running)

    @property
    def mode(self) -> Mode:
        return self.schedule.mode

    @property
    def is_refusing(self) -> bool:
        """Whether nobody listens: a connection attempt gets "connection refused"."""
        self.start()
        return self.mode.refuses

    @property
    def id(self) -> str:
        """What vLLM's hand-over calls the process; another one after a restart."""
        self.caches.look_at_clock()
        return f"{self.settings.name}-{self.caches.life}"

    @property
    def unix_time(self) -> float:
        self.start()
        assert self._started_at is not None
        return self.settings.unix_time + trio.current_time() - self._started_at

    # What a test or the control API does.

    def start(self) -> None:
        """Begin to count time and let the settings' faults come; once is enough."""
        if self._started_at is not None:
            return
        self._started_at = trio.current_time()
        pending, self._pending = self._pending, []
        for fault in pending:
            self._add(fault)

    def add_faults(self, text: str) -> None:
        """Add faults in the language of `router.sim.faults`; raises BadFault."""
        self.start()
        for fault in parse_faults(text):
            self._add(fault)

    def _add(self, fault: Fault) -> None:
        if fault.when.now:
            deaths.befall(self, fault)
        else:
            self.faults.add(fault)

    def clear_faults(self) -> None:
        """Forget every fault and be well again at once; generations that hang keep hanging."""
        self.faults.clear()
        self.restart_at = float("inf")
        self.plan()

    def abort(self, rid: str | None) -> None:
        """End a running generation, or all of them, as aborted."""
        deaths.abort(self, rid)

    def plan(self, *changes: tuple[float, Mode]) -> None:
        """Set the modes to come, in seconds from now; connections end where the process does."""
        now = trio.current_time()
        if self.restart_at != float("inf"):
            changes = (*changes, (max(self.restart_at - now, 0.0), Mode.SERVING))
        self.schedule.set(*changes)
        gone_in = min((after for after, mode in changes if mode is Mode.GONE), default=float("inf"))
        self.caches.die_at(now + gone_in)
        for connection in self.connections:
            if gone_in <= 0:
                connection.scope.cancel("the process is gone")
            else:
                connection.scope.deadline = now + gone_in

    # Generations.

    def situation(self) -> Situation:
        return Situation(
            self.settings,
            int(self.unix_time),
            self.inflight,
            self.mode.health,
            self.kv_port,
            lambda digits: f"{self._random.getrandbits(4 * digits):0{digits}x}",
        )

    def admit(self, job: Job) -> Running:
        """Begin to generate; `release` must follow."""
        is_first_half = self.settings.role == "prefill" and bool(job.meetings)
        choices = [
            start_choice(
                self.model,
                job.prompts[index // job.n],
                job.limits[index // job.n].up_to(1 if is_first_half else None),
                self.dialect.manner,
                index=index,
                way=0 if job.greedy else index % job.n,
            )
            for index in range(len(job.prompts) * job.n)
        ]
        running = Running(job, choices)
        self.running.add(running)
        if self.mode is Mode.LAME:
            self.plan((0, Mode.LAME))
        return running

    def release(self, running: Running) -> None:
        self.running.discard(running)
        self.leave_when_idle()

    def begin_drain(self, mode: Mode) -> None:
        self._drain_began = trio.current_time()
        self.plan((0, mode))
        self.leave_when_idle()

    def leave_when_idle(self) -> None:
        """A draining process exits when nothing runs; SGLang looks every five seconds."""
        if self.running:
            return
        if self.mode is Mode.DRAINING:
            self.plan((0, Mode.DRAINING), (0, Mode.GONE))
        elif self.mode is Mode.LAME:
            passed = trio.current_time() - self._drain_began
            until_check = _IDLE_CHECK_SECONDS - passed % _IDLE_CHECK_SECONDS
            self.plan((0, Mode.LAME), (until_check, Mode.GONE))

    async def wait_answering(self) -> None:
        """Return once the process is not frozen."""
        while not self.mode.answers:
            await self.schedule.wait_changed()

    # Connections.

    async def serve_connection(self, stream: Stream) -> None:
        """Serve HTTP/1.1 on a stream until either side ends it; closes the stream."""
        await self._keep(Connection(Wire(stream)), self._serve)

    async def serve_handover(self, stream: Stream) -> None:
        """Serve an engine that wants a KV cache of this one; closes the stream."""
        await self._keep(Connection(Wire(stream), is_idle=False), self._hand_over)

    async def _hand_over(self, connection: Connection) -> None:
        if not self.mode.refuses:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.wait_answering()
                await self.caches.serve(connection.wire.stream)

    async def _keep(
        self, connection: Connection, serve: Callable[[Connection], Awaitable[None]]
    ) -> None:
        """Serve a connection for as long as the process lives."""
        self.start()
        self.connections.add(connection)
        try:
            with connection.scope:
                connection.scope.deadline = self.schedule.next_time_of(Mode.GONE)
                await serve(connection)
        finally:
            self.connections.discard(connection)
            await connection.wire.cut(reset=connection.ends_with_reset)

    async def _serve(self, connection: Connection) -> None:
        if self.mode.refuses:
            return
        for fault in self.faults.for_connection(Sighting(self.settings.name)):
            if fault.kind.name == "mute":
                await trio.sleep_forever()
            connection.ends_with_reset = fault.flag("reset")
            return
        try:
            while await self._serve_request(connection):
                connection.wire.served += 1
                connection.is_idle = True
        except ClientGone:
            return

    async def _serve_request(self, connection: Connection) -> bool:
        """Serve one request; whether the connection can take another."""
        wire, parser = connection.wire, h11.Connection(h11.SERVER, HEAD_BYTES_MAX)
        try:
            request = await wire.read_head(parser, self.settings.keep_alive_seconds)
            if request is None:
                return False
            connection.is_idle = False
            one = received(request, reused=wire.served > 0)
            script = self._script_for(one)
            slow = script.find("slow_reader")
            pace = slow.integer("bytes_per_second") if slow else 0
            body = await wire.read_body(parser, pace)
        except h11.RemoteProtocolError:
            await self._refuse_malformed(wire)
            return False
        one.body = body
        if not one.path.startswith("/sim/"):
            self.requests.append(one)
        if (marked := _marked_in_body(body)) is not None:
            script = script.with_more(self._marked(marked, one))
        return await self._answer(connection, one, script)

    async def _refuse_malformed(self, wire: Wire) -> None:
        text = b"Invalid HTTP request received."
        headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
        headers.append(("content-length", str(len(text))))
        await wire.send(head(400, headers, self.unix_time) + text)

    def _script_for(self, one: Received) -> Script:
        if one.path.startswith("/sim/"):
            return Script()
        faults = self.faults.for_request(self._sighting(one))
        return Script(tuple(faults) + tuple(self._marked(one.headers.get(MARKER, ""), one)))

    def _sighting(self, one: Received) -> Sighting:
        is_work = one.method == "POST" and one.path not in _BESIDES
        return Sighting(self.settings.name, one.path, is_work, one.reused)

    def _marked(self, text: str, one: Received) -> list[Fault]:
        """The faults that a request brings along; one that cannot be read is answered so."""
        book = FaultBook()
        try:
            for fault in parse_faults(text):
                book.add(fault)
        except BadFault as error:
            return [parse_fault(f"status,code=400,message={quote(str(error))}")]
        return book.for_request(self._sighting(one))

    @property
    def _polls_its_clients(self) -> bool:
        return self.settings.engine == "sglang" and self.settings.role != "mixed"

    async def _answer(self, connection: Connection, one: Received, script: Script) -> bool:
        """Answer while watching for the client to leave, as the real servers do."""
        answer = Answer(self, connection.wire, one, script)
        if answer.is_given_at_once:
            return await answer.give()
        keeps = False
        async with trio.open_nursery() as nursery:
            unnoticed = POLL_SECONDS if self._polls_its_clients else 0.0
            nursery.start_soon(_watch, connection.wire, nursery.cancel_scope, unnoticed)
            keeps = await answer.give()
            nursery.cancel_scope.cancel("answered")
        return keeps


async def _watch(wire: Wire, scope: trio.CancelScope, unnoticed: float) -> None:
    await wire.wait_closed()
    await trio.sleep(unnoticed)
    scope.cancel("the client left")


def _marked_in_body(body: bytes) -> str | None:
    """The marker field of a JSON body; most bodies do not even hold its name."""
    if MARKER.encode() not in body:
        return None
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    marker = value.get(MARKER) if isinstance(value, dict) else None
    return marker if isinstance(marker, str) else None
