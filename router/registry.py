"""The router's view of the registry: workers that named themselves, kept in the fleet.

A worker joins with its entry, changes and drains with it, and leaves when the entry is deleted or
nobody renews it. A view that may be stale stays in use: nobody is dropped because of what could not
be heard. After a time without the broker the view counts again once all entries have been told
anew, and who had no chance to renew its entry meanwhile has one TTL to do so. Workers that the
operator named are never taken out from here. Leaving the fleet breaks no stream: an agent
deregisters before it drains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import structlog
import trio
from attrs import define, evolve, field, frozen

from router.waking import Waker
from router.wires.nats import entries
from router.wires.nats.broker import Broker, Change, ChangeKind
from router.wires.nats.entries import RENEW_SECONDS, TTL_SECONDS, BadEntry, Entry
from router.worker import Fleet, Origin, Probe, ProbeOutcome, UnknownWorker, Worker
from statemachines.worker import WorkerState

#: Entries that are followed; whoever comes later is refused.
ENTRIES_MAX = 10_000
#: Keys whose refusal is remembered, so that it is logged once and not every two seconds.
REFUSALS_MAX = 1_000
#: Changes that may wait to be looked at; beyond, the watch begins anew.
BACKLOG_MAX = 100_000
#: Changes looked at before other tasks have their turn.
CHANGES_AT_ONCE = 50
#: How long the broker may take to answer when it is asked whether it is there.
ANSWER_SECONDS = 2.0
#: Not having heard the broker for so long, renewals may have been missed.
BLIND_SECONDS = 2 * RENEW_SECONDS + ANSWER_SECONDS
#: A registry that cannot be read for so long is complained of, once.
COMPLAIN_SECONDS = TTL_SECONDS
#: The same while the broker itself answers: a registry that is there is read in moments.
SILENT_SECONDS = 2.0
#: An entry that has expired is looked at again after this: its renewal may be on its way.
SECOND_LOOK_SECONDS = 0.5
NO_JETSTREAM = (
    "the broker has no JetStream, so there is no registry and no work queue: start it with -js, "
    "or name the workers (nats:ID)"
)

_log = structlog.get_logger("registry")


@frozen
class View:
    """How the registry is known to this router."""

    is_connected: bool
    """The broker is there."""
    is_synced: bool
    """Nothing stands between the registry and this view of it."""
    seconds_since_sync: float
    """How old the view may be; counted from the start until it was there for the first time."""
    entries: int
    """Workers that are registered, as far as is known."""
    refused: int
    """How often something in the registry was no entry."""
    has_jetstream: bool | None = None
    """The broker can keep a registry at all; None while that is not known."""
    trouble: str = ""
    """Why there is no view of it, for people."""


@define(eq=False)
class _Followed:
    """One entry, and what has followed from it."""

    entry: Entry
    value: bytes
    round: int
    #: When the worker it is of has last renewed it.
    renewed_at: float
    #: The other worker whose place it took.
    before: Entry | None = None
    #: The worker gets no new requests because this entry says so.
    is_drained_here: bool = False
    #: When it is dropped unless it is renewed.
    due: float = float("inf")


@define(eq=False)
class _Departed:
    """A worker that the operator named, and that has deregistered."""

    worker: Worker
    #: Nobody has answered for it since.
    is_gone: bool = False

    def has_returned(self) -> bool:
        """Whether somebody answers for it again: until its agent is gone, that one still does."""
        self.is_gone = self.is_gone or self.worker.is_silent
        return self.is_gone and self.worker.passes > 0


@define(eq=False)
class Registry:
    """Follows one bucket of one broker; `run` does it."""

    broker: Broker
    bucket: str
    fleet: Fleet
    #: Engine of the workers that do not say.
    engine: str
    on_bug: Callable[[Exception], None]
    on_lost: Callable[[], None]
    #: Told who has gone without deregistering.
    on_expired: Callable[[str], None]
    is_synced: bool = field(init=False, default=False)
    #: Entries that were no entries.
    refused: int = field(init=False, default=0)
    _followed: dict[str, _Followed] = field(init=False, factory=dict)
    #: By id.
    _departed: dict[str, _Departed] = field(init=False, factory=dict)
    _refusals: dict[str, str] = field(init=False, factory=dict)
    _changes: deque[Change | None] = field(init=False, factory=deque)
    _waker: Waker = field(init=False, factory=Waker)
    #: How often all entries have had to be told anew.
    _round: int = field(init=False, default=0)
    #: When the view was last known to be true (Trio's clock).
    _heard_at: float = field(init=False, factory=trio.current_time)
    _grace_until: float = field(init=False, default=0.0)
    _beat_at: float = field(init=False, default=0.0)
    _has_complained: bool = field(init=False, default=False)

    @property
    def view(self) -> View:
        """For who looks at it from outside."""
        return View(
            is_connected=self.broker.is_connected,
            is_synced=self.is_synced,
            seconds_since_sync=max(0.0, trio.current_time() - self._heard_at),
            entries=len(self._followed),
            refused=self.refused,
            has_jetstream=self.broker.has_jetstream,
            trouble="" if self.is_synced else self._trouble(),
        )

    async def run(self) -> None:
        """Follow until cancelled. What has joined stays in the fleet."""
        while True:
            bucket = self.broker.bucket(self.bucket, ttl_seconds=TTL_SECONDS)
            watch = bucket.watch(self._on_changes, on_lost=self._on_lost)
            try:
                await self._follow()
                why = "more changes than can be looked at"
            except Exception as error:
                self.on_bug(error)
                why = "a bug"
                await trio.sleep(RENEW_SECONDS)
            finally:
                watch.close()
            self._changes.clear()
            self._on_lost(why)

    async def _follow(self) -> None:
        """Until there are more changes than can be kept."""
        while len(self._changes) <= BACKLOG_MAX:
            while self._changes:
                self._take(min(len(self._changes), CHANGES_AT_ONCE))
                await trio.lowlevel.checkpoint()
            if trio.current_time() >= self._beat_at:
                await self._beat()
            else:
                with trio.move_on_at(self._beat_at):
                    await self._waker.wait()

    # What the broker tells

    def _on_changes(self, changes: Sequence[Change]) -> None:
        self._changes.extend(changes)
        self._waker.wake()

    def _on_lost(self, why: str) -> None:
        # In its place among the changes: what was told before it is true of the time before it.
        self._changes.append(None)
        self._waker.wake()
        self.on_lost()
        _log.warning("registry", fact="stale", why=why, entries=len(self._followed))

    # What follows

    def _take(self, count: int) -> None:
        self._hear()
        for _ in range(count):
            change = self._changes.popleft()
            try:
                self._apply(change)
            except Exception as error:
                self.on_bug(error)  # and the next entry is another matter

    def _apply(self, change: Change | None) -> None:
        if change is None:
            self._round += 1
            self.is_synced = False
        elif change.kind is ChangeKind.SYNCED:
            self._sync()
        elif change.kind is ChangeKind.PUT:
            self._put(change.key, change.value)
        elif change.kind is ChangeKind.DELETED:
            self._drop(change.key, "deleted")
        elif (followed := self._followed.get(change.key)) is not None:
            self._doubt(followed, trio.current_time() + SECOND_LOOK_SECONDS)

    def _sync(self) -> None:
        now = trio.current_time()
        if self._round:
            self._grace_until = now + TTL_SECONDS
        self.is_synced = True
        self._has_complained = False
        self._heard_at = now
        for followed in self._followed.values():
            if followed.round != self._round:
                self._doubt(followed, now)
        _log.info("registry", fact="synced", entries=len(self._followed))

    def _hear(self) -> None:
        """The broker is there; if it was not for a while, renewals may have been missed."""
        now = trio.current_time()
        if not self.is_synced:
            return
        if now - self._heard_at > BLIND_SECONDS:
            self._grace_until = now + TTL_SECONDS
            for followed in self._followed.values():
                if followed.due < self._grace_until:
                    followed.due = self._grace_until
        self._heard_at = now

    async def _beat(self) -> None:
        """Ask the broker whether it is there; only then what was not renewed has left."""
        asked_at = trio.current_time()
        is_there = self.broker.is_connected and await self.broker.flush(ANSWER_SECONDS)
        if is_there and self.is_synced and not self._changes:
            self._hear()
            await self._drop_overdue(asked_at)
        patience = SILENT_SECONDS if is_there else COMPLAIN_SECONDS
        if not self.is_synced and asked_at - self._heard_at >= patience:
            self._complain()
        self._look_for_returned()
        nearest = min((each.due for each in self._followed.values()), default=float("inf"))
        now = trio.current_time()
        self._beat_at = min(asked_at + RENEW_SECONDS, max(nearest, now + SECOND_LOOK_SECONDS))

    def _complain(self) -> None:
        if self._has_complained:
            return
        self._has_complained = True
        _log.warning("registry", fact="unreadable", why=self._trouble(), bucket=self.bucket)

    def _trouble(self) -> str:
        if self.broker.is_connected and self.broker.has_jetstream is False:
            return NO_JETSTREAM
        if self.broker.is_connected:
            return "the broker is there, but not the registry (is JetStream on, and permitted?)"
        return f"the broker is away: {self.broker.trouble}".removesuffix(": ")

    async def _drop_overdue(self, moment: float) -> None:
        left = [key for key, each in self._followed.items() if each.due <= moment]
        for number, key in enumerate(left, start=1):
            if self._changes:
                return  # one of them may have been renewed; the next beat looks again
            worker_id = self._followed[key].entry.id
            self._drop(key, "expired")
            self.on_expired(worker_id)
            if number % CHANGES_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    def _doubt(self, followed: _Followed, moment: float) -> None:
        followed.due = max(moment, self._grace_until)
        self._beat_at = min(self._beat_at, followed.due)

    # Entries

    def _put(self, key: str, value: bytes) -> None:
        followed = self._followed.get(key)
        if followed is not None:
            # Somebody renews it, whatever he says.
            followed.round, followed.due = self._round, float("inf")
            if followed.value == value:
                followed.renewed_at = trio.current_time()
                return
        try:
            entry = self._read(key, value)
            if followed is None:
                self._join(key, entry, value)
            elif followed.entry.is_same_worker(entry):
                self._change(followed, entry, value)
            else:
                self._replace(key, followed, entry, value)
        except BadEntry as problem:
            self._refuse(key, str(problem))
        else:
            self._refusals.pop(key, None)

    def _read(self, key: str, value: bytes) -> Entry:
        entry = entries.decode(key, value)
        if entry.engine == "auto" and self.engine != "auto":
            entry = evolve(entry, engine=self.engine)
        if key not in self._followed and len(self._followed) >= ENTRIES_MAX:
            raise BadEntry(f"there are {ENTRIES_MAX} entries already")
        return entry

    def _refuse(self, key: str, why: str) -> None:
        self.refused += 1
        if self._refusals.get(key) == why or len(self._refusals) >= REFUSALS_MAX:
            return
        self._refusals[key] = why
        _log.warning("registry", fact="refused", key=key[:128], why=why)

    def _replace(self, key: str, old: _Followed, entry: Entry, value: bytes) -> None:
        # A worker that comes back as another has taken its place for good. If the first one goes
        # on renewing, two agents have the same id: then they must not throw each other out.
        is_second = old.before is not None and old.before.is_same_worker(entry)
        if is_second and trio.current_time() - old.renewed_at < TTL_SECONDS:
            raise BadEntry(f"two agents have the id {entry.id}")
        self._drop(key, "replaced")
        self._join(key, entry, value, before=old.entry)

    def _join(self, key: str, entry: Entry, value: bytes, *, before: Entry | None = None) -> None:
        now = trio.current_time()
        followed = _Followed(entry, value, self._round, renewed_at=now, before=before)
        self._followed[key] = followed
        worker = self._worker(entry.id)
        if worker is None:
            worker = self.fleet.add(entry.spec(), Origin.REGISTRY)
        _log.info("registry", fact="joined", worker=entry.id, named_by=worker.origin.value)
        worker.elsewhere = max(0, entry.inflight - worker.inflight)
        self._learn(worker, entry)
        departed = self._departed.pop(entry.id, None)
        followed.is_drained_here = departed is not None and departed.worker is worker
        self._follow_state(worker, followed)
        if worker.last_probe is None:
            self._vouch(worker)

    def _change(self, followed: _Followed, entry: Entry, value: bytes) -> None:
        old, followed.entry, followed.value = followed.entry, entry, value
        followed.renewed_at = trio.current_time()
        worker = self._worker(entry.id)
        if worker is None:
            return  # the operator has removed it: it stays out until it registers anew
        worker.elsewhere = max(0, entry.inflight - worker.inflight)
        if entry.knowledge() != old.knowledge():
            self._learn(worker, entry)
        if entry.is_draining != followed.is_drained_here:
            self._follow_state(worker, followed)

    def _learn(self, worker: Worker, entry: Entry) -> None:
        knowledge = entry.knowledge()
        is_ours = worker.origin is Origin.REGISTRY
        if knowledge is not None and (is_ours or worker.knowledge is None):
            worker.fingerprint = None
            worker.learn(knowledge)
            worker.probe_soon()

    def _follow_state(self, worker: Worker, followed: _Followed) -> None:
        is_draining = followed.entry.is_draining
        if is_draining and worker.state is not WorkerState.DRAINING:
            self.fleet.drain(worker.id)
            followed.is_drained_here = True
        elif not is_draining and followed.is_drained_here:
            self.fleet.cancel_drain(worker.id)
            followed.is_drained_here = False
            self._vouch(worker)

    def _vouch(self, worker: Worker) -> None:
        """The agent has just seen its engine: no need to wait for a probe of ours."""
        is_known = worker.origin is Origin.REGISTRY and worker.knowledge is not None
        if is_known and worker.state is WorkerState.PROBING:
            worker.probed(Probe(ProbeOutcome.PASSED, trio.current_time(), "registered"))

    def _drop(self, key: str, why: str) -> None:
        followed = self._followed.pop(key, None)
        self._refusals.pop(key, None)
        if followed is None:
            return
        _log.info("registry", fact="left", worker=followed.entry.id, why=why)
        worker = self._worker(followed.entry.id)
        if worker is None:
            return
        worker.elsewhere = 0
        if worker.origin is Origin.REGISTRY:
            self.fleet.remove(worker.id)
        elif why == "deleted" and worker.is_behind_nats:
            self._depart(worker, is_drained_here=followed.is_drained_here)
        elif followed.is_drained_here:
            self.fleet.cancel_drain(worker.id)

    def _depart(self, worker: Worker, *, is_drained_here: bool) -> None:
        """Its agent drains, or has ended: it gets nothing until somebody answers for it anew."""
        if worker.state is not WorkerState.DRAINING:
            self.fleet.drain(worker.id)
        elif not is_drained_here:
            return  # the operator drains it
        self._departed[worker.id] = _Departed(worker)

    def _look_for_returned(self) -> None:
        for id, departed in list(self._departed.items()):
            worker = departed.worker
            if worker.state is not WorkerState.DRAINING:
                del self._departed[id]  # the operator has removed it, or wants it to serve
            elif departed.has_returned():
                del self._departed[id]
                self.fleet.cancel_drain(worker.id)

    def _worker(self, worker_id: str) -> Worker | None:
        try:
            return self.fleet.get(worker_id)
        except UnknownWorker:
            return None
