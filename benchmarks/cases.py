"""The loads under which candidates are compared.

A case says what the workers and the clients do, never what a router does. Tokens per stream are
more than a run can deliver where only events are to be counted, and few where the point is that
streams begin and end.
"""

from typing import Literal

from attrs import frozen

ENDLESS = 1_000_000


@frozen
class Case:
    name: str
    text: str
    mode: Literal["unary", "stream"]
    connections: int
    tokens: int = 16
    prompt_bytes: int = 400
    rate: float = 0
    """Tokens per second and stream; 0 is as fast as the sockets take them."""
    stepped: bool = False
    """All streams emit at the same instants, as those of one engine batch do."""
    ramp_seconds: float = 0.1

    @property
    def operation(self) -> str:
        return "request" if self.mode == "unary" else "event"


CASES = (
    Case("unary", "64 clients, 400-byte prompts, unary answers", "unary", 64),
    Case("unary32k", "the same with 32 KB prompts", "unary", 64, prompt_bytes=32_000),
    Case("p128", "128 streams, 30 events/s each", "stream", 128, ENDLESS, rate=30, ramp_seconds=1),
    Case(
        "p1000", "1000 streams, 30 events/s each", "stream", 1000, ENDLESS, rate=30, ramp_seconds=1
    ),
    Case("s128", "128 streams in step, 30 bursts/s", "stream", 128, ENDLESS, rate=30, stepped=True),
    Case("flat", "64 streams of 1000 events, unpaced", "stream", 64, 1000),
    Case(
        "churn",
        "512 clients, streams of 60 events and 2 s",
        "stream",
        512,
        60,
        rate=30,
        ramp_seconds=2,
    ),
)
DEFAULT_CASES = ("unary", "p128", "p1000", "s128", "flat", "churn")


def named(name: str) -> Case:
    """The case of that name; KeyError names those there are."""
    for case in CASES:
        if case.name == name:
            return case
    raise KeyError(f"no case {name!r}; there are {', '.join(case.name for case in CASES)}")
