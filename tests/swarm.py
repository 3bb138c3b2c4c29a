"""A plan drawn by one seed: who takes part, what is on in it, and what goes wrong when.

Swarm fashion: a seed first draws which features of the router and which kinds of faults are on at
all, so that some plans have much of a kind and others none; then where and when they strike. Few
moments are drawn from, since things that happen at the same one are the interesting ones. The plan
carries every seed that its run needs, so that it runs the same way wherever it is pasted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random

from attrs import define, field

from router.sim.fault_kinds import KINDS
from tests.plans import Client, Engine, Plan

#### What can go wrong

EVENTS = [f"after_events={count}" for count in range(8)]
PLACES = [*EVENTS, "at=head", "at=finish", "at=done"]
SECONDS = ["0.1", "1", "4", "30"]
CODES = ["400", "404", "429", "500", "503"]
#: Not JSON or UTF-8 that is none: such events pass, and then no text is right.
GARBAGE = ["status_line", "header", "two_lengths", "chunk_size", "chunk_end"]
GARBAGE += ["short_body", "long_body", "after_end"]


def variants(form: str, *parameters: list[str]) -> list[str]:
    """The form with every combination of parameters."""
    return [form.format(*each) for each in product(*parameters)]


#: Changes what the right answer is.
UNDRAWN = {"parse"}
#: What engines of a plan may suffer.
FAULTS: dict[str, list[str]] = {
    "delay": variants("delay,head={},first_token={}", SECONDS, SECONDS),
    "status": variants("status,code={}", CODES),
    "empty": ["empty"],
    "hang": variants("hang,{}", PLACES),
    "cut": variants("cut,{},{}", PLACES, ["reset=true", "inside_bytes=7", "inside_bytes=40"]),
    "pause": variants("pause,{},seconds={}", EVENTS, SECONDS),
    "error_event": variants("error_event,{},code={}", EVENTS, CODES),
    "abort": variants("abort,{}", EVENTS),
    # After its finish, an answer is whole for all that is said of its end.
    "end": variants("end,{},done={}", [*EVENTS, *2 * ["at=finish"]], ["true", "false"]),
    "garbage": variants("garbage,what={},{}", GARBAGE, EVENTS),
    "gzip": ["gzip"],
    "close_after": ["close_after"],
    "close_reused": ["close_reused"],
    "close_delimited": ["close_delimited"],
    "interim": ["interim"],
    "slow_reader": ["slow_reader,bytes_per_second=200"],
    "dribble": ["dribble,bytes=9,seconds=0.001"],
    "lump": ["lump,events=3"],
    "comments": ["comments"],
    "crlf": ["crlf"],
    "forget": variants("forget,member={}", ["kv_transfer_params", "return_token_ids"]),
    "padding": ["padding,bytes=40000"],
    "early_head": ["early_head", "early_head,comments_every=0.4"],
    "drop": ["drop"],
    "mute": ["mute"],
    **{
        kind.name: variants(f"{kind.name},{{}},restart_after={{}}", EVENTS, SECONDS)
        for kind in KINDS.values()
        if kind.family == "engine"
    },
    "refuse": variants("refuse,restart_after={}", SECONDS),
}
#: Faults of halves, alone and with what makes them matter.
OF_HALVES: dict[str, list[str]] = {
    "alone": ["alone", "alone;error_event,at=head", "alone;abort,at=head", "alone;cut,at=head"],
    "linger": ["linger,seconds=0.5", "linger,seconds=20"],
    "transfer_fails": ["transfer_fails"],
}
#: What breaks a stream in its middle, which makes it move.
BREAKS = 3 * ["cut", "end", "abort", "error_event", "hang"]
BREAKS += ["core_dies", "server_dies", "scheduler_dies"]
BREAKS += ["sglang_drain", "sigterm_abort", "sigterm_hang", "sigterm_drain"]
WHEN = ["request=1:", "request=2:", "request=3:", "times=1:", "every=2:", ""]

#### What is asked, and by whom

#: Seconds.
MOMENTS = [0.0, 0.0, 0.3, 0.5, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 7.0]
PROMPTS = ["once upon a time", "once 世界 🙂 a", "time upon"]
STOPS = ["the", " a", "e", "世界", "🙂", ". ", "and the", "zz", " little"]
#: More fields of requests, of which several may be.
EXTRAS: list[dict[str, object]] = [
    {"stream_options": {"include_usage": True}},
    {"n": 2, "temperature": 0.5},
    {"stop": [" little", "day"]},
    {"seed": 7, "temperature": 0.8},
]
#: Silence ends by these at the latest, so that no run is longer than it must be.
PATIENCE: dict[str, object] = {
    "first_token_timeout_secs": 9.0,
    "stream_idle_timeout_secs": 6.0,
    "request_timeout_secs": 30.0,
    "client_stall_timeout_secs": 10.0,
    "health_check_interval_secs": 30.0,
}
SETTINGS: dict[str, list[object]] = {
    "policy": ["round_robin", "random", "least_load", "power_of_two"],
    "request_max_retries": [0, 1, 2, 3],
    "first_token_timeout_secs": [2.0],
    "stream_idle_timeout_secs": [1.5],
    "request_timeout_secs": [1.2, 7.0, 40.0],
    "client_stall_timeout_secs": [0.5, 5.0],
    "suspect_idle_secs": [0.0, 1.0],
    "breaker_failure_threshold": [0, 1, 2],
    "breaker_cooldown_secs": [1.0],
    "max_concurrent_requests": [1, 2, 3],
    "queue_size": [0, 1, 3],
    "queue_timeout_secs": [0.5, 3.0],
    "drain_timeout_secs": [0.0, 2.0],
    "max_body_bytes": [5000],
    "worker_keep_alive_secs": [0.0],
    "health_check_interval_secs": [3.0],
}
OF_PAIRS: dict[str, list[object]] = {
    "pd_max_retries": [0, 1, 2],
    "pd_recompute": [True],
    "pd_cancel_unmatched_prefill": [True],
}

#: What a plan may have, and in how many plans of a hundred.
FEATURES: dict[str, int] = {
    # The fleet.
    "pairs": 5,
    "nats": 20,
    "old agents": 20,
    "queues": 20,
    "slow engines": 60,
    "merged tokens": 20,
    # What is asked of it.
    "moves": 50,
    "shapes": 40,
    "unary": 60,
    "leaving": 40,
    "slow clients": 30,
    "keep-alive": 40,
    "pipelining": 30,
    "http 1.0": 15,
    "faults by clients": 30,
    "crowd": 10,
    # What goes wrong.
    "faults": 60,
    "breaks": 35,
    "happenings": 40,
    "drains": 15,
    "broker trouble": 50,
    "cut bytes": 50,
    "small pipes": 30,
    "odd settings": 70,
}


#: What is on in any case; a seed draws one of these, so that rare company is not too rare.
COMPANIES: list[set[str]] = [
    set(),
    set(),
    {"moves", "breaks", "shapes", "slow engines"},
    {"pairs"},
    {"nats", "broker trouble"},
    {"nats", "moves", "drains", "slow engines"},
]


def features(seed: int) -> frozenset[str]:
    """What is on in the plan of a seed."""
    luck = Random(seed)
    drawn = {name for name, percent in FEATURES.items() if luck.randrange(100) < percent}
    return frozenset(drawn | luck.choice(COMPANIES))


def swarm(seed: int) -> Plan:
    """The plan of a seed."""
    return _Drawing(Random(seed), features(seed)).plan()


@define
class _Drawing:
    luck: Random
    has: frozenset[str]
    #: Of all engines: kinds are mixed only where all of them are asked alike.
    kinds: list[str] = field(init=False)
    faults: list[str] = field(init=False)
    breaks: list[str] = field(init=False)
    wires: list[str] = field(init=False)

    def plan(self) -> Plan:
        luck, has = self.luck, self.has
        self.kinds = luck.choice([["vllm"], ["sglang"], ["vllm", "sglang"]])
        if "pairs" in has:
            self.kinds = self.kinds[:1]
        self.wires = self._wires()
        self.faults, self.breaks = self._faults(), [*luck.sample(BREAKS, 2), "", ""]
        engines = self._engines()
        clients = tuple(self._client() for _ in range(luck.randint(1, 8 if "crowd" in has else 3)))
        return Plan(
            engines=engines,
            clients=clients,
            settings=self._settings(),
            happenings=self._happenings(engines),
            cuts=luck.randrange(1000) if "cut bytes" in has else None,
            pipe_bytes=2000 if "small pipes" in has else 64 * 1024,
            luck=luck.randrange(1000),
            schedule=luck.randrange(1000),
            begin=2.0,
            # What a prefill has to itself, and what its engine takes to notice.
            rest=45.0 if "pairs" in has else 12.0 if "nats" in has else None,
        )

    def one_in(self, number: int) -> bool:
        return self.luck.randrange(number) == 0

    # Engines

    def _wires(self) -> list[str]:
        if "nats" not in self.has:
            return ["http"]
        wires = ["nats", "agent"]
        return self.luck.choice([wires, [*wires, "http"], ["agent"]]) + (
            ["old"] if "old agents" in self.has else []
        )

    def _faults(self) -> list[str]:
        every = FAULTS | OF_HALVES if "pairs" in self.has else FAULTS
        kinds = self.luck.sample(sorted(every), self.luck.randint(1, 4))
        return [fault for kind in kinds for fault in every[kind]]

    def _engines(self) -> tuple[Engine, ...]:
        roles = ["mixed"] * self.luck.choice(
            [2, 2, 2, 3, 3, 4] if "moves" in self.has else [1, 2, 3]
        )
        if "pairs" in self.has:
            roles = ["prefill"] * (1 + self.one_in(3)) + ["decode"] * (1 + self.one_in(3))
            roles += ["mixed"] * self.one_in(5)
        return tuple(map(self._engine, roles))

    def _engine(self, role: str) -> Engine:
        luck, kind = self.luck, self.luck.choice(self.kinds)
        is_slow = "slow engines" in self.has
        return Engine(
            kind=kind,
            role=role,
            wire=luck.choice(self.wires),
            options=f"engine={kind}",
            faults=";".join(self._suffered()),
            token_seconds=luck.choice([0.0, 0.05, 0.1] if is_slow else [0.0]),
            first_token_seconds=luck.choice([0.0, 0.3, 1.0] if is_slow else [0.0]),
            tokens_per_chunk=luck.randint(1, 3) if "merged tokens" in self.has else 1,
            eos_every=40 if "shapes" in self.has else 0,
        )

    def _suffered(self) -> list[str]:
        luck, found = self.luck, []
        if "faults" in self.has:
            found += [self._fault() for _ in range(luck.choice([0, 1, 1, 2]))]
        for number in range(1, 5) if "breaks" in self.has else ():
            if kind := luck.choice(self.breaks):
                found.append(f"request={number}:{luck.choice(FAULTS[kind])}")
        return found

    def _fault(self) -> str:
        return self.luck.choice(WHEN) + self.luck.choice(self.faults)

    # Clients

    def _client(self) -> Client:
        luck, has = self.luck, self.has
        at = luck.choice(MOMENTS)
        moments: dict[str, float] = {}
        if "leaving" in has and self.one_in(2):
            way = luck.choice(["leaves_at", "half_closes_at", "resets_at"])
            moments[way] = at + luck.choice(MOMENTS)
        is_slow = "slow clients" in has and self.one_in(2)
        then: tuple[Client, ...] = ()
        if "keep-alive" in has and self.one_in(2):
            then = tuple(self._follower() for _ in range(luck.randint(1, 2)))
        asked = self._asked()
        return Client(
            at=at,
            **asked,  # type: ignore[arg-type]  # names drawn below
            **moments,  # type: ignore[arg-type]  # names drawn above
            fault=luck.choice(self.faults) if "faults by clients" in has and self.one_in(2) else "",
            reads_from=at + luck.choice(MOMENTS) if is_slow else 0.0,
            http_10="http 1.0" in has and self.one_in(3),
            then=then,
            pipelines=bool(then) and "pipelining" in has,
        )

    def _follower(self) -> Client:
        at = self.luck.choice(MOMENTS) if "pipelining" not in self.has else 0.0
        return Client(at=at, tokens=self.luck.randint(1, 4), stream=self._streams())

    def _streams(self) -> bool:
        return "unary" not in self.has or self.one_in(2)

    def _asked(self) -> dict[str, object]:
        luck, stream = self.luck, self._streams() or ("moves" in self.has and self.one_in(2))
        asked: dict[str, object] = {"stream": stream, "tokens": luck.randint(1, 9)}
        if "drains" in self.has:  # every other one is long enough to meet one
            tokens = luck.randint(10, 40)
            if tokens % 2:
                tokens = tokens % 9 + 1
            return asked | {"stream": True, "tokens": tokens, "chat": self.one_in(2)}
        if "shapes" in self.has:
            return asked | self._shape(stream=stream)
        asked["chat"] = self.one_in(2)
        if stream and self.one_in(2) and "merged tokens" not in self.has:
            asked["extra"] = luck.choice(EXTRAS)
        return asked

    def _shape(self, *, stream: bool) -> dict[str, object]:
        """Of a request that can be continued."""
        luck, tokens = self.luck, self.luck.randint(1, 24)
        is_exact = self.kinds == ["vllm"]
        # SGLang's chat tells how many tokens there were, not which of them the text stands for.
        chat = self.one_in(2) and (is_exact or "merged tokens" not in self.has)
        extra: dict[str, object] = {"ignore_eos": not self.one_in(3)}
        if stream and self.one_in(2):
            usage = {"include_usage": True, "continuous_usage_stats": self.one_in(3)}
            extra["stream_options"] = usage
        forgets = any("return_token_ids" in each for each in self.faults)
        if stream and self.one_in(3) and (is_exact or not chat) and not forgets:
            extra["return_token_ids"] = True
        # Where only text can be carried, half a word held back becomes other tokens.
        if self.one_in(3) and not chat:
            extra["stop"] = luck.sample(STOPS, luck.randint(1, 3))
        if self.one_in(5):
            least = luck.randint(0, tokens)
            # In an event of several tokens nobody can tell on which side a stop string ends.
            if "stop" not in extra or "merged tokens" not in self.has:
                extra["min_tokens"] = least
        return {"chat": chat, "tokens": tokens, "prompt": luck.choice(PROMPTS), "extra": extra}

    # The rest

    def _settings(self) -> dict[str, object]:
        luck, has = self.luck, self.has
        drawn: dict[str, object] = {}
        every = SETTINGS | OF_PAIRS if "pairs" in has else SETTINGS
        if "odd settings" in has:
            names = luck.sample(sorted(every), luck.randint(1, 5))
            drawn = {name: luck.choice(every[name]) for name in names}
        if "moves" in has:
            drawn["migration_limit"] = luck.randint(1, 3)
        if "drains" in has:
            drawn["drain_timeout_secs"] = luck.choice([0.0, 0.3])
        if "nats" in has and "queues" in has:
            drawn["nats_req_max_pending"] = 6
        return PATIENCE | {"health_success_threshold": 1} | drawn

    def _happenings(self, engines: Sequence[Engine]) -> tuple[tuple[float, str], ...]:
        luck, found = self.luck, list[tuple[float, str]]()
        if "happenings" in self.has:
            for _ in range(luck.randint(1, 3)):
                words = ["drain {}", "drain {} 0", "drain {} 1", "silent {}", "heal {}", "stop"]
                words += ["remove {}", "undrain {}"]
                what = luck.choice(words).format(luck.randrange(len(engines)))
                found.append((luck.choice(MOMENTS), what))
        for number, engine in enumerate(engines) if "drains" in self.has else ():
            if self.one_in(2):
                what = f"drain {number} {luck.choice([0, 1])}"
                if engine.wire != "http":
                    what = f"leave {number}"
                found.append((luck.choice(MOMENTS[3:]), what))
        behind = [n for n, engine in enumerate(engines) if engine.wire != "http"]
        if behind and "broker trouble" in self.has:
            has_old = any(engine.wire == "old" for engine in engines)
            for _ in range(luck.randint(1, 3)):
                found += self._trouble(behind, has_old=has_old)
        return tuple(sorted(found))

    def _trouble(self, behind: list[int], *, has_old: bool) -> list[tuple[float, str]]:
        """One thing that goes wrong at the broker, and how it is mended."""
        luck, at = self.luck, self.luck.choice(MOMENTS)
        number = luck.choice(behind)
        pairs = [("down", "up"), ("forget", "up"), ("cut", "mend"), ("stall", "go_on")]
        if not has_old:  # what it says meanwhile is lost, and without numbers nobody can see that
            pairs.append((f"cut_off {number}", f"rejoin {number}"))
        away, back = luck.choice(pairs)
        kinds = [
            [(at, away), (at + luck.choice([0.01, 0.5, 2.0]), back)],
            [(at, f"lose {luck.randint(0, 20)} told")],
            [(at, f"die {number}")],
            [(at, f"leave {number}")],
        ]
        if not has_old:
            # Nor that a frame is missing, or came twice or late.
            kinds += [
                [(at, f"lose {luck.randint(0, 20)}")],
                [(at, f"twice {luck.randint(0, 20)}")],
                [(at, f"late {luck.randint(0, 20)} {luck.choice(SECONDS[:3])}")],
            ]
        return luck.choice(kinds)
