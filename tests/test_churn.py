"""Churn on real sockets: hundreds of connections that come, stream, pipeline, stall, reset and go.

The same workers and visitors as in the fuzz, with the kernel in between and real time: what the
memory network leaves out is met here. Timeouts may strike anybody on a busy machine, so the book
is not asked who deserved one; wrong bytes, silent ends, leaks and bugs fail as ever.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from random import Random

import pytest
import trio

from router.app import App
from router.logs import configure
from router.tcp import TcpNetwork
from tests.leftovers import Lines, hurried, left_of
from tests.lifecycles import Book, Luck, Worker
from tests.peers import Peer, TcpPeer
from tests.visitors import Visitor

VISITORS = 200
#: How long a second of the visitors lasts, and one of the router's deadlines.
VISITOR_SECOND, ROUTER_SECOND = 0.02, 0.25
GIVE_UP_SECONDS = 60


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def wait_until(condition: Callable[[], bool]) -> None:
    """Look again and again: the kernel takes its time, and tells nobody."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.01)


async def open_workers(nursery: trio.Nursery, luck: Luck, book: Book) -> list[str]:
    """Three workers on sockets; their URLs."""
    urls = []
    for place in range(3):
        worker = Worker(luck, book, is_well=place == 0)

        async def serve(stream: trio.SocketStream, worker: Worker = worker) -> None:
            await worker.serve(TcpPeer(stream))

        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=1000)
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        urls.append(f"http://127.0.0.1:{listener.socket.getsockname()[1]}")
    return urls


async def receive_visitors(app: App, luck: Luck, book: Book) -> None:
    async def connect() -> Peer:
        return TcpPeer(await trio.open_tcp_stream(*app.address))

    async def visit_after(seconds: float, visitor: Visitor) -> None:
        await trio.sleep(seconds)
        await visitor.visit()

    async with trio.open_nursery() as visitors:
        for number in range(VISITORS):
            visitor = Visitor(luck, book, number, connect)
            visitors.start_soon(visit_after, luck.random.random() * 1.5, visitor)


@pytest.mark.slow
async def test_hundreds_of_connections_come_and_go_and_nothing_is_left() -> None:
    luck = Luck(Random(5), VISITOR_SECOND, at_once=GIVE_UP_SECONDS)
    book, lines = Book(judges_time=False), Lines()
    logs = configure(format="json", level="info")
    logs.writer = lines
    network = TcpNetwork()
    with trio.fail_after(GIVE_UP_SECONDS):
        async with trio.open_nursery() as world:
            urls = await open_workers(world, luck, book)
            gc.collect()
            descriptors_before = descriptors()
            app = App(hurried(urls, port=0, places=20, second=ROUTER_SECOND), network, logs)
            app.listen()
            async with trio.open_nursery() as router:
                router.start_soon(app.run)
                await wait_until(lambda: bool(app.fleet.ready("mixed")))
                await receive_visitors(app, luck, book)
                app.ask_to_stop()
            await wait_until(lambda: descriptors() <= descriptors_before)
            assert descriptors() == descriptors_before
            assert not left_of(app)
            world.cancel_scope.cancel()
    network.close()

    assert not lines.bugs
    assert book.seen["answered"] > VISITORS / 3
