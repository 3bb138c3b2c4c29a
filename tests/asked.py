"""Who asked a wire for something, and writes down what it is told."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from router.headers import Headers


@define(eq=False)
class Asked:
    """Records what it is told, in order; `when` does something at one of these moments.

    A head is its status; what comes with details is a tuple: `("too large", limit)`.
    """

    told: list[object] = field(factory=list)
    body: bytes = b""
    pieces: int = 0
    headers: Headers = field(factory=list)
    #: Why it broke, for people.
    detail: str = ""
    when: dict[str, Callable[[], None]] = field(factory=dict)

    def on_connected(self) -> None:
        self._note("connected")

    def on_head(self, status: int, headers: Headers) -> None:
        self.headers = headers
        self.told.append(status)
        self._act("head")

    def on_body(self, data: bytes) -> None:
        self.body += data
        self.pieces += 1
        if self.told[-1] != "body":
            self.told.append("body")
        self._act("body")

    def on_end(self) -> None:
        self._note("end")

    def on_broken(self, detail: str, *, connecting: bool) -> None:
        self.detail = detail
        self._note("unreachable" if connecting else "broken")

    def on_handed_back(self) -> None:
        self._note("handed back")

    def on_full(self) -> None:
        self._note("full")

    def on_too_large(self, limit: int) -> None:
        self._note("too large", limit)

    def on_unread(self) -> None:
        self._note("unread")

    def on_missed(self, detail: str) -> None:
        self.detail = detail
        self._note("missed")

    def on_crash(self, error: Exception) -> None:
        self._note("crash", error)

    def _note(self, what: str, *more: object) -> None:
        self.told.append((what, *more) if more else what)
        self._act(what)

    def _act(self, moment: str) -> None:
        self.when.get(moment, lambda: None)()

    @property
    def ends(self) -> int:
        """How many ends it was told of."""
        last = {"end", "broken", "unreachable", "handed back", "missed"}
        return sum(what in last for what in self.told)
