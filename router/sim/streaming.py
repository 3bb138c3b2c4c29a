"""A streamed answer, event by event, with the points at which a script breaks it.

The number of events sent so far is the only position a script knows; named points (after the
head, the last finish, [DONE]) are for what lies between events. Every way to end is one of a
few small methods, so that a fault of one request and a fate of the whole engine look alike.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio
from attrs import define, field

from router.sim import deaths, pairs
from router.sim.dialect import Trouble
from router.sim.extras import as_parsed
from router.sim.faults import Fault, Script
from router.sim.jobs import DONE
from router.sim.running import Fate, Running
from router.sim.wire import ClientGone, Framing, Wire, chunk, compress

if TYPE_CHECKING:
    from router.sim.engine import SimEngine

_CONTENT_TYPE = "text/event-stream; charset=utf-8"
_POINTED = ("hang", "cut", "pause", "error_event", "abort", "end")
_COMMENT = b": keep-alive\n\n"
_SPOILED_EVENTS = {
    "json": b'data: {"id":"x","choices":[{"index":0\n\n',
    "utf8": b'data: {"id":"x","choices":[{"index":0,"text":"\xff\xfe"}]}\n\n',
}
GARBAGE_AFTER_END = b"and another thing\r\n\r\n"


@define(eq=False)
class StreamAnswer:
    """One stream."""

    engine: "SimEngine"
    wire: Wire
    running: Running
    script: Script
    make_head: Callable[[int, str | None, Framing], bytes]
    sent: int = field(default=0, init=False)
    _is_over: bool = field(default=False, init=False)
    _keeps: bool = field(default=True, init=False)
    _head_is_sent: bool = field(default=False, init=False)
    _lump: list[bytes] = field(factory=list, init=False)
    _holds_an_event: bool = field(default=False, init=False)
    """Its tokens are generated; should the stream end here, they are lost."""

    async def give(self) -> bool:
        """Send it; whether the connection can serve another request."""
        waits = self.engine.dialect.head_waits_for_first_event
        if not waits or self.script.find("early_head") is not None:
            await self._open()
        await self._meet_other_half()
        await self._generate()
        await self._close()
        return self._keeps

    async def _open(self) -> None:
        self._head_is_sent = True
        framing: Framing = "chunked"
        if self.script.find("close_delimited") is not None:
            framing, self._keeps = "until_close", False
        if self._garbage() == "short_body":
            framing, self._keeps = "sized", False
        await self.wire.send_head(self.make_head(200, _CONTENT_TYPE, framing), framing)
        await self._reach("head")

    async def _meet_other_half(self) -> None:
        """A pair's half has to wait; meanwhile there may be comments."""
        if self._is_over:
            return
        early = self.script.find("early_head")
        async with trio.open_nursery() as nursery:
            if early is not None and early.seconds("comments_every"):
                nursery.start_soon(self._comment_every, early.seconds("comments_every"))
            await pairs.meet(self.engine, self.running, self.script)
            nursery.cancel_scope.cancel("met")

    async def _comment_every(self, seconds: float) -> None:
        while True:
            await trio.sleep(seconds)
            try:
                await self.wire.send_body(_COMMENT)
            except ClientGone:
                return  # whoever watches the client ends the answer, sooner or later

    async def _generate(self) -> None:
        settings, dialect, job = self.engine.settings, self.engine.dialect, self.running.job
        late = self.script.find("delay")
        first = pairs.first_token_seconds(self.engine, self.running, self.script)
        pace = settings.token_seconds + (late.seconds("token") if late is not None else 0.0)
        await self._wait(first)
        if not self._head_is_sent and not self._is_over:
            await self._open()
        for event in dialect.opening(job):
            await self._deliver(event)
        live = list(self.running.choices)
        while live and not self._is_over:
            for choice in live:
                piece = choice.step(settings.tokens_per_chunk)
                for event in dialect.events(job, choice, piece):
                    await self._deliver(event)
            live = [choice for choice in live if choice.finish is None]
            if live:
                await self._wait(pace)

    async def _close(self) -> None:
        job, choices = self.running.job, self.running.choices
        if not self._is_over:
            await self._reach("finish")
        for event in self.engine.dialect.closing(job, choices) if not self._is_over else []:
            await self._deliver(event)
        if self._is_over:
            return
        await self._put(DONE)
        await self._flush()
        await self._reach("done")
        if not self._is_over:
            await self._end_body()

    async def _wait(self, seconds: float) -> None:
        """Wait for the next token; meet what comes instead."""
        if self._is_over:
            return
        if seconds > 0:
            await self.running.wait(seconds)
        await self.engine.wait_answering()
        if self.running.is_fated and not self._is_over:
            await self._meet()

    async def _meet(self) -> None:
        match self.running.fate:
            case Fate.ABORT:
                await self._abort(done=True)
            case Fate.ERROR:
                default = self.engine.mode.error or "EngineCore encountered an issue."
                trouble = self.running.trouble or Trouble(default)
                await self._fail(500, trouble.message, trouble.event_kind, done=True)
            case Fate.HANG:
                await self._flush()
                await trio.sleep_forever()

    # Events and points.

    async def _deliver(self, event: bytes) -> None:
        """Send one event, unless this is where the script ends the stream."""
        if self._is_over:
            return
        self._holds_an_event = True
        for fault in self.script.faults:
            if self._is_due(fault):
                await self._suffer(fault, event)
                if self._is_over:
                    return
        if self.running.is_fated:
            await self._meet()
            return
        await self._put(event)
        self._holds_an_event = False

    def _is_due(self, fault: Fault) -> bool:
        """Whether a fault waits for exactly this number of events."""
        return fault.values.get("after_events") == self.sent

    async def _reach(self, point: str) -> None:
        """A named point of the stream; a fault that counts events does not look at it."""
        for fault in self.script.faults:
            named = fault.kind.name in _POINTED and fault.integer("after_events") < 0
            if named and fault.word("at") == point and not self._is_over:
                await self._suffer(fault, b"")

    async def _suffer(self, fault: Fault, event: bytes) -> None:
        match fault.kind.name:
            case "hang":
                await self._flush()
                await trio.sleep_forever()
            case "cut":
                await self._cut(fault, event)
            case "pause":
                await self._pause(fault)
            case "error_event":
                done = fault.flag("done")
                await self._fail(fault.integer("code"), fault.word("message"), done=done)
            case "abort":
                await self._abort(done=fault.flag("done"), reason=fault.word("reason"))
            case "end":
                await self._end(done=fault.flag("done"))
            case "garbage":
                await self._spoil(fault.word("what"))
            case _ if fault.kind.family == "engine":
                await self._flush()
                deaths.befall(self.engine, fault)
                await self._wait(0)

    async def _pause(self, fault: Fault) -> None:
        await self._flush()
        until = trio.current_time() + fault.seconds("seconds")
        step = fault.seconds("comments_every") or float("inf")
        while (left := until - trio.current_time()) > 0 and not self._is_over:
            await self._wait(min(step, left))
            if step < left and not self._is_over:
                await self.wire.send_body(_COMMENT)

    async def _cut(self, fault: Fault, event: bytes) -> None:
        await self._flush()
        inside = fault.integer("inside_bytes")
        if inside and event:
            await self.wire.send(self._framed(event)[: inside + self._frame_bytes(event)])
        self._is_over, self._keeps = True, False
        await self.wire.cut(reset=fault.flag("reset"))

    def _framed(self, event: bytes) -> bytes:
        return chunk(event) if self.wire.framing == "chunked" else event

    def _frame_bytes(self, event: bytes) -> int:
        """How much of a framed event comes before its own bytes."""
        return self._framed(event).index(event)

    async def _fail(self, code: int, message: str, kind: str = "", *, done: bool) -> None:
        if not self._head_is_sent:
            await self._open()
        await self._put(self.engine.dialect.error_event(code, message, kind))
        await self._end(done=done)

    async def _abort(self, *, done: bool, reason: str = "abort") -> None:
        if not self._head_is_sent:
            await self._open()
        dialect, job = self.engine.dialect, self.running.job
        for choice in self.running.choices:
            if choice.finish is None:
                last = choice.cut_short(reason, one_more=not self._holds_an_event)
                for event in dialect.events(job, choice, last):
                    await self._put(event)
        await self._end(done=done)

    async def _end(self, *, done: bool) -> None:
        if done:
            await self._put(DONE)
        await self._flush()
        await self._end_body()

    async def _end_body(self) -> None:
        self._is_over = True
        await self.wire.end_body(GARBAGE_AFTER_END if self._garbage() == "after_end" else b"")
        if self.wire.framing == "sized":
            await self.wire.cut()

    async def _spoil(self, what: str) -> None:
        """Send something that is no part of a good answer."""
        await self._flush()
        if what in _SPOILED_EVENTS:
            await self._put(_SPOILED_EVENTS[what])
        elif what == "chunk_size":
            self._is_over, self._keeps = True, False
            await self.wire.send(b"zz\r\n")
        elif what in ("chunk_end", "long_body"):
            self._is_over, self._keeps = True, False
            await self.wire.send(b"2\r\ndata: {}\n\n\r\n")

    def _garbage(self) -> str:
        fault = self.script.find("garbage")
        return fault.word("what") if fault is not None else ""

    # Bytes.

    async def _put(self, event: bytes) -> None:
        """Send one event in the form the script wants."""
        parsed = self.script.find("parse")
        if parsed is not None and parsed.integer("event") == self.sent:
            event = as_parsed(event, parsed.word("what"), self.engine.settings.engine)
        self.sent += 1
        event = self._dressed(event)
        if (lump := self.script.find("lump")) is None:
            await self.wire.send_body(event)
            return
        self._lump.append(event)
        if len(self._lump) >= lump.integer("events"):
            await self._flush()

    def _dressed(self, event: bytes) -> bytes:
        padded = self.script.find("padding")
        if padded is not None and event.endswith(b"}\n\n"):
            event = event[:-3] + b',"padding":"' + b"x" * padded.integer("bytes") + b'"}\n\n'
        if self.script.find("comments") is not None:
            event = _COMMENT + event
        if self.script.find("crlf") is not None:
            event = event.replace(b"\n", b"\r\n")
        # Members of a gzip stream may simply follow each other.
        return compress(event) if self.script.find("gzip") is not None else event

    async def _flush(self) -> None:
        lump, self._lump = b"".join(self._lump), []
        if lump:
            await self.wire.send_body(lump)
