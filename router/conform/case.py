"""What a case is, and the table they enter when they are written down."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from attrs import field, frozen

from router.conform.stage import Actor, Stage

Play = Callable[[Stage], Awaitable[None]]

KNOBS = {
    "round_robin": "requests go to the engines in turn",
    "least_load": "a request goes to the engine with the fewest",
    "cap": "so many requests at a time; others wait",
    "queue": "so many may wait",
    "silence": "seconds after which an engine that says nothing is given up",
    "breaker": "failures in a row after which an engine is left alone for a minute",
    "health": "seconds between two health checks; two bad ones in a row are enough",
    "body_max": "bytes of a request's body",
    "models": "engines serve different models",
    "migration": "a stream whose engine dies goes on elsewhere",
    "pd_retries": "pairs tried after the first, while the client has got nothing",
    "drain": "seconds that requests have to end after SIGTERM",
}
"""What a case may want of a router's command line, in the kit's own words."""


@frozen
class Case:
    """One complaint, tried.

    `needs` are knobs without which it means nothing; `wishes` are turned where a router has them.
    """

    name: str
    complaint: str
    done: str
    expected: str
    play: Play
    actors: tuple[Actor, ...] = (Actor(), Actor())
    needs: Mapping[str, str] = field(factory=dict)
    wishes: Mapping[str, str] = field(factory=dict)
    seconds: float = 60.0
    is_heavy: bool = False
    """It wants the machine for itself."""

    @property
    def is_pd(self) -> bool:
        return any(actor.role != "mixed" for actor in self.actors)


CASES: list[Case] = []
"""All of them, in the order of the modules that were imported."""


def case(
    complaint: str,
    *,
    done: str,
    expected: str,
    actors: tuple[Actor, ...] = (Actor(), Actor()),
    needs: Mapping[str, str] | None = None,
    wishes: Mapping[str, str] | None = None,
    seconds: float = 60.0,
    is_heavy: bool = False,
) -> Callable[[Play], Play]:
    """Enter a function in the table under its own name."""

    def enter(play: Play) -> Play:
        name = getattr(play, "__name__", "").replace("_", "-")
        found = Case(
            name=name,
            complaint=complaint,
            done=done,
            expected=expected,
            play=play,
            actors=actors,
            needs=needs or {},
            wishes=wishes or {},
            seconds=seconds,
            is_heavy=is_heavy,
        )
        CASES.append(found)
        return play

    return enter
