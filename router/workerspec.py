"""One worker as an operator names it: where it is and what it is said to be.

The same value comes from a flag, a file and the worker API, so that all three accept and refuse
the same things. What a worker turns out to be (its models, its engine) is learned later and is
not kept here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from attrs import frozen

from router.options import SettingsError

ENGINES = ("auto", "vllm", "sglang", "openai")
ROLES = ("mixed", "prefill", "decode")
RANKS_MAX = 4096
OPTIONS = ("engine", "id", "group", "bootstrap_port", "bootstrap_host", "dp_size")
NATS = "nats:"
"""What the URL of a worker behind NATS begins with; its id follows."""

_ID = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9._:/\[\]-]{0,127}")
"""Worker ids and groups are metric labels, log fields and URL path segments."""
_HOST = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}")


@frozen
class WorkerSpec:
    """Where a worker is and what it is said to be; build it with `of` or `parse`."""

    url: str
    """scheme://host:port and the base path, in one spelling however it was typed."""
    scheme: str
    host: str
    port: int
    base_path: str
    """Put before the path of every request; empty or beginning with a slash."""
    id: str
    engine: str = "auto"
    role: str = "mixed"
    group: str | None = None
    bootstrap_port: int | None = None
    bootstrap_host: str | None = None
    """Where decode workers find its KV cache; none means the host."""
    dp_size: int = 1
    """Data-parallel ranks behind the address, each of which can be asked for."""

    @classmethod
    def of(
        cls,
        url: str,
        *,
        id: str | None = None,
        engine: str = "auto",
        role: str = "mixed",
        group: str | None = None,
        bootstrap_port: int | None = None,
        bootstrap_host: str | None = None,
        dp_size: int = 1,
    ) -> WorkerSpec:
        """A worker from its parts, as the worker API receives them; raises SettingsError."""
        _check_id("id", id)
        place = _nats_place(url, id) if url.startswith(NATS) else _http_place(url)
        _check_id("group", group)
        _check_choice("engine", engine, ENGINES)
        _check_choice("role", role, ROLES)
        if bootstrap_port is not None and not 0 < bootstrap_port < 65536:
            raise SettingsError(f"bootstrap_port must be from 1 to 65535, not {bootstrap_port}")
        if bootstrap_host is not None and not _HOST.fullmatch(bootstrap_host):
            raise SettingsError(f"bootstrap_host must be a host, not {bootstrap_host!r}")
        if not 0 < dp_size <= RANKS_MAX:
            raise SettingsError(f"dp_size must be from 1 to {RANKS_MAX}, not {dp_size}")
        return cls(
            url=place.url,
            scheme=place.scheme,
            host=place.host,
            port=place.port,
            base_path=place.base_path,
            id=id if id is not None else place.id,
            engine=engine,
            role=role,
            group=group,
            bootstrap_port=bootstrap_port,
            bootstrap_host=bootstrap_host,
            dp_size=dp_size,
        )

    @property
    def meeting_host(self) -> str:
        """Where decode workers find its KV cache: as told, or where it is itself."""
        if self.bootstrap_host is not None:
            return self.bootstrap_host
        # The id of an agent is by default its engine's host:port.
        return self.host or re.sub(r":\d+$", "", self.id).strip("[]")

    @property
    def is_behind_nats(self) -> bool:
        """Whether it is reached by its id over NATS rather than at an address."""
        return self.scheme == "nats"

    @classmethod
    def parse(cls, text: str, *, role: str = "mixed") -> WorkerSpec:
        """A worker from `URL[,KEY=VALUE]…`, the keys being those of `OPTIONS`."""
        url, *pairs = text.split(",")
        given = dict(_split_pair(url, pair) for pair in pairs)
        if len(given) < len(pairs):
            raise SettingsError(f"{url}: an option is given twice")
        for key in ("bootstrap_port", "dp_size"):
            word = given.get(key, "0")
            if not (word.isascii() and word.isdigit()):
                raise SettingsError(f"{url}: {key} must be a whole number, not {word!r}")
        port = given.get("bootstrap_port")
        try:
            return cls.of(
                url,
                id=given.get("id"),
                engine=given.get("engine", "auto"),
                role=role,
                group=given.get("group"),
                bootstrap_port=None if port is None else int(port),
                bootstrap_host=given.get("bootstrap_host"),
                dp_size=int(given.get("dp_size", "1")),
            )
        except SettingsError as problem:
            raise SettingsError(f"{url}: {problem}") from None

    def to_text(self) -> str:
        """The text that `parse` reads back as this worker (its role is said by the flag)."""
        pairs = {
            "engine": None if self.engine == "auto" else self.engine,
            "id": None
            if self.url in (f"{NATS}{self.id}", f"{self.scheme}://{self.id}")
            else self.id,
            "group": self.group,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_host": self.bootstrap_host,
            "dp_size": None if self.dp_size == 1 else self.dp_size,
        }
        given = (f"{key}={value}" for key, value in pairs.items() if value is not None)
        return ",".join([self.url, *given])


@frozen
class _Place:
    """Where a worker is, and the id it has unless one is given."""

    url: str
    scheme: str
    host: str
    port: int
    base_path: str
    id: str


def _nats_place(url: str, id: str | None) -> _Place:
    named = url.removeprefix(NATS)
    _check_id("the id of a worker behind NATS", named)
    if id not in (None, named):
        raise SettingsError(f"the id of a worker behind NATS is in its URL, {id!r} is another")
    return _Place(url=url, scheme="nats", host="", port=0, base_path="", id=named)


def _http_place(url: str) -> _Place:
    scheme, host, port, base_path = _split_worker_url(url)
    place = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}") + base_path
    return _Place(
        url=f"{scheme}://{place}",
        scheme=scheme,
        host=host,
        port=port,
        base_path=base_path,
        id=place,
    )


def _split_worker_url(url: str) -> tuple[str, str, int, str]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as problem:
        raise SettingsError(f"not a URL ({problem})") from None
    if parts.scheme not in ("http", "https") or not url.isprintable() or " " in url:
        raise SettingsError("a worker's URL begins with http://, https:// or nats:")
    if not parts.hostname:
        raise SettingsError("the host is missing")
    if "@" in parts.netloc:
        raise SettingsError("credentials in a worker's URL are not supported")
    if parts.query or parts.fragment:
        raise SettingsError("a worker's URL has no query and no fragment")
    base_path = parts.path.rstrip("/")
    if base_path.endswith("/v1"):
        raise SettingsError("leave out /v1: the path of the request is added to the URL")
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    if port == 0:
        raise SettingsError("port 0 cannot be connected to")
    return parts.scheme, parts.hostname, port, base_path


def _split_pair(url: str, pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not equals or key not in OPTIONS:
        known = ", ".join(f"{each}=" for each in OPTIONS)
        raise SettingsError(f"{url}: unknown option {pair!r}; known are {known}")
    return key, value


def _check_id(what: str, value: str | None) -> None:
    if value is not None and not _ID.fullmatch(value):
        raise SettingsError(
            f"{what} must be up to 128 letters, digits and . _ : - / [ ], not {value!r}"
        )


def _check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise SettingsError(f"{what} must be one of {', '.join(choices)}, not {value!r}")
