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

from urllib.parse import quote, unquote

from attrs import define, field, frozen

from router.sim.fault_kinds import KINDS, Family, Kind, Parameter, Value

MARKER = "x-sim-fault"


class BadFault(ValueError):
    """A fault that cannot be read; the message says what is wrong with it."""


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
        return self._matching(sighting, ("answer", "half", "engine"))

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
        for fault in self.faults:  # a loop, since most have none and many are asked for
            if fault.kind.name in names:
                return fault
        return None

    def with_more(self, faults: list[Fault]) -> "Script":
        return Script((*self.faults, *faults))
