"""Requests whose streams are to be broken, and what engines say to them when nothing is.

A case is a request in words; its stop strings are parts of what the engine would say. Whether the
answers that come of it are right is judged in tests/real/judging.py.
"""

import json
import random
from collections.abc import Iterator, Sequence

import trio
from attrs import Factory, define, frozen

from tests.real.calling import ask
from tests.real.calls import Answer
from tests.real.cutting import Cut, Cuts, How
from tests.real.engines import Engine
from tests.real.requests import CHAT, TEXT, Object, chat, completion
from tests.real.told import Told, told_by

TOKENS = 40
PROMPTS = (
    "def main(",
    "class Foo",
    "import os\n",
    "héllo wörld 你好",
    "the quick brown fox",
    "naïve café — 数据 🚀 'quoted' \"twice\"\n\t\\end",
    "Größe 世界 日本語 жизнь 🙂👍",
)
STOPS = ("none", "never", "middle", "long")
EARLY_TOKENS = 16
"""A request that loses two workers before so many tokens is suspected, and moves no more."""
NEVER = "said by nobody"


@frozen
class Case:
    """One request, in words."""

    path: str
    prompt: str
    stop: str = "none"
    ids: bool = False
    usage: bool = True
    tokens: int = TOKENS
    ignore_eos: bool = False

    @property
    def endpoint(self) -> str:
        return "chat" if self.path == CHAT else "completions"

    def body(self, stops: list[str]) -> bytes:
        fields: Object = {"stream": True, "max_tokens": self.tokens}
        if self.path == CHAT and not self.usage:
            fields["max_completion_tokens"] = fields.pop("max_tokens")
        if stops:
            fields["stop"] = [*stops]
        if self.stop == "spared":
            fields["min_tokens"] = self.tokens - 2
        if self.ids:
            fields["return_token_ids"] = True
        if self.usage:
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        make = chat if self.path == CHAT else completion
        return json.dumps(make(self.prompt, **fields)).encode()


def all_cases(kinds: Sequence[str]) -> list[Case]:
    """Every case that engines of these kinds can answer: SGLang's chat streams no ids."""
    found = [
        Case(path, prompt, stop, ids, usage)
        for path in (CHAT, TEXT)
        for prompt in PROMPTS
        for stop in STOPS
        for ids in (False, True)
        for usage in (True, False)
        if not (ids and path == CHAT and "sglang" in kinds)
    ]
    if len(set(kinds)) == 1:
        # vLLM's `min_tokens` spare the stop strings within them, SGLang's none: two right answers.
        found += [Case(path, PROMPTS[0], "spared") for path in (CHAT, TEXT)]
    return found


#### the right answers


@define(eq=False)
class References:
    """Uninterrupted answers, asked of the engines themselves, each once."""

    _known: dict[tuple[int, bytes, str], Told] = Factory(dict)

    async def right(self, engine: Engine, case: Case) -> Told:
        return await self.direct(engine, case.path, case.body(await self.stops(engine, case)))

    async def whole(self, engine: Engine, case: Case) -> Told:
        """The same without stop strings, and with ids where the engine streams them."""
        ids = engine.kind == "vllm" or case.path == TEXT
        plain = Case(case.path, case.prompt, "none", ids, True, case.tokens, case.ignore_eos)
        return await self.direct(engine, case.path, plain.body([]))

    async def counted(self, engine: Engine, case: Case) -> Told:
        """The same as `right`, with the number of tokens in every event."""
        fields = json.loads(case.body(await self.stops(engine, case)))
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return await self.direct(engine, case.path, json.dumps(fields).encode())

    async def stops(self, engine: Engine, case: Case) -> list[str]:
        if case.stop == "none":
            return []
        if case.stop == "never":
            return [NEVER]
        text = (await self.whole(engine, case)).text
        return _parts_of(text, 24 if case.stop == "long" else 5)

    async def direct(self, engine: Engine, path: str, body: bytes) -> Told:
        key = (engine.port, body, path)
        if key not in self._known:
            self._known[key] = told_by(await ask(engine.port, path, body))
            assert self._known[key].is_good, self._known[key]
        return self._known[key]


def _parts_of(text: str, length: int) -> list[str]:
    """A part from the last third of a text, of whole characters only."""
    places = range(len(text) * 2 // 3, len(text) - length)
    parts = (text[place : place + length] for place in places)
    return [next((part for part in parts if "\ufffd" not in part), NEVER)]


#### what is broken


@frozen
class Plan:
    """One request and where its streams are cut."""

    case: Case
    cuts: tuple[Cut, ...]


def plans(kinds: Sequence[str], again: bool, rng: random.Random) -> Iterator[Plan]:
    """Endless: every case in turn, cut anywhere; `again` cuts some continuations, too."""
    cases = all_cases(kinds)
    ways = list(How)
    while True:
        rng.shuffle(cases)
        for case in cases:
            cuts = [Cut(rng.randrange(TOKENS + 3), rng.choice(ways))]
            if again and cuts[0].after > EARLY_TOKENS + 1 and rng.random() < 0.4:
                cuts.append(Cut(rng.randrange(TOKENS // 2), rng.choice(ways)))
            yield Plan(case, tuple(cuts))


@frozen
class Outcome:
    """An answer to a planned request."""

    plan: Plan
    id: str
    answer: Answer


#### running


async def break_streams(
    references: References,
    cuts: Cuts,
    port: int,
    first: Engine,
    wanted: Sequence[Plan],
    *,
    at_once: int,
    label: str,
) -> list[Outcome]:
    """Sends all requests through the router, some at a time."""
    outcomes: list[Outcome] = []
    waiting = list(enumerate(wanted))
    waiting.reverse()

    async def work() -> None:
        while waiting:
            number, plan = waiting.pop()
            name = f"{label}-{number}"
            cuts.planned[name] = list(plan.cuts)
            body = plan.case.body(await references.stops(first, plan.case))
            answer = await ask(port, plan.case.path, body, request_id=name)
            outcomes.append(Outcome(plan, name, answer))

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(work)
    return outcomes
