"""What only the bridge must do: its thread, its bounds, and a real server that fails."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio

from router.wires.nats import bridge as bridge_module
from router.wires.nats import crossing, jetstream, thread
from router.wires.nats.bridge import CLOSE_SECONDS, Bridge
from router.wires.nats.broker import BrokerAway, Change, ChangeKind, Message, PayloadTooLarge
from tests.brokers import Told, connected, name
from tests.nats_server import NatsServer, free_port


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@asynccontextmanager
async def opened(url: str, *, is_connected: bool = True) -> AsyncIterator[Bridge]:
    """A bridge for the length of a block."""
    bridge = Bridge(url)
    async with trio.open_nursery() as nursery:
        await nursery.start(bridge.run)
        if is_connected:
            await connected(bridge)
        yield bridge
        bridge.close()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert threads() == []


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "nats"]


def refused_within(times: int, publish: Callable[[], None]) -> bool:
    try:
        for _ in range(times):
            publish()
    except BrokerAway:
        return True
    return False


async def test_order_is_kept_over_ten_thousand_messages_both_ways(nats: NatsServer) -> None:
    async with opened(nats.url) as here, opened(nats.url) as there:
        subject, told, back = name(), Told(), Told()

        def echo(messages: Sequence[Message]) -> None:
            told.on_messages(messages)
            for each in messages:
                there.publish(each.reply, each.payload, headers={"rs-type": "data"})

        there.subscribe(subject, echo, on_lost=told.on_lost)
        inbox = here.new_inbox()
        here.subscribe(f"{inbox}.*", back.on_messages, on_lost=back.on_lost)
        await there.flush(5)

        for number in range(10_000):
            here.publish(subject, b"%d" % number, reply=f"{inbox}.1")
        await back.count(10_000)

        assert back.payloads == told.payloads == [b"%d" % number for number in range(10_000)]
        assert told.lost == back.lost == []


async def test_the_thread_ends_with_the_bridge_also_when_cancelled(nats: NatsServer) -> None:
    bridge = Bridge(nats.url)
    async with trio.open_nursery() as nursery:
        await nursery.start(bridge.run)
        await connected(bridge)
        assert threads() == ["nats"]
        subscription = bridge.subscribe(name(), lambda _: None, on_lost=lambda _: None)
        bridge.bucket(name("b"), ttl_seconds=5).watch(lambda _: None, on_lost=lambda _: None)
        nursery.cancel_scope.cancel("the test")

    assert threads() == []
    assert not bridge.is_connected
    with pytest.raises(BrokerAway):
        bridge.publish("x", b"")
    subscription.close()
    assert not await bridge.flush(1)


async def test_what_was_published_last_is_still_sent(nats: NatsServer) -> None:
    subject, told = name(), Told()
    async with opened(nats.url) as there:
        there.subscribe(subject, told.on_messages, on_lost=told.on_lost)
        await there.flush(5)
        bridge = Bridge(nats.url)
        async with trio.open_nursery() as nursery:
            await nursery.start(bridge.run)
            await connected(bridge)
            for _ in range(2000):
                bridge.publish(subject, b"cancel")
            nursery.cancel_scope.cancel("the test")

        await told.count(2000)


async def test_the_end_is_quick_where_nobody_listens() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    for turn in range(20):
        bridge = Bridge(url)
        async with trio.open_nursery() as nursery:
            await nursery.start(bridge.run)
            with pytest.raises(BrokerAway):
                bridge.publish("x", b"")
            # At one moment after the other of an attempt that fails.
            await trio.sleep(turn * 0.0002)
            began = trio.current_time()
            nursery.cancel_scope.cancel("the test")

        assert trio.current_time() - began < CLOSE_SECONDS / 2
        assert threads() == []


async def test_it_may_begin_before_its_server() -> None:
    with NatsServer() as server:
        server.kill()
        async with opened(server.url, is_connected=False) as bridge:
            subject, told, seen = name(), Told(), Told()
            bridge.subscribe(subject, told.on_messages, on_lost=told.on_lost)
            bucket = bridge.bucket("early", ttl_seconds=60)
            bucket.watch(seen.on_changes, on_lost=seen.on_lost)

            server.start()
            await connected(bridge)
            bridge.publish(subject, b"x")
            await bucket.put("k", b"v")
            await told.count(1)
            await seen.until(lambda: Change(ChangeKind.PUT, "k", b"v") in seen.changes)

            assert seen.lost == told.lost == []


async def test_one_of_its_servers_is_enough(nats: NatsServer) -> None:
    dead = f"nats://127.0.0.1:{free_port()}"
    async with opened(f"{dead}, {nats.url},{dead}") as bridge:
        assert await bridge.flush(5)


async def test_a_slow_consumer_is_told_what_it_missed(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossing, "MESSAGES_MAX", 10)
    async with opened(nats.url) as here, opened(nats.url) as there:
        subject, told = name(), Told()
        there.subscribe(subject, told.on_messages, on_lost=told.on_lost)
        await there.flush(5)

        for number in range(200):
            here.publish(subject, b"%d" % number)
        held = threading.Event()
        # Trio hangs, and the server goes on.
        while there.crossing.messages_dropped < 190:
            held.wait(0.001)
        await told.count(10)
        here.publish(subject, b"after")
        await told.count(11)

        assert told.payloads == [*(b"%d" % number for number in range(10)), b"after"]
        assert told.lost == ["slow consumer: too many messages are waiting"]


async def test_more_than_may_wait_to_be_sent_is_refused(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge_module, "WAITING_BYTES_MAX", 1000)
    async with opened(nats.url) as bridge:
        subject, told = name(), Told()
        bridge.subscribe(subject, told.on_messages, on_lost=told.on_lost)
        nats.hang()
        try:
            assert refused_within(100_000, lambda: bridge.publish(subject, bytes(999)))
        finally:
            nats.go_on()
        assert await bridge.flush(5)
        bridge.publish(subject, b"room again")
        await told.until(lambda: told.payloads[-1:] == [b"room again"])


async def test_the_limit_of_the_server_is_kept_and_costs_no_connection() -> None:
    with NatsServer(settings="max_payload: 4096") as server:
        async with opened(server.url) as bridge:
            assert bridge.max_payload == 4096
            with pytest.raises(PayloadTooLarge):
                bridge.publish("x", bytes(4096), headers={"a": "b"})
            bridge.publish("x", bytes(4096))
            assert await bridge.flush(5)
            assert bridge.connections == 1


async def test_a_server_that_hangs_is_a_lost_connection(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "PING_SECONDS", 0.1)
    monkeypatch.setattr(thread, "PONG_SECONDS", 0.3)
    async with opened(nats.url) as bridge:
        subject, told = name(), Told()
        bridge.subscribe(subject, told.on_messages, on_lost=told.on_lost)
        await bridge.flush(5)
        nats.hang()
        try:
            # More than the kernel holds: what cannot be sent must not hold up what follows.
            for _ in range(40):
                bridge.publish(subject, bytes(1 << 20))
            await connected(bridge, False)
        finally:
            nats.go_on()
        await connected(bridge)
        bridge.publish(subject, b"x")
        await told.until(lambda: told.payloads[-1:] == [b"x"])

        assert len(told.lost) == 1


async def test_the_end_is_quick_before_a_server_that_hangs(nats: NatsServer) -> None:
    bridge = Bridge(nats.url)
    began = 0.0
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(bridge.run)
            await connected(bridge)
            nats.hang()
            for _ in range(40):
                bridge.publish("x", bytes(1 << 20))
            began = trio.current_time()
            nursery.cancel_scope.cancel("the test")
        took = trio.current_time() - began
    finally:
        nats.go_on()

    assert took < CLOSE_SECONDS
    assert threads() == []


async def test_nothing_comes_twice_or_out_of_order_while_the_server_is_killed() -> None:
    with NatsServer() as server:
        async with opened(server.url) as here, opened(server.url) as there:
            told = Told()
            there.subscribe("x", told.on_messages, on_lost=told.on_lost)
            await there.flush(5)
            is_over = False
            sent = 0

            async def publish() -> None:
                nonlocal sent
                while not is_over:
                    for _ in range(20):
                        try:
                            here.publish("x", b"%d" % sent)
                        except BrokerAway:
                            break
                        sent += 1
                    await trio.sleep(0.001)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(publish)
                for _ in range(2):
                    await told.count(len(told.messages) + 200)
                    await trio.to_thread.run_sync(server.restart)
                    await connected(here)
                    await connected(there)
                await told.count(len(told.messages) + 200)
                is_over = True

            numbers = [int(each) for each in told.payloads]
            assert numbers == sorted(set(numbers))
            assert len(numbers) <= sent
            assert len(told.lost) == 2


async def test_a_bug_in_the_other_thread_ends_the_bridge_and_is_raised(
    nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(thread.Publish, "carry_out", broken)
    bridge = Bridge(nats.url)

    with pytest.RaisesGroup(LookupError):
        async with trio.open_nursery() as nursery:
            await nursery.start(bridge.run)
            await connected(bridge)
            bridge.publish("x", b"")
            await trio.sleep_forever()

    assert threads() == []


#### Streams that are there already


def _queue_config(stream: str, subject: str, **more: object) -> dict[str, object]:
    """As an earlier release, or Infera, has made it."""
    made = {"name": stream, "subjects": [subject], "retention": "workqueue", "storage": "memory"}
    return made | {"discard": "new", "max_msgs": 100} | more


async def _config_of(bridge: Bridge, stream: str) -> dict[str, object]:
    return (await bridge._api.call(f"STREAM.INFO.{stream}")).config


async def test_an_old_stream_of_ours_learns_to_forget(nats: NatsServer) -> None:
    stream, subject = name("Q"), name("q")
    async with opened(nats.url) as bridge:
        await bridge._api.call(f"STREAM.CREATE.{stream}", _queue_config(stream, subject))
        assert not (await _config_of(bridge, stream))["max_age"]
        old = bridge.work_queue(stream, [subject], max_messages=100, max_age_seconds=0)
        await old.publish(subject, b"kept")

        queue = bridge.work_queue(stream, [subject], max_messages=100, max_age_seconds=3600)
        await queue.publish(subject, b"new")

        assert (await _config_of(bridge, stream))["max_age"] == 3600 * 10**9
        assert await queue.last_number() == 2


async def test_an_old_bucket_of_ours_learns_to_forget(nats: NatsServer) -> None:
    bucket = name("B")
    stream = f"KV_{bucket}"
    async with opened(nats.url) as bridge:
        config = dict(bridge.bucket(bucket, ttl_seconds=10).stream.config)  # type: ignore[attr-defined]
        del config["max_age"], config["duplicate_window"]
        await bridge._api.call(f"STREAM.CREATE.{stream}", config)

        await bridge.bucket(bucket, ttl_seconds=10).put("k", b"v")

        assert (await _config_of(bridge, stream))["max_age"] == 10 * 10**9


OTHERS: dict[str, dict[str, object]] = {
    "Infera's": {"discard": "old", "max_age": 0},
    "one with an age of its own": {"max_age": 60 * 10**9},
    "one with another limit": {"max_msgs": 50},
    "one on a disk": {"storage": "file"},
}


@pytest.mark.parametrize("more", OTHERS.values(), ids=OTHERS.keys())
async def test_what_somebody_else_has_made_is_left_and_told_once(
    nats: NatsServer, more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, subject = name("Q"), name("q")
    told: list[dict[str, object]] = []
    monkeypatch.setattr(
        jetstream._log, "warning", lambda event, **fields: told.append({"event": event} | fields)
    )
    async with opened(nats.url) as bridge:
        config = _queue_config(stream, subject, **more)
        await bridge._api.call(f"STREAM.CREATE.{stream}", config)
        before = await _config_of(bridge, stream)

        queue = bridge.work_queue(stream, [subject], max_messages=100, max_age_seconds=3600)
        await queue.publish(subject, b"taken")
        queue.stream._made_on = -1  # type: ignore[attr-defined]  # as on another connection
        await queue.publish(subject, b"taken")

        assert await _config_of(bridge, stream) == before
    [warning] = told
    assert warning["stream"] == stream
    assert all(key in str(warning["details"]) for key in more if more[key])
