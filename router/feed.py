"""Where the machines' listeners and those who watch them meet.

A watcher says what it wants to see and is told nothing else. It has a bounded queue: one that reads
too slowly loses transitions, never time of the router, and is told how many it lost. Nothing is
published while nobody watches. The WebSocket itself is elsewhere.
"""

from __future__ import annotations

import re
from collections import deque
from urllib.parse import parse_qs

import msgspec
import trio
from attrs import define, field, frozen

from router.logs import HasId, Stamp
from statemachines import AGENT_CHARTS, ROUTER_CHARTS, Edge

#: Transitions that may wait for a watcher.
WAITING_MAX = 10_000
#: Which machines there are to watch.
MACHINES = tuple(chart.name for chart in ROUTER_CHARTS)
_ELSEWHERE = frozenset(chart.name for chart in AGENT_CHARTS)


class Transition(msgspec.Struct):
    """One message, with the words of the log line of the same transition."""

    #: UTC, as in the log.
    time: str
    #: Trio's clock: differences have a meaning, the value has none.
    seconds: float
    machine: str
    id: str
    source: str
    fact: str
    target: str
    #: The worker it is about, if there is one.
    worker: str | None = None
    #: Transitions that this watcher has not been sent before this one.
    lost: int = 0


class Lost(msgspec.Struct):
    """A message of its own when what was lost is followed by nothing."""

    time: str
    lost: int


class BadFilter(ValueError):
    """The query asks for something there is not; the message is one sentence."""


@frozen
class Filter:
    """What a watcher wants to see; an empty set is no condition."""

    machines: frozenset[str] = frozenset()
    #: Ids: of workers (with their breakers, legs and requests), and of requests (with their legs).
    workers: frozenset[str] = frozenset()
    requests: frozenset[str] = frozenset()

    @classmethod
    def of_query(cls, query: str) -> Filter:
        """`machine=`, `worker=` and `request=`, each as often as wanted; raises BadFilter."""
        asked = parse_qs(query, keep_blank_values=True)
        if strange := set(asked) - {"machine", "worker", "request"}:
            raise BadFilter(f"Filters are machine, worker and request, not {min(strange)}.")
        machines = frozenset(asked.get("machine", ()))
        for machine in sorted(machines):
            check_machine(machine)
        workers, requests = (frozenset(asked.get(key, ())) for key in ("worker", "request"))
        return cls(machines, workers, requests)

    def takes(self, machine: str, subject: HasId) -> bool:
        """Whether a move of this subject is wanted."""
        return (
            (not self.machines or machine in self.machines)
            and (not self.workers or not self.workers.isdisjoint(_workers_of(machine, subject)))
            and (not self.requests or _request_of(machine, subject) in self.requests)
        )


def check_machine(name: str) -> None:
    """Raises BadFilter for one that no router shows."""
    if name in _ELSEWHERE:
        raise BadFilter(
            f"The {name} machine lives in baton agent and no router shows it: read the agent's log "
            "(--log-format json --log-level debug) with baton replay."
        )
    if name not in MACHINES:
        raise BadFilter(f"There is no machine {name}, but {', '.join(MACHINES)}.")


def _workers_of(machine: str, subject: HasId) -> list[str]:
    if machine in ("worker", "breaker"):
        return [subject.id]
    workers: list[HasId | None] = [
        getattr(subject, "worker", None),
        getattr(subject, "prefill_worker", None),
    ]
    return [worker.id for worker in workers if worker is not None]


def _request_of(machine: str, subject: HasId) -> str | None:
    if machine == "request":
        return subject.id
    # A leg is called after its request and its number; a request's own id may look like that, too.
    return _LEG.sub("", subject.id) if machine == "leg" else None


_LEG = re.compile(r"\.\d+(\.prefill)?$")


@define(eq=False)
class Watcher:
    """One who wants to see transitions, and what waits for it."""

    filter: Filter = field(factory=Filter)
    is_closed: bool = False
    #: Transitions that it has missed and has not been told of.
    lost: int = 0
    _waiting: deque[Transition] = field(factory=deque)
    _woken: trio.Event = field(factory=trio.Event)

    def tell(self, machine: str, subject: HasId, edge: Edge, time: Stamp) -> None:
        """Queue a move if it is wanted, or count it as lost where too many wait."""
        if not self.filter.takes(machine, subject):
            return
        if len(self._waiting) >= WAITING_MAX:
            self.lost += 1
            return
        words = edge.source.value, edge.fact, edge.target.value
        worker = next(iter(_workers_of(machine, subject)), None)
        self._waiting.append(
            Transition(
                *(time.now(), trio.current_time(), machine, subject.id, *words, worker, self.lost)
            )
        )
        self.lost = 0
        self._woken.set()

    def close(self) -> None:
        """Nothing more comes; what waits can still be taken."""
        self.is_closed = True
        self._woken.set()

    async def take(self) -> Transition | Lost | None:
        """The next message, once there is one; None when closed and empty."""
        while not self._waiting and not self.lost and not self.is_closed:
            self._woken = trio.Event()
            await self._woken.wait()
        if self._waiting:
            return self._waiting.popleft()
        if self.lost:
            lost, self.lost = self.lost, 0
            return Lost(Stamp().now(), lost)
        return None


@define(eq=False)
class Feed:
    """All who watch one router."""

    #: The list stays the same one: listeners look at it before they publish.
    watchers: list[Watcher] = field(factory=list)
    _stamp: Stamp = field(factory=Stamp)

    def publish(self, machine: str, subject: HasId, edge: Edge) -> None:
        """Show a transition to all watchers."""
        for watcher in self.watchers:
            watcher.tell(machine, subject, edge, self._stamp)

    def close(self) -> bool:
        """The router stops: watchers are left what waits for them. Whether there are any."""
        watchers = list(self.watchers)
        self.watchers.clear()
        for watcher in watchers:
            watcher.close()
        return bool(watchers)
