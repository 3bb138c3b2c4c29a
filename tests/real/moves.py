"""Requests whose streams are broken, what they have to tell all the same, and how they are judged.

The right answer is what the first engine says when it is asked directly and not interrupted. A
stream that moved in a way that promises the same tokens has to tell exactly that. Where only the
text was carried, or where engines differ in how they look for stop strings, what was delivered has
to stay and to be continued without a gap or an overlap, and the rest may be another.
"""

import json
import random
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

import msgspec
import trio
from attrs import Factory, define, frozen

from tests.real.calling import ask
from tests.real.calls import Answer
from tests.real.cutting import Cut, Cuts, How, Sent
from tests.real.engines import Engine
from tests.real.requests import CHAT, TEXT, Object, chat, completion
from tests.real.told import Told, told, told_by

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
HELD_MAX = 64
"""Characters that a router may add at a seam: what engines hold back for stop strings."""
EARLY_TOKENS = 16
"""A request that loses two workers before so many tokens is suspected, and moves no more."""
OVERTAKEN_MAX = 4
"""Events that may be lost to a reset that comes right after them."""
NEVER = "said by nobody"
STRICT = ("exact", "restart", "retry", "local", "empty")


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
    return [
        Case(path, prompt, stop, ids, usage)
        for path in (CHAT, TEXT)
        for prompt in PROMPTS
        for stop in STOPS
        for ids in (False, True)
        for usage in (True, False)
        if not (ids and path == CHAT and "sglang" in kinds)
    ]


class Verdict(Enum):
    """What became of a stream that was broken."""

    IDENTICAL = "identical"
    OTHER_TAIL = "other tail"
    FAILED = "failed visibly"
    ENGINE = "engine's own"
    WRONG = "wrong"


@frozen
class Break:
    """One break of one stream, judged."""

    pair: str
    endpoint: str
    mode: str
    verdict: Verdict
    gap_seconds: float | None = None
    detail: str = ""
    #: What ended the first attempt.
    how: str = "cut"


class Moved(msgspec.Struct):
    """The router's line for a move, or for a request at its end."""

    event: str
    id: str = ""
    worker: str | None = None
    mode: str = ""
    tokens: int = 0
    gap_seconds: float = 0.0


_LINE = msgspec.json.Decoder(Moved)


def moves_in(log: Path) -> dict[str, list[Moved]]:
    """All moves that a router's log tells of, by request id."""
    found: dict[str, list[Moved]] = {}
    for line in log.read_bytes().splitlines():
        if b'"moved"' in line:
            moved = _LINE.decode(line)
            found.setdefault(moved.id, []).append(moved)
    return found


def last_workers_in(log: Path) -> dict[str, str | None]:
    """Where each request ended, by its id."""
    lines = (line for line in log.read_bytes().splitlines() if b'"request"' in line)
    return {each.id: each.worker for each in map(_LINE.decode, lines)}


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
        return _parts_of(text, 5 if case.stop == "middle" else 24)

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


#### judging


@define(eq=False)
class Judge:
    """Compares what clients were told with the right answers."""

    references: References
    cuts: Cuts
    moves: dict[str, list[Moved]]

    async def judge(self, outcome: Outcome) -> list[Break]:
        """One verdict for each of the breaks; none where the stream was over before its cut."""
        sent = self.cuts.sent[outcome.id]
        broken = [each for each in sent if each.was_cut]
        if not broken:
            return []
        case, moves = outcome.plan.case, self.moves.get(outcome.id, [])
        got = told_by(outcome.answer)
        ways = _ways(sent, moves, is_good=got.is_good)
        modes = {mode for mode, _ in ways}
        kinds = [each.engine.kind for each in sent]
        is_strict = modes <= set(STRICT) and (len(set(kinds)) == 1 or case.stop == "none")
        right = await self.references.right(sent[0].engine, case)
        verdict, detail = _compare(got, right, outcome, sent, is_strict=is_strict)
        if is_strict and verdict is Verdict.WRONG and await self._is_the_engines(case, sent, moves):
            verdict = Verdict.ENGINE
        if verdict is not Verdict.IDENTICAL:
            detail = f"{detail}\n{describe(outcome, sent, moves, right, got)}"
        pair = f"{kinds[0]} → {kinds[-1] if len(kinds) > 1 else '(nobody)'}"
        return [
            Break(pair, case.endpoint, mode, verdict, _gap(move), detail) for mode, move in ways
        ]

    async def _is_the_engines(self, case: Case, sent: list[Sent], moves: list[Moved]) -> bool:
        """Whether a continuation, sent directly, leaves the right answer as well."""
        whole = await self.references.whole(sent[0].engine, case)
        resumed = [each for each in sent[1:] if told(_data(each)).text]
        for attempt, move in zip(reversed(resumed), reversed(moves), strict=False):
            direct = await self.references.direct(attempt.engine, attempt.path, attempt.body)
            if direct.ids is not None and whole.ids is not None:
                rest = whole.ids[move.tokens :]
                length = min(len(rest), len(direct.ids))
                if direct.ids[:length] != rest[:length]:
                    return True
            elif direct.text.rstrip("\ufffd") not in whole.text:
                return True
        return False


def _ways(
    sent: Sequence[Sent], moves: Sequence[Moved], *, is_good: bool
) -> list[tuple[str, Moved | None]]:
    """How the stream went on after each of its breaks, and the router's word for it.

    The router tells of a move when it has brought content. An attempt after one that had brought
    nothing at all is a retry, and no move.
    """
    waiting: list[Moved] = list(moves)
    ways: list[tuple[str, Moved | None]] = []
    for place, attempt in enumerate(sent):
        if not attempt.was_cut:
            continue
        following = sent[place + 1 : place + 2]
        if not following:
            ways.append(("local" if is_good else "none", None))
        elif not _is_released(sent[: place + 1]) and len(waiting) < len(sent) - place - 1:
            ways.append(("retry", None))
        elif not waiting:
            ways.append(("empty" if is_good else "none", None))
        elif told(_data(following[0])).text:
            ways.append((waiting[0].mode, waiting.pop(0)))
        else:
            ways.append((waiting[0].mode, None))
    return ways


def _gap(move: Moved | None) -> float | None:
    return None if move is None else move.gap_seconds


def _is_released(sent: Sequence[Sent]) -> bool:
    return any(each.received for each in sent)


def _data(sent: Sent) -> list[bytes]:
    return [each.removeprefix(b"data: ") for each in sent.events()]


def _compare(
    got: Told, right: Told, outcome: Outcome, sent: list[Sent], *, is_strict: bool
) -> tuple[Verdict, str]:
    case = outcome.plan.case
    if got.faults:
        return Verdict.WRONG, "; ".join(got.faults)
    if not case.ids and (got.ids is not None or got.prompt_ids is not None):
        return Verdict.WRONG, "ids that nobody asked for"
    if not got.is_good:
        is_visible = got.error is not None or not outcome.answer.whole
        if is_visible and right.text.startswith(got.text):
            return Verdict.FAILED, got.error or "cut"
        return Verdict.WRONG, "a failure that lost or changed text, or nobody sees"
    is_one_kind = len({each.engine.kind for each in sent}) == 1
    if got == right or (not is_one_kind and got.without_stop() == right.without_stop()):
        return Verdict.IDENTICAL, ""
    if is_strict:
        return Verdict.WRONG, "not the right answer"
    if (fault := _fault_at_seams(got, right, case, sent)) is not None:
        return Verdict.WRONG, fault
    return Verdict.OTHER_TAIL, ""


def _fault_at_seams(got: Told, right: Told, case: Case, sent: list[Sent]) -> str | None:
    """What is lost, doubled or changed where the text of one worker ends and another's begins."""
    place = 0
    for number, attempt in enumerate(sent):
        is_stopped = attempt is sent[-1] and got.finish == "stop"
        found = next(
            (
                (at, part)
                for part in _parts(attempt)
                for at in range(place, place + (HELD_MAX if number else 1))
                if got.text.startswith(part, at) or (is_stopped and part.startswith(got.text[at:]))
            ),
            None,
        )
        if found is None:
            return f"the text of attempt {number} is not where it belongs"
        if number == 1 and got.text[place : found[0]] != right.text[place : found[0]]:
            return "text was added at the seam"
        place = found[0] + len(found[1])
    if got.text[place:]:
        return "text that no worker sent"
    if case.usage and (got.usage is None or right.usage is None or got.usage[0] != right.usage[0]):
        return "usage of another prompt"
    if got.usage is not None and got.usage[1] > case.tokens:
        return "more tokens than were asked for"
    if case.ids and got.usage is not None and len(got.ids or ()) != got.usage[1]:
        return f"{len(got.ids or ())} ids, but usage says {got.usage[1]}"
    return None


def _parts(attempt: Sent) -> list[str]:
    """What may have arrived of its text: a reset can overtake the last of it."""
    data = _data(attempt)
    lost = OVERTAKEN_MAX if attempt.cut is How.RESET else 0
    return [told(data[: len(data) - number]).text for number in range(min(lost, len(data)) + 1)]


def describe(
    outcome: Outcome, sent: Sequence[Sent], moves: Sequence[Moved], right: Told, got: Told
) -> str:
    """All that is needed to see what went wrong."""
    lines = [f"{outcome.id}: {outcome.plan}", f"right {right}", f"got   {got}"]
    lines += [f"moved {each}" for each in moves]
    for each in sent:
        lines += [f"sent to {each.engine.kind}: {each.body.decode()}"]
        lines += [f"   {event.decode()}" for event in each.events()[-6 if each.was_cut else -60 :]]
    lines += ["client read:", *(f"   {event.decode()}" for event in outcome.answer.events())]
    return "\n".join(lines)


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
