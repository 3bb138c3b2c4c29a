"""One request over one connection, and what the client has got so far.

Reads with h11, so that an answer which does not fit its own framing is seen as such. How an answer
ended matters more here than what was in it: a stream that was cut must not look like one that is
complete. Never raises for what a router does; that is what is reported.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Literal

import h11
import trio
from attrs import define, field, frozen

READ_BYTES = 65536
LOOK_SECONDS = 0.02
#: complete: as its framing says. cut: before that. malformed: no HTTP. silent: the client lost its
#: patience. left: the client left as planned. refused: nobody let it in.
Ending = Literal["", "complete", "cut", "malformed", "silent", "left", "refused"]
CHAT = "/v1/chat/completions"
Headers = tuple[tuple[str, str], ...]


@frozen
class Ask:
    """A request; `body` instead of a chat, where it must be something else."""

    tokens: int = 8
    stream: bool = True
    prompt: str = "Tell me a story about a relay race."
    model: str = "tiny"
    path: str = CHAT
    method: str = "POST"
    body: bytes | None = None
    headers: Headers = ()
    more: dict[str, object] = field(factory=dict)

    def payload(self) -> bytes:
        """The body as it is sent."""
        if self.body is not None or self.method == "GET":
            return self.body or b""
        chat: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.tokens,
            "temperature": 0,
            "stream": self.stream,
            "ignore_eos": True,
        }
        return json.dumps(chat | self.more).encode()

    def raw(self) -> bytes:
        """All of it, ready to be sent."""
        payload = self.payload()
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: router"]
        if self.method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join([*lines, "", ""]).encode() + payload


DONE = b"[DONE]"


@define(eq=False)
class Heard:
    """An answer, so far."""

    status: int = 0
    headers: dict[str, str] = field(factory=dict)
    body: bytes = b""
    ending: Ending = ""
    arrivals: list[float] = field(factory=list)
    """When a piece of the body came, by Trio's clock."""
    seconds: float = 0.0

    @property
    def plain(self) -> bytes:
        """The body without its coding."""
        return _unzipped(self.body) if self.headers.get("content-encoding") == "gzip" else self.body

    @property
    def events(self) -> list[bytes]:
        """The data of complete events."""
        parts = self.plain.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
        lines = [line for part in parts for line in part.split(b"\n")]
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    @property
    def chunks(self) -> list[dict[str, object]]:
        """Events that are JSON objects; of a whole answer, the answer."""
        texts = self.events if self.is_stream else [self.plain]
        return [found for found in map(_object, texts) if found is not None]

    @property
    def text(self) -> str:
        """What was written, as a client puts it together."""
        return "".join(_text_of(choice) for choice in self._choices)

    @property
    def finish(self) -> str:
        """The last finish reason, or nothing."""
        found = [str(one["finish_reason"]) for one in self._choices if one.get("finish_reason")]
        return found[-1] if found else ""

    @property
    def is_done(self) -> bool:
        """`[DONE]` came, once and last."""
        return self.events[-1:] == [DONE] and self.events.count(DONE) == 1

    @property
    def is_stream(self) -> bool:
        return b"data:" in self.plain

    @property
    def error(self) -> dict[str, object] | None:
        """The error object, in the body or in an event, if it has the shape that clients know."""
        for chunk in self.chunks:
            error = chunk.get("error")
            if isinstance(error, dict) and isinstance(error.get("message"), str):
                return error
        return None

    @property
    def is_whole(self) -> bool:
        """Whether a client takes it for a good and complete answer."""
        if self.status != 200 or self.ending != "complete" or self.error is not None:
            return False
        return self.finish in ("stop", "length") and (self.is_done or not self.is_stream)

    @property
    def is_told(self) -> bool:
        """Whether a client can tell that this is no good answer: a status, an event, a cut."""
        is_broken = self.ending in ("cut", "malformed", "refused")
        return self.status >= 400 or is_broken or self.error is not None

    @property
    def summary(self) -> str:
        """In a few words, for the reason of a failure."""
        if not self.status:
            return {"refused": "connection refused", "silent": "no answer"}.get(
                self.ending, f"no answer ({self.ending})"
            )
        words = [str(self.status)]
        if self.ending != "complete":
            words.append(self.ending)
        if self.status == 200:
            words += [f"finish {self.finish}"] if self.finish else ["no finish"]
            words += ["an error event"] if self.error is not None else []
            is_odd = self.is_stream and bool(self.finish) and not self.is_done
            words += ["[DONE] not once and last"] if is_odd else []
        return ", ".join(words)

    @property
    def _choices(self) -> list[dict[str, object]]:
        found = []
        for chunk in self.chunks:
            choices = chunk.get("choices")
            found += [one for one in choices if isinstance(one, dict)] if choices else []  # type: ignore[attr-defined]  # any JSON
        return found


def _object(text: bytes) -> dict[str, object] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _text_of(choice: dict[str, object]) -> str:
    if isinstance(text := choice.get("text"), str):
        return text
    inner = choice.get("delta") or choice.get("message")
    content = inner.get("content") if isinstance(inner, dict) else None
    return content if isinstance(content, str) else ""


def _unzipped(data: bytes) -> bytes:
    """All members of a gzip stream, as far as they came; nothing where it is none."""
    found = b""
    try:
        while data:
            member = zlib.decompressobj(wbits=31)
            found += member.decompress(data)
            data = member.unused_data
    except zlib.error:
        pass
    return found


async def converse(
    stream: trio.abc.Stream,
    ask: Ask,
    heard: Heard,
    *,
    patience: float,
    leave_when: Callable[[Heard], bool] | None = None,
) -> None:
    """Ask and listen until the answer ends, patience is over, or the client wants to leave.

    The connection is closed then in any case.
    """
    began = trio.current_time()
    with trio.move_on_after(patience):
        async with stream, trio.open_nursery() as nursery:
            if leave_when is not None:
                nursery.start_soon(_leave, heard, leave_when, nursery.cancel_scope)
            nursery.start_soon(_send, stream, ask.raw())
            await _listen(stream, ask, heard)
            nursery.cancel_scope.cancel("the answer has ended")
    heard.ending = heard.ending or "silent"
    heard.seconds = trio.current_time() - began


async def _leave(heard: Heard, when: Callable[[Heard], bool], scope: trio.CancelScope) -> None:
    while not when(heard):  # noqa: ASYNC110  # it is other processes that are looked at
        await trio.sleep(LOOK_SECONDS)
    heard.ending = "left"
    scope.cancel("the client leaves")


async def _send(stream: trio.abc.Stream, data: bytes) -> None:
    try:
        await stream.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # a router may refuse before it has read everything; the answer tells


async def _listen(stream: trio.abc.Stream, ask: Ask, heard: Heard) -> None:
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    parser.send(h11.Request(method=ask.method, target=ask.path, headers=[("host", "router")]))
    parser.send(h11.EndOfMessage())
    is_at_end = False
    try:
        while not heard.ending:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                data = await _receive(stream, heard)
                is_at_end = not data
                parser.receive_data(data)
            elif isinstance(event, h11.Response):
                heard.status = event.status_code
                found: Sequence[tuple[bytes, bytes]] = event.headers
                heard.headers = {name.decode(): value.decode("latin-1") for name, value in found}
            elif isinstance(event, h11.Data):
                heard.body += bytes(event.data)
                heard.arrivals.append(trio.current_time())
            elif isinstance(event, h11.EndOfMessage):
                heard.ending = "complete"
            elif isinstance(event, h11.ConnectionClosed):
                heard.ending = "cut"
    except h11.RemoteProtocolError:
        heard.ending = heard.ending or ("cut" if is_at_end else "malformed")


async def _receive(stream: trio.abc.Stream, heard: Heard) -> bytes:
    try:
        data = bytes(await stream.receive_some(READ_BYTES))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        data = b""
        heard.ending = "cut"
    return data
