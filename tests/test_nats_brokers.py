"""One suite for both brokers: the one in memory, and the bridge before a real nats-server.

What holds for the first must hold for the second, or stories in memory prove nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
import trio

from router.wires.nats.broker import (
    Backlog,
    BrokerAway,
    Change,
    ChangeKind,
    Message,
    NoConsumer,
    PayloadTooLarge,
    QueueFull,
    size_of,
)
from tests.brokers import Told, World, in_both_worlds, name
from tests.memory_broker import matches
from tests.nats_server import NatsServer

SYNCED = Change(ChangeKind.SYNCED)


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


def put(key: str, value: bytes) -> Change:
    return Change(ChangeKind.PUT, key, value)


@pytest.mark.parametrize(
    "pattern, subject, expected",
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
    ],
)
def test_wildcards_are_whole_tokens(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


# Messages.


@in_both_worlds
async def test_messages_arrive_once_in_order_with_all_they_carry(world: World) -> None:
    here, there = await world.broker(), await world.broker()
    subject, told = name(), Told()
    there.subscribe(f"{subject}.*", told.on_messages, on_lost=told.on_lost)
    await there.flush(5)

    for number in range(100):
        here.publish(f"{subject}.{number}", b"%d" % number, reply="r.1", headers={"rs-seq": "7"})
    await told.until(lambda: len(told.messages) >= 100)

    assert told.payloads == [b"%d" % number for number in range(100)]
    assert told.messages[3] == Message(f"{subject}.3", b"3", {"rs-seq": "7"}, "r.1")
    assert told.lost == []


@in_both_worlds
async def test_every_subscriber_is_told_the_sender_too(world: World) -> None:
    here, there = await world.broker(), await world.broker()
    subject, told = name(), [Told(), Told(), Told()]
    for broker, each in zip((here, there, there), told, strict=True):
        broker.subscribe(f"{subject}.>", each.on_messages, on_lost=each.on_lost)
    await there.flush(5)

    here.publish(f"{subject}.a.b", b"x")

    for each in told:
        await each.count(1)


@in_both_worlds
async def test_a_message_that_nobody_waits_for_is_answered_at_once(world: World) -> None:
    broker = await world.broker()
    inbox, told = broker.new_inbox(), Told()
    broker.subscribe(f"{inbox}.*", told.on_messages, on_lost=told.on_lost)

    broker.publish(name("nobody"), b"anybody?", reply=f"{inbox}.5")
    await told.until(lambda: bool(told.messages))

    assert told.messages[0].subject == f"{inbox}.5"
    assert told.messages[0].is_no_responders


@in_both_worlds
async def test_inboxes_are_nobody_else_s(world: World) -> None:
    here, there = await world.broker(), await world.broker()

    assert len({here.new_inbox(), here.new_inbox(), there.new_inbox()}) == 3


@in_both_worlds
async def test_a_closed_subscription_is_told_nothing(world: World) -> None:
    broker = await world.broker()
    subject, told, other = name(), Told(), Told()
    closed = broker.subscribe(subject, told.on_messages, on_lost=told.on_lost)
    broker.subscribe(subject, other.on_messages, on_lost=other.on_lost)
    await broker.flush(5)

    broker.publish(subject, b"x")
    closed.close()
    closed.close()
    await other.until(lambda: bool(other.messages))

    assert told.messages == []


@in_both_worlds
async def test_draining_tells_what_was_on_its_way(world: World) -> None:
    here, there = await world.broker(), await world.broker()
    subject, told = name(), Told()
    subscription = there.subscribe(subject, told.on_messages, on_lost=told.on_lost)
    await there.flush(5)
    for number in range(500):
        here.publish(subject, b"%d" % number)
    await here.flush(5)

    assert await subscription.drain(5)

    assert told.payloads == [b"%d" % number for number in range(500)]
    here.publish(subject, b"late", reply=subject)
    await here.flush(5)
    await there.flush(5)
    assert len(told.messages) == 500


@in_both_worlds
async def test_flush_is_a_barrier(world: World) -> None:
    here, there = await world.broker(), await world.broker()
    told = Told()
    for number in range(50):
        subject = name()
        there.subscribe(subject, told.on_messages, on_lost=told.on_lost)
        assert await there.flush(5)
        here.publish(subject, b"x")
        assert await here.flush(5)
        assert await there.flush(5)

        assert len(told.messages) == number + 1


@in_both_worlds
async def test_what_is_too_large_is_refused_here_and_harms_nobody(world: World) -> None:
    broker = await world.broker()
    subject, told = name(), Told()
    broker.subscribe(subject, told.on_messages, on_lost=told.on_lost)
    headers = {"rs-type": "data", "rs-seq": "12"}
    room = broker.max_payload - size_of(b"", headers)

    with pytest.raises(PayloadTooLarge) as refused:
        broker.publish(subject, bytes(room + 1), headers=headers)
    broker.publish(subject, bytes(room), headers=headers)
    broker.publish(subject, bytes(broker.max_payload))
    await told.until(lambda: len(told.messages) == 2)

    assert refused.value.limit == broker.max_payload
    assert broker.is_connected


@in_both_worlds
async def test_no_subject_can_end_its_line_early(world: World) -> None:
    broker = await world.broker()

    for bad in ("", "a b", "a\r\nPUB x 0", "a\tb", "a\0"):
        with pytest.raises(ValueError):
            broker.publish(bad, b"")
        with pytest.raises(ValueError):
            broker.subscribe(bad, lambda _: None, on_lost=lambda _: None)


@in_both_worlds
async def test_a_callback_that_raises_costs_only_its_own_batch(world: World) -> None:
    broker = await world.broker()
    subject, told, inbox = name(), Told(), name()

    def raising(messages: Sequence[Message]) -> None:
        told.on_messages(messages)
        raise LookupError("a bug")

    broker.subscribe(subject, raising, on_lost=told.on_lost)
    other = Told()
    broker.subscribe(inbox, other.on_messages, on_lost=other.on_lost)
    broker.publish(subject, b"1")
    broker.publish(inbox, b"2")
    await other.until(lambda: bool(other.messages))
    broker.publish(subject, b"3")
    await told.until(lambda: len(told.messages) == 2)

    assert world.failures() == 2


# The connection.


@in_both_worlds
async def test_without_a_connection_nothing_is_kept_for_later(world: World) -> None:
    broker = await world.broker()
    subject, told = name(), Told()
    broker.subscribe(subject, told.on_messages, on_lost=told.on_lost)
    bucket = broker.bucket(name("b"), ttl_seconds=10)
    queue = broker.work_queue(name("Q"), [name("q")], max_messages=9)

    await world.down()

    with pytest.raises(BrokerAway):
        broker.publish(subject, b"lost")
    with pytest.raises(BrokerAway):
        await bucket.put("k", b"v")
    with pytest.raises(BrokerAway):
        await queue.backlog("d")
    assert not await broker.flush(5)

    await world.up()
    broker.publish(subject, b"found")
    await told.until(lambda: bool(told.messages))
    assert told.payloads == [b"found"]


@in_both_worlds
async def test_a_lost_connection_is_told_and_subscriptions_outlive_it(world: World) -> None:
    broker = await world.broker()
    subject, told, late = name(), Told(), Told()
    states: list[bool] = []
    broker.on_state.append(states.append)
    broker.subscribe(subject, told.on_messages, on_lost=told.on_lost)

    await world.down()
    broker.subscribe(subject, late.on_messages, on_lost=late.on_lost)
    await world.up()
    broker.publish(subject, b"again")
    await late.until(lambda: bool(late.messages))
    await told.until(lambda: bool(told.messages))

    assert states == [False, True]
    assert len(told.lost) == 1
    assert late.lost == []


# Buckets.


@in_both_worlds
async def test_a_watch_tells_what_is_there_then_what_happens(world: World) -> None:
    here, there = await world.broker(), await world.broker()
    bucket, told = name("b"), Told()
    ours = here.bucket(bucket, ttl_seconds=60)
    await ours.put("one", b"1")
    await ours.put("two", b"2")
    await ours.put("one", b"1b")

    watch = there.bucket(bucket, ttl_seconds=60).watch(told.on_changes, on_lost=told.on_lost)
    await told.until(lambda: SYNCED in told.changes)
    present = list(told.changes)
    await ours.put("three", b"3")
    await ours.delete("one")
    await ours.delete("never")
    await ours.put("four", b"4")
    await told.until(lambda: put("four", b"4") in told.changes)
    watch.close()
    await ours.put("five", b"5")
    await there.flush(5)

    assert present[-1] == SYNCED
    assert {(each.key, each.value) for each in present[:-1]} == {("one", b"1b"), ("two", b"2")}
    assert told.changes[len(present) :] == [
        put("three", b"3"),
        Change(ChangeKind.DELETED, "one"),
        put("four", b"4"),
    ]
    assert told.lost == []


@in_both_worlds
async def test_a_watch_of_nothing_is_synced_at_once(world: World) -> None:
    broker = await world.broker()
    told = Told()

    broker.bucket(name("b"), ttl_seconds=60).watch(told.on_changes, on_lost=told.on_lost)
    await told.until(lambda: bool(told.changes))

    assert told.changes == [SYNCED]


@in_both_worlds
async def test_what_nobody_renews_expires(world: World) -> None:
    broker = await world.broker()
    bucket, told = broker.bucket(name("b"), ttl_seconds=0.5), Told()
    bucket.watch(told.on_changes, on_lost=told.on_lost)
    await bucket.put("dead", b"1")
    for _ in range(4):
        await bucket.put("alive", b"2")
        await trio.sleep(0.2)

    assert Change(ChangeKind.EXPIRED, "dead") in told.changes
    assert Change(ChangeKind.EXPIRED, "alive") not in told.changes
    await told.until(lambda: Change(ChangeKind.EXPIRED, "alive") in told.changes)
    again = Told()
    bucket.watch(again.on_changes, on_lost=again.on_lost)
    await again.until(lambda: SYNCED in again.changes)
    assert again.changes == [SYNCED]


@in_both_worlds
async def test_a_watch_is_stale_without_its_broker_and_then_tells_all_anew(world: World) -> None:
    broker = await world.broker()
    bucket, told = broker.bucket(name("b"), ttl_seconds=0.5), Told()
    bucket.watch(told.on_changes, on_lost=told.on_lost)
    await bucket.put("kept", b"1")
    await told.until(lambda: put("kept", b"1") in told.changes)
    told.changes.clear()

    await world.down()
    await told.until(lambda: bool(told.lost))
    await trio.sleep(0.6)
    unseen = list(told.changes)
    await world.up()
    await told.until(lambda: SYNCED in told.changes)
    await bucket.put("new", b"2")
    await told.until(lambda: put("new", b"2") in told.changes)

    assert unseen == []
    assert told.changes[0] == SYNCED
    assert len(told.lost) == 1


# Work queues.


@in_both_worlds
async def test_work_is_handed_out_once_and_forgotten_when_done(world: World) -> None:
    here, there = await world.broker(), await world.broker()
    stream, subject, told = name("Q"), name("q"), Told()
    ours = here.work_queue(stream, [f"{subject}.>"], max_messages=100)
    await ours.publish(f"{subject}.a", b"1", headers={"rs-inbox": "i"})
    theirs = there.work_queue(stream, [f"{subject}.>"], max_messages=100)
    theirs.consume("a", f"{subject}.a", told.on_jobs, on_lost=told.on_lost)
    await ours.publish(f"{subject}.a", b"2")
    await ours.publish(f"{subject}.b", b"for another")

    await told.until(lambda: len(told.jobs) == 2)
    assert told.work == [b"1", b"2"]
    assert told.jobs[0].message.subject == f"{subject}.a"
    assert told.jobs[0].message.headers["rs-inbox"] == "i"
    assert await ours.backlog("a") == Backlog(pending=0, ack_pending=2)
    told.jobs[0].ack()
    told.jobs[0].ack()
    await there.flush(5)
    assert await ours.backlog("a") == Backlog(pending=0, ack_pending=1)


@in_both_worlds
async def test_a_full_queue_refuses_what_is_new(world: World) -> None:
    broker = await world.broker()
    subject = name("q")
    queue = broker.work_queue(name("Q"), [subject], max_messages=2)
    await queue.publish(subject, b"1")
    await queue.publish(subject, b"2")

    with pytest.raises(QueueFull):
        await queue.publish(subject, b"3")


@in_both_worlds
async def test_no_more_is_handed_out_than_may_be_unfinished(world: World) -> None:
    broker = await world.broker()
    subject, told = name("q"), Told()
    queue = broker.work_queue(name("Q"), [subject], max_messages=100)
    for number in range(5):
        await queue.publish(subject, b"%d" % number)
    queue.consume("a", subject, told.on_jobs, on_lost=told.on_lost, max_ack_pending=2)
    await told.until(lambda: len(told.jobs) == 2)

    assert await queue.backlog("a") == Backlog(pending=3, ack_pending=2)
    told.jobs[0].ack()
    await told.until(lambda: len(told.jobs) == 3)
    await broker.flush(5)
    assert told.work == [b"0", b"1", b"2"]


@in_both_worlds
async def test_work_not_finished_in_time_is_handed_out_again_as_often_as_allowed(
    world: World,
) -> None:
    broker = await world.broker()
    subject, told = name("q"), Told()
    queue = broker.work_queue(name("Q"), [subject], max_messages=100)
    queue.consume(
        *("a", subject, told.on_jobs),
        on_lost=told.on_lost,
        ack_wait_seconds=0.3,
        max_deliver=2,
    )
    await queue.publish(subject, b"1")

    await told.until(lambda: len(told.jobs) == 2)
    await trio.sleep(0.5)

    assert told.work == [b"1", b"1"]


@in_both_worlds
async def test_what_a_deleted_consumer_left_goes_to_the_next(world: World) -> None:
    broker = await world.broker()
    subject, told, after = name("q"), Told(), Told()
    queue = broker.work_queue(name("Q"), [subject], max_messages=100)
    with pytest.raises(NoConsumer):
        await queue.backlog("a")
    await queue.delete_consumer("a")
    consumption = queue.consume("a", subject, told.on_jobs, on_lost=told.on_lost)
    await queue.publish(subject, b"done")
    await queue.publish(subject, b"left")
    await told.until(lambda: len(told.jobs) == 2)
    told.jobs[0].ack()
    await broker.flush(5)

    consumption.close()
    await queue.delete_consumer("a")
    queue.consume("a", subject, after.on_jobs, on_lost=after.on_lost)
    await after.until(lambda: bool(after.jobs))

    assert after.work == [b"left"]


@in_both_worlds
async def test_what_is_stored_is_numbered_in_order(world: World) -> None:
    """Before the newest or after it: what was there already can be told from what comes."""
    broker = await world.broker()
    stream, told = name("Q"), Told()
    ours, theirs = name("q"), name("q")
    queue = broker.work_queue(stream, [ours, theirs], max_messages=100)
    assert await queue.last_number() == 0
    await queue.publish(ours, b"1")
    await queue.publish(theirs, b"2")
    assert await queue.last_number() == 2
    queue.consume("a", ours, told.on_jobs, on_lost=told.on_lost)
    await queue.publish(ours, b"3")
    await told.until(lambda: len(told.jobs) == 2)

    assert [each.number for each in told.jobs] == [1, 3]
    for each in told.jobs:
        each.ack()
    await broker.flush(5)
    assert await queue.last_number() == 3

    await world.down()
    await world.up()
    assert await queue.last_number() == 0


@in_both_worlds
async def test_what_nobody_takes_is_not_kept_for_ever(world: World) -> None:
    broker = await world.broker()
    subject, told = name("q"), Told()
    queue = broker.work_queue(name("Q"), [subject], max_messages=1, max_age_seconds=0.5)
    await queue.publish(subject, b"old")
    with pytest.raises(QueueFull):
        await queue.publish(subject, b"too many")

    with trio.fail_after(5):
        while True:
            try:
                await queue.publish(subject, b"new")
                break
            except QueueFull:
                await trio.sleep(0.1)
    queue.consume("a", subject, told.on_jobs, on_lost=told.on_lost)
    await told.until(lambda: bool(told.jobs))

    assert told.work == [b"new"]


@in_both_worlds
async def test_draining_a_consumer_leaves_nothing_in_between(world: World) -> None:
    here, there = await world.broker(), await world.broker()
    stream, subject, told = name("Q"), name("q"), Told()
    ours = here.work_queue(stream, [subject], max_messages=1000)
    theirs = there.work_queue(stream, [subject], max_messages=1000)
    consumption = theirs.consume("a", subject, told.on_jobs, on_lost=told.on_lost)
    await ours.publish(subject, b"first")
    await told.until(lambda: bool(told.jobs))
    for _ in range(200):
        here.publish(subject, b"x")

    assert await consumption.drain(8)

    backlog = await ours.backlog("a")
    await there.flush(5)
    assert backlog.ack_pending == len(told.jobs)
    assert backlog.pending + backlog.ack_pending == 201


@in_both_worlds
async def test_a_queue_and_its_consumer_are_made_anew_after_a_restart(world: World) -> None:
    broker = await world.broker()
    subject, told = name("q"), Told()
    queue = broker.work_queue(name("Q"), [subject], max_messages=100)
    queue.consume("a", subject, told.on_jobs, on_lost=told.on_lost)
    await queue.publish(subject, b"before")
    await told.until(lambda: bool(told.jobs))

    await world.down()
    told.jobs[0].ack()
    await world.up()
    await queue.publish(subject, b"after")
    await told.until(lambda: len(told.jobs) == 2)

    assert told.work == [b"before", b"after"]
    assert len(told.lost) == 1


@in_both_worlds
async def test_a_queue_takes_and_acknowledges_what_is_merely_published(world: World) -> None:
    broker = await world.broker()
    stream, subject, told = name("Q"), name("q"), Told()
    queue = broker.work_queue(stream, [subject], max_messages=100)
    await queue.publish(subject, b"made")
    inbox = broker.new_inbox()
    broker.subscribe(f"{inbox}.*", told.on_messages, on_lost=told.on_lost)

    broker.publish(subject, b"stored too", reply=f"{inbox}.1")
    await told.until(lambda: bool(told.messages))

    answer = json.loads(told.messages[0].payload)
    assert answer["stream"] == stream
    assert "rs-type" not in told.messages[0].headers
    assert not told.messages[0].is_no_responders
