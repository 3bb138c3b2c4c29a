"""What the engine asks of a dialect: read a request, shape an answer. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from attrs import frozen

from router.sim.decoding import Choice, Manner, Piece
from router.sim.jobs import Job, Json, Reply, Route
from router.sim.settings import SimSettings


@frozen
class Trouble:
    """An error of one generation; the engines name its type in their own ways."""

    message: str
    kind: str = ""
    event_kind: str = ""


@frozen
class Situation:
    """What a dialect may know of the engine while it reads or answers a request."""

    settings: SimSettings
    unix_time: int
    running: int
    health: int
    kv_port: int
    new_id: Callable[[int], str]
    """Random hex digits, as many as asked for; repeatable for a seed."""


class Dialect(Protocol):
    """One engine's way to speak."""

    manner: Manner
    head_waits_for_first_event: bool
    """SGLang pulls the first event before it answers; vLLM answers, then generates."""
    server_headers: tuple[tuple[str, str], ...]
    chunked_header: tuple[str, str]
    routes: Mapping[str, Route]
    """Paths of POST requests that generate."""

    def read(
        self, route: Route, body: bytes, headers: Mapping[str, str], now: Situation
    ) -> Job | Reply:
        """Check a generation request; a Reply refuses it."""

    def fixed(self, method: str, path: str, body: bytes, now: Situation) -> Reply:
        """Answer everything that is not a generation; an unknown path gets the engine's 404."""

    def opening(self, job: Job) -> list[bytes]:
        """Events before the first token."""

    def events(self, job: Job, choice: Choice, piece: Piece) -> list[bytes]:
        """The events of one step of one choice."""

    def closing(self, job: Job, choices: Sequence[Choice]) -> list[bytes]:
        """Events between the last finish and [DONE]."""

    def unary(self, job: Job, choices: Sequence[Choice]) -> Json: ...

    def error(self, status: int, message: str, kind: str = "") -> Reply:
        """An error as the whole answer."""

    def error_event(self, status: int, message: str, kind: str = "") -> bytes:
        """An error inside a stream."""
