"""The files and blocks that are generated from the charts, written or compared.

Generated text is committed, so that a change to a chart shows its new picture in the same diff.
Text files are compared byte for byte. An SVG is rendered by Graphviz, whose bytes differ between
versions, so it carries the hash of the DOT text it was made from, and that is compared instead.
In Markdown files only what stands between `<!-- generated: NAME -->` and `<!-- /generated -->` is
touched. This is the one module of the package that touches files.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from statemachines import CHARTS, REQUEST, Chart, draw, tables
from statemachines.leg import OUTCOMES, VERDICTS
from statemachines.paint import path_paint
from statemachines.replay import Life

__all__ = ["NotDrawn", "UnknownBlock", "blocks", "stale", "svg", "write"]

_BLOCK = re.compile(
    r"(?P<open><!-- generated: (?P<name>[\w-]+) -->\n).*?(?P<close><!-- /generated -->)", re.DOTALL
)
_RENDER_SECONDS_MAX = 60
#: What a machine's own page has, by the names of the blocks.
_PARTS = {
    "states": "States",
    "facts": "Facts",
    "guards": "Guards",
    "rows": "Rows",
    "grid": "Every state and fact",
    "mermaid": "As Mermaid",
}
#: The path that documents show as an example: seconds, fact, and the state it led to.
_EXAMPLE = (
    (0.0, "admitted", "dispatching"),
    (0.004, "leg_lost", "queued"),
    (0.004, "admitted", "dispatching"),
    (0.310, "first_token", "streaming"),
    (4.882, "leg_lost", "migrating"),
    (4.883, "admitted", "resuming"),
    (5.207, "first_token", "streaming"),
    (9.641, "completed", "finished"),
)


class UnknownBlock(Exception):
    """A document asks for a generated block that nobody makes."""


class NotDrawn(Exception):
    """A picture cannot be made; the message says why, in one line."""


def write(root: Path, more: Mapping[str, str] | None = None) -> list[Path]:
    """Bring every generated file under `root` up to date and return those that changed.

    `more` adds blocks of others by name. Without Graphviz's `dot` on the path the SVG files stay
    as they are, and `stale` keeps reporting those that are not of this chart.
    """
    changed = []
    for path, text in _texts(root, more or {}):
        if _read(path) != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    for path, source in _pictures(root):
        if not _is_made_from(path, source) and (picture := svg(source)) is not None:
            path.write_text(picture, encoding="utf-8")
            changed.append(path)
    return changed


def stale(root: Path, more: Mapping[str, str] | None = None) -> list[Path]:
    """The generated files under `root` that are missing or not what the charts say."""
    texts = [path for path, text in _texts(root, more or {}) if _read(path) != text]
    pictures = [path for path, source in _pictures(root) if not _is_made_from(path, source)]
    return texts + pictures


def blocks(diagrams: str = "diagrams") -> dict[str, str]:
    """Every block a document may ask for, by name: `<chart>-diagram`, `-states`, `-rows`, ...

    `diagrams` is the way from the document to the folder of the pictures.
    """
    found = {}
    for chart in CHARTS:
        # Graphviz lays the boxes out better than any viewer of Mermaid, so it is the picture.
        picture = f"{diagrams}/{chart.name}.svg"
        found[f"{chart.name}-diagram"] = f"![The {chart.name} machine]({picture})\n"
        legend = draw.mermaid_legend(chart)
        found[f"{chart.name}-mermaid"] = f"{legend}```mermaid\n{draw.mermaid(chart)}```\n"
        found[f"{chart.name}-states"] = tables.state_table(chart)
        found[f"{chart.name}-facts"] = tables.fact_table(chart)
        found[f"{chart.name}-guards"] = tables.guard_table(chart)
        found[f"{chart.name}-rows"] = tables.row_table(chart)
        found[f"{chart.name}-grid"] = tables.grid(chart)
    found["leg-outcomes"] = tables.table(
        ("ends as", "outcome", "says to the breaker"),
        ((f"**{s.value}**", f"`{OUTCOMES[s]}`", VERDICTS[s]) for s in OUTCOMES),
    )
    return found


def svg(source: str) -> str | None:
    """The picture of a DOT text, marked with its hash; None without Graphviz's `dot`.

    Raises NotDrawn.
    """
    program = shutil.which("dot")
    if program is None:
        return None
    try:
        rendered = subprocess.run(
            [program, "-Tsvg"],
            input=source,
            capture_output=True,
            check=True,
            encoding="utf-8",
            timeout=_RENDER_SECONDS_MAX,
        ).stdout
    except subprocess.CalledProcessError as problem:
        said = " ".join(problem.stderr.split()) or "without a word"
        raise NotDrawn(f"{program} has failed ({problem.returncode}): {said}") from None
    except subprocess.TimeoutExpired:
        raise NotDrawn(f"{program} has not ended within {_RENDER_SECONDS_MAX} s") from None
    return f"{rendered.rstrip()}\n{_mark(source)}\n"


def _texts(root: Path, more: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    for chart in CHARTS:
        yield root / "diagrams" / f"{chart.name}.mmd", draw.mermaid(chart)
        yield root / "diagrams" / f"{chart.name}.dot", draw.dot(chart)
        yield root / "diagrams" / f"{chart.name}.md", _page(chart)
    yield root / "diagrams" / "request-path.dot", _example()
    for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        text = _read(path)
        if text is not None and _BLOCK.search(text):
            diagrams = Path(os.path.relpath(root / "diagrams", path.parent)).as_posix()
            yield path, _filled(path, text, {**blocks(diagrams), **more})


def _page(chart: Chart) -> str:
    """One machine on a page of its own, with its picture in both forms."""
    made = blocks(".")
    parts = [
        f"# {chart.name}\n\nWritten by `baton diagrams` from `statemachines/{chart.name}.py`.\n",
        made[f"{chart.name}-diagram"],
    ]
    for name, title in _PARTS.items():
        # A table without rows has two lines.
        if made[f"{chart.name}-{name}"].count("\n") > 2:
            parts.append(f"## {title}\n\n{made[f'{chart.name}-{name}']}")
    return "\n".join(parts)


def _filled(path: Path, text: str, made: Mapping[str, str]) -> str:
    def fill(block: re.Match[str]) -> str:
        if block["name"] not in made:
            raise UnknownBlock(f"{path.name}: no generated block is called {block['name']}")
        return f"{block['open']}{made[block['name']]}{block['close']}"

    return _BLOCK.sub(fill, text)


def _pictures(root: Path) -> Iterator[tuple[Path, str]]:
    for chart in CHARTS:
        yield root / "diagrams" / f"{chart.name}.svg", draw.dot(chart)
    yield root / "diagrams" / "request-path.svg", _example()


def _example() -> str:
    """A request that was retried once and moved once, painted on its diagram."""
    life = Life(REQUEST, "7f3a", REQUEST.initial)
    for seconds, fact, target in _EXAMPLE:
        rows = [e for e in REQUEST.legal(life.state, fact) if e.target.value == target]
        if not rows:
            raise NotDrawn(
                f"the example path of {Path(__file__).name} (_EXAMPLE) takes a row that is not "
                f"there: {life.state.value} --{fact}--> {target}"
            )
        (row,) = rows
        life.path.append((seconds, life.fire(fact, row)))
    return draw.dot(REQUEST, path_paint(life.name, life.path, stays=life.total_stays()))


def _is_made_from(path: Path, source: str) -> bool:
    text = _read(path)
    return text is not None and text.endswith(f"{_mark(source)}\n")


def _mark(source: str) -> str:
    return f"<!-- made from DOT text with sha256 {hashlib.sha256(source.encode()).hexdigest()} -->"


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
