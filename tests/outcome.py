"""What a simulated run led to: what each client saw, and what was inside.

Nothing here judges; the promises do. What a client got is read here without any code of the
router's, so that a mistake in its reading of streams cannot hide itself.
"""

from __future__ import annotations

import re
import zlib

import msgspec
from attrs import define, field, frozen

from router.sim.engine import SimEngine
from router.sim.wire import Received
from router.ticket import Ticket
from tests.memory_broker import MemoryServer
from tests.nats_peers import Peer
from tests.plans import Client, Plan


@define(eq=False)
class Got:
    """What one client saw of the answer to one request."""

    client: Client
    status: int = 0
    headers: dict[str, str] = field(factory=dict)
    #: The header lines as they came, for those that may come twice.
    header_list: list[tuple[str, str]] = field(factory=list)
    #: Statuses that came before the answer (100 Continue).
    interim: list[int] = field(factory=list)
    #: Seconds after the plan's begin at which the head came.
    head_at: float = 0.0
    body: bytes = b""
    #: (moment, bytes) of every piece of body; moments count from the plan's begin.
    pieces: list[tuple[float, bytes]] = field(factory=list)
    #: "clean", "cut" (before its end), "left" (by the client), "refused" (no connection),
    #: "unsent" (the connection ended before this request's turn).
    ending: str = ""
    #: Seconds after the plan's begin.
    ended_at: float = 0.0
    #: Everything a `raw` client read.
    raw: bytes = b""
    #: What engines say to the same request, asked directly: one answer for each kind of engine.
    direct: list[Got] = field(factory=list)
    _read: tuple[bytes | None, list[dict[str, object]]] = (None, [])

    @property
    def plain(self) -> bytes:
        """The body, decompressed as far as it came."""
        if self.headers.get("content-encoding") != "gzip":
            return self.body
        plain, rest = b"", self.body
        while rest:
            reader = zlib.decompressobj(wbits=31)
            plain += reader.decompress(rest)
            rest = reader.unused_data
        return plain

    @property
    def is_events(self) -> bool:
        """The answer is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def events(self) -> list[bytes]:
        """Data of the complete events, in order."""
        whole = self.plain.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
        lines = [line for event in whole for line in event.split(b"\n")]
        return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]

    @property
    def chunks(self) -> list[dict[str, object]]:
        """The events that can be read, except for errors; a body is read once."""
        if self._read[0] is not self.body:
            found = [each for each in map(_decode, self.events) if each and "error" not in each]
            self._read = (self.body, found)
        return self._read[1]

    @property
    def text(self) -> str:
        """The text of the answer, streamed or whole."""
        if not self.is_events:
            return text_of(_decode(self.plain)) if self.status == 200 else ""
        texts = [text_of(each) for each in self.chunks]
        if self.client.target == "/generate":  # every event has the whole text so far
            return texts[-1] if texts else ""
        return "".join(texts)

    @property
    def is_done(self) -> bool:
        """`[DONE]` came."""
        return b"[DONE]" in self.events

    @property
    def finish(self) -> object:
        """The last finish reason."""
        found = None
        for chunk in self.chunks if self.is_events else [self.json]:
            choices = chunk.get("choices") or ()
            assert isinstance(choices, list | tuple)
            for choice in choices:
                found = choice.get("finish_reason") or found
        return found

    @property
    def choices(self) -> list[dict[str, object]]:
        """All choices of all events, in order."""
        found = [chunk.get("choices") or () for chunk in self.chunks]
        return [one for each in found if isinstance(each, list) for one in each]

    @property
    def indices(self) -> set[object]:
        """Which choices there were."""
        return {one.get("index") for one in self.choices}

    @property
    def roles(self) -> int:
        """How often a role was told."""
        deltas = [one.get("delta") for one in self.choices]
        return sum(isinstance(delta, dict) and "role" in delta for delta in deltas)

    @property
    def finishes(self) -> list[object]:
        """Every finish reason that was given."""
        return [one["finish_reason"] for one in self.choices if one.get("finish_reason")]

    @property
    def usages(self) -> list[dict[str, object]]:
        """The usage of every event that has nothing else."""
        found = [each.get("usage") for each in self.chunks if not each.get("choices")]
        return [usage for usage in found if isinstance(usage, dict)]

    @property
    def ids(self) -> list[object]:
        """Token ids of the output that the client was given."""
        found = [one.get("token_ids") for one in self.choices]
        return [id_ for ids in found if isinstance(ids, list) for id_ in ids]

    @property
    def prompt_ids(self) -> list[object]:
        """Every list of prompt ids that the client was given."""
        found = [holder.get("prompt_token_ids") for holder in (*self.chunks, *self.choices)]
        return [ids for ids in found if ids is not None]

    @property
    def error(self) -> dict[str, object] | None:
        """The error it was told, as a body or as an event."""
        for each in self.events if self.is_events else [self.plain]:
            found = _decode(each).get("error")
            if found is not None:
                assert isinstance(found, dict), found
                return found
        return None

    @property
    def code(self) -> object:
        """The error's code."""
        return None if self.error is None else self.error.get("code")

    @property
    def json(self) -> dict[str, object]:
        """The body of a unary answer."""
        return _decode(self.plain)

    @property
    def normal(self) -> bytes:
        """The body without what differs between two runs: ids and times."""
        body = re.sub(
            rb'"(id|created|response_sent_ts|e2e_latency)":("[^"]*"|[\d.]+)', b"", self.body
        )
        return re.sub(rb'"request_id":"[^"]*"', b"", body)


@frozen
class Look:
    """The inside at one moment."""

    at: float
    #: Generations that run on each engine, as the engine counts them.
    running: list[int]
    #: Live legs of each worker in the fleet, by its id.
    inflight: dict[str, int]
    #: States of the open requests.
    states: list[str]
    #: Requests that wait for a place under the cap.
    waiting: int
    #: Bytes that the router holds for clients that do not take them.
    backlog_bytes: int
    #: States of workers and of their breakers, by id.
    workers: dict[str, str]
    breakers: dict[str, str]


@define(eq=False)
class Outcome:
    """What a run led to."""

    plan: Plan
    got: list[Got]
    engines: list[SimEngine]
    tickets: list[Ticket]
    metrics: dict[str, float]
    looks: list[Look]
    #: The router's log lines, as JSON.
    log: list[dict[str, object]]
    #: Addresses in the order in which they were connected to.
    connects: list[tuple[str, int]]
    #: Seconds after the plan's begin at which the router had stopped.
    stopped_at: float
    #: The broker, and the agents of engines behind it by the engine's place.
    server: MemoryServer
    peers: dict[int, Peer]

    @property
    def one(self) -> Got:
        """The only client's view."""
        assert len(self.got) == 1
        return self.got[0]

    @property
    def look(self) -> Look:
        """The only look."""
        assert len(self.looks) == 1
        return self.looks[0]

    @property
    def facts(self) -> list[str]:
        """The facts of the only request, in order."""
        assert len(self.tickets) == 1
        return [edge.fact for _, edge in self.tickets[0].history]

    @property
    def sent(self) -> list[int]:
        """How many requests each engine was given to work on."""
        return [len(self.work(number)) for number in range(len(self.engines))]

    def work(self, number: int) -> list[Received]:
        """The requests that this engine was given to work on."""
        return [each for each in self.engines[number].requests if each.method == "POST"]

    def asked(self, number: int) -> list[dict[str, object]]:
        """The bodies of the clients' requests that this engine was given, decoded."""
        own = [each for each in self.work(number) if "x-request-id" in each.headers]
        return [_decode(each.body) for each in own]

    @property
    def moves(self) -> dict[str, float]:
        """Moves that were counted, by reason and mode."""
        found = {}
        for key, value in self.metrics.items():
            if key.startswith("baton_migrations_total{"):
                mode, reason = re.findall('="([a-z_]*)"', key)
                found[f"{reason} {mode}"] = value
        return found

    @property
    def stuck(self) -> dict[str, float]:
        """Streams that could not go on, by reason."""
        name = "baton_migrations_failed_total{"
        found = {key: value for key, value in self.metrics.items() if key.startswith(name)}
        return {re.findall('="([a-z_]*)"', key)[0]: value for key, value in found.items()}

    @property
    def transcript(self) -> str:
        """All that was seen, without ids and the real time: two runs of a plan say the same."""
        lines = []
        for got in self.got:
            moments = [moment for moment, _ in got.pieces]
            lines.append(f"{got.status} {got.ending} {got.ended_at} {moments} {got.normal!r}")
        for ticket in self.tickets:
            lines.append(" ".join(f"{at}:{edge.fact}:{edge.target}" for at, edge in ticket.history))
        return "\n".join([*lines, f"{self.metrics} {self.connects} {self.stopped_at}"])

    def count(self, name: str, **labels: str) -> float:
        """A metric's value; 0 where the series does not exist."""
        return self.metrics.get(series(name, labels), 0.0)

    def sum(self, name: str) -> float:
        """The sum of all series of a metric."""
        return sum(value for key, value in self.metrics.items() if key.partition("{")[0] == name)


def series(name: str, labels: dict[str, str]) -> str:
    """A metric's name with its labels."""
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def text_of(answer: dict[str, object]) -> str:
    """The text in one chunk or one whole answer of any endpoint."""
    if isinstance(text := answer.get("text"), str):
        return text
    choices = answer.get("choices") or [{}]
    assert isinstance(choices, list)
    choice = choices[0]
    part = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or part.get("content") or ""


def _decode(data: bytes) -> dict[str, object]:
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
