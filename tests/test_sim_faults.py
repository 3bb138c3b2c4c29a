"""The language of faults, and that every word of it does what it says."""

from collections.abc import Awaitable, Callable
from itertools import pairwise

import attrs
import pytest
import trio

from router.sim import SimEngine, SimSettings
from router.sim.condition import Mode
from router.sim.fault_kinds import KINDS, manual
from router.sim.faults import (
    BadFault,
    FaultBook,
    Script,
    Sighting,
    parse_fault,
    parse_faults,
)
from router.sim.settings import EngineKind
from tests.simclient import Client, Heard, connect

TOKENS = 8
STREAM = {"model": "tiny", "prompt": "Once", "max_tokens": TOKENS, "stream": True}
WHOLE = {"model": "tiny", "prompt": "Once", "max_tokens": TOKENS}
COMPLETIONS = "/v1/completions"

# --- the language --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "always:empty",
        "request=3:cut,after_events=5",
        "request=2..4,times=2:hang,at=head",
        "every=10:status,code=429,retry_after=1",
        "path=/health,name=w1:status",
        "now:core_dies,restart_after=3.0",
        "reused=true:close_after",
        "always:error_event,message=out%20of%20luck%2C%20sorry",
    ],
)
def test_a_fault_reads_as_it_was_written(text: str) -> None:
    assert str(parse_fault(text)) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("explode", "there is no fault 'explode'"),
        ("request=x:cut", "invalid literal"),
        ("monday:cut", "unknown condition 'monday'"),
        ("cut,afterevents=3", "cut takes no 'afterevents'"),
        ("cut,at=noon", "at is one of request, head, finish, done"),
        ("cut,reset=maybe", "neither true nor false"),
        ("now:cut", "`now` means nothing"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_reason(text: str, complaint: str) -> None:
    with pytest.raises(BadFault, match=complaint):
        parse_fault(text)

    with pytest.raises(ValueError):
        SimSettings(faults=(text,))


def test_several_faults_are_separated_by_semicolons() -> None:
    assert [fault.kind.name for fault in parse_faults("cut; times=1:hang;")] == ["cut", "hang"]


@pytest.mark.parametrize(
    ("when", "met"),
    [
        ("always", [1, 2, 3, 4, 5, 6]),
        ("request=3", [3]),
        ("request=2..4", [2, 3, 4]),
        ("request=5..", [5, 6]),
        ("every=3", [3, 6]),
        ("times=2", [1, 2]),
        ("request=2..,times=1", [2]),
        ("name=other", []),
        ("path=/health", []),
        ("path=/v1", [1, 2, 3, 4, 5, 6]),
        ("reused=true", []),
    ],
)
def test_conditions_choose_requests(when: str, met: list[int]) -> None:
    book = FaultBook()
    book.add(parse_fault(f"{when}:empty"))

    found = [n for n in range(1, 7) if book.for_request(Sighting("sim", "/v1/completions"))]

    assert found == met


def test_probes_are_not_counted_unless_their_path_is_named() -> None:
    book = FaultBook()
    book.add(parse_fault("request=1:empty"))
    book.add(parse_fault("path=/health,request=2:status"))
    probe = Sighting("sim", "/health", is_work=False)

    probes = [book.for_request(probe) for _ in range(2)]
    work = book.for_request(Sighting("sim", "/v1/completions"))

    assert [Script(tuple(faults)).find("status") is not None for faults in probes] == [False, True]
    assert Script(tuple(work)).find("empty") is not None


# --- each kind ------------------------------------------------------------------------------------

Check = Callable[[SimEngine, Client], Awaitable[None]]


async def with_engine(
    faults: str, check: Check, kind: EngineKind = "vllm", token_seconds: float = 0.1
) -> None:
    settings = SimSettings(kind, token_seconds=token_seconds, faults=(faults,))
    engine = SimEngine(settings)
    async with trio.open_nursery() as nursery:
        await check(engine, connect(engine, nursery))
        nursery.cancel_scope.cancel()
    assert engine.inflight == 0


async def good_text() -> str:
    found = []

    async def keep(_: SimEngine, client: Client) -> None:
        found.append((await client.ask(COMPLETIONS, STREAM)).text)

    await with_engine("request=99:empty", keep)
    return found[0]


def is_good(heard: Heard) -> bool:
    return (heard.status, heard.finish, heard.ending) == (200, "length", "complete")


async def check_delay(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert is_good(heard)
    assert heard.arrivals[0] == pytest.approx(1 + 2)
    assert heard.arrivals[1] - heard.arrivals[0] == pytest.approx(0.1 + 3)


async def check_status(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert (heard.status, heard.headers["retry-after"]) == (429, "7")
    assert heard.json["error"]["message"] == "busy, sorry"  # type: ignore[index]  # an object
    assert heard.ending == "complete"


async def check_empty(_: SimEngine, client: Client) -> None:
    for body in (STREAM, WHOLE):
        heard = await client.ask(COMPLETIONS, body)
        assert (heard.status, heard.body, heard.ending) == (200, b"", "complete")


async def check_hang(engine: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM, patience=1000)

    assert (heard.status, len(heard.events), heard.ending) == (200, 3, "silent")
    assert engine.inflight == 1
    await client.stream.aclose()
    await trio.sleep(0.01)
    assert (engine.inflight, engine.disconnects) == (0, 1)


async def check_cut(engine: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert (len(heard.events), heard.ending) == (3, "cut")
    assert heard.raw.endswith(b"\r\ndata: {")
    assert engine.disconnects == 0


async def check_pause(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)
    gaps = [later - sooner for sooner, later in pairwise(heard.arrivals)]

    assert is_good(heard)
    assert heard.text == await good_text()
    assert heard.body.count(b": keep-alive\n\n") == 3
    assert gaps[2:6] == pytest.approx([2.1, 2, 2, 1])


async def check_error_event(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert (heard.status, heard.ending, heard.is_done) == (200, "complete", True)
    assert heard.chunks[2]["error"]["code"] == 503  # type: ignore[index]  # an object
    assert len(heard.chunks) == 3


async def check_abort(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert (heard.finish, heard.ending, heard.is_done) == ("abort", "complete", True)
    assert len(heard.chunks) == 3


async def check_early_head(engine: SimEngine, client: Client) -> None:
    engine.settings = attrs.evolve(engine.settings, first_token_seconds=5.0)
    await client.send(COMPLETIONS, STREAM)
    with trio.fail_after(1):
        await client.stream.receive_some(10)


async def check_end(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert (heard.finish, heard.ending, heard.is_done) == (None, "complete", False)
    assert len(heard.chunks) == 2


async def check_garbage(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert (heard.status, heard.ending) == (0, "malformed")


async def check_gzip(_: SimEngine, client: Client) -> None:
    import gzip

    heard = await client.ask(COMPLETIONS, STREAM)
    whole = await client.ask(COMPLETIONS, WHOLE)

    assert heard.headers["content-encoding"] == "gzip"
    assert gzip.decompress(heard.body).endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in gzip.decompress(whole.body)


async def check_close_after(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, WHOLE)

    assert (heard.status, heard.ending) == (200, "complete")
    assert "connection" not in heard.headers
    assert await client.is_closed(patience=0.01)


async def check_close_reused(engine: SimEngine, client: Client) -> None:
    first = await client.ask(COMPLETIONS, WHOLE)
    second = await client.ask(COMPLETIONS, WHOLE)

    assert first.status == 200
    assert (second.raw, second.ending) == (b"", "cut")
    assert len(engine.requests) == 2


async def check_close_delimited(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert is_good(heard)
    assert not {"content-length", "transfer-encoding"} & set(heard.headers)
    assert await client.is_closed(patience=0.01)


async def check_interim(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert is_good(heard)
    assert heard.raw.startswith(b"HTTP/1.1 103 Early Hints\r\n")


async def check_slow_reader(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, WHOLE | {"user": "x" * 1000})

    assert heard.status == 200
    assert heard.seconds > 10


async def check_dribble(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert is_good(heard)
    assert heard.text == await good_text()
    assert len(heard.arrivals) > len(heard.body) / 3


async def check_lump(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert is_good(heard)
    assert heard.text == await good_text()
    assert len(heard.arrivals) == 3


async def check_comments(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert is_good(heard)
    assert heard.text == await good_text()
    assert heard.body.count(b": keep-alive\n\n") == TOKENS + 1


async def check_crlf(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert heard.text == await good_text()
    assert b"\n" not in heard.body.replace(b"\r\n", b"")


async def check_parse(_: SimEngine, client: Client) -> None:
    talk = {"model": "tiny", "messages": [{"role": "user", "content": "Once"}], "stream": True}
    heard = await client.ask("/v1/chat/completions", talk | {"max_tokens": TOKENS})

    found = [b'"tool_calls"' in event for event in heard.body.split(b"\n\n")]
    assert found.index(True) == 2
    assert found.count(True) == 1


async def check_forget(_: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM | {"return_token_ids": True})

    assert heard.text == await good_text()
    assert b'"token_ids":[' not in heard.body


async def check_padding(_: SimEngine, client: Client) -> None:
    whole = await client.ask(COMPLETIONS, WHOLE)
    heard = await client.ask(COMPLETIONS, STREAM)

    assert whole.json["padding"] == "x" * 5000
    assert heard.text == await good_text()
    assert all(chunk["padding"] == "x" * 5000 for chunk in heard.chunks)


async def check_drop(engine: SimEngine, client: Client) -> None:
    assert await client.is_closed(patience=0.01)
    assert not engine.requests


async def check_mute(engine: SimEngine, client: Client) -> None:
    heard = await client.ask("/health", patience=1000)

    assert (heard.raw, heard.ending) == (b"", "silent")


async def check_refuse(engine: SimEngine, client: Client) -> None:
    assert engine.is_refusing
    assert await client.is_closed(patience=0.01)
    await trio.sleep(10)
    assert not engine.is_refusing


async def check_freeze(engine: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert is_good(heard)
    assert heard.arrivals[2] - heard.arrivals[1] == pytest.approx(10, abs=0.2)


async def check_core_dies(engine: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)
    health = await client.ask("/health")
    refused = await client.ask(COMPLETIONS, STREAM)

    assert (len(heard.chunks), heard.is_done, heard.ending) == (3, True, "complete")
    assert b"EngineCore encountered an issue" in heard.events[2]
    assert (health.status, refused.status) == (503, 500)
    assert await client.is_closed(patience=2.01)
    assert engine.is_refusing
    await trio.sleep(10)
    assert engine.mode is Mode.SERVING


async def check_server_dies(engine: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert (len(heard.events), heard.ending) == (2, "cut")
    assert engine.is_refusing


async def check_sigterm_abort(engine: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert (heard.finish, heard.is_done, heard.ending) == ("abort", True, "complete")
    assert engine.is_refusing
    assert await client.is_closed(patience=1)


async def check_sigterm_hang(engine: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM, patience=90)

    assert (len(heard.events), heard.ending) == (2, "silent")
    assert engine.is_refusing


async def check_sigterm_drain(engine: SimEngine, client: Client) -> None:
    found: list[Heard] = []

    async def probe() -> None:
        await trio.sleep(0.3)
        async with trio.open_nursery() as nursery:
            other = connect(engine, nursery)
            found.append(await other.ask("/health"))
            found.append(await other.ask(COMPLETIONS, STREAM))
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(probe)
        heard = await client.ask(COMPLETIONS, STREAM)

    assert is_good(heard)
    assert [one.status for one in found] == [200, 500]
    assert b"cannot schedule new futures after shutdown" in found[1].body
    assert engine.mode is Mode.GONE


async def check_sglang_drain(engine: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)
    health = await client.ask("/health")
    more = await client.ask(COMPLETIONS, STREAM)

    assert is_good(heard)
    assert health.status == 503
    assert is_good(more)
    assert not engine.is_refusing
    await trio.sleep(5)
    assert engine.mode is Mode.GONE


async def check_scheduler_dies(engine: SimEngine, client: Client) -> None:
    heard = await client.ask(COMPLETIONS, STREAM)

    assert (len(heard.events), heard.ending) == (2, "cut")
    assert heard.seconds == pytest.approx(0.1 + 6, abs=0.2)
    assert engine.is_refusing


CHECKS: dict[str, tuple[str, Check]] = {
    "delay": ("delay,head=1,first_token=2,token=3", check_delay),
    "status": ("status,code=429,retry_after=7,message=busy%2C sorry", check_status),
    "empty": ("empty", check_empty),
    "hang": ("hang,after_events=3", check_hang),
    "cut": ("cut,after_events=3,inside_bytes=7", check_cut),
    "pause": ("pause,after_events=3,seconds=7,comments_every=2", check_pause),
    "error_event": ("error_event,code=503,after_events=2", check_error_event),
    "abort": ("abort,after_events=2", check_abort),
    "end": ("end,after_events=2", check_end),
    "garbage": ("garbage", check_garbage),
    "gzip": ("gzip", check_gzip),
    "close_after": ("close_after", check_close_after),
    "close_reused": ("close_reused", check_close_reused),
    "close_delimited": ("close_delimited", check_close_delimited),
    "interim": ("interim", check_interim),
    "slow_reader": ("slow_reader,bytes_per_second=100", check_slow_reader),
    "dribble": ("dribble,bytes=2", check_dribble),
    "lump": ("lump,events=4", check_lump),
    "comments": ("comments", check_comments),
    "crlf": ("crlf", check_crlf),
    "parse": ("parse,event=2", check_parse),
    "forget": ("forget,member=return_token_ids", check_forget),
    "padding": ("padding,bytes=5000", check_padding),
    "early_head": ("early_head", check_early_head),
    "drop": ("drop", check_drop),
    "mute": ("mute", check_mute),
    "refuse": ("now:refuse,restart_after=5", check_refuse),
    "freeze": ("freeze,after_events=2,restart_after=10", check_freeze),
    "core_dies": ("core_dies,after_events=2,restart_after=9", check_core_dies),
    "server_dies": ("server_dies,after_events=2", check_server_dies),
    "sigterm_abort": ("sigterm_abort,after_events=2", check_sigterm_abort),
    "sigterm_hang": ("sigterm_hang,after_events=2", check_sigterm_hang),
    "sigterm_drain": ("request=1:sigterm_drain,after_events=2", check_sigterm_drain),
    "sglang_drain": ("request=1:sglang_drain,after_events=2", check_sglang_drain),
    "scheduler_dies": ("scheduler_dies,after_events=2", check_scheduler_dies),
}


def test_the_manual_names_every_kind_and_parameter() -> None:
    text = manual()

    for kind in KINDS.values():
        assert f"{kind.name}  {kind.text}" in text
        for parameter in kind.parameters:
            assert f"    {parameter.name}=" in text


def test_every_kind_has_its_check() -> None:
    # Those of half a pair are in test_sim_pd.py.
    assert set(CHECKS) == {kind.name for kind in KINDS.values() if kind.family != "half"}


SGLANG_ONLY = ("sgl", "sched", "early")


@pytest.mark.parametrize("kind", CHECKS)
async def test_fault(kind: str, autojump_clock: object) -> None:
    faults, check = CHECKS[kind]

    await with_engine(faults, check, "sglang" if kind.startswith(SGLANG_ONLY) else "vllm")


# --- points --------------------------------------------------------------------------------------

STREAM_POINTS = {
    "cut": (0, 0, "cut", False),
    "cut,at=head": (200, 0, "cut", False),
    "cut,after_events=0,inside_bytes=9": (200, 0, "cut", False),
    "cut,after_events=2": (200, 2, "cut", False),
    "cut,at=finish": (200, TOKENS, "cut", False),
    "cut,at=done": (200, TOKENS + 1, "cut", True),
    "hang": (0, 0, "silent", False),
    "hang,at=head": (200, 0, "silent", False),
    "hang,at=finish": (200, TOKENS, "silent", False),
    "hang,at=done": (200, TOKENS + 1, "silent", True),
    "error_event": (200, 2, "complete", True),
    "error_event,done=false": (200, 1, "complete", False),
    "abort": (200, 2, "complete", True),
    "end": (200, 0, "complete", False),
    "end,done=true": (200, 1, "complete", True),
    "end,at=finish": (200, TOKENS, "complete", False),
}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("fault", STREAM_POINTS)
async def test_where_a_stream_breaks(
    fault: str, engine: EngineKind, autojump_clock: object
) -> None:
    async def check(_: SimEngine, client: Client) -> None:
        heard = await client.ask(COMPLETIONS, STREAM)
        found = (heard.status, len(heard.events), heard.ending, heard.is_done)
        assert found == STREAM_POINTS[fault]

    await with_engine(fault, check, engine)


WHOLE_POINTS = {
    "cut": (0, "cut"),
    "cut,inside_bytes=20": (0, "cut"),
    "cut,at=head": (200, "cut"),
    "cut,at=head,inside_bytes=20": (200, "cut"),
    "cut,at=done": (200, "complete"),
    "hang": (0, "silent"),
    "hang,at=head": (200, "silent"),
    "error_event,code=500": (500, "complete"),
    "abort": (200, "complete"),
    "core_dies": (500, "complete"),
    "server_dies": (0, "cut"),
    "scheduler_dies": (0, "cut"),
    "status,code=400": (400, "complete"),
    "garbage,what=short_body": (200, "cut"),
}


@pytest.mark.parametrize("fault", WHOLE_POINTS)
async def test_where_a_whole_answer_breaks(fault: str, autojump_clock: object) -> None:
    async def check(_: SimEngine, client: Client) -> None:
        heard = await client.ask(COMPLETIONS, WHOLE)
        assert (heard.status, heard.ending) == WHOLE_POINTS[fault]

    await with_engine(fault, check)


async def test_a_death_meets_whole_answers_too(autojump_clock: object) -> None:
    endings = {"core_dies": 500, "sigterm_abort": 200}
    for death, status in endings.items():
        engine = SimEngine(SimSettings(token_seconds=1))
        async with trio.open_nursery() as nursery:
            client = connect(engine, nursery)
            await client.send(COMPLETIONS, WHOLE)
            await trio.sleep(3.5)
            engine.add_faults(f"now:{death}")
            heard = await client.listen()
            nursery.cancel_scope.cancel()
        assert heard.status == status
        assert heard.seconds == pytest.approx(0)


@pytest.mark.parametrize(
    ("what", "ending"),
    [
        ("status_line", "malformed"),
        ("header", "malformed"),
        ("two_lengths", "malformed"),
        ("chunk_size", "malformed"),
        ("chunk_end", "malformed"),
        ("short_body", "cut"),
        ("long_body", "malformed"),
        ("after_end", "complete"),
        ("json", "complete"),
        ("utf8", "complete"),
    ],
)
async def test_garbage(what: str, ending: str, autojump_clock: object) -> None:
    async def check(_: SimEngine, client: Client) -> None:
        heard = await client.ask(COMPLETIONS, STREAM)
        assert heard.ending == ending
        if what == "after_end":
            assert heard.raw.endswith(b"and another thing\r\n\r\n")
        if what in ("json", "utf8"):
            assert is_spoiled(heard.events[2])

    await with_engine(f"garbage,what={what},after_events=2", check)


def is_spoiled(data: bytes) -> bool:
    import json

    try:
        json.loads(data)
    except ValueError:
        return True
    return False


# --- scripting a single request ------------------------------------------------------------------


async def test_a_request_brings_its_own_fault(autojump_clock: object) -> None:
    engine = SimEngine()
    async with trio.open_nursery() as nursery:
        client = connect(engine, nursery)
        by_header = await client.ask(
            COMPLETIONS, STREAM, headers={"x-sim-fault": "end,after_events=2"}
        )
        by_body = await client.ask(COMPLETIONS, STREAM | {"x-sim-fault": "name=sim:status"})
        elsewhere = await client.ask(COMPLETIONS, STREAM | {"x-sim-fault": "name=w2:status"})
        unreadable = await client.ask(COMPLETIONS, STREAM | {"x-sim-fault": "gibberish"})
        nursery.cancel_scope.cancel()

    assert len(by_header.events) == 2
    assert by_body.status == 503
    assert is_good(elsewhere)
    assert unreadable.status == 400
    assert b"there is no fault 'gibberish'" in unreadable.body


async def test_faults_are_set_and_cleared_over_http(autojump_clock: object) -> None:
    engine = SimEngine()
    async with trio.open_nursery() as nursery:
        client = connect(engine, nursery)
        added = await client.ask("/sim/faults", b"request=1:status,code=500;now:freeze")
        refused = await client.ask("/sim/faults", b"nonsense")
        frozen = await client.ask("/sim/state")
        await client.ask("/sim/faults", method="DELETE")
        after = await client.ask(COMPLETIONS, STREAM)
        requests = await client.ask("/sim/requests")
        nursery.cancel_scope.cancel()

    assert added.json == {"faults": "request=1:status,code=500"}
    assert (refused.status, frozen.json["mode"]) == (400, "frozen")
    assert is_good(after)
    assert b'"path":"/v1/completions"' in requests.body
    assert requests.body.count(b'"path"') == 1
