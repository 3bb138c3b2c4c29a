"""What docs/nats.md tells people to copy: the same text as the files, and it means what it says."""

from __future__ import annotations

import configparser
import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from router.agent.settings import OPTIONS, AgentSettings, load_settings
from tests.infera_peer import Json

DOCS = Path(__file__).resolve().parent.parent / "docs"
UNIT = DOCS / "examples" / "baton-agent@.service"
MANIFEST = DOCS / "examples" / "agent.yaml"
#: Of a stop beyond the window: deregistering, last frames, the moment for who has asked.
AFTER_WINDOW_SECONDS = 10.0
#: What an engine has for itself after its agent.
ENGINE_SECONDS = 15.0


@pytest.mark.parametrize("path", [UNIT, MANIFEST], ids=lambda path: path.name)
def test_the_page_shows_the_file(path: Path) -> None:
    kind = {".service": "ini", ".yaml": "yaml"}[path.suffix]

    assert f"```{kind}\n{path.read_text(encoding='utf-8')}```\n" in (DOCS / "nats.md").read_text(
        encoding="utf-8"
    )


def settings_of(words: list[str], env: Mapping[str, str]) -> AgentSettings:
    """What `baton agent` makes of them; raises what it refuses."""
    assert len(words) % 2 == 0
    known = {flag for option in OPTIONS for flag in (option.flag,)}
    flags: dict[str, list[str]] = {}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        assert flag in known
        flags[flag.removeprefix("--").replace("-", "_")] = [value]
    return load_settings(flags, env)


#### systemd


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as its documentation says
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser


def test_the_unit_stops_as_a_drain_needs() -> None:
    service = unit()["Service"]
    program, command, *words = shlex.split(service["ExecStart"])

    filled = [word.replace("%i", "8000").replace("%H", "host") for word in words]
    settings = settings_of(filled, {})

    assert (Path(program).name, command) == ("baton", "agent")
    assert settings.worker_id() == "host:8000"
    assert float(service["TimeoutStopSec"]) >= settings.drain_timeout_secs + AFTER_WINDOW_SECONDS
    assert service["RestartPreventExitStatus"] == "2"
    assert "KillSignal" not in service, "SIGTERM is what begins a drain"


def test_the_agent_is_stopped_before_its_engine() -> None:
    found = unit()
    engine = "vllm@%i.service"

    # Units are stopped in the opposite order of their start.
    assert engine in found["Unit"]["After"].split()
    assert engine in found["Unit"]["PartOf"].split()
    assert found["Install"]["WantedBy"] == engine


@pytest.mark.slow
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    (tmp_path / "vllm@.service").write_text("[Service]\nExecStart=/bin/true\n", encoding="utf-8")
    text = UNIT.read_text(encoding="utf-8").replace("/opt/baton/bin/baton", "/bin/true")
    (tmp_path / UNIT.name).write_text(text, encoding="utf-8")

    told = subprocess.run(
        ["systemd-analyze", "verify", f"./{UNIT.name.replace('@', '@8000')}"],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=30,
    )

    assert (told.returncode, told.stderr) == (0, "")


#### Kubernetes


def manifest() -> dict[str, Json]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Json] = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    return found


def dig(value: Json, *path: str | int) -> Json:
    for each in path:
        value = value[each]  # type: ignore[index]  # JSON's shape is the test
    return value


def pre_stop() -> tuple[list[str], list[str]]:
    """The command, and the variables that it reads."""
    agent = dig(manifest(), "spec", "template", "spec", "containers", 0)
    words = dig(agent, "lifecycle", "preStop", "exec", "command")
    variables = dig(agent, "env")
    assert isinstance(words, list)
    assert isinstance(variables, list)
    return [str(word) for word in words], [str(dig(each, "name")) for each in variables]


def test_the_pod_has_time_for_a_drain_and_then_for_its_engine() -> None:
    pod = dig(manifest(), "spec", "template", "spec")
    agent, engine = dig(pod, "containers", 0), dig(pod, "initContainers", 0)
    words, args = dig(agent, "command"), dig(agent, "args")
    assert isinstance(args, list)
    grace = dig(pod, "terminationGracePeriodSeconds")
    assert isinstance(grace, int)

    variables = {"BATON_NATS": "nats://nats.default:4222", "BATON_ID": "llama-0"}
    settings = settings_of([str(each) for each in args], variables)

    assert words == ["baton", "agent"]
    assert settings.worker_id() == "llama-0"
    needed = settings.drain_timeout_secs + AFTER_WINDOW_SECONDS + ENGINE_SECONDS
    assert grace >= needed
    # A sidecar is stopped after the others.
    assert dig(engine, "restartPolicy") == "Always"


def test_the_pre_stop_command_finds_its_agent_by_the_variables_of_the_pod() -> None:
    words, variables = pre_stop()

    assert words == ["baton", "agent", "--drain"]
    assert set(variables) == {"BATON_NATS", "BATON_ID"} <= {option.env for option in OPTIONS}


def paths_of(value: Json, at: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield f"{at}.{key}"
            yield from paths_of(each, f"{at}.{key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from paths_of(each, f"{at}[{number}]")


@pytest.mark.slow
def test_kubernetes_knows_every_field() -> None:
    """What its own types do not have is not there any more when they are written again."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")

    told = subprocess.run(
        ["kubectl", "set", "env", "--local", "-f", str(MANIFEST), "ADDED=1", "-o", "json"],
        capture_output=True,
        timeout=30,
    )

    assert told.returncode == 0, told.stderr
    known = set(paths_of(json.loads(told.stdout)))
    assert [path for path in paths_of(manifest()) if path not in known] == []
