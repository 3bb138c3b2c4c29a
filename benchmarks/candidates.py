"""What is measured: command lines, and where the peers among them come from.

Peers are installed from PyPI at fixed versions into an environment of their own, so that their
dependencies never meet Baton's. All run with their metrics on and at round robin; the peers log
errors only, Baton logs at its default level.
"""

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).resolve().parent.parent
PEER_ENVIRONMENT = ROOT / ".venv-bench"
PEER_VERSIONS = {"vllm-router": "0.1.17", "sglang-router": "0.3.2", "smg": "1.13.0"}
REFERENCE = "vllm-router"
DIRECT = "direct"


@frozen
class Candidate:
    """`command` may hold {port}, {metrics_port}, {python}, {peers} (where peers are installed) and,
    as a word of its own, {workers}.

    An empty command is no router at all: the load goes to the worker itself, whose cost is shown.
    """

    name: str
    command: str

    def words(self, *, port: int, metrics_port: int, workers: Sequence[str]) -> list[str]:
        """The command line, with the workers' URLs as words."""
        words: list[str] = []
        for word in self.command.split():
            if word == "{workers}":
                words += workers
            else:
                values = {"port": port, "metrics_port": metrics_port, "python": sys.executable}
                words.append(word.format(**values, peers=PEER_ENVIRONMENT / "bin"))
        return words


_PEER_FLAGS = (
    "--worker-urls {workers} --host 127.0.0.1 --port {port} --policy round_robin"
    " --log-level error --prometheus-port {metrics_port}"
)
CANDIDATES = (
    Candidate(DIRECT, ""),
    Candidate("pass-through", "{python} -m benchmarks.relay {port} {workers}"),
    Candidate(
        "baton",
        "{python} -m router serve --host 127.0.0.1 --port {port} --policy round_robin"
        " --worker-urls {workers}",
    ),
    Candidate(
        "baton-moving",
        "{python} -m router serve --host 127.0.0.1 --port {port} --policy round_robin"
        " --migration-limit 3 --worker-urls {workers}",
    ),
    Candidate("vllm-router", "{peers}/vllm-router " + _PEER_FLAGS),
    Candidate("sglang-router", "{peers}/sglang-router launch " + _PEER_FLAGS),
    Candidate("smg", "{peers}/smg launch " + _PEER_FLAGS),
)
DEFAULT_CANDIDATES = (DIRECT, "pass-through", "baton", REFERENCE)


def chosen(text: str) -> Candidate:
    """A known name, or NAME=COMMAND for any other router."""
    name, given, command = text.partition("=")
    if given:
        return Candidate(name, command)
    for candidate in CANDIDATES:
        if candidate.name == name:
            return candidate
    known = ", ".join(candidate.name for candidate in CANDIDATES)
    raise KeyError(f"no candidate {name!r}; there are {known}, or give NAME=COMMAND")


def install(candidate: Candidate) -> None:
    """Installs a peer at its version unless it is there; does nothing for others."""
    version = PEER_VERSIONS.get(candidate.name)
    if version is None or not candidate.command.startswith("{peers}"):
        return
    record = f"{candidate.name.replace('-', '_')}-{version}.dist-info"
    if any(PEER_ENVIRONMENT.glob(f"lib/python*/site-packages/{record}")):
        return
    if not (PEER_ENVIRONMENT / "bin" / "pip").exists():
        venv.create(PEER_ENVIRONMENT, with_pip=True, clear=True)
        (PEER_ENVIRONMENT / ".gitignore").write_text("*\n", encoding="utf-8")
    pip = [str(PEER_ENVIRONMENT / "bin" / "pip"), "install", "--quiet"]
    print(f"installing {candidate.name} {version} into {PEER_ENVIRONMENT.name}", file=sys.stderr)
    subprocess.run([*pip, f"{candidate.name}=={version}"], check=True)
