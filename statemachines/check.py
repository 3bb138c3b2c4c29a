"""The model check as one call: every world explored, every promise reported.

It decides nothing: whoever calls it looks at `Report.is_good` and chooses an exit status.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from attrs import frozen

from statemachines import worlds
from statemachines.explore import Found, Model, explore

__all__ = ["Report", "models", "run_checks"]


@frozen
class Report:
    """What every exploration found, in a fixed order."""

    found: tuple[Found, ...]

    @property
    def is_good(self) -> bool:
        return not any(each.broken for each in self.found)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        lines = []
        for each in self.found:
            broken = {breach.promise for breach in each.broken}
            lines.append(f"{each.model}: {each.worlds} states, {each.steps} steps")
            for promise in each.promises:
                lines.append(f"  {'BROKEN' if promise in broken else 'holds '}  {promise}")
        for each in self.found:
            for breach in each.broken:
                lines += ["", f"{each.model}, {breach}"]
        worlds_seen = sum(each.worlds for each in self.found)
        promises = sum(len(each.promises) for each in self.found)
        failed = sum(len(each.broken) for each in self.found)
        lines += ["", f"{worlds_seen} states, {promises} promises, {failed} broken"]
        return lines


def run_checks(tell: Callable[[str, int, int], None] | None = None) -> Report:
    """Explore every world to its end; takes about a second.

    `tell` hears of progress: the model, the worlds that were looked at, those that wait.
    """
    found = []
    for model in models():
        progress = None if tell is None else partial(tell, model.name)
        found.append(explore(model, progress=progress))
    return Report(tuple(found))


def models() -> list[Model[Any]]:
    """Every model that is checked, in the order of the report."""
    # Their worlds have nothing in common but to be hashable.
    return [
        worlds.life(),
        worlds.pair(),
        worlds.breaker(),
        worlds.worker(),
        worlds.router(),
        worlds.handback(),
    ]
