"""What a simulated run consists of, as data.

A plan says who takes part and what happens when; its repr is valid Python, so that a plan that
failed somewhere can be pasted into a story. All moments are virtual seconds after `Plan.begin`.
"""

from __future__ import annotations

import msgspec
from attrs import Factory, fields, frozen


class Brief:
    """Its repr names only what differs from the default, so that a plan fits into a line."""

    __slots__ = ()

    def __repr__(self) -> str:
        usual, own = type(self)(), [each.name for each in fields(type(self))]  # type: ignore[arg-type]  # each of these is a class of attrs
        told = [name for name in own if getattr(self, name) != getattr(usual, name)]
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in told)})"


@frozen(repr=False)
class Engine(Brief):
    """One simulated engine; `faults` in the language of `router.sim.faults`."""

    kind: str = "vllm"
    faults: str = ""
    token_seconds: float = 0.1
    first_token_seconds: float = 1.0
    model: str = "tiny"
    #: "prefill" or "decode": half of a pair.
    role: str = "mixed"
    #: Its weights and its limits; see `router.sim.settings`.
    eos_every: int = 0
    ambiguous: bool = False
    tokens_per_chunk: int = 1
    context_length: int = 4096
    seed: int = 0
    #: More options of the worker, as they may follow its URL.
    options: str = ""
    #: A prefill worker's bootstrap port is said to the router.
    names_port: bool = True
    #: A line that all its answers carry besides.
    header: str = ""
    #: How it is reached: "http", or by an agent over NATS: Baton's own, which registers it
    #: ("agent"), or a scripted one, as ours ("nats") or as one that numbers no frames and sends
    #: neither heads nor heartbeats ("old"). Empty: as simulate's WIRE says.
    wire: str = ""
    #: A timetable instead of a pace and of faults; see tests/scripted.py.
    script: str = ""


@frozen(repr=False)
class Client(Brief):
    """One client's request, and those that follow it on the same connection."""

    at: float = 0.0
    stream: bool = True
    chat: bool = True
    tokens: int = 8
    prompt: str = "once upon a time"
    #: None: that of the first engine.
    model: str | None = None
    #: Moments at which it closes, half-closes, or resets its connection.
    leaves_at: float | None = None
    half_closes_at: float | None = None
    resets_at: float | None = None
    #: When it sends its body, where that is later than the head.
    body_at: float | None = None
    #: It reads nothing until then.
    reads_from: float = 0.0
    #: Sent to the engine as `x-sim-fault`.
    fault: str = ""
    #: More fields of the body.
    extra: dict[str, object] = Factory(dict)
    headers: tuple[tuple[str, str], ...] = ()
    method: str = "POST"
    path: str | None = None
    raw_body: bytes | None = None
    http_10: bool = False
    #: Sent as it is instead of a request; everything that comes back is read to its end.
    raw: bytes | None = None
    then: tuple[Client, ...] = ()
    #: Sends its request and all that follow in one piece.
    pipelines: bool = False

    @property
    def target(self) -> str:
        """The path it asks for."""
        default = "/v1/chat/completions" if self.chat else "/v1/completions"
        return self.path or default

    @property
    def leaves(self) -> bool:
        """It does not wait for its answer in any case."""
        moments = (self.leaves_at, self.half_closes_at, self.resets_at)
        return any(each is not None for each in moments)

    @property
    def is_judged(self) -> bool:
        """It asks for a generation in the plain way, so there is one right answer."""
        return self.raw is None and self.raw_body is None and self.path is None

    def body(self, model: str) -> bytes:
        """The JSON it sends."""
        if self.raw_body is not None:
            return self.raw_body
        if self.method == "GET":
            return b""
        asked: dict[str, object] = {"model": self.model or model, "temperature": 0}
        asked["max_tokens"] = self.tokens
        if self.chat:
            asked["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            asked["prompt"] = self.prompt
        if self.stream:
            asked["stream"] = True
        return msgspec.json.encode(asked | {"ignore_eos": True} | self.extra)


@frozen(repr=False)
class Plan(Brief):
    """A run: who takes part, and what happens when."""

    engines: tuple[Engine, ...] = (Engine(), Engine())
    clients: tuple[Client, ...] = (Client(),)
    settings: dict[str, object] = Factory(dict)
    #: Seed for cutting and shuffling bytes; None leaves them whole.
    cuts: int | None = None
    #: Seed for everything else that is left to luck: policies, jitter, ids.
    luck: int = 0
    #: Seed for the order in which Trio runs its tasks. None: drawn when it runs, and told with
    #: what fails.
    schedule: int | None = None
    pipe_bytes: int = 64 * 1024
    #: Of the broker, where there is one.
    max_payload: int = 1 << 20
    #: (moment, what): see `tests.simulate.happen`.
    happenings: tuple[tuple[float, str], ...] = ()
    #: Moments at which the inside is looked at; see `Look`.
    looks: tuple[float, ...] = ()
    #: When the clients' clock begins; by then workers that are well are ready.
    begin: float = 6.0
    #: After the last client, until everything must have been given back; a prefill may outlive
    #: its request by the five minutes for which it waits for a decode.
    rest: float | None = None

    @property
    def has_halves(self) -> bool:
        """Some engine is half of a pair."""
        return any(engine.role != "mixed" for engine in self.engines)

    @property
    def rest_seconds(self) -> float:
        """As it was given, or what is enough for these engines."""
        return self.rest or (320.0 if self.has_halves else 5.0)
