"""A client, a record and simulated engines without any I/O: a stream is a list of events.

`Travel` plays the router: it asks an engine, reads as many events as a cut lets through, and goes
on with the next engine. What the client was sent is in `Client`, which checks what holds for every
stream (one role, one finish, one usage, one `[DONE]`, one id).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from attrs import define, field

from router.migration.agreement import Disagreed, Inquiry, question_body, read_answer, seek
from router.migration.asking import ask, plan_asking
from router.migration.attempt import Attempt
from router.migration.continuation import (
    PATHS,
    CannotContinue,
    CompletedLocally,
    Continuation,
    Mode,
    Outcome,
    Target,
    build,
    resume,
)
from router.migration.record import Record
from router.migration.settling import Counting, Unsettled, settle
from router.migration.shape import Endpoint, examine
from router.openai import Sign
from router.sim.decoding import Choice
from router.sim.dialect import Dialect, Situation
from router.sim.jobs import DONE, Reply
from router.sim.model import Model
from router.sim.settings import SimSettings
from router.sim.sglang import SglangDialect
from router.sim.vllm import VllmDialect
from router.sse import data_of

Json = dict[str, object]
_DIALECTS: dict[str, type[Dialect]] = {"vllm": VllmDialect, "sglang": SglangDialect}


@define(eq=False)
class Engine:
    """A simulated engine as a function from a request to events."""

    kind: str
    eos_every: int = 0
    ambiguous: bool = False
    tokens_per_chunk: int = 1
    context_length: int = 4096
    seed: int = 0
    bodies: list[Json] = field(factory=list)
    _random: random.Random = field(factory=lambda: random.Random(5))

    def _now(self) -> Situation:
        settings = SimSettings(
            engine="vllm" if self.kind == "vllm" else "sglang", context_length=self.context_length
        )
        return Situation(
            settings,
            1_800_000_000,
            0,
            200,
            0,
            lambda n: f"{self._random.getrandbits(4 * n):0{n}x}",
        )

    def stream(self, path: str, body: bytes) -> list[bytes] | Reply:
        """All events of the answer, or the refusal."""
        self.bodies.append(json.loads(body))
        dialect = _DIALECTS[self.kind]()
        job = dialect.read(dialect.routes[path], body, {}, self._now())
        if isinstance(job, Reply):
            return job
        model = Model(self.seed, self.eos_every, self.ambiguous)
        choices = [
            Choice(
                i, job.prompts[i // job.n], job.limits[i // job.n], dialect.manner,
                model.start(job.prompts[i // job.n], choice=0 if job.greedy else i % job.n),
            )
            for i in range(len(job.prompts) * job.n)
        ]  # fmt: skip
        events = dialect.opening(job)
        while live := [choice for choice in choices if choice.finish is None]:
            for choice in live:
                events += dialect.events(job, choice, choice.step(self.tokens_per_chunk))
        return [*events, *dialect.closing(job, choices), DONE]

    def events(self, path: str, body: bytes) -> list[bytes]:
        """All events of an answer that has to be one."""
        answer = self.stream(path, body)
        assert not isinstance(answer, Reply), answer.body
        return answer

    def detokenize(self, body: bytes) -> bytes:
        reply = _DIALECTS[self.kind]().fixed("POST", "/detokenize", body, self._now())
        assert reply.status == 200, reply.body
        return reply.body


@define(eq=False)
class Client:
    """What was sent, read as a client reads it."""

    sent: bytes = b""

    @property
    def chunks(self) -> list[Json]:
        events = [event + b"\n\n" for event in self.sent.split(b"\n\n")[:-1]]
        data = [found for event in events if (found := data_of(event)) is not None]
        return [json.loads(one) for one in data if one != b"[DONE]"]

    def _choices(self) -> list[dict]:  # type: ignore[type-arg]  # any JSON
        return [one for chunk in self.chunks for one in chunk["choices"]]  # type: ignore[attr-defined]

    @property
    def text(self) -> str:
        return "".join(
            str(one["text"]) if "text" in one else str(one["delta"].get("content") or "")
            for one in self._choices()
        )

    @property
    def ids(self) -> list[int]:
        return [id_ for one in self._choices() for id_ in one.get("token_ids") or ()]

    @property
    def prompt_ids(self) -> list[list[int]]:
        holders = [*self.chunks, *self._choices()]
        return [h["prompt_token_ids"] for h in holders if h.get("prompt_token_ids")]

    @property
    def finishes(self) -> list[tuple[object, object]]:
        return [
            (one["finish_reason"], one.get("stop_reason", one.get("matched_stop")))
            for one in self._choices()
            if one.get("finish_reason")
        ]

    @property
    def usages(self) -> list[Json]:
        return [
            {name: value for name, value in usage.items() if name.endswith("_tokens")}
            for chunk in self.chunks
            if isinstance(usage := chunk.get("usage"), dict)
        ]

    @property
    def last_usage(self) -> list[Json]:
        return [
            {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
            for chunk in self.chunks
            if isinstance(usage := chunk.get("usage"), dict) and not chunk["choices"]
        ]

    @property
    def logprobs(self) -> list[object]:
        """Tokens with their offsets, of both endpoints' forms."""
        found: list[object] = []
        for one in self._choices():
            logprobs = one.get("logprobs") or {}
            found += [entry["token"] for entry in logprobs.get("content") or ()]
            found += zip(
                logprobs.get("tokens") or (), logprobs.get("text_offset") or (), strict=True
            )
        return found

    def check(self) -> None:
        """What holds for every stream with a good end."""
        chunks = self.chunks
        for name in ("id", "object", "created", "model"):
            assert len({chunk[name] for chunk in chunks}) == 1, name
        roles = [one for one in self._choices() if "role" in one.get("delta", {})]
        assert len(roles) == len({one["index"] for one in roles})
        assert len(self.finishes) == 1
        assert len(self.last_usage) <= 1
        assert self.sent.count(b"data: [DONE]\n\n") == 1
        assert self.sent.endswith(b"data: [DONE]\n\n")
        prints = {c["system_fingerprint"] for c in chunks if c.get("system_fingerprint")}
        assert len(prints) <= 1


@define(eq=False)
class Travel:
    """One request on its way over engines."""

    request: Json
    endpoint: Endpoint = "chat"
    tokens_max: int = 131072
    client: Client = field(factory=Client)
    record: Record = field(init=False)
    outcome: Outcome | None = None
    modes: list[Mode] = field(factory=list)
    asked: int = 0
    attempts: list[Attempt] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.record = Record(examine(self.body, self.endpoint), self.tokens_max)

    @property
    def body(self) -> bytes:
        return json.dumps(self.request, ensure_ascii=False).encode()

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    def begin(self, engine: Engine, cut: int | None = None) -> Sign:
        """The first attempt; `cut` events arrive."""
        asking = plan_asking(self.record.shape, engine.kind)
        events = engine.events(self.path, ask(self.body, asking, self.record.shape))
        return self.read(Attempt(self.record, engine.kind, asking), events[:cut])

    def read(self, attempt: Attempt, events: Sequence[bytes]) -> Sign:
        """Events of one attempt until they end or one of them ends it; returns the last sign."""
        self.attempts.append(attempt)
        sign = Sign.COMMENT
        for event in events:
            sign = attempt.read(event)
            if sign in (Sign.LIE, Sign.ERROR):
                assert attempt.forward == b""
                break
            self.client.sent += attempt.forward
            if sign is Sign.DONE:
                break
        return sign

    def go_on(
        self,
        engine: Engine,
        cut: int | None = None,
        *,
        same_tokens: bool = True,
        detokenizes: bool = True,
        refused: frozenset[Mode] = frozenset(),
    ) -> Sign | None:
        """The next attempt; None where there is none."""
        place = seek(self.record)
        while isinstance(place, Inquiry):
            self.asked += 1
            assert self.asked < 30
            answer = engine.detokenize(question_body(place, None)) if detokenizes else b""
            place = place.answer(read_answer(answer))
        target = Target(engine.kind, engine.context_length, same_tokens)
        outcome = self.outcome = build(self.record, self.body, target, place, refused=refused)
        if isinstance(outcome, CompletedLocally):
            self.client.sent += outcome.tail
            return None
        if isinstance(outcome, CannotContinue):
            return None
        assert isinstance(outcome, Continuation)
        self.modes.append(outcome.mode)
        attempt = resume(self.record, outcome)
        sign = self.read(attempt, engine.events(outcome.path, outcome.body)[:cut])
        if attempt.unsettled is None:
            return sign
        self._settle(engine, attempt.unsettled)
        return None

    def _settle(self, engine: Engine, unsettled: Unsettled) -> None:
        found: Counting | int = unsettled.ask()
        while isinstance(found, Counting):
            found = found.answer(read_answer(engine.detokenize(question_body(found, None))))
        self.client.sent += settle(self.record, unsettled, found)


def chat(**more: object) -> Json:
    return {
        "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True,
        "temperature": 0, "max_tokens": 12,
    } | more  # fmt: skip


def completion(**more: object) -> Json:
    return {
        "model": "tiny", "prompt": "def main(", "stream": True, "temperature": 0, "max_tokens": 12
    } | more  # fmt: skip


def unbroken(request: Json, endpoint: Endpoint, engine: Engine) -> Client:
    """What the client gets of one engine without a router."""
    body = json.dumps(request, ensure_ascii=False).encode()
    return Client(b"".join(engine.events(PATHS[endpoint], body)))


__all__ = [
    "Client", "Disagreed", "Engine", "Travel", "chat", "completion", "unbroken",
]  # fmt: skip
