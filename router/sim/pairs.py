"""What the two halves of a prefill/decode pair have to do before an answer can begin.

SGLang 0.5.23 over Mooncake: both halves get the request at once. Prefill waits for decode to come
to its room, computes, hands over, answers with one token; decode waits in the room. Each gives up
after 300 s, and not before: a router that sends one half only has a request that hangs. vLLM
0.32.0 over NIXL: prefill computes, parks its cache and names it in its answer; decode fetches it.
The texts of errors are those of the engines.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import trio

from router.sim import deaths, kv
from router.sim.dialect import Trouble
from router.sim.faults import Script, parse_fault
from router.sim.jobs import Fields, Job, Json, Meeting
from router.sim.kv import CacheLost, PeerGone, Room
from router.sim.running import Running

if TYPE_CHECKING:
    from router.sim.engine import SimEngine

BOOTSTRAP_SECONDS = 300.0
"""How long prefill waits for its decode (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)."""
WAITING_SECONDS = 300.0
"""How long decode waits for its prefill (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)."""
HEARTBEAT_SECONDS = 14.0
"""Until decode notices that prefill's process is gone: two missed heartbeats (seen: 5 to 14 s)."""
ROOM_END = 1 << 63
_ELSEWHERE = "Failed due to an unknown reason from another rank"
_UNSENT = "Failed to send kv chunk"


def is_deadly(job: Job) -> bool:
    """Rooms beyond int64, and a list of rooms for one prompt, kill the process (0.5.23)."""
    is_single = not job.is_batch and job.n == 1
    return any(
        (one.room is not None and one.room >= ROOM_END) or (one.is_listed and is_single)
        for one in job.meetings
    )


async def meet(engine: "SimEngine", running: Running, script: Script) -> None:
    """Wait for the other half and hand over, or take over; a failure becomes a fate."""
    if engine.settings.role == "mixed" or script.find("alone") is not None:
        return
    if running.job.meetings:
        of_engine = _bootstrap_failed if engine.settings.role == "prefill" else _decode_failed
        running.if_aborted = of_engine(running.job, 0, "Aborted by AbortReq.")
    await running.until_fated(partial(_step, engine, running, script))
    running.if_aborted = None


def first_token_seconds(engine: "SimEngine", running: Running, script: Script) -> float:
    """From here to the first token; a first half has computed before it handed over."""
    if engine.settings.role == "prefill" and running.job.meetings and not script.find("alone"):
        return 0.0
    late = script.find("delay")
    return engine.settings.first_token_seconds + (late.seconds("first_token") if late else 0.0)


async def _step(engine: "SimEngine", running: Running, script: Script) -> None:
    job, is_prefill = running.job, engine.settings.role == "prefill"
    fails = script.find("transfer_fails") is not None
    if fails and not job.meetings:
        running.fail(_KV_LOAD_FAILED)
    elif job.kv is not None and job.kv.get("do_remote_decode"):
        await _park(engine, running)
    elif job.kv is not None and job.kv.get("do_remote_prefill"):
        await _fetch(engine, running)
    elif job.meetings and is_prefill:
        await _hand_over(engine, running, script)
    elif job.meetings:
        await _join(engine, running)
        if fails:
            running.fail(_decode_failed(job, 0, _UNSENT))


#### SGLang


async def _hand_over(engine: "SimEngine", running: Running, script: Script) -> None:
    late = script.find("delay")
    pause = engine.settings.first_token_seconds + (late.seconds("first_token") if late else 0.0)
    with _entered(engine, running.job) as rooms:
        with trio.move_on_after(BOOTSTRAP_SECONDS):
            for room in rooms:
                await room.decode_came.wait()
        for place, room in enumerate(rooms):
            if not room.decode_came.is_set():
                waited = f"timed out after {BOOTSTRAP_SECONDS:.1f}s in KVPoll.Bootstrapping"
                what = f"Request {room.number} {waited}"
                running.fail(_bootstrap_failed(running.job, place, what))
                return
        async with trio.open_nursery() as nursery:
            for place, room in enumerate(rooms):
                nursery.start_soon(_fail_with_decode, running, place, room)
            await trio.sleep(pause)
            await engine.wait_answering()
            nursery.cancel_scope.cancel("computed")
        if script.find("transfer_fails") is not None:
            for room in rooms:
                room.fail(_UNSENT)
            running.fail(_prefill_failed(running.job, 0, _UNSENT))
            return
        for room, prompt in zip(rooms, running.prompts, strict=True):
            room.give(tuple(prompt))
    if (linger := script.find("linger")) is not None:
        await trio.sleep(linger.seconds("seconds"))


@contextlib.contextmanager
def _entered(engine: "SimEngine", job: Job) -> Iterator[list[Room]]:
    """The rooms of a request; whoever waits in them learns it when prefill leaves."""
    rooms = [engine.caches.enter(one.room or 0) for one in job.meetings]
    try:
        yield rooms
    finally:
        for room in rooms:
            # Who is still waiting there is told nothing; who left leaves a mark for one request.
            if room.decode_left.is_set() or not room.decode_came.is_set():
                engine.caches.close(room)


async def _fail_with_decode(running: Running, place: int, room: Room) -> None:
    await room.decode_left.wait()
    running.fail(_bootstrap_failed(running.job, place, _ELSEWHERE))


async def _join(engine: "SimEngine", running: Running) -> None:
    with trio.move_on_after(WAITING_SECONDS) as waiting:
        async with trio.open_nursery() as nursery:
            for place, meeting in enumerate(running.job.meetings):
                nursery.start_soon(_join_one, engine, running, place, meeting)
        if running.job.n > 1:
            # Prefill answers, decode never does (0.5.23, scalar rooms and lists alike).
            await trio.sleep_forever()
    if waiting.cancelled_caught:
        room = running.job.meetings[0].room
        waited = f"timed out after {WAITING_SECONDS:.1f}s in KVPoll.WaitingForInput"
        running.fail(_decode_failed(running.job, 0, f"Request {room} {waited}"))


async def _join_one(engine: "SimEngine", running: Running, place: int, meeting: Meeting) -> None:
    host, port, room = meeting.host, meeting.port, meeting.room
    if host is None or port is None or room is None:
        # Nobody is asked, and nobody answers (0.5.23: both halves hang).
        await trio.sleep_forever()
    try:
        cache = await kv.join(engine.dial, host, port, room)
    except PeerGone:
        await trio.sleep(HEARTBEAT_SECONDS)
        what = f"Lost connection with prefill instance (bootstrap_addr: {host}:{port})"
        running.fail(_decode_failed(running.job, place, what))
    except CacheLost as lost:
        running.fail(_decode_failed(running.job, place, str(lost)))
    else:
        running.take_over(place, engine.model, cache)


def _bootstrap_failed(job: Job, place: int, what: str) -> Trouble:
    return _failed("Prefill bootstrap failed", "req", job, place, what)


def _prefill_failed(job: Job, place: int, what: str) -> Trouble:
    return _failed("Prefill transfer failed", "req", job, place, what)


def _decode_failed(job: Job, place: int, what: str) -> Trouble:
    return _failed("Decode transfer failed", "decode_req.req", job, place, what)


def _failed(happened: str, name: str, job: Job, place: int, what: str) -> Trouble:
    room = job.meetings[place].room
    request = f"rank=0 {name}.rid='{job.rid}' {name}.bootstrap_room={room}"
    error = f"KVTransferError(bootstrap_room={room}): {what}"
    message = f"{happened} for request {request} with exception {error}"
    return Trouble(message, kind="500", event_kind="INTERNAL_SERVER_ERROR")


#### vLLM


async def _park(engine: "SimEngine", running: Running) -> None:
    """What prefill's answer will name. A stream carries no such thing (0.32.0)."""
    prompt = tuple(running.prompts[0])
    reference = f"{running.job.id}-0-{engine.situation().new_id(8)}"
    engine.caches.park(f"{engine.id}/{reference}", prompt)
    running.handoff = _named(engine, reference, len(prompt))


def _named(engine: "SimEngine", reference: str, count: int) -> Json:
    shown: Json = {"do_remote_prefill": True, "do_remote_decode": False}
    shown |= {"remote_block_ids": [[1 + n for n in range(-(-count // _BLOCK_TOKENS))]]}
    shown |= {"remote_engine_id": engine.id, "remote_request_id": reference}
    shown |= {"remote_host": engine.settings.host, "remote_port": engine.kv_port}
    shown |= {"tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": count}
    shown |= {"remote_blocks_expiry_time": None, "transfer_mode": "pull"}
    return shown | {"remote_prefill_cached_tokens": 0}


_BLOCK_TOKENS = 128
_KV_LOAD_FAILED = Trouble("Internal server error")
"""With the default `kv_load_failure_policy`."""


async def _fetch(engine: "SimEngine", running: Running) -> None:
    """Take over. Half a reference is worse than none: see the two ways to fail (0.32.0)."""
    given = Fields(running.job.kv or {})
    host, port = given.text("remote_host"), given.integer("remote_port")
    engine_id, reference = given.text("remote_engine_id"), given.text("remote_request_id")
    if not given.get("remote_block_ids"):
        # An assertion of the scheduler's, and the engine core is gone.
        deaths.befall(engine, parse_fault("now:core_dies"))
        return
    if host is None or port is None or engine_id is None or reference is None:
        # Nothing is fetched, and the request waits for it.
        await trio.sleep_forever()
        raise AssertionError
    try:
        cache = await kv.fetch(engine.dial, host, port, f"{engine_id}/{reference}")
    except CacheLost:
        running.fail(_KV_LOAD_FAILED)
    else:
        for place in range(len(running.choices)):
            running.take_over(place, engine.model, cache)
