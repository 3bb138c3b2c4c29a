"""The table of all breaks: what moved how, and what its client read."""

from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles

from attrs import Factory, define

from tests.real.judging import Break, Verdict

FILE = Path("build/real-migration.md")
DETAILS = Path("build/real-migration-details.txt")
HEAD = (
    "engines",
    "break",
    "endpoint",
    "mode",
    "breaks",
    "identical",
    "other tail",
    "failed visibly",
    "engine's own",
    "wrong",
    "gap median",
    "gap p99",
)


@define(eq=False)
class Tally:
    """Breaks of a whole run."""

    breaks: list[Break] = Factory(list)

    def add(self, breaks: list[Break]) -> None:
        self.breaks += breaks
        self.publish()

    def table(self) -> str:
        rows: dict[tuple[str, str, str, str], list[Break]] = defaultdict(list)
        for each in self.breaks:
            rows[each.pair, each.how, each.endpoint, each.mode].append(each)
        lines = [HEAD, tuple("---" for _ in HEAD)]
        lines += [(*key, *_numbers(rows[key])) for key in sorted(rows)]
        if self.breaks:
            lines.append(("all", "", "", "", *_numbers(self.breaks)))
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def publish(self) -> None:
        """Print it, and write it where documents are made of it."""
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(self.table(), encoding="utf-8")
        details = [each for each in self.breaks if each.verdict is not Verdict.IDENTICAL]
        DETAILS.write_text(
            "\n\n".join(f"{each.verdict.value} ({each.mode}) {each.detail}" for each in details),
            encoding="utf-8",
        )
        print(f"\n{self.table()}")


def _numbers(breaks: list[Break]) -> tuple[str, ...]:
    gaps = [1000 * each.gap_seconds for each in breaks if each.gap_seconds is not None]
    middle = f"{median(gaps):.0f} ms" if gaps else ""
    worst = f"{quantiles(gaps, n=100)[-1]:.0f} ms" if len(gaps) > 1 else middle
    counts = [sum(each.verdict is verdict for each in breaks) for verdict in Verdict]
    return (str(len(breaks)), *map(str, counts), middle, worst)
