"""Inboxes that are remembered for a while: of cancels whose request is still to come, for one.

A cancel may overtake its request, which may lie in a work queue for long; forgotten, the engine
would later compute for nobody. Pure; bounded in number and in age.
"""

from __future__ import annotations

from collections import OrderedDict

from attrs import define, field


@define(eq=False)
class Tombstones:
    """Names with the time at which they were put; the oldest go first."""

    count_max: int
    age_seconds_max: float
    _put_at: OrderedDict[str, float] = field(factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._put_at)

    def put(self, name: str, now: float) -> None:
        """Remember it, from now on."""
        self._put_at[name] = now
        self._put_at.move_to_end(name)
        self._age(now)
        while len(self._put_at) > self.count_max:
            self._put_at.popitem(last=False)

    def has(self, name: str, now: float) -> bool:
        """Whether it is remembered."""
        self._age(now)
        return name in self._put_at

    def take(self, name: str, now: float) -> bool:
        """Whether it was remembered; it is not any more."""
        self._age(now)
        return self._put_at.pop(name, None) is not None

    def _age(self, now: float) -> None:
        while self._put_at:
            name, put_at = next(iter(self._put_at.items()))
            if now - put_at < self.age_seconds_max:
                return
            del self._put_at[name]
