"""Simulated halves of pairs: they depend on each other as real ones do, hangs included.

What the errors say was recorded from SGLang 0.5.23 (Mooncake) and vLLM 0.32.0 (NIXL).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio
from attrs import frozen

from router.sim import SimEngine, SimSettings
from router.sim.fault_kinds import KINDS
from router.sim.server import serve
from tests.neighbours import Neighbours
from tests.simclient import Client, Heard, connect

COMPLETIONS = "/v1/completions"
HOST, PORT = "127.0.0.1", 8998
SIDE_PORT = 5600
TRACES = Path(__file__).parent / "traces"
STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
#: First halves take a second to compute, so that there is time in which something may happen.
PREFILL = SimSettings(
    "sglang", name="p", role="prefill", bootstrap_port=PORT, first_token_seconds=1.0
)
DECODE = SimSettings("sglang", name="d", role="decode", token_seconds=0.1)
VLLM_PREFILL = SimSettings("vllm", name="p", role="prefill", bootstrap_port=SIDE_PORT)
VLLM_DECODE = SimSettings("vllm", name="d", role="decode", bootstrap_port=SIDE_PORT + 1)


@frozen
class Pair:
    """Two halves, and clients of them."""

    nursery: trio.Nursery
    prefill: SimEngine
    decode: SimEngine

    def client(self, engine: SimEngine) -> Client:
        """A new connection to one of them."""
        return connect(engine, self.nursery)

    async def ask(self, engine: SimEngine, body: object, patience: float = 1000.0) -> Heard:
        """One question on a connection of its own."""
        return await self.client(engine).ask(COMPLETIONS, body, patience=patience)

    async def both(
        self, body: object, *, decode_after: float = 0.0, prefill_after: float = 0.0
    ) -> tuple[Heard, Heard]:
        """Both halves asked, as a router does; what prefill said, and decode."""
        heard: dict[str, Heard] = {}

        async def one(engine: SimEngine, after: float) -> None:
            await trio.sleep(after)
            heard[engine.settings.name] = await self.ask(engine, body)

        async with trio.open_nursery() as asking:
            asking.start_soon(one, self.prefill, prefill_after)
            asking.start_soon(one, self.decode, decode_after)
        return heard["p"], heard["d"]


@asynccontextmanager
async def pair(
    prefill: SimSettings = PREFILL, decode: SimSettings = DECODE, *, faults: str = ""
) -> AsyncIterator[Pair]:
    """Both halves; `faults` are for the one they name."""
    async with trio.open_nursery() as nursery:
        neighbours = Neighbours(nursery)
        halves = [
            neighbours.start(attrs.evolve(each, faults=(faults,) if faults else ()))
            for each in (prefill, decode)
        ]
        yield Pair(nursery, *halves)
        nursery.cancel_scope.cancel("the test is over")


def asking(tokens: int = 4, room: object = 7, **more: object) -> dict[str, object]:
    body: dict[str, object] = {"model": "tiny", "prompt": "Once", "max_tokens": tokens}
    body |= {"stream": True, "temperature": 0}
    body |= {"bootstrap_host": HOST, "bootstrap_port": PORT, "bootstrap_room": room}
    return body | more


async def what_one_engine_says(body: dict[str, object], kind: str = "sglang") -> Heard:
    async with trio.open_nursery() as nursery:
        engine = SimEngine(SimSettings(kind))  # type: ignore[arg-type]  # one of two words
        heard = await connect(engine, nursery).ask(COMPLETIONS, body)
        nursery.cancel_scope.cancel("the test is over")
    return heard


def error_of(heard: Heard) -> dict[str, object]:
    """The error, wherever it is."""
    found = heard.chunks[0]["error"] if heard.status == 200 else heard.json
    assert isinstance(found, dict)
    found = found.get("error", found)
    assert isinstance(found, dict)
    return found


# --- SGLang: two halves that need each other -----------------------------------------------------


async def test_a_pair_says_what_one_engine_says(autojump_clock: object) -> None:
    body = asking(8, return_token_ids=True)
    async with pair() as both:
        first, second = await both.both(body)
    whole = await what_one_engine_says(body)

    assert (second.text, second.ids, second.finish) == (whole.text, whole.ids, whole.finish)
    assert (first.ids, first.finish) == (whole.ids[:1], "length")
    assert first.is_done
    assert second.is_done


@pytest.mark.parametrize("late", ["decode", "prefill"])
async def test_whoever_comes_first_waits(late: str, autojump_clock: object) -> None:
    async with pair() as both:
        first, second = await both.both(
            asking(stream=False),
            decode_after=200.0 if late == "decode" else 0.0,
            prefill_after=200.0 if late == "prefill" else 0.0,
        )

    assert (first.status, second.status) == (200, 200)
    assert first.seconds == pytest.approx(201 if late == "decode" else 1)
    assert second.seconds == pytest.approx(201 if late == "prefill" else 1, abs=0.5)


@STREAMED
@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_a_half_alone_gives_up_after_five_minutes(
    half: str, stream: bool, autojump_clock: object
) -> None:
    async with pair() as both:
        engine = getattr(both, half)
        heard = await both.ask(engine, asking(stream=stream))

    assert heard.seconds == pytest.approx(300)
    assert heard.status == (200 if stream else 500)
    assert "timed out after 300.0s" in str(error_of(heard)["message"])


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_the_error_of_a_half_alone_is_the_recorded_one(
    half: str, autojump_clock: object
) -> None:
    recorded = Heard(status=200, body=(TRACES / f"sglang-pd-{half}-timeout.sse").read_bytes())
    room = int(str(error_of(recorded)["message"]).partition("bootstrap_room=")[2].partition(" ")[0])
    rid = str(error_of(recorded)["message"]).partition("rid='")[2].partition("'")[0]
    async with pair() as both:
        heard = await both.ask(getattr(both, half), asking(room=room, rid=rid))

    assert heard.body == recorded.body


async def test_prefill_that_refuses_leaves_decode_waiting(autojump_clock: object) -> None:
    short = attrs.evolve(PREFILL, context_length=8)
    async with pair(short) as both:
        refusal = await both.ask(both.prefill, asking(prompt="word " * 20))
        waiting = await both.ask(both.decode, asking(prompt="word " * 20), patience=250)

    assert refusal.status == 400
    assert refusal.seconds == 0
    assert (waiting.ending, waiting.raw) == ("silent", b"")


@STREAMED
async def test_prefill_learns_that_its_decode_was_aborted(
    stream: bool, autojump_clock: object
) -> None:
    async with pair() as both:

        async def abort() -> None:
            await trio.sleep(0.5)
            body = {"rid": "r", "abort_all": False}
            await both.client(both.decode).ask("/abort_request", body)

        both.nursery.start_soon(abort)
        first, second = await both.both(asking(stream=stream, rid="r"))

    assert second.status == (200 if stream else 500)
    assert "Aborted by AbortReq." in str(error_of(second)["message"])
    assert "Prefill bootstrap failed" in str(error_of(first)["message"])
    assert first.seconds == pytest.approx(0.5)


async def test_decode_is_not_told_that_its_prefill_was_aborted(autojump_clock: object) -> None:
    async with pair() as both:
        await both.client(both.prefill).ask("/abort_request", {"rid": "r"})
        both.nursery.start_soon(partial(both.ask, both.prefill, asking(rid="r")))
        await trio.sleep(0.5)
        await both.client(both.prefill).ask("/abort_request", {"rid": "r"})
        second = await both.ask(both.decode, asking(rid="r"))

    assert second.seconds == pytest.approx(300)


async def test_a_decode_that_left_is_noticed_within_seconds_and_fails_its_prefill(
    autojump_clock: object,
) -> None:
    async with pair(attrs.evolve(PREFILL, first_token_seconds=60.0)) as both:
        client = both.client(both.decode)
        await client.send(COMPLETIONS, asking())
        await trio.sleep(1)
        await client.stream.aclose()
        first = await both.ask(both.prefill, asking())

    assert first.seconds == pytest.approx(4)
    assert both.decode.inflight == 0
    assert "another rank" in str(error_of(first)["message"])


async def test_a_prefill_that_comes_after_its_decode_left_fails_at_once(
    autojump_clock: object,
) -> None:
    async with pair() as both:
        await both.ask(both.decode, asking(), patience=1)
        both.nursery.start_soon(partial(both.ask, both.decode, asking(rid="r")))
        await trio.sleep(1)
        await both.client(both.decode).ask("/abort_request", {"rid": "r"})
        await trio.sleep(0.1)
        first = await both.ask(both.prefill, asking())

    assert first.seconds == 0
    assert "Prefill bootstrap failed" in str(error_of(first)["message"])


@STREAMED
async def test_decode_misses_the_heartbeats_of_a_prefill_that_died(
    stream: bool, autojump_clock: object
) -> None:
    async with pair() as both:
        both.nursery.start_soon(partial(both.ask, both.prefill, asking()))
        await trio.sleep(0.5)
        both.nursery.start_soon(_die, both.prefill, 0.2)
        second = await both.ask(both.decode, asking(stream=stream))

    assert second.seconds == pytest.approx(0.2 + 14)
    assert second.status == (200 if stream else 500)
    assert "Lost connection with prefill instance" in str(error_of(second)["message"])


async def _die(engine: SimEngine, after: float) -> None:
    await trio.sleep(after)
    engine.add_faults("now:server_dies")


async def test_decode_goes_on_when_prefill_dies_after_the_hand_over(
    autojump_clock: object,
) -> None:
    async with pair() as both:
        both.nursery.start_soon(_die, both.prefill, 1.15)
        first, second = await both.both(asking(8))
    whole = await what_one_engine_says(asking(8))

    assert first.ending == "complete"
    assert second.text == whole.text
    assert second.is_done


async def test_a_used_room_can_be_used_again(autojump_clock: object) -> None:
    async with pair() as both:
        await both.both(asking())
        first, second = await both.both(asking(prompt="Twice"))

    assert second.text == (await what_one_engine_says(asking(prompt="Twice"))).text
    assert first.ending == "complete"
    assert not both.prefill.caches.rooms


async def test_two_prompts_in_one_room_make_a_wrong_text(autojump_clock: object) -> None:
    async with pair() as both:
        both.nursery.start_soon(partial(both.ask, both.prefill, asking(prompt="Twice")))
        second = await both.ask(both.decode, asking(8))

    assert second.text != (await what_one_engine_says(asking(8))).text


@pytest.mark.parametrize("rooms", [40, [40, 77]], ids=["counted", "listed"])
async def test_a_batch_has_a_room_for_each_prompt(rooms: object, autojump_clock: object) -> None:
    hosts = {"bootstrap_host": [HOST] * 2, "bootstrap_port": [PORT] * 2} if rooms != 40 else {}
    body = asking(room=rooms, prompt=["Once", "Twice"], stream=False) | hosts
    async with pair() as both:
        first, second = await both.both(body)
    whole = await what_one_engine_says(body)

    assert [each["text"] for each in second.json["choices"]] == [  # type: ignore[attr-defined]
        each["text"]
        for each in whole.json["choices"]  # type: ignore[attr-defined]
    ]
    assert first.status == 200


async def test_several_samples_hang_in_decode(autojump_clock: object) -> None:
    async with pair() as both:
        first, second = await both.both(asking(n=2, temperature=0.5, stream=False))

    assert first.status == 200
    assert second.seconds == pytest.approx(300)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (asking(room=None), 400),
        (asking(room="x"), 400),
        (asking(room=1.5), 400),
        (asking(room=(1 << 63) - 1), 200),
        (asking(room=0), 200),
        (asking(room=-5), 200),
        (asking(bootstrap_port="8998"), 400),
    ],
)
async def test_what_a_room_may_be(
    body: dict[str, object], status: int, autojump_clock: object
) -> None:
    async with pair() as both:
        first, second = await both.both(body)

    assert (first.status, second.status) == (status, status)


@pytest.mark.parametrize(
    "body",
    [
        asking(room=1 << 63),
        asking(room=[5], bootstrap_host=[HOST], bootstrap_port=[PORT]),
    ],
    ids=["too large", "a list for one prompt"],
)
async def test_rooms_that_kill_the_process(body: dict[str, object], autojump_clock: object) -> None:
    async with pair() as both:
        first = await both.ask(both.prefill, body)

    assert (first.ending, first.raw) == ("cut", b"")
    assert first.seconds == pytest.approx(5)
    assert both.prefill.is_refusing


@pytest.mark.parametrize("missing", ["bootstrap_host", "bootstrap_port"])
async def test_without_an_address_both_halves_hang(missing: str, autojump_clock: object) -> None:
    async with pair() as both:
        first, second = await both.both(asking() | {missing: None})

    assert first.seconds == pytest.approx(300)
    assert second.seconds == pytest.approx(300)


async def test_an_engine_that_is_no_half_ignores_rooms(autojump_clock: object) -> None:
    heard = await what_one_engine_says(asking(room=1 << 70))

    assert heard.is_done


async def test_halves_say_what_they_are(autojump_clock: object) -> None:
    async with pair() as both:
        heard = await both.client(both.prefill).ask("/server_info")
        other = await both.client(both.decode).ask("/model_info")

    assert heard.json["disaggregation_mode"] == "prefill"
    assert heard.json["disaggregation_bootstrap_port"] == PORT
    assert other.json["disaggregation_mode"] == "decode"


# --- aborts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rid", "aborted"),
    [
        ("request-1", ["request-1", "request-10"]),
        ("request-10", ["request-10"]),
        ("request", []),
        ("", []),
    ],
)
async def test_an_abort_takes_along_what_begins_with_its_id(
    rid: str, aborted: list[str], autojump_clock: object
) -> None:
    async with pair() as both:
        for number, name in enumerate(("request-1", "request-10", "request-2")):
            body = asking(rid=name, room=number + 1)
            both.nursery.start_soon(partial(both.ask, both.decode, body))
        await trio.sleep(1)
        heard = await both.client(both.decode).ask("/abort_request", {"rid": rid})

    assert heard.status == 200
    assert sorted(both.decode.aborted) == aborted


async def test_samples_are_not_found_by_the_id_of_their_request(autojump_clock: object) -> None:
    async with pair() as both:
        body = asking(rid="r", n=2, temperature=0.5)
        both.nursery.start_soon(partial(both.ask, both.decode, body))
        await trio.sleep(1)
        await both.client(both.decode).ask("/abort_request", {"rid": "r"})

    assert not both.decode.aborted


# --- faults of halves ----------------------------------------------------------------------------


async def test_comments_before_anything_else(autojump_clock: object) -> None:
    async with pair(faults="name=d:early_head,comments_every=10") as both:
        second = await both.ask(both.decode, asking(), patience=35)

    assert second.status == 200
    assert second.body == b": keep-alive\n\n" * 3


async def check_alone(first: Heard, second: Heard) -> None:
    assert first.is_done
    assert first.seconds == pytest.approx(1)
    assert second.seconds == pytest.approx(300)


async def check_linger(first: Heard, second: Heard) -> None:
    assert second.seconds == pytest.approx(1.3)
    assert first.seconds == pytest.approx(51)
    assert first.is_done


async def check_transfer_fails(first: Heard, second: Heard) -> None:
    assert "Prefill transfer failed" in str(error_of(first)["message"])
    assert "Decode transfer failed" in str(error_of(second)["message"])
    assert first.seconds == second.seconds == pytest.approx(1)


CHECKS: dict[str, tuple[str, Callable[[Heard, Heard], Awaitable[None]]]] = {
    "alone": ("name=p:alone", check_alone),
    "linger": ("name=p:linger,seconds=50", check_linger),
    "transfer_fails": ("name=p:transfer_fails", check_transfer_fails),
}


def test_every_fault_of_a_half_has_its_check() -> None:
    assert set(CHECKS) == {kind.name for kind in KINDS.values() if kind.family == "half"}


@pytest.mark.parametrize("kind", CHECKS)
async def test_fault_of_a_half(kind: str, autojump_clock: object) -> None:
    faults, check = CHECKS[kind]
    async with pair(faults=faults) as both:
        await check(*await both.both(asking()))


async def test_decode_that_cannot_load_what_came(autojump_clock: object) -> None:
    async with pair(faults="name=d:transfer_fails") as both:
        first, second = await both.both(asking(stream=False))

    assert (first.status, second.status) == (200, 500)


async def test_prefill_that_keeps_its_cache_and_fails(autojump_clock: object) -> None:
    async with pair(faults="name=p:alone;name=p:error_event,at=head") as both:
        first, second = await both.both(asking())

    assert "error" in first.chunks[0]
    assert second.seconds == pytest.approx(300)


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_prefill_that_finishes_badly(reason: str, autojump_clock: object) -> None:
    async with pair(faults=f"name=p:alone;name=p:abort,reason={reason}") as both:
        heard = await both.ask(both.prefill, asking())
        whole = await both.ask(both.prefill, asking(stream=False))

    assert heard.finish == reason
    assert f'"finish_reason":"{reason}"'.encode() in whole.body


# --- vLLM: first one half, then the other --------------------------------------------------------

WANTED: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}


def first_half(prompt: str = "Once", **more: object) -> dict[str, object]:
    body: dict[str, object] = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    return body | {"temperature": 0, "stream": False, "kv_transfer_params": WANTED} | more


def second_half(given: object, prompt: str = "Once", **more: object) -> dict[str, object]:
    body: dict[str, object] = {"model": "tiny", "prompt": prompt, "max_tokens": 6}
    return body | {"temperature": 0, "stream": True, "kv_transfer_params": given} | more


vllm_pair = partial(pair, VLLM_PREFILL, VLLM_DECODE)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
async def test_a_hand_over_is_named_in_the_answer_of_prefill(
    path: str, autojump_clock: object
) -> None:
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    async with vllm_pair() as both:
        heard = await both.client(both.prefill).ask(path, first_half() | messages)

    assert heard.json["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1]],
        "remote_engine_id": "p-0",
        "remote_request_id": f"{heard.json['id']}-0-" + str(_reference(heard))[-8:],
        "remote_host": HOST,
        "remote_port": SIDE_PORT,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": heard.json["usage"]["prompt_tokens"],  # type: ignore[index]
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


def _reference(heard: Heard) -> object:
    given = heard.json["kv_transfer_params"]
    assert isinstance(given, dict)
    return given["remote_request_id"]


async def test_decode_fetches_what_prefill_parked(autojump_clock: object) -> None:
    async with vllm_pair() as both:
        given = (await both.ask(both.prefill, first_half())).json["kv_transfer_params"]
        heard = await both.ask(both.decode, second_half(given))
    whole = await what_one_engine_says(second_half(None), "vllm")

    assert heard.text == whole.text
    assert heard.is_done


@pytest.mark.parametrize("since", ["nobody", "somebody"])
@pytest.mark.parametrize("why", ["used", "late"])
async def test_a_stale_reference_is_somebody_elses_text(
    why: str, since: str, autojump_clock: object
) -> None:
    """It is a 200 all the same (vllm #52234)."""
    async with vllm_pair() as both:
        given = (await both.ask(both.prefill, first_half())).json["kv_transfer_params"]
        if why == "used":
            await both.ask(both.decode, second_half(given))
        else:
            await trio.sleep(31)
        if since == "somebody":
            await both.ask(both.prefill, first_half("Twice"))
        heard = await both.ask(both.decode, second_half(given))
    whole = await what_one_engine_says(second_half(None), "vllm")

    assert heard.status == 200
    assert (heard.text == whole.text) == (since == "nobody")


GONE: dict[str, Callable[[Pair], Awaitable[None]]] = {
    "dead": lambda both: _happen(both, "now:server_dies"),
    "began anew": lambda both: _happen(both, "now:server_dies,restart_after=1"),
}


async def _happen(both: Pair, fault: str) -> None:
    both.prefill.add_faults(fault)
    await trio.sleep(2)


@STREAMED
@pytest.mark.parametrize("how", GONE)
async def test_a_remote_that_is_gone(how: str, stream: bool, autojump_clock: object) -> None:
    async with vllm_pair() as both:
        given = (await both.ask(both.prefill, first_half())).json["kv_transfer_params"]
        await GONE[how](both)
        heard = await both.ask(both.decode, second_half(given, stream=stream))

    assert heard.status == (200 if stream else 500)
    assert error_of(heard) == {
        "message": "Internal server error",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    assert heard.is_done == stream


async def test_a_stream_names_no_hand_over(autojump_clock: object) -> None:
    async with vllm_pair() as both:
        heard = await both.ask(both.prefill, first_half(stream=True))

    assert b"remote_engine_id" not in heard.body


async def test_a_reference_without_blocks_kills_the_core(autojump_clock: object) -> None:
    async with vllm_pair() as both:
        heard = await both.ask(both.decode, second_half({"do_remote_prefill": True}))
        await trio.sleep(2)

    assert "EngineCore encountered an issue" in str(error_of(heard)["message"])
    assert both.decode.is_refusing


async def test_a_reference_without_a_sender_hangs(autojump_clock: object) -> None:
    given = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_host": HOST}
    async with vllm_pair() as both:
        heard = await both.ask(both.decode, second_half(given, stream=False), patience=5000)

    assert heard.ending == "silent"


async def test_a_batch_is_given_the_cache_of_one_prompt(autojump_clock: object) -> None:
    batch = ["Once", "Twice"]
    async with vllm_pair() as both:
        asked = first_half() | {"prompt": batch}
        given = (await both.ask(both.prefill, asked)).json["kv_transfer_params"]
        heard = await both.ask(both.decode, second_half(given, stream=False) | {"prompt": batch})
    texts = [each["text"] for each in heard.json["choices"]]  # type: ignore[attr-defined]

    assert texts[0] == texts[1]


async def test_an_engine_without_a_connector_hands_nothing_over(autojump_clock: object) -> None:
    heard = await what_one_engine_says(first_half(), "vllm")

    assert heard.json["kv_transfer_params"] is None


# --- processes -----------------------------------------------------------------------------------


async def test_halves_in_two_processes_meet_over_sockets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = SimSettings("sglang", name="p", role="prefill")
    prefill, decode = SimEngine(settings), SimEngine(attrs.evolve(settings, role="decode"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, prefill)
        nursery.start_soon(serve, decode)
        with trio.fail_after(5):
            while not (prefill.kv_port and decode.kv_port):  # noqa: ASYNC110
                await trio.sleep(0.01)
        body = asking(bootstrap_port=prefill.kv_port)
        nursery.start_soon(partial(connect(prefill, nursery).ask, COMPLETIONS, body))
        heard = await connect(decode, nursery).ask(COMPLETIONS, body, patience=5)
        nursery.cancel_scope.cancel("the test is over")

    assert heard.text == (await what_one_engine_says(body)).text
