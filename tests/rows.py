"""Plans that between them take every row of every chart, in the real shell.

A row that no plan takes is a row that nobody has seen work. The plans are made from tables: what
breaks an engine, in each state of a request; what ends a request from outside, in each state; and a
few for what is left. `taken` is what a plan takes; nothing else is judged here, since bugs on
purpose are among them.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from statemachines import CHARTS, HANDBACK
from tests.plans import Client, Engine, Plan

Row = tuple[str, str, str, str]
#: machine, source, fact, target
EVERY_ROW: list[Row] = [
    (chart.name, str(edge.source.value), edge.fact, str(edge.target.value))
    for chart in CHARTS
    if chart is not HANDBACK  # the agent's: each row has a test in tests/test_agent_parts.py
    for edge in chart.edges
]

MOVE: dict[str, object] = {
    "migration_limit": 1,
    "suspect_idle_secs": 0.0,
    "first_token_timeout_secs": 5.0,
    "stream_idle_timeout_secs": 5.0,
}
STAY = MOVE | {"migration_limit": 0, "request_max_retries": 0}
#: Content of a grammar goes on nowhere else, but only a router that moves streams looks.
POISON: dict[str, object] = {"regex": "[a-z]*"}

#### Engines that break, in each state of a request

BREAKS = ("cut", "hang", "abort", "error_event", "error_event,code=400", "error_event,code=503")
#: Events that the client has by then, and what else it asks for.
STATES: dict[str, tuple[int, dict[str, object]]] = {
    "dispatching": (0, {}),
    "committed": (1, {}),
    "streaming": (4, {}),
    "poisoned": (4, POISON),
}


def broken() -> Iterator[Plan]:
    for events, extra in STATES.values():
        for fault in BREAKS:
            engines = (Engine(faults=f"{fault},after_events={events}"), Engine())
            for settings in (MOVE, STAY):
                asked = (Client(extra=extra),)
                yield Plan(engines=engines, clients=asked, settings=settings)
        # Everything is delivered but the end.
        ended = Engine(faults="cut,at=finish")
        yield Plan(engines=(ended,), clients=(Client(extra=extra),), settings=MOVE)
    for fault in ("status", "status,code=400", "cut,at=request", "hang", "refuse"):
        yield Plan(engines=(Engine(faults=fault), Engine()), settings=MOVE)
        yield Plan(engines=(Engine(faults=fault),), settings=STAY)


def broken_again() -> Iterator[Plan]:
    """The next worker of a stream that moves breaks, too."""
    first = Engine(faults="cut,after_events=4")
    for fault in ("status", "status,code=400", "cut,at=request", "hang", "abort", "error_event"):
        second = Engine(faults=fault)
        for others in ((), (Engine(),)):
            yield Plan(engines=(first, second, *others), settings=MOVE)


#### What ends a request from outside, in each state

#: Engines, the client's wishes, settings and happenings with which a request stays in a state from
#: 1.7 s to at least 2.5 s.
HELD: dict[str, Plan] = {
    "queued": Plan(
        engines=(Engine(faults="hang"),),
        clients=(Client(), Client(at=0.5)),
        settings={"max_concurrent_requests": 1},
    ),
    "connecting": Plan(
        engines=(Engine(),),
        clients=(Client(at=1.5),),
        settings={"worker_keep_alive_secs": 0.1, "connect_timeout_secs": 20.0},
        happenings=((1.0, "silent 0"),),
    ),
    "waiting": Plan(engines=(Engine(faults="hang"),)),
    "answering": Plan(engines=(Engine(faults="hang,at=head"),)),
    "committed": Plan(engines=(Engine(faults="hang,after_events=1"),)),
    "streaming": Plan(engines=(Engine(faults="hang,after_events=4"),)),
    "poisoned": Plan(
        engines=(Engine(faults="hang,after_events=4"),), clients=(Client(extra=POISON),)
    ),
    "migrating": Plan(
        engines=(
            Engine(faults="request=1:cut,after_events=6"),
            Engine(faults="path=/detokenize:hang"),
        ),
        clients=(Client(tokens=10, extra={"stop": ["###"]}),),
    ),
    "resuming": Plan(engines=(Engine(faults="cut,after_events=4"), Engine(faults="hang"))),
}
HOLDING: dict[str, object] = {
    "migration_limit": 1,
    "suspect_idle_secs": 0.0,
    "health_check_interval_secs": 100.0,
}


def ended_from_outside() -> Iterator[Plan]:
    for held in HELD.values():
        plan = attrs.evolve(held, settings=HOLDING | held.settings)
        *others, last = plan.clients
        leaving = (*others, attrs.evolve(last, leaves_at=2.0))
        late = plan.settings | {"request_timeout_secs": 2.0}
        stopped = plan.settings | {"drain_timeout_secs": 0.1}
        yield attrs.evolve(plan, clients=leaving)
        yield attrs.evolve(plan, settings=late)
        yield attrs.evolve(plan, settings=stopped, happenings=(*plan.happenings, (1.9, "stop")))
        yield attrs.evolve(plan, happenings=(*plan.happenings, (1.9, "crash")))
        drained = (*plan.happenings, (1.9, "drain 0 0"))
        another = Engine(kind=plan.engines[0].kind)
        for engines in (plan.engines, (*plan.engines, another)):
            yield attrs.evolve(plan, engines=engines, happenings=drained)


#### What is left

SGLANG = Engine(kind="sglang")
PREFILL = Engine(kind="sglang", role="prefill", options="engine=sglang")
DECODE = Engine(kind="sglang", role="decode", options="engine=sglang", first_token_seconds=0.0)
LATE_HEALTH = "path=/health:status,code=503"
#: A stop string that the next worker completes with its first token, before any of it is shown.
ACROSS: dict[str, object] = {"stop": ["day are好"], "include_stop_str_in_output": True}
EMPTY: dict[str, object] = {"max_tokens": 0}


def with_faults(engine: Engine, faults: str) -> Engine:
    return attrs.evolve(engine, faults=faults)


def of_requests() -> Iterator[Plan]:
    # Ends without content, and whole answers.
    yield Plan(engines=(SGLANG,), clients=(Client(extra=EMPTY),))
    yield Plan(
        engines=(with_faults(SGLANG, "cut,at=finish"),),
        clients=(Client(extra=EMPTY),),
        settings=MOVE,
    )
    yield Plan(clients=(Client(stream=False),))
    # Content that nobody could go on with, from the first token on and later.
    yield Plan(clients=(Client(chat=False),), settings=MOVE)
    yield Plan(clients=(Client(chat=False, extra={"prompt": ["once"]}),), settings=MOVE)
    yield Plan(engines=(with_faults(SGLANG, "parse,what=tool_call,event=3"),), settings=MOVE)
    # Errors behind the head and before any content: SGLang tells its role with its first token.
    for fault in ("error_event", "error_event,code=400", "abort", "cut", "hang"):
        for settings in (MOVE, STAY):
            for events in (3,):
                broken = Engine(faults=f"{fault},after_events={events}")
                yield Plan(engines=(broken, Engine()), settings=settings)
    # Moves that end at once, and moves that go on badly.
    yield Plan(
        engines=(with_faults(SGLANG, "cut,after_events=7"),),
        clients=(Client(tokens=10),),
        settings=MOVE,
    )
    for second in ("", "cut,at=finish", "hang,after_events=0", "status", "status,code=429"):
        yield Plan(
            engines=(Engine(faults="cut,after_events=1"), Engine(faults=second)),
            clients=(Client(extra=POISON),),
            settings=MOVE,
        )
        yield Plan(
            engines=(Engine(faults="cut,after_events=7"), Engine(faults=second)),
            clients=(Client(tokens=10, extra=ACROSS),),
            settings=MOVE,
        )
    yield Plan(
        engines=(Engine(faults="cut,after_events=4"), Engine(), Engine()),
        settings=MOVE,
        happenings=((0.5, "faults 1 now:refuse"),),
    )
    yield Plan(
        engines=(Engine(faults="cut,after_events=4"), Engine(faults="hang"), Engine()),
        settings=MOVE | {"first_token_timeout_secs": 100.0},
        happenings=((3.0, "drain 1 0"),),
    )
    # A place comes free in the moment in which the time of the one that waits is up.
    yield Plan(
        engines=(Engine(faults="hang"),),
        clients=(Client(at=0.0), Client(at=0.0)),
        settings={"max_concurrent_requests": 1, "request_timeout_secs": 5.0},
    )
    yield Plan(
        engines=(Engine(),),
        clients=(Client(at=2.0),),
        settings=HOLDING | {"worker_keep_alive_secs": 0.1},
        happenings=((1.0, "silent 0"),),
    )


def of_strange_workers() -> Iterator[Plan]:
    """Continuations by engines that say what no engine of ours says; no connection for long."""
    first = Engine(faults="cut,after_events=4")
    yield Plan(engines=(first, Engine(script="head@3,two@4")), settings=MOVE)
    # Nothing was missing but the end of the text, and then the end mark is.
    yield Plan(
        engines=(
            Engine(faults="cut,after_events=11", eos_every=3),
            Engine(faults="cut,at=finish", eos_every=3),
        ),
        clients=(Client(tokens=30, extra={"ignore_eos": False}),),
        settings=MOVE,
    )
    yield Plan(
        engines=(
            with_faults(PREFILL, "request=2:hang,at=head"),
            with_faults(DECODE, "cut,after_events=5"),
            attrs.evolve(DECODE, script="head@3,two@4"),
        ),
        settings=MOVE | {"first_token_timeout_secs": 100.0, "stream_idle_timeout_secs": 100.0},
        happenings=((5.0, "faults 0 now:server_dies"),),
    )
    yield Plan(
        engines=(Engine(),),
        clients=(Client(at=1.5),),
        settings=STAY | {"worker_keep_alive_secs": 0.1, "connect_timeout_secs": 20.0},
        happenings=((1.0, "silent 0"),),
    )


def of_agents() -> Iterator[Plan]:
    """An agent hands back what can move no more, or what it should not have."""
    for events in (1, 4):
        yield Plan(
            engines=(Engine(wire="nats", faults=f"hang,after_events={events}"),),
            settings=STAY,
            happenings=((3.0, "give_back 0"),),
        )
    parsing = "parse,what=tool_call,event=3;hang,after_events=5"
    yield Plan(
        engines=(attrs.evolve(SGLANG, wire="nats", faults=parsing), Engine()),
        settings=MOVE,
        happenings=((3.0, "leave 0"),),
    )


def of_pairs() -> Iterator[Plan]:
    dies = "alone;cut,at=head"
    yield Plan(engines=(with_faults(PREFILL, dies), DECODE))
    yield Plan(
        engines=(with_faults(PREFILL, f"request=1:{dies}"), DECODE, PREFILL),
        settings={"pd_max_retries": 1},
    )
    yield Plan(engines=(with_faults(PREFILL, dies), with_faults(DECODE, "early_head")))
    yield Plan(
        engines=(PREFILL, DECODE),
        clients=(Client(at=2.0),),
        settings=HOLDING
        | {
            "worker_keep_alive_secs": 0.1,
            "connect_timeout_secs": 20.0,
            "first_token_timeout_secs": 2.0,
        },
        happenings=((1.0, "silent 0"),),
    )
    for extra in ({}, POISON):
        yield Plan(
            engines=(with_faults(PREFILL, "linger,seconds=50"), DECODE),
            clients=(Client(extra=extra),),
            settings=MOVE,
            happenings=((1.25, "faults 0 now:server_dies"),),
        )
    for others in ((), (PREFILL,)):
        yield Plan(
            engines=(
                PREFILL,
                with_faults(PREFILL, "status,code=500"),
                with_faults(DECODE, "cut,after_events=5"),
                DECODE,
                *others,
            ),
            clients=(Client(chat=False),),
            settings=MOVE,
        )


def of_workers() -> Iterator[Plan]:
    ill = Engine(faults=LATE_HEALTH)
    often: dict[str, object] = {"health_check_interval_secs": 1.0}
    yield Plan(
        engines=(Engine(), ill),
        happenings=((1.0, "drain 1"), (2.0, "undrain 1"), (3.0, "remove 1")),
    )
    yield Plan(happenings=((1.0, "drain 1"), (2.0, "drain 1"), (3.0, "remove 1")))
    yield Plan(happenings=((1.0, "remove 1"),))
    for what in ("drain 1", "remove 1", "heal 1"):
        yield Plan(
            settings=often,
            happenings=((1.0, f"faults 1 {LATE_HEALTH}"), (10.0, what)),
            clients=(Client(at=20.0),),
        )
    yield Plan(
        settings=often,
        happenings=((1.0, "drain 1"), (1.5, f"faults 1 {LATE_HEALTH}")),
        clients=(Client(at=10.0),),
    )


def of_breakers() -> Iterator[Plan]:
    """Requests at their moments, and faults that come and go between them."""
    quick: dict[str, object] = {
        "breaker_failure_threshold": 1,
        "breaker_cooldown_secs": 10.0,
        "request_max_retries": 0,
    }
    slow = Engine(token_seconds=1.0)

    def asked(*moments: float, **more: float) -> tuple[Client, ...]:
        return tuple(Client(at=at, **more) for at in moments)  # type: ignore[arg-type]

    # Sent anyway: it ends well, badly, and neutrally; then the probe, which does the same.
    for fault in ("", "request=2:cut,at=head", "request=2:status,code=429"):
        engine = Engine(faults=f"request=1:cut,at=head;{fault}".rstrip(";"))
        yield Plan(engines=(engine,), clients=asked(0, 1), settings=quick)
        yield Plan(engines=(engine,), clients=asked(0, 20), settings=quick)
    # Begun before it opened, and over while it is open, half open.
    for events in (6, 16):
        for end in ("cut", "abort", "error_event,code=400"):
            first = f"request=1:{end},after_events={events}"
            yield Plan(
                engines=(attrs.evolve(slow, faults=f"{first};request=2:cut,at=head"),),
                clients=(Client(tokens=40), Client(at=1), Client(at=12, tokens=20)),
                settings=quick,
            )
    for tokens in (6, 16):
        yield Plan(
            engines=(attrs.evolve(slow, faults="request=2:cut,at=head"),),
            clients=(Client(tokens=tokens), Client(at=1), Client(at=12, tokens=20)),
            settings=quick,
        )
    # A good end, and none, while it is closed and has a failure; left while it is not closed.
    for second in (Client(at=1), Client(at=1, leaves_at=1.5)):
        yield Plan(
            engines=(Engine(faults="request=1:cut,at=head"),),
            clients=(Client(), second),
            settings=quick | {"breaker_failure_threshold": 2},
        )
    for leaves_at in (5.0, 13.0):
        engine = attrs.evolve(slow, faults="request=2:cut,at=head")
        yield Plan(
            engines=(engine,),
            clients=(Client(tokens=20, leaves_at=leaves_at), Client(at=1), Client(at=12.0)),
            settings=quick,
        )
    # Sent anyway while the probe is out, and faster.
    yield Plan(
        engines=(Engine(faults="request=1:cut,at=head;request=2:delay,first_token=5"),),
        clients=asked(0, 20, 21),
        settings=quick,
    )


def behind_nats() -> Iterator[Plan]:
    """A worker that is not there, for a request and for a move."""
    there = Engine(wire="nats")
    gone = ((1.5, "leave 1"),)
    yield Plan(
        engines=(there, there),
        clients=(Client(at=2.0), Client(at=2.1)),
        happenings=gone,
        settings=MOVE,
    )
    cut = Engine(wire="nats", faults="cut,after_events=20")
    yield Plan(
        engines=(cut, there, there),
        clients=(Client(tokens=40),),
        happenings=gone,
        settings=MOVE,
    )


def of_the_router() -> Iterator[Plan]:
    yield Plan()
    for window in (1.0, 100.0):
        yield Plan(
            engines=(Engine(faults="hang"),),
            settings={"drain_timeout_secs": window},
            happenings=((1.0, "stop"), (3.0, "stop")),
        )


def plans() -> Iterator[Plan]:
    """All of them."""
    for of in (broken, broken_again, ended_from_outside, of_requests, of_pairs, of_workers):
        yield from of()
    yield from of_strange_workers()
    yield from of_agents()
    yield from of_breakers()
    yield from behind_nats()
    yield from of_the_router()
