"""What the two legs of a pair are sent: the client's body with the pair's own members in it.

Pure. Everything that a pair does not need changed goes on byte for byte. The wire facts are those
of SGLang 0.5.23 (`managers/io_struct.py`, `entrypoints/openai/protocol.py`) and vLLM 0.32 with its
NixlConnector.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec
from attrs import frozen

from router.migration.splice import edit, read_members
from router.width import prompts_in

#: The engine keeps a room as a signed 64-bit number: with the top bit set it would wrap.
ROOM_BITS = 63
#: What vLLM's prefill is to do; the nulls are what its decode side would have been told.
_REMOTE_DECODE = {
    "do_remote_decode": b"true",
    "do_remote_prefill": b"false",
    "remote_engine_id": b"null",
    "remote_block_ids": b"null",
    "remote_host": b"null",
    "remote_port": b"null",
}
_PROMPT_IDS = "prompt_token_ids"
_ENCODE = msgspec.json.Encoder().encode
_NOTHING = msgspec.Raw(b"null")


class _Samples(msgspec.Struct, gc=False):
    n: int | None = None


class _Asked(msgspec.Struct, gc=False):
    n: int | None = None
    rid: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    text: msgspec.Raw = _NOTHING
    input_ids: msgspec.Raw = _NOTHING
    sampling_params: msgspec.Raw = _NOTHING
    return_logprob: bool | None = None


class _OfFirst(msgspec.Struct, array_like=True, gc=False):
    """A list of which only the first is read: no objects for the others."""

    first: _Samples | None = None


_ASKED = msgspec.json.Decoder(_Asked)
_SAMPLES = msgspec.json.Decoder(_Samples | None)
_SAMPLES_OF_FIRST = msgspec.json.Decoder(_OfFirst)


@frozen
class Reading:
    """What a body says that decides how a pair is asked."""

    #: Generations in one request: prompts times samples. Each has a room of its own.
    width: int = 1
    #: The client has named the request to the engine.
    has_rid: bool = False
    #: The client wants logprobs of the prompt, as only `/generate` gives them.
    wants_logprobs: bool = False
    #: It could be read; else the engine will refuse it, and nothing is minted.
    is_readable: bool = True

    @property
    def may_be_named(self) -> bool:
        """Whether a minted id would name exactly this generation: samples get ids of their own."""
        return self.is_readable and not self.has_rid and self.width == 1


def read(body: bytes, family: str) -> Reading:
    """Look into a body; never raises."""
    try:
        asked = _ASKED.decode(body)
        samples = asked.n
        if family == "generate":
            samples = _samples_of(asked.sampling_params)
        fields = (asked.text, asked.input_ids) if family == "generate" else (asked.prompt,)
        prompts = max(map(prompts_in, fields))
    except (msgspec.DecodeError, RecursionError):
        return Reading(is_readable=False)
    return Reading(
        # Nonsense is the engine's to refuse, and needs no rooms without number.
        width=max(1, prompts * (1 if samples is None else samples)),
        has_rid=bytes(asked.rid) != b"null",
        wants_logprobs=family == "generate" and bool(asked.return_logprob),
    )


def _samples_of(sampling_params: msgspec.Raw) -> int | None:
    if bytes(sampling_params).startswith(b"["):
        found = _SAMPLES_OF_FIRST.decode(sampling_params).first
    else:
        found = _SAMPLES.decode(sampling_params)
    return None if found is None else found.n


#### sglang-bootstrap


@frozen
class Meeting:
    """Where both legs meet: the prefill worker's bootstrap server, and a room for each item."""

    host: str
    #: None: the engine falls back to its own setting, but the member must be there.
    port: int | None
    rooms: tuple[int, ...]
    #: The engine's name for the request, where the router mints it.
    rid: str | None = None

    def members(self) -> dict[str, bytes]:
        """The members of both bodies; arrays for more than one item."""
        width = len(self.rooms)
        is_one = width == 1
        members = {
            "bootstrap_host": _ENCODE(self.host if is_one else [self.host] * width),
            "bootstrap_port": _ENCODE(self.port if is_one else [self.port] * width),
            "bootstrap_room": _ENCODE(self.rooms[0] if is_one else self.rooms),
        }
        if self.rid is not None:
            members["rid"] = _ENCODE(self.rid)
        return members


def mint_rooms(rng: random.Random, width: int, *, rank: int = 0, ranks: int = 1) -> tuple[int, ...]:
    """Fresh rooms, each of which SGLang's balancer sends to prefill's rank (`room % ranks`)."""
    if ranks == 1:
        return tuple(rng.getrandbits(ROOM_BITS) for _ in range(width))
    rooms = (rng.getrandbits(ROOM_BITS - 1) for _ in range(width))
    return tuple(room - room % ranks + rank for room in rooms)


def mint_rid(rng: random.Random) -> str:
    """A name of fixed width: SGLang's scheduler aborts by prefix, so none may begin another."""
    return f"{rng.getrandbits(128):032x}"


def put(body: bytes, members: Mapping[str, bytes]) -> bytes:
    """The body with these members; those of the client's own of the same names are gone."""
    if any(b'"%b"' % name.encode() in body for name in members):
        return edit(body, members)
    # What nearly every request is: none of the names stands in it, so they are added at the end.
    # One that is spelled with escapes would stand before ours, and of two the last one counts.
    end = body.rindex(b"}")
    added = b",".join(b'"%b":%b' % (name.encode(), value) for name, value in members.items())
    is_empty = body[:end].rstrip().endswith(b"{")
    return b"%b%b%b%b" % (body[:end], b"" if is_empty else b",", added, body[end:])


#### ranks (data parallel)


def rank_members(rank: int | None, prefill_rank: int | None = None) -> dict[str, bytes]:
    """The members that pin a leg to a rank of its worker (None: leave it to the engine)."""
    members = {"routed_dp_rank": _ENCODE(rank), "data_parallel_rank": b"null"}
    if prefill_rank is not None:
        members["disagg_prefill_dp_rank"] = _ENCODE(prefill_rank)
    return members


#### vllm-nixl


def shape_prefill(body: bytes, *, is_chat: bool) -> bytes:
    """The body for a prefill that generates one token and keeps its KV cache for a decode."""
    members = read_members(body) or {}
    changes: dict[str, bytes | None] = {"stream": b"false"}
    for name in ("stream_options", "min_tokens"):
        if name in members:
            changes[name] = None
    if "n" in members:
        changes["n"] = b"1"
    # Strict engines refuse a body with both spellings of the cap; only chat knows the longer one.
    cap, other = "max_tokens", "max_completion_tokens"
    if is_chat and bytes(members.get(other, _NOTHING)) != b"null":
        cap, other = other, cap
    changes[cap] = b"1"
    if other in members:
        changes[other] = None
    changes["kv_transfer_params"] = edit(b"{}", _REMOTE_DECODE | _prompt_in(members))
    return edit(body, changes)


def shape_decode(body: bytes, handoff: bytes) -> bytes:
    """The body for the decode that takes this hand-off, which goes on verbatim."""
    if b"kv_transfer_params" in body and (prompt := _prompt_in(read_members(body) or {})):
        handoff = put(handoff, prompt)
    return put(body, {"kv_transfer_params": handoff})


def _prompt_in(members: Mapping[str, msgspec.Raw]) -> dict[str, bytes]:
    """What else the body's `kv_transfer_params` may tell both legs: the prompt as ids.

    vLLM 0.32 reads them there in chat, where a continuation puts them, too. Whatever else a client
    writes is no part of a hand-off: decode would take it for one of prefill's words.
    """
    given = members.get("kv_transfer_params")
    if given is None or not bytes(given).startswith(b"{"):
        return {}
    ids = (read_members(bytes(given)) or {}).get(_PROMPT_IDS)
    return {} if ids is None else {_PROMPT_IDS: bytes(ids)}


def without_handoff(body: bytes) -> bytes:
    """The body without a hand-off of the client's own: half of one kills vLLM's core (0.32)."""
    if b"kv_transfer_params" not in body:
        return body
    given = (read_members(body) or {}).get("kv_transfer_params")
    if given is None or not bytes(given).startswith(b"{"):
        return body
    named = [name for name in read_members(bytes(given)) or {} if _is_of_handoff(name)]
    if not named:
        return body
    kept = edit(bytes(given), dict.fromkeys(named))
    return edit(body, {"kv_transfer_params": kept})


def _is_of_handoff(name: str) -> bool:
    return name.startswith(("do_remote_", "remote_"))


class _Prefilled(msgspec.Struct, gc=False):
    kv_transfer_params: msgspec.Raw = _NOTHING


class _Handoff(msgspec.Struct, gc=False):
    """What decode cannot do without (vLLM 0.32): no blocks kill its core, no sender hangs it.

    Without blocks it is none of vLLM's, whose word for them is the one that all versions share; a
    connector with other words altogether has a hand-off of its own.
    """

    remote_block_ids: list[msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET
    remote_engine_id: str | msgspec.UnsetType = msgspec.UNSET
    remote_host: str | msgspec.UnsetType = msgspec.UNSET
    remote_port: int | msgspec.UnsetType = msgspec.UNSET


_PREFILLED = msgspec.json.Decoder(_Prefilled)
_HANDOFF = msgspec.json.Decoder(_Handoff)


def handoff_of(answer: bytes) -> bytes | None:
    """The hand-off in a prefill's answer, as it stands there; None where there is no whole one."""
    try:
        found = bytes(_PREFILLED.decode(answer).kv_transfer_params)
        blocks = _HANDOFF.decode(found).remote_block_ids
    except (msgspec.DecodeError, RecursionError):
        return None
    members = read_members(found) or {}
    is_of_vllm = any(map(_is_of_handoff, members))
    is_whole = blocks is not msgspec.UNSET and bool(blocks) if is_of_vllm else bool(members)
    return found if is_whole else None
