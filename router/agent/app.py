"""The agent's process: one engine, one broker, and everything between them, from start to stop.

Under its root nursery live the reactor, the probes of the engine and the registration. It serves
until it is asked to stop (a signal, or somebody over NATS), then drains; a second signal ends it at
once. Whatever way it ends, every open request gets a last frame and the engine is freed.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from secrets import token_hex

import structlog
import trio
from attrs import define, field

from router.agent.draining import FLUSH_SECONDS, LINGER_SECONDS, Drain, DrainDoor
from router.agent.intake import Intake
from router.agent.presence import Hello, Presence, Stage
from router.agent.proxied import Proxied
from router.agent.registration import Registration
from router.agent.settings import AgentSettings
from router.logs import Logs
from router.probing import probe_forever
from router.reactor import Rank, Reactor
from router.sockets import Network, TlsTarget
from router.wires.client import LineTransport
from router.wires.http import Pool
from router.wires.nats.broker import Broker
from router.wires.nats.protocol import Names
from router.worker import Fleet, Worker
from statemachines.chart import Edge

_log = structlog.get_logger("baton")

#: After a bug in a background task, before it is started again.
AGAIN_SECONDS = 1.0
#: At an abrupt stop, for the entry to be removed and the last frames to go out.
HASTE_SECONDS = 1.0


@define(eq=False)
class Agent:
    """One agent, around a broker that somebody else opens and closes."""

    settings: AgentSettings
    network: Network
    logs: Logs
    broker: Broker
    #: Names this process among all that ever had its worker's id.
    instance: str = field(init=False, factory=lambda: token_hex(4))
    names: Names = field(init=False)
    fleet: Fleet = field(init=False)
    worker: Worker = field(init=False)
    reactor: Reactor = field(init=False)
    line: Pool = field(init=False)
    intake: Intake = field(init=False)
    registration: Registration = field(init=False)
    handback_listeners: tuple[Callable[[Proxied, Edge], None], ...] = field(init=False)
    is_draining: bool = field(init=False, default=False)
    presence: Presence = field(init=False)
    #: It takes requests: the server has its subscription.
    listening: trio.Event = field(init=False, factory=trio.Event)
    #: It has not begun to serve: another agent has its id.
    refused_by: Hello | None = field(init=False, default=None)
    #: The engine's state as it was last told in the log.
    _was_ready: bool = field(init=False, default=False)
    _door: DrainDoor = field(init=False)
    _stop_asked: trio.Event = field(init=False, factory=trio.Event)
    _stop_asked_again: trio.Event = field(init=False, factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        settings = self.settings
        self.names = Names(settings.nats_prefix)
        write = self.logs.transitions("handback")
        self.handback_listeners = () if write is None else (write,)
        self.reactor = Reactor(self.network, self._on_reactor_bug, self.logs.writer)
        self.fleet = Fleet(settings)
        self.worker = self.fleet.add(settings.spec())
        self.line = self._make_pool(self.worker)
        worker_id = self.worker.id
        self.intake = Intake(
            self.broker,
            self.names,
            worker_id,
            self,
            settings.nats_req_max_pending,
            self.instance,
        )
        self.presence = Presence(self.broker, self.names, worker_id, self.instance)
        self.registration = Registration(
            self.broker,
            self.names,
            self.worker,
            agent_version(),
            lambda: len(self.intake.open),
            lambda: self.presence.is_shared,
        )
        self.worker.listeners.append(self._engine_moved)
        self.broker.on_state.append(self._broker_moved)
        self._door = DrainDoor(
            self.broker, self.names, worker_id, settings.drain_timeout_secs, self.ask_to_drain
        )

    # What its requests ask for

    @property
    def idle_seconds(self) -> float:
        """How long the engine may be silent; 0 = for ever."""
        return self.settings.nats_req_idle_timeout

    @property
    def total_seconds(self) -> float:
        """How long a request may take; 0 = for ever."""
        return self.settings.nats_req_max_duration

    def request_over(self, proxied: Proxied) -> None:
        """Book the end of a request."""
        self.intake.request_over(proxied)
        write = _log.debug if proxied.is_probe or proxied.is_left_over else _log.info
        write(
            "request",
            id=proxied.id,
            state=proxied.state.value,
            status=proxied.status or None,
            frames=proxied.replies.count,
            seconds=self.reactor.now - proxied.began_at,
            detail=proxied.detail or None,
        )

    def engine_broke(self) -> None:
        """A request found the engine gone, or nearly: look at once."""
        self.worker.probe_soon()

    # Life

    def ask_to_stop(self) -> None:
        """The first time: drain. The second time: stop now."""
        if self._stop_asked.is_set():
            self._stop_asked_again.set()
        self._stop_asked.set()

    def ask_to_drain(self) -> None:
        """Drain, if it does not yet."""
        self._stop_asked.set()

    async def run(self) -> None:
        """Serve until asked to stop and drained. Cancelling stops at once."""
        try:
            async with trio.open_nursery() as root:
                root.start_soon(self.reactor.run)
                root.start_soon(self._in_background, self._probe)
                self.presence.begin()
                if await self._claim():
                    await self._serve(root)
                root.cancel_scope.cancel(reason="the agent has stopped")
        finally:
            self.intake.stop()
            self._door.close()
            self.presence.close()
            self.line.close()
            self.broker.on_state.remove(self._broker_moved)

    async def _claim(self) -> bool:
        """Whether it may serve: nobody else does under its id, and nobody wants it to stop."""
        async with trio.open_nursery() as nursery:

            async def give_up() -> None:
                await self._stop_asked.wait()
                nursery.cancel_scope.cancel(reason="asked to stop")

            nursery.start_soon(give_up)
            self.refused_by = await self.presence.claim()
            if self.refused_by is None:
                await self.intake.renew_queue()
            nursery.cancel_scope.cancel(reason="answered")
        return self.presence.stage is Stage.SERVING and not self._stop_asked.is_set()

    async def _serve(self, root: trio.Nursery) -> None:
        root.start_soon(self._in_background, self.registration.run)
        root.start_soon(self._in_background, self.presence.run)
        self.reactor.refresh()
        self.intake.begin()
        self._door.begin()
        root.start_soon(self._wait_listening)
        await self._stop_asked.wait()
        await self._drain()
        self._door.tell_drained()
        is_told = self._door.is_asked and await self.broker.flush(FLUSH_SECONDS)
        if is_told and not self._stop_asked_again.is_set():
            with trio.move_on_after(LINGER_SECONDS):
                await self._stop_asked_again.wait()

    async def _wait_listening(self) -> None:
        while not await self.broker.flush(FLUSH_SECONDS):  # noqa: ASYNC110  # nobody tells
            await trio.sleep(AGAIN_SECONDS)
        self.listening.set()

    async def _drain(self) -> None:
        _log.info("draining", worker=self.worker.id, open=len(self.intake.open))
        self.is_draining = True
        self.presence.drain()
        self.fleet.drain(self.worker.id)
        drain = Drain(self.intake, self.registration, self.broker, self.settings.drain_timeout_secs)
        async with trio.open_nursery() as nursery:

            async def stop_at_once() -> None:
                await self._stop_asked_again.wait()
                nursery.cancel_scope.cancel(reason="asked to stop again")

            nursery.start_soon(stop_at_once)
            await drain.run()
            nursery.cancel_scope.cancel(reason="drained")
        if self._stop_asked_again.is_set():
            self.intake.stop()
            await self.registration.leave(HASTE_SECONDS)
            await self.broker.flush(HASTE_SECONDS)
        _log.info("drained", worker=self.worker.id)

    async def _probe(self) -> None:
        transport = LineTransport(lambda _: self.line, self.reactor.refresh)
        await probe_forever(self.worker, transport, self.settings)

    # Bugs and bookkeeping

    async def _in_background(self, task: Callable[[], Awaitable[object]]) -> None:
        """Run a task so that a bug in it ends nothing else, and start it again."""
        while True:
            try:
                await task()
            except Exception as error:
                _log.error("internal_error", place="background", exc_info=error)
                await trio.sleep(AGAIN_SECONDS)
            else:
                return

    def _broker_moved(self, is_connected: bool) -> None:
        if is_connected:
            _log.info("connected to the broker", worker=self.worker.id)
        else:
            _log.warning("the broker is away", worker=self.worker.id)

    def _engine_moved(self, worker: Worker, _: Edge) -> None:
        if worker.is_ready == self._was_ready or self.is_draining:
            return
        self._was_ready = worker.is_ready
        if worker.is_ready:
            _log.info("the engine is healthy", worker=worker.id, engine=worker.engine)
        else:
            why = worker.last_probe.detail if worker.last_probe is not None else ""
            _log.warning("the engine is unhealthy", worker=worker.id, detail=why or None)

    def _on_reactor_bug(self, error: Exception) -> None:
        _log.error("internal_error", place="reactor", exc_info=error)

    def _make_pool(self, worker: Worker) -> Pool:
        is_tls = worker.scheme == "https"
        return Pool(
            reactor=self.reactor,
            authority=worker.authority,
            base_path=worker.base_path.encode(),
            addresses=lambda: worker.addresses,
            tls=TlsTarget(ssl.create_default_context(), worker.host) if is_tls else None,
            connect_timeout_seconds=self.settings.connect_timeout_secs,
            keep_alive_seconds=self.settings.worker_keep_alive_secs,
            rank=Rank.WORKER,
        )


def agent_version() -> str:
    """What an entry says of its agent."""
    try:
        return f"baton {version('baton-router')}"
    except PackageNotFoundError:
        return "baton"
