"""The process: everything wired together under one root nursery, from start to stop.

The order of its life is the router chart's: starting, serving, draining, stopped. What lives in
the root nursery is the reactor, one task a client connection and one probe loop a worker; all of
them end with it. Background tasks run in a wrapper: an unexpected exception there is logged and
counted, and ends that task only.
"""

from __future__ import annotations

import random
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio
from attrs import define, field

from router.api import Api
from router.booking import Booking
from router.books import Books
from router.calls import Limits
from router.choosing import make_chooser
from router.config import Settings
from router.connection import Connection
from router.feed import Feed
from router.front import ClientChannel
from router.logs import Logs, configure
from router.metrics import Metrics
from router.mover import Mover
from router.pd.aborts import Aborts
from router.probing import Turns, probe_forever
from router.process import calm_collector, raise_descriptor_limit
from router.reactor import Listener, Rank, Reactor
from router.registry import Registry, View
from router.serving import Serving
from router.sockets import Network, Socket, TlsTarget
from router.tcp import TcpNetwork
from router.telling import tell_breaker, tell_worker
from router.ticket import Ticket
from router.wires.client import LineTransport
from router.wires.http import Pool
from router.wires.line import Line
from router.wires.nats.broker import Broker
from router.wires.nats.line import NatsWire
from router.wires.nats.protocol import Names
from router.worker import DrainWindow, Fleet, Worker
from statemachines import ROUTER, Edge
from statemachines.router import RouterState
from statemachines.worker import WorkerState

if TYPE_CHECKING:
    from router.wires.nats.bridge import Bridge

#: At the very end, how long clients may take to read their last bytes.
FLUSH_SECONDS = 3.0
#: While draining, between two looks at what clients have yet to take.
LOOK_SECONDS = 0.1

_log = structlog.get_logger("baton")


@define(eq=False)
class App:
    """One router; subject of the router chart."""

    settings: Settings
    network: Network
    logs: Logs
    #: The way to workers behind NATS and to the registry; its life is its owner's.
    broker: Broker | None = None
    id: str = "router"
    state: RouterState = RouterState.STARTING
    listeners: list[Callable[[App, Edge], None]] = field(factory=list)
    feed: Feed = field(init=False, factory=Feed)
    metrics: Metrics = field(init=False)
    reactor: Reactor = field(init=False)
    fleet: Fleet = field(init=False)
    serving: Serving = field(init=False)
    _api: Api = field(init=False)
    _lines: dict[Worker, Line] = field(init=False, factory=dict)
    _wire: NatsWire | None = field(init=False, default=None)
    _registry: Registry | None = field(init=False, default=None)
    _transport: LineTransport = field(init=False)
    _turns: Turns = field(init=False, factory=Turns)
    _aborts: Aborts = field(init=False)
    _tls: ssl.SSLContext | None = field(init=False, default=None)
    _limits: Limits = field(init=False)
    _front: trio.Nursery | None = field(init=False, default=None)
    _background_nursery: trio.Nursery | None = field(init=False, default=None)
    _listener: Listener | None = field(init=False, default=None)
    _stop_asked: trio.Event = field(init=False, factory=trio.Event)
    _stop_asked_again: trio.Event = field(init=False, factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        settings = self.settings
        if settings.worker_ca_file is not None:
            self._tls = _tls_context(settings)  # a file that is none must end the start
        self.metrics = Metrics(self)
        booking = Booking(self.metrics, self.feed, self.logs)
        self.reactor = Reactor(self.network, self._on_reactor_bug, self.logs.writer)
        self.fleet = Fleet(
            settings,
            worker_listeners=(booking.listener("worker"), tell_worker),
            breaker_listeners=(booking.listener("breaker"), tell_breaker),
        )
        self.fleet.on_joined.append(self._on_joined)
        self.fleet.on_left.append(self._on_left)
        self.listeners.append(booking.listener("router"))
        chooser = make_chooser(settings.policy)
        self._transport = LineTransport(self.line, self.reactor.refresh)
        self._aborts = Aborts(self._transport, self.metrics, self.spawn)
        self.serving = Serving(
            settings=settings,
            reactor=self.reactor,
            fleet=self.fleet,
            chooser=chooser,
            metrics=self.metrics,
            books=Books(self.metrics, self.logs, self.reactor),
            house=self,
            feed=self.feed,
            booking=booking,
            mover=Mover(self.fleet, chooser, self._transport),
            aborts=self._aborts,
        )
        if self.broker is not None:
            self._wire = self._make_wire(self.broker)
            self.metrics.follow_nats(self.registry_view)
        self._api = Api(
            house=self,
            fleet=self.fleet,
            serving=self.serving,
            metrics=self.metrics,
            reactor=self.reactor,
            started_at=time.time(),
        )
        self._limits = Limits(
            head_bytes_max=settings.max_header_bytes,
            body_bytes_max=settings.max_body_bytes,
            head_seconds=settings.header_timeout_secs,
            idle_seconds=settings.keep_alive_timeout_secs,
            stall_seconds=settings.client_stall_timeout_secs,
            call_seconds=settings.request_timeout_secs,
            keys=_keys(settings),
        )

    # What others ask for

    def line(self, worker: Worker) -> Line:
        """The way to a worker, also while its last legs run on after it has left."""
        line = self._lines.get(worker)
        if line is None:
            line = self._make_line(worker)
            # Workers come and go, and what is kept of those that left is never found again.
            if not worker.is_gone:
                self._lines[worker] = line
            elif not worker.is_behind_nats:
                line.close()
        return line

    def registry_view(self) -> View | None:
        """How the registry is known; None without one, or before `run`."""
        return None if self._registry is None else self._registry.view

    def open_requests(self) -> Iterable[Ticket]:
        """Live requests (for the metrics)."""
        return self.serving.live

    def workers(self) -> Iterable[Worker]:
        """Workers of the fleet (for the metrics)."""
        return self.fleet.all()

    def drain_worker(self, worker: Worker, timeout_secs: float) -> None:
        """Send it nothing new; after the window the streams that can move are moved."""
        self.fleet.drain(worker.id)
        worker.window = window = DrainWindow(timeout_secs)
        self.spawn(self._hand_back_after, worker, window)

    def spawn(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Start a task that ends with the router; a bug in it is logged and counted."""
        assert self._background_nursery is not None
        self._background_nursery.start_soon(self._in_background, task, *args)

    async def _hand_back_after(self, worker: Worker, window: DrainWindow) -> None:
        await trio.sleep(window.seconds)
        # A later drain has replaced the window, and a drain that was cancelled has taken it along.
        if worker.window is window and worker.state is WorkerState.DRAINING:
            self.serving.hand_back(worker)

    def ask_to_stop(self) -> None:
        """The first time: drain. The second time: stop now."""
        if self._stop_asked.is_set():
            self._stop_asked_again.set()
        self._stop_asked.set()

    # Life

    def listen(self) -> tuple[str, int]:
        """Bind the port and return the address; raises OSError. Connections wait for `run`."""
        try:
            listening = self.network.listen(self.settings.host, self.settings.port)
        except OSError:
            self._fire("crashed")
            raise
        self._listener = Listener(self.reactor, listening, self._accepted)
        return self._listener.address

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        assert self._listener is not None
        return self._listener.address

    async def run(self) -> None:
        """Serve, after `listen`, until asked to stop and drained. Cancelling stops at once."""
        assert self._listener is not None
        try:
            if self._stop_asked.is_set():
                self._fire("stop_asked")
            else:
                await self._run_until_stopped(self._listener)
        except Exception:  # also a group of them, but none with a cancellation in it
            if self.state is not RouterState.STOPPED:
                self._fire("crashed")
            raise
        finally:
            self._listener.close()
            for line in self._lines.values():
                line.close()
            if self._wire is not None:
                self._wire.close()

    async def _run_until_stopped(self, listener: Listener) -> None:
        async with trio.open_nursery() as root:
            self._background_nursery = root
            root.start_soon(self.reactor.run)
            if self._wire is not None:
                await self._wire.start()
            for spec in self.settings.workers:
                self.fleet.add(spec)
            # After those that the operator named: theirs is the first word on an id.
            if self._wire is not None:
                self._follow_registry(self._wire)
            async with trio.open_nursery() as front:
                self._front = front
                self._fire("listening")
                await self._stop_asked.wait()
                self._fire("stop_asked")
                await self._drain()
                listener.close()
                self.serving.shut_down()
                # What is left ends by itself once its client has taken its last bytes.
                is_heard = self.feed.close() or self.serving.has_open_channels()
                patience = FLUSH_SECONDS if is_heard else 0.0
                front.cancel_scope.deadline = trio.current_time() + patience
            with trio.move_on_after(FLUSH_SECONDS):
                await self._aborts.wait_done()
            if self._wire is not None:
                await self._wire.flush()
            root.cancel_scope.cancel(reason="the router has stopped")

    async def _drain(self) -> None:
        facts: list[str] = []
        async with trio.open_nursery() as nursery:

            async def wait_for(fact: str, condition: Callable[[], Awaitable[object]]) -> None:
                await condition()
                facts.append(fact)
                nursery.cancel_scope.cancel(reason=fact)

            window = self.settings.drain_timeout_secs
            nursery.start_soon(wait_for, "emptied", self._wait_empty)
            nursery.start_soon(wait_for, "window_over", partial(trio.sleep, window))
            nursery.start_soon(wait_for, "stop_asked", self._stop_asked_again.wait)
        self._fire(facts[0])

    async def _wait_empty(self) -> None:
        while self.serving.live:
            await self.serving.emptied.wait()
        await self.serving.pairs.wait_idle()
        while self.serving.owes_bytes():  # noqa: ASYNC110
            # A request is over before a slow client has taken its answer, and nobody tells when.
            await trio.sleep(LOOK_SECONDS)

    def _accepted(self, sock: Socket) -> None:
        assert self._front is not None
        try:
            channel = ClientChannel(self.reactor, sock, self._limits)
        except Exception:
            sock.close()
            raise
        connection = Connection(channel, self.serving, self._api.answer)
        # A background task, too: whatever goes wrong in it ends nothing else.
        self._front.start_soon(self._in_background, connection.serve)

    # Workers

    def _on_joined(self, worker: Worker) -> None:
        self.metrics.worker_joined(worker.id, worker.role)
        self.spawn(
            probe_forever, worker, self._transport, self.settings, random.random, self._turns
        )

    def _on_left(self, worker: Worker) -> None:
        self.metrics.worker_left(worker.id)
        line = self._lines.pop(worker, None)
        if line is not None:
            line.close()

    def _make_line(self, worker: Worker) -> Line:
        if not worker.is_behind_nats:
            return self._make_pool(worker)
        assert self._wire is not None, "the settings and the API let no such worker in"
        return self._wire.line(worker.id, is_prefill=worker.role == "prefill")

    def _make_pool(self, worker: Worker) -> Pool:
        return Pool(
            reactor=self.reactor,
            authority=worker.authority,
            base_path=worker.base_path.encode(),
            addresses=lambda: worker.addresses,
            tls=self._tls_for(worker),
            connect_timeout_seconds=self.settings.connect_timeout_secs,
            keep_alive_seconds=self.settings.worker_keep_alive_secs,
            rank=Rank.PREFILL if worker.role == "prefill" else Rank.WORKER,
        )

    def _tls_for(self, worker: Worker) -> TlsTarget | None:
        if worker.scheme != "https":
            return None
        if self._tls is None:
            self._tls = _tls_context(self.settings)
        return TlsTarget(self._tls, worker.host)

    # NATS

    def _make_wire(self, broker: Broker) -> NatsWire:
        settings = self.settings
        return NatsWire(
            broker,
            self.reactor,
            self.spawn,
            names=Names(settings.nats_prefix),
            missed=self.metrics.nats_missed,
            pending_max=settings.nats_req_max_pending,
            connect_seconds=settings.connect_timeout_secs,
        )

    def _follow_registry(self, wire: NatsWire) -> None:
        self._registry = Registry(
            broker=wire.broker,
            bucket=wire.names.bucket,
            fleet=self.fleet,
            engine=self.settings.engine,
            on_bug=self._on_background_bug,
            on_lost=self.metrics.nats_lost,
            on_expired=wire.lose_worker,
        )
        self.spawn(self._registry.run)

    # Bugs and bookkeeping

    async def _in_background(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task so that a bug in it never reaches the root nursery."""
        try:
            await task(*args)
        except Exception as error:
            self._on_background_bug(error)

    def _on_background_bug(self, error: Exception) -> None:
        self.metrics.internal_error("background")
        _log.error("internal_error", place="background", exc_info=error)

    def _on_reactor_bug(self, error: Exception) -> None:
        self.metrics.internal_error("reactor")
        _log.error("internal_error", place="reactor", exc_info=error)

    def _fire(self, fact: str) -> None:
        ROUTER.fire(self, fact)
        _log.info("router", fact=fact, state=self.state.value)


def _keys(settings: Settings) -> tuple[str, ...]:
    """All that open something; none where everybody may send requests."""
    admin = () if settings.admin_key is None else (settings.admin_key,)
    return (*settings.api_key, *admin) if settings.api_key else ()


def _tls_context(settings: Settings) -> ssl.SSLContext:
    """How https workers are checked; raises ssl.SSLError for a file without certificates."""
    context = ssl.create_default_context(cafile=settings.worker_ca_file)
    if settings.worker_insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def run(settings: Settings) -> int:
    """Run `baton serve` until it is told to stop; returns the exit code."""
    logs = configure(format=settings.log_format, level=settings.log_level)
    raise_descriptor_limit()
    network = TcpNetwork()
    try:
        bridge = _make_bridge(settings)
        app = App(settings, network, logs, bridge)
    except ssl.SSLError:
        print("baton serve: --worker-ca-file: no certificates in PEM form", file=sys.stderr)
        return 2
    calm_collector()
    try:
        trio.run(_serve_until_signalled, app, bridge, strict_exception_groups=True)
    except OSError as error:
        print(f"baton: cannot listen: {error}", file=sys.stderr)
        return 1
    finally:
        network.close()
    return 0


def _make_bridge(settings: Settings) -> Bridge | None:
    if settings.nats is None:
        return None
    # Not before it is needed: the library behind it is large, and speaks asyncio.
    from router.wires.nats.bridge import Bridge

    return Bridge(settings.nats, name="baton serve")


async def _serve_until_signalled(app: App, bridge: Bridge | None) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        host, port = app.listen()
        shown = f"[{host}]" if ":" in host else host
        print(f"baton: listening on http://{shown}:{port}", flush=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_pass_on, signals, app)
            if bridge is not None:
                await nursery.start(bridge.run)
            await app.run()
            nursery.cancel_scope.cancel(reason="the router has stopped")


async def _pass_on(signals: AsyncIterator[int], app: App) -> None:
    async for _ in signals:
        app.ask_to_stop()
