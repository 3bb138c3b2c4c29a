"""Entries of the registry: read back as written, and refused with a reason when they are none."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from router.engines import Knowledge
from router.wires.nats import entries
from router.wires.nats.entries import BadEntry, Entry
from router.wires.nats.protocol import token_of

FULL = Entry(
    id="10.0.0.1:8000",
    engine="sglang",
    role="prefill",
    models=("m", "m-lora"),
    context_length=4096,
    is_draining=True,
    inflight=3,
    group="g1",
    bootstrap_host="10.0.0.1",
    bootstrap_port=8998,
    version="baton 0.1.0",
)
FIELDS = [
    "id",
    "engine",
    "role",
    "models",
    "context_length",
    "state",
    "inflight",
    "group",
    "bootstrap_host",
    "bootstrap_port",
    "version",
]


def fields(**changes: object) -> dict[str, object]:
    written = json.loads(entries.encode(FULL))
    assert isinstance(written, dict)
    return {**written, **changes}


def read(fields: object) -> Entry:
    return entries.decode(FULL.key, json.dumps(fields).encode())


@pytest.mark.parametrize("entry", [FULL, Entry("w1"), evolve(FULL, is_draining=False)])
def test_an_entry_is_read_back_as_it_was_written(entry: Entry) -> None:
    assert entries.decode(entry.key, entries.encode(entry)) == entry


def test_an_entry_has_the_published_fields_in_order() -> None:
    assert list(fields()) == FIELDS
    assert fields()["state"] == "draining"


def test_the_key_is_the_token_of_the_subject() -> None:
    assert FULL.key == token_of(FULL.id) == "MTAuMC4wLjE6ODAwMA"


@pytest.mark.parametrize("name", FIELDS[1:])
@pytest.mark.parametrize("how", ["missing", "null"])
def test_all_but_the_id_may_be_left_out(name: str, how: str) -> None:
    given = fields()
    if how == "missing":
        del given[name]
    else:
        given[name] = None

    assert read(given).id == FULL.id


def test_fields_that_are_not_known_are_ignored() -> None:
    assert read(fields(weight=7, later={"a": [1]})) == FULL


@pytest.mark.parametrize("state", ["draining", "stopping", ""])
def test_a_worker_in_a_state_that_is_not_known_gets_nothing_new(state: str) -> None:
    assert read(fields(state=state)).is_draining


def test_an_engine_that_is_not_known_speaks_the_common_api() -> None:
    assert read(fields(engine="trtllm")).engine == "openai"


def test_an_entry_makes_a_worker_behind_nats() -> None:
    spec = FULL.spec()

    assert (spec.url, spec.scheme, spec.id) == ("nats:10.0.0.1:8000", "nats", "10.0.0.1:8000")
    assert (spec.engine, spec.role, spec.group) == ("sglang", "prefill", "g1")
    assert (spec.bootstrap_host, spec.bootstrap_port) == ("10.0.0.1", 8998)


def test_an_entry_is_knowledge_once_it_names_its_engine() -> None:
    assert FULL.knowledge() == Knowledge("sglang", ("m", "m-lora"), 4096, role="prefill")
    assert evolve(FULL, engine="auto").knowledge() is None


@pytest.mark.parametrize(
    "changed",
    [
        evolve(FULL, inflight=9),
        evolve(FULL, is_draining=False),
        evolve(FULL, models=("n",)),
        evolve(FULL, context_length=1),
    ],
)
def test_a_running_worker_may_change(changed: Entry) -> None:
    assert FULL.is_same_worker(changed)


@pytest.mark.parametrize(
    "changed",
    [
        evolve(FULL, engine="vllm"),
        evolve(FULL, role="decode"),
        evolve(FULL, group="g2"),
        evolve(FULL, bootstrap_host="10.0.0.2"),
        evolve(FULL, bootstrap_port=1),
        evolve(FULL, version="baton 0.2.0"),
    ],
)
def test_what_only_another_process_can_say_is_another_worker(changed: Entry) -> None:
    assert not FULL.is_same_worker(changed)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"id":"\\ud800"}',
        b"[" * 100_000,
        b'{"id":"10.0.0.1:8000","models":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        json.dumps({"id": "10.0.0.1:8000", "pad": "x" * entries.ENTRY_BYTES_MAX}).encode(),
        *(
            json.dumps(fields(**change)).encode()
            for change in (
                {"id": "another"},
                {"id": ""},
                {"id": 7},
                {"role": "boss"},
                {"models": "m"},
                {"models": [""]},
                {"models": ["m" * 513]},
                {"models": [str(n) for n in range(1001)]},
                {"context_length": 0},
                {"context_length": "4096"},
                {"context_length": True},
                {"context_length": 2**200},
                {"group": 'g"'},
                {"bootstrap_port": 70000},
                {"bootstrap_host": "a b"},
                {"inflight": "3"},
            )
        ),
    ],
)
def test_what_is_no_entry_is_refused_with_a_reason(value: bytes) -> None:
    with pytest.raises(BadEntry) as refused:
        entries.decode(FULL.key, value)

    assert 0 < len(str(refused.value)) < 500


@pytest.mark.parametrize("id", ["a b", "ä", "", "x" * 200, "a,b"])
def test_an_id_that_no_worker_may_have_is_refused(id: str) -> None:
    with pytest.raises(BadEntry):
        entries.decode(token_of(id), json.dumps({"id": id}).encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON) | JSON | st.binary(max_size=60))
def test_whatever_lies_under_a_key_is_an_entry_or_refused(value: object) -> None:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    try:
        entry = entries.decode(FULL.key, raw)
    except BadEntry:
        return

    assert entries.decode(FULL.key, entries.encode(entry)) == entry
