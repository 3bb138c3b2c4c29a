"""What the legs of a pair are sent: the pair's members in, everything else byte for byte."""

from __future__ import annotations

import random

import msgspec
import pytest

from router.pd.shaping import (
    Meeting,
    handoff_of,
    mint_rid,
    mint_rooms,
    put,
    rank_members,
    read,
    shape_decode,
    shape_prefill,
    without_handoff,
)
from router.width import WIDTH_MAX

ODD = b'{"model" : "m", "temperature":1.0e0,"big":12345678901234567890123, "messages":[{"x":"}"}]}'


def body_of(text: bytes) -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(text)
    return found


#### Reading


@pytest.mark.parametrize(
    ("body", "family", "width"),
    [
        (b"{}", "openai", 1),
        (b'{"n":3}', "openai", 3),
        (b'{"n":null}', "openai", 1),
        (b'{"n":0}', "openai", 1),
        (b'{"prompt":"a"}', "openai", 1),
        (b'{"prompt":["a","b"]}', "openai", 2),
        (b'{"prompt":["a","b"],"n":2}', "openai", 4),
        (b'{"prompt":[1,2,3]}', "openai", 1),
        (b'{"prompt":[[1],[2,3]]}', "openai", 2),
        (b'{"text":["a","b","c"]}', "generate", 3),
        (b'{"input_ids":[[1],[2]]}', "generate", 2),
        (b'{"text":"a","sampling_params":{"n":2}}', "generate", 2),
        (b'{"text":["a","b"],"sampling_params":[{"n":2},{"n":2}]}', "generate", 4),
        (b'{"text":"a","n":2}', "generate", 1),
        (b'{"prompt":[ "a" , "b" ]}', "openai", 2),
        (b'{"prompt":[]}', "openai", 1),
        (b'{"prompt":["a\\",\\"b","[c],[d]","\\\\"]}', "openai", 3),
        (b'{"prompt":[[],[ 1 , 2 ]]}', "openai", 2),
        (b'{"text":"a","sampling_params":[]}', "generate", 1),
        (b'{"n":100000000000}', "openai", 100000000000),
        (b'{"prompt":[' + b'"",' * 9999 + b'""]}', "openai", WIDTH_MAX + 1),
        (b'{"prompt":[' + b"[1]," * 9999 + b"[1]]}", "openai", WIDTH_MAX + 1),
    ],
)
def test_every_item_of_a_request_is_counted(body: bytes, family: str, width: int) -> None:
    assert read(body, family).width == width


@pytest.mark.parametrize(
    ("body", "may_be_named"),
    [
        (b"{}", True),
        (b'{"rid":null}', True),
        (b'{"rid":"a"}', False),
        (b'{"rid":["a","b"]}', False),
        (b'{"n":1}', True),
        (b'{"n":2}', False),
        (b'{"n":"2"}', False),
        (b'{"prompt":["a","b"]}', False),
    ],
)
def test_a_name_is_minted_only_where_it_names_one_generation(
    body: bytes, may_be_named: bool
) -> None:
    assert read(body, "openai").may_be_named is may_be_named


#### Both legs at once


@pytest.mark.parametrize("body", [b"{}", b"{ }", b'{"a":1}', ODD, b'{"a":1}\n', b'{"a":{}}'])
def test_members_are_added_and_nothing_else_is_touched(body: bytes) -> None:
    members = Meeting("h", 9, (5,), "r").members()

    shaped = put(body, members)

    added = {"bootstrap_host": "h", "bootstrap_port": 9, "bootstrap_room": 5, "rid": "r"}
    assert body_of(shaped) == body_of(body) | added
    assert shaped.startswith(body.rstrip().removesuffix(b"}"))


def test_members_of_the_client_are_replaced() -> None:
    body = b'{"rid":null,"bootstrap_room":[1,2],"a":1.50,"bootstrap_host":"evil"}'

    shaped = put(body, Meeting("h", None, (5,), "r").members())

    assert shaped.count(b'"bootstrap_room"') == shaped.count(b'"rid"') == 1
    assert b'"a":1.50' in shaped
    assert body_of(shaped)["bootstrap_host"] == "h"


def test_a_name_that_is_spelled_with_escapes_does_not_win() -> None:
    shaped = put(b'{"bootstrap\\u005froom":1}', Meeting("h", 9, (5,)).members())

    assert body_of(shaped)["bootstrap_room"] == 5


def test_an_unknown_port_is_null_and_not_left_out() -> None:
    assert Meeting("h", None, (5,)).members()["bootstrap_port"] == b"null"


def test_several_items_have_lists_of_their_length() -> None:
    members = Meeting("h", 9, (5, 6, 7)).members()

    shaped = body_of(put(b"{}", members))
    assert shaped == {
        "bootstrap_host": ["h", "h", "h"],
        "bootstrap_port": [9, 9, 9],
        "bootstrap_room": [5, 6, 7],
    }


def test_rooms_fit_a_signed_number_of_64_bits_and_differ() -> None:
    rooms = mint_rooms(random.Random(1), 1000)

    assert len(set(rooms)) == 1000
    assert all(0 <= room < 2**63 for room in rooms)
    assert max(rooms) > 2**62


@pytest.mark.parametrize("rank", range(4))
def test_a_room_leads_to_its_prefill_rank(rank: int) -> None:
    rooms = mint_rooms(random.Random(1), 100, rank=rank, ranks=4)

    assert {room % 4 for room in rooms} == {rank}
    assert all(0 <= room < 2**63 for room in rooms)


def test_minted_names_have_one_width_so_that_none_begins_another() -> None:
    names = {mint_rid(random.Random(seed)) for seed in range(100)}

    assert len(names) == 100
    assert {len(name) for name in names} == {32}


def test_a_leg_that_is_not_pinned_says_so() -> None:
    assert rank_members(None) == {"routed_dp_rank": b"null", "data_parallel_rank": b"null"}
    assert rank_members(2, 1)["disagg_prefill_dp_rank"] == b"1"


#### Prefill, then decode


def test_a_prefill_generates_one_token_and_keeps_its_cache() -> None:
    body = b'{"max_tokens":9,"stream":true,"stream_options":{},"min_tokens":2,"n":1,"x":1.0}'

    shaped = shape_prefill(body, is_chat=True)

    assert body_of(shaped) == {
        "max_tokens": 1,
        "stream": False,
        "n": 1,
        "x": 1.0,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    assert b'"x":1.0' in shaped


@pytest.mark.parametrize(
    ("given", "is_chat", "caps"),
    [
        (b"{}", True, {"max_tokens": 1}),
        (b'{"max_completion_tokens":9}', True, {"max_completion_tokens": 1}),
        (b'{"max_completion_tokens":9,"max_tokens":8}', True, {"max_completion_tokens": 1}),
        (b'{"max_completion_tokens":null,"max_tokens":8}', True, {"max_tokens": 1}),
        (b'{"max_completion_tokens":9,"max_tokens":8}', False, {"max_tokens": 1}),
    ],
)
def test_the_cap_is_spelled_once(given: bytes, is_chat: bool, caps: dict[str, int]) -> None:
    shaped = body_of(shape_prefill(given, is_chat=is_chat))

    assert {name: shaped[name] for name in shaped if name.startswith("max_")} == caps


def test_a_handoff_goes_on_verbatim() -> None:
    told = (
        b'{"remote_block_ids": [[1, 2]], "x":1.50,'
        b'"remote_engine_id":"e","remote_host":"h","remote_port":5600}'
    )
    handed = handoff_of(b'{"choices":[],"kv_transfer_params":' + told + b"}")

    assert handed == told
    assert shape_decode(b'{"a":1}', told) == b'{"a":1,"kv_transfer_params":' + told + b"}"


def test_a_handoff_joins_the_ids_that_a_continuation_begins_with() -> None:
    body = b'{"kv_transfer_params":{"prompt_token_ids":[1,2],"remote_host":"old"}}'

    shaped = body_of(shape_decode(body, b'{"remote_host":"new"}'))

    assert shaped["kv_transfer_params"] == {"prompt_token_ids": [1, 2], "remote_host": "new"}


@pytest.mark.parametrize(
    "given",
    [b"null", b"{}", b"5", b"[1]", b'"x"', b'{"mine":1}', b'{"tp_size":9,"remote_host":"old"}',
     b'{"do_remote_prefill":false,"do_remote_decode":true}'],
)  # fmt: skip
def test_nothing_of_the_clients_gets_into_a_handoff(given: bytes) -> None:
    told = b'{"remote_host":"new",  "x":1.50}'
    body = b'{"a":1.0,"kv_transfer_params":' + given + b"}"

    shaped = shape_decode(body, told)

    assert told in shaped
    assert body_of(shaped) == {"a": 1.0, "kv_transfer_params": {"remote_host": "new", "x": 1.5}}
    prefill = body_of(shape_prefill(body, is_chat=True))["kv_transfer_params"]
    assert prefill == body_of(shape_prefill(b"{}", is_chat=True))["kv_transfer_params"]


@pytest.mark.parametrize(
    "answer",
    [b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":{}}', b"[]", b"", b"{"],
)
def test_no_handoff_is_none(answer: bytes) -> None:
    assert handoff_of(answer) is None


@pytest.mark.parametrize("name", ["remote_block_ids", "remote_engine_id", "remote_host"])
@pytest.mark.parametrize("value", [None, [], 5])
def test_half_a_handoff_is_none(name: str, value: object) -> None:
    whole: dict[str, object] = {"remote_block_ids": [[1]], "remote_engine_id": "e"}
    whole |= {"remote_host": "h", "remote_port": 5600}

    assert handoff_of(msgspec.json.encode({"kv_transfer_params": whole})) is not None
    broken = msgspec.json.encode({"kv_transfer_params": whole | {name: value}})
    assert handoff_of(broken) is None


def test_a_handoff_without_blocks_is_none() -> None:
    told = {"remote_engine_id": "e", "remote_host": "h", "remote_port": 5600}

    assert handoff_of(msgspec.json.encode({"kv_transfer_params": told})) is None


def test_a_handoff_in_the_words_of_another_connector_goes_on() -> None:
    assert handoff_of(b'{"kv_transfer_params":{"transfer_id":"x"}}') == b'{"transfer_id":"x"}'


def test_a_handoff_of_the_clients_goes_nowhere() -> None:
    body = b'{"a": 1, "kv_transfer_params":{"do_remote_prefill":true,"remote_host":"x","mine":2}}'

    assert without_handoff(body) == b'{"a": 1, "kv_transfer_params":{"mine":2}}'
    assert without_handoff(b'{"a": 1}') == b'{"a": 1}'
