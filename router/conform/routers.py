"""The routers that can be tried: how each is started, and how its flags call what a case wants.

A preset has the documented flags of the version it names; a router that does something by default
has an empty flag for it, and a router that cannot do it has none. Any other router is described
on the command line in the same words.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import attrs
from attrs import field, frozen

from router.conform.case import KNOBS, Case
from router.conform.stage import Order
from router.sim.settings import EngineKind

SETTINGS = ("engine", "pd-engine", "ready", "mixed", "pd", "pd-prefill", "pd-decode")
"""What can be told of a router besides its knobs."""
#: Of which --set can speak, and which can begin a file's name.
_NAME = re.compile(r"[\w-]+")
_ENGINE_PLACES = ("{workers}", "{fleet}", "{prefill}", "{decode}")
_SEVERAL_PLACES = (*_ENGINE_PLACES, "{knobs}")


class BadRouter(ValueError):
    """A router that is not known, or described wrongly; the message says what is wrong."""


@frozen
class Candidate:
    """A router that can be started.

    `command` may hold {python}, {bin}, {port}, {metrics_port} and, as words of their own,
    {workers} (URLs) and {knobs}. For a pair, `pd` takes the place of `mixed` in {fleet}: its
    {prefill} and {decode} are made of the two templates. `flags` give the words for a knob;
    {} is its value.
    """

    name: str
    command: str
    version: str = ""
    mixed: str = ""
    pd: str | None = None
    pd_prefill: str = "{url}"
    pd_decode: str = "{url}"
    engine: EngineKind = "vllm"
    pd_engine: EngineKind = "sglang"
    ready_path: str | None = None
    flags: Mapping[str, str] = field(factory=dict)

    def lacks(self, case: Case) -> str | None:
        """Why a case cannot be tried, if so."""
        if case.is_pd and self.pd is None:
            return "no command line for prefill/decode pairs"
        if not case.is_pd and "{fleet}" in self.command and not self.mixed:
            return f"nothing to put for {{fleet}} (--set '{self.name}.mixed=... {{workers}}')"
        missing = [knob for knob in case.needs if knob not in self.flags]
        return f"no flag for {missing[0]!r} ({KNOBS[missing[0]]})" if missing else None

    def knobs(self, case: Case) -> dict[str, str]:
        """The knobs that are turned for a case."""
        wished = {name: value for name, value in case.wishes.items() if name in self.flags}
        turned = {**case.needs, **wished}
        if "least_load" not in turned and "round_robin" in self.flags:
            turned["round_robin"] = ""
        return turned

    def engine_for(self, case: Case) -> EngineKind:
        return self.pd_engine if case.is_pd else self.engine

    def words(self, order: Order, *, port: int, metrics_port: int, folder: str) -> list[str]:
        """The command line."""
        is_pd = any(seat.role != "mixed" for seat in order.seats)
        text = self.command.replace("{fleet}", (self.pd or "") if is_pd else self.mixed)
        places = {"python": sys.executable, "bin": folder, "port": str(port)}
        places["metrics_port"] = str(metrics_port)
        several = {
            "{workers}": [seat.url for seat in order.seats],
            "{prefill}": self._halves(order, "prefill", self.pd_prefill),
            "{decode}": self._halves(order, "decode", self.pd_decode),
            "{knobs}": self._knob_words(order),
        }
        words: list[str] = []
        for word in shlex.split(text):
            words += several[word] if word in several else [_filled(word, places)]
        return words if "{knobs}" in text else words + several["{knobs}"]

    def _halves(self, order: Order, role: str, template: str) -> list[str]:
        words: list[str] = []
        for seat in order.seats:
            if seat.role == role:
                places = {"url": seat.url, "bootstrap_port": str(seat.bootstrap_port)}
                words += [_filled(word, places) for word in shlex.split(template)]
        return words

    def _knob_words(self, order: Order) -> list[str]:
        words: list[str] = []
        for knob, value in order.knobs.items():
            words += [word.replace("{}", value) for word in shlex.split(self.flags[knob])]
        return words


def _filled(word: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        word = word.replace("{" + name + "}", value)
    return word


_FAMILY = {
    "round_robin": "--policy round_robin",
    "least_load": "--policy power_of_two",
    "cap": "--max-concurrent-requests {}",
    "queue": "--queue-size {}",
    "silence": "--request-timeout-secs {}",
    "breaker": "--cb-failure-threshold {} --cb-timeout-duration-secs 60",
    "health": "--health-check-interval-secs {} --health-failure-threshold 2"
    " --health-success-threshold 1",
    "body_max": "--max-payload-size {}",
    "pd_retries": "--retry-max-retries {}",
}
"""What vllm-router, sglang-router and smg share.

With `--enable-igw` the first two serve several models, but take no `--worker-urls` then. Of limits
in time they have one, for the whole request.
"""
_LISTEN = "--host 127.0.0.1 --port {port} --prometheus-host 127.0.0.1"
_FAMILY_COMMAND = (
    f"{_LISTEN} --prometheus-port {{metrics_port}} --worker-startup-check-interval 1 {{fleet}}"
)


def _own_version() -> str:
    try:
        return version("baton-router")
    except PackageNotFoundError:
        return ""


BATON = Candidate(
    name="baton",
    version=_own_version(),
    command="{python} -m router serve --host 127.0.0.1 --port {port} {fleet}",
    mixed="--worker-urls {workers}",
    pd="{prefill} {decode}",
    pd_prefill="--prefill {url} {bootstrap_port}",
    pd_decode="--decode {url}",
    ready_path="/readyz",
    flags={
        "round_robin": "--policy round_robin",
        "least_load": "--policy least_load",
        "cap": "--max-concurrent-requests {}",
        "queue": "--queue-size {}",
        "silence": "--first-token-timeout-secs {} --stream-idle-timeout-secs {}",
        "breaker": "--breaker-failure-threshold {} --breaker-cooldown-secs 60",
        "health": "--health-check-interval-secs {} --health-failure-threshold 2"
        " --health-success-threshold 1",
        "body_max": "--max-body-bytes {}",
        "models": "",
        "migration": "--migration-limit {}",
        "pd_retries": "--pd-max-retries {}",
        "drain": "--drain-timeout-secs {}",
    },
)
PRESETS = (
    BATON,
    Candidate(
        name="vllm-router",
        version="0.1.17",
        command=f"{{bin}}vllm-router {_FAMILY_COMMAND}",
        mixed="--worker-urls {workers}",
        pd="--vllm-pd-disaggregation {prefill} {decode}",
        pd_prefill="--prefill {url}",
        pd_decode="--decode {url}",
        pd_engine="vllm",
        ready_path="/readiness",
        flags=_FAMILY,
    ),
    Candidate(
        name="sglang-router",
        version="0.3.2",
        command=f"{{bin}}sglang-router launch {_FAMILY_COMMAND}",
        mixed="--worker-urls {workers}",
        pd="--pd-disaggregation {prefill} {decode}",
        pd_prefill="--prefill {url} {bootstrap_port}",
        pd_decode="--decode {url}",
        engine="sglang",
        ready_path="/readiness",
        flags={**_FAMILY, "drain": "--shutdown-grace-period-secs {}"},
    ),
    Candidate(
        name="smg",
        version="1.13.0",
        command=f"{{bin}}smg launch {_FAMILY_COMMAND}",
        mixed="--worker-urls {workers}",
        pd="--pd-disaggregation {prefill} {decode}",
        pd_prefill="--prefill {url} {bootstrap_port}",
        pd_decode="--decode {url}",
        engine="sglang",
        ready_path="/readiness",
        flags={
            **_FAMILY,
            "least_load": "--policy least_load",
            "models": "",
            "drain": "--shutdown-grace-period-secs {}",
        },
    ),
)


def chosen(names: Sequence[str], launches: Sequence[str], told: Sequence[str]) -> list[Candidate]:
    """Presets by name, others by NAME=COMMAND, changed by NAME.KEY=VALUE; raises BadRouter."""
    known = {preset.name: preset for preset in PRESETS}
    found: dict[str, Candidate] = {}
    for name in names:
        if name not in known:
            raise BadRouter(f"there is no router {name!r}; there are {', '.join(known)}")
        found[name] = known[name]
    for text in launches:
        one = _launched(text)
        if one.name in found:
            raise BadRouter(f"--launch {text}: two routers are called {one.name}")
        found[one.name] = one
    for text in told:
        key, is_said, value = text.partition("=")
        name, dot, setting = key.partition(".")
        if not is_said or not dot:
            raise BadRouter(f"--set {text}: must be NAME.KEY=VALUE")
        if name not in found:
            raise BadRouter(f"--set {text}: {name!r} is not among the routers to try")
        found[name] = _told(found[name], setting, value)
    return list(found.values())


def _launched(text: str) -> Candidate:
    name, is_said, command = text.partition("=")
    if not is_said or not _NAME.fullmatch(name):
        raise BadRouter(
            f"--launch {text}: must be NAME=COMMAND, a name of letters, digits, _ and -"
        )
    if "{port}" not in command:
        raise BadRouter(f"--launch {name}: the command has no {{port}}")
    if not any(place in command for place in _ENGINE_PLACES):
        raise BadRouter(
            f"--launch {name}: the command has no {{workers}}, so it would know of no engine"
        )
    _check_places(f"--launch {name}", command)
    return Candidate(name, command)


def _check_places(said: str, text: str) -> None:
    """What stands for several words must be a word; raises BadRouter."""
    for word in _words(said, text):
        if inside := [place for place in _SEVERAL_PLACES if place in word and place != word]:
            raise BadRouter(f"{said}: {inside[0]} must be a word of its own, not in {word}")


def _words(said: str, text: str) -> list[str]:
    """As a shell would part them; raises BadRouter."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadRouter(f"{said}: {error} in {text}") from None


def installed(one: Candidate, folder: str) -> Candidate:
    """With the version that its script tells, if it does; raises BadRouter where there is none."""
    word = _filled(shlex.split(one.command)[0], {"bin": folder, "python": sys.executable})
    script = shutil.which(word)
    if script is None:
        raise BadRouter(f"{one.name}: there is no {word} (--bin says where presets are)")
    if one.name == BATON.name:
        return one
    python = _python_of(Path(script))
    if not python:
        return one
    asks = f"from importlib.metadata import version; print(version({one.name!r}))"
    asked = subprocess.run(
        [*python, "-c", asks],
        capture_output=True,
        encoding="utf-8",
        timeout=30,
        check=False,
    )
    return attrs.evolve(one, version=asked.stdout.strip() or one.version)


def _python_of(script: Path) -> list[str]:
    """The words that start the Python it is for; none where it is for none."""
    lines = script.read_bytes()[:4096].decode("utf-8", "replace").splitlines()
    first, second = (*lines, "", "")[:2]
    if first == "#!/bin/sh" and second.startswith("'''exec' "):
        # What pip writes for a path that is too long for the kernel, or has blanks.
        word = second.split('"')[1:2]
    else:
        word = first[2:].split() if first.startswith("#!") else []
    return word if "python" in " ".join(word) else []


def _told(one: Candidate, setting: str, value: str) -> Candidate:
    _words(f"--set {one.name}.{setting}", value)
    if setting in KNOBS:
        return attrs.evolve(one, flags={**one.flags, setting: value})
    if setting not in SETTINGS:
        known = ", ".join((*SETTINGS, *KNOBS))
        raise BadRouter(f"--set {one.name}.{setting}: no such word; there are {known}")
    if setting in ("engine", "pd-engine") and value not in ("vllm", "sglang", "openai"):
        raise BadRouter(f"--set {one.name}.{setting}: one of vllm, sglang, openai")
    if setting == "ready" and not value.startswith("/"):
        raise BadRouter(f"--set {one.name}.ready: a path, which begins with /")
    if setting in ("mixed", "pd"):
        _check_places(f"--set {one.name}.{setting}", value)
    name = {"ready": "ready_path"}.get(setting, setting.replace("-", "_"))
    return attrs.evolve(one, **{name: value})  # type: ignore[arg-type]  # a text, checked above
