"""/debug/transitions, spoken by a real WebSocket client over the in-memory network and over TCP."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
import trio_websocket
from attrs import frozen

from router import cli
from router.app import App
from router.booking import Booking, Listener
from router.commands.recordings import read_recording
from router.commands.watching import Screen
from router.config import Settings
from router.feed import WAITING_MAX, Feed, Filter, Lost, Transition, Watcher
from router.logs import HasId, Stamp, configure
from router.metrics import Metrics
from router.sim import SimEngine, SimSettings
from router.sockets import Network
from router.tcp import TcpNetwork
from router.websocket import GOING_AWAY, STOPPED, WatchError, WatchRefused, watch
from router.workerspec import WorkerSpec
from statemachines import AGENT_CHARTS, ROUTER_CHARTS, Edge
from statemachines import REQUEST as CHART
from statemachines.replay import replay
from tests.memory import MemoryNetwork

BODY = b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":3}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\n"
    b"x-request-id: r1\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(BODY), BODY)
)


@asynccontextmanager
async def serving(network: Network, **settings: object) -> AsyncIterator[App]:
    values: dict[str, object] = {"host": "127.0.0.1", "port": 8000 if _is_memory(network) else 0}
    app = App(
        Settings(**(values | settings)),  # type: ignore[arg-type]  # checked by the settings
        network,
        configure(format="text", level="error"),
    )
    app.listen()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(app.run)
        yield app
        nursery.cancel_scope.cancel()


def _is_memory(network: Network) -> bool:
    return isinstance(network, MemoryNetwork)


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    return b"".join([bytes(piece) async for piece in stream])


async def test_a_watcher_sees_a_request_and_its_leg(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world)
        network.engines["127.0.0.1", 9000] = SimEngine(SimSettings()).serve_connection
        workers = (WorkerSpec.parse("http://127.0.0.1:9000,id=w0"),)
        async with serving(network, worker_urls=workers):
            await trio.sleep(3)
            stream = network.open_client()
            socket = await trio_websocket.wrap_client_stream(
                world,
                stream,  # type: ignore[arg-type]  # annotated narrower than what it needs
                "baton",
                "/debug/transitions",
            )
            asking = network.open_client()
            await asking.send_all(REQUEST)
            await read_all(asking)

            seen = []
            with trio.move_on_after(1):
                while True:
                    seen.append(msgspec.json.decode(await socket.get_message()))

            await socket.aclose()
        world.cancel_scope.cancel()
    facts = [(each["machine"], each["fact"]) for each in seen]
    assert facts == [
        ("request", "admitted"),
        ("leg", "connected"),
        ("leg", "head_arrived"),
        ("leg", "completed"),
        ("request", "completed"),
    ]
    assert {each["id"] for each in seen} == {"r1", "r1.1"}


async def test_a_websocket_leaves_the_reactor_with_its_unread_bytes() -> None:
    network = TcpNetwork()
    async with serving(network) as app:
        assert app.fleet.all() == ()
        host, port = app.address
        # Handshake and first frame (a masked ping, payload "hi") in one packet.
        ping = bytes([0x89, 0x82, 0, 0, 0, 0]) + b"hi"
        stream = await trio.open_tcp_stream(host, port)
        await stream.send_all(HANDSHAKE + ping)

        got = b""
        with trio.fail_after(5):
            while not got.endswith(b"hi"):
                got += await stream.receive_some()

        assert got.startswith(b"HTTP/1.1 101")
        assert got.endswith(b"\x8a\x02hi")
        await stream.aclose()
    network.close()


HANDSHAKE = (
    b"GET /debug/transitions HTTP/1.1\r\nhost: b\r\nupgrade: websocket\r\n"
    b"connection: upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def test_an_answer_before_it_is_written_to_a_slow_client_to_its_end(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world, pipe_bytes=500)
        async with serving(network):
            stream = network.open_client()
            await stream.send_all(b"GET /metrics HTTP/1.1\r\nhost: b\r\n\r\n" + HANDSHAKE)
            await trio.sleep(30)  # more than a handshake may take, less than a stall

            got = b""
            while b"HTTP/1.1 101" not in got:
                got += await stream.receive_some()

        world.cancel_scope.cancel()
    head, _, rest = got.partition(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    assert length > 1000
    assert rest[length:].startswith(b"HTTP/1.1 101")


async def test_who_takes_nothing_of_the_answer_before_it_is_gone(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world, pipe_bytes=500)
        async with serving(network, client_stall_timeout_secs=60.0):
            stream = network.open_client()
            await stream.send_all(b"GET /metrics HTTP/1.1\r\nhost: b\r\n\r\n" + HANDSHAKE)

            await trio.sleep(61)

            assert not network.open_sockets
        world.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("settings", "head", "status"),
    [
        ({"admin_key": "k"}, b"upgrade: websocket\r\nconnection: upgrade\r\n", b"401"),
        ({}, b"", b"400"),
    ],
)
async def test_who_may_not_watch_is_told_so(
    settings: dict[str, object], head: bytes, status: bytes, autojump_clock: trio.abc.Clock
) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world)
        async with serving(network, **settings):
            await trio.sleep(1)
            stream = network.open_client()
            await stream.send_all(
                b"GET /debug/transitions HTTP/1.1\r\nhost: b\r\n%bconnection: close\r\n\r\n" % head
            )

            answer = await read_all(stream)

        world.cancel_scope.cancel()
    assert answer.startswith(b"HTTP/1.1 " + status)


async def test_what_a_router_shows_is_what_the_charts_replay(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world)
        sim = SimEngine(SimSettings(faults=("request=1:cut,at=head",)))
        network.engines["127.0.0.1", 9000] = sim.serve_connection
        network.engines["127.0.0.1", 9001] = SimEngine(SimSettings()).serve_connection
        workers = tuple(WorkerSpec.parse(f"http://127.0.0.1:900{n},id=w{n}") for n in (0, 1))
        async with serving(network, worker_urls=workers):
            await trio.sleep(3)
            async with watching(network, world) as socket:
                await ask(network)
                lines: list[str] = []
                with trio.move_on_after(30):
                    while True:
                        lines.append(str(await socket.get_message()))
            asking = network.open_client()
            await asking.send_all(
                b"GET /debug/requests/r1 HTTP/1.1\r\nhost: b\r\nconnection: close\r\n\r\n"
            )
            shown = (await read_all(asking)).partition(b"\r\n\r\n")[2]
        world.cancel_scope.cancel()

    live = replay(read_recording("\n".join(lines).encode()).records)
    told = read_recording(shown)
    whole = replay(told.records, is_whole=told.is_whole)

    assert live.refusals == whole.refusals == ()
    assert {life.chart.name for life in live.lives} >= {"request", "leg", "worker", "breaker"}
    (request,) = [life for life in live.lives if life.chart.name == "request"]
    facts = [edge.fact for _, edge in request.path]
    assert facts == ["admitted", "leg_lost", "admitted", "completed"]
    assert [edge for _, edge in whole.lives[0].path] == [edge for _, edge in request.path]
    assert told.state == "finished"


#### Who sees what


@frozen
class Named:
    """Anything a machine moves, as far as filters look at it."""

    id: str
    worker: Named | None = None
    prefill_worker: Named | None = None


W0, W1 = Named("w0"), Named("w1")
MOVED = {
    "request on w0": ("request", Named("r1", worker=W0)),
    "request on a pair": ("request", Named("r2", worker=W0, prefill_worker=W1)),
    "request nowhere": ("request", Named("r3")),
    "request like a leg": ("request", Named("r1.1")),
    "leg of r1": ("leg", Named("r1.1", worker=W0)),
    "leg of r1.1": ("leg", Named("r1.1.2", worker=W1)),
    "prefill of r2": ("leg", Named("r2.1.prefill", worker=W1)),
    "worker w0": ("worker", W0),
    "breaker w1": ("breaker", W1),
    "router": ("router", Named("router")),
}


@pytest.mark.parametrize(
    ("query", "seen"),
    [
        ("", set(MOVED)),
        ("machine=leg", {"leg of r1", "leg of r1.1", "prefill of r2"}),
        ("machine=router&machine=breaker", {"router", "breaker w1"}),
        ("request=r1", {"request on w0", "leg of r1"}),
        ("request=r1.1", {"request like a leg", "leg of r1.1"}),
        ("request=r2&request=r3", {"request on a pair", "prefill of r2", "request nowhere"}),
        ("worker=w0", {"request on w0", "request on a pair", "leg of r1", "worker w0"}),
        ("worker=w1", {"request on a pair", "leg of r1.1", "prefill of r2", "breaker w1"}),
        ("worker=w1&machine=leg&request=r2", {"prefill of r2"}),
        ("request=r%25", set()),
    ],
)
def test_a_watcher_sees_what_its_filters_name(query: str, seen: set[str]) -> None:
    wanted = Filter.of_query(query)

    found = {name for name, (machine, subject) in MOVED.items() if wanted.takes(machine, subject)}

    assert found == seen


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (
            b"machine=lamp",
            b"There is no machine lamp, but request, leg, worker, breaker, router.",
        ),
        (b"machine=leg&machine=handback", b"The handback machine lives in baton agent"),
        (b"machines=leg", b"Filters are machine, worker and request, not machines."),
    ],
)
async def test_a_filter_for_what_there_is_not_is_refused(
    query: bytes, reason: bytes, autojump_clock: trio.abc.Clock
) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world)
        async with serving(network):
            stream = network.open_client()
            await stream.send_all(
                HANDSHAKE.replace(b"transitions ", b"transitions?" + query + b" ")
            )

            answer = b""
            while reason not in answer:
                answer += await stream.receive_some()

        world.cancel_scope.cancel()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"x-router-error-code: bad_request" in answer


def test_the_document_names_the_machines_that_can_be_watched() -> None:
    text = (Path(__file__).parent.parent / "docs" / "watching.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("| `--machine M` |")]

    assert re.findall("`([a-z]+)`", row) == [chart.name for chart in ROUTER_CHARTS]
    for chart in AGENT_CHARTS:
        assert f"The {chart.name} machine is none of these: it lives in `baton agent`" in text


def test_every_machine_of_a_router_can_be_watched_and_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for chart in ROUTER_CHARTS:
        assert Filter.of_query(f"machine={chart.name}").machines == {chart.name}
        assert cli.main(["watch", "nowhere", "--machine", chart.name]) == 1
        assert "not the URL of a router" in capsys.readouterr().err
    for name in (*(chart.name for chart in AGENT_CHARTS), "lamp"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["watch", "nowhere", "--machine", name])
        said = capsys.readouterr().err
        assert (ended.value.code, said.count("\n")) == (2, 1)
        assert name in said
        assert ("lives in baton agent" if name != "lamp" else "request, leg, worker") in said


@asynccontextmanager
async def watching(
    network: MemoryNetwork, world: trio.Nursery, query: str = "", key: str | None = None
) -> AsyncIterator[trio_websocket.WebSocketConnection]:
    headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    yield await trio_websocket.wrap_client_stream(
        world,
        network.open_client(),  # type: ignore[arg-type]  # annotated narrower than what it needs
        "baton",
        f"/debug/transitions{query}",
        extra_headers=headers,
    )


async def ask(network: MemoryNetwork, id: bytes = b"r1") -> None:
    stream = network.open_client()
    await stream.send_all(REQUEST.replace(b"r1", id))
    await read_all(stream)


async def test_filters_are_part_of_the_address(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world)
        async with serving(network):
            await trio.sleep(1)
            async with watching(network, world, "?request=r2&machine=request") as socket:
                await ask(network, b"r1")
                await ask(network, b"r2")

                seen = msgspec.json.decode(await socket.get_message())

        world.cancel_scope.cancel()
    assert (seen["id"], seen["fact"], seen["lost"]) == ("r2", "refused", 0)


async def test_who_has_the_admin_key_may_watch(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world)
        async with serving(network, admin_key="k", api_key=("other",)) as app:
            await trio.sleep(1)
            async with watching(network, world, key="k"):
                await trio.testing.wait_all_tasks_blocked()

                assert len(app.feed.watchers) == 1
        world.cancel_scope.cancel()


#### What it costs


class Counting(Feed):
    """A feed that knows how often something was published."""

    published: int = 0

    def publish(self, machine: str, subject: HasId, edge: Edge) -> None:
        self.published += 1
        super().publish(machine, subject, edge)


def test_while_nobody_watches_nothing_is_published() -> None:
    feed = Counting()
    booking = Booking(Metrics(Nothing()), feed, configure(format="text", level="error"))
    listen = booking.listener("request")

    listen(Named("r1"), CHART.edges[0])
    assert feed.published == 0

    feed.watchers.append(Watcher(Filter(machines=frozenset({"leg"}))))
    trio.run(told, listen)
    assert feed.published == 1


class Nothing:
    """A router in which nothing is live."""

    def open_requests(self) -> tuple[()]:
        return ()

    def workers(self) -> tuple[()]:
        return ()


async def told(listen: Listener) -> None:
    listen(Named("r1"), CHART.edges[0])


async def test_a_slow_watcher_loses_transitions_and_is_told_how_many() -> None:
    feed, watcher = Feed(), Watcher()
    feed.watchers.append(watcher)

    for _ in range(WAITING_MAX + 3):
        feed.publish("request", Named("r1"), CHART.edges[0])
    first, _ = await watcher.take(), await watcher.take()
    for _ in range(2):
        feed.publish("request", Named("r1"), CHART.edges[0])
    rest = [await watcher.take() for _ in range(WAITING_MAX)]

    assert isinstance(first, Transition)
    assert first.lost == 0
    assert [each.lost for each in rest if each is not None][-3:] == [0, 3, 0]


async def test_what_was_lost_is_told_also_if_nothing_follows() -> None:
    watcher = Watcher()
    for _ in range(WAITING_MAX + 2):
        watcher.tell("request", Named("r1"), CHART.edges[0], Stamp())

    for _ in range(WAITING_MAX):
        assert isinstance(await watcher.take(), Transition)
    last = await watcher.take()

    assert isinstance(last, Lost)
    assert last.lost == 2
    assert watcher.lost == 0


async def test_what_a_watcher_does_not_want_is_not_lost_to_it() -> None:
    watcher = Watcher(Filter(requests=frozenset({"r2"})))

    for _ in range(WAITING_MAX + 2):
        watcher.tell("request", Named("r1"), CHART.edges[0], Stamp())

    assert watcher.lost == 0


async def test_a_watcher_that_reads_nothing_costs_a_bounded_queue(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world, pipe_bytes=500)
        async with serving(network) as app:
            stream = network.open_client()
            await stream.send_all(HANDSHAKE)
            await trio.sleep(1)
            (watcher,) = app.feed.watchers

            for _ in range(WAITING_MAX + 100):
                app.feed.publish("request", Named("r1"), CHART.edges[0])
            await trio.sleep(1)

            assert watcher.lost >= 98
            await ask(network)  # requests are served meanwhile
        world.cancel_scope.cancel()


async def test_a_watcher_that_leaves_is_forgotten(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world)
        async with serving(network) as app:
            await trio.sleep(1)
            async with watching(network, world) as socket:
                await ask(network)
                await socket.aclose()
                await trio.testing.wait_all_tasks_blocked()

                assert app.feed.watchers == []
        world.cancel_scope.cancel()


#### The end


async def test_a_router_that_stops_says_its_last_words(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world)
        async with serving(network) as app:
            await trio.sleep(1)
            async with watching(network, world) as socket:
                await trio.testing.wait_all_tasks_blocked()
                app.ask_to_stop()

                seen = [msgspec.json.decode(await socket.get_message())["fact"] for _ in "12"]
                with pytest.raises(trio_websocket.ConnectionClosed) as closed:
                    await socket.get_message()

        world.cancel_scope.cancel()
    assert seen == ["stop_asked", "emptied"]
    assert closed.value.reason is not None
    assert (closed.value.reason.code, closed.value.reason.reason) == (GOING_AWAY, STOPPED)


async def test_a_watcher_that_reads_nothing_does_not_hold_up_the_end(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with trio.open_nursery() as world:
        network = MemoryNetwork(world, pipe_bytes=500)
        async with serving(network) as app:
            stream = network.open_client()
            await stream.send_all(HANDSHAKE)
            await trio.sleep(1)
            for _ in range(100):
                app.feed.publish("request", Named("r1"), CHART.edges[0])

            app.ask_to_stop()
            await trio.sleep(10)

            assert not network.open_sockets
        world.cancel_scope.cancel()


#### The watcher's end, over TCP


async def test_watching_over_tcp_ends_when_the_router_stops() -> None:
    network = TcpNetwork()
    shown: list[str] = []
    async with serving(network, admin_key="k") as app:
        host, port = app.address
        with trio.fail_after(5):
            await watch(
                f"http://{host}:{port}/",
                query={"machine": ["router"]},
                admin_key="k",
                opened=app.ask_to_stop,
                show=shown.append,
            )
    network.close()
    assert [msgspec.json.decode(each)["fact"] for each in shown] == ["stop_asked", "emptied"]


async def test_a_router_that_refuses_a_watcher_says_why() -> None:
    network = TcpNetwork()
    async with serving(network, admin_key="k") as app:
        host, port = app.address
        with trio.fail_after(5), pytest.raises(WatchRefused) as refused:
            await watch(
                f"http://{host}:{port}", query={}, admin_key="no", opened=lambda: None, show=print
            )
    network.close()
    assert refused.value.status == 401
    assert b"unauthorized" in refused.value.body


@asynccontextmanager
async def listening(
    serve: Callable[[trio.SocketStream], Awaitable[object]],
) -> AsyncIterator[int]:
    """A peer on a port of its own, that does this with whoever connects."""
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def test_a_connection_that_is_cut_is_no_end() -> None:
    async def cut(stream: trio.SocketStream) -> None:
        async with trio.open_nursery() as nursery:
            request = await trio_websocket.wrap_server_stream(nursery, stream)
            await request.accept()
            await trio.aclose_forcefully(stream)

    async with listening(cut) as port:
        with trio.fail_after(5), pytest.raises(WatchError, match="was lost"):
            await watch(
                f"http://127.0.0.1:{port}",
                query={},
                admin_key=None,
                opened=lambda: None,
                show=print,
            )


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("127.0.0.1:8000", "not the URL of a router"),
        ("http://", "not the URL of a router"),
        ("ftp://h", "not the URL of a router"),
        ("http://[", "not the URL of a router"),
        ("http://127.0.0.1:1", r"127.0.0.1:1: Connection refused$"),
        ("http://h:port", "not the URL of a router"),
        ("http://h:1?machine=leg", "filters are options"),
    ],
)
async def test_what_cannot_be_watched_is_one_line(url: str, reason: str) -> None:
    with pytest.raises(WatchError, match=reason) as error:
        await watch(url, query={}, admin_key=None, opened=lambda: None, show=print)

    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("scheme", "answer", "reason"),
    [
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", "TLS failed: wrong version number$"),
        ("https", b"", "127.0.0.1:"),
        ("http", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "refused with 200"),
        ("http", b"220 mail.example ESMTP\r\n", "no WebSocket|was lost|no answer"),
        ("http", b"", "no WebSocket|was lost|no answer"),
    ],
)
async def test_whatever_listens_there_a_watcher_is_told(
    scheme: str, answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reading the certificates of a busy machine takes longer than the short one.
    seconds = 0.2 if "no answer" in reason else 4.0
    monkeypatch.setattr("router.websocket.HANDSHAKE_SECONDS", seconds)

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(answer)
        await stream.aclose()

    async with listening(serve) as port:
        with trio.fail_after(5), pytest.raises((WatchError, WatchRefused), match=reason) as error:
            await watch(
                f"{scheme}://127.0.0.1:{port}",
                query={},
                admin_key=None,
                opened=lambda: None,
                show=print,
            )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("scheme", "reason"), [("http", "no answer"), ("https", "no connection")])
async def test_who_never_answers_is_given_up(
    scheme: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.websocket.HANDSHAKE_SECONDS", 0.2)

    async def say_nothing(_: trio.SocketStream) -> None:
        await trio.sleep_forever()

    async with listening(say_nothing) as port:
        with trio.fail_after(5), pytest.raises(WatchError, match=f"{reason} within 0.2 s"):
            await watch(
                f"{scheme}://127.0.0.1:{port}",
                query={},
                admin_key=None,
                opened=lambda: None,
                show=print,
            )


async def test_the_whole_address_of_the_feed_is_understood_too() -> None:
    network = TcpNetwork()
    async with serving(network) as app:
        host, port = app.address
        with trio.fail_after(5):
            await watch(
                f"http://{host}:{port}/debug/transitions",
                query={"machine": ["router"]},
                admin_key=None,
                opened=app.ask_to_stop,
                show=lambda _: None,
            )
    network.close()


def test_a_screen_has_fixed_columns_and_says_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = Screen(is_json=False)
    moves = [
        Transition("2026-01-01T08:23:55.174Z", 1.5, "leg", "r1.1", *words, "w0", lost)
        for words, lost in (
            (("connecting", "connected", "waiting"), 0),
            (("waiting", "head_arrived", "answering"), 1200),
        )
    ]

    screen.begin()
    for each in moves:
        screen.show(msgspec.json.encode(each).decode())
    screen.show('{"time":"x","lost":1}')
    screen.show('{"of another": "version"}')
    screen.sum_up()

    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert said.err == "2 transitions, 1,201 lost\n"
    assert [line.index("leg ") for line in (lines[1], lines[3])] == [lines[0].index("machine")] * 2
    assert [lines[1].index("waiting"), lines[3].index("answering")] == [
        lines[0].index("target")
    ] * 2
    assert lines[1].startswith("08:23:55.174")
    assert [lines[2], lines[4]] == [
        "-- 1,200 not shown: they came faster than they were read",
        "-- 1 not shown: they came faster than they were read",
    ]


UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
HEX = "9" * 32
LONG = "".join(f"tenant-{number}/" for number in range(14))  # 128 characters are the most


@pytest.mark.parametrize(
    ("id", "shown"),
    [
        ("r1", "r1"),
        (HEX, HEX),
        (f"{HEX}.12.prefill", f"{HEX}.12.prefill"),
        (UUID, UUID),
        (f"{UUID}.1.prefill", f"{UUID}.1.prefill"),
        (f"{LONG}.1", f"{LONG[:23]}…{LONG[-20:]}.1"),
        (f"{LONG}.1.prefill", f"{LONG[:23]}…{LONG[-12:]}.1.prefill"),
        ("http://prefill-0.prefill.inference.svc.cluster.local:8000",
         "http://prefill-0.prefil…svc.cluster.local:8000"),
        ("w\x1b[2J\n1", "w[2J1"),
    ],
)  # fmt: skip
def test_no_id_moves_the_columns_behind_it(
    id: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(is_json=False)
    words = "leg", id, "connecting", "connected", "waiting", "w0", 0

    screen.begin()
    screen.show(msgspec.json.encode(Transition("2026-01-01T08:23:55.174Z", 1.5, *words)).decode())

    head, line = capsys.readouterr().out.splitlines()
    for title, word in (("source", "connecting"), ("fact", "connected"), ("target", "waiting")):
        assert line.index(f"  {word}") == head.index(f"  {title}")
    assert line[head.index("id  ") : head.index("source")].rstrip() == shown


def test_words_of_another_version_do_not_move_the_columns_either(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = Screen(is_json=False)
    words = "leg", "r1", "a_state_that_is_not_known_here_yet", "a_fact_that_is_not", "waiting"

    screen.begin()
    screen.show(msgspec.json.encode(Transition("T08:23:55.174Z", 1.5, *words, "w0", 0)).decode())

    head, line = capsys.readouterr().out.splitlines()
    assert line.index("  waiting") == head.index("  target")


@pytest.mark.slow
def test_ctrl_c_and_the_end_of_the_router_both_end_the_command() -> None:
    def baton(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "router", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )

    with baton("serve", "--port", "0", "--log-level", "error") as router:
        assert router.stdout is not None
        url = router.stdout.readline().split()[-1]
        with baton("watch", url) as one, baton("watch", url, "--machine", "router") as other:
            for each in (one, other):
                assert each.stdout is not None
                assert each.stdout.readline().startswith("time (UTC)")
            one.send_signal(signal.SIGINT)
            said = one.communicate(timeout=20)
            assert (one.returncode, said) == (0, ("", "0 transitions, 0 lost\n"))

            router.send_signal(signal.SIGTERM)
            out, err = other.communicate(timeout=20)
            assert other.returncode == 0
        assert router.wait(timeout=20) == 0
    assert [line.split()[4] for line in out.splitlines()] == ["stop_asked", "emptied"]
    assert err == "baton watch: the router has stopped\n2 transitions, 0 lost\n"
