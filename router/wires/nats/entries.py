"""A worker's entry in the registry: what its agent writes there, and what a router makes of it.

Pure, and used by both sides. The bucket `{prefix}_workers` holds one key a worker, its subject
token, with a JSON object as the value (contract §3). Whatever somebody has put there, reading it
never raises anything but `BadEntry`: fields that are not known are ignored, so that a newer agent
can say more, and a state that is not known counts as draining, so that it gets nothing new.
"""

from __future__ import annotations

import msgspec
from attrs import frozen

from router.engines import (
    CONTEXT_LENGTH_MAX,
    MODEL_NAME_CHARS_MAX,
    MODEL_NAMES_MAX,
    Engine,
    Knowledge,
)
from router.options import SettingsError
from router.wires.nats.protocol import token_of
from router.workerspec import WorkerSpec

#: Without a renewal for this long an entry is void; the bucket's own limit, and the router's.
TTL_SECONDS = 10.0
#: Between two renewals: four may be lost before anybody is missed.
RENEW_SECONDS = 2.0
ENTRY_BYTES_MAX = 256 * 1024
INFLIGHT_MAX = 1_000_000

READY = "ready"
DRAINING = "draining"

_KNOWN: dict[str, Engine] = {"vllm": "vllm", "sglang": "sglang", "openai": "openai"}


class BadEntry(ValueError):
    """What lies under a key is no worker; the message says why."""


@frozen
class Entry:
    """One worker as its agent registers it."""

    id: str
    #: `auto` where the agent does not say; anything that is not known here speaks OpenAI's API.
    engine: str = "auto"
    role: str = "mixed"
    models: tuple[str, ...] = ()
    context_length: int | None = None
    is_draining: bool = False
    inflight: int = 0
    group: str | None = None
    #: Where decode workers find a prefill worker's KV cache.
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    #: Of the agent.
    version: str | None = None

    @property
    def key(self) -> str:
        """Where it lies in the bucket."""
        return token_of(self.id)

    def spec(self) -> WorkerSpec:
        """The worker as an operator would have named it."""
        return WorkerSpec.of(
            f"nats:{self.id}",
            engine=self.engine,
            role=self.role,
            group=self.group,
            bootstrap_host=self.bootstrap_host,
            bootstrap_port=self.bootstrap_port,
        )

    def knowledge(self) -> Knowledge | None:
        """What is learned from it without asking the engine; None while it names no engine."""
        engine = _KNOWN.get(self.engine)
        if engine is None:
            return None
        return Knowledge(
            engine=engine,
            models=self.models,
            context_length=self.context_length,
            role=None if self.role == "mixed" else self.role,
        )

    def is_same_worker(self, other: Entry) -> bool:
        """Whether the other differs only in what a running worker may change."""
        return self._identity() == other._identity()

    def _identity(self) -> tuple[object, ...]:
        return (
            self.id,
            self.engine,
            self.role,
            self.group,
            self.bootstrap_host,
            self.bootstrap_port,
            self.version,
        )


def encode(entry: Entry) -> bytes:
    """The value of an entry."""
    return msgspec.json.encode(
        {
            "id": entry.id,
            "engine": entry.engine,
            "role": entry.role,
            "models": entry.models,
            "context_length": entry.context_length,
            "state": DRAINING if entry.is_draining else READY,
            "inflight": entry.inflight,
            "group": entry.group,
            "bootstrap_host": entry.bootstrap_host,
            "bootstrap_port": entry.bootstrap_port,
            "version": entry.version,
        }
    )


def decode(key: str, value: bytes) -> Entry:
    """The entry under a key; raises BadEntry, and nothing else whatever the bytes are."""
    if len(value) > ENTRY_BYTES_MAX:
        raise BadEntry(f"{len(value)} bytes are too many")
    try:
        raw = msgspec.json.decode(value, type=_Raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadEntry(f"not an entry: {error}") from None
    if token_of(raw.id) != key:
        raise BadEntry(f"its id {raw.id[:128]!r} does not belong to its key")
    entry = Entry(
        id=raw.id,
        engine=_engine(raw.engine),
        role=raw.role or "mixed",
        models=_models(raw.models),
        context_length=_within("context_length", raw.context_length, CONTEXT_LENGTH_MAX),
        is_draining=raw.state not in (None, READY),
        inflight=min(max(raw.inflight or 0, 0), INFLIGHT_MAX),
        group=raw.group or None,
        bootstrap_host=raw.bootstrap_host or None,
        bootstrap_port=raw.bootstrap_port,
        version=None if raw.version is None else raw.version[:128],
    )
    try:
        entry.spec()
    except SettingsError as problem:
        raise BadEntry(str(problem)) from None
    return entry


# --- reading what cannot be trusted ----------------------------------------------------------


class _Raw(msgspec.Struct):
    id: str
    engine: str | None = None
    role: str | None = None
    models: list[str] | None = None
    context_length: int | None = None
    state: str | None = None
    inflight: int | None = None
    group: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    version: str | None = None


def _engine(name: str | None) -> str:
    if not name or name == "auto":
        return "auto"
    return _KNOWN.get(name, "openai")


def _models(names: list[str] | None) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(names or ()))
    if len(found) > MODEL_NAMES_MAX:
        raise BadEntry(f"{len(found)} models are too many")
    if any(not 0 < len(name) <= MODEL_NAME_CHARS_MAX for name in found):
        raise BadEntry("a model's name is empty or too long")
    return found


def _within(what: str, value: int | None, highest: int) -> int | None:
    if value is not None and not 0 < value <= highest:
        raise BadEntry(f"{what} must be from 1 to {highest}, not {value}")
    return value
