"""The rules of the house that a program can check: who may import whom, and who moves a state."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("router", "statemachines")

#: Modules that decide and never act. Called twice, they say the same; they know no clock.
PURE = (
    "router.admission",
    "router.agent.settings",
    "router.agent.tombstones",
    "router.breaker",
    "router.calls",
    "router.choosing",
    "router.clocks",
    "router.config",
    "router.engines",
    "router.errors",
    "router.headers",
    "router.migration",
    "router.moving",
    "router.openai",
    "router.options",
    "router.pd.logprobs",
    "router.pd.pairing",
    "router.pd.ranks",
    "router.pd.shaping",
    "router.pd.verdict",
    "router.relay",
    "router.routes",
    "router.sse",
    "router.ticket",
    "router.traces",
    "router.unpacking",
    "router.width",
    "router.worker",
    "router.wires.nats.broker",
    "router.wires.nats.entries",
    "router.wires.nats.protocol",
    "router.workerspec",
)
#: What only a shell may touch.
ACTING = frozenset({"trio", "httpx", "nats", "anyio", "asyncio", "prometheus_client"}) | {
    *("trio_websocket", "socket", "select", "ssl", "subprocess", "threading")
}
#: Libraries with one home each (by prefix of the module's name).
HOMES = {
    "prometheus_client": ("router.exposition", "router.metrics"),
    "httptools": ("router.calls", "router.wires"),
    "select": ("router.sockets", "router.tcp"),
    "h11": ("router.sim", "router.conform"),
    "anyio": ("router.wires.nats.thread",),
    "nats": ("router.wires.nats.thread", "router.wires.nats.natspy"),
    "asyncio": ("router.wires.nats.thread", "router.wires.nats.natspy"),
    "trio_websocket": ("router.websocket",),
    "transitions": ("statemachines.chart",),
}
MODULE_LINES_MAX = 460
FUNCTION_LINES_MAX = 60


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def is_in(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def test_the_charts_import_nothing_of_ours_and_no_io() -> None:
    for path in modules():
        if not is_in(name_of(path), ("statemachines",)):
            continue
        for line, imported in imports_of(path):
            root = imported.partition(".")[0]
            assert root != "router", f"{path}:{line} imports {imported}"
            assert root not in ACTING - {"subprocess"}, f"{path}:{line} imports {imported}"


def test_pure_modules_import_nothing_that_acts() -> None:
    found = [path for path in modules() if is_in(name_of(path), PURE)]

    assert len(found) >= len(PURE) - 1
    for path in found:
        for line, imported in imports_of(path):
            assert imported.partition(".")[0] not in ACTING, f"{path}:{line} imports {imported}"
            if is_in(imported, ("router",)):
                assert is_in(imported, PURE), f"{path}:{line} imports {imported}, which acts"


def test_libraries_stay_in_their_rooms() -> None:
    for path in modules():
        for line, imported in imports_of(path):
            homes = HOMES.get(imported.partition(".")[0])
            if homes is not None:
                assert is_in(name_of(path), homes), f"{path}:{line} imports {imported}"


def test_nobody_imports_the_process_but_its_commands() -> None:
    for path in modules():
        if is_in(name_of(path), ("router.cli", "router.app", "router.__main__")):
            continue
        for line, imported in imports_of(path):
            assert not is_in(imported, ("router.app", "router.cli")), f"{path}:{line}"


def test_wires_know_no_charts_and_not_each_other_s_users() -> None:
    for path in modules():
        if is_in(name_of(path), ("router.wires",)):
            for line, imported in imports_of(path):
                allowed = not is_in(imported, ("statemachines", "router.exchange", "router.legs"))
                assert allowed, f"{path}:{line} imports {imported}"


def test_only_fire_moves_a_state() -> None:
    for path in modules():
        if name_of(path) == "statemachines.chart":
            continue
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and function.name != "__init__":
                for node in ast.walk(function):
                    assert not _assigns_state(node), f"{path}:{getattr(node, 'lineno', 0)}"


def _assigns_state(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(each, ast.Attribute) and each.attr == "state" for each in targets)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_modules_and_functions_are_rooms_one_can_see_across(path: Path) -> None:
    source = path.read_text(encoding="utf-8")

    assert source.count("\n") <= MODULE_LINES_MAX
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{path}:{node.lineno} {node.name}: {lines} lines"


def test_modules_say_why_they_exist() -> None:
    for path in modules():
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or not path.read_text(
            encoding="utf-8"
        ), path


def test_tests_never_sleep_for_real() -> None:
    for path in sorted((ROOT / "tests").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "sleep":
                is_real = isinstance(node.value, ast.Name) and node.value.id == "time"
                assert not is_real, f"{path}:{node.lineno}"


def test_the_tests_that_documents_name_are_there() -> None:
    written = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "testing.md").read_text(encoding="utf-8"))

    assert [name for name in named if f"def {name}(" not in written] == []


def test_text_is_utf_8_whatever_the_terminal_speaks() -> None:
    """Python takes the locale's encoding where none is named, and that may be Latin-1."""
    folders = (*PACKAGES, "tests", "benchmarks")
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and _is_of_text(node):
                named = {keyword.arg for keyword in node.keywords}
                assert "encoding" in named, f"{path}:{node.lineno}"


def _is_of_text(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    asks = any(
        keyword.arg in ("text", "universal_newlines") and name in ("run", "Popen", "check_output")
        for keyword in call.keywords
    )
    return asks or name in ("read_text", "write_text")
