"""`simulate(plan)`: the whole router under virtual time, in front of engines in memory.

A plan is data whose repr is valid Python: engines with their faults, clients with their moments,
settings, a seed for where bytes are cut. `simulate` runs it to its end on Trio's `MockClock`,
holds every run to the standing checks below, and returns what was seen. Stories then only say
what they are about; a plan that fails can be pasted into a story.

Standing checks: the state of a request and its legs agree after every pass of the reactor; every
request reaches a final state by legal facts; permits, places and sockets are all given back; every
leg and every request is counted exactly once; a client got a correct prefix of the one right
answer, and the whole of it where its stream ended well; a stream that failed never ended cleanly.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import attrs
import h11
import msgspec
import trio
import trio.testing
from attrs import Factory, define, field, frozen
from prometheus_client.parser import text_string_to_metric_families

from router.app import App
from router.config import Settings
from router.logs import configure
from router.sim.engine import SimEngine
from router.sim.settings import SimSettings
from router.ticket import Ticket
from router.workerspec import WorkerSpec
from statemachines import REQUEST
from statemachines.breaker import BreakerState
from statemachines.request import RequestState
from tests.memory import MemoryNetwork, MemoryStream

HOST = "127.0.0.1"
#: Virtual seconds after which a run is given up: something hangs.
GIVE_UP_SECONDS = 20_000
READ_BYTES = 65536


@frozen
class Engine:
    """One simulated engine; `faults` in the language of `router.sim.faults`."""

    kind: str = "vllm"
    faults: str = ""
    token_seconds: float = 0.1
    first_token_seconds: float = 1.0
    model: str = "tiny"
    options: str = ""


@frozen
class Client:
    """One client and its one request."""

    at: float = 0.0
    stream: bool = True
    chat: bool = True
    tokens: int = 8
    prompt: str = "once upon a time"
    #: Moments (virtual seconds) at which it closes, half-closes, or resets its connection.
    leaves_at: float | None = None
    half_closes_at: float | None = None
    #: It reads nothing until then.
    reads_from: float = 0.0
    #: Sent to the engine as `x-sim-fault`.
    fault: str = ""
    extra: dict[str, object] = Factory(dict)
    headers: tuple[tuple[str, str], ...] = ()
    path: str | None = None
    raw_body: bytes | None = None

    @property
    def target(self) -> str:
        """The path it asks for."""
        default = "/v1/chat/completions" if self.chat else "/v1/completions"
        return self.path or default

    def body(self, model: str) -> bytes:
        """The JSON it sends."""
        if self.raw_body is not None:
            return self.raw_body
        asked: dict[str, object] = {"model": model, "max_tokens": self.tokens, "temperature": 0}
        if self.chat:
            asked["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            asked["prompt"] = self.prompt
        if self.stream:
            asked["stream"] = True
        return msgspec.json.encode(asked | {"ignore_eos": True} | self.extra)


@frozen
class Plan:
    """A run: who takes part, and what happens when."""

    engines: tuple[Engine, ...] = (Engine(), Engine())
    clients: tuple[Client, ...] = (Client(),)
    settings: dict[str, object] = Factory(dict)
    #: Seed for cutting and shuffling bytes; None leaves them whole.
    cuts: int | None = None
    pipe_bytes: int = 64 * 1024
    #: (moment, what): "drain 0", "remove 1", "stop", "faults 0 TEXT", "silent 0", "add 1".
    happenings: tuple[tuple[float, str], ...] = ()
    #: When the clients' clock begins; by then the workers are ready.
    begin: float = 30.0


@define(eq=False)
class Got:
    """What one client saw."""

    client: Client
    status: int = 0
    headers: dict[str, str] = field(factory=dict)
    body: bytes = b""
    #: (moment, bytes) of every piece of body.
    pieces: list[tuple[float, bytes]] = field(factory=list)
    #: "clean", "cut" (before its end), "left" (by the client), "refused" (no connection).
    ending: str = ""
    ended_at: float = 0.0
    #: The right answer: what a healthy engine says to the same request.
    reference: str = ""

    @property
    def events(self) -> list[bytes]:
        """Data of the events, in order."""
        return [
            event.removeprefix(b"data: ")
            for event in self.body.split(b"\n\n")
            if event.startswith(b"data: ")
        ]

    @property
    def text(self) -> str:
        """The text of the answer, streamed or whole."""
        if not self.client.stream:
            return text_of(self.json) if self.status == 200 else ""
        found = [msgspec.json.decode(e) for e in self.events if e != b"[DONE]"]
        return "".join(text_of(each) for each in found)

    @property
    def is_done(self) -> bool:
        """`[DONE]` came."""
        return b"[DONE]" in self.events

    @property
    def error(self) -> dict[str, object] | None:
        """The error it was told, as a body or as an event."""
        bodies = self.events if self.events else [self.body]
        for each in bodies:
            if each.startswith(b'{"error"'):
                found = msgspec.json.decode(each)["error"]
                assert isinstance(found, dict), found
                return found
        return None

    @property
    def code(self) -> object:
        """The error's code."""
        return None if self.error is None else self.error["code"]

    @property
    def json(self) -> dict[str, object]:
        """The body of a unary answer."""
        found = msgspec.json.decode(self.body)
        assert isinstance(found, dict)
        return found


@define(eq=False)
class Outcome:
    """What a run led to."""

    plan: Plan
    got: list[Got]
    engines: list[SimEngine]
    tickets: list[Ticket]
    metrics: dict[str, float]
    ended_at: float
    breakers: list[BreakerState]
    connects: list[tuple[str, int]]

    @property
    def one(self) -> Got:
        """The only client's view."""
        assert len(self.got) == 1
        return self.got[0]

    @property
    def facts(self) -> list[str]:
        """The facts of the only request, in order."""
        assert len(self.tickets) == 1
        return [edge.fact for _, edge in self.tickets[0].history]

    def count(self, name: str, **labels: str) -> float:
        """A metric's value; 0 where the series does not exist."""
        return self.metrics.get(_series(name, labels), 0.0)


def text_of(answer: dict[str, object]) -> str:
    """The text in one chunk or one whole answer of either endpoint."""
    choices = answer.get("choices") or [{}]
    assert isinstance(choices, list)
    if not choices:
        return ""
    choice = choices[0]
    part = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or part.get("content") or ""


def simulate(plan: Plan) -> Outcome:
    """Run a plan to its end and hold it to the standing checks."""
    try:
        outcome = trio.run(_run, plan, clock=trio.testing.MockClock(autojump_threshold=0))
        _check(outcome)
    except BaseException as error:
        error.add_note(f"simulate({plan!r})")
        raise
    return outcome


def worker_id(number: int) -> str:
    """The id of the engine at that place of the plan."""
    return f"w{number}"


async def _run(plan: Plan) -> Outcome:
    with trio.fail_after(GIVE_UP_SECONDS):
        async with trio.open_nursery() as world:
            return await _run_in(world, plan)
    raise AssertionError("unreachable")


async def _run_in(world: trio.Nursery, plan: Plan) -> Outcome:
    cuts = None if plan.cuts is None else Random(plan.cuts)
    network = MemoryNetwork(world, cuts, plan.pipe_bytes)
    engines = [_start_engine(network, number, each) for number, each in enumerate(plan.engines)]
    app = App(_settings(plan), network, configure(format="text", level="error", fd=2))
    _watch_scopes(app)
    app.listen()
    got = [Got(client) for client in plan.clients]
    async with trio.open_nursery() as running:
        running.start_soon(app.run)
        await trio.sleep_until(plan.begin)
        async with trio.open_nursery() as clients:
            for moment, what in plan.happenings:
                clients.start_soon(_happen, plan, app, network, engines, moment, what)
            for each in got:
                clients.start_soon(_run_client, plan, network, each)
        # Lingering ends and leaving connections get their moment.
        await trio.sleep(5)
        ended_at = max(each.ended_at for each in got) if got else plan.begin
        _check_returned(app)
        metrics = _read_metrics(app)
        breakers = [worker.breaker.state for worker in app.fleet.all()]
        app.ask_to_stop()
    assert not network.open_sockets, f"sockets left open: {network.open_sockets}"
    for each in got:
        each.reference = await _reference(plan, each.client)
    tickets = list(app.serving.ended)
    world.cancel_scope.cancel(reason="the run is over")
    return Outcome(plan, got, engines, tickets, metrics, ended_at, breakers, network.connects)


def _settings(plan: Plan) -> Settings:
    specs = tuple(_spec(number, each) for number, each in enumerate(plan.engines))
    values: dict[str, object] = {"host": HOST, "port": 8000, "worker_urls": specs}
    known = {each.name for each in attrs.fields(Settings)}
    assert set(plan.settings) <= known, set(plan.settings) - known
    # The plan's values are checked by the settings' own validators.
    return Settings(**(values | plan.settings))  # type: ignore[arg-type]


def _spec(number: int, engine: Engine) -> WorkerSpec:
    options = f",{engine.options}" if engine.options else ""
    return WorkerSpec.parse(f"http://{HOST}:{9000 + number},id={worker_id(number)}{options}")


def _start_engine(network: MemoryNetwork, number: int, engine: Engine) -> SimEngine:
    sim = SimEngine(
        SimSettings(
            engine=engine.kind,  # type: ignore[arg-type]  # a plan is plain text
            name=worker_id(number),
            model=engine.model,
            token_seconds=engine.token_seconds,
            first_token_seconds=engine.first_token_seconds,
            faults=[engine.faults] if engine.faults else [],
        )
    )
    network.engines[HOST, 9000 + number] = sim.serve_connection
    network.refuses[HOST, 9000 + number] = lambda: sim.is_refusing
    return sim


async def _happen(
    plan: Plan,
    app: App,
    network: MemoryNetwork,
    engines: list[SimEngine],
    moment: float,
    what: str,
) -> None:
    await trio.sleep_until(plan.begin + moment)
    word, _, rest = what.partition(" ")
    number, _, text = rest.partition(" ")
    address = (HOST, 9000 + int(number or 0))
    happen: dict[str, Callable[[], object]] = {
        "drain": lambda: app.fleet.drain(worker_id(int(number))),
        "remove": lambda: app.fleet.remove(worker_id(int(number))),
        "add": lambda: app.fleet.add(_spec(int(number), plan.engines[int(number)])),
        "stop": app.ask_to_stop,
        "faults": lambda: engines[int(number)].add_faults(text),
        "heal": lambda: engines[int(number)].clear_faults(),
        "silent": lambda: network.silent.add(address),
    }
    happen[word]()


#### A client


async def _run_client(plan: Plan, network: MemoryNetwork, got: Got) -> None:
    client = got.client
    await trio.sleep_until(plan.begin + client.at)
    try:
        stream = network.open_client()
    except ConnectionRefusedError:
        got.ending, got.ended_at = "refused", trio.current_time()
        return
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_leave, plan, client, stream, nursery.cancel_scope)
        await _ask(plan, stream, got)
        nursery.cancel_scope.cancel(reason="answered")
    got.ending = got.ending or "left"
    got.ended_at = trio.current_time()
    stream.close()


async def _leave(plan: Plan, client: Client, stream: MemoryStream, scope: trio.CancelScope) -> None:
    if client.half_closes_at is not None:
        await trio.sleep_until(plan.begin + client.half_closes_at)
        await stream.send_eof()
    if client.leaves_at is None:
        return
    await trio.sleep_until(plan.begin + client.leaves_at)
    scope.cancel(reason="the client leaves")


async def _ask(plan: Plan, stream: trio.abc.Stream, got: Got) -> None:
    client, connection = got.client, h11.Connection(h11.CLIENT)
    body = client.body(plan.engines[0].model)
    headers = [("host", "baton"), ("content-length", str(len(body)))]
    if client.fault:
        headers.append(("x-sim-fault", client.fault))
    request = h11.Request(method="POST", target=client.target, headers=[*headers, *client.headers])
    try:
        data = connection.send(request)
        assert data is not None
        await stream.send_all(data + (connection.send(h11.Data(data=body)) or b""))
        connection.send(h11.EndOfMessage())
        await trio.sleep_until(plan.begin + client.reads_from)
        await _read_answer(connection, stream, got)
    except (trio.BrokenResourceError, h11.RemoteProtocolError):
        got.ending = "cut"


async def _read_answer(connection: h11.Connection, stream: trio.abc.Stream, got: Got) -> None:
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(bytes(await stream.receive_some(READ_BYTES)))
        elif isinstance(event, h11.Response):
            got.status = event.status_code
            got.headers = {name.decode(): value.decode() for name, value in event.headers}
        elif isinstance(event, h11.Data):
            got.pieces.append((trio.current_time(), bytes(event.data)))
            got.body += event.data
        elif isinstance(event, h11.EndOfMessage):
            got.ending = "clean"
            return
        elif isinstance(event, h11.ConnectionClosed):
            got.ending = "cut"
            return


async def _reference(plan: Plan, client: Client) -> str:
    """What a healthy engine of the first kind says, without Baton."""
    engine = SimEngine(SimSettings(engine=plan.engines[0].kind, model=plan.engines[0].model))  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        near, far = trio.testing.memory_stream_pair()
        nursery.start_soon(engine.serve_connection, far)
        got = Got(attrs.evolve(client, fault="", reads_from=0.0))
        await _ask(attrs.evolve(plan, begin=0.0), near, got)
        nursery.cancel_scope.cancel(reason="answered")
    return got.text


#### The standing checks


def _watch_scopes(app: App) -> None:
    """After every pass: a leg is open exactly while the request is in the attempt's states."""
    attempt = REQUEST.scopes["attempt"]
    turn = app.reactor.turn

    def checked_turn() -> None:
        turn()
        for ticket, exchange in app.serving.live.items():
            has_leg = exchange.leg is not None and exchange.leg.is_open
            assert has_leg == (ticket.state in attempt), (ticket.state, exchange.leg)

    app.reactor.turn = checked_turn  # type: ignore[method-assign]


def _check_returned(app: App) -> None:
    assert not app.serving.live, f"requests left open: {list(app.serving.live)}"
    assert not app.serving.admission.holding
    assert not app.serving.admission.waiting
    for worker in app.fleet.all():
        assert worker.inflight == 0, f"legs left on {worker.id}"
        assert worker.breaker.probe is None, f"permit of {worker.id} did not come back"


def _read_metrics(app: App) -> dict[str, float]:
    page = app.metrics.render().decode()
    return {
        _series(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def _series(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def _check(outcome: Outcome) -> None:
    for ticket in outcome.tickets:
        _check_history(ticket)
    _check_counts(outcome)
    for got in outcome.got:
        _check_client(outcome, got)


def _check_history(ticket: Ticket) -> None:
    assert ticket.is_over, f"{ticket.id} is still {ticket.state}"
    state: object = RequestState.QUEUED
    for _, edge in ticket.history:
        assert edge.source is state, f"{ticket.id}: {edge.fact} in {edge.source}, was {state}"
        state = edge.target
    assert state is ticket.state


def _check_counts(outcome: Outcome) -> None:
    total = _sum(outcome, "baton_requests_total{")
    assert total == len(outcome.tickets), f"{total} requests counted of {len(outcome.tickets)}"
    legs = sum(ticket.attempts for ticket in outcome.tickets)
    if not any(word in what for _, what in outcome.plan.happenings for word in ("remove",)):
        counted = _sum(outcome, "baton_worker_requests_total{")
        assert counted == legs, f"{counted} legs counted of {legs}"
    assert _sum(outcome, "baton_requests_open{") == 0
    assert _sum(outcome, "baton_worker_inflight{") == 0
    assert _sum(outcome, "baton_internal_errors_total{") == 0, "a bug was met"


def _sum(outcome: Outcome, prefix: str) -> float:
    return sum(value for name, value in outcome.metrics.items() if name.startswith(prefix))


def _check_client(outcome: Outcome, got: Got) -> None:
    if got.client.raw_body is not None or got.client.path is not None:
        return
    if got.status == 200:
        assert got.reference.startswith(got.text), f"{got.text!r} is no prefix of the answer"
    if got.status == 200 and got.ending == "clean":
        assert got.text == got.reference, "an incomplete answer ended cleanly"
        assert got.is_done or not got.client.stream
    if got.ending == "cut" and got.status == 200:
        assert not got.is_done, "[DONE] before a cut"
