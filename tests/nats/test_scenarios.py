"""What can become of a request over NATS, from the client to the worker's last frame.

Routers are processes, workers are puppets or old ones: the agent's side is in test_agents.py.
"""

import contextlib
import json
from collections.abc import Iterator
from functools import partial

import pytest
import trio

from tests.infera_peer import DRAINING, Puppet, Scripted, Worker
from tests.nats import fleet as f
from tests.nats.conftest import World
from tests.nats.recorded import CHAT_TEXT, CHAT_TRACE, WITH_IDS, events_of

pytestmark = pytest.mark.slow

MOVES = "baton_migrations_total"
BODY = f.chat("hi", tokens=8, more=WITH_IDS)


@pytest.fixture(scope="module")
def routed(world: World) -> Iterator[f.Process]:
    """A router that moves streams and gives up a silent one after two seconds."""
    with world.fleet() as fleet:
        flags = ["--migration-limit", "1", "--stream-idle-timeout-secs", "2", "--engine", "vllm"]
        router = fleet.router(*flags)
        world.prefixes[router.pid] = fleet.prefix
        yield router


@contextlib.contextmanager
def puppet(world: World, router: f.Process, worker_id: str) -> Iterator[Puppet]:
    """A puppet that the router knows and takes for ready."""
    prefix = world.prefixes[router.pid]
    with (
        Puppet(world.broker, worker_id, prefix) as made,
        f.Added(router, worker_id, {"engine": "vllm"}),
    ):
        f.wait_ready(router, worker_id)
        yield made


@contextlib.contextmanager
def old(world: World, router: f.Process, worker_id: str, engine: Scripted) -> Iterator[Worker]:
    """An old worker that the router knows and takes for ready."""
    prefix = world.prefixes[router.pid]
    with (
        Worker(world.broker, worker_id, engine=engine, prefix=prefix) as made,
        f.Added(router, worker_id, {"engine": "vllm"}),
    ):
        f.wait_ready(router, worker_id)
        yield made


class Asking:
    """A request that is under way."""

    def __init__(self, router: f.Process, body: f.Body) -> None:
        self.router, self.body = router, body
        self.pieces = 0
        self.told: list[f.Told] = []
        self.scope = trio.CancelScope()

    def heard(self) -> None:
        self.pieces += 1

    async def run(self) -> None:
        with self.scope:
            self.told.append(await f.stream(self.router.port, self.body, heard=self.heard))

    async def answer(self, seconds: float = 10) -> f.Told:
        await f.until(lambda: bool(self.told), seconds, "the client's answer")
        return self.told[0]


def ask(nursery: trio.Nursery, router: f.Process, body: f.Body = BODY) -> Asking:
    asking = Asking(router, body)
    nursery.start_soon(asking.run)
    return asking


async def inbox_of(made: Puppet, number: int = 0) -> str:
    await f.until(lambda: len(made.asked) > number, 5, "a request for the puppet")
    return made.asked[number]


def breaker_of(router: f.Process, worker_id: str) -> str:
    return str(f.workers(router)[worker_id]["breaker"])


#### Drain notices: scenarios 31 and 32


async def test_a_notice_in_mid_stream_moves_and_blames_nobody(
    world: World, routed: f.Process
) -> None:
    before = f.metric(routed, MOVES, reason="worker_draining")
    with puppet(world, routed, "p:1") as first:
        async with trio.open_nursery() as nursery:
            asking = ask(nursery, routed)
            inbox = await inbox_of(first)
            with old(world, routed, "o:1", Scripted(CHAT_TRACE)):
                for event in events_of(CHAT_TRACE)[:4]:
                    first.send(inbox, "data", event)
                await f.until(lambda: asking.pieces > 0, 5)
                # The promise was made when nobody else was there, and the notice comes anyway.
                first.send(inbox, "error", DRAINING)
                first.send(inbox, "error", DRAINING)
                first.send(inbox, "data", events_of(CHAT_TRACE)[4])
                first.send(inbox, "done", status=200)
                answer = await asking.answer()
                assert breaker_of(routed, "p:1") == "closed"

    assert answer.is_good
    assert answer.text == CHAT_TEXT
    assert (len(answer.ids), answer.roles) == (1, 1)
    assert f.metric(routed, MOVES, reason="worker_draining") - before == 1


async def test_a_notice_before_the_first_frame_is_a_silent_new_start(
    world: World, routed: f.Process
) -> None:
    """The limit is unspent: the same stream can still move once."""
    with puppet(world, routed, "p:2") as first:
        async with trio.open_nursery() as nursery:
            asking = ask(nursery, routed)
            inbox = await inbox_of(first)
            with puppet(world, routed, "p:3") as second:
                first.send(inbox, "error", DRAINING)
                inbox = await inbox_of(second)
                assert (
                    json.loads(second.payloads[0])["body"] == json.loads(first.payloads[0])["body"]
                )
                with old(world, routed, "o:3", Scripted(CHAT_TRACE)):
                    for event in events_of(CHAT_TRACE)[:4]:
                        second.send(inbox, "data", event)
                    second.send(inbox, "error", b"the engine died")
                    answer = await asking.answer()
                assert breaker_of(routed, "p:2") == "closed"

    assert answer.is_good
    assert answer.text == CHAT_TEXT


@pytest.mark.parametrize("payload", [DRAINING, b"the engine died"], ids=["stopped", "failed"])
async def test_the_last_words_say_whether_the_worker_stopped_or_failed(
    world: World, routed: f.Process, payload: bytes
) -> None:
    with puppet(world, routed, "p:4") as only:
        async with trio.open_nursery() as nursery:
            bodies: list[bytes] = []

            async def client() -> None:
                bodies.append((await f.whole(routed.port, BODY)).body)

            nursery.start_soon(client)
            inbox = await inbox_of(only)
            for event in events_of(CHAT_TRACE)[:4]:
                only.send(inbox, "data", event)
            only.send(inbox, "error", payload)

    [body] = bodies
    last = json.loads(body.rstrip().rsplit(b"data: ", 1)[1])
    assert b"[DONE]" not in body
    assert ("shutting down" in last["error"]["message"]) == (payload == DRAINING)
    assert ("broke off" in last["error"]["message"]) == (payload != DRAINING)


#### Nobody there: scenario 33


async def test_an_absent_worker_is_seen_at_once(world: World, routed: f.Process) -> None:
    with (
        old(world, routed, "o:5", Scripted(CHAT_TRACE)) as gone,
        old(world, routed, "o:6", Scripted(CHAT_TRACE)),
    ):
        gone.vanish()
        started = trio.current_time()

        answers = await f.many(routed.port, [BODY] * 2)

        took = trio.current_time() - started
    assert [each.said for each in answers] == [(CHAT_TEXT, "length", True)] * 2
    assert took < 1


async def test_an_absent_worker_is_seen_at_once_by_a_move(world: World, routed: f.Process) -> None:
    with puppet(world, routed, "p:7") as first:
        async with trio.open_nursery() as nursery:
            asking = ask(nursery, routed)
            inbox = await inbox_of(first)
            for event in events_of(CHAT_TRACE)[:4]:
                first.send(inbox, "data", event)
            await f.until(lambda: asking.pieces > 0, 5)
            with (
                old(world, routed, "o:7", Scripted(CHAT_TRACE)) as gone,
                old(world, routed, "o:8", Scripted(CHAT_TRACE)),
            ):
                gone.vanish()
                started = trio.current_time()
                first.send(inbox, "error", b"the engine died")
                answer = await asking.answer()
                took = trio.current_time() - started

    assert answer.is_good
    assert answer.text == CHAT_TEXT
    assert took < 1


#### Time: scenarios 34 and 35


async def test_the_deadline_ends_a_stream_and_tells_the_worker(world: World) -> None:
    with world.fleet() as fleet:
        router = fleet.router("--migration-limit", "2", "--request-timeout-secs", "1.5")
        world.prefixes[router.pid] = fleet.prefix
        with (
            puppet(world, router, "p:9") as first,
            puppet(world, router, "p:10") as second,
        ):
            async with trio.open_nursery() as nursery:
                started = trio.current_time()
                asking = ask(nursery, router)
                await f.until(lambda: bool(first.asked or second.asked), 5)
                made = first if first.asked else second
                for event in events_of(CHAT_TRACE)[:4]:
                    made.send(made.asked[0], "data", event)
                answer = await asking.answer()
                took = trio.current_time() - started
                await f.until(lambda: len(made.cancelled) == 3, 4)

    assert answer.error == "request_timeout"
    assert not answer.is_whole
    assert 1.4 < took < 2.5
    assert len(first.asked) + len(second.asked) == 1
    assert set(made.cancelled) == set(made.asked)


async def test_silence_is_a_loss_and_what_comes_late_is_not_read(
    world: World, routed: f.Process
) -> None:
    with puppet(world, routed, "p:11") as first:
        async with trio.open_nursery() as nursery:
            asking = ask(nursery, routed)
            inbox = await inbox_of(first)
            for event in events_of(CHAT_TRACE)[:4]:
                first.send(inbox, "data", event)
            with old(world, routed, "o:11", Scripted(CHAT_TRACE, hold_after=1)) as second:
                await f.until(lambda: inbox in first.cancelled, 4, "a cancel")
                await f.until(lambda: bool(second.running), 4, "the move")
                for event in events_of(CHAT_TRACE)[4:]:
                    first.send(inbox, "data", event)
                first.send(inbox, "done", status=200)
                engine = second.engine
                assert isinstance(engine, Scripted)
                second.loop.call_soon_threadsafe(engine.released.set)
                answer = await asking.answer()
                await f.until(lambda: first.cancelled == [inbox] * 3, 4)

    assert answer.is_good
    assert answer.text == CHAT_TEXT


#### Clients and refusals: scenarios 36 and 37


async def test_a_client_that_leaves_during_a_move_frees_both(
    world: World, routed: f.Process
) -> None:
    with puppet(world, routed, "p:12") as first:
        async with trio.open_nursery() as nursery:
            asking = ask(nursery, routed)
            inbox = await inbox_of(first)
            for event in events_of(CHAT_TRACE)[:4]:
                first.send(inbox, "data", event)
            await f.until(lambda: asking.pieces > 0, 5)
            with puppet(world, routed, "p:13") as second:
                first.send(inbox, "error", b"the engine died")
                moved = await inbox_of(second)
                asking.scope.cancel("the client leaves")
                await f.until(lambda: moved in second.cancelled, 2)

                assert {each["inflight"] for each in f.workers(routed).values()} == {0}


async def test_a_continuation_that_is_refused_is_not_shown_and_blames_nobody(
    world: World, routed: f.Process
) -> None:
    with puppet(world, routed, "p:14") as first:
        async with trio.open_nursery() as nursery:
            asking = ask(nursery, routed)
            inbox = await inbox_of(first)
            for event in events_of(CHAT_TRACE)[:4]:
                first.send(inbox, "data", event)
            await f.until(lambda: asking.pieces > 0, 5)
            with puppet(world, routed, "p:15") as second:
                first.send(inbox, "error", b"the engine died")
                for number in range(2):
                    # Every form of it that the router may try.
                    with trio.move_on_after(1):
                        await f.until(lambda n=number: len(second.asked) > n, 1)  # type: ignore[misc]
                        moved = second.asked[number]
                        second.send(moved, "data", b'{"error":{"message":"secret","code":400}}')
                        second.send(moved, "done", status=400)
                answer = await asking.answer()
                assert breaker_of(routed, "p:15") == "closed"

    assert answer.error is not None
    assert not answer.is_done
    assert not answer.is_whole
    assert "secret" not in answer.text


#### Sequence numbers


async def test_a_hole_in_the_numbers_is_a_break_and_a_second_copy_is_nothing(
    world: World, routed: f.Process
) -> None:
    events = events_of(CHAT_TRACE)
    before = f.metric(routed, MOVES, reason="stream_broken")
    with puppet(world, routed, "p:16") as first:
        async with trio.open_nursery() as nursery:
            asking = ask(nursery, routed)
            inbox = await inbox_of(first)
            for number in (0, 1, 1, 2, 0, 3):
                first.send(inbox, "data", events[number], seq=number)
            await f.until(lambda: asking.pieces > 0, 5)
            with old(world, routed, "o:16", Scripted(CHAT_TRACE)):
                first.send(inbox, "data", events[5], seq=5)
                answer = await asking.answer()
                await f.until(lambda: inbox in first.cancelled, 2)

    assert answer.is_good
    assert answer.text == CHAT_TEXT
    assert f.metric(routed, MOVES, reason="stream_broken") - before == 1


async def test_a_lost_beginning_or_end_is_not_a_short_answer(
    world: World, routed: f.Process
) -> None:
    events = events_of(CHAT_TRACE)
    with puppet(world, routed, "p:17") as only:
        async with trio.open_nursery() as nursery:
            beginning, end = ask(nursery, routed), ask(nursery, routed)
            for number, kept in ((0, range(1, len(events))), (1, range(len(events) - 3))):
                inbox = await inbox_of(only, number)
                for seq in kept:
                    only.send(inbox, "data", events[seq], seq=seq)
                only.send(inbox, "done", seq=len(events), status=200)
            nursery.start_soon(_refuse_from, only, 2)  # nobody else is there to ask again
            answers = [await beginning.answer(), await end.answer()]
            nursery.cancel_scope.cancel("answered")

    for answer in answers:
        assert not answer.is_good
        assert answer.error is not None
        assert not answer.is_done


def _is_asked(made: Puppet, number: int) -> bool:
    return len(made.asked) > number


async def _refuse_from(made: Puppet, number: int) -> None:
    while True:
        await f.until(partial(_is_asked, made, number), 60)
        inbox = made.asked[number]
        made.send(inbox, "error", b"no", seq=0)
        number += 1


#### Payloads: scenario 38


async def test_a_request_that_is_too_large_is_refused_and_the_connection_lives(
    world: World, routed: f.Process
) -> None:
    with old(world, routed, "o:18", Scripted(CHAT_TRACE)):
        large = f.chat("x" * 1_200_000, tokens=8, more=WITH_IDS)

        async with trio.open_nursery() as nursery:
            asking = ask(nursery, routed)
            refused = await f.stream(routed.port, large)
            answer = await asking.answer()
        again = await f.stream(routed.port, BODY)

    assert (refused.status, refused.error) == (413, "body_too_large")
    assert answer.said == again.said == (CHAT_TEXT, "length", True)


#### Migration off: scenario 40


async def test_without_a_limit_nothing_is_asked_for_and_a_break_is_seen(world: World) -> None:
    with world.fleet() as fleet:
        router = fleet.router()
        world.prefixes[router.pid] = fleet.prefix
        with (
            puppet(world, router, "p:20") as only,
            old(world, router, "o:20", Scripted(CHAT_TRACE)),
        ):
            async with trio.open_nursery() as nursery:
                body = f.chat("hi", tokens=8)
                asking = [ask(nursery, router, body) for _ in range(2)]
                inbox = await inbox_of(only)
                for event in events_of(CHAT_TRACE)[:4]:
                    only.send(inbox, "data", event)
                only.send(inbox, "error", b"the engine died")
                answers = [await each.answer() for each in asking]

    sent = json.loads(only.payloads[0])
    assert sent["migratable"] is False
    assert sent["body"] == body
    assert sorted(each.is_good for each in answers) == [False, True]
    assert [each.error for each in answers if not each.is_good] == ["upstream_broken"]
