"""One request, from the moment it was read to the last byte of its answer.

Here meet the dialect (what a well engine would say), the script (what this request is to
suffer) and the engine's condition. Whole answers are sent here, streams by `streaming`.
"""

from typing import TYPE_CHECKING

import msgspec
import trio
from attrs import define, field

from router.sim import deaths, pairs, tokens
from router.sim.dialect import Trouble
from router.sim.faults import BadFault, Fault, Script
from router.sim.jobs import Job, Reply, dump
from router.sim.running import Fate, Running
from router.sim.streaming import GARBAGE_AFTER_END, StreamAnswer
from router.sim.wire import ClientGone, Framing, Received, Wire, compress, head

if TYPE_CHECKING:
    from router.sim.engine import SimEngine

_LONG_LENGTH = 1 << 30
_GARBAGE_HEADS = {
    "status_line": b"HTTQ/1.1 two hundred maybe\r\n\r\n",
    "header": b"HTTP/1.1 200 OK\r\nthis line is no header\r\n\r\n",
    "two_lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}}",
}


@define(eq=False)
class Answer:
    """The answer to one request."""

    engine: "SimEngine"
    wire: Wire
    request: Received
    script: Script
    _keeps: bool = field(default=True, init=False)

    @property
    def is_given_at_once(self) -> bool:
        """Nothing is waited for, so nobody can leave meanwhile."""
        engine = self.engine
        is_work = self.request.path in engine.dialect.routes
        return engine.mode.answers and not is_work and not self.script.faults

    async def give(self) -> bool:
        """Send it; whether the connection can serve another request."""
        try:
            self._keeps = self.request.keeps_alive
            if self.request.path.startswith("/sim/"):
                await self._send(self._control())
            else:
                await self._give()
        except ClientGone:
            return False
        finally:
            self.wire.piece_bytes = 0
        return self._keeps and self.wire.is_open

    async def _give(self) -> None:
        await self.engine.wait_answering()
        if (late := self.script.find("delay")) is not None:
            await trio.sleep(late.seconds("head"))
        if (small := self.script.find("dribble")) is not None:
            self.wire.piece_bytes = small.integer("bytes")
            self.wire.piece_seconds = small.seconds("seconds")
        if await self._is_over_before_the_head():
            return
        self._die_now()
        await self.engine.wait_answering()
        await self._answer()
        if self.script.find("close_after") is not None:
            await self.wire.cut()

    def _die_now(self) -> None:
        """Deaths that do not wait for events of this very stream."""
        for fault in self.script.faults:
            is_death = fault.kind.family == "engine"
            if is_death and int(fault.values.get("after_events", -1)) < 0:
                deaths.befall(self.engine, fault)

    async def _is_over_before_the_head(self) -> bool:
        """Faults that come before any head; whether nothing is left to say."""
        if self.script.find("close_reused") is not None and self.request.reused:
            await self.wire.cut()
            return True
        if (first := self.script.find("interim")) is not None:
            await self.wire.send(head(first.integer("code"), (), self.engine.unix_time))
        early = self.script.find("hang", "cut")
        if early is not None and early.word("at") == "request" and not _has_event_point(early):
            await self._break_off(early, self._head(200, "text/event-stream; charset=utf-8"))
            return True
        spoiled = self.script.find("garbage")
        if spoiled is not None and spoiled.word("what") in _GARBAGE_HEADS:
            await self.wire.send(_GARBAGE_HEADS[spoiled.word("what")])
            self._keeps = False
            return True
        return False

    async def _break_off(self, fault: Fault, rest: bytes) -> None:
        """Hang or cut here, with as much of `rest` as the fault still lets out."""
        if fault.kind.name == "hang":
            await trio.sleep_forever()
        inside = fault.integer("inside_bytes")
        if inside:
            await self.wire.send(rest[:inside])
        await self.wire.cut(reset=fault.flag("reset"))

    # What is said.

    async def _answer(self) -> None:
        if (told := self.script.find("status")) is not None:
            reply = self.engine.dialect.error(told.integer("code"), told.word("message"))
            wait = told.word("retry_after")
            extra = (("retry-after", wait),) if wait else ()
            await self._send(Reply(reply.status, reply.body, reply.content_type, extra))
            return
        route = self.engine.dialect.routes.get(self.request.path)
        if route is None:
            await self._send(self._fixed())
        elif self.request.method != "POST":
            refusal = dump({"detail": "Method Not Allowed"})
            await self._send(Reply(405, refusal, headers=(("allow", "POST"),)))
        elif (error := self.engine.mode.error) is not None:
            await self._send(self.engine.dialect.error(500, error))
        else:
            now = self.engine.situation()
            one = self.request
            body = self._without_forgotten(one.body)
            checked = self.engine.dialect.read(route, body, one.headers, now)
            if isinstance(checked, Reply):
                await self._send(checked)
            else:
                await self._generate(checked)

    def _without_forgotten(self, body: bytes) -> bytes:
        if (forgets := self.script.find("forget")) is None:
            return body
        try:
            members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            return body
        members.pop(forgets.word("member"), None)
        return msgspec.json.encode(members)

    def _fixed(self) -> Reply:
        one, engine = self.request, self.engine
        is_abort = (one.method, one.path) == ("POST", "/abort_request")
        if is_abort and engine.settings.engine == "sglang":
            return self._abort(one.body)
        reply = engine.dialect.fixed(one.method, one.path, one.body, engine.situation())
        if reply.status == 404 and one.method == "POST" and self._can_be_got():
            refusal = dump({"detail": "Method Not Allowed"})
            return Reply(405, refusal, headers=(("allow", "GET"),))
        return reply

    def _can_be_got(self) -> bool:
        engine = self.engine
        found = engine.dialect.fixed("GET", self.request.path, b"", engine.situation())
        return found.status != 404

    def _abort(self, body: bytes) -> Reply:
        """SGLang's abort: 200 and nothing else, whether or not there was such a request."""
        try:
            value = msgspec.json.decode(body)
        except msgspec.DecodeError:
            value = None
        if isinstance(value, dict):
            rid = value.get("rid")
            if value.get("abort_all"):
                self.engine.abort(None)
            elif isinstance(rid, str) and rid:
                self.engine.abort(rid)
        return Reply(200, content_type=None)

    async def _generate(self, job: Job) -> None:
        if job.rid and any(other.job.rid == job.rid for other in self.engine.running):
            message = f"Duplicate request ID detected: {job.rid}"
            await self._send(self.engine.dialect.error(400, message))
            return
        is_known = all(tokens.is_in_vocabulary(id_) for ids in job.prompts for id_ in ids)
        if not is_known or pairs.is_deadly(job):
            deaths.poison(self.engine)
            await trio.sleep_forever()
        running = self.engine.admit(job)
        try:
            if job.stream:
                await self._stream(running)
            else:
                await self._send_whole_job(running)
        finally:
            self.engine.disconnects += self.wire.client_is_gone
            self.engine.release(running)

    async def _stream(self, running: Running) -> None:
        if self.script.find("empty") is not None:
            await self._send(Reply(200, content_type="text/event-stream; charset=utf-8"))
            return
        answer = StreamAnswer(self.engine, self.wire, running, self.script, self._head)
        self._keeps &= await answer.give()

    async def _send_whole_job(self, running: Running) -> None:
        await pairs.meet(self.engine, running, self.script)
        await self._generate_whole(running)
        if running.is_fated and running.fate is Fate.HANG:
            await trio.sleep_forever()
        if running.is_fated and running.fate is Fate.ERROR:
            trouble = running.trouble or Trouble(self.engine.mode.error or "")
            await self._send(self.engine.dialect.error(500, trouble.message, trouble.kind))
            return
        answer = self.engine.dialect.unary(running.job, running.choices)
        if running.handoff is not None:
            answer["kv_transfer_params"] = running.handoff
        await self._send(Reply(200, dump(answer)))

    async def _generate_whole(self, running: Running) -> None:
        settings = self.engine.settings
        stopped = self.script.find("abort")
        tokens_left = _tokens_before(stopped)
        late = self.script.find("delay")
        pause = pairs.first_token_seconds(self.engine, running, self.script)
        while live := [choice for choice in running.choices if choice.finish is None]:
            await running.wait(pause)
            await self.engine.wait_answering()
            if tokens_left == 0:
                running.meet(Fate.ABORT)
            if running.is_fated:
                break
            for choice in live:
                choice.step(settings.tokens_per_chunk)
            tokens_left -= 1
            pause = settings.token_seconds + _seconds(late, "token")
        if running.is_fated and running.fate is Fate.ABORT:
            for choice in running.choices:
                if choice.finish is None:
                    choice.cut_short(stopped.word("reason") if stopped else "abort")

    # How it is said.

    def _head(self, status: int, content_type: str | None, framing: Framing = "chunked") -> bytes:
        dialect = self.engine.dialect
        headers = list(dialect.server_headers)
        if content_type is not None:
            headers.append(("content-type", content_type))
        if dialect.server_headers:
            headers.append(("vary", "Origin"))
        if self.script.find("gzip") is not None:
            headers.append(("content-encoding", "gzip"))
        if framing == "chunked":
            headers.append(dialect.chunked_header)
        elif framing == "sized":
            # Only to be broken: a stream that claims a length.
            headers.append(("content-length", str(_LONG_LENGTH)))
        if not self._keeps:
            headers.append(("connection", "close"))
        return head(status, headers, self.engine.unix_time)

    async def _send(self, reply: Reply) -> None:
        """A whole answer, with whatever the script does to it."""
        failed = self.script.find("error_event")
        if failed is not None and reply.status == 200:
            reply = self.engine.dialect.error(failed.integer("code"), failed.word("message"))
        body = b"" if self.script.find("empty") is not None else self._body(reply)
        spoiled = self.script.find("garbage")
        what = spoiled.word("what") if spoiled is not None else ""
        broken = self.script.find("cut", "hang")
        if what in ("chunk_size", "chunk_end"):
            await self.wire.send_head(self._head(reply.status, reply.content_type), "chunked")
            await self.wire.send(b"zz\r\n" if what == "chunk_size" else b"2\r\n" + body + b"\r\n")
            self._keeps = False
            return
        opening = self._whole_head(reply, body, what)
        if not self.script.faults:
            await self.wire.send(opening + body)
            return
        await self.wire.send_head(opening, "sized")
        if (pause := self.script.find("pause")) is not None:
            await trio.sleep(pause.seconds("seconds"))
        if broken is not None and broken.word("at") != "done":
            self._keeps = False
            await self._break_off(broken, body)
            return
        await self.wire.send(body + (GARBAGE_AFTER_END if what == "after_end" else b""))
        if broken is not None:
            await self._break_off(broken, b"")
        if what in ("short_body", "long_body") or self.script.find("close_delimited"):
            self._keeps = False

    def _body(self, reply: Reply) -> bytes:
        body = reply.body
        if (padded := self.script.find("padding")) is not None and body.endswith(b"}"):
            body = body[:-1] + b',"padding":"' + b"x" * padded.integer("bytes") + b'"}'
        spoiled = self.script.find("garbage")
        if spoiled is not None and spoiled.word("what") == "json":
            body = body[: len(body) // 2]
        if spoiled is not None and spoiled.word("what") == "utf8":
            body = body.replace(b'"', b'"\xff', 1)
        return compress(body) if self.script.find("gzip") is not None else body

    def _whole_head(self, reply: Reply, body: bytes, what: str) -> bytes:
        dialect = self.engine.dialect
        length = len(body) + {"short_body": 100, "long_body": -len(body) // 2}.get(what, 0)
        headers = list(dialect.server_headers)
        if self.script.find("close_delimited") is None:
            headers.append(("content-length", str(length)))
        if reply.content_type is not None:
            headers.append(("content-type", reply.content_type))
        if dialect.server_headers:
            headers.append(("vary", "Origin"))
        if self.script.find("gzip") is not None:
            headers.append(("content-encoding", "gzip"))
        headers += reply.headers
        if not self._keeps:
            headers.append(("connection", "close"))
        return head(reply.status, headers, self.engine.unix_time)

    # The engine's remote control.

    def _control(self) -> Reply:
        engine, one = self.engine, self.request
        try:
            match one.method, one.path:
                case "POST", "/sim/faults":
                    engine.add_faults(one.body.decode())
                case "DELETE", "/sim/faults":
                    engine.clear_faults()
                case "GET", "/sim/faults":
                    pass
                case "GET", "/sim/requests":
                    return Reply(200, dump([_shown(each) for each in engine.requests]))
                case "GET", "/sim/state":
                    return Reply(200, dump(self._state()))
                case _:
                    return Reply(404, dump({"detail": "Not Found"}))
        except (BadFault, UnicodeDecodeError) as error:
            return Reply(400, dump({"detail": str(error)}))
        return Reply(200, dump({"faults": str(engine.faults)}))

    def _state(self) -> dict[str, object]:
        engine = self.engine
        return {
            "mode": engine.mode.value,
            "inflight": engine.inflight,
            "connections": len(engine.connections),
            "requests": len(engine.requests),
            "disconnects": engine.disconnects,
            "aborted": engine.aborted,
        }


def _tokens_before(abort: Fault | None) -> int:
    """How many tokens a whole answer has when it is aborted; -1 for all of them."""
    if abort is None or abort.integer("after_events") >= 0:
        return -1 if abort is None else abort.integer("after_events")
    return 0 if abort.word("at") == "head" else -1


def _has_event_point(fault: Fault) -> bool:
    return fault.integer("after_events") >= 0


def _seconds(fault: Fault | None, name: str) -> float:
    return fault.seconds(name) if fault is not None else 0.0


def _shown(one: Received) -> dict[str, object]:
    return {
        "method": one.method,
        "path": one.path,
        "headers": one.headers,
        "body": one.body.decode("utf-8", "replace"),
        "reused": one.reused,
    }
