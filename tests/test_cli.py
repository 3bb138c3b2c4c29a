"""The command line: complete help, one-line mistakes, and the worker commands over real HTTP."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import fields

from router import cli
from router.config import NOT_YET, OPTIONS
from router.options import Option
from router.sim.fault_kinds import KINDS
from router.sim.settings import SimSettings
from tests.routers import Router, standing_in

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {name for name, _, _ in cli.COMMANDS}


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATON_CONFIG", "BATON_ROUTER_URL", *(each.env for each in OPTIONS)):
        monkeypatch.delenv(name, raising=False)
    # The width of help texts.
    monkeypatch.setenv("COLUMNS", "200")


def baton(*words: str) -> int:
    """Exit code of the command, however it ends."""
    try:
        return cli.main(words)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert baton(*words, "--help") == 0
    return capsys.readouterr().out


# --- help and mistakes -----------------------------------------------------------------------


def test_help_names_every_command_there_is_and_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(capsys)

    assert {
        *(
            "serve",
            "agent",
            "sim",
            "demo",
            "diagrams",
            "check",
            "watch",
            "top",
            "replay",
            "conform",
        ),
        "workers",
    } == COMMANDS
    assert all(f"    {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"usage: baton {name}" in help_of(capsys, name)


@pytest.mark.parametrize("action", ["list", "add", "drain", "remove"])
def test_every_worker_action_has_help(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "workers", action)

    assert "--router-url" in text
    assert "--admin-key" in text


def test_help_of_serve_names_every_flag_and_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(help_of(capsys, "serve").split())

    for each in OPTIONS:
        assert f"{each.flag} " in text
        assert each.help in text
        if each.default_text:
            assert f"(default {each.default_text})" in text
        assert all(f"{alias} " not in text for alias in each.aliases)
    assert text.count("not available yet") == len(NOT_YET)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "baton: the following arguments are required: COMMAND"),
        (["srve"], "baton: argument COMMAND: invalid choice: 'srve'"),
        (["serve", "--wroker-urls", "http://h"], "baton serve: there is no --wroker-urls"),
        (["serve", "--worker-url", "http://h"], "baton serve: there is no --worker-url"),
        (["serve", "http://h"], "baton serve: http://h is one argument too many (see"),
        (["serve", "http://h", "--prot", "1"], "baton serve: there is no --prot (see"),
        (["replay", "one", "two"], "baton replay: two is one argument too many (see"),
        (["serve", "--port"], "baton serve: argument --port: expected one argument"),
        (["serve", "--port", "x"], "baton serve: --port: must be a whole number, not 'x'"),
        (["serve", "--config", "/nowhere"], "baton serve: --config /nowhere: No such file"),
        (["serve", "--processes", "2"], "baton serve: --processes 2: "),
        (["serve", "--prefill", "1"], "baton serve: --prefill: '1' is not a URL"),
        (["workers"], "baton workers: the following arguments are required: ACTION"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = baton(*words)

    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.startswith(message)
    assert said.err.count("\n") == 1


def test_help_of_sim_names_every_fault_and_setting(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "sim")

    assert all(f"\n{kind}  " in text for kind in KINDS)
    # The clock is for tests, which build their settings themselves.
    assert set(cli.SIM_HELP) == {each.name for each in fields(SimSettings)} - {"unix_time"}
    assert all(f"--{name.replace('_', '-')}" in text for name in cli.SIM_HELP)


def test_a_fault_that_cannot_be_read_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert baton("sim", "--faults", "explode") == 2
    assert "there is no fault 'explode'" in capsys.readouterr().err


# --- settings --------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert baton("serve", *words, "--print-config") == 0
    return tomllib.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--port", "0"], "port", 0),
        (["--port", "1", "--port", "2"], "port", 2),
        (["--port=3"], "port", 3),
        (["--worker-urls", "http://a:1", "http://b:2"], "worker_urls", None),
        (["--worker-urls", "http://a:1", "--worker-urls", "http://b:2"], "worker_urls", None),
        (["--worker-urls", "http://a:1 http://b:2"], "worker_urls", None),
        (["--worker-insecure-skip-verify"], "worker_insecure_skip_verify", True),
        (["--worker-insecure-skip-verify", "false"], "worker_insecure_skip_verify", False),
        (["--stream-idle-timeout-secs", ".5"], "stream_idle_timeout_secs", 0.5),
        (["--prefill", "http://a:1", "9", "--prefill", "http://b:2"], "prefill", [
            "http://a:1,bootstrap_port=9", "http://b:2",
        ]),
    ],
)  # fmt: skip
def test_flags_in_their_shapes(
    words: list[str], key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = ["http://a:1", "http://b:2"] if value is None else value

    assert printed(capsys, *words)[key] == expected


@pytest.mark.parametrize(
    ("each", "alias"), [(each, alias) for each in OPTIONS for alias in each.aliases]
)
def test_familiar_spellings_mean_the_same(
    each: Option, alias: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, alias, "7") == printed(capsys, each.flag, "7")


def test_the_printed_settings_can_be_given_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--worker-urls", "http://a:1,id=w1", "--policy", "least_load", "--log-format", "json"]
    first = printed(capsys, *words)
    baton("serve", *words, "--print-config")
    file = tmp_path / "merged.toml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")

    assert printed(capsys, "--config", str(file)) == first


def test_file_environment_and_flag_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('port = 1\nhost = "a"\npolicy = "random"\n', encoding="utf-8")
    monkeypatch.setenv("BATON_CONFIG", str(file))
    monkeypatch.setenv("BATON_HOST", "b")
    monkeypatch.setenv("BATON_POLICY", "least_load")

    found = printed(capsys, "--policy", "power_of_two")

    assert (found["port"], found["host"], found["policy"]) == (1, "b", "power_of_two")


def test_an_unknown_variable_ends_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_WROKER_URLS", "http://h")

    assert baton("serve") == 2
    assert capsys.readouterr().err == (
        "baton serve: BATON_WROKER_URLS: no option has this environment name\n"
    )


@pytest.mark.slow
def test_help_starts_without_what_only_a_router_needs() -> None:
    script = (
        "import sys; from router.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'trio', 'httpx', 'structlog', 'prometheus_client', 'transitions'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or None)"
    )

    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)

    assert (ended.returncode, ended.stderr) == (0, b"")


# --- baton workers ---------------------------------------------------------------------------


@pytest.fixture
def router() -> Iterator[Router]:
    with standing_in() as stand_in:
        yield stand_in


def test_workers_are_listed_as_a_table(
    router: Router, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Proxies of the environment are not for one's own router.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    router.answer = json.dumps({
        "workers": [
            {"id": "w1", "url": "http://a:1", "engine": "vllm", "role": "mixed", "state": "ready",
             "breaker": "closed", "inflight": 12, "models": ["m", "n"], "unknown": 1,
             "origin": "registry"},
            {"id": "worker-2", "url": "http://b:2", "state": "probing"},
        ]
    }).encode()  # fmt: skip

    assert baton("workers", "list", "--router-url", router.url) == 0

    assert capsys.readouterr().out.splitlines() == [
        "id        state    breaker  inflight  role   engine  models  url         origin",
        "w1        ready    closed   12        mixed  vllm    m,n     http://a:1  registry",
        "worker-2  probing  -        0         -      -       -       http://b:2  -",
    ]
    assert router.asked == [("GET", "/v1/workers", None, None)]


def test_workers_are_listed_as_the_router_says_with_json(
    router: Router, capsys: pytest.CaptureFixture[str]
) -> None:
    router.answer = b'{"workers":[]}'

    assert baton("workers", "list", "--json", "--router-url", router.url) == 0
    assert capsys.readouterr().out == '{"workers":[]}\n'


def test_a_worker_behind_nats_is_added_by_its_id(router: Router) -> None:
    router.status = 201

    words = ["nats:10.0.0.1:8000,bootstrap_host=10.0.0.1", "--role", "prefill"]

    assert baton("workers", "add", *words, "--router-url", router.url) == 0

    id, host = "10.0.0.1:8000", "10.0.0.1"
    body = {"url": f"nats:{id}", "id": id, "role": "prefill", "bootstrap_host": host}
    assert router.asked == [("POST", "/v1/workers", None, body)]


def test_a_worker_is_added(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    router.status = 201
    words = ["http://h:1,id=w1,engine=vllm,group=g,bootstrap_port=9", "--role", "prefill"]

    assert baton("workers", "add", *words, "--router-url", router.url, "--admin-key", "k") == 0

    body = {"url": "http://h:1", "id": "w1", "role": "prefill", "engine": "vllm", "group": "g"}
    body["bootstrap_port"] = 9  # type: ignore[assignment]
    assert router.asked == [("POST", "/v1/workers", "Bearer k", body)]
    assert capsys.readouterr().out == "w1: added\n"


def test_a_worker_is_drained_and_removed(
    router: Router, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_ROUTER_URL", router.url + "/")
    monkeypatch.setenv("BATON_ADMIN_KEY", "k")

    assert baton("workers", "drain", "h:1/a", "--timeout-secs", "5") == 0
    assert baton("workers", "remove", "h:1/a") == 0

    assert router.asked == [
        ("POST", "/v1/workers/h%3A1%2Fa/drain", "Bearer k", {"timeout_secs": 5}),
        ("DELETE", "/v1/workers/h%3A1%2Fa", "Bearer k", None),
    ]
    assert capsys.readouterr().out == "h:1/a: draining\nh:1/a: removed\n"


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (404, b'{"error":{"message":"No worker.","code":"not_found"}}', "No worker. (not_found)"),
        (401, b'{"error":{"message":"A key is required."}}', "A key is required. (401)"),
        (502, b"<html>", "the answer is 502, not from a router's API"),
        (200, b"<html>", "not a list of workers"),
        (200, b'{"workers":1}', "not a list of workers"),
    ],
)
def test_a_refusal_is_shown_in_the_routers_words(
    status: int,
    answer: bytes,
    message: str,
    router: Router,
    capsys: pytest.CaptureFixture[str],
) -> None:
    router.status, router.answer = status, answer

    assert baton("workers", "list", "--router-url", router.url) == 1

    said = capsys.readouterr().err
    assert said.startswith("baton workers: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[::1", "ftp://h"])
def test_a_router_that_cannot_be_reached_is_one_line(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baton("workers", "list", "--router-url", url) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_worker_that_cannot_be_meant_is_not_sent(
    router: Router, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baton("workers", "add", "h:1", "--router-url", router.url) == 1
    assert "begins with http://" in capsys.readouterr().err
    assert router.asked == []


# --- diagrams --------------------------------------------------------------------------------


@pytest.mark.slow
def test_diagrams_fill_the_blocks_of_a_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "page.md").write_text(
        "<!-- generated: options -->\nold\n<!-- /generated -->\n", encoding="utf-8"
    )

    assert baton("diagrams", "--check", "--root", str(tmp_path)) == 1
    assert baton("diagrams", "--root", str(tmp_path)) == 0

    assert "| `--port N` |" in (docs / "page.md").read_text(encoding="utf-8")
    assert f"written: {docs / 'page.md'}" in capsys.readouterr().out


# --- check -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_a_bad_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages in which somebody has begun to add a state to the worker machine."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("router", "statemachines"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = root / "statemachines" / "worker.py"
    text = path.read_text(encoding="utf-8").replace(
        'GONE = "gone"', 'GONE = "gone"\n    SHY = "shy"'
    )
    path.write_text(text.replace('S.GONE: "removed"', 'S.GONE: ""'), encoding="utf-8")
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["check"],
        ["check", "--explain", "it trips"],
        ["diagrams", "--check"],
        ["diagrams", "--live", "http://127.0.0.1:1"],
        ["replay", "file"],
        ["watch", "http://127.0.0.1:1"],
        ["top", "http://127.0.0.1:1"],
        ["serve", "--port", "0"],
        ["agent", "--engine-url", "http://127.0.0.1:1", "--nats", "nats://127.0.0.1:1"],
    ],
    ids=" ".join,
)
def test_a_bad_chart_is_told_of_in_sentences(words: list[str], with_a_bad_chart: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "router", *words],
        cwd=with_a_bad_chart,
        env=os.environ | {"PYTHONPATH": str(with_a_bad_chart)},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )

    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.splitlines() == [
        f"baton {words[0]}: worker: state gone without a text",
        f"baton {words[0]}: worker: state shy without a text",
    ]


@pytest.mark.slow
def test_check_prints_every_promise_and_the_number_of_states(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert baton("check") == 0
    assert re.search(r"^\d+ states, \d+ promises, 0 broken$", capsys.readouterr().out, re.MULTILINE)


def test_check_tries_only_the_models_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert baton("check", "one worker", "the router") == 0
    names = re.findall(r"^(.*): \d+ states, \d+ steps$", capsys.readouterr().out, re.MULTILINE)
    assert names == ["one worker", "the router"]

    assert baton("check", "one workr") == 2
    assert "no model is called 'one workr'; there are one request, " in capsys.readouterr().err
