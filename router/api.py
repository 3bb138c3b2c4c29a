"""What the router answers itself: models, health, readiness, metrics, the worker API, /debug.

Every answer is made from live objects: in one go, but for those that name all workers, which are
made piece by piece so that streams go on meanwhile. Errors have the shape of every other error, and
no answer of this file holds the text of a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar
from urllib.parse import unquote

import msgspec
import structlog
import trio
from attrs import asdict, evolve

from router.calls import Call, has_key
from router.errors import SHUTTING_DOWN, Refusal
from router.front import ClientChannel
from router.headers import lines_of, request_id_of
from router.metrics import Metrics
from router.options import SettingsError
from router.reactor import Reactor
from router.registry import View
from router.routes import route_of
from router.series import CONTENT_TYPE
from router.serving import Serving
from router.ticket import Ticket
from router.websocket import WATCH_PATH
from router.worker import DuplicateWorker, Fleet, Origin, UnknownWorker, Worker
from router.workerspec import ROLES, WorkerSpec
from statemachines.router import RouterState

T = TypeVar("T", bound=msgspec.Struct)
_log = structlog.get_logger("baton")
_JSON = b"application/json"
_NO_WORKERS = Refusal("no_workers", "No worker is ready.")
_WORKERS_AT_ONCE = 50
_ENCODE = msgspec.json.Encoder().encode

#: Status, content type, and the body: whole, or in pieces of about a millisecond's work.
Reply = tuple[int, bytes, bytes | Iterator[bytes]]
Handler = Callable[[Call, Mapping[str, str]], Reply]


class _NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    id: str | None = None
    engine: str = "auto"
    role: str = "mixed"
    bootstrap_port: int | None = None
    bootstrap_host: str | None = None
    group: str | None = None
    dp_size: int = 1


class _Drain(msgspec.Struct):
    timeout_secs: float | None = None


class House(Protocol):
    """What this file needs of the process."""

    state: RouterState

    def drain_worker(self, worker: Worker, timeout_secs: float) -> None:
        """Send it nothing new; after the window the streams that can move are moved."""

    def registry_view(self) -> View | None:
        """How the registry is known; None without one."""


class _Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal


class Api:
    """Answers the calls that no worker sees."""

    def __init__(
        self,
        *,
        house: House,
        fleet: Fleet,
        serving: Serving,
        metrics: Metrics,
        reactor: Reactor,
        started_at: float,
    ) -> None:
        self._house = house
        self._fleet = fleet
        self._serving = serving
        self._metrics = metrics
        self._reactor = reactor
        self._created = int(started_at)
        settings = serving.settings
        self._engine = settings.engine
        self._drain_seconds = settings.drain_timeout_secs
        self._has_nats = settings.nats is not None
        self._api_keys = settings.api_key
        self._admin_keys = () if settings.admin_key is None else (settings.admin_key,)
        worker = r"/v1/workers/(?P<id>.+)"
        self._routes: list[tuple[re.Pattern[str], dict[str, Handler], str]] = [
            _route(r"/health", "open", GET=self._health),
            _route(r"/readyz", "open", GET=self._readyz),
            _route(r"/metrics", "open", GET=self._show_metrics),
            _route(r"/v1/models", "api", GET=self._models),
            _route(r"/v1/models/(?P<id>.+)", "api", GET=self._model),
            _route(r"/v1/workers", "admin", GET=self._workers, POST=self._add_worker),
            _route(worker + r"/drain", "admin", POST=self._drain_worker),
            _route(worker, "admin", GET=self._worker, DELETE=self._remove_worker),
            _route(WATCH_PATH, "debug", GET=self._no_websocket),
            _route(r"/debug/requests", "debug", GET=self._requests),
            _route(r"/debug/requests/(?P<id>.+)", "debug", GET=self._request),
        ]

    async def answer(self, channel: ClientChannel, call: Call) -> None:
        """Answer a call that is not for a worker."""
        for pattern, handlers, guard in self._routes:
            match = pattern.fullmatch(call.path)
            if match is not None:
                await self._answer(channel, call, handlers, guard, match.groupdict())
                return
        if route_of(call.path) is not None:
            refusal = Refusal("method_not_allowed", "Use POST here.")
        else:
            refusal = Refusal("not_found", "There is nothing at this path.")
        channel.refuse(refusal, request_id_of(call.headers))

    async def _answer(
        self,
        channel: ClientChannel,
        call: Call,
        handlers: dict[str, Handler],
        guard: str,
        found: dict[str, str],
    ) -> None:
        request_id = request_id_of(call.headers)
        method = "GET" if call.method == "HEAD" else call.method
        try:
            handler = handlers.get(method)
            if handler is None:
                allowed = ", ".join(handlers)
                raise _Refused(Refusal("method_not_allowed", f"Use {allowed} here."))
            self._check_key(call, guard)
            status, kind, body = handler(call, {k: unquote(v) for k, v in found.items()})
        except _Refused as refused:
            channel.refuse(refused.refusal, request_id)
            return
        if not isinstance(body, bytes):
            body = await _gathered(body)
            if not channel.is_open:
                return
        lines = lines_of([(b"content-type", kind), (b"x-request-id", request_id.encode())])
        channel.respond(status, lines, body)

    def _check_key(self, call: Call, guard: str) -> None:
        """/v1/* takes an API key; the worker API and /debug the admin key where there is one."""
        if guard in ("admin", "debug") and self._admin_keys:
            keys: tuple[str, ...] = self._admin_keys
        elif guard in ("api", "admin"):
            keys = self._api_keys
        else:
            return
        if keys and not has_key(call, keys):
            raise _Refused(Refusal("unauthorized", "A valid key is required."))

    # The process

    def _health(self, _call: Call, _found: Mapping[str, str]) -> Reply:
        return 200, _JSON, _ENCODE({"status": "ok"})

    def _readyz(self, _call: Call, _found: Mapping[str, str]) -> Reply:
        if self._house.state is not RouterState.SERVING:
            raise _Refused(SHUTTING_DOWN)
        ready, pairing = self._fleet.ready("mixed"), self._serving.pairs.pairing
        if not ready and not pairing.is_complete():
            refusal = pairing.missing() if self._fleet.has_halves else _NO_WORKERS
            raise _Refused(self._with_staleness(refusal))
        every = sum(len(self._fleet.ready(role)) for role in ROLES)
        shown = {"status": "ready", "workers": every, **self._show_registry()}
        return 200, _JSON, _ENCODE(shown)

    def _with_staleness(self, refusal: Refusal) -> Refusal:
        """Say so where it may be for want of a registry that there is nobody."""
        view = self._house.registry_view()
        if view is None or view.is_synced:
            return refusal
        seconds = f"{view.seconds_since_sync:.0f} seconds"
        return evolve(
            refusal,
            message=f"{refusal.message} The registry has not been heard for {seconds}: "
            f"{view.trouble or 'it has not answered yet'}.",
        )

    def _show_metrics(self, _call: Call, _found: Mapping[str, str]) -> Reply:
        return 200, CONTENT_TYPE.encode(), self._metrics.pieces()

    # Models

    def _models(self, _call: Call, _found: Mapping[str, str]) -> Reply:
        return 200, _JSON, _ENCODE({"object": "list", "data": self._model_list()})

    def _model(self, _call: Call, found: Mapping[str, str]) -> Reply:
        for model in self._model_list():
            if model["id"] == found["id"]:
                return 200, _JSON, _ENCODE(model)
        raise _Refused(Refusal("model_not_found", "No worker serves this model.", param="model"))

    def _model_list(self) -> list[dict[str, object]]:
        lengths: dict[str, int | None] = {}
        ready = (worker for role in ROLES for worker in self._fleet.ready(role))
        for worker in ready:
            for model in worker.models:
                known, length = lengths.get(model), worker.context_length
                shortest = [each for each in (known, length) if each is not None]
                lengths[model] = min(shortest) if shortest else None
        return [
            {
                "id": model,
                "object": "model",
                "created": self._created,
                "owned_by": "baton",
                "max_model_len": length,
            }
            for model, length in lengths.items()
        ]

    # Workers

    def _workers(self, _call: Call, _found: Mapping[str, str]) -> Reply:
        return 200, _JSON, self._list_workers()

    def _list_workers(self) -> Iterator[bytes]:
        every, comma = self._fleet.all(), b""
        yield b'{"workers":['
        for begin in range(0, len(every), _WORKERS_AT_ONCE):
            rows = [_show_worker(each) for each in every[begin : begin + _WORKERS_AT_ONCE]]
            yield comma + _ENCODE(rows)[1:-1]
            comma = b","
        rest = _ENCODE(self._show_registry())[1:]
        yield b"]" + (b"," if len(rest) > 1 else b"") + rest

    def _show_registry(self) -> dict[str, object]:
        view = self._house.registry_view()
        if view is None:
            return {}
        seconds = round(view.seconds_since_sync, 3)
        shown = asdict(evolve(view, seconds_since_sync=seconds))
        del shown["trouble"]
        return {"registry": shown}

    def _worker(self, _call: Call, found: Mapping[str, str]) -> Reply:
        return 200, _JSON, _ENCODE(_show_worker(self._find(found["id"])))

    def _add_worker(self, call: Call, _found: Mapping[str, str]) -> Reply:
        asked = _decode(call.body, _NewWorker)
        try:
            spec = WorkerSpec.of(
                asked.url,
                id=asked.id,
                engine=self._engine if asked.engine == "auto" else asked.engine,
                role=asked.role,
                group=asked.group,
                bootstrap_port=asked.bootstrap_port,
                bootstrap_host=asked.bootstrap_host,
                dp_size=asked.dp_size,
            )
            if spec.is_behind_nats and not self._has_nats:
                raise SettingsError("the router runs without --nats")
            worker = self._fleet.add(spec, Origin.API)
            _log.info("worker", fact="added", worker=worker.id, url=worker.url)
        except SettingsError as error:
            raise _Refused(Refusal("bad_request", f"Not a worker: {error}.")) from None
        except DuplicateWorker:
            raise _Refused(Refusal("worker_exists", "A worker has this id.", param="id")) from None
        return 201, _JSON, _ENCODE(_show_worker(worker))

    def _remove_worker(self, _call: Call, found: Mapping[str, str]) -> Reply:
        worker = self._find(found["id"])
        self._fleet.remove(worker.id)
        _log.info("worker", fact="removed", worker=worker.id)
        return 200, _JSON, _ENCODE(_show_worker(worker))

    def _drain_worker(self, call: Call, found: Mapping[str, str]) -> Reply:
        asked = _decode(call.body or b"{}", _Drain)
        worker = self._find(found["id"])
        window = asked.timeout_secs
        if window is not None and not 0 <= window < float("inf"):
            refusal = Refusal("bad_request", "The window is in seconds.", param="timeout_secs")
            raise _Refused(refusal)
        seconds = self._drain_seconds if window is None else window
        self._house.drain_worker(worker, seconds)
        _log.info("worker", fact="drained", worker=worker.id, seconds=seconds)
        return 200, _JSON, _ENCODE(_show_worker(worker))

    def _find(self, worker_id: str) -> Worker:
        try:
            return self._fleet.get(worker_id)
        except UnknownWorker:
            raise _Refused(Refusal("not_found", "No worker has this id.", param="id")) from None

    # Requests

    def _no_websocket(self, _call: Call, _found: Mapping[str, str]) -> Reply:
        raise _Refused(Refusal("bad_request", "Ask for a WebSocket here (Upgrade: websocket)."))

    def _requests(self, _call: Call, _found: Mapping[str, str]) -> Reply:
        now = self._reactor.now
        return (
            200,
            _JSON,
            _ENCODE({"requests": [_show_ticket(ticket, now) for ticket in self._serving.live]}),
        )

    def _request(self, _call: Call, found: Mapping[str, str]) -> Reply:
        for ticket in (*self._serving.live, *reversed(self._serving.ended)):
            if ticket.id == found["id"]:
                shown = _show_ticket(ticket, ticket.ended_at or self._reactor.now)
                shown["status"], shown["code"] = ticket.status or None, ticket.code
                shown["legs"] = [trace.shown(ticket.started_at) for trace in ticket.traces]
                shown["transitions"] = [
                    {
                        "seconds": round(moment - ticket.started_at, 6),
                        "machine": "request",
                        "source": edge.source.value,
                        "fact": edge.fact,
                        "target": edge.target.value,
                        "why": edge.why,
                    }
                    for moment, edge in ticket.history
                ]
                return 200, _JSON, _ENCODE(shown)
        raise _Refused(Refusal("not_found", "No such request among the live and the last ended."))


def _route(
    pattern: str, guard: str, **handlers: Handler
) -> tuple[re.Pattern[str], dict[str, Handler], str]:
    return re.compile(pattern), handlers, guard


async def _gathered(pieces: Iterator[bytes]) -> bytes:
    """All of them, with everybody else's turn between any two."""
    gathered = []
    for piece in pieces:
        gathered.append(piece)
        await trio.lowlevel.checkpoint()
    return b"".join(gathered)


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _Refused(Refusal("bad_request", f"The body does not fit: {error}")) from None


def _show_worker(worker: Worker) -> dict[str, object]:
    probe = worker.last_probe
    return {
        "id": worker.id,
        "url": worker.url,
        "engine": worker.engine,
        "role": worker.role,
        "group": worker.group,
        "bootstrap_port": worker.bootstrap_port,
        "bootstrap_host": worker.bootstrap_host if worker.role == "prefill" else None,
        "dp_size": worker.dp_size,
        "state": worker.state.value,
        "breaker": worker.breaker.state.value,
        "inflight": worker.inflight,
        "inflight_elsewhere": worker.elsewhere,
        "models": list(worker.models),
        "context_length": worker.context_length,
        "last_probe": None if probe is None else probe.outcome.value,
        "origin": worker.origin.value,
    }


def _show_ticket(ticket: Ticket, now: float) -> dict[str, object]:
    return {
        "id": ticket.id,
        "route": ticket.route,
        "state": ticket.state.value,
        "seconds_in_state": round(now - ticket.since, 6),
        "seconds": round(now - ticket.started_at, 6),
        "worker": None if ticket.worker is None else ticket.worker.id,
        "prefill_worker": None if ticket.prefill_worker is None else ticket.prefill_worker.id,
        "attempts": ticket.attempts,
    }
