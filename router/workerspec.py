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
_OPTIONS = ("engine", "id", "group", "bootstrap_port", "dp_size")

_ID = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9._:/\[\]-]{0,127}")
"""Worker ids and groups are metric labels, log fields and URL path segments."""


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
        dp_size: int = 1,
    ) -> WorkerSpec:
        """A worker from its parts, as the worker API receives them; raises SettingsError."""
        scheme, host, port, base_path = _split_worker_url(url)
        netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        _check_id("id", id)
        _check_id("group", group)
        _check_choice("engine", engine, ENGINES)
        _check_choice("role", role, ROLES)
        if bootstrap_port is not None and not 0 < bootstrap_port < 65536:
            raise SettingsError(f"bootstrap_port must be from 1 to 65535, not {bootstrap_port}")
        if not 0 < dp_size <= RANKS_MAX:
            raise SettingsError(f"dp_size must be from 1 to {RANKS_MAX}, not {dp_size}")
        return cls(
            url=f"{scheme}://{netloc}{base_path}",
            scheme=scheme,
            host=host,
            port=port,
            base_path=base_path,
            id=id if id is not None else netloc + base_path,
            engine=engine,
            role=role,
            group=group,
            bootstrap_port=bootstrap_port,
            dp_size=dp_size,
        )

    @classmethod
    def parse(cls, text: str, *, role: str = "mixed") -> WorkerSpec:
        """A worker from `URL[,engine=…][,id=…][,group=…][,bootstrap_port=…][,dp_size=…]`."""
        url, *pairs = text.split(",")
        if url.startswith("nats:"):
            raise SettingsError(f"{url}: workers behind NATS are not available yet in this version")
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
                dp_size=int(given.get("dp_size", "1")),
            )
        except SettingsError as problem:
            raise SettingsError(f"{url}: {problem}") from None

    def to_text(self) -> str:
        """The text that `parse` reads back as this worker (its role is said by the flag)."""
        pairs = {"engine": self.engine, "id": self.id, "group": self.group}
        pairs["bootstrap_port"] = None if self.bootstrap_port is None else str(self.bootstrap_port)
        pairs["dp_size"] = None if self.dp_size == 1 else str(self.dp_size)
        left_out = {"auto", None, self.url.partition("://")[2]}
        return ",".join(
            [self.url, *(f"{key}={value}" for key, value in pairs.items() if value not in left_out)]
        )


def _split_worker_url(url: str) -> tuple[str, str, int, str]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as problem:
        raise SettingsError(f"not a URL ({problem})") from None
    if parts.scheme not in ("http", "https") or not url.isprintable() or " " in url:
        raise SettingsError("a worker's URL begins with http:// or https://")
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
    if not equals or key not in _OPTIONS:
        known = ", ".join(f"{each}=" for each in _OPTIONS)
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
