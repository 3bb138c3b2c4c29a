"""How simulated engines hand a KV cache to each other: rooms, and caches that are parked.

SGLang's prefill and decode meet in a room, by number, and neither gets on without the other;
vLLM's prefill parks a cache, and decode fetches it with the reference that prefill's answer
carried. Both go over a connection to the prefill's own port for it, be it a socket or memory, so
that a process that dies takes its caches along. What travels is the prompt that a cache was
computed from: a token depends on nothing else here, so with the cache of another prompt a decode
writes another text, as a real one does. The line protocol is this module's own.
"""

from collections.abc import Awaitable, Callable

import attrs
import trio
from attrs import define, field, frozen

Ids = tuple[int, ...]
Dial = Callable[[str, int], Awaitable[trio.abc.Stream]]

LEASE_SECONDS = 30.0
"""How long vLLM keeps a cache that nobody fetches (`kv_lease_duration`)."""
_LINE_BYTES_MAX = 1 << 22


class CacheLost(Exception):
    """The other half will not deliver; the message says why."""


class PeerGone(CacheLost):
    """The other half's process cannot be reached, or went away."""


@define(eq=False)
class Room:
    """One hand-over in the making. Whoever comes first waits for the other."""

    number: int
    decode_came: trio.Event = field(factory=trio.Event)
    settled: trio.Event = field(factory=trio.Event)
    cache: Ids | None = None
    failure: str = ""
    decode_left: trio.Event = field(factory=trio.Event)

    def give(self, cache: Ids) -> None:
        """The cache is computed; decode may have it."""
        self.cache = cache
        self.settled.set()

    def fail(self, failure: str) -> None:
        """Prefill could not deliver, and says so. One that is aborted says nothing (0.5.23)."""
        self.failure = failure
        self.settled.set()


@frozen
class Parked:
    """A cache that waits to be fetched; `serial` tells in which order they were parked."""

    cache: Ids
    serial: int
    until: float


@define(eq=False)
class Caches:
    """What one engine holds for others."""

    rooms: dict[int, Room] = field(factory=dict)
    parked: dict[str, Parked] = field(factory=dict)
    life: int = 0
    """How often the process has begun anew."""
    _dies_at: float = float("inf")
    _newest: Ids = ()
    _serial: int = 0

    def enter(self, number: int) -> Room:
        """The room of that number, made by whoever comes first."""
        self.look_at_clock()
        return self.rooms.setdefault(number, Room(number))

    def close(self, room: Room) -> None:
        """A used room's number may be used again (0.5.23)."""
        if self.rooms.get(room.number) is room:
            del self.rooms[room.number]

    def park(self, reference: str, cache: Ids) -> None:
        """Keep a cache under its reference for as long as the lease lasts."""
        self._serial += 1
        self._newest = cache
        self.parked[reference] = Parked(cache, self._serial, trio.current_time() + LEASE_SECONDS)

    def fetch(self, reference: str) -> Ids:
        """Hand a cache over; raises CacheLost.

        A reference that was used before, or whose lease is over, points at blocks that belong to
        whoever came since: 200, and the text of somebody else (vllm #52234).
        """
        self.look_at_clock()
        found = self.parked.get(reference)
        if found is None:
            raise CacheLost("unknown request")
        is_held = found.until >= trio.current_time()
        self.parked[reference] = attrs.evolve(found, until=float("-inf"))
        is_overwritten = not is_held and found.serial != self._serial
        return self._newest if is_overwritten else found.cache

    def die_at(self, moment: float) -> None:
        """The process ends then; infinity: it lives."""
        self.look_at_clock()
        self._dies_at = moment

    def look_at_clock(self) -> None:
        """A process that began anew knows nothing of what the old one held."""
        if trio.current_time() > self._dies_at:
            self.rooms.clear()
            self.parked.clear()
            self.life += 1
            self._dies_at = float("inf")

    async def serve(self, stream: trio.abc.Stream) -> None:
        """One connection of another engine, to its end."""
        word, _, rest = (await _read_line(stream)).partition(" ")
        if word == "fetch":
            try:
                await stream.send_all(_written(self.fetch(rest)))
            except CacheLost as lost:
                await stream.send_all(f"failed {lost}\n".encode())
        elif word == "join":
            await self._serve_room(stream, self.enter(int(rest)))

    async def _serve_room(self, stream: trio.abc.Stream, room: Room) -> None:
        room.decode_came.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, stream, room, nursery.cancel_scope)
            await room.settled.wait()
            if room.cache is None:
                await stream.send_all(f"failed {room.failure}\n".encode())
            else:
                await stream.send_all(_written(room.cache))
            nursery.cancel_scope.cancel("settled")
        if room.settled.is_set():
            self.close(room)


async def join(dial: Dial, host: str, port: int, number: int) -> Ids:
    """Wait in a room for its prefill's cache; raises CacheLost. Leaving closes the connection."""
    return await _ask(dial, host, port, f"join {number}")


async def fetch(dial: Dial, host: str, port: int, reference: str) -> Ids:
    """Fetch a parked cache; raises CacheLost."""
    return await _ask(dial, host, port, f"fetch {reference}")


async def _ask(dial: Dial, host: str, port: int, question: str) -> Ids:
    try:
        stream = await dial(host, port)
    except OSError as error:
        raise PeerGone(f"{host}:{port} cannot be reached") from error
    try:
        await stream.send_all(question.encode() + b"\n")
        word, _, rest = (await _read_line(stream)).partition(" ")
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise PeerGone(f"{host}:{port} went away") from error
    finally:
        await trio.aclose_forcefully(stream)
    if word == "cache":
        return tuple(map(int, rest.split()))
    if word == "failed":
        raise CacheLost(rest)
    raise PeerGone(f"{host}:{port} went away")


def _written(cache: Ids) -> bytes:
    return b"cache " + " ".join(map(str, cache)).encode() + b"\n"


async def _read_line(stream: trio.abc.Stream) -> str:
    """One line; empty if the other side ends before it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = await stream.receive_some(65536)
        if not data or len(line) > _LINE_BYTES_MAX:
            return ""
        line += data
    return line[:-1].decode()


async def _watch(stream: trio.abc.Stream, room: Room, scope: trio.CancelScope) -> None:
    try:
        while await stream.receive_some(16):
            pass
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    room.decode_left.set()
    scope.cancel("decode left")
