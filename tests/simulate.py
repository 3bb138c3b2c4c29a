"""`simulate(plan)`: the whole router under virtual time, in front of engines in memory.

`simulate` runs a plan to its end on Trio's `MockClock`, holds the run to the standing promises of
tests/promises.py, and returns what was seen. Stories then only say what they are about. A plan
that fails is printed so that it can be pasted into a story.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TypeVar, TypeVarTuple

import attrs
import msgspec
import trio
import trio.testing
from attrs import define, field
from prometheus_client.metrics_core import Metric as Family

from router.app import App
from router.choosing import make_chooser
from router.config import Settings
from router.logs import LineWriter, Logs, configure
from router.metrics import Histogram
from router.series import TABLE
from router.sim.engine import SimEngine
from router.sim.settings import SimSettings
from router.worker import UnknownWorker
from router.workerspec import WorkerSpec
from statemachines.router import RouterState
from tests.asides import Aside
from tests.asking import Line, requests_of, run_connection
from tests.memory import MemoryNetwork, MemoryStream
from tests.memory_broker import MemoryBroker, MemoryServer
from tests.nats_peers import Peer, dialler
from tests.neighbours import Neighbours
from tests.outcome import Got, Look, Outcome, series
from tests.plans import Client, Engine, Plan
from tests.promises import check, everything_is_given_back, watch_passes, watch_time
from tests.residents import Resident, resident
from tests.scripted import ScriptedEngine

__all__ = ["Client", "Engine", "Got", "Look", "Outcome", "Plan", "simulate", "worker_id"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
HOST = "127.0.0.1"
#: How engines are reached that do not say it; stories of all wires set it (see `over`).
WIRE = "http"
#: Virtual seconds after which a run is given up: something hangs.
GIVE_UP_SECONDS = 20_000
#: Where the first engine hands over, if it is half of a pair.
KV_PORT = 8900


def simulate(plan: Plan) -> Outcome:
    """Run a plan to its end and hold it to the standing promises."""
    if plan.schedule is None:
        plan = attrs.evolve(plan, schedule=draw_schedule())
    try:
        outcome = run_in_order(plan.schedule, _run, plan)
        check(outcome)
    except BaseException as error:
        error.add_note(f"simulate({plan!r})")
        raise
    return outcome


def simulate_unjudged(plan: Plan) -> dict[str, float]:
    """Run a plan to its end, hold it to no promise, and return what its router has counted."""
    return run_in_order(plan.schedule, _count, plan)


def draw_schedule() -> int:
    """A seed for `run_in_order`, by the order that the test at hand has."""
    return trio._core._run._r.getrandbits(20)


def run_in_order(schedule: int | None, run: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
    """Run it under virtual time; a seed says whom Trio lets go first, None leaves it to luck."""
    trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]  # as pytest-trio
    if schedule is not None:
        trio._core._run._r.seed(schedule)
    clock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(run, *args, clock=clock, strict_exception_groups=True)


def worker_id(number: int) -> str:
    """The id of the engine at that place of the plan."""
    return f"w{number}"


#### The run


@define(eq=False)
class Lines(LineWriter):
    """Keeps the log lines instead of writing them."""

    lines: list[bytes] = field(factory=list)

    def write(self, line: bytes) -> None:
        self.lines.append(line)


@define(eq=False)
class Run:
    """Everything a happening can reach."""

    plan: Plan
    network: MemoryNetwork
    engines: list[SimEngine]
    app: App
    log: Lines
    server: MemoryServer
    #: The agents of engines behind NATS, by the engine's place.
    peers: dict[int, Peer]
    #: Those that are Baton's own.
    residents: dict[int, Resident] = field(factory=dict)
    looks: list[Look] = field(factory=list)

    @property
    def broker(self) -> MemoryBroker:
        """The router's connection to the broker."""
        assert isinstance(self.app.broker, MemoryBroker)
        return self.app.broker

    def agent_of(self, place: int) -> Peer | Resident:
        """The agent of the engine at that place."""
        return self.residents.get(place) or self.peers[place]

    @property
    def inbox(self) -> str:
        """Where the router gets its replies; nowhere, before it has subscribed."""
        every = [each.subject for each in self.broker.subscriptions]
        return next((subject for subject in every if subject.startswith("_INBOX.")), "nowhere")


async def _run(plan: Plan) -> Outcome:
    with trio.fail_after(GIVE_UP_SECONDS):
        async with trio.open_nursery() as world:
            run = await _prepare(world, plan)
            outcome = await _run_to_its_end(run)
            world.cancel_scope.cancel(reason="the run is over")
    return outcome


async def _count(plan: Plan) -> dict[str, float]:
    with trio.fail_after(GIVE_UP_SECONDS):
        async with trio.open_nursery() as world:
            run = await _prepare(world, plan)
            await _run_to_its_end(run)
            world.cancel_scope.cancel(reason="the run is over")
    return read_metrics(run.app)


async def _prepare(world: trio.Nursery, plan: Plan) -> Run:
    random.seed(plan.luck)
    cuts = None if plan.cuts is None else random.Random(plan.cuts)
    network = MemoryNetwork(world, cuts, plan.pipe_bytes)
    neighbours = Neighbours(world)
    engines = [
        await _start_engine(network, neighbours, number, each, plan)
        for number, each in enumerate(plan.engines)
    ]
    server = MemoryServer()
    server.max_payload = plan.max_payload
    log = Lines()
    logs = configure(format="json", level="info")
    logs.writer = log
    wires = dict(enumerate(map(_wire_of, plan.engines)))
    peers = {
        number: _start_peer(world, network, server, number, plan)
        for number, wire in wires.items()
        if wire in ("nats", "old")
    }
    residents = {
        number: _make_resident(world, network, server, number, plan, logs)
        for number, wire in wires.items()
        if wire == "agent"
    }
    has_broker = bool(peers or residents)
    app = App(_settings(plan), network, logs, server.broker() if has_broker else None)
    app.serving.chooser = make_chooser(app.settings.policy, random.Random(plan.luck))
    app.serving.pairs.choose_by(random.Random(plan.luck))
    app.serving.pairs.rng = random.Random(plan.luck)
    watch_passes(app)
    watch_time(app)
    app.listen()
    for each in residents.values():
        world.start_soon(each.run)
    return Run(plan, network, engines, app, log, server, peers, residents)


async def _run_to_its_end(run: Run) -> Outcome:
    plan, app = run.plan, run.app
    connections = [requests_of(client) for client in plan.clients]
    stopped_at = 0.0
    async with trio.open_nursery() as running:

        async def serve() -> None:
            nonlocal stopped_at
            await app.run()
            stopped_at = trio.current_time() - plan.begin

        running.start_soon(serve)
        await trio.sleep_until(plan.begin)
        async with trio.open_nursery() as clients:
            for moment, what in plan.happenings:
                clients.start_soon(_happen, run, moment, what)
            for moment in plan.looks:
                clients.start_soon(_look, run, moment)
            for requests in connections:
                clients.start_soon(run_connection, run.network, plan, requests)
        await trio.sleep(plan.rest_seconds)
        everything_is_given_back(app)
        metrics = read_metrics(app)
        app.ask_to_stop()
    async with trio.open_nursery() as stopping:
        for resident in run.residents.values():
            stopping.start_soon(resident.stop)
    assert all(not broker.errors for broker in run.server.brokers)
    assert not run.network.open_sockets, f"sockets left open: {run.network.open_sockets}"
    await trio.testing.wait_all_tasks_blocked()
    got = [each for requests in connections for each in requests]
    for each in got:
        each.direct = [await _ask_directly(one, each.client) for one in _kinds(plan, each.client)]
    return Outcome(
        plan=plan,
        got=got,
        engines=run.engines,
        tickets=list(app.serving.ended),
        metrics=metrics,
        looks=sorted(run.looks, key=lambda look: look.at),
        log=[msgspec.json.decode(line) for line in run.log.lines],
        connects=run.network.connects,
        stopped_at=stopped_at,
        server=run.server,
        peers=run.peers,
    )


def _settings(plan: Plan) -> Settings:
    known = [(number, each) for number, each in enumerate(plan.engines) if not _joins(each)]
    specs = [_spec(number, each) for number, each in known]
    values: dict[str, object] = {"host": HOST, "port": 8000}
    for key, role in (("worker_urls", "mixed"), ("prefill", "prefill"), ("decode", "decode")):
        values[key] = tuple(spec for spec in specs if spec.role == role)
    if any(_wire_of(each) != "http" for each in plan.engines):
        values["nats"] = "nats://127.0.0.1:4222"
    # The plan's values are checked by the settings' own validators.
    return Settings(**(values | plan.settings))  # type: ignore[arg-type]


def _spec(number: int, engine: Engine) -> WorkerSpec:
    options = f",{engine.options}" if engine.options else ""
    is_met = engine.role == "prefill" and engine.kind == "sglang" and engine.names_port
    if is_met and "bootstrap_port" not in options:
        options += f",bootstrap_port={KV_PORT + number}"
    text = f"http://{HOST}:{9000 + number},id={worker_id(number)}{options}"
    if _wire_of(engine) != "http":
        text = f"nats:{worker_id(number)},bootstrap_host={HOST}{options}"
        if _wire_of(engine) == "old" and "engine=" not in options:
            text += f",engine={engine.kind}"  # it cannot be asked
    return WorkerSpec.parse(text, role=engine.role)


def _sim_settings(engine: Engine, name: str, kv_port: int = 0) -> SimSettings:
    return SimSettings(
        engine=engine.kind,  # type: ignore[arg-type]  # a plan is plain text
        name=name,
        model=engine.model,
        token_seconds=engine.token_seconds,
        first_token_seconds=engine.first_token_seconds,
        eos_every=engine.eos_every,
        ambiguous=engine.ambiguous,
        tokens_per_chunk=engine.tokens_per_chunk,
        context_length=engine.context_length,
        seed=engine.seed,
        role=engine.role,  # type: ignore[arg-type]
        bootstrap_port=kv_port,
        faults=(engine.faults,) if engine.faults else (),
    )


_JSON = (("content-type", "application/json"),)


async def _start_engine(
    network: MemoryNetwork, neighbours: Neighbours, number: int, engine: Engine, plan: Plan
) -> SimEngine:
    kv_port = 0 if engine.role == "mixed" else KV_PORT + number
    sim = neighbours.start(_sim_settings(engine, worker_id(number), kv_port))
    network.engines[HOST, 9000 + number] = sim.serve_connection
    network.refuses[HOST, 9000 + number] = lambda: sim.is_refusing
    if engine.header:
        network.engines[HOST, 9000 + number] = _with_header(sim, engine.header)
    if engine.script:
        healthy = _healthy(engine)

        async def ask(path: str, body: bytes) -> list[bytes]:
            asked = Client(path=path, raw_body=body, headers=_JSON)
            return (await _ask_directly(healthy, asked)).events

        scripted = ScriptedEngine(sim, engine.script, plan.begin, ask)
        network.engines[HOST, 9000 + number] = scripted.serve_connection
    return sim


def _wire_of(engine: Engine) -> str:
    return engine.wire or WIRE


def _joins(engine: Engine) -> bool:
    return _wire_of(engine) == "agent"


def _start_peer(
    world: trio.Nursery, network: MemoryNetwork, server: MemoryServer, number: int, plan: Plan
) -> Peer:
    address = HOST, 9000 + number
    dial = dialler(
        world,
        lambda: network.engines[address],
        lambda: network.refuses[address](),
    )
    queues = bool(plan.settings.get("nats_req_max_pending"))
    is_old = _wire_of(plan.engines[number]) == "old"
    peer = Peer(world, server.broker(), worker_id(number), dial, is_old=is_old, queues=queues)
    peer.start()
    return peer


def _make_resident(
    world: trio.Nursery,
    network: MemoryNetwork,
    server: MemoryServer,
    number: int,
    plan: Plan,
    logs: Logs,
) -> Resident:
    engine, spec = plan.engines[number], _spec(number, plan.engines[number])
    values: dict[str, object] = {
        "engine_url": f"http://{HOST}:{9000 + number}",
        "nats": "nats://memory",
        "id": worker_id(number),
        "engine": spec.engine,
        "role": engine.role,
        "bootstrap_port": spec.bootstrap_port or 0,
        "bootstrap_host": spec.bootstrap_host,
    }
    shared = ("nats_req_max_pending", "drain_timeout_secs", "health_check_interval_secs")
    values |= {name: plan.settings[name] for name in shared if name in plan.settings}
    own = MemoryNetwork(world, network.cuts, plan.pipe_bytes)
    own.engines, own.refuses, own.silent = network.engines, network.refuses, network.silent
    return resident(own, server.broker(), logs, values)


def _with_header(sim: SimEngine, line: str) -> Callable[[MemoryStream], Awaitable[None]]:
    async def serve(stream: MemoryStream) -> None:
        send = stream.send_all

        async def send_all(data: bytes | bytearray | memoryview) -> None:
            own = b"server: uvicorn\r\n"
            await send(bytes(data).replace(own, own + line.encode() + b"\r\n", 1))

        stream.send_all = send_all  # type: ignore[method-assign]  # one stream of many
        await sim.serve_connection(stream)

    return serve


async def _happen(run: Run, moment: float, what: str) -> None:
    """One of: drain N [SECONDS], undrain N, remove N, add N, faults N TEXT, heal N, silent N, stop,
    replace N M, crash; of NATS: die N, leave N, give_back N, down, forget, up, cut, mend,
    cut_off N, rejoin N, stall, go_on, lose AFTER [told], twice AFTER, late AFTER SECONDS.

    A drain with seconds has a window, after which streams that can move are moved. `replace`: the
    engine M answers at the address of N, too. `die`, `leave`: the agent of N is killed, or its
    drain window ends; `give_back`: one that hands back what cannot move, too. `cut`, `mend`: the
    router's connection to the broker; `cut_off N`, `rejoin N`: the one of an agent. `lose`,
    `twice`, `late`: one message to the router, after so many others. `crash`: a bug is met in
    every request. Who is not in the fleet is passed over.
    """
    await trio.sleep_until(run.plan.begin + moment)
    word, _, rest = what.partition(" ")
    number, _, text = rest.partition(" ")
    place = int(number or 0)  # of an engine; a count in `lose`
    app, engine = run.app, run.engines[place % len(run.engines)]
    happen: dict[str, Callable[[], object]] = {
        "drain": lambda: _drain(app, worker_id(place), text),
        "remove": lambda: app.fleet.remove(worker_id(place)),
        "add": lambda: app.fleet.add(_spec(place, run.plan.engines[place])),
        "undrain": lambda: app.fleet.cancel_drain(worker_id(place)),
        "crash": lambda: _crash(app),
        "stop": app.ask_to_stop,
        "faults": lambda: engine.add_faults(text),
        "replace": lambda: run.network.engines.update(
            {(HOST, 9000 + place): run.network.engines[HOST, 9000 + int(text)]}
        ),
        "heal": engine.clear_faults,
        "silent": lambda: run.network.silent.add((HOST, 9000 + place)),
        "die": lambda: run.agent_of(place).die(),
        "leave": lambda: run.agent_of(place).drain(),
        "give_back": lambda: run.peers[place].give_back(),
        "down": run.server.down,
        "forget": lambda: run.server.down(forgets=True),
        "up": run.server.up,
        "cut": lambda: run.server.cut(run.broker),
        "cut_off": lambda: run.server.cut(run.agent_of(place).broker),
        "rejoin": lambda: run.server.mend(run.agent_of(place).broker),
        "mend": lambda: run.server.mend(run.broker),
        "stall": run.server.stall,
        "go_on": run.server.go_on,
        "lose": lambda: run.server.lose(run.inbox, after=place, told=text == "told"),
        "twice": lambda: run.server.repeat(run.inbox, after=place),
        "late": lambda: run.server.delay(run.inbox, float(text), after=place),
    }
    if app.state is not RouterState.STOPPED:
        with suppress(UnknownWorker):
            happen[word]()


def _crash(app: App) -> None:
    app.reactor.turn()  # what has arrived by now comes first, as before every fact from outside
    for exchange in list(app.serving.live.values()):
        if exchange.leg is not None and exchange.leg.is_open:
            exchange.leg.on_crash(RuntimeError("on purpose"))
        else:
            app.serving.bugs.met_in(exchange, RuntimeError("on purpose"))


def _drain(app: App, worker: str, seconds: str) -> None:
    if seconds:
        app.drain_worker(app.fleet.get(worker), float(seconds))
    else:
        app.fleet.drain(worker)


async def _look(run: Run, moment: float) -> None:
    await trio.sleep_until(run.plan.begin + moment)
    # What else happens at this moment happens first, in whatever order Trio's tasks run.
    await trio.testing.wait_all_tasks_blocked()
    app, live = run.app, run.app.serving.live
    run.looks.append(
        Look(
            at=moment,
            running=[engine.inflight for engine in run.engines],
            inflight={worker.id: worker.inflight for worker in app.fleet.all()},
            states=[ticket.state.value for ticket in live],
            waiting=len(app.serving.admission.waiting),
            backlog_bytes=sum(each.channel.backlog_bytes for each in live.values()),
            workers={worker.id: worker.state.value for worker in app.fleet.all()},
            breakers={worker.id: worker.breaker.state.value for worker in app.fleet.all()},
        )
    )


def read_metrics(app: App) -> dict[str, float]:
    # What the page is made from; parsing the page would take longer than the run.
    found: dict[str, float] = {}
    for row in TABLE:
        names = [label.name for label in row.labels]
        for key, value in app.metrics.samples(row.name):
            if not value:
                continue
            labels = dict(zip(names, key, strict=True))
            if not isinstance(value, Histogram):
                found[series(row.name, labels)] = value
                continue
            family = Family(row.name, row.help, row.kind)
            if any(value.counts):
                value.add_to(family, labels)
            found |= {series(each.name, each.labels): each.value for each in family.samples}
    return {name: value for name, value in found.items() if value}


#### The right answers


def _kinds(plan: Plan, client: Client) -> Iterable[Engine]:
    """One healthy engine of each kind that may answer this client: the first of its kind."""
    if client.raw is not None or client.method != "POST":
        return ()
    model = client.model or (plan.engines[0].model if plan.engines else "tiny")
    found: dict[tuple[str, int], Engine] = {}
    for each in plan.engines:
        if each.model == model:
            found.setdefault((each.kind, each.seed), each)
    return [_healthy(each) for each in found.values()]


def _healthy(engine: Engine) -> Engine:
    """The same model in an engine that suffers nothing, at once and whole."""
    return attrs.evolve(
        engine,
        faults="",
        script="",
        options="",
        header="",
        token_seconds=0.0,
        first_token_seconds=0.0,
        tokens_per_chunk=1,
        role="mixed",
    )


async def _ask_directly(engine: Engine, client: Client) -> Got:
    """What an engine says without Baton; the same for equal questions, so asked once."""
    asked = attrs.evolve(client, fault="", reads_from=0.0, http_10=False, headers=(), body_at=None)
    key = (engine, asked.target, asked.body(engine.model))
    if key not in _ANSWERS:
        near, far = Aside.pair()
        got = _ANSWERS[key] = Got(asked)
        plan = Plan(engines=(engine,), begin=trio.current_time())
        async with trio.open_nursery() as nursery:
            direct = SimEngine(_sim_settings(engine, "direct"))
            nursery.start_soon(direct.serve_connection, far)
            await Line(plan, near).ask(got)
            nursery.cancel_scope.cancel(reason="answered")
    return _ANSWERS[key]


_ANSWERS: dict[tuple[Engine, str, bytes], Got] = {}
