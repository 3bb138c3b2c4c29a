"""What an operator can tell `baton agent`: one table of options, as for `baton serve`.

Flags and `BATON_` variables are made and read by `router.options`. A name that both commands know
means the same in both; a variable that only `baton serve` knows is passed over, so that one set of
variables may be given to both. Where a variable of Infera's means the same it counts as well, after
our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from router.config import LOG_FORMATS, LOG_LEVELS, NatsUrl, Prefix
from router.config import OPTIONS as SERVE_OPTIONS
from router.options import (
    Option,
    Seconds,
    SettingsError,
    Text,
    Whole,
    Word,
    load,
    option,
    options_of,
)
from router.workerspec import ENGINES, ROLES, WorkerSpec

#: Variables of Infera's worker, by the option that they set where nothing of ours does.
INFERA_NAMES = {
    "nats": "NATS_SERVER",
    "nats_req_idle_timeout": "INFERA_NATS_REQ_IDLE_TIMEOUT",
    "nats_req_max_duration": "INFERA_NATS_REQ_MAX_DURATION",
    "nats_req_max_pending": "INFERA_NATS_REQ_MAX_PENDING",
}


@frozen
class AgentSettings:
    """Everything `baton agent` can be told; the table of options in the order of `--help`."""

    engine_url: str | None = option(
        Text("URL"), None, "the engine beside it (required)", section="Engine"
    )
    engine: str = option(
        Word(ENGINES), "auto", "what the engine is; auto asks it, openai is anything else"
    )
    role: str = option(Word(ROLES), "mixed", "half of a prefill/decode pair, or all of it")
    group: str | None = option(
        Text("NAME"), None, "prefill and decode workers of one group are joined"
    )
    bootstrap_port: int = option(
        Whole(0, 65535), 0, "where a prefill engine hands over its KV cache; 0 = nowhere"
    )
    bootstrap_host: str | None = option(
        Text("HOST"), None, "the host of that port; the engine's own if not given", addition=True
    )
    connect_timeout_secs: float = option(
        Seconds(positive=True), 5.0, "to connect to the engine", addition=True
    )
    worker_keep_alive_secs: float = option(
        Seconds(),
        4.0,
        "how long an idle connection to the engine is kept; engines close theirs after 5; 0 = "
        "never kept",
        addition=True,
    )

    nats: str | None = option(NatsUrl(), None, "the NATS server (required)", section="NATS")
    nats_prefix: str = option(Prefix(), "infera", "first part of every NATS subject")
    id: str | None = option(
        Text("ID"),
        None,
        "the worker's id, unique in the fleet; the engine's host:port if not given",
    )
    nats_req_max_pending: int = option(
        Whole(0, 1_000_000),
        0,
        "take requests from a JetStream work queue, whose length routers limit to this; 0 = off, "
        "plain subjects; the same at every router and agent",
    )
    nats_req_idle_timeout: float = option(
        Seconds(), 0.0, "an engine silent for this long has failed a request; 0 = off"
    )
    nats_req_max_duration: float = option(Seconds(), 0.0, "for a whole request; 0 = off")

    health_check_interval_secs: float = option(
        Seconds(positive=True),
        2.0,
        "between two probes of the engine",
        section="Health",
        addition=True,
    )
    health_check_timeout_secs: float = option(
        Seconds(positive=True), 5.0, "for the answer to a probe", addition=True
    )
    health_failure_threshold: int = option(
        Whole(1, 1_000_000),
        3,
        "failed probes in a row after which it is no longer registered",
        addition=True,
    )
    health_success_threshold: int = option(
        Whole(1, 1_000_000), 2, "passed probes in a row after which it is again", addition=True
    )
    health_check_endpoint: str = option(
        Word(metavar="PATH"), "/health", "path that is probed", addition=True
    )

    drain_timeout_secs: float = option(
        Seconds(),
        30.0,
        "how long requests may finish once a drain has begun; then they are handed back or ended",
        section="Shutting down",
        aliases=("--drain-timeout",),
    )
    log_format: str = option(
        Word(LOG_FORMATS),
        "text",
        "how a line is written; json = one object a line",
        section="Logs",
    )
    log_level: str = option(Word(LOG_LEVELS), "info", "lowest level that is written")

    def __attrs_post_init__(self) -> None:
        if not self.health_check_endpoint.startswith("/"):
            raise SettingsError("--health-check-endpoint must begin with a slash")
        if self.engine_url is not None:
            self.spec()

    # Of a single engine nobody fingerprints tokens, and its trust is the routers' business: what
    # the loop of probes and the fleet ask for beside the options.
    migration_limit = 0
    breaker_failure_threshold = 0
    breaker_cooldown_secs = 1.0
    breaker_max_cooldown_secs = 1.0

    def spec(self) -> WorkerSpec:
        """The engine as a worker; raises SettingsError."""
        if self.engine_url is None:
            raise SettingsError("--engine-url is missing")
        try:
            spec = WorkerSpec.of(
                self.engine_url,
                id=self.id,
                engine=self.engine,
                role=self.role,
                group=self.group,
                bootstrap_port=self.bootstrap_port or None,
                bootstrap_host=self.bootstrap_host,
            )
        except SettingsError as problem:
            raise SettingsError(f"--engine-url {self.engine_url}: {problem}") from None
        if spec.is_behind_nats:
            raise SettingsError("--engine-url must begin with http:// or https://")
        return spec

    def nats_url(self) -> str:
        """Where the broker is; raises SettingsError."""
        if self.nats is None:
            raise SettingsError("--nats is missing")
        return self.nats

    def worker_id(self) -> str:
        """The id under which it serves; raises SettingsError."""
        return self.id if self.id is not None else self.spec().id


OPTIONS: tuple[Option, ...] = options_of(AgentSettings)


def env_for_serve(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what only the agent knows: one set of variables may serve both."""
    of_agent = {each.env for each in OPTIONS} - {each.env for each in SERVE_OPTIONS}
    return {name: value for name, value in env.items() if name not in of_agent}


def load_settings(flags: Mapping[str, Sequence[str]], env: Mapping[str, str]) -> AgentSettings:
    """Settings from flags over environment; raises SettingsError."""
    ours = {each.env for each in OPTIONS}
    of_serve = {each.env for each in SERVE_OPTIONS} - ours
    known = {name: value for name, value in env.items() if name not in of_serve}
    for each in OPTIONS:
        theirs = env.get(INFERA_NAMES.get(each.key, ""), "")
        if theirs and not known.get(each.env, "").strip():
            known[each.env] = theirs
    return load(AgentSettings, OPTIONS, flags=flags, env=known, file=None)
