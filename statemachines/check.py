"""The model check as one call: every world explored, every promise reported.

It decides nothing: whoever calls it looks at `Report.is_good` and chooses an exit status. The deep
check explores the same worlds with larger budgets: more workers, requests, tokens and faults. Each
model is forgotten before the next one is begun, so memory is that of the largest.
"""

from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

from attrs import frozen

from statemachines import worlds
from statemachines.explore import Found, Model, explore

__all__ = ["Report", "deep_models", "models", "run_checks"]

#: A deep model that grows past this has lost a bound.
DEEP_WORLDS_MAX = 2_000_000


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
        promises = sum(len(each.promises) for each in self.found)
        failed = sum(len(each.broken) for each in self.found)
        lines += ["", f"{self.worlds} states, {promises} promises, {failed} broken"]
        return lines

    @property
    def worlds(self) -> int:
        """All states that were seen."""
        return sum(each.worlds for each in self.found)


def run_checks(
    tell: Callable[[str, int, int], None] | None = None,
    *,
    deep: bool = False,
    only: Container[str] | None = None,
) -> Report:
    """Explore every world to its end; takes seconds, or with `deep` minutes.

    `tell` hears of progress: the model, the worlds that were looked at, those that wait. `only`:
    names of models; the others are left out.
    """
    found = []
    for model in deep_models() if deep else models():
        if only is not None and model.name not in only:
            continue
        progress = None if tell is None else partial(tell, model.name)
        worlds_max = DEEP_WORLDS_MAX if deep else None
        found.append(explore(model, progress=progress, worlds_max=worlds_max))
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
        worlds.fleet(),
        worlds.wire(),
    ]


def deep_models() -> Iterator[Model[Any]]:
    """The same models with larger budgets, at least a million states in all."""
    yield worlds.life(retries=3, moves=3, workers=6)
    yield worlds.pair(budgets=[(2, 2, 5)])
    yield worlds.breaker(requests=14)
    yield worlds.worker(probes=40, drains=4)
    yield worlds.router(requests=20)
    yield worlds.handback(frames=50)
    yield worlds.fleet(requests=4)
    yield worlds.wire(faults=2, kinds=[(True, True, 3), (False, False, 2)])
