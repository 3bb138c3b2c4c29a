"""Stop strings that begin before a break and end after it.

The next engine looks only at what it generates itself, so the router looks at the seam: at matches
that begin in the text before it and end in the text after it. Whatever could be the beginning of
one is held until it is decided; matches inside the new text are the engine's own.

vLLM holds text back while it looks for stop strings, so that a match across the seam would be seen
some tokens late and usage would count them. Where the text before the seam could begin a match,
vLLM is therefore asked to leave stop strings in (then it holds nothing back), and the router looks
for all of them itself: it `owns` them.
"""

from __future__ import annotations

from collections.abc import Sequence

#: How much text that was looked through is kept before it is cut off.
_PASSED_MAX = 4096


def could_straddle(text: str, stops: Sequence[str]) -> bool:
    """Whether the end of a text could be the beginning of a stop string."""
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


class StopSeam:
    """Looks across one seam.

    `before` is all text of the tokens before the seam, of which the last `waiting` characters were
    not delivered. `keeps` leaves a stop string in the answer, as the client wished.
    """

    __slots__ = (
        "_checked",
        "_keeps",
        "_longest",
        "_owns",
        "_seam",
        "_sent",
        "_stops",
        "_window",
        "hit",
        "is_done",
        "surplus",
    )

    def __init__(
        self, before: str, waiting: int, stops: Sequence[str], *, keeps: bool, owns: bool = False
    ) -> None:
        self._longest = max(map(len, stops), default=0)
        reach = max(self._longest - 1, waiting)
        self._window = before[-reach:] if reach else ""
        self._seam = len(self._window)
        self._sent = self._seam - waiting
        #: Matches that end before this place are nobody's business any more.
        self._checked = self._seam
        self._stops = stops
        self._keeps = keeps
        self._owns = owns
        #: The stop string that was found.
        self.hit: str | None = None
        #: How many characters came after it, in the piece that completed it.
        self.surplus = 0
        #: Nothing is held and nothing can be found any more: text passes.
        self.is_done = not waiting and not stops

    @property
    def waiting(self) -> str:
        """What was taken in and not given out; after a hit it is no part of the answer."""
        return "" if self.hit is not None else self._window[self._sent :]

    def feed(self, text: str, *, is_last: bool = False, may_stop: bool = True) -> str:
        """The text that may go to the client now; after a hit nothing more.

        `may_stop` is false for text of vLLM's that is within the client's `min_tokens`: it does not
        look for stop strings that end there.
        """
        if self.is_done:
            return "" if self.hit is not None else text
        self._window += text
        found = self._find() if may_stop and text else None
        self._checked = len(self._window)
        if found is not None:
            cut, self.hit, end = found
            self.surplus, self.is_done = len(self._window) - end, True
            return self._give(cut)
        undecided = len(self._window) if is_last else self._first_undecided()
        self.is_done = is_last or (not self._owns and undecided == len(self._window))
        given = self._give(undecided)
        self._forget()
        return given

    def _find(self) -> tuple[int, str, int] | None:
        """Where to cut, by which stop string, and its end: of the matches the first to end."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = self._window.find(stop, max(0, self._checked - len(stop) + 1))
            is_ours = at >= 0 and (self._owns or at < self._seam)
            if is_ours and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is None:
            return None
        end, at, stop = best
        return (end if self._keeps else at), stop, end

    def _first_undecided(self) -> int:
        """Where what could still become a match begins."""
        end = len(self._window)
        first = max(0, end - self._longest + 1)
        for at in range(first, end if self._owns else min(end, self._seam)):
            rest = self._window[at:]
            if any(len(rest) < len(stop) and stop.startswith(rest) for stop in self._stops):
                return at
        return end

    def _give(self, end: int) -> str:
        start, self._sent = self._sent, max(end, self._sent)
        return self._window[start : self._sent]

    def _forget(self) -> None:
        passed = self._sent - self._longest
        if passed > _PASSED_MAX:
            self._window = self._window[passed:]
            self._sent -= passed
            self._seam -= passed
            self._checked -= passed
