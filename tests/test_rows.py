"""Every row of every chart is taken by the real shell; the report names those that are not."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import trio
import trio.testing

from router.app import App
from router.config import Settings
from router.logs import configure
from router.sockets import Listening
from tests.memory import MemoryNetwork
from tests.rows import EVERY_ROW, Row, plans
from tests.simulate import read_metrics, simulate_unjudged

#: Rows that nothing in the shell can take, and why. One that is taken after all fails the test.
NOT_TAKEN: dict[Row, str] = {
    ("breaker", "closed", "said_nothing", "closed"): "the chart's word for what a closed breaker "
    "is not even told, since nearly every request would tell it: see Breaker.settle",
    ("request", "resuming", "overloaded", "failed"): "the other half of a guarded row. Overloaded "
    "is here a status, and only deaths and events can forbid a further move: when the status of a "
    "continuation comes, what let the move begin still holds",
}


def rows_of(counted: dict[str, float]) -> set[Row]:
    found = set()
    for name in counted:
        if name.startswith("baton_transitions_total"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', name))
            found.add((labels["machine"], labels["source"], labels["fact"], labels["target"]))
    return found


#### A router that does not come to a good end


class Taken(MemoryNetwork):
    """Somebody else has the port."""

    def listen(self, host: str, port: int) -> Listening:
        raise OSError("port taken")


class Broken(Exception):
    """What the router cannot outlive."""


async def broken_soon(*_: object) -> None:
    await trio.sleep(1)
    raise Broken


def breaks_while_serving(app: App) -> None:
    app.reactor.run = broken_soon  # type: ignore[method-assign]  # on purpose


def breaks_while_draining(app: App) -> None:
    """Draining looks at all connections, and this is none."""
    app.serving.channels.add(object())  # type: ignore[arg-type]  # on purpose


def unchanged(_: App) -> None:
    """Nothing about it is broken."""


async def run_badly(
    network: type[MemoryNetwork], prepare: Callable[[App], None], stop_at: float
) -> set[Row]:
    """Run a router that is asked to stop at that moment; what it has taken by its end."""
    async with trio.open_nursery() as world:
        logs = configure(format="text", level="error")
        app = App(Settings(host="127.0.0.1", port=8000), network(world), logs)
        prepare(app)
        if stop_at == 0:
            app.ask_to_stop()
        try:
            app.listen()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(app.run)
                await trio.sleep(stop_at)
                if stop_at:
                    app.ask_to_stop()
        except (OSError, ExceptionGroup):
            pass
        world.cancel_scope.cancel()
    assert app.state.value == "stopped"
    return rows_of(read_metrics(app))


#: How a router ends badly, or early, and the row of its chart.
ENDS: dict[str, tuple[type[MemoryNetwork], Callable[[App], None], float, Row]] = {
    "its port is taken": (Taken, unchanged, 5.0, ("router", "starting", "crashed", "stopped")),
    "it is stopped before it begins": (
        *(MemoryNetwork, unchanged, 0.0),
        ("router", "starting", "stop_asked", "stopped"),
    ),
    "it breaks while it serves": (
        *(MemoryNetwork, breaks_while_serving, 5.0),
        ("router", "serving", "crashed", "stopped"),
    ),
    "it breaks while it drains": (
        *(MemoryNetwork, breaks_while_draining, 5.0),
        ("router", "draining", "crashed", "stopped"),
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_router_ends_by_a_row_however_it_ends(name: str) -> None:
    network, prepare, stop_at, row = ENDS[name]

    clock = trio.testing.MockClock(autojump_threshold=0)
    taken = trio.run(run_badly, network, prepare, stop_at, clock=clock)

    assert row in taken


#### All rows


@pytest.mark.slow
def test_every_row_of_every_chart_is_taken_in_the_shell() -> None:
    taken = {row for _, _, _, row in ENDS.values()}  # each by a test of its own

    for plan in plans():
        try:
            taken |= rows_of(simulate_unjudged(plan))
        except BaseException as error:
            error.add_note(f"simulate_unjudged({plan!r})")
            raise

    missing = [row for row in EVERY_ROW if row not in taken and row not in NOT_TAKEN]
    assert not missing, "no plan in tests/rows.py takes:\n" + report(missing)
    surprises = [row for row in EVERY_ROW if row in taken and row in NOT_TAKEN]
    assert not surprises, "taken after all, so strike it out of NOT_TAKEN:\n" + report(surprises)
    assert set(NOT_TAKEN) <= set(EVERY_ROW)


def report(rows: list[Row]) -> str:
    return "\n".join(f"  {machine}: {s} --{fact}--> {t}" for machine, s, fact, t in rows)
