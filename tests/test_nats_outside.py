"""What others put on NATS: no byte of it may become a bug, or an end of a line at a client."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.wires.nats import entries, jetstream
from router.wires.nats.broker import BrokerError, Message
from router.wires.nats.protocol import (
    CARRIED,
    STATUS,
    NotARequest,
    Request,
    answer_headers,
    is_stored,
    number,
    read_request,
    write_request,
)
from tests.agents import ID, NAMES, Stage, play

#### headers


@pytest.mark.parametrize("byte", range(256))
@pytest.mark.parametrize("name", CARRIED, ids=bytes.decode)
def test_a_value_reaches_the_client_only_if_every_byte_of_it_is_harmless(
    name: bytes, byte: int
) -> None:
    for text in {chr(byte), bytes([byte]).decode("utf-8", "surrogateescape")}:
        for value in (text, f"a{text}b", f"a{text}", f"{text}b"):
            found = dict(answer_headers({CARRIED[name]: value}))
            if 32 <= byte < 127:
                assert found == {name: value.encode()}
            else:
                assert found == ({name: b"application/json"} if name == b"content-type" else {})


@pytest.mark.parametrize("text", ["\u2028", "\u0100", "\U0001f600", "\ud800", ""])
def test_neither_does_what_is_no_byte(text: str) -> None:
    assert answer_headers({CARRIED[b"retry-after"]: text}) == []


def test_a_stream_whose_content_type_is_dropped_is_one_all_the_same() -> None:
    line = {CARRIED[b"content-type"]: "text/event-stream\nx: y", STATUS: "200"}
    assert answer_headers(line, streams=True) == [(b"content-type", b"text/event-stream")]
    assert answer_headers(line) == [(b"content-type", b"application/json")]
    assert answer_headers(line | {STATUS: "429"}, streams=True) == [
        (b"content-type", b"application/json")
    ]
    assert answer_headers({STATUS: "200"}, streams=True) == []


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", " 1", "1_0", "²", "٣", "9" * 5000])
def test_what_is_no_number_is_none(text: str) -> None:
    assert number({"rs-seq": text}, "rs-seq") is None


#### JSON

DEEP = 100_000
UNREADABLE_JSON = {
    "nothing": b"",
    "half": b"{",
    "no text": b"\xff\xfe",
    "no text in a string": b'{"path":"\xff","id":"\xff","instance":"\xff","stream":"\xff"}',
    "half a pair": b'{"path":"\\ud800","id":"\\ud800","instance":"\\ud800","stream":"\\ud800"}',
    "deep": b'{"stream":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep, unknown": b'{"stream":1,"seq":1,"x":' + b'{"x":' * DEEP + b"1" + b"}" * (DEEP + 1),
    "deep, not closed": b"[" * DEEP,
    "a large number": b'{"stream":1,"seq":' + b"9" * 5000 + b"}",
}


def _request(payload: bytes) -> None:
    with pytest.raises(NotARequest):
        read_request(payload)


def _body(payload: bytes) -> None:
    with pytest.raises(NotARequest):
        read_request(b'{"path":"/x","body":%b}' % payload)


def _entry(payload: bytes) -> None:
    with pytest.raises(entries.BadEntry):
        entries.decode("eA", payload)


def _stored(payload: bytes) -> None:
    is_stored({}, payload)


def _answer(payload: bytes) -> None:
    try:
        jetstream._checked(Message("s", payload))
    except BrokerError:
        pass


def _written(payload: bytes) -> None:
    written = write_request(b"POST", b"/x", b"", payload, stream=False, migratable=False)
    assert read_request(written).content() == payload


READERS: dict[str, Callable[[bytes], None]] = {
    "request": _request,
    "entry": _entry,
    "stored": _stored,
    "answer": _answer,
    "written": _written,
}


@pytest.mark.parametrize("payload", UNREADABLE_JSON.values(), ids=UNREADABLE_JSON)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_cannot_be_read_is_no_bug(read: Callable[[bytes], None], payload: bytes) -> None:
    read(payload)


@pytest.mark.parametrize("text", ["*", "é", "a", "\ud800", "\x00"])
def test_so_it_is_with_a_body_in_base64(text: str) -> None:
    with pytest.raises(NotARequest):
        Request("/x", body_base64=text).content()


@pytest.mark.parametrize("payload", UNREADABLE_JSON.values(), ids=UNREADABLE_JSON)
def test_an_agent_survives_it_on_all_its_subjects(payload: bytes) -> None:
    async def story(stage: Stage) -> None:
        for subject in (NAMES.cancel(ID), NAMES.agent(ID)):
            stage.router.publish(subject, payload)
        asked = stage.ask(payload=payload, accept="")
        await asked.wait_over()
        assert asked.last is not None
        assert asked.last.headers[STATUS] == "400"

    play(story)


#### inboxes

PLACES = {
    "_INBOX.x": True,
    "_INBOX.x.1": True,
    "mine.x": True,
    "infera.inbox.x": True,
    "infera2.x": True,
    "infera": True,
    "": False,
    "infera.inbox": False,
    "infera.inbox.": False,
    "infera.inboxes.x": False,
    NAMES.request(ID): False,
    NAMES.cancel(ID): False,
    NAMES.drain(ID): False,
    "$JS.API.STREAM.DELETE.KV_infera_workers": False,
    "$JS": False,
    "$KV.infera_workers.x": False,
    "$SYS.x": False,
    "_INBOX.*": False,
    "_INBOX.>": False,
    "_INBOX..x": False,
    "_INBOX.x y": False,
    "_INBOX.x\n": False,
    "_INBOX." + "x" * 600: False,
}


@pytest.mark.parametrize("inbox", PLACES)
def test_an_agent_answers_only_where_answers_are_meant_to_go(inbox: str) -> None:
    async def story(stage: Stage) -> None:
        assert stage.agent.intake._is_inbox(inbox) is PLACES[inbox]

    play(story)
