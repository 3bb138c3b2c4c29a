"""The reactor in Trio's idle moments, on real sockets: Trio misses nothing while it sleeps."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from router import idling
from router.reactor import Channel, Listener, Rank, Reactor
from router.sockets import Socket
from router.tcp import TcpNetwork

LIMIT_SECONDS = 20


class Echo(Channel):
    """Sends back what it receives."""

    __slots__ = ()

    def received(self, data: bytes) -> None:
        if data == b"!":
            raise RuntimeError("a bug")
        self.send(data)

    def ended(self) -> None:
        self.close()

    def lost(self, error: OSError) -> None:
        pass


class Steps(trio.abc.Instrument):
    """Counts how often Trio runs any task."""

    def __init__(self) -> None:
        self.taken = 0

    def before_task_step(self, _task: trio.lowlevel.Task) -> None:
        self.taken += 1


def _raise(error: Exception) -> None:
    raise error


@asynccontextmanager
async def echoing() -> AsyncIterator[tuple[str, int]]:
    """An echo server in a reactor of this Trio run; the address."""
    network = TcpNetwork()
    reactor = Reactor(network, _raise)
    channels: list[Channel] = []

    def accept(sock: Socket) -> None:
        channels.append(Echo(reactor, sock, Rank.CLIENT, connecting=False))

    listener = Listener(reactor, network.listen("127.0.0.1", 0), accept)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reactor.run)
            yield listener.address
            nursery.cancel_scope.cancel(reason="the test is over")
    finally:
        listener.close()
        for channel in channels:
            channel.close()
        network.close()


def ask(address: tuple[str, int], times: int) -> None:
    """A blocking client, for a thread."""
    with socket.create_connection(address, timeout=LIMIT_SECONDS) as sock:
        for turn in range(times):
            word = b"%08d" % turn
            sock.sendall(word)
            assert sock.recv(100) == word


async def test_a_stream_that_flows_runs_no_task() -> None:
    steps = Steps()
    with trio.fail_after(LIMIT_SECONDS):
        async with echoing() as address:
            await trio.to_thread.run_sync(ask, address, 1)
            trio.lowlevel.add_instrument(steps)
            await trio.to_thread.run_sync(ask, address, 500)
            trio.lowlevel.remove_instrument(steps)
    assert steps.taken < 50, "the thread's end and its beginning, but not 500 words"


async def test_where_idle_moments_cannot_be_had_a_task_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idling, "_FDINFO", Path("/nowhere"))
    with trio.fail_after(LIMIT_SECONDS):
        async with echoing() as address:
            await trio.to_thread.run_sync(ask, address, 20)


async def test_two_reactors_in_one_run_hear_their_own() -> None:
    with trio.fail_after(LIMIT_SECONDS):
        async with echoing() as one, echoing() as other:
            async with trio.open_nursery() as nursery:
                for address in (one, other, one, other):
                    nursery.start_soon(trio.to_thread.run_sync, ask, address, 50)


async def test_trio_s_own_deadlines_input_and_threads_end_the_sleep() -> None:
    with trio.fail_after(LIMIT_SECONDS):
        async with echoing() as address:
            await trio.sleep(0.002)  # a deadline, with nothing else happening
            stream = await trio.open_tcp_stream(*address)  # Trio's own socket
            for _ in range(20):
                await stream.send_all(b"word")
                assert await stream.receive_some() == b"word"
            await stream.aclose()
            assert await trio.to_thread.run_sync(lambda: 7) == 7


async def test_a_nearer_deadline_that_a_callback_sets_is_kept() -> None:
    class Timed(Echo):
        __slots__ = ("swept",)

        def received(self, data: bytes) -> None:
            self.reactor.sweeper.arm(self, self.reactor.now + 0.001)

        def sweep(self, now: float) -> float | None:
            self.send(b"due")
            return None

    with trio.fail_after(LIMIT_SECONDS):
        network = TcpNetwork()
        reactor = Reactor(network, _raise)
        async with trio.open_nursery() as nursery:
            listener = Listener(
                reactor,
                network.listen("127.0.0.1", 0),
                lambda sock: channels.append(Timed(reactor, sock, Rank.CLIENT, connecting=False)),
            )
            channels: list[Channel] = []
            nursery.start_soon(reactor.run)

            def wait_for_due() -> bytes:
                with socket.create_connection(listener.address, timeout=LIMIT_SECONDS) as sock:
                    sock.sendall(b"x")
                    return sock.recv(100)

            assert await trio.to_thread.run_sync(wait_for_due) == b"due"
            nursery.cancel_scope.cancel(reason="the test is over")
        listener.close()
        for channel in channels:
            channel.close()
        network.close()


async def test_what_a_pass_raises_ends_the_reactor() -> None:
    with (
        trio.fail_after(LIMIT_SECONDS),
        pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="a bug"), flatten_subgroups=True),
    ):
        async with echoing() as address:
            stream = await trio.open_tcp_stream(*address)
            async with stream:
                await stream.send_all(b"!")
                await trio.sleep_forever()


async def test_nothing_is_left_behind() -> None:
    async with echoing():
        await trio.lowlevel.checkpoint()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with trio.fail_after(LIMIT_SECONDS):
            async with echoing() as address:
                await trio.to_thread.run_sync(ask, address, 2)
    assert len(os.listdir("/proc/self/fd")) == before
