"""The engine's entry in the registry: written while it is fit to serve, renewed, and taken back.

Routers choose by what stands here, so it is there only while the engine passes its probes, and says
that it drains before a drain begins; it goes when that is over. A broker that is away costs nothing
but the entry: routers keep what they know, and it is written anew as soon as the broker is back.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio
from attrs import define, field

from router.wires.nats.broker import Broker, BrokerAway, BrokerError, Bucket, NoJetStream
from router.wires.nats.entries import RENEW_SECONDS, TTL_SECONDS, Entry, encode
from router.wires.nats.protocol import Names, token_of
from router.worker import Worker
from statemachines.chart import Edge

_log = structlog.get_logger("baton")

#: After a failed attempt to remove the entry.
AGAIN_SECONDS = 0.5


@define(eq=False)
class Registration:
    """Keeps one entry as the worker is."""

    broker: Broker
    names: Names
    worker: Worker
    version: str
    inflight: Callable[[], int]
    #: Another agent stands under the same key: what is there is not ours to remove.
    is_shared: Callable[[], bool]
    _bucket: Bucket = field(init=False)
    _changed: trio.Event = field(init=False, factory=trio.Event)
    _gone: trio.Event = field(init=False, factory=trio.Event)
    _is_draining: bool = field(init=False, default=False)
    _said_draining: trio.Event = field(init=False, factory=trio.Event)
    _is_leaving: bool = field(init=False, default=False)
    #: It may stand there: a put that failed may have been done.
    _may_stand: bool = field(init=False, default=False)
    _complained: bool = field(init=False, default=False)
    #: Why the last attempt has failed, for people; empty where it has not.
    problem: str = field(init=False, default="")
    #: The entry has stood there once.
    registered: trio.Event = field(init=False, factory=trio.Event)
    #: As it was last told in the log.
    _is_registered: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._bucket = self.broker.bucket(self.names.bucket, ttl_seconds=TTL_SECONDS)
        self.worker.listeners.append(self._moved)
        learned = self.worker.on_learned

        def on_learned() -> None:
            if learned is not None:
                learned()
            self.renew()

        self.worker.on_learned = on_learned
        self.broker.on_state.append(self._state_changed)

    def renew(self) -> None:
        """Something has changed: write now."""
        self._changed.set()

    async def run(self) -> None:
        """Write, and write again, until `leave`."""
        while not self._gone.is_set():
            self._changed = trio.Event()
            await self._bring_up_to_date()
            if not self._gone.is_set():
                is_waited_for = self._is_draining and not self._said_draining.is_set()
                hurries = self._is_leaving or is_waited_for
                with trio.move_on_after(AGAIN_SECONDS if hurries else RENEW_SECONDS):
                    await self._changed.wait()

    async def drain(self, seconds: float) -> None:
        """Say that it takes nothing new, if it stands there; returns when that is said, or in time.

        Routers go on showing it, with what it still does, until `leave`.
        """
        self._is_draining = True
        self.renew()
        with trio.move_on_after(seconds):
            await self._said_draining.wait()

    async def leave(self, seconds: float) -> bool:
        """Remove the entry for good; False where that was not possible in time.

        It then goes by itself, since nobody renews it.
        """
        self._is_leaving = True
        self.renew()
        with trio.move_on_after(seconds):
            await self._gone.wait()
        return self._gone.is_set()

    async def _bring_up_to_date(self) -> None:
        entry = self._entry()
        key = token_of(self.worker.id)
        try:
            if entry is not None:
                self._may_stand = True
                await self._bucket.put(key, encode(entry))
            elif self._may_stand:
                if not self.is_shared():
                    await self._bucket.delete(key)
                self._may_stand = False
        except NoJetStream as problem:
            self._may_stand = False  # where nothing is kept, nothing stands
            self._complain(problem)
            self._answer(is_draining=True)
            return
        except (BrokerAway, BrokerError) as problem:
            self._complain(problem)
            return
        self._complained = False
        self._note(self._may_stand)
        self.problem = ""
        self._answer(is_draining=entry is None or entry.is_draining)

    def _answer(self, *, is_draining: bool) -> None:
        """Tell who waits for what was just done."""
        if self._is_draining and is_draining:
            self._said_draining.set()
        # An entry that was asked for before `leave` was called may have been put just now.
        if self._is_leaving and not self._may_stand:
            self._gone.set()

    def _complain(self, problem: Exception) -> None:
        self.problem = str(problem)
        if not self._complained:
            self._complained = True
            _log.warning("not registered", worker=self.worker.id, problem=str(problem))

    def _note(self, is_registered: bool) -> None:
        if self._is_registered != is_registered:
            self._is_registered = is_registered
            if is_registered:
                self.registered.set()
            event = "registered" if is_registered else "deregistered"
            _log.info(event, worker=self.worker.id, bucket=self.names.bucket)

    def _entry(self) -> Entry | None:
        worker = self.worker
        # A drain says so where the entry stands, and does not put it where another one's may.
        stays = self._may_stand and not self.is_shared()
        if self._is_leaving or not (stays if self._is_draining else worker.is_ready):
            return None
        return Entry(
            id=worker.id,
            engine=worker.engine,
            role=worker.role,
            models=worker.models,
            context_length=worker.context_length,
            is_draining=self._is_draining,
            inflight=self.inflight(),
            group=worker.group,
            bootstrap_host=worker.bootstrap_host if worker.bootstrap_port else None,
            bootstrap_port=worker.bootstrap_port,
            version=self.version,
        )

    def _moved(self, _: Worker, edge: Edge) -> None:
        if edge.source is not edge.target:
            self.renew()

    def _state_changed(self, is_connected: bool) -> None:
        if is_connected:
            self.renew()
