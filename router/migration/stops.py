"""Stop strings that begin before a break and end after it.

The next engine looks only at what it generates itself, so the router looks at the seam: at matches
that begin in the text before it and end in the text after it. Whatever could be the beginning of
one is held until it is decided; matches inside the new text are the engine's own.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopSeam:
    """Looks across one seam.

    `before` is all text of the tokens before the seam, of which the last `waiting` characters were
    not delivered. `keeps` leaves a stop string in the answer, as the client wished.
    """

    __slots__ = ("_keeps", "_seam", "_sent", "_stops", "_window", "hit", "is_done")

    def __init__(self, before: str, waiting: int, stops: Sequence[str], *, keeps: bool) -> None:
        reach = max(max(map(len, stops), default=0) - 1, waiting)
        self._window = before[-reach:] if reach else ""
        self._seam = len(self._window)
        self._sent = self._seam - waiting
        self._stops = stops
        self._keeps = keeps
        #: The stop string that was found across the seam.
        self.hit: str | None = None
        #: Nothing is held and nothing can be found any more: text passes.
        self.is_done = not waiting and not stops

    @property
    def waiting(self) -> str:
        """What was taken in and not given out; after a hit it is no part of the answer."""
        return "" if self.hit is not None else self._window[self._sent :]

    def feed(self, text: str, *, is_last: bool = False, may_stop: bool = True) -> str:
        """The text that may go to the client now; after a hit nothing more.

        `may_stop` is false while the client's `min_tokens` are not reached: engines do not look
        for stop strings before.
        """
        if self.is_done:
            return "" if self.hit is not None else text
        self._window += text
        found = self._find() if may_stop else None
        if found is not None:
            self.hit, self.is_done = found[1], True
            return self._give(found[0])
        undecided = len(self._window) if is_last else self._first_undecided()
        self.is_done = undecided == len(self._window)
        return self._give(undecided)

    def _find(self) -> tuple[int, str] | None:
        """Where to cut and by which stop string: of the matches the one that ends first."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = self._window.find(stop, max(0, self._seam - len(stop) + 1))
            if 0 <= at < self._seam and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is None:
            return None
        end, at, stop = best
        return (end if self._keeps else at), stop

    def _first_undecided(self) -> int:
        """Where what could still become a match across the seam begins."""
        longest = max(map(len, self._stops), default=0)
        for at in range(max(0, self._seam - longest + 1), self._seam):
            rest = self._window[at:]
            if any(len(rest) < len(stop) and stop.startswith(rest) for stop in self._stops):
                return at
        return len(self._window)

    def _give(self, end: int) -> str:
        start, self._sent = self._sent, max(end, self._sent)
        return self._window[start : self._sent]
