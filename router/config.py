"""What an operator can set: `Settings` for `baton serve`.

The fields of `Settings` are the one table of options (see `router.options`): a new option is a
new field, and everything else about it follows.
Values are checked when they are built, so the rest of the router never validates again.
A setting whose feature this version does not have is refused by `refuse_unavailable`, never
accepted and ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from attrs import evolve, frozen

from router.options import (
    Kind,
    Option,
    Seconds,
    SettingsError,
    Switch,
    Text,
    Texts,
    Whole,
    Word,
    load,
    option,
    options_of,
)
from router.workerspec import ENGINES, WorkerSpec

__all__ = [
    "OPTIONS",
    "Settings",
    "SettingsError",
    "WorkerSpec",
    "load_settings",
    "refuse_unavailable",
    "unavailable_notes",
]

POLICIES = (
    "round_robin",
    "random",
    "least_load",
    "power_of_two",
    "prefix_affinity",
    "session_affinity",
)
SAME = "same"
"""A role's policy that is no other than `--policy`."""
PD_PROTOCOLS = ("auto", "sglang-bootstrap", "vllm-nixl")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


@frozen
class Workers(Kind[tuple[WorkerSpec, ...]]):
    """Worker URLs; after one, a word of digits alone is its bootstrap port."""

    role: str = "mixed"
    metavar: str = "URL"
    several = True

    def parse(self, words: Sequence[str]) -> tuple[WorkerSpec, ...]:
        return tuple(WorkerSpec.parse(text, role=self.role) for text in self._join_ports(words))

    def _join_ports(self, words: Sequence[str]) -> Iterator[str]:
        for position, word in enumerate(words):
            if word.isdigit() or word == "none":
                if self.role != "prefill" or position == 0 or words[position - 1].isdigit():
                    raise SettingsError(f"{word!r} is not a URL")
                continue
            following = words[position + 1 : position + 2]
            is_port = bool(following) and following[0].isdigit()
            yield f"{word},bootstrap_port={following[0]}" if is_port else word

    def words(self, value: tuple[WorkerSpec, ...]) -> list[str]:
        return [spec.to_text() for spec in value]

    def check(self, value: tuple[WorkerSpec, ...]) -> None:
        for spec in value:
            if spec.role != self.role:
                raise ValueError(f"holds {spec.id}, whose role is {spec.role}")


@frozen
class NatsUrl(Text):
    """Servers of one NATS cluster, separated by commas; shown without their credentials."""

    metavar: str = "URL"

    def check(self, value: str | None) -> None:
        super().check(value)
        if value is None:
            return
        for each in value.split(","):
            try:
                url = urlsplit(each.strip())
                is_right = url.scheme in ("nats", "tls") and bool(url.hostname) and url.port != 0
            except ValueError:  # a port that is none, or half of an IPv6 address
                is_right = False
            if not is_right or url.path not in ("", "/") or url.query or url.fragment:
                # Cut at a comma, a password may look like an address.
                shown = "" if "@" in value else f", not {each.strip()!r}"
                raise ValueError(f"must be nats://HOST:PORT or tls://HOST:PORT{shown}")

    def masked(self, word: str) -> str:
        return re.sub(r"//[^/@]*@", "//********@", word)


@frozen
class Prefix(Word):
    """What NATS takes as the beginning of subjects and of names."""

    def check(self, value: str) -> None:
        super().check(value)
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,4}", value):
            raise ValueError("must be letters, digits, _ and -, in parts joined by dots")


@frozen
class File(Text):
    """A file that is there when the router starts."""

    metavar: str = "FILE"

    def check(self, value: str | None) -> None:
        if value is not None and not os.path.isfile(value):
            raise ValueError(f"there is no file {value!r}")


# --- the table -------------------------------------------------------------------------------


@frozen
class Settings:
    """Everything `baton serve` can be told; the table of options in the order of `--help`."""

    host: str = option(Word(), "127.0.0.1", "address to listen on", section="Listening")
    port: int = option(Whole(0, 65535), 8000, "port to listen on; 0 picks a free one")
    processes: int = option(Whole(1, 1024), 1, "processes that share the port")

    worker_urls: tuple[WorkerSpec, ...] = option(
        Workers("mixed"),
        (),
        "mixed workers; options may follow a URL after commas: http://h:p,engine=vllm,id=w1",
        section="Workers",
    )
    prefill: tuple[WorkerSpec, ...] = option(
        Workers("prefill", metavar="URL BOOTSTRAP_PORT"),
        (),
        "a prefill worker, repeatable; same options, and group=",
    )
    decode: tuple[WorkerSpec, ...] = option(
        Workers("decode"), (), "a decode worker, repeatable; same options, and group="
    )
    pd_protocol: str = option(
        Word(PD_PROTOCOLS),
        "auto",
        "how a prefill and a decode worker are joined: sglang-bootstrap sends both legs at once, "
        "vllm-nixl prefill first; auto goes by the engine",
    )
    pd_recompute: bool = option(
        Switch(),
        False,
        "vllm-nixl: where a prefill hands nothing over, let decode compute the prompt itself",
        addition=True,
    )
    pd_cancel_unmatched_prefill: bool = option(
        Switch(),
        False,
        "sglang-bootstrap: close a prefill whose decode certainly received nothing; by default no "
        "prefill is ever closed",
        addition=True,
    )
    engine: str = option(
        Word(ENGINES),
        "auto",
        "engine of the workers that do not say; auto asks them, openai is anything else that "
        "speaks the API",
    )
    worker_ca_file: str | None = option(
        File(),
        None,
        "certificates (PEM) that https workers are checked against instead of the system's",
        addition=True,
    )
    worker_insecure_skip_verify: bool = option(
        Switch(), False, "do not check the certificates of https workers", addition=True
    )
    worker_keep_alive_secs: float = option(
        Seconds(),
        4.0,
        "how long an idle connection to a worker is kept; engines close theirs after 5; 0 = never "
        "kept",
        addition=True,
    )

    policy: str = option(
        Word(POLICIES), "round_robin", "how a worker is chosen", section="Choosing and retrying"
    )
    prefill_policy: str = option(
        Word((SAME, *POLICIES)), SAME, "--policy of prefill workers", addition=True
    )
    decode_policy: str = option(
        Word((SAME, *POLICIES)), SAME, "--policy of the decode workers of a group", addition=True
    )
    request_max_retries: int = option(
        Whole(0, 100),
        1,
        "further workers tried while the client has received nothing",
        aliases=("--retry-max-retries",),
    )
    pd_max_retries: int = option(
        Whole(0, 100), 0, "further pairs tried while the client has received nothing"
    )
    migration_limit: int = option(
        Whole(0, 100),
        0,
        "times one generation may move after the client has received something; 0 = off",
    )
    migration_max_tokens: int = option(
        Whole(1), 131072, "longest sequence (prompt and output) that is carried"
    )
    migration_keep_alive_secs: float = option(
        Seconds(),
        0.0,
        "between two comments to a client whose stream is being moved, so that no proxy in between "
        "gives it up; 0 = none",
        addition=True,
    )

    connect_timeout_secs: float = option(
        Seconds(positive=True), 5.0, "to connect to a worker", section="Deadlines"
    )
    first_token_timeout_secs: float = option(
        Seconds(), 600.0, "from dispatch to the first event; 0 = off"
    )
    stream_idle_timeout_secs: float = option(
        Seconds(), 300.0, "between events, once streaming; 0 = off"
    )
    suspect_idle_secs: float = option(
        Seconds(),
        5.0,
        "a stream silent for this long on a worker whose health probe is refused is lost; 0 = off",
    )
    request_timeout_secs: float = option(
        Seconds(), 1800.0, "for the whole request, over all attempts; 0 = off"
    )
    client_stall_timeout_secs: float = option(
        Seconds(),
        120.0,
        "a client that takes nothing for this long while bytes wait for it is gone; 0 = off",
    )

    breaker_failure_threshold: int = option(
        Whole(0, 1_000_000),
        3,
        "failures in a row that open a worker's breaker; 0 = no breaker",
        section="Breaker",
        aliases=("--cb-failure-threshold",),
    )
    breaker_cooldown_secs: float = option(
        Seconds(positive=True),
        5.0,
        "from opening to the first probe; doubles every time the probe fails",
        aliases=("--breaker-cooldown-s", "--cb-timeout-duration-secs"),
    )
    breaker_max_cooldown_secs: float = option(
        Seconds(positive=True), 60.0, "longest cooldown", aliases=("--breaker-max-cooldown-s",)
    )

    health_check_interval_secs: float = option(
        Seconds(positive=True), 10.0, "between two probes of a worker", section="Health"
    )
    health_check_timeout_secs: float = option(
        Seconds(positive=True), 5.0, "for the answer to a probe"
    )
    health_failure_threshold: int = option(
        Whole(1, 1_000_000), 3, "failed probes in a row that make a worker unhealthy"
    )
    health_success_threshold: int = option(
        Whole(1, 1_000_000), 2, "passed probes in a row that make it ready again"
    )
    health_check_endpoint: str = option(Word(metavar="PATH"), "/health", "path that is probed")

    max_concurrent_requests: int = option(
        Whole(0, 1_000_000), 0, "requests served at once; 0 = no cap", section="Limits"
    )
    queue_size: int = option(
        Whole(0, 1_000_000), 1000, "requests that may wait under a cap; beyond it 429"
    )
    queue_timeout_secs: float = option(
        Seconds(positive=True), 30.0, "longest wait under a cap; then 429"
    )
    max_body_bytes: int = option(
        Whole(1),
        67108864,
        "largest body of a request, and of a unary answer; beyond it 413",
        aliases=("--max-payload-size",),
    )
    max_header_bytes: int = option(
        Whole(1024, 16777216),
        65536,
        "largest head of a request (request line and headers); beyond it 431",
        addition=True,
    )
    header_timeout_secs: float = option(
        Seconds(),
        30.0,
        "from a request's first byte to the end of its head; 0 = off",
        addition=True,
    )
    keep_alive_timeout_secs: float = option(
        Seconds(),
        75.0,
        "how long a client's connection may be idle between two requests; 0 = off",
        addition=True,
    )
    drain_timeout_secs: float = option(
        Seconds(),
        30.0,
        "how long running requests may finish after SIGTERM; a second signal ends at once",
        section="Shutting down",
        aliases=("--drain-timeout", "--shutdown-drain-secs"),
    )

    nats: str | None = option(
        NatsUrl(), None, "NATS request transport and worker registry", section="NATS"
    )
    nats_prefix: str = option(Prefix(), "infera", "first part of every NATS subject")
    nats_req_idle_timeout: float = option(
        Seconds(), 0.0, "--stream-idle-timeout-secs of workers behind NATS; 0 = the same"
    )
    nats_req_max_duration: float = option(
        Seconds(), 0.0, "--request-timeout-secs of workers behind NATS; 0 = the same"
    )
    nats_req_max_pending: int = option(
        Whole(0, 1_000_000),
        0,
        "requests that may wait in the queue of a worker behind NATS; beyond it 429; 0 = no queue",
    )

    api_key: tuple[str, ...] = option(
        Texts("KEY", secret=True),
        (),
        "require Authorization: Bearer KEY on /v1/*; repeatable; workers do not see it",
        section="Access",
    )
    admin_key: str | None = option(
        Text("KEY", secret=True), None, "require this key on the worker API and /debug"
    )

    log_format: str = option(
        Word(LOG_FORMATS), "text", "how a line is written; json = one object a line", section="Logs"
    )
    log_level: str = option(Word(LOG_LEVELS), "info", "lowest level that is written")

    def __attrs_post_init__(self) -> None:
        _check_together(self)

    @property
    def workers(self) -> tuple[WorkerSpec, ...]:
        """All workers named here, those that do not say given `--engine`."""
        named = (*self.worker_urls, *self.prefill, *self.decode)
        return tuple(
            evolve(each, engine=self.engine) if each.engine == "auto" else each for each in named
        )


def _check_together(settings: Settings) -> None:
    seen: set[str] = set()
    for worker in settings.workers:
        if worker.id in seen:
            raise SettingsError(f"two workers have the id {worker.id}; give one of them id=…")
        seen.add(worker.id)
        if worker.is_behind_nats and settings.nats is None:
            raise SettingsError(
                f"{worker.url} is behind NATS, but --nats does not say where that is"
            )
    if settings.breaker_max_cooldown_secs < settings.breaker_cooldown_secs:
        raise SettingsError("--breaker-max-cooldown-secs is below --breaker-cooldown-secs")
    if not settings.health_check_endpoint.startswith("/"):
        raise SettingsError("--health-check-endpoint must begin with a slash")


OPTIONS: tuple[Option, ...] = options_of(Settings)


def load_settings(
    flags: Mapping[str, Sequence[str]], env: Mapping[str, str], file: str | None = None
) -> Settings:
    """Settings from flags over environment over file; `flags` maps keys to the words given."""
    return load(Settings, OPTIONS, flags=flags, env=env, file=file)


# --- what this version does not do -----------------------------------------------------------


@frozen
class NotYet:
    """A setting that this version must not pretend to honour."""

    key: str
    feature: str
    values: tuple[object, ...] = ()
    """The values that are refused; none named means every one but the default."""

    def refuses(self, value: object, default: object) -> bool:
        return value in self.values if self.values else value != default


AFFINITIES = ("prefix_affinity", "session_affinity")
NOT_YET = (
    NotYet("processes", "sharing the port between processes"),
    NotYet("policy", "this policy", AFFINITIES),
    NotYet("prefill_policy", "this policy", AFFINITIES),
    NotYet("decode_policy", "this policy", AFFINITIES),
)
"""A feature that arrives deletes its rows."""


def refuse_unavailable(settings: Settings) -> None:
    """Raise SettingsError where a setting asks for a feature that this version does not have."""
    by_key = {each.key: each for each in OPTIONS}
    for row in NOT_YET:
        each, value = by_key[row.key], getattr(settings, row.key)
        if row.refuses(value, each.default):
            shown = " ".join(each.kind.masked(word) for word in each.kind.words(value))
            raise SettingsError(
                f"{each.flag} {shown}: {row.feature} is not available yet in this version"
            )


def unavailable_notes() -> dict[str, str]:
    """What `--help` and docs say beside the options of NOT_YET."""
    return {
        row.key: f"{' and '.join(map(str, row.values))} not available yet".strip()
        for row in NOT_YET
    }
