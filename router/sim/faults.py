"""The language in which an engine is told how to misbehave. Pure data.

    FAULT     = [CONDITION{,CONDITION}:]KIND{,PARAMETER=VALUE}
    CONDITION = always | now | request=N | request=N..M | every=K | times=N
              | path=PREFIX | name=SIM | reused=BOOL

    request=3:cut,after_events=5          the third request is cut after five events
    every=10:status,code=429,retry_after=1
    name=w1,times=1:error_event           once, and only on the engine called w1
    path=/health:status,code=503          a probe is a request too, if its path is named
    now:core_dies,restart_after=3         at once, without waiting for a request

Without `path`, a fault looks at the requests that an engine would work on, and not at probes;
`request=N` counts what the fault has looked at since it was set. A single request scripts its
own with the header or body field `x-sim-fault`; several are separated by `;`. Text values are
percent-encoded. The table of kinds is closed: an unknown word is refused when it is read.
"""

from typing import Literal
from urllib.parse import quote, unquote

from attrs import define, field, frozen

Value = bool | int | float | str
Family = Literal["answer", "connection", "engine"]

MARKER = "x-sim-fault"


class BadFault(ValueError):
    """A fault that cannot be read; the message says what is wrong with it."""


@frozen
class Parameter:
    """One parameter of a kind; its default also gives its type."""

    name: str
    default: Value
    text: str
    words: tuple[str, ...] = ()


@frozen
class Kind:
    """One way to misbehave."""

    name: str
    family: Family
    text: str
    parameters: tuple[Parameter, ...] = ()


def _point(at: str) -> tuple[Parameter, ...]:
    words = ("request", "head", "finish", "done")
    return (
        Parameter(
            "at", at, "before the head, after it, after the last finish, after [DONE]", words
        ),
        Parameter("after_events", -1, "instead: once this many events were sent"),
    )


_RESTART = Parameter("restart_after", 0.0, "seconds after which it serves again; 0 = never")
_AFTER_EVENTS = Parameter(
    "after_events", -1, "events of the triggering stream before it; -1 = none"
)
_DONE = Parameter("done", True, "whether [DONE] follows")

_TABLE = (
    Kind(
        "delay",
        "answer",
        "answer late",
        (
            Parameter("head", 0.0, "seconds before the head"),
            Parameter("first_token", 0.0, "more seconds before the first token"),
            Parameter("token", 0.0, "more seconds before every later token"),
        ),
    ),
    Kind(
        "status",
        "answer",
        "answer with a status and the engine's error body",
        (
            Parameter("code", 503, "the status"),
            Parameter("retry_after", "", "value of a Retry-After header"),
            Parameter("message", "simulated error", "the error's message"),
        ),
    ),
    Kind("empty", "answer", "answer 200 with an empty body of the right type"),
    Kind("hang", "answer", "stay silent from a point on, connection open", _point("request")),
    Kind(
        "cut",
        "answer",
        "close the connection at a point",
        (
            *_point("request"),
            Parameter("inside_bytes", 0, "bytes of the next event (or of the head) still sent"),
            Parameter("reset", False, "RST instead of FIN"),
        ),
    ),
    Kind(
        "error_event",
        "answer",
        "an error event, then a clean end; unary: the error as the answer",
        (
            *_point("head"),
            Parameter("code", 500, "the code in the event"),
            Parameter("message", "simulated error", "the error's message"),
            _DONE,
        ),
    ),
    Kind("abort", "answer", "finish as aborted, then a clean end", (*_point("head"), _DONE)),
    Kind(
        "end",
        "answer",
        "end the body cleanly at a point; at=finish: with a finish and without [DONE]",
        (*_point("head"), Parameter("done", False, "whether [DONE] is sent all the same")),
    ),
    Kind(
        "garbage",
        "answer",
        "break HTTP or JSON",
        (
            Parameter(
                "what",
                "status_line",
                "which part is wrong",
                (
                    "status_line",
                    "header",
                    "two_lengths",
                    "chunk_size",
                    "chunk_end",
                    "short_body",
                    "long_body",
                    "after_end",
                    "json",
                    "utf8",
                ),
            ),
            Parameter("after_events", 0, "events before it, where it is in the body"),
        ),
    ),
    Kind("gzip", "answer", "compress the body although nobody asked"),
    Kind("close_after", "answer", "answer well, then close the kept-alive connection unannounced"),
    Kind("close_reused", "answer", "on a reused connection: read the request, close, send nothing"),
    Kind("close_delimited", "answer", "no length and no chunks: the body ends with the connection"),
    Kind("interim", "answer", "a 1xx response first", (Parameter("code", 103, "its status"),)),
    Kind(
        "slow_reader",
        "answer",
        "read the request's body slowly",
        (Parameter("bytes_per_second", 1024, "how slowly"),),
    ),
    Kind(
        "dribble",
        "answer",
        "send in small pieces",
        (
            Parameter("bytes", 1, "bytes a piece"),
            Parameter("seconds", 0.0, "pause between pieces"),
        ),
    ),
    Kind("lump", "answer", "send events several at a time", (Parameter("events", 4, "how many"),)),
    Kind("comments", "answer", "a comment before every event", ()),
    Kind("crlf", "answer", "lines of events end with CR LF", ()),
    Kind(
        "padding",
        "answer",
        "make the body, or every event, larger",
        (Parameter("bytes", 65536, "by how much"),),
    ),
    Kind(
        "drop",
        "connection",
        "accept a connection and close it at once",
        (Parameter("reset", False, "RST instead of FIN"),),
    ),
    Kind("mute", "connection", "accept a connection and never read from it"),
    Kind("refuse", "engine", "refuse connections; those that are open live on", (_RESTART,)),
    Kind(
        "freeze",
        "engine",
        "stop as under SIGSTOP: connections are accepted, nothing is answered",
        (_AFTER_EVENTS, _RESTART),
    ),
    Kind(
        "core_dies",
        "engine",
        "vLLM's engine core is killed: error events and [DONE], health 503, gone after 2 s",
        (_AFTER_EVENTS, _RESTART),
    ),
    Kind(
        "server_dies",
        "engine",
        "the API server is killed: every connection is cut, then refused",
        (_AFTER_EVENTS, Parameter("reset", False, "RST instead of FIN"), _RESTART),
    ),
    Kind(
        "sigterm_abort",
        "engine",
        "vLLM gets SIGTERM: streams finish as aborted, no new connections",
        (_AFTER_EVENTS, _RESTART),
    ),
    Kind(
        "sigterm_hang",
        "engine",
        "vLLM gets SIGTERM and loses the race: streams go silent, no new connections",
        (_AFTER_EVENTS, _RESTART),
    ),
    Kind(
        "sigterm_drain",
        "engine",
        "vLLM gets SIGTERM with a shutdown timeout: streams complete, health is 200, new work 500",
        (_AFTER_EVENTS, Parameter("timeout", 20.0, "seconds until the rest is aborted"), _RESTART),
    ),
    Kind(
        "sglang_drain",
        "engine",
        "SGLang gets SIGTERM: streams complete, health 503, new work is served; gone when idle",
        (_AFTER_EVENTS, _RESTART),
    ),
    Kind(
        "scheduler_dies",
        "engine",
        "SGLang's scheduler is killed: streams stall, then everything is cut and refused",
        (_AFTER_EVENTS, Parameter("stall", 6.0, "seconds until the cut"), _RESTART),
    ),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _TABLE}


@frozen
class When:
    """Which requests (or connections) a fault is for."""

    now: bool = False
    first: int = 1
    last: int | None = None
    every: int = 1
    times: int | None = None
    path: str | None = None
    name: str | None = None
    reused: bool | None = None

    def __str__(self) -> str:
        words = []
        if self.now:
            words.append("now")
        if self.first != 1 or self.last is not None:
            until = "" if self.last == self.first else f"..{self.last or ''}"
            words.append(f"request={self.first}{until}")
        if self.every != 1:
            words.append(f"every={self.every}")
        if self.times is not None:
            words.append(f"times={self.times}")
        if self.path is not None:
            words.append(f"path={self.path}")
        if self.name is not None:
            words.append(f"name={self.name}")
        if self.reused is not None:
            words.append(f"reused={str(self.reused).lower()}")
        return ",".join(words) or "always"


@frozen
class Fault:
    """A kind with its conditions and its parameters, defaults filled in."""

    kind: Kind
    when: When
    values: dict[str, Value] = field(factory=dict)

    def integer(self, name: str) -> int:
        return int(self.values[name])

    def seconds(self, name: str) -> float:
        return float(self.values[name])

    def flag(self, name: str) -> bool:
        return bool(self.values[name])

    def word(self, name: str) -> str:
        return str(self.values[name])

    def __str__(self) -> str:
        defaults = {one.name: one.default for one in self.kind.parameters}
        given = [f"{k}={_write(v)}" for k, v in self.values.items() if v != defaults[k]]
        return f"{self.when}:" + ",".join([self.kind.name, *given])


def _write(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else quote(str(value))


def parse_faults(text: str) -> list[Fault]:
    """Several faults, separated by semicolons."""
    return [parse_fault(part) for part in text.split(";") if part.strip()]


def parse_fault(text: str) -> Fault:
    """Read one fault; raises BadFault with what is wrong."""
    head, colon, tail = text.strip().partition(":")
    if not colon or head.partition(",")[0] in KINDS:
        head, tail = "always", text.strip()
    name, _, rest = tail.partition(",")
    kind = KINDS.get(name)
    if kind is None:
        raise BadFault(f"{text}: there is no fault {name!r}; there are {', '.join(KINDS)}")
    when = _parse_when(text, head)
    if when.now and kind.family != "engine":
        raise BadFault(f"{text}: {kind.name} happens to a request, so `now` means nothing")
    return Fault(kind, when, _parse_values(text, kind, rest))


def _parse_when(text: str, words: str) -> When:
    found: dict[str, str] = {}
    for word in words.split(","):
        name, _, value = word.strip().partition("=")
        found[name] = value
    unknown = set(found) - {"always", "now", "request", "every", "times", "path", "name", "reused"}
    if unknown:
        raise BadFault(f"{text}: unknown condition {sorted(unknown)[0]!r}")
    try:
        first, dots, last = found.get("request", "1..").partition("..")
        return When(
            now="now" in found,
            first=int(first),
            last=(int(last) if last else None) if dots else int(first),
            every=int(found.get("every", "1")),
            times=int(found["times"]) if "times" in found else None,
            path=found.get("path"),
            name=found.get("name"),
            reused=_parse_bool(found["reused"]) if "reused" in found else None,
        )
    except ValueError as error:
        raise BadFault(f"{text}: {error}") from None


def _parse_values(text: str, kind: Kind, rest: str) -> dict[str, Value]:
    values: dict[str, Value] = {one.name: one.default for one in kind.parameters}
    for word in filter(None, rest.split(",")):
        name, _, value = word.strip().partition("=")
        parameter = next((one for one in kind.parameters if one.name == name), None)
        if parameter is None:
            raise BadFault(f"{text}: {kind.name} takes no {name!r}")
        values[name] = _parse_value(text, parameter, unquote(value))
    return values


def _parse_value(text: str, parameter: Parameter, value: str) -> Value:
    if parameter.words and value not in parameter.words:
        raise BadFault(f"{text}: {parameter.name} is one of {', '.join(parameter.words)}")
    try:
        match parameter.default:
            case bool():
                return _parse_bool(value)
            case int():
                return int(value)
            case float():
                return float(value)
    except ValueError as error:
        raise BadFault(f"{text}: {parameter.name}: {error}") from None
    return value


def _parse_bool(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError(f"{value!r} is neither true nor false")
    return value == "true"


@frozen
class Sighting:
    """What a fault can be conditional on."""

    name: str
    path: str = ""
    is_work: bool = True
    reused: bool = False


@define(eq=False)
class _Armed:
    fault: Fault
    seen: int = 0
    used: int = 0

    def matches(self, sighting: Sighting) -> bool:
        when = self.fault.when
        if when.now or (when.name is not None and when.name != sighting.name):
            return False
        if when.path is None and not sighting.is_work:
            return False
        if when.path is not None and not sighting.path.startswith(when.path):
            return False
        if when.reused is not None and when.reused != sighting.reused:
            return False
        self.seen += 1
        in_range = when.first <= self.seen and (when.last is None or self.seen <= when.last)
        if not in_range or self.seen % when.every:
            return False
        if when.times is not None and self.used >= when.times:
            return False
        self.used += 1
        return True


@define(eq=False)
class FaultBook:
    """The faults an engine has been told, with what each has counted so far."""

    _armed: list[_Armed] = field(factory=list)

    def add(self, fault: Fault) -> None:
        self._armed.append(_Armed(fault))

    def clear(self) -> None:
        self._armed.clear()

    def __str__(self) -> str:
        return ";".join(str(armed.fault) for armed in self._armed)

    def for_request(self, sighting: Sighting) -> list[Fault]:
        """The faults that this request meets; counts it."""
        return self._matching(sighting, ("answer", "engine"))

    def for_connection(self, sighting: Sighting) -> list[Fault]:
        """The faults that this connection meets; counts it."""
        return self._matching(sighting, ("connection",))

    def _matching(self, sighting: Sighting, families: tuple[Family, ...]) -> list[Fault]:
        # Every fault counts what it sees, so there is no early exit.
        return [
            armed.fault
            for armed in self._armed
            if armed.fault.kind.family in families and armed.matches(sighting)
        ]


@frozen
class Script:
    """The faults of one request."""

    faults: tuple[Fault, ...] = ()

    def find(self, *names: str) -> Fault | None:
        """The first fault of one of these kinds."""
        return next((fault for fault in self.faults if fault.kind.name in names), None)

    def with_more(self, faults: list[Fault]) -> "Script":
        return Script((*self.faults, *faults))
