"""The line to a worker behind NATS, frame by frame, over a broker in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import permutations, product

import msgspec
import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from router.headers import Headers
from router.reactor import Reactor
from router.wires.nats.broker import Message
from router.wires.nats.kept import PAUSED_BYTES_MAX
from router.wires.nats.line import NatsLine, NatsWire
from router.wires.nats.protocol import (
    CANCEL_SECONDS,
    DATA,
    DONE,
    DRAIN_NOTICE,
    ERROR,
    FROM,
    HEAD,
    HEARTBEAT,
    HEARTBEAT_LOST_SECONDS,
    HEARTBEAT_SECONDS,
    INBOX,
    SEQ,
    STATUS,
    TYPE,
    Names,
    frame_headers,
    head_headers,
)
from router.wires.nats.sent import NatsSent
from tests.asked import Asked
from tests.memory import MemoryNetwork
from tests.memory_broker import MemoryBroker, MemoryServer

WORKER = "10.0.0.7:8000"
NAMES = Names()
EVENT = b'data: {"x":1}\n\n'
EVENTS: Headers = [(b"content-type", b"text/event-stream")]
#: More than any wait here, less than a test may take.
LONG = 60.0


@define(eq=False)
class World:
    """A line to one worker, and the worker's side of the broker."""

    server: MemoryServer
    near: MemoryBroker
    far: MemoryBroker
    wire: NatsWire
    line: NatsLine
    bugs: list[Exception]
    requests: list[Message] = field(factory=list)
    cancels: list[str] = field(factory=list)
    missed: int = 0

    def listen(self) -> None:
        """The worker is there."""
        for subject, take in (
            (NAMES.request(WORKER), self.requests.extend),
            (NAMES.cancel(WORKER), self._cancelled),
        ):
            self.far.subscribe(subject, take, on_lost=lambda _: None)

    def _cancelled(self, messages: object) -> None:
        assert isinstance(messages, list)
        self.cancels += [message.payload.decode() for message in messages]

    def ask(self, asked: Asked, *, streams: bool = True, body: bytes = b"{}") -> NatsSent:
        self.wire.reactor.refresh()
        return self.line.send(
            b"POST", b"/v1/x", b"a: b\r\n", body, asked, streams=streams, queues=True
        )

    async def begin(self, *, streams: bool = True) -> tuple[Asked, NatsSent]:
        asked = Asked()
        sent = self.ask(asked, streams=streams)
        await wait_all_tasks_blocked()
        return asked, sent

    def tell(self, sent: NatsSent, payload: bytes, headers: dict[str, str]) -> None:
        self.far.publish(sent.reply, payload, headers=headers)

    async def frames(self, sent: NatsSent, *kinds: str, first: int = 0) -> None:
        """Frames with numbers, in their shortest form, in one batch."""
        for seq, kind in enumerate(kinds, first):
            self.tell(sent, *frame(kind, seq))
        await wait_all_tasks_blocked()


def frame(kind: str, seq: int) -> tuple[bytes, dict[str, str]]:
    if kind == HEAD:
        return b"", head_headers(seq, 200, EVENTS)
    payload = {DATA: EVENT, ERROR: b"engine died", "notice": DRAIN_NOTICE + b" soon"}
    status = 200 if kind == DONE else None
    said = ERROR if kind == "notice" else kind
    return payload.get(kind, b""), frame_headers(said, seq, status)


def old_frame(kind: str) -> tuple[bytes, dict[str, str]]:
    """As Infera's own worker writes it."""
    payload, headers = frame(kind, 0)
    del headers[SEQ]
    return payload, headers


@asynccontextmanager
async def world(
    *, is_there: bool = True, is_connected: bool = True, pending_max: int = 0
) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        server = MemoryServer()
        bugs: list[Exception] = []
        reactor = Reactor(MemoryNetwork(nursery), bugs.append)
        nursery.start_soon(reactor.run)
        near, far = server.broker(is_connected=is_connected), server.broker()
        counted: list[None] = []
        wire = NatsWire(
            near,
            reactor,
            lambda task: nursery.start_soon(task),
            pending_max=pending_max,
            missed=lambda: counted.append(None),
        )
        await wire.start()
        it = World(server, near, far, wire, wire.line(WORKER), bugs)
        if is_there:
            it.listen()
        await wait_all_tasks_blocked()
        yield it
        it.missed = len(counted)
        assert near.errors == []
        await trio.sleep(LONG)
        assert wire.inbox.open_requests == 0, "attempts left open"
        wire.close()
        nursery.cancel_scope.cancel()
    assert bugs == []


#### A request


async def test_a_request_says_what_the_worker_has_to_know(autojump_clock: MockClock) -> None:
    async with world() as it:
        asked, sent = await it.begin()

        (request,) = it.requests
        assert msgspec.json.decode(request.payload) == {
            "path": "/v1/x",
            "stream": True,
            "headers": {"a": "b"},
            "migratable": False,
            "body": {},
        }
        assert request.headers == {"rs-accept": "head,heartbeat,still", INBOX: sent.reply}
        assert request.reply == sent.reply
        assert asked.told == []
        sent.close()


async def test_every_attempt_has_its_own_inbox(autojump_clock: MockClock) -> None:
    async with world() as it:
        _, one = await it.begin()
        asked, other = await it.begin()

        await it.frames(one, HEAD, DATA, DONE)

        assert one.reply != other.reply
        assert asked.told == []
        other.close()


@pytest.mark.parametrize("streams", [True, False])
async def test_an_answer_is_told_as_it_comes(autojump_clock: MockClock, streams: bool) -> None:
    async with world() as it:
        asked, sent = await it.begin(streams=streams)

        await it.frames(sent, HEARTBEAT, HEAD)
        early = list(asked.told)
        await it.frames(sent, DATA, HEARTBEAT, DATA, DONE, first=2)

        assert early == ["connected", 200]
        assert asked.told == ["connected", 200, "body", "end"]
        assert asked.headers == EVENTS
        assert asked.body == EVENT * 2
    assert it.cancels == []


async def test_data_of_one_batch_is_told_at_once(autojump_clock: MockClock) -> None:
    async with world() as it:
        asked, sent = await it.begin()

        await it.frames(sent, HEAD, *[DATA] * 10)
        await it.frames(sent, DONE, first=11)

        assert asked.body == EVENT * 10
        assert asked.pieces == 1


async def test_a_head_carries_what_clients_are_told(autojump_clock: MockClock) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"7"), (b"x", b"y")]

        it.tell(sent, b"", head_headers(0, 429, headers))
        it.tell(sent, b'{"error":1}', frame_headers(DATA, 1))
        it.tell(sent, b"", frame_headers(DONE, 2, 429))
        await wait_all_tasks_blocked()

        assert asked.told == ["connected", 429, "body", "end"]
        assert asked.headers == headers[:2]


#### Nobody there


async def test_an_absent_worker_is_known_at_once(autojump_clock: MockClock) -> None:
    async with world(is_there=False) as it:
        began = trio.current_time()

        asked, _ = await it.begin()

        assert asked.told == ["unreachable"]
        assert trio.current_time() - began < 1
    assert it.cancels == []


async def test_servers_words_are_no_frames(autojump_clock: MockClock) -> None:
    async with world() as it:
        asked, sent = await it.begin()

        it.tell(sent, b"", {"Status": "408"})
        it.tell(sent, b'{"stream":"INFERA_REQUESTS","seq":12}', {})
        it.tell(sent, b'{"stream":"INFERA_REQUESTS","domain":"d","seq":12}', {})
        await wait_all_tasks_blocked()
        quiet = list(asked.told)
        await it.frames(sent, HEAD, DATA, DONE)

        assert quiet == []
        assert asked.told == ["connected", 200, "body", "end"]


#### Every short story of frames


KINDS = (HEAD, DATA, HEARTBEAT, DONE, ERROR, "notice")


@pytest.mark.slow
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("is_one_batch", [False, True])
async def test_any_frames_end_once_and_nothing_follows(
    autojump_clock: MockClock, is_old: bool, is_one_batch: bool
) -> None:
    async with world() as it:
        for kinds in product(KINDS, repeat=3):
            asked, sent = await it.begin()
            for seq, kind in enumerate(kinds):
                it.tell(sent, *(old_frame(kind) if is_old else frame(kind, seq)))
                if not is_one_batch:
                    await wait_all_tasks_blocked()
            await wait_all_tasks_blocked()

            lasts = [kind for kind in kinds if kind in (DONE, ERROR, "notice")]
            ended = {DONE: "end", ERROR: "broken", "notice": "handed back"}
            assert asked.told[0] == "connected"
            assert asked.ends == bool(lasts), kinds
            if lasts:
                assert asked.told[-1] == ended[lasts[0]], kinds
                assert asked.body == EVENT * kinds[: kinds.index(lasts[0])].count(DATA), kinds
            assert sent.is_over == bool(lasts)
            sent.close()
        cancelled = sum(
            all(k in (HEAD, DATA, HEARTBEAT) for k in x) for x in product(KINDS, repeat=3)
        )
        await trio.sleep(5)
        assert len(it.cancels) == 3 * cancelled


@pytest.mark.slow
@pytest.mark.parametrize("is_one_batch", [False, True])
async def test_lost_doubled_and_late_frames(autojump_clock: MockClock, is_one_batch: bool) -> None:
    """Every way in which up to five of the five frames arrive, each of them at most twice."""
    kinds = (HEAD, DATA, DATA, DATA, DONE)
    orders = {order[:n] for order in permutations([0, 1, 1, 2, 3, 4]) for n in range(5, 7)}
    async with world() as it:
        for order in sorted(orders):
            asked, sent = await it.begin()
            for seq in order:
                data, headers = frame(kinds[seq], seq)
                if kinds[seq] == DATA:
                    data = b"data: %d\n\n" % seq
                it.tell(sent, data, headers)
                if not is_one_batch:
                    await wait_all_tasks_blocked()
            await wait_all_tasks_blocked()

            due = 0
            for seq in order:
                if seq > due:
                    break
                due = max(due, seq + 1)
            is_gap = any(seq > max([-1, *order[:place]]) + 1 for place, seq in enumerate(order))
            told = asked.body
            assert told == b"".join(b"data: %d\n\n" % seq for seq in range(1, min(due, 4)))
            if due == 5:
                assert asked.told[-1] == "end"
            elif is_gap:
                assert asked.told[-1] == "missed", order
            sent.close()
        await trio.sleep(5)


async def test_whoever_has_numbered_goes_on_numbering(autojump_clock: MockClock) -> None:
    async with world() as it:
        for headers in ({TYPE: DATA}, {TYPE: DATA, SEQ: "x"}, {TYPE: DATA, SEQ: "-1"}, {}):
            asked, sent = await it.begin()

            await it.frames(sent, HEAD, DATA)
            it.tell(sent, EVENT, headers)
            await wait_all_tasks_blocked()

            assert asked.told == ["connected", 200, "body", "missed"]
            assert asked.body == EVENT
        await trio.sleep(5)
        assert len(it.cancels) == 3 * 4


async def test_frames_of_a_kind_nobody_knows_are_counted_and_skipped(
    autojump_clock: MockClock,
) -> None:
    async with world() as it:
        asked, sent = await it.begin()

        await it.frames(sent, HEAD, "music", DATA, DONE)

        assert asked.told == ["connected", 200, "body", "end"]


@pytest.mark.parametrize("status", ["", "99", "100", "600", "x"])
async def test_a_head_without_a_status_is_broken(autojump_clock: MockClock, status: str) -> None:
    async with world() as it:
        asked, sent = await it.begin()

        it.tell(sent, b"", {TYPE: HEAD, SEQ: "0", STATUS: status})
        await wait_all_tasks_blocked()

        assert asked.told == ["connected", "broken"]


#### A worker that tells its status at the end


@pytest.mark.parametrize(
    ("pieces", "status", "told", "kind"),
    [
        ([EVENT], 200, "events", b"text/event-stream"),
        ([EVENT[:1], EVENT[1:3], EVENT[3:]], 200, "events", b"text/event-stream"),
        ([b"", b"\r\n", b": hello\n\n"], 200, "events", b"text/event-stream"),
        ([b"\xef", b"\xbb\xbfevent: x\n\n"], 200, "events", b"text/event-stream"),
        ([b"id: 1\ndata: 2\n\n"], 200, "events", b"text/event-stream"),
        ([b'{"error":', b'{"code":400}}'], 400, "whole", b"application/json"),
        ([b'{"error":{}}'], 503, "whole", b"application/json"),
        ([b"[1]"], 200, "whole", b"application/json"),
        ([b"Internal Server Error"], 500, "whole", b"text/plain; charset=utf-8"),
        ([b"date", b": today"], 500, "whole", b"text/plain; charset=utf-8"),
        ([b"d"], 502, "whole", b"text/plain; charset=utf-8"),
        ([], 404, "whole", b"text/event-stream"),
    ],
)
async def test_the_first_data_tells_whether_events_come(
    autojump_clock: MockClock, pieces: list[bytes], status: int, told: str, kind: bytes
) -> None:
    async with world() as it:
        asked, sent = await it.begin()

        for piece in pieces:
            it.tell(sent, piece, {TYPE: DATA})
            await wait_all_tasks_blocked()
        early = list(asked.told)
        it.tell(sent, b"", {TYPE: DONE, STATUS: str(status)})
        await wait_all_tasks_blocked()

        assert (200 in early) == (told == "events")
        assert [each for each in asked.told if each != "body"] == ["connected", status, "end"]
        assert asked.headers == [(b"content-type", kind)]
        assert asked.body == b"".join(pieces)


async def test_what_is_compressed_without_saying_how_is_broken(
    autojump_clock: MockClock,
) -> None:
    async with world() as it:
        for streams in (True, False):
            asked, sent = await it.begin(streams=streams)

            it.tell(sent, b"\x1f\x8b\x08", {TYPE: DATA})
            await wait_all_tasks_blocked()

            assert asked.told == ["connected", "broken"]


async def test_a_unary_answer_waits_for_its_status(autojump_clock: MockClock) -> None:
    async with world() as it:
        asked, sent = await it.begin(streams=False)

        it.tell(sent, EVENT, {})
        await wait_all_tasks_blocked()
        early = list(asked.told)
        it.tell(sent, b"", {TYPE: DONE, STATUS: "200"})
        await wait_all_tasks_blocked()

        assert early == ["connected"]
        assert asked.told == ["connected", 200, "body", "end"]


async def test_a_refusal_of_the_agent_is_a_status(autojump_clock: MockClock) -> None:
    async with world() as it:
        for status, told in (
            (400, 400),
            (413, 413),
            (429, 429),
            (503, 503),
            (502, "unreachable"),
            (500, "broken"),
        ):
            asked, sent = await it.begin()

            it.tell(sent, b"no route to 10.0.0.7", frame_headers(ERROR, 0, status))
            await wait_all_tasks_blocked()

            assert asked.told[1] == told
            assert b"10.0.0.7" not in asked.body


#### Giving up


@pytest.mark.parametrize("when", ["before", "after a head", "in the middle"])
async def test_a_request_given_up_is_cancelled_three_times(
    autojump_clock: MockClock, when: str
) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        if when != "before":
            await it.frames(sent, HEAD)
        if when == "in the middle":
            await it.frames(sent, DATA, first=1)
        told = list(asked.told)

        sent.close()
        sent.close()
        await it.frames(sent, DATA, DONE, first=2)
        at_once = list(it.cancels)
        await trio.sleep(2 * CANCEL_SECONDS + 0.1)

        assert at_once == [sent.reply]
        assert it.cancels == [sent.reply] * 3
        assert asked.told == told
        await trio.sleep(10)
        assert len(it.cancels) == 3


async def test_giving_up_what_is_over_cancels_nothing(autojump_clock: MockClock) -> None:
    async with world() as it:
        for last in (DONE, ERROR, "notice"):
            _, sent = await it.begin()
            await it.frames(sent, HEAD, last)
            sent.close()
            sent.leave()
    assert it.cancels == []


async def test_whoever_gives_up_in_a_callback_hears_nothing_more(
    autojump_clock: MockClock,
) -> None:
    async with world() as it:
        for moment, told in (
            ("connected", ["connected"]),
            ("head", ["connected", 200]),
            ("body", ["connected", 200, "body"]),
        ):
            asked, sent = await it.begin()
            asked.when[moment] = sent.close

            await it.frames(sent, HEAD, DATA, HEARTBEAT, DATA, DONE)

            assert asked.told == told
            assert asked.pieces <= 1


async def test_leaving_waits_for_the_last_frame(autojump_clock: MockClock) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        await it.frames(sent, HEAD, DATA)
        sent.leave()
        await trio.sleep(0.5)
        await it.frames(sent, DATA, DONE, first=2)

        assert asked.told == ["connected", 200, "body"]
        assert asked.body == EVENT
        await trio.sleep(10)
        assert it.cancels == []


async def test_leaving_does_not_wait_for_ever(autojump_clock: MockClock) -> None:
    async with world() as it:
        _, sent = await it.begin()
        await it.frames(sent, HEAD, DATA)

        sent.leave()
        await trio.sleep(0.9)
        early = list(it.cancels)
        await trio.sleep(10)

        assert early == []
        assert it.cancels == [sent.reply] * 3


async def test_cancels_survive_a_broker_that_is_away(autojump_clock: MockClock) -> None:
    async with world() as it:
        _, sent = await it.begin()
        await it.frames(sent, HEAD)

        it.server.cut(it.near)
        sent.close()
        await trio.sleep(10)
        away = list(it.cancels)
        it.server.mend(it.near)
        await trio.sleep(10)

        assert away == []
        assert it.cancels == [sent.reply] * 3


async def test_the_last_cancels_are_sent_at_the_end(autojump_clock: MockClock) -> None:
    async with world() as it:
        _, sent = await it.begin()
        await it.frames(sent, HEAD)
        sent.close()

        await it.wire.flush()

        assert it.cancels == [sent.reply] * 2


#### Two agents with one id


def of(sender: str, kind: str, seq: int) -> tuple[bytes, dict[str, str]]:
    payload, headers = frame(kind, seq)
    data = (sender.encode() or EVENT) if kind == DATA else payload
    return data, {**headers, FROM: sender} if sender else headers


TWO = sorted(set(permutations("aaaabbbb", 8)))


@pytest.mark.parametrize("other", ["b", ""])
async def test_of_two_who_answer_the_first_is_heard(autojump_clock: MockClock, other: str) -> None:
    """Every order in which the frames of two may come, singly and in one batch."""
    kinds = (HEAD, DATA, DATA, DONE)
    async with world() as it:
        for order, is_batch in product(TWO, (False, True)):
            asked, sent = await it.begin()
            counts = {"a": 0, "b": 0}
            for who in order:
                seq, counts[who] = counts[who], counts[who] + 1
                it.tell(sent, *of("a" if who == "a" else other, kinds[seq], seq))
                if not is_batch:
                    await wait_all_tasks_blocked()
            await wait_all_tasks_blocked()

            first = "a" if order[0] == "a" else other
            assert asked.told == ["connected", 200, "body", "end"], (order, is_batch)
            assert asked.body == (first.encode() or EVENT) * 2, (order, is_batch)


async def test_who_is_not_heard_fills_no_gap(autojump_clock: MockClock) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        for sender, kind, seq in (("a", HEAD, 0), ("a", DATA, 1), ("b", DATA, 2), ("a", DATA, 3)):
            it.tell(sent, *of(sender, kind, seq))
        await wait_all_tasks_blocked()

        assert asked.told == ["connected", 200, "body", "missed"]
        assert asked.body == b"a"


#### Slow clients


@pytest.mark.parametrize("last", [DONE, ERROR, "notice"])
async def test_a_pause_loses_and_reorders_nothing(autojump_clock: MockClock, last: str) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        await it.frames(sent, HEAD, DATA)

        sent.pause()
        for seq in range(2, 100):
            it.tell(sent, b"%d " % seq, frame_headers(DATA, seq))
        it.tell(sent, *frame(last, 100))
        await trio.sleep(100)
        paused = asked.body, list(asked.told)
        sent.resume()
        in_callback = asked.body
        await wait_all_tasks_blocked()

        assert paused == (EVENT, ["connected", 200, "body"])
        assert in_callback == EVENT
        assert asked.body == EVENT + b"".join(b"%d " % seq for seq in range(2, 100))
        assert asked.ends == 1
        assert asked.told[-1] in ("end", "broken", "handed back")


@pytest.mark.parametrize("pauses_at", range(6))
async def test_any_pause_anywhere(autojump_clock: MockClock, pauses_at: int) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        for seq, kind in enumerate((HEARTBEAT, HEAD, DATA, DATA, DONE)):
            if seq == pauses_at:
                sent.pause()
            await it.frames(sent, kind, first=seq)
            if seq == pauses_at + 1:
                sent.resume()
        sent.resume()
        await wait_all_tasks_blocked()

        assert asked.told == ["connected", 200, "body", "end"]
        assert asked.body == EVENT * 2


async def test_whoever_pauses_while_being_told_is_told_the_rest_later(
    autojump_clock: MockClock,
) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        asked.when["body"] = sent.pause
        piece = b"x" * 200_000

        it.tell(sent, *frame(HEAD, 0))
        for seq in range(1, 11):
            it.tell(sent, piece, frame_headers(DATA, seq))
            await wait_all_tasks_blocked()
        it.tell(sent, *frame(DONE, 11))
        await wait_all_tasks_blocked()
        first = len(asked.body)
        rounds = 0
        while asked.told[-1] != "end":
            rounds += 1
            sent.resume()
            await wait_all_tasks_blocked()

        assert first == 200_000
        assert asked.body == piece * 10
        assert 3 <= rounds <= 10


async def test_what_waits_for_a_slow_client_is_bounded(autojump_clock: MockClock) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        await it.frames(sent, HEAD)
        sent.pause()
        piece = b"x" * (PAUSED_BYTES_MAX // 32)

        for seq in range(1, 33):
            it.tell(sent, piece, frame_headers(DATA, seq))
        await wait_all_tasks_blocked()
        full = list(asked.told)
        it.tell(sent, b"x", frame_headers(DATA, 33))
        await wait_all_tasks_blocked()

        assert full == ["connected", 200]
        assert asked.told == ["connected", 200, "unread"]
        await trio.sleep(5)
        assert it.cancels == [sent.reply] * 3


async def test_what_a_slow_client_has_taken_makes_room(autojump_clock: MockClock) -> None:
    piece = b"x" * (PAUSED_BYTES_MAX // 32)

    async with world() as it:
        asked, sent = await it.begin()
        await it.frames(sent, HEAD)
        for seq in range(1, 41):
            sent.pause()
            it.tell(sent, piece, frame_headers(DATA, seq))
            await wait_all_tasks_blocked()
            sent.resume()
            await wait_all_tasks_blocked()

        assert asked.body == piece * 40
        assert asked.ends == 0


#### Silence


async def test_an_agent_that_falls_silent_is_lost(autojump_clock: MockClock) -> None:
    async with world() as it:
        for first in ((HEARTBEAT,), (HEAD,), (HEAD, DATA)):
            asked, sent = await it.begin()
            await it.frames(sent, *first)
            await trio.sleep(HEARTBEAT_LOST_SECONDS - 0.1)
            early = asked.ends
            await trio.sleep(1.2)

            assert early == 0
            assert asked.told[-1] == "broken"
        await trio.sleep(5)
        assert len(it.cancels) == 9


async def test_heartbeats_keep_a_silent_engine_alive(autojump_clock: MockClock) -> None:
    async with world() as it:
        asked, sent = await it.begin()

        for seq in range(100):
            await it.frames(sent, HEARTBEAT, first=seq)
            await trio.sleep(HEARTBEAT_SECONDS)
        await it.frames(sent, HEAD, DATA, DONE, first=100)

        assert asked.told == ["connected", 200, "body", "end"]


@pytest.mark.parametrize("kinds", [(DATA,), (DATA, DATA), (DATA, HEARTBEAT), (HEARTBEAT, DATA)])
async def test_whatever_comes_is_no_silence(
    autojump_clock: MockClock, kinds: tuple[str, ...]
) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        await it.frames(sent, HEAD)

        for turn in range(20):
            await it.frames(sent, *kinds, first=1 + turn * len(kinds))
            await trio.sleep(HEARTBEAT_LOST_SECONDS / 3)

        assert asked.ends == 0
        sent.close()


async def test_a_peer_without_heartbeats_may_be_silent(autojump_clock: MockClock) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        await trio.sleep(100)
        it.tell(sent, *old_frame(DATA))
        await trio.sleep(800)
        it.tell(sent, *old_frame(DONE))
        await wait_all_tasks_blocked()

        assert asked.told == ["connected", 200, "body", "end"]


async def test_a_request_that_never_arrives_is_missed_where_agents_say_what_they_have(
    autojump_clock: MockClock,
) -> None:
    async with world() as it:
        _, first = await it.begin()
        await it.frames(first, HEARTBEAT, HEAD, DATA, DONE)

        asked, sent = await it.begin()
        await trio.sleep(HEARTBEAT_LOST_SECONDS - 0.1)
        early = asked.ends
        await trio.sleep(1.2)

        assert early == 0
        assert asked.told == ["missed"]
        await trio.sleep(3)
        assert it.cancels == [sent.reply] * 3

        # An old worker may have taken the agent's place: it may be silent.
        other, last = await it.begin()
        it.tell(last, *old_frame(DATA))
        await trio.sleep(800)
        it.tell(last, *old_frame(DONE))
        await wait_all_tasks_blocked()
        patient, sent = await it.begin()
        await trio.sleep(800)
        it.tell(sent, *old_frame(DONE))
        await wait_all_tasks_blocked()

        assert other.told == ["connected", 200, "body", "end"]
        assert patient.told[-1] == "end"
    assert it.missed == 1


async def test_a_request_that_is_lost_on_its_way_to_an_agent_is_given_up(
    autojump_clock: MockClock,
) -> None:
    async with world() as it:
        for is_known, told in ((False, []), (True, ["missed"])):
            if is_known:  # by what it has answered before
                _, first = await it.begin()
                await it.frames(first, HEARTBEAT, HEAD, DONE)
            it.server.lose("infera.req.>")
            asked, sent = await it.begin()

            await trio.sleep(HEARTBEAT_LOST_SECONDS + 1.1)

            assert asked.told == told
            sent.close()


async def test_frames_that_wait_in_a_stalled_process_are_no_silence(
    autojump_clock: MockClock,
) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        await it.frames(sent, HEAD)

        it.server.stall()
        await it.frames(sent, DATA, first=1)
        await trio.sleep(HEARTBEAT_LOST_SECONDS + 0.5)
        it.server.go_on()
        await wait_all_tasks_blocked()
        await it.frames(sent, DONE, first=2)

        assert asked.told == ["connected", 200, "body", "end"]


#### The broker goes away


async def lose_connection(it: World, how: str) -> None:
    if how == "down":
        it.server.down()
        await trio.sleep(1)
        it.server.up()
    elif how == "cut":
        it.server.cut(it.near)
        await trio.sleep(1)
        it.server.mend(it.near)
    else:
        prefix = next(iter(it.near.subscriptions)).subject[:-1]
        it.server.lose(f"{prefix}nobody", told=True)
        it.far.publish(f"{prefix}nobody", b"")
    await wait_all_tasks_blocked()


WAYS = ["down", "cut", "slow consumer"]


@pytest.mark.parametrize("how", WAYS)
async def test_numbers_show_that_nothing_was_lost(autojump_clock: MockClock, how: str) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        await it.frames(sent, HEAD, DATA)

        await lose_connection(it, how)
        await it.frames(sent, DATA, DONE, first=2)

        assert asked.told == ["connected", 200, "body", "end"]
    assert it.missed == 0


@pytest.mark.parametrize("how", WAYS)
async def test_the_next_heartbeat_is_waited_for(autojump_clock: MockClock, how: str) -> None:
    """An agent that has lost nothing says so within its rhythm, and its engine may be silent."""
    async with world() as it:
        asked, sent = await it.begin()
        await it.frames(sent, HEAD, DATA)
        await trio.sleep(HEARTBEAT_LOST_SECONDS - 0.5)  # it is about to be looked at
        await it.frames(sent, DATA, first=2)
        await lose_connection(it, how)
        await trio.sleep(HEARTBEAT_SECONDS - 0.1)
        await it.frames(sent, HEARTBEAT, first=3)
        await trio.sleep(HEARTBEAT_SECONDS)
        await it.frames(sent, HEARTBEAT, DONE, first=4)

        assert asked.told == ["connected", 200, "body", "end"]


@pytest.mark.parametrize("how", WAYS)
async def test_numbers_show_what_was_lost(autojump_clock: MockClock, how: str) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        await it.frames(sent, HEAD, DATA)

        await lose_connection(it, how)
        await it.frames(sent, DONE, first=3)

        assert asked.told == ["connected", 200, "body", "missed"]
    assert it.missed == 1


@pytest.mark.parametrize("how", WAYS)
async def test_without_numbers_what_may_be_lost_is_lost(
    autojump_clock: MockClock, how: str
) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        it.tell(sent, *old_frame(DATA))
        await wait_all_tasks_blocked()

        await lose_connection(it, how)
        it.tell(sent, *old_frame(DONE))
        await trio.sleep(5)

        assert asked.told == ["connected", 200, "body", "missed"]
        assert set(it.cancels) == {sent.reply}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("then", ["old", "new", "nothing"])
async def test_before_the_first_frame_it_is_open_who_answers(
    autojump_clock: MockClock, how: str, then: str
) -> None:
    async with world() as it:
        asked, sent = await it.begin()

        await lose_connection(it, how)
        open_still = list(asked.told)
        if then == "new":
            await it.frames(sent, HEAD, DATA, DONE)
        elif then == "old":
            it.tell(sent, *old_frame(DATA))
        await trio.sleep(LONG)

        assert open_still == []
        assert asked.told == (["connected", 200, "body", "end"] if then == "new" else ["missed"])


async def test_nobody_is_called_silent_while_nobody_can_be_heard(
    autojump_clock: MockClock,
) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        await it.frames(sent, HEAD, DATA)

        it.server.cut(it.near)
        await trio.sleep(15)
        it.server.mend(it.near)
        await trio.sleep(5)
        await it.frames(sent, DATA, DONE, first=2)

        assert asked.told == ["connected", 200, "body", "end"]


async def test_a_broker_is_not_waited_for_for_ever(autojump_clock: MockClock) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        await it.frames(sent, HEAD, DATA)

        it.server.cut(it.near)
        await trio.sleep(20)
        it.server.mend(it.near)
        await trio.sleep(3)

        assert asked.told == ["connected", 200, "body", "missed"]
        assert set(it.cancels) == {sent.reply}


async def test_a_request_waits_for_the_broker(autojump_clock: MockClock) -> None:
    async with world() as it:
        it.server.cut(it.near)
        asked, sent = await it.begin()
        await trio.sleep(4)
        early = list(asked.told)
        it.server.mend(it.near)
        await wait_all_tasks_blocked()
        await it.frames(sent, HEAD, DATA, DONE)

        assert early == []
        assert asked.told == ["connected", 200, "body", "end"]
        assert len(it.requests) == 1


async def test_a_request_goes_out_as_soon_as_its_agent_is_back_as_well(
    autojump_clock: MockClock,
) -> None:
    async with world() as it:
        it.server.cut(it.near)
        it.server.cut(it.far)
        await trio.sleep(1.0)
        it.server.mend(it.near)
        asked, sent = await it.begin()
        await trio.sleep(1.0)
        it.server.mend(it.far)
        await trio.sleep(0.5)

        assert asked.told == []
        assert len(it.requests) == 1
        sent.close()


async def test_at_the_first_connection_who_is_not_there_is_absent(
    autojump_clock: MockClock,
) -> None:
    """Nothing was lost, so nobody is on his way back."""
    async with world(is_there=False, is_connected=False) as it:
        await trio.sleep(1.0)
        it.server.mend(it.near)
        asked, _ = await it.begin()

        assert asked.told == ["unreachable"]


async def test_a_request_does_not_wait_for_ever(autojump_clock: MockClock) -> None:
    async with world() as it:
        it.server.cut(it.near)
        asked, _ = await it.begin()
        gone, given_up = await it.begin()
        given_up.close()
        await trio.sleep(5.1)
        late = list(asked.told)
        it.server.mend(it.near)
        await trio.sleep(5)

        assert late == ["missed"]
        assert gone.told == []
        assert it.requests == []
        assert it.cancels == []
    assert it.missed == 0


async def test_a_probe_does_not_wait_for_the_broker(autojump_clock: MockClock) -> None:
    async with world() as it:
        asked = Asked()
        it.line.send(b"GET", b"/health", b"", b"", asked)
        await wait_all_tasks_blocked()
        waiting = list(asked.told)

        it.server.cut(it.near)
        late = Asked()
        it.line.send(b"GET", b"/health", b"", b"", late)

        assert waiting == []
        assert asked.told == ["missed"]
        assert late.told == ["missed"]


#### What is too large


@pytest.mark.parametrize("size", [99_900, 100_000, 100_001, 1_000_000])
async def test_a_request_above_the_limit_is_not_sent(autojump_clock: MockClock, size: int) -> None:
    async with world() as it:
        it.server.max_payload = 100_000
        asked = Asked()
        body = b'"%b"' % (b"x" * (size - 2))

        it.ask(asked, body=body)
        await wait_all_tasks_blocked()

        assert asked.told == ["connected", ("too large", 100000)]
        assert it.requests == []
        assert it.near.is_connected


async def test_a_request_below_the_limit_is_sent_whole(autojump_clock: MockClock) -> None:
    async with world() as it:
        it.server.max_payload = 100_000
        asked = Asked()
        body = b'"%b"' % (b"x" * 99_000)

        sent = it.ask(asked, body=body)
        await it.frames(sent, HEAD, DONE)

        assert body in it.requests[0].payload
        assert asked.told == ["connected", 200, "end"]


#### Bugs


@pytest.mark.parametrize("moment", ["connected", "head", "body", "end", "broken", "handed back"])
@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_bug_in_a_callback_is_told_to_its_own_request(
    autojump_clock: MockClock, moment: str, is_paused: bool
) -> None:
    async with world() as it:
        asked, sent = await it.begin()
        other, another = await it.begin()

        bug = ValueError("bug")

        def fail() -> None:
            raise bug

        asked.when[moment] = fail
        if is_paused:
            sent.pause()
        last = {"broken": ERROR, "handed back": "notice"}.get(moment, DONE)
        for seq, kind in enumerate((HEAD, DATA, last)):
            it.tell(sent, *frame(kind, seq))
            it.tell(another, *frame(DONE if kind == last else kind, seq))
        await wait_all_tasks_blocked()
        sent.resume()
        await wait_all_tasks_blocked()

        assert asked.told[-1] == ("crash", bug)
        assert other.told == ["connected", 200, "body", "end"]
        await trio.sleep(5)


#### The admission limit


@define(eq=False)
class Queue:
    """The worker's consumer: what it was handed, and what it has not acknowledged."""

    it: World
    jobs: list[object] = field(factory=list)

    def consume(self) -> None:
        queue = self.it.far.work_queue(NAMES.stream, [NAMES.requests], max_messages=10)
        durable = NAMES.request(WORKER).rpartition(".")[2]
        queue.consume(
            durable, NAMES.request(WORKER), self._take, on_lost=lambda _: None, max_deliver=1
        )

    def _take(self, jobs: object) -> None:
        assert isinstance(jobs, list)
        self.jobs += jobs
        self.it.requests += [job.message for job in jobs]


async def test_a_queued_request_is_answered_in_its_inbox(autojump_clock: MockClock) -> None:
    async with world(is_there=False, pending_max=2) as it:
        Queue(it).consume()
        asked, sent = await it.begin()

        (request,) = it.requests
        assert request.headers[INBOX] == sent.reply
        await it.frames(sent, HEAD, DATA, DONE)

        assert asked.told == ["connected", 200, "body", "end"]


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_full_worker_refuses(autojump_clock: MockClock, at_once: bool) -> None:
    async with world(is_there=False, pending_max=3) as it:
        Queue(it).consume()
        every = []
        for _ in range(10):
            asked = Asked()
            every.append((asked, it.ask(asked)))
            if not at_once:
                await trio.sleep(1)
        await trio.sleep(1)

        refused = [asked for asked, _ in every if asked.told]
        assert len(it.requests) == 3
        assert len(refused) == 7
        for asked in refused:
            assert asked.told == ["connected", "full"]
        for _, sent in every:
            sent.close()


async def test_probes_are_not_refused(autojump_clock: MockClock) -> None:
    async with world(pending_max=1) as it:
        Queue(it).consume()
        _, sent = await it.begin()
        asked = Asked()

        probe = it.line.send(b"GET", b"/health", b"", b"", asked)
        await wait_all_tasks_blocked()
        await it.frames(probe, HEAD, DONE)

        assert asked.told == ["connected", 200, "end"]
        sent.close()


async def test_a_backlog_that_cannot_be_read_refuses_nobody(autojump_clock: MockClock) -> None:
    async with world(is_there=False, pending_max=1) as it:
        # An old worker without a queue: nobody consumes, so there is no backlog to be read.
        it.far.subscribe(NAMES.cancel(WORKER), lambda _: None, on_lost=lambda _: None)
        every = [await it.begin() for _ in range(3)]

        assert [asked.told for asked, _ in every] == [[]] * 3
        assert len(it.server.streams[NAMES.stream].stored) == 3
        for _, sent in every:
            sent.close()


async def test_nothing_is_stored_for_a_worker_that_was_never_there(
    autojump_clock: MockClock,
) -> None:
    async with world(is_there=False, pending_max=1) as it:
        started = trio.current_time()
        every = [await it.begin() for _ in range(3)]

        assert [asked.told for asked, _ in every] == [["unreachable"]] * 3
        assert trio.current_time() - started < 1
        assert not it.server.streams[NAMES.stream].stored
        Queue(it).consume()
        it.far.subscribe(NAMES.cancel(WORKER), it._cancelled, on_lost=lambda _: None)
        await trio.sleep(0.3)
        asked, sent = await it.begin()
        await it.frames(sent, HEAD, DATA, DONE)
        assert asked.told[-1] == "end"


async def test_a_full_queue_is_told(autojump_clock: MockClock) -> None:
    async with world(is_there=False, pending_max=100) as it:
        Queue(it).consume()  # it was made for ten messages
        every = [await it.begin() for _ in range(12)]
        await trio.sleep(1)

        refused = [asked for asked, _ in every if "full" in asked.told]
        assert len(refused) == 2
        for _, sent in every:
            sent.close()


@pytest.mark.parametrize("moment", ["at once", "while it is stored", "later"])
async def test_a_queued_request_given_up_is_cancelled_or_not_sent(
    autojump_clock: MockClock, moment: str
) -> None:
    async with world(is_there=False, pending_max=5) as it:
        Queue(it).consume()
        it.far.subscribe(NAMES.cancel(WORKER), it._cancelled, on_lost=lambda _: None)
        asked = Asked()
        sent = it.ask(asked)
        if moment == "at once":
            sent.close()
        elif moment == "while it is stored":
            while not sent.is_published:
                await trio.lowlevel.checkpoint()
            sent.close()
        else:
            await trio.sleep(1)
            sent.close()
        await trio.sleep(5)

        assert asked.told == []
        assert len(it.cancels) == (0 if moment == "at once" else 3)
        assert len(it.requests) == (0 if moment == "at once" else 1)


async def test_a_queued_request_waits_for_a_broker_that_is_away(autojump_clock: MockClock) -> None:
    async with world(is_there=False, pending_max=5) as it:
        Queue(it).consume()
        it.server.cut(it.near)
        asked, sent = await it.begin()
        lost, other = await it.begin()
        given_up, closed = await it.begin()
        closed.close()
        await trio.sleep(4)
        assert (asked.told, it.requests) == ([], [])
        it.server.mend(it.near)
        await trio.sleep(0.1)
        assert {each.headers[INBOX] for each in it.requests} == {sent.reply, other.reply}
        assert len(it.requests) == 2
        await it.frames(sent, HEAD, DATA, DONE)

        assert asked.told == ["connected", 200, "body", "end"]
        assert (lost.told, given_up.told) == ([], [])
        it.wire.lose_worker(WORKER)
        assert lost.told == ["unreachable"]  # nothing of it was lost: it was not sent before
        it.server.cut(it.near)
        asked, _ = await it.begin()
        await trio.sleep(6)
        assert asked.told == ["missed"]
    assert it.missed == 0  # it never left


@pytest.mark.parametrize("seconds", [0.0, 1.0])
async def test_a_connection_that_is_lost_at_any_step_of_storing(
    autojump_clock: MockClock, seconds: float
) -> None:
    """What cannot have been stored waits; what may have been is looked after, and sent once."""
    outcomes = set()
    for steps in range(20):
        async with world(is_there=False, pending_max=5) as it:
            Queue(it).consume()
            it.far.subscribe(NAMES.cancel(WORKER), it._cancelled, on_lost=lambda _: None)
            asked = Asked()
            sent = it.ask(asked)
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
            it.server.cut(it.near)
            await trio.sleep(seconds)
            it.server.mend(it.near)
            await trio.sleep(1.0)
            assert asked.told == []
            assert len(it.requests) <= 1, steps
            if it.requests:
                await it.frames(sent, HEAD, DATA, DONE)
            await trio.sleep(10.0)
            expected = ["connected", 200, "body", "end"] if it.requests else ["missed"]
            assert asked.told == expected, steps
            outcomes.add(len(it.requests))
            assert bool(it.cancels) != bool(it.requests), steps
        assert it.missed == 1 - len(it.requests)
    assert outcomes == {0, 1}


@pytest.mark.parametrize("has_word", [True, False])
@pytest.mark.parametrize("is_exposed", [True, False])
async def test_what_no_agent_has_taken_ran_nowhere(
    autojump_clock: MockClock, has_word: bool, is_exposed: bool
) -> None:
    """An agent would have said so at once, and that was not lost: its worker is passed over."""
    async with world(is_there=False, pending_max=5) as it:
        Queue(it).consume()
        it.far.subscribe(NAMES.cancel(WORKER), it._cancelled, on_lost=lambda _: None)
        _, sent = await it.begin()
        if has_word:
            await it.frames(sent, HEAD, DATA, DONE)
        else:
            sent.close()
        asked, _ = await it.begin()
        if is_exposed:
            it.server.cut(it.near)
            it.server.mend(it.near)
        it.cancels.clear()
        it.wire.lose_worker(WORKER)
        await trio.sleep(5)

        is_sure = has_word and not is_exposed
        assert asked.told == (["unreachable"] if is_sure else ["missed"])
        assert len(it.cancels) >= 3
    assert it.missed == (not is_sure)


@pytest.mark.parametrize("was_there", [True, False])
async def test_probes_of_who_is_not_there_are_refused_and_not_stored(
    autojump_clock: MockClock, was_there: bool
) -> None:
    async with world(is_there=False, pending_max=5) as it:
        _, first = await it.begin()  # makes the stream
        assert first.is_over
        queue = it.far.work_queue(NAMES.stream, [NAMES.requests], max_messages=10)
        if was_there:
            durable = NAMES.request(WORKER).rpartition(".")[2]
            taking = queue.consume(
                durable, NAMES.request(WORKER), lambda _: None, on_lost=lambda _: None
            )
            await wait_all_tasks_blocked()
            taking.close()
            await trio.sleep(0.3)
            asked, _ = await it.begin()
        began = len(it.server.streams[NAMES.stream].stored)
        for turn in range(3):
            probed = Asked()
            started = trio.current_time()
            it.line.send(b"GET", b"/health", b"", b"", probed)
            await wait_all_tasks_blocked()
            assert probed.told == ["unreachable"]
            assert trio.current_time() == started
            if was_there:
                # Its agent may only be between two connections, at first.
                assert bool(asked.told) == (turn == 2)
            await trio.sleep(2.0)
        assert len(it.server.streams[NAMES.stream].stored) == began

        it.far.subscribe(NAMES.cancel(WORKER), lambda _: None, on_lost=lambda _: None)
        probe = it.line.send(b"GET", b"/health", b"", b"", Asked())
        await wait_all_tasks_blocked()
        assert len(it.server.streams[NAMES.stream].stored) == began + 1
        probe.close()


async def test_every_absence_counts_from_its_own_beginning(autojump_clock: MockClock) -> None:
    """An agent between two connections takes what is stored for it, also the second time."""
    async with world(is_there=False, pending_max=5) as it:
        Queue(it).consume()
        for _ in range(2):
            asked, sent = await it.begin()
            away, back = Asked(), Asked()
            it.line.send(b"GET", b"/health", b"", b"", away)
            await wait_all_tasks_blocked()
            assert away.told == ["unreachable"]
            assert asked.told == []
            sent.close()

            listening = it.far.subscribe(
                NAMES.cancel(WORKER), lambda _: None, on_lost=lambda _: None
            )
            probe = it.line.send(b"GET", b"/health", b"", b"", back)
            await wait_all_tasks_blocked()
            assert back.told == []
            probe.close()
            listening.close()
            await trio.sleep(60)


async def test_a_queued_request_above_the_limit_is_not_stored(autojump_clock: MockClock) -> None:
    async with world(is_there=False, pending_max=5) as it:
        Queue(it).consume()
        it.server.max_payload = 1000
        asked = Asked()
        it.ask(asked, body=b'"%b"' % (b"x" * 950))
        await trio.sleep(1)

        assert asked.told == ["connected", ("too large", 1000)]
