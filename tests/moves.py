"""Short words for stories about streams that lose their worker."""

from __future__ import annotations

from tests.simulate import Client, Engine, Outcome, Plan, simulate

#: What a first worker does: its first request is cut when the client has three tokens of it.
CUT = "request=1:cut,after_events=4"
#: A silent worker is asked how it is every second of this (seconds).
PATIENCE = 20.0
LONG = Client(tokens=10, extra={"stream_options": {"include_usage": True}})
PLAIN = Client(tokens=10)


def lose(
    fault: str = CUT,
    client: Client = LONG,
    *,
    kinds: str = "vllm vllm",
    limit: int = 1,
    others: tuple[Client, ...] = (),
    happenings: tuple[tuple[float, str], ...] = (),
    looks: tuple[float, ...] = (),
    cuts: int | None = None,
    context_length: int = 4096,
    **settings: object,
) -> Outcome:
    """One stream on engines of these kinds, the first of which suffers a fault."""
    first, *rest = kinds.split()
    return simulate(
        Plan(
            engines=(
                Engine(kind=first, faults=fault, context_length=context_length),
                *(Engine(kind=kind, context_length=context_length) for kind in rest),
            ),
            clients=(client, *others),
            settings={"migration_limit": limit, "stream_idle_timeout_secs": PATIENCE} | settings,
            happenings=happenings,
            looks=looks,
            cuts=cuts,
        )
    )


def is_whole(outcome: Outcome) -> bool:
    """The first client has a whole answer; which it is, the promises look at."""
    return (outcome.got[0].ending, outcome.got[0].is_done) == ("clean", True)


def is_told(outcome: Outcome) -> bool:
    """The first client has seen its stream fail."""
    got = outcome.got[0]
    return (got.status, got.ending, got.is_done) == (200, "cut", False) and got.error is not None


def more(**fields: object) -> Client:
    """A chat that asks for more."""
    return Client(tokens=10, extra=fields)


def completion(**fields: object) -> Client:
    """A completion that asks for more."""
    return Client(tokens=10, chat=False, extra=fields)
