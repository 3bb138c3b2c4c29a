"""An old worker and an old client of the NATS request path, as Infera's are.

Written from the facts of its protocol (facts of Infera 5890f7f: subjects, bodies, frames, drain
order) and from nothing else: no line of Baton's is used here, so that both ends of a wire are not
wrong in the same way. It knows neither sequence numbers nor early heads nor heartbeats, takes a
frame of a type it does not know for data, and gives every request an inbox of its own.

Both run on an asyncio loop in a thread. Their methods may be called from any other thread; those
that wait for an answer block it, so a Trio test calls them through `trio.to_thread`.
"""

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Protocol, Self, TypeAlias, TypeVar

import httpx
import nats
from attrs import Factory, define, field, frozen
from nats.aio.client import Client as Connection
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import TimeoutError as NothingCame
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.client import JetStreamContext
from nats.js.errors import BadRequestError

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
T = TypeVar("T")

SERVED = ("/v1/chat/completions", "/v1/completions")
"""What scripted workers answer with a stream."""
PROMPT = "hi"
"""The prompt of completions to scripted workers; what follows it was said by another one."""
DRAINING = b"infera: worker draining"
CANCELS, CANCEL_PAUSE_SECONDS = 3, 1.0
ACK_WAIT_SECONDS = 3600
STREAM_MESSAGES_MAX = 1_000_000
POLL_SECONDS = 0.2
CALL_SECONDS = 30.0


def token(worker_id: str) -> str:
    """What stands for a worker in subjects: URL-safe base64 of its id without padding."""
    return base64.urlsafe_b64encode(worker_id.encode()).decode().rstrip("=")


#### A loop in a thread


@define(eq=False)
class Thread:
    """An asyncio loop of its own, with one connection to the broker."""

    url: str
    loop: asyncio.AbstractEventLoop = field(factory=asyncio.new_event_loop, init=False)
    connection: Connection = field(init=False)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.call(self._connect())
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self.call(self._disconnect())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CALL_SECONDS)
        self.loop.close()

    async def _connect(self) -> None:
        self.connection = await nats.connect(
            self.url, max_reconnect_attempts=-1, reconnect_time_wait=1.0, error_cb=_ignore
        )

    async def _disconnect(self) -> None:
        await self.connection.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def call(self, awaited: Coroutine[object, object, T], seconds: float = CALL_SECONDS) -> T:
        """Run it on the loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(awaited, self.loop).result(seconds)


async def _ignore(_: Exception) -> None:
    pass


#### What an old worker has beside it


@frozen
class Asked:
    """A request as it came over NATS."""

    path: str
    stream: bool
    headers: dict[str, str]
    body: Json
    migratable: bool | None
    inbox: str
    members: frozenset[str]
    """The names of all members of the request's JSON, known or not."""


class Engine(Protocol):
    """Something that answers: a status first, then pieces of its body."""

    def answer(self, asked: Asked) -> AsyncIterator[int | bytes]: ...


@define(eq=False)
class HttpEngine:
    """A real engine beside the worker."""

    url: str

    async def answer(self, asked: Asked) -> AsyncIterator[int | bytes]:
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            headers = {"accept-encoding": "identity", **asked.headers}
            async with client.stream(
                "POST", self.url + asked.path, json=asked.body, headers=headers
            ) as answer:
                yield answer.status_code
                async for piece in answer.aiter_raw():
                    yield piece


@define(eq=False)
class Scripted:
    """Says a recorded stream, or what is left of it for one that brings ids of it.

    `break_after` ends the body there, without an end of the stream; `hold_after` stays silent
    from there on until `release()`. Both count tokens. `cut_bytes` is the size of the pieces.
    """

    recorded: bytes
    status: int = 200
    break_after: int | None = None
    hold_after: int | None = None
    cut_bytes: int = 37
    asked: list[Asked] = Factory(list)
    released: asyncio.Event = Factory(asyncio.Event)

    async def answer(self, asked: Asked) -> AsyncIterator[int | bytes]:
        if asked.path not in SERVED:
            # An old worker posts whatever it is asked, and engines serve the others to GET alone.
            yield 405
            yield b'{"detail":"Method Not Allowed"}'
            return
        self.asked.append(asked)
        yield self.status
        said = 0
        for event, tokens in self._events_for(asked):
            said += tokens
            if tokens and self.break_after is not None and said > self.break_after:
                return
            if tokens and self.hold_after is not None and said > self.hold_after:
                await self.released.wait()
            for start in range(0, len(event), self.cut_bytes):
                yield event[start : start + self.cut_bytes]

    def _events_for(self, asked: Asked) -> Iterator[tuple[bytes, int]]:
        """Events that are still to say, with the number of tokens in each."""
        events = [event + b"\n\n" for event in self.recorded.split(b"\n\n") if event.strip()]
        ids = _prompt_ids(asked.body)
        skipped = max(len(ids) - len(_first_ids(events)), 0) if ids else 0
        carried = _carried_text(asked.body)
        for event in events:
            tokens, text = _tokens_in(event), _text_in(event)
            if skipped and tokens:
                skipped -= tokens
            elif text and carried.startswith(text):
                carried = carried[len(text) :]
            else:
                yield event, tokens


def _decoded(event: bytes) -> dict[str, Json]:
    data = event.strip().removeprefix(b"data: ")
    found = {} if data == b"[DONE]" or not data.startswith(b"{") else json.loads(data)
    assert isinstance(found, dict)
    return found


def _choice(event: bytes) -> dict[str, Json]:
    choices = _decoded(event).get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    assert isinstance(first, dict)
    return first


def _tokens_in(event: bytes) -> int:
    ids = _choice(event).get("token_ids")
    return len(ids) if isinstance(ids, list) else 0


def _first_ids(events: list[bytes]) -> list[Json]:
    """The ids of the prompt: on a chat's first event, or on the first choice of a completion."""
    ids = _decoded(events[0]).get("prompt_token_ids") or _choice(events[0]).get("prompt_token_ids")
    return ids if isinstance(ids, list) else []


def _prompt_ids(body: Json) -> list[Json]:
    """The ids that a continuation starts from, wherever an engine takes them."""
    assert isinstance(body, dict)
    transfer = body.get("kv_transfer_params")
    ids = transfer.get("prompt_token_ids") if isinstance(transfer, dict) else body.get("prompt")
    return ids if isinstance(ids, list) else []


def _carried_text(body: Json) -> str:
    """What another worker has said, for one that is to go on after it."""
    assert isinstance(body, dict)
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list) and body.get("continue_final_message"):
        last = messages[-1]
        assert isinstance(last, dict)
        return str(last["content"])
    return prompt.removeprefix(PROMPT) if isinstance(prompt, str) else ""


def _text_in(event: bytes) -> str:
    choice = _choice(event)
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


#### The worker


@define(eq=False)
class Running:
    """A request the worker works on."""

    asked: Asked
    task: asyncio.Task[None]
    is_handed_back: bool = False


@define(eq=False)
class Worker(Thread):
    """`max_pending` above 0 is JetStream mode, as `--nats-req-max-pending` is."""

    worker_id: str = "old:1"
    engine: Engine = field(kw_only=True)
    prefix: str = "infera"
    max_pending: int = 0
    running: dict[str, Running] = field(factory=dict, init=False)
    cancelled: list[str] = field(factory=list, init=False)
    """Every cancel that came, in order, known inbox or not."""
    took: list[Asked] = field(factory=list, init=False)
    _requests: Subscription | None = field(default=None, init=False)
    _pulling: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def token(self) -> str:
        return token(self.worker_id)

    def __enter__(self) -> Self:
        Thread.__enter__(self)
        self.call(self._open())
        return self

    async def _open(self) -> None:
        await self.connection.subscribe(f"{self.prefix}.cancel.{self.token}", cb=self._on_cancel)
        subject = f"{self.prefix}.req.{self.token}"
        if self.max_pending:
            self._pulling = asyncio.create_task(self._pull(await self._consumer(subject)))
        else:
            self._requests = await self.connection.subscribe(subject, cb=self._on_request)
        await self.connection.flush()

    async def _consumer(self, subject: str) -> JetStreamContext.PullSubscription:
        stream = f"{self.prefix.upper()}_REQUESTS"
        await make_stream(self.connection, self.prefix)
        consumer: JetStreamContext.PullSubscription
        consumer = await self.connection.jetstream().pull_subscribe(
            subject,
            durable=self.token,
            stream=stream,
            config=ConsumerConfig(
                ack_policy=AckPolicy.EXPLICIT, ack_wait=ACK_WAIT_SECONDS, max_deliver=1
            ),
        )
        return consumer

    async def _pull(self, consumer: JetStreamContext.PullSubscription) -> None:
        while True:
            with contextlib.suppress(NothingCame):
                for message in await consumer.fetch(1, timeout=1):
                    self._begin(message, (message.headers or {})["rs-inbox"], acks=True)

    async def _on_request(self, message: Msg) -> None:
        self._begin(message, message.reply, acks=False)

    def _begin(self, message: Msg, inbox: str, *, acks: bool) -> None:
        members = json.loads(message.data)
        asked = Asked(
            path=members["path"],
            stream=members["stream"],
            headers=members["headers"] or {},
            body=members["body"],
            migratable=members.get("migratable"),
            inbox=inbox,
            members=frozenset(members),
        )
        self.took.append(asked)
        task = asyncio.create_task(self._serve(asked, message if acks else None))
        self.running[inbox] = Running(asked, task)

    async def _serve(self, asked: Asked, to_ack: Msg | None) -> None:
        try:
            status = 0
            async for piece in self.engine.answer(asked):
                if isinstance(piece, int):
                    status = piece
                elif piece:
                    await self._send(asked.inbox, "data", piece)
            await self._send(asked.inbox, "done", b"", {"rs-status": str(status)})
        except asyncio.CancelledError:
            if not self.running[asked.inbox].is_handed_back:
                await self._send(asked.inbox, "error", b"request cancelled")
        except Exception as error:
            await self._send(asked.inbox, "error", repr(error).encode())
        finally:
            del self.running[asked.inbox]
            if to_ack is not None:
                await to_ack.ack()

    async def _send(
        self, inbox: str, kind: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> None:
        await self.connection.publish(inbox, payload, headers={"rs-type": kind, **(headers or {})})

    async def _on_cancel(self, message: Msg) -> None:
        inbox = message.data.decode()
        self.cancelled.append(inbox)
        if inbox in self.running:
            self.running[inbox].task.cancel()

    def drain(self, window_seconds: float) -> None:
        """Stop as an old worker does when it is told to: blocks until it has."""
        self.call(self._drain(window_seconds), window_seconds + CALL_SECONDS)

    async def _drain(self, window_seconds: float) -> None:
        deadline = self.loop.time() + window_seconds
        # Polling is what the old worker does.
        while self.max_pending and self.loop.time() < deadline and await self._queued():  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        await self._close_door()
        if tasks := {each.task for each in self.running.values()}:
            await asyncio.wait(tasks, timeout=max(deadline - self.loop.time(), 0))
        for each in self.running.values():
            if each.asked.migratable:
                each.is_handed_back = True
                await self._send(each.asked.inbox, "error", DRAINING)
        await self._end()

    async def _queued(self) -> int:
        """Requests that no worker has taken yet; 0 when that can't be read."""
        stream = f"{self.prefix.upper()}_REQUESTS"
        with contextlib.suppress(Exception):
            info = await self.connection.jetstream().consumer_info(stream, self.token)
            return info.num_pending or 0
        return 0

    async def _close_door(self) -> None:
        if self._requests is not None:
            await self._requests.unsubscribe()
        if self._pulling is not None:
            self._pulling.cancel()
            await asyncio.wait({self._pulling})

    async def _end(self) -> None:
        tasks = {each.task for each in self.running.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self.max_pending:
            stream = f"{self.prefix.upper()}_REQUESTS"
            with contextlib.suppress(Exception):
                await self.connection.jetstream().delete_consumer(stream, self.token)
        await self.connection.flush()

    def stop(self) -> None:
        """End without a drain: everything is cancelled, nothing is handed back."""
        self.call(self._stop())

    async def _stop(self) -> None:
        await self._close_door()
        await self._end()

    def vanish(self) -> None:
        """End as a killed process does: not a word to anybody."""
        self.call(self.connection.close())


@define(eq=False)
class Puppet(Thread):
    """A worker that says nothing by itself: the test sends every frame, right or wrong.

    Probes are the exception: it answers each as an old worker's engine does, with 405.
    """

    worker_id: str = "puppet:1"
    prefix: str = "infera"
    asked: list[str] = field(factory=list, init=False)
    """The inboxes of the requests, in order."""
    payloads: list[bytes] = field(factory=list, init=False)
    cancelled: list[str] = field(factory=list, init=False)

    def __enter__(self) -> Self:
        Thread.__enter__(self)
        self.call(self._open())
        return self

    async def _open(self) -> None:
        subjects = f"{self.prefix}.{{}}.{token(self.worker_id)}"
        await self.connection.subscribe(subjects.format("req"), cb=self._on_request)
        await self.connection.subscribe(subjects.format("cancel"), cb=self._on_cancel)
        await self.connection.flush()

    async def _on_request(self, message: Msg) -> None:
        if json.loads(message.data)["path"] not in SERVED:
            for kind, payload, more in (("data", b"{}", {}), ("done", b"", {"rs-status": "405"})):
                await self.connection.publish(
                    message.reply, payload, headers={"rs-type": kind, **more}
                )
            return
        self.payloads.append(message.data)
        self.asked.append(message.reply)

    async def _on_cancel(self, message: Msg) -> None:
        self.cancelled.append(message.data.decode())

    def send(self, inbox: str, kind: str, payload: bytes = b"", **headers: object) -> None:
        """One frame; `seq=3` becomes the header `rs-seq: 3`."""
        lines = {f"rs-{name}": str(value) for name, value in headers.items()}

        async def publish() -> None:
            await self.connection.publish(inbox, payload, headers={"rs-type": kind, **lines})
            await self.connection.flush()

        self.call(publish())

    def flood(self, inbox: str, payload: bytes, count: int) -> None:
        """So many data frames at once, unnumbered."""

        async def publish() -> None:
            for number in range(count):
                await self.connection.publish(inbox, payload, headers={"rs-type": "data"})
                if number % 1000 == 0:
                    await self.connection.flush()
            await self.connection.flush()

        self.call(publish())


async def make_stream(connection: Connection, prefix: str) -> None:
    """The work queue of JetStream mode, unless it is there, with whatever limits it was made."""
    with contextlib.suppress(BadRequestError):
        await connection.jetstream().add_stream(
            StreamConfig(
                name=f"{prefix.upper()}_REQUESTS",
                subjects=[f"{prefix}.req.>"],
                retention=RetentionPolicy.WORK_QUEUE,
                storage=StorageType.MEMORY,
                discard=DiscardPolicy.OLD,
                max_msgs=STREAM_MESSAGES_MAX,
            )
        )


#### The client


@frozen
class Frame:
    """A reply frame: `data`, `done` or `error`, and every header it came with."""

    kind: str
    payload: bytes
    headers: dict[str, str]


@define(eq=False)
class Reading:
    """One request of the client's and the frames that came for it."""

    client: "Client"
    worker: str
    inbox: str
    subscription: Subscription
    on_frame: Callable[[], None]
    frames: list[Frame] = Factory(list)
    after: list[Frame] = Factory(list)
    """What came after a terminal frame; nobody looks at it."""
    ended: threading.Event = Factory(threading.Event)

    async def take(self, message: Msg) -> None:
        headers = dict(message.headers or {})
        kind = headers.get("rs-type", "data")
        # A type it has never heard of is none of the two that end, and so it is data.
        kind = kind if kind in ("done", "error") else "data"
        frame = Frame(kind, message.data, headers)
        if self.ended.is_set():
            self.after.append(frame)
            return
        self.frames.append(frame)
        if kind != "data":
            self.ended.set()
        self.on_frame()

    @property
    def body(self) -> bytes:
        return b"".join(frame.payload for frame in self.frames if frame.kind == "data")

    @property
    def status(self) -> int | None:
        """What `done` said; None without one."""
        last = self.frames[-1] if self.frames else None
        return int(last.headers["rs-status"]) if last and last.kind == "done" else None

    @property
    def error(self) -> bytes | None:
        last = self.frames[-1] if self.frames else None
        return last.payload if last and last.kind == "error" else None

    def wait(self, seconds: float = CALL_SECONDS) -> Self:
        """Until the terminal frame."""
        assert self.ended.wait(seconds), self.frames[-3:]
        return self

    def leave(self) -> None:
        """Read no more: unsubscribes, and cancels three times in the background."""
        asyncio.run_coroutine_threadsafe(self._leave(), self.client.loop).result(CALL_SECONDS)

    async def _leave(self) -> None:
        with contextlib.suppress(Exception):
            await self.subscription.unsubscribe()
        self.client.cancelling.add(asyncio.create_task(self._cancel()))

    async def _cancel(self) -> None:
        for number in range(CANCELS):
            if number:
                await asyncio.sleep(CANCEL_PAUSE_SECONDS)
            subject = f"{self.client.prefix}.cancel.{token(self.worker)}"
            await self.client.connection.publish(subject, self.inbox.encode())


@define(eq=False)
class Client(Thread):
    """`stored` is JetStream mode: requests are queued, and their inbox is in a header."""

    prefix: str = "infera"
    stored: bool = False
    cancelling: set[asyncio.Task[None]] = field(factory=set, init=False)

    def ask(
        self,
        worker: str,
        path: str,
        body: Json,
        *,
        stream: bool = True,
        migratable: bool = False,
        on_frame: Callable[[], None] = lambda: None,
    ) -> Reading:
        """Send a request; its frames are read in the background."""
        return self.call(self._ask(worker, path, body, stream, migratable, on_frame))

    async def _ask(
        self,
        worker: str,
        path: str,
        body: Json,
        stream: bool,
        migratable: bool,
        on_frame: Callable[[], None],
    ) -> Reading:
        inbox = self.connection.new_inbox()
        subscription = await self.connection.subscribe(inbox)
        reading = Reading(self, worker, inbox, subscription, on_frame)
        asyncio.get_running_loop().create_task(_read(reading))
        members: dict[str, Json] = {"path": path, "stream": stream, "headers": None, "body": body}
        if stream:
            members["migratable"] = migratable
        payload = json.dumps(members).encode()
        subject = f"{self.prefix}.req.{token(worker)}"
        if self.stored:
            await make_stream(self.connection, self.prefix)
            await self.connection.jetstream().publish(subject, payload, headers={"rs-inbox": inbox})
        else:
            await self.connection.publish(subject, payload, reply=inbox)
        return reading

    def backlog(self, worker: str) -> tuple[int, int]:
        """Requests waiting for a worker, and those it has not acknowledged."""

        async def read() -> tuple[int, int]:
            stream = f"{self.prefix.upper()}_REQUESTS"
            info = await self.connection.jetstream().consumer_info(stream, token(worker))
            return info.num_pending or 0, info.num_ack_pending or 0

        return self.call(read())


async def _read(reading: Reading) -> None:
    async for message in reading.subscription.messages:
        await reading.take(message)
