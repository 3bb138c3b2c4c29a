"""Who an exchange deals with beside its client and its leg, as it sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from router.answering import Answering
from router.legs import Leg

if TYPE_CHECKING:
    from router.exchange import Exchange


class Observer(Protocol):
    """Whose request it is: who began it, and ends what it holds."""

    def conclude(self, exchange: Exchange) -> None:
        """The request's machine has come to its end; called once."""

    def has_other_way(self, exchange: Exchange) -> bool:
        """Some worker that could take the request is not behind a message broker."""

    def crashed(self, exchange: Exchange, error: Exception) -> None:
        """A bug of ours was met in this request, which may be over by now."""


class Pair(Protocol):
    """The attempt on two workers that the leg is one half of."""

    @property
    def awaited(self) -> Leg | None:
        """The leg that is waited for while decode is not sent."""

    def on_decode_head(self, leg: Leg, status: int, answering: Answering) -> Answering:
        """Decode has answered; who reads the rest of it."""

    def meets_silence(self, leg: Leg, *, is_stalled: bool) -> bool:
        """A leg is silent; whether its partner explains it, and what follows is done."""

    def leave(self, fact: str) -> None:
        """The attempt is over, by this fact of the request."""

    def drop(self) -> None:
        """The same after a bug that may have come in between; gives back what is still held."""
