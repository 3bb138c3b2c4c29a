"""Telling an engine that nobody waits for a generation any more.

A closed connection frees SGLang's decode in four to eight seconds, since the engine looks for
disconnects every four (sglang #29017); `POST /abort_request` frees it at once. Best effort: one
post a leg, five seconds, its failure is counted and touches no breaker. Only names that the router
minted are aborted: the scheduler matches by prefix, so a client's `request-1` would take
`request-10` down with it (sglang #30912).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import httpx
import msgspec
import structlog
import trio
from attrs import define, field

from router.legs import Leg
from router.waking import Waker
from router.wires.client import ask
from router.worker import Worker
from statemachines import Edge
from statemachines.leg import LegState

ABORT_SECONDS = 5.0
#: Facts by which a leg ends although the engine may still be at it.
_UNFINISHED = frozenset({"let_go", "broke", "stalled", "bug"})

_log = structlog.get_logger("baton")


class Counter(Protocol):
    """Who counts how aborts went."""

    def engine_abort(self, outcome: str) -> None:
        """One of `ok`, `error`, `timeout`."""


@define(eq=False)
class Aborts:
    """Posts aborts in the background of the router."""

    transport: httpx.AsyncBaseTransport
    counter: Counter
    #: Starts a task that outlives the request.
    spawn: Callable[[Callable[..., Awaitable[object]], Worker, str, bytes | None], None]
    _open: int = 0
    _done: Waker = field(factory=Waker)

    def post(self, worker: Worker, rid: str, authorization: bytes | None) -> None:
        """Ask a worker to abort a generation; returns at once."""
        self._open += 1
        self.spawn(self._post, worker, rid, authorization)

    async def wait_done(self) -> None:
        """Wait until none is under way. Cancellable."""
        while self._open:
            await self._done.wait()

    async def _post(self, worker: Worker, rid: str, authorization: bytes | None) -> None:
        outcome = "timeout"
        try:
            with trio.move_on_after(ABORT_SECONDS):
                outcome = await self._ask(worker, rid, authorization)
        finally:
            self._open -= 1
            self._done.wake()
        self.counter.engine_abort(outcome)
        if outcome != "ok":
            _log.info("abort_failed", worker=worker.id, outcome=outcome)

    async def _ask(self, worker: Worker, rid: str, authorization: bytes | None) -> str:
        headers = {} if authorization is None else {b"authorization": authorization}
        body = msgspec.json.encode({"rid": rid, "abort_all": False})
        try:
            asking = ask(
                self.transport, "POST", worker, "/abort_request", content=body, headers=headers
            )
            async with asking as answer:
                # The status says it all: nobody waits for a body, or reads one without an end.
                return "ok" if answer.status_code < 400 else "error"
        except httpx.TransportError:
            return "error"


class DecodeWatch:
    """Listens to one decode leg: what was sent of it, and whether its engine must be told."""

    __slots__ = ("_aborts", "_authorization", "_rid", "has_error", "succeeded", "was_sent")

    def __init__(self, aborts: Aborts, rid: str | None, authorization: bytes | None) -> None:
        self._aborts = aborts
        self._rid = rid
        self._authorization = authorization
        #: The connection was there, so the worker may have got the request.
        self.was_sent = False
        #: It has answered with an error: its word is final, and there is nothing to abort.
        self.has_error = False
        #: It has said all it had to say.
        self.succeeded = False

    def on_edge(self, leg: Leg, edge: Edge) -> None:
        """Listener of the leg's machine."""
        if edge.target is LegState.WAITING:
            self.was_sent = True
        self.succeeded = self.succeeded or edge.target is LegState.SUCCEEDED
        if edge.leaves and self._rid is not None and self._is_unfinished(leg, edge):
            self._aborts.post(leg.worker, self._rid, self._authorization)

    def _is_unfinished(self, leg: Leg, edge: Edge) -> bool:
        """Whether the engine may have the request, and may still be at it."""
        is_given_up = edge.fact in _UNFINISHED or leg.has_rest
        return self.was_sent and not self.has_error and is_given_up
