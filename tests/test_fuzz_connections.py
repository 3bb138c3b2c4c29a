"""Seeds of connection lifecycles through the whole router, in memory, under virtual time.

Whatever clients and workers do to their connections: everybody who stayed has a whole answer or a
failure it can see, and afterwards nothing is left.
"""

from __future__ import annotations

from random import Random

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from router.app import App
from router.logs import configure
from statemachines.router import RouterState
from tests.leftovers import Lines, hurried, left_of
from tests.lifecycles import BAD, GOOD, Book, Luck, Worker
from tests.memory import MemoryNetwork
from tests.peers import Peer
from tests.visitors import FATE, Visitor

#: After the last visitor: longer than every deadline of the router.
REST_SECONDS = 30.0


async def run(seed: int, book: Book) -> None:
    luck = Luck(Random(seed))
    async with trio.open_nursery() as world:
        pipe_bytes = luck.random.choice((2000, 65536))
        network = MemoryNetwork(world, cuts=Random(seed), pipe_bytes=pipe_bytes)
        for place in range(3):
            worker = Worker(luck, book, is_well=place == 0)
            network.engines["127.0.0.1", 9000 + place] = worker.serve
        logs = configure(format="json", level="info")
        logs.writer = lines = Lines()
        urls = [f"http://127.0.0.1:{9000 + place}" for place in range(3)]
        app = App(hurried(urls, port=8000, places=2), network, logs)
        app.listen()
        world.start_soon(app.run)
        await trio.sleep(2)

        await receive_visitors(app, network, luck, book)
        await trio.sleep(REST_SECONDS)
        await wait_all_tasks_blocked()
        assert not left_of(app)
        app.ask_to_stop()
        await trio.sleep(app.settings.drain_timeout_secs + 10)
        assert not network.open_sockets
        assert not lines.bugs
        world.cancel_scope.cancel()


async def receive_visitors(app: App, network: MemoryNetwork, luck: Luck, book: Book) -> None:
    async def connect() -> Peer:
        return network.open_client()

    def is_stopping() -> bool:
        return app.state is not RouterState.SERVING

    def is_served(id: str) -> bool:
        return any(ticket.id.startswith(id) for ticket in app.serving.live)

    async def stop_in_between() -> None:
        await trio.sleep(luck.random.random() * 8)
        app.ask_to_stop()

    async with trio.open_nursery() as visitors:
        for number in range(luck.random.choice((2, 5, 9))):
            visitor = Visitor(luck, book, number, connect, is_stopping, is_served)
            visitors.start_soon(visitor.visit)
        if luck.one_in(8):
            visitors.start_soon(stop_in_between)


def fuzz(seed: int, book: Book) -> None:
    clock = MockClock(autojump_threshold=0)
    try:
        trio.run(run, seed, book, clock=clock, strict_exception_groups=True)
    except BaseException as error:
        error.add_note(f"fuzz({seed}, Book())")
        raise


@pytest.mark.slow
def test_whatever_happens_to_connections_nothing_is_left_and_nobody_is_deceived() -> None:
    book = Book()
    everything = {*GOOD, *BAD, *FATE, "a stream that failed visibly", "a worker's own error"}

    @settings(suppress_health_check=list(HealthCheck))
    @given(schedule=st.random_module(), seed=st.integers(0, 2**32))
    def try_a_seed(schedule: object, seed: int) -> None:
        fuzz(seed, book)

    try_a_seed()

    missing = everything - book.seen.keys()
    assert len(missing) <= 1, f"luck has left out {missing}"
