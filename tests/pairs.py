"""Pairs by timetable: scripted prefill and decode workers around the whole router.

Each worker says the right (or the wrong) thing at chosen moments, so that stories can order the
facts of two legs, a client and the clocks as they like: `head@1,role@1,token@2,done@3`. Moments are
seconds after the plan's begin; one that has passed when a request comes is now. Several scripts
behind one another (`400@1 | head@1,done@2`) are for the first request, the second, and so on; the
last one is for all others. Every run is held to what holds for all of them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence

import h11
import msgspec
import trio
import trio.testing
from attrs import Factory, define, evolve, field, frozen

from router.app import App
from router.config import Settings
from router.logs import configure
from router.ticket import Ticket
from router.workerspec import WorkerSpec
from statemachines import REQUEST
from tests.asking import requests_of, run_connection
from tests.memory import MemoryNetwork, MemoryStream
from tests.memory_broker import MemoryServer
from tests.outcome import Got, series
from tests.plans import Client, Plan
from tests.simulate import HOST, Lines, Run, draw_schedule, read_metrics, run_in_order

BEGIN = 6.0
READ_BYTES = 65536
EVENTS_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e-1",
    "remote_block_ids": [1, 2],
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_request_id": "r-1",
    "tp_size": 1,
}
#: What a prefill says that is done, as SGLang and as vLLM do it.
DONE = "head@1,token@1,done@1"
KV = "kv@1"


@frozen
class Half:
    """One worker of a role."""

    script: str = ""
    #: More options of the worker, as they may follow its URL.
    options: str = ""
    engine: str = "sglang"
    port: int | None = 8998
    #: Its abort endpoint: a status, "hang", or "endless" (a 200 whose body never ends).
    aborts: str = "200"
    #: Nobody listens, or nobody answers.
    is_down: bool = False
    model: str = "tiny"


@define(eq=False)
class Engine:
    """A half at work, and what it was asked."""

    half: Half
    begin: float
    bodies: list[dict[str, object]] = field(factory=list)
    headers: list[dict[str, str]] = field(factory=list)
    paths: list[str] = field(factory=list)
    #: Bodies and headers of `/abort_request`.
    aborts: list[tuple[dict[str, object], dict[str, str]]] = field(factory=list)
    #: Moments at which the router closed a connection that was being answered.
    left_at: list[float] = field(factory=list)
    running: int = 0

    async def serve_connection(self, stream: MemoryStream) -> None:
        """Serve HTTP/1.1 until either side ends it."""
        try:
            while (found := await self._read(stream)) is not None:
                if not await self._answer(stream, *found):
                    return
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            pass
        finally:
            stream.close()

    async def _read(self, stream: MemoryStream) -> tuple[h11.Request, bytes] | None:
        connection, request, body = h11.Connection(h11.SERVER), None, b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(READ_BYTES))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None
                return request, body
            elif isinstance(event, h11.ConnectionClosed):
                return None

    async def _answer(self, stream: MemoryStream, request: h11.Request, body: bytes) -> bool:
        path = request.target.decode()
        headers = {name.decode(): value.decode() for name, value in request.headers}
        if request.method == b"GET":
            models = {"data": [{"id": self.half.model, "object": "model", "owned_by": "engine"}]}
            await stream.send_all(whole(200 if path in ("/health", "/v1/models") else 404, models))
            return True
        if path == "/abort_request":
            self.aborts.append((msgspec.json.decode(body), headers))
            if self.half.aborts == "hang":
                await trio.sleep_forever()
            if self.half.aborts == "endless":
                await stream.send_all(EVENTS_HEAD)
                while True:
                    await stream.send_all(chunk(b"x" * READ_BYTES))
            await stream.send_all(whole(int(self.half.aborts), {}))
            return True
        self.bodies.append(msgspec.json.decode(body))
        self.headers.append(headers)
        self.paths.append(path)
        scripts = self.half.script.split("|")
        script = scripts[min(len(self.bodies), len(scripts)) - 1].strip()
        return await self._play(stream, script)

    async def _play(self, stream: MemoryStream, script: str) -> bool:
        """Whether the connection can take another request."""
        keeps = False
        self.running += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, stream, nursery.cancel_scope)
                with contextlib.suppress(trio.BrokenResourceError):
                    keeps = await self._play_steps(stream, script)
                nursery.cancel_scope.cancel(reason="answered")
        finally:
            self.running -= 1
        return keeps

    async def _play_steps(self, stream: MemoryStream, script: str) -> bool:
        for step in filter(None, script.split(",")):
            name, _, moment = step.partition("@")
            await trio.sleep_until(self.begin + float(moment))
            if name in ("cut", "reset"):
                if name == "reset":
                    stream.reset()
                else:
                    stream.close()
                return False
            data, is_last = says(name)
            await stream.send_all(data)
            if is_last:
                return True
        await trio.sleep_forever()
        raise AssertionError

    async def _watch(self, stream: MemoryStream, scope: trio.CancelScope) -> None:
        try:
            while await stream.receive_some(READ_BYTES):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.left_at.append(trio.current_time() - self.begin)
        scope.cancel(reason="the router left")


def says(name: str) -> tuple[bytes, bool]:
    """The bytes of one step, and whether they end the answer."""
    name, _, detail = name.partition(":")
    if name == "head":
        return EVENTS_HEAD, False
    if name == "ping":
        return chunk(b": ping\n\n"), False
    if name == "role":
        return chunk(event({"role": "assistant", "content": ""})), False
    if name == "token":
        return chunk(event({"content": detail or "a"})), False
    if name == "half":
        return chunk(event({"content": "a"})[:20]), False
    if name == "done":
        return chunk(event({}, "stop") + b"data: [DONE]\n\n") + chunk(b""), True
    if name == "end":
        return chunk(b""), True
    if name == "abort":
        return chunk(event({}, "abort") + b"data: [DONE]\n\n") + chunk(b""), True
    if name in ("error", "openerror"):
        error = {"error": {"message": "it broke", "code": int(detail or 500)}}
        data = chunk(b"data: " + msgspec.json.encode(error) + b"\n\n")
        return (data, False) if name == "openerror" else (data + chunk(b""), True)
    if name == "gen":
        return chunk(b"data: " + msgspec.json.encode(generated(detail)) + b"\n\n"), False
    if name == "gendone":
        body = msgspec.json.encode(generated(detail, "stop"))
        return chunk(b"data: " + body + b"\n\ndata: [DONE]\n\n") + chunk(b""), True
    if name == "genjson":
        return whole(200, generated(detail, "stop")), True
    if name == "json":
        return whole(200, answer("stop")), True
    if name == "jsonabort":
        return whole(200, answer("abort")), True
    if name == "kv":
        return whole(200, answer("length") | {"kv_transfer_params": HANDOFF}), True
    if name == "genabort":
        return whole(200, generated(detail, "abort")), True
    if name == "inband":
        return whole(200, error_body(int(detail))), True
    if name == "flat":
        return whole(200, {"object": "error", "message": "m", "code": int(detail)}), True
    if name == "stop":
        return chunk(event({}, "stop")), False
    if name == "empty":
        return whole(200, None), True
    if name == "text":
        return b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", True
    if name == "204":
        return b"HTTP/1.1 204 No Content\r\n\r\n", True
    if name == "errorhead":
        return whole(int(detail or 500), error_body(int(detail or 500)))[:-5], False
    if name == "errorrest":
        return whole(500, error_body(int(detail or 500)))[-5:], True
    return whole(int(name), error_body(int(name))), True


def error_body(status: int) -> dict[str, object]:
    """What a worker says with an error status."""
    return {"error": {"message": "its own words", "type": "t", "param": None, "code": status}}


def answer(finish: str) -> dict[str, object]:
    """A whole answer of chat."""
    message = {"role": "assistant", "content": "a"}
    return {
        "id": "x",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }


def generated(logprobs: str, finish: str | None = None) -> dict[str, object]:
    """What `/generate` says, with a logprob of the prompt for every letter of `logprobs`."""
    told = [[-0.5, ord(letter), letter] for letter in logprobs]
    reason = None if finish is None else {"type": finish}
    meta = {"id": "x", "finish_reason": reason, "input_token_logprobs": told}
    return {"text": "a", "output_ids": [1], "meta_info": meta}


def event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {"id": "x", "object": "chat.completion.chunk", "model": "tiny", "choices": [choice]}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(status: int, body: object) -> bytes:
    data = b"" if body is None else msgspec.json.encode(body)
    lines = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\nretry-after: 7\r\n" % status
    return lines + b"content-length: %d\r\n\r\n" % len(data) + data


#### A run


@frozen
class Pairs:
    """Who takes part."""

    prefills: tuple[Half, ...] = (Half(DONE),)
    decodes: tuple[Half, ...] = (Half(),)
    #: Workers that need no other half.
    mixed: tuple[Half, ...] = ()
    clients: tuple[Client, ...] = (Client(tokens=4),)
    protocol: str = "sglang-bootstrap"
    settings: dict[str, object] = Factory(dict)
    #: (moment, what): `silent p0`, `refuse d1`, `remove p0`, `drain d0`, `stop`.
    happenings: tuple[tuple[float, str], ...] = ()
    #: Moments at which the inside is looked at.
    looks: tuple[float, ...] = ()
    #: Virtual seconds after the last client until everything must be given back.
    rest: float = 5.0
    cuts: int | None = None
    #: As in `tests.plans`.
    schedule: int | None = None
    #: A bug of ours is part of the story.
    has_bug: bool = False
    #: Called with the app before it runs.
    prepare: Callable[[App], None] | None = None


@frozen
class Look:
    """The inside at one moment."""

    inflight: dict[str, int]
    states: list[str]
    breakers: dict[str, str]


@define(eq=False)
class Result:
    """What was seen."""

    got: list[Got]
    prefills: list[Engine]
    decodes: list[Engine]
    mixed: list[Engine]
    tickets: list[Ticket]
    metrics: dict[str, float]
    looks: list[Look]
    #: Seconds after the plan's begin at which the router was gone.
    stopped_at: float
    log: list[dict[str, object]]

    @property
    def one(self) -> Got:
        (got,) = self.got
        return got

    @property
    def p(self) -> Engine:
        return self.prefills[0]

    @property
    def d(self) -> Engine:
        return self.decodes[0]

    @property
    def state(self) -> str:
        (ticket,) = self.tickets
        return str(ticket.state.value)

    @property
    def facts(self) -> list[str]:
        (ticket,) = self.tickets
        return [edge.fact for _, edge in ticket.history]

    def rows(self, worker: str) -> list[str]:
        """The outcomes of a worker's legs, each as often as it was booked."""
        role = {"p": "prefill", "d": "decode", "m": "mixed"}[worker[0]]
        found = []
        for outcome in ("success", "client_error", "backpressure", "error", "cancelled"):
            labels = {"worker": worker, "role": role, "outcome": outcome}
            found += [outcome] * int(self.count("baton_worker_requests_total", **labels))
        return found

    def rows_of(self, role: str) -> list[str]:
        """The outcomes of the first worker of a role."""
        return self.rows(f"{role[0]}0")

    def streams(self, worker: str) -> list[str]:
        """The outcomes of the streams that a worker carried."""
        name = "baton_stream_outcome_total{"
        found = []
        for key, value in self.metrics.items():
            if key.startswith(name) and f'worker="{worker}"' in key:
                found += [key.partition('outcome="')[2].partition('"')[0]] * int(value)
        return found

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.get(series(name, labels), 0.0)

    @property
    def prefill_failures(self) -> dict[str, float]:
        name = 'baton_pd_prefill_failures_total{reason="'
        return {
            key.removeprefix(name).removesuffix('"}'): value
            for key, value in self.metrics.items()
            if key.startswith(name)
        }


def run(
    prefill: str | None = None,
    decode: str | None = None,
    client: Client | None = None,
    **rest: object,
) -> Result:
    """Run pairs to their end: one of each role by these scripts, or whatever `rest` says."""
    values: dict[str, object] = dict(rest)
    engine = "vllm" if rest.get("protocol") == "vllm-nixl" else "sglang"
    if prefill is not None:
        values["prefills"] = (Half(prefill, engine=engine),)
    if decode is not None:
        values["decodes"] = (Half(decode, engine=engine),)
    if client is not None:
        values["clients"] = (client,)
    return play(Pairs(**values))  # type: ignore[arg-type]  # a test that errs will hear of it


def play(pairs: Pairs) -> Result:
    """Run a plan and hold it to what holds for all."""
    if pairs.schedule is None:
        pairs = evolve(pairs, schedule=draw_schedule())
    try:
        return run_in_order(pairs.schedule, _play, pairs)
    except BaseException as error:
        error.add_note(f"play({pairs!r})")
        raise


async def _play(pairs: Pairs) -> Result:
    plan = Plan(engines=(), clients=pairs.clients, begin=BEGIN)
    async with trio.open_nursery() as world:
        cuts = None if pairs.cuts is None else random.Random(pairs.cuts)
        network = MemoryNetwork(world, cuts)
        prefills = _start(network, pairs.prefills, 9000)
        decodes = _start(network, pairs.decodes, 9500)
        mixed = _start(network, pairs.mixed, 9800)
        app = App(_settings(pairs), network, logs := configure(format="json", level="info"))
        logs.writer = log = Lines()
        app.serving.pairs.choose_by(random.Random(0))
        app.serving.pairs.rng = random.Random(0)
        if pairs.prepare is not None:
            pairs.prepare(app)
        watch(app)
        app.listen()
        inside = Run(plan, network, [], app, log, MemoryServer(), {})
        result = await _run(pairs, plan, inside, prefills, decodes, mixed)
        world.cancel_scope.cancel(reason="the run is over")
    check(result, has_bug=pairs.has_bug)
    return result


def _start(network: MemoryNetwork, halves: Sequence[Half], port: int) -> list[Engine]:
    engines = [Engine(half, BEGIN) for half in halves]
    for number, engine in enumerate(engines):
        address = (HOST, port + number)
        network.engines[address] = engine.serve_connection
    return engines


def _settings(pairs: Pairs) -> Settings:
    values: dict[str, object] = {"host": HOST, "port": 8000, "pd_protocol": pairs.protocol}
    values["prefill"] = tuple(
        _spec("prefill", 9000 + i, f"p{i}", half) for i, half in enumerate(pairs.prefills)
    )
    values["decode"] = tuple(
        _spec("decode", 9500 + i, f"d{i}", half) for i, half in enumerate(pairs.decodes)
    )
    values["worker_urls"] = tuple(
        _spec("mixed", 9800 + i, f"m{i}", half) for i, half in enumerate(pairs.mixed)
    )
    return Settings(**(values | pairs.settings))  # type: ignore[arg-type]


def _spec(role: str, port: int, name: str, half: Half) -> WorkerSpec:
    options = f",{half.options}" if half.options else ""
    if role == "prefill" and half.port is not None:
        options += f",bootstrap_port={half.port}"
    text = f"http://{HOST}:{port},id={name},engine={half.engine}{options}"
    return WorkerSpec.parse(text, role=role)


async def _run(
    pairs: Pairs,
    plan: Plan,
    inside: Run,
    prefills: list[Engine],
    decodes: list[Engine],
    mixed: list[Engine],
) -> Result:
    app, looks = inside.app, []
    connections = [requests_of(client) for client in pairs.clients]

    async def look(moment: float) -> None:
        await trio.sleep_until(BEGIN + moment)
        # What else happens at this moment happens first, in whatever order Trio's tasks run.
        await trio.testing.wait_all_tasks_blocked()
        workers = app.fleet.all()
        looks.append(
            Look(
                {worker.id: worker.inflight for worker in workers},
                [ticket.state.value for ticket in app.serving.live],
                {worker.id: worker.breaker.state.value for worker in workers},
            )
        )

    stopped_at = [0.0]

    async def run_app() -> None:
        await app.run()
        stopped_at[0] = trio.current_time() - BEGIN

    async with trio.open_nursery() as running:
        running.start_soon(run_app)
        await trio.sleep_until(BEGIN - 1)
        for half, base, index in _halves(pairs):
            if half.is_down:
                inside.network.refuses[HOST, base + index] = lambda: True
        await trio.sleep_until(BEGIN)
        async with trio.open_nursery() as clients:
            for moment, what in pairs.happenings:
                clients.start_soon(_happen, inside, moment, what)
            for moment in pairs.looks:
                clients.start_soon(look, moment)
            for requests in connections:
                clients.start_soon(run_connection, inside.network, plan, requests)
        await trio.sleep(pairs.rest)
        everything_is_given_back(app)
        metrics = read_metrics(app)
        app.ask_to_stop()
    assert not inside.network.open_sockets, inside.network.open_sockets
    return Result(
        got=[each for requests in connections for each in requests],
        prefills=prefills,
        decodes=decodes,
        mixed=mixed,
        tickets=list(app.serving.ended),
        metrics=metrics,
        looks=looks,
        stopped_at=stopped_at[0],
        log=[msgspec.json.decode(line) for line in inside.log.lines],
    )


def _halves(pairs: Pairs) -> list[tuple[Half, int, int]]:
    prefills = [(half, 9000, i) for i, half in enumerate(pairs.prefills)]
    return prefills + [(half, 9500, i) for i, half in enumerate(pairs.decodes)]


async def _happen(inside: Run, moment: float, what: str) -> None:
    await trio.sleep_until(BEGIN + moment)
    word, _, name = what.partition(" ")
    if word == "stop":
        inside.app.ask_to_stop()
        return
    address = (HOST, (9000 if name[0] == "p" else 9500) + int(name[1:]))
    if word == "silent":
        inside.network.silent.add(address)
    elif word == "refuse":
        inside.network.refuses[address] = lambda: True
    elif word == "remove":
        inside.app.fleet.remove(name)
    else:
        assert word == "drain", what
        inside.app.fleet.drain(name)


#### What holds for all


def watch(app: App) -> None:
    """After every pass: what lives in the attempt lives exactly as long as it does."""
    attempt, turn = REQUEST.scopes["attempt"], app.reactor.turn

    def checked_turn(seconds: float = 0.0) -> None:
        turn(seconds)
        for ticket, exchange in app.serving.live.items():
            if ticket.state in attempt:
                leg = exchange.leg
                if leg is None and exchange.pair is not None:
                    leg = exchange.pair.awaited
                assert leg is not None, ticket.state
                assert leg.is_open, ticket.state
            else:
                assert exchange.leg is None, ticket.state
                assert exchange.pair is None, ticket.state

    app.reactor.turn = checked_turn  # type: ignore[method-assign]


def everything_is_given_back(app: App) -> None:
    assert not app.serving.live, [ticket.id for ticket in app.serving.live]
    assert not app.serving.admission.holding
    for worker in app.fleet.all():
        assert worker.inflight == 0, f"legs left on {worker.id}"
        assert worker.breaker.probe is None, f"permit of {worker.id} did not come back"


def check(result: Result, *, has_bug: bool = False) -> None:
    """No bug was met, no engine works for nobody, and every leg is booked once."""
    bugs = [line for line in result.log if line["event"] == "internal_error"]
    assert has_bug == bool(bugs), f"{bugs[0].get('error')}\n{bugs[0].get('traceback')}"
    engines = (*result.prefills, *result.decodes, *result.mixed)
    sent = sum(len(engine.bodies) for engine in engines)
    booked = sum(
        value for key, value in result.metrics.items() if "baton_worker_requests_total" in key
    )
    assert booked >= sent, f"{sent} requests came, {booked} are booked"
    for engine in engines:
        assert engine.running == 0, "an engine works for nobody"
    for got in result.got:
        assert b"127.0.0.1" not in got.body, "an address of a worker was told"
        if got.status == 200 and got.is_events and got.ending == "cut":
            assert not got.is_done
            assert got.error is not None, "cut without a word"
