"""The simulated engine as a server: connections, clients that leave, aborts, real sockets."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from router.sim import SimEngine, SimSettings
from router.sim.server import serve
from router.sim.settings import EngineKind
from tests.simclient import Client, Heard, connect

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def asking(tokens: int = 8, **more: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "Once", "max_tokens": tokens, "stream": True} | more


# --- pace ----------------------------------------------------------------------------------------


async def test_tokens_come_at_the_pace_that_was_set(autojump_clock: object) -> None:
    engine = SimEngine(SimSettings(token_seconds=0.5, first_token_seconds=2))
    async with trio.open_nursery() as nursery:
        heard = await connect(engine, nursery).ask(COMPLETIONS, asking(4))
        nursery.cancel_scope.cancel()

    assert heard.arrivals == pytest.approx([2, 2.5, 3, 3.5, 3.5])


async def test_a_whole_answer_takes_as_long_as_its_stream(autojump_clock: object) -> None:
    engine = SimEngine(SimSettings(token_seconds=0.5, first_token_seconds=2))
    async with trio.open_nursery() as nursery:
        heard = await connect(engine, nursery).ask(COMPLETIONS, asking(4, stream=False))
        nursery.cancel_scope.cancel()

    assert heard.seconds == pytest.approx(3.5)


async def test_several_tokens_may_leave_in_one_event(autojump_clock: object) -> None:
    engine = SimEngine(SimSettings(token_seconds=0.5, tokens_per_chunk=3))
    async with trio.open_nursery() as nursery:
        heard = await connect(engine, nursery).ask(COMPLETIONS, asking(8, return_token_ids=True))
        nursery.cancel_scope.cancel()

    assert len(heard.chunks) == 3
    assert len(heard.ids) == 8


@pytest.mark.parametrize(("kind", "head_at"), [("vllm", 0), ("sglang", 2)])
async def test_when_the_head_comes(
    kind: EngineKind, head_at: float, autojump_clock: object
) -> None:
    engine = SimEngine(SimSettings(kind, first_token_seconds=2))
    async with trio.open_nursery() as nursery:
        client = connect(engine, nursery)
        await client.send(COMPLETIONS, asking())
        began = trio.current_time()
        await client.stream.receive_some(10)
        waited = trio.current_time() - began
        nursery.cancel_scope.cancel()

    assert waited == pytest.approx(head_at)


async def test_equal_engines_answer_alike_to_the_last_byte(autojump_clock: object) -> None:
    answers = []
    for _ in range(2):
        engine = SimEngine(SimSettings(token_seconds=0.1))
        async with trio.open_nursery() as nursery:
            client = connect(engine, nursery)
            answers.append([(await client.ask(COMPLETIONS, asking())).raw for _ in range(3)])
            nursery.cancel_scope.cancel()

    assert answers[0] == answers[1]


# --- connections ---------------------------------------------------------------------------------


async def test_a_connection_serves_many_requests_and_closes_when_idle_for_five_seconds(
    autojump_clock: object,
) -> None:
    engine = SimEngine()
    async with trio.open_nursery() as nursery:
        client = connect(engine, nursery)
        for _ in range(3):
            assert (await client.ask(COMPLETIONS, asking())).ending == "complete"
            await trio.sleep(4.9)
        began = trio.current_time()
        closed = await client.is_closed()
        waited = trio.current_time() - began

    assert closed
    assert waited == pytest.approx(0.1)
    assert [one.reused for one in engine.requests] == [False, True, True]


async def test_a_connection_without_a_request_is_kept(autojump_clock: object) -> None:
    engine = SimEngine()
    async with trio.open_nursery() as nursery:
        client = connect(engine, nursery)
        await trio.sleep(1000)
        heard = await client.ask("/health")
        nursery.cancel_scope.cancel()

    assert heard.status == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("half", [True, False])
async def test_a_client_that_leaves_frees_the_engine_at_once(
    stream: bool, half: bool, autojump_clock: object
) -> None:
    engine = SimEngine(SimSettings(token_seconds=10))
    async with trio.open_nursery() as nursery:
        client = connect(engine, nursery)
        await client.send(COMPLETIONS, asking(100, stream=stream))
        await trio.sleep(15)
        before = engine.inflight
        await (client.stream.send_eof() if half else client.stream.aclose())
        await trio.sleep(0.01)

    assert (before, engine.inflight, engine.disconnects) == (1, 0, 1)
    assert not engine.connections


async def test_requests_sent_ahead_are_answered_in_order(autojump_clock: object) -> None:
    engine = SimEngine(SimSettings(token_seconds=1))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
    body = b'{"prompt":"Once","max_tokens":%d}'
    async with trio.open_nursery() as nursery:
        client = connect(engine, nursery)
        first, second = body % 2, body % 3
        await client.stream.send_all(head % (len(first), first) + head % (len(second), second))
        await trio.sleep(10)
        raw = bytes(await client.stream.receive_some())
        nursery.cancel_scope.cancel()

    assert raw.count(b"HTTP/1.1 200") == 2
    assert raw.index(b'"completion_tokens":2') < raw.index(b'"completion_tokens":3')


async def test_a_body_that_is_announced_is_asked_for(autojump_clock: object) -> None:
    engine = SimEngine()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n"
    async with trio.open_nursery() as nursery:
        client = connect(engine, nursery)
        await client.stream.send_all(head + b"expect: 100-continue\r\n\r\n")
        interim = bytes(await client.stream.receive_some())
        await client.stream.send_all(b'{"prompt":"On"}')
        raw = bytes(await client.stream.receive_some())
        nursery.cancel_scope.cancel()

    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert raw.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00 hello", b"GET / HTTP/1.1\r\nnot a header\r\n\r\n"]
)
async def test_what_is_no_http_is_refused_and_closed(sent: bytes, autojump_clock: object) -> None:
    engine = SimEngine()
    async with trio.open_nursery() as nursery:
        client = connect(engine, nursery)
        await client.stream.send_all(sent + b"\r\n\r\n")
        raw = bytes(await client.stream.receive_some())
        closed = await client.is_closed()

    assert raw.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert closed


async def test_a_client_that_wants_the_connection_closed_gets_that(autojump_clock: object) -> None:
    engine = SimEngine()
    async with trio.open_nursery() as nursery:
        client = connect(engine, nursery)
        heard = await client.ask("/health", headers={"connection": "close"})
        closed = await client.is_closed(patience=0.01)

    assert heard.headers["connection"] == "close"
    assert closed


async def test_a_client_that_reads_slowly_slows_its_own_generation() -> None:
    engine = SimEngine()
    ours, theirs = trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.serve_connection, theirs)
        await Client(ours).send(COMPLETIONS, asking(1000))
        await trio.testing.wait_all_tasks_blocked()
        (running,) = engine.running
        taken = running.choices[0].count
        nursery.cancel_scope.cancel()

    assert taken < 3


# --- aborts and ids ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate"])
@pytest.mark.parametrize("stream", [True, False])
async def test_sglang_ends_an_aborted_request_with_an_abort_finish(
    path: str, stream: bool, autojump_clock: object
) -> None:
    engine = SimEngine(SimSettings("sglang", token_seconds=1))
    body = asking(100, stream=stream, messages=HELLO, text="Once", rid="mine")
    async with trio.open_nursery() as nursery:
        client, other = connect(engine, nursery), connect(engine, nursery)
        await client.send(path, body)
        await trio.sleep(5.5)
        unknown = await other.ask("/abort_request", {"rid": "somebody's"})
        abort = await other.ask("/abort_request", {"rid": "mine"})
        heard = await client.listen()
        nursery.cancel_scope.cancel()

    assert [(one.status, one.body) for one in (unknown, abort)] == [(200, b"")] * 2
    assert heard.seconds == pytest.approx(0)
    assert (heard.status, heard.ending, heard.is_done) == (200, "complete", stream)
    last = heard.events[-2] if stream else heard.body
    assert b'"finish_reason":"abort"' in last or b'"finish_reason":{"type":"abort"' in last
    assert engine.aborted == ["mine"]


async def test_vllm_has_no_abort_endpoint(autojump_clock: object) -> None:
    engine = SimEngine()
    async with trio.open_nursery() as nursery:
        heard = await connect(engine, nursery).ask("/abort_request", {"rid": "x"})
        nursery.cancel_scope.cancel()

    assert heard.status == 404


async def test_sglang_refuses_a_request_id_that_is_running(autojump_clock: object) -> None:
    engine = SimEngine(SimSettings("sglang", token_seconds=1))
    async with trio.open_nursery() as nursery:
        client, other = connect(engine, nursery), connect(engine, nursery)
        await client.send(COMPLETIONS, asking(5, rid="mine"))
        await trio.sleep(1)
        twin = await other.ask(COMPLETIONS, asking(5, rid="mine"))
        await client.listen()
        later = await other.ask(COMPLETIONS, asking(5, rid="mine"))
        nursery.cancel_scope.cancel()

    assert (twin.status, twin.json["message"]) == (400, "Duplicate request ID detected: mine")
    assert later.chunks[0]["id"] == "mine"


@pytest.mark.parametrize("poison", [[5, 99999], [-1]])
async def test_ids_outside_the_vocabulary_kill_sglang_and_all_its_streams(
    poison: list[int], autojump_clock: object
) -> None:
    engine = SimEngine(SimSettings("sglang", token_seconds=1))
    heard: list[Heard] = []

    async def listen(client: Client) -> None:
        heard.append(await client.listen())

    async with trio.open_nursery() as nursery:
        victim, poisoner = connect(engine, nursery), connect(engine, nursery)
        await victim.send(COMPLETIONS, asking(100))
        await trio.sleep(3.5)
        await poisoner.send(COMPLETIONS, asking(prompt=poison))
        nursery.start_soon(listen, victim)
        nursery.start_soon(listen, poisoner)

    assert [one.ending for one in heard] == ["cut", "cut"]
    assert [one.seconds for one in heard] == pytest.approx([5, 5])
    assert engine.is_refusing


async def test_the_load_is_what_is_running(autojump_clock: object) -> None:
    engine = SimEngine(SimSettings(token_seconds=1))
    async with trio.open_nursery() as nursery:
        clients = [connect(engine, nursery) for _ in range(3)]
        for client in clients:
            await client.send(COMPLETIONS, asking(5))
        await trio.sleep(1)
        busy = await connect(engine, nursery).ask("/load")
        for client in clients:
            await client.listen()
        idle = await connect(engine, nursery).ask("/load")
        nursery.cancel_scope.cancel()

    assert busy.json == {"server_load": 3}
    assert idle.json == {"server_load": 0}


async def test_what_was_received_is_on_record(autojump_clock: object) -> None:
    engine = SimEngine()
    async with trio.open_nursery() as nursery:
        await connect(engine, nursery).ask(
            f"{COMPLETIONS}?a=b", asking(), headers={"X-Request-Id": "r1"}
        )
        nursery.cancel_scope.cancel()
    (one,) = engine.requests

    assert (one.method, one.path) == ("POST", COMPLETIONS)
    assert one.headers["x-request-id"] == "r1"
    assert b'"prompt": "Once"' in one.body


# --- real sockets --------------------------------------------------------------------------------


async def listening_at(capsys: pytest.CaptureFixture[str]) -> int:
    """Wait for the line that says where the engine listens."""
    while True:
        line = capsys.readouterr().out
        if line:
            assert line.startswith("baton sim: listening on http://127.0.0.1:")
            return int(line.rstrip().rpartition(":")[2])
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def open_client(port: int) -> AsyncIterator[Client]:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        yield Client(stream)


async def test_a_process_serves_on_real_sockets(capsys: pytest.CaptureFixture[str]) -> None:
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, SimEngine())
            async with open_client(await listening_at(capsys)) as client:
                heard = await client.ask(COMPLETIONS, asking())
                reset = await client.ask(COMPLETIONS, asking() | {"x-sim-fault": "cut,reset=true"})
            nursery.cancel_scope.cancel()

    assert (heard.finish, heard.ending) == ("length", "complete")
    assert reset.ending == "cut"


async def test_a_listener_closes_and_opens_again_on_its_port(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = SimEngine()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, engine)
            port = await listening_at(capsys)
            async with open_client(port) as client:
                await client.ask("/health")
                engine.add_faults("now:refuse")
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(OSError, match="all attempts to connect"):
                    await trio.open_tcp_stream("127.0.0.1", port)
                heard = await client.ask("/health")
            engine.clear_faults()
            await trio.testing.wait_all_tasks_blocked()
            async with open_client(port) as client:
                again = await client.ask("/health")
            nursery.cancel_scope.cancel()

    assert (heard.status, again.status) == (200, 200)


@pytest.mark.parametrize(
    ("kind", "finish"), [("vllm", "abort"), ("sglang", "length"), ("openai", None)]
)
async def test_sigterm_is_met_as_the_engine_meets_it(
    kind: EngineKind, finish: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = SimEngine(SimSettings(kind, token_seconds=0.01))
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, engine)
            async with open_client(await listening_at(capsys)) as client:
                await client.send(COMPLETIONS, asking(12))
                while not engine.inflight:
                    await trio.lowlevel.checkpoint()
                os.kill(os.getpid(), signal.SIGTERM)
                heard = await client.listen()
            nursery.cancel_scope.cancel()

    assert heard.finish == finish
    assert heard.ending == ("cut" if finish is None else "complete")


async def test_a_death_ends_the_process_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    engine = SimEngine()

    async def run() -> None:
        codes.append(await serve(engine))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            async with open_client(await listening_at(capsys)) as client:
                await client.ask("/health")
                engine.add_faults("now:server_dies")
                closed = await client.is_closed()

    assert closed
    assert codes == [1]
