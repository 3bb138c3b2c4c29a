"""Requests at the agent: what goes to the engine, what comes back as frames, and every cancel."""

from __future__ import annotations

import base64
import itertools
import json
import re

import pytest
import trio

from router.agent.proxied import Proxied
from router.agent.replies import HEADER_BYTES, Replies
from router.wires.nats.broker import BrokerAway
from tests.agents import ASK_ALL, HOST, PORT, Stage, play

#### Answers


def test_a_stream_goes_out_as_the_engine_speaks() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(8)
        await asked.wait_over()

        assert asked.kinds == ["head", "data", "done"]
        assert asked.frames[0].status == 200
        assert asked.frames[0].headers["rs-content-type"].startswith("text/event-stream")
        assert asked.last is not None
        assert asked.last.status == 200
        assert asked.data.endswith(b"data: [DONE]\n\n")
        # One frame a read, not one at the end.
        moments = [each.at for each in asked.frames if each.kind == "data"]
        assert len(set(moments)) >= 8

    play(story)


def test_an_old_router_gets_no_frame_that_it_does_not_know() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(3, accept="", fault="delay,first_token=7")
        await asked.wait_over()

        assert asked.kinds == ["data", "done"]
        assert asked.last is not None
        assert asked.last.status == 200

    play(story)


def test_a_unary_answer_is_whole() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(3, stream=False, accept="")
        await asked.wait_over()

        assert asked.kinds == ["data", "done"]
        assert json.loads(asked.data)["usage"]["completion_tokens"] == 3

    play(story)


@pytest.mark.parametrize("accept", ["", ASK_ALL])
@pytest.mark.parametrize("code", [400, 404, 429, 500, 503])
def test_an_engine_s_error_is_an_answer_with_its_status(code: int, accept: str) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(3, accept=accept, fault=f"status,code={code},retry_after=7")
        await asked.wait_over()

        assert asked.kinds == (["head"] if accept else []) + ["data", "done"]
        assert "error" in json.loads(asked.data)
        assert asked.last is not None
        assert asked.last.status == code
        if accept:
            assert asked.frames[0].status == code
            assert asked.frames[0].headers["rs-retry-after"] == "7"

    play(story)


@pytest.mark.parametrize("stream", [True, False])
def test_a_piece_above_the_broker_s_limit_is_split(stream: bool) -> None:
    whole: list[bytes] = []

    async def story(stage: Stage) -> None:
        asked = stage.ask(40, stream=stream, inbox="_INBOX.same", fault="padding,bytes=3000")
        await asked.wait_over()
        whole.append(re.sub(rb'"id":"[^"]*"', b"", asked.data))

        limit = stage.server.max_payload - HEADER_BYTES
        sizes = [len(each.payload) for each in asked.frames if each.kind == "data"]
        assert max(sizes) <= limit
        if stage.server.max_payload == 1024:
            assert sizes.count(limit) > 3

    play(story)
    play(story, max_payload=1024)

    assert len(whole[0]) > 3000
    assert whole[0] == whole[1]


NO_REQUESTS = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[1]",
    "no path": b'{"body":{}}',
    "a path of another kind": b'{"path":1,"body":{}}',
    "a path without a slash": b'{"path":"v1/completions","body":{}}',
    "a path with a line in it": b'{"path":"/v1/x HTTP/1.1\\r\\nx: y","body":{}}',
    "a path that is not ASCII": '{"path":"/v1/ü","body":{}}'.encode(),
    "a method with a space": b'{"path":"/v1/x","method":"GET /y","body":{}}',
    "no method at all": b'{"path":"/v1/x","method":"","body":{}}',
    "a header with a line in it": b'{"path":"/v1/x","headers":{"a":"b\\r\\nc: d"},"body":{}}',
    "a header with a colon": b'{"path":"/v1/x","headers":{"a: b":"c"},"body":{}}',
    "a header without a name": b'{"path":"/v1/x","headers":{"":"c"},"body":{}}',
    "a header beyond Latin-1": '{"path":"/v1/x","headers":{"a":"\u2603"},"body":{}}'.encode(),
    "a header of another kind": b'{"path":"/v1/x","headers":{"a":1},"body":{}}',
    "a body in no base64": b'{"path":"/v1/x","body_base64":"!","body":null}',
    "not UTF-8": b'{"path":"/v1/\xff","body":{}}',
}


@pytest.mark.parametrize("payload", NO_REQUESTS.values(), ids=NO_REQUESTS.keys())
def test_what_is_no_request_is_told_so_and_the_engine_hears_nothing(payload: bytes) -> None:
    async def story(stage: Stage) -> None:
        heard = len(stage.engine.requests)
        asked = stage.ask(payload=payload)
        await asked.wait_over()

        assert asked.kinds == ["error"]
        assert asked.last is not None
        assert asked.last.status == 400
        assert len(stage.engine.requests) == heard

    play(story)


def test_a_request_that_nobody_can_be_answered_is_dropped() -> None:
    async def story(stage: Stage) -> None:
        heard = len(stage.engine.requests)
        for reply in ("", "a.*", "a.>", "a..b", "x" * 600):
            stage.router.publish("infera.req.dzE", b'{"path":"/v1/x","body":{}}', reply=reply)
        await stage.settle()
        assert len(stage.engine.requests) == heard

        asked = stage.ask(2)
        await asked.wait_over()
        assert asked.ending == "done"

    play(story)


def test_one_inbox_is_served_once() -> None:
    async def story(stage: Stage) -> None:
        first = stage.ask(4, inbox="_INBOX.one")
        stage.ask(4, inbox="_INBOX.one")
        await first.wait_over()
        stage.ask(4, inbox="_INBOX.one")
        await trio.sleep(5.0)

        asked = [each for each in stage.engine.requests if each.method == "POST"]
        assert len(asked) == 1

    play(story)


def test_headers_cross_as_far_as_they_may() -> None:
    async def story(stage: Stage) -> None:
        headers = {
            "X-Data-Parallel-Rank": "3",
            "x-request-id": "abc",
            "connection": "x-mine",
            "x-mine": "1",
            "accept-encoding": "gzip",
            "content-length": "5",
            "host": "elsewhere",
        }
        asked = stage.ask(2, headers=headers)
        await asked.wait_over()

        got = stage.engine.requests[-1].headers
        assert got["x-data-parallel-rank"] == "3"
        assert got["x-request-id"] == "abc"
        assert got["accept-encoding"] == "identity"
        assert got["content-type"] == "application/json"
        assert got["host"] == f"{HOST}:{PORT}"
        assert "x-mine" not in got

    play(story)


def test_probes_and_bodies_that_are_no_json_pass() -> None:
    async def story(stage: Stage) -> None:
        probe = stage.ask(payload=b'{"path":"/v1/models","method":"GET","body":null}')
        body = base64.b64encode(b"not JSON").decode()
        odd = stage.ask(
            payload=json.dumps({"path": "/v1/completions", "body_base64": body}).encode()
        )
        await probe.wait_over()
        await odd.wait_over()

        assert json.loads(probe.data)["data"][0]["id"] == "tiny"
        assert odd.last is not None
        assert odd.last.status == 400
        assert stage.engine.requests[-1].body == b"not JSON"

    play(story)


#### Time and failures


def test_heartbeats_fill_every_silence() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(8, fault="delay,head=7;pause,after_events=4,seconds=5")
        await asked.wait_over()

        assert asked.kinds == ["heartbeat", "head", "data", "heartbeat", "data", "done"]
        moments = [0.0, *(each.at for each in asked.frames)]
        gaps = [b - a for a, b in itertools.pairwise(moments)]
        assert max(gaps) <= 2.0 + 1e-6

    play(story)


@pytest.mark.parametrize("accept", [ASK_ALL, f"{ASK_ALL},still"])
def test_what_flows_needs_no_heartbeat(accept: str) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(100, accept=accept)
        await asked.wait_over()

        # The first says that the request is there.
        assert [each.kind for each in asked.frames].count("heartbeat") + len(asked.beats) <= 1

    play(story)


@pytest.mark.parametrize("accept", ["", ASK_ALL])
@pytest.mark.parametrize("fault", ["hang", "hang,at=head", "hang,after_events=3"])
def test_a_silent_engine_is_given_up_after_the_idle_timeout(fault: str, accept: str) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(8, fault=fault, accept=accept)
        await asked.wait_over()

        assert asked.last is not None
        assert (asked.ending, asked.last.status) == ("error", 504)
        assert b"silent" in asked.last.payload
        assert 5.0 <= asked.last.at < 6.5
        await stage.settle()
        assert stage.engine.inflight == 0

    play(story, settings={"nats_req_idle_timeout": 5.0})


def test_a_stream_that_flows_does_not_stall() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(20)
        await asked.wait_over()

        assert asked.ending == "done"

    play(story, settings={"nats_req_idle_timeout": 1.0}, token_seconds=0.9, first_token_seconds=0.9)


@pytest.mark.parametrize("accept", ["", ASK_ALL])
def test_the_total_limit_ends_what_flows_too(accept: str) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(200, accept=accept)
        await asked.wait_over()

        assert asked.last is not None
        assert (asked.ending, asked.last.status) == ("error", 504)
        assert asked.last.at == pytest.approx(5.0, abs=0.01)
        await stage.settle()
        assert stage.engine.inflight == 0

    play(story, settings={"nats_req_max_duration": 5.0})


ENGINE_FAILURES = {
    "cut before its head": ("cut", []),
    "cut after its head": ("cut,at=head", ["head"]),
    "cut in the middle": ("cut,after_events=3", ["head", "data"]),
    "cut inside an event": ("cut,after_events=3,inside_bytes=9", ["head", "data"]),
    "reset in the middle": ("cut,after_events=3,reset=true", ["head", "data"]),
    "no HTTP": ("garbage", []),
    "a bad chunk": ("garbage,what=chunk_size,after_events=2", ["head", "data"]),
}


@pytest.mark.parametrize("fault, before", ENGINE_FAILURES.values(), ids=ENGINE_FAILURES.keys())
def test_an_engine_that_breaks_off_is_an_error(fault: str, before: list[str]) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(8, fault=fault)
        await asked.wait_over()

        assert asked.kinds == [*before, "error"]
        assert asked.last is not None
        assert asked.last.status == 500

    play(story)


def test_an_engine_that_is_not_there_is_an_error_at_once() -> None:
    async def story(stage: Stage) -> None:
        await trio.sleep(1.0)
        stage.engine.add_faults("now:server_dies")
        asked = stage.ask(8)
        await asked.wait_over()

        assert asked.kinds == ["error"]
        assert asked.frames[0].at == pytest.approx(1.0, abs=0.01)
        assert asked.frames[0].status == 502

    play(story)


def test_a_connection_the_engine_closed_as_idle_is_replaced() -> None:
    async def story(stage: Stage) -> None:
        for fault in ("close_after", "", "close_reused"):
            asked = stage.ask(2, fault=fault)
            await asked.wait_over()
            assert asked.ending == "done", fault

    play(story)


#### The broker goes


@pytest.mark.parametrize("tokens_seen", [1, 4])
def test_a_router_of_ours_finds_a_gap_after_an_outage(tokens_seen: int) -> None:
    """An error with the next number would say that the worker has failed."""

    async def story(stage: Stage) -> None:
        asked = stage.ask(20)
        await asked.wait_frames(1 + tokens_seen)
        stage.server.cut(stage.broker)
        await trio.sleep(1.0)
        # A part of the answer could not go out, and the engine is free.
        assert stage.engine.inflight == 0
        stage.server.mend(stage.broker)
        await asked.wait_over()

        assert asked.ending == "error"
        assert asked.frames[-1].seq == len(asked.frames)

    play(story, is_lossy=True)


def test_an_answer_that_ended_while_the_broker_was_away_is_whole() -> None:
    """Nothing but the end was to be said meanwhile, and that waits."""

    async def story(stage: Stage) -> None:
        asked = stage.ask(20, fault="pause,after_events=4,seconds=5")
        await asked.wait_frames(5)
        stage.server.cut(stage.broker)
        stage.agent.intake.open[asked.inbox].on_end()
        await trio.sleep(1.0)
        assert asked.ending == "nothing"
        stage.server.mend(stage.broker)
        await asked.wait_over(0.1)

        assert asked.ending == "done"

    play(story)


@pytest.mark.parametrize("ends_before", [True, False])
@pytest.mark.parametrize("late", [0.5, 1.5])
def test_a_router_that_is_back_after_its_agent_hears_how_it_stands(
    late: float, ends_before: bool
) -> None:
    """What the agent says in between finds nobody; it says it again."""

    async def story(stage: Stage) -> None:
        accept = f"{ASK_ALL},still"
        fault = "" if ends_before else "hang"
        asked = stage.ask(3 if ends_before else 20, fault=fault, accept=accept)
        if ends_before:
            await asked.wait_over()
            asked.frames.pop()  # it was on its way when the connection was lost
        else:
            await asked.wait(lambda asked: asked.beats)
        stage.server.down()
        stage.server.cut(stage.router)
        await trio.sleep(1.0)
        stage.server.up()
        before = len(asked.frames), len(asked.beats)
        await trio.sleep(late)
        stage.server.mend(stage.router)
        await asked.wait(lambda asked: (len(asked.frames), len(asked.beats)) > before, 1.1)

        assert asked.ending == ("done" if ends_before else "nothing")
        await trio.sleep(6.0)
        if not ends_before:
            assert asked.beats[-1] - asked.beats[-2] == pytest.approx(2.0, abs=0.01)
            stage.cancel(asked)

    play(story, is_lossy=True)


def test_an_old_router_s_stream_ends_when_a_frame_may_be_lost() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(8, accept="", fault="pause,after_events=4,seconds=5")
        await asked.wait_frames(4)
        await trio.sleep(1.0)
        stage.server.cut(stage.broker)
        await stage.settle()
        assert stage.engine.inflight == 0
        stage.server.mend(stage.broker)
        await asked.wait_over()

        # It could not have told a hole from an answer.
        assert asked.ending == "error"

    play(story)


@pytest.mark.parametrize("accept", ["", ASK_ALL])
def test_a_frame_that_is_lost_with_the_connection_is_no_whole_answer(accept: str) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(8, accept=accept, fault="pause,after_events=4,seconds=5")
        await asked.wait_frames(3 + bool(accept))
        stage.server.stall()
        await trio.sleep(0.15)
        stage.server.cut(stage.broker)
        stage.server.go_on()
        await trio.sleep(1.0)
        # Nothing had to be sent meanwhile.
        stage.server.mend(stage.broker)
        await asked.wait_over()

        numbers = [each.seq for each in asked.frames]
        assert numbers != list(range(len(numbers)))
        assert asked.ending == ("done" if accept else "error")

    play(story, is_lossy=True)


def test_a_last_frame_waits_for_a_broker_that_takes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when more waits to be sent than the buffer holds: the connection itself never goes."""

    async def story(stage: Stage) -> None:
        asked = stage.ask(20)
        await asked.wait_frames(4)

        def full(*_: object, **__: object) -> None:
            raise BrokerAway("the buffer is full")

        with monkeypatch.context() as patch:
            patch.setattr(stage.broker, "publish", full)
            await trio.sleep(1.0)
            assert stage.engine.inflight == 0
            assert asked.ending == "nothing"
        await asked.wait_over(1.0)

        assert asked.ending == "error"

    play(story, is_lossy=True)


def test_a_last_frame_that_may_be_lost_is_said_again_and_no_older_one() -> None:
    async def story(stage: Stage) -> None:
        old, recent = stage.ask(2), stage.ask(2, fault="delay,first_token=30")
        await recent.wait_over()
        stage.server.cut(stage.broker)
        await trio.sleep(1.0)
        stage.server.mend(stage.broker)
        await trio.sleep(10.0)

        ends = [each for each in stage.server.published if each.headers.get("rs-type") == "done"]
        assert [each.subject for each in ends].count(old.inbox) == 1
        assert [each.subject for each in ends].count(recent.inbox) > 1

    play(story)


@pytest.mark.parametrize("accept", ["", ASK_ALL])
def test_an_outage_before_the_first_frame_hurts_nobody(accept: str) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(8, accept=accept, fault="delay,head=9")
        await trio.sleep(1.0)
        stage.server.cut(stage.broker)
        await trio.sleep(3.0)
        stage.server.mend(stage.broker)
        await asked.wait_over()

        assert asked.ending == "done"

    play(story)


def test_requests_and_cancels_come_again_after_an_outage() -> None:
    async def story(stage: Stage) -> None:
        stage.server.down(forgets=True)
        await trio.sleep(5.0)
        stage.server.up()
        await stage.settle()
        asked, left = stage.ask(4), stage.ask(40)
        await left.wait_frames(3)
        stage.cancel(left)
        await asked.wait_over()

        assert asked.ending == "done"
        assert left.ending == "nothing"

    play(story)


def test_an_agent_that_starts_before_its_broker_serves_once_that_is_there() -> None:
    async def story(stage: Stage) -> None:
        await trio.sleep(3.0)
        stage.server.mend(stage.broker)
        await trio.sleep(0.5)
        assert stage.entry is not None
        asked = stage.ask(4)
        await asked.wait_over()

        assert asked.ending == "done"

    play(story, is_connected=False)


#### Cancels


#: A head, a data frame for each of 6 events (the last of them with [DONE]), and `done`.
FRAMES = 8


def test_the_stream_that_is_cancelled_has_that_many_frames() -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(6)
        await asked.wait_over()
        assert len(asked.frames) == FRAMES

    play(story)


@pytest.mark.parametrize("frames", range(FRAMES + 1))
@pytest.mark.parametrize("stream", [True, False])
def test_a_cancel_after_any_frame_frees_the_engine_at_once(frames: int, stream: bool) -> None:
    async def story(stage: Stage) -> None:
        await trio.sleep(1.0)
        asked = stage.ask(6, stream=stream)
        if not stream and frames > 3:
            await asked.wait_over()
        else:
            await asked.wait_frames(frames)
        seen = len(asked.frames)
        stage.cancel(asked)
        await stage.settle()
        at_cancel = len(asked.frames)
        assert stage.engine.inflight == 0
        assert not stage.agent.intake.open
        await trio.sleep(10.0)

        # What was published before the cancel came may still arrive; nothing after it.
        assert len(asked.frames) == at_cancel <= seen + 1
        assert asked.ending in ("nothing", "done")

    play(story)


@pytest.mark.parametrize("moment", [x / 20 for x in range(30)])
def test_a_cancel_at_any_moment_frees_the_engine_at_once(moment: float) -> None:
    async def story(stage: Stage) -> None:
        await trio.sleep(1.0)
        asked = stage.ask(8)
        await trio.sleep(moment)
        stage.cancel(asked)
        await stage.settle()

        assert stage.engine.inflight == 0
        assert not stage.agent.intake.open

    play(story)


def test_a_cancel_while_the_engine_does_not_answer_its_port() -> None:
    async def story(stage: Stage) -> None:
        await trio.sleep(1.0)
        stage.agent.line.close()
        stage.network.silent.add((HOST, PORT))
        asked = stage.ask(4)
        await trio.sleep(0.5)
        assert len(stage.agent.intake.open) == 1
        stage.cancel(asked)
        await stage.settle()

        assert not stage.agent.intake.open
        assert asked.frames == []

    play(story, settings={"health_check_interval_secs": 1000.0})


def test_a_repeated_cancel_and_one_that_comes_too_late_do_nothing() -> None:
    async def story(stage: Stage) -> None:
        left, whole = stage.ask(20), stage.ask(3)
        await whole.wait_over()
        for _ in range(3):
            stage.cancel(left)
            stage.cancel(whole)
            await trio.sleep(1.0)

        assert left.ending == "nothing"
        assert whole.ending == "done"
        assert len(stage.agent.intake.cancelled) == 0

    play(story)


@pytest.mark.parametrize("payload", [b"", b"\xff\xfe", b"x" * 5000, b"_INBOX.of.nobody"])
def test_a_cancel_of_nothing_known_is_ignored(payload: bytes) -> None:
    async def story(stage: Stage) -> None:
        asked = stage.ask(4)
        stage.router.publish("infera.cancel.dzE", payload)
        await asked.wait_over()

        assert asked.ending == "done"

    play(story)


def test_a_cancel_that_overtakes_its_request_keeps_it_from_the_engine() -> None:
    async def story(stage: Stage) -> None:
        heard = len([each for each in stage.engine.requests if each.method == "POST"])
        stage.cancel("_INBOX.early")
        await stage.settle()
        asked = stage.ask(4, inbox="_INBOX.early")
        await trio.sleep(3.0)

        assert asked.frames == []
        assert len([each for each in stage.engine.requests if each.method == "POST"]) == heard

    play(story)


#### Bugs of ours end one request


BROKEN: dict[str, tuple[type, str]] = {
    "reading it": (Proxied, "_headers_of"),
    "the head": (Proxied, "on_head"),
    "the body": (Proxied, "on_body"),
    "the end": (Proxied, "on_end"),
    "time": (Proxied, "sweep"),
    "a frame": (Replies, "data"),
    "the last frame": (Replies, "done"),
}


@pytest.mark.parametrize("owner, name", BROKEN.values(), ids=BROKEN.keys())
def test_a_bug_ends_one_request_and_no_other(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(stage: Stage) -> None:
        await trio.sleep(1.0)
        good = getattr(owner, name)

        def broken(*_: object, **__: object) -> None:
            monkeypatch.setattr(owner, name, good)
            raise ZeroDivisionError

        monkeypatch.setattr(owner, name, broken)
        first = stage.ask(4, fault="delay,first_token=3")
        await first.wait_over()
        second = stage.ask(4)
        await second.wait_over()

        assert first.last is not None
        assert (first.ending, first.last.status) == ("error", 500)
        assert second.ending == "done"
        assert stage.engine.inflight == 0

    play(story, bugs=1)


def test_a_bug_with_one_message_costs_the_others_of_its_batch_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: Proxied, payload: bytes) -> None:
        if b"bad" in payload:
            raise ZeroDivisionError
        begin(self, payload)

    begin = Proxied.begin
    monkeypatch.setattr(Proxied, "begin", broken)

    async def story(stage: Stage) -> None:
        bad, good = stage.ask(4, prompt="bad"), stage.ask(4)
        await bad.wait_over()
        await good.wait_over()

        assert (bad.ending, good.ending) == ("error", "done")

    play(story, bugs=1)


def test_stories_are_held_to_what_they_promise() -> None:
    """The stage itself: a second last frame does not pass."""

    async def story(stage: Stage) -> None:
        asked = stage.ask(2)
        await asked.wait_over()
        stage.router.publish(asked.inbox, b"", headers={"rs-type": "error", "rs-seq": "99"})
        await stage.settle()

    with pytest.raises(AssertionError):
        play(story)
