"""Engines that die while they stream, as they really do, and what becomes of their streams.

No relay stands between router and engine here: the router meets what a dead process leaves behind.
The same engine, started again, says the same, so the right answers are asked once for each kind.
"""

import os
import signal
from collections.abc import Sequence
from enum import Enum

import trio
from attrs import Factory, define, evolve, frozen

from tests.real.calling import ask
from tests.real.calls import Answer
from tests.real.engines import Engine
from tests.real.judging import Break, Moved, Verdict
from tests.real.moves import Case, References
from tests.real.requests import CHAT, TEXT
from tests.real.told import Told, told_by

TOKENS = 600
HEARD_BEFORE = 20
"""Reads of every client before the engine dies."""


class Death(Enum):
    """How an engine dies."""

    SERVER = "server killed"
    CORE = "core killed"
    TERM = "SIGTERM"


@frozen
class Dying:
    """One death: of an engine of one kind, while another of some kind lives."""

    kind: str
    survivor: str
    how: Death

    @property
    def pair(self) -> str:
        return f"{self.kind} → {self.survivor}"


_PAIRS = (("vllm", "vllm"), ("sglang", "sglang"), ("vllm", "sglang"), ("sglang", "vllm"))


def deaths(count: int) -> list[Dying]:
    """So many deaths: every pair first, then every way to die, then again."""
    ways = list(Death)
    found = []
    for number in range(count):
        kind, survivor = _PAIRS[number % len(_PAIRS)]
        found.append(Dying(kind, survivor, ways[(number + number // len(ways)) % len(ways)]))
    return found


def kill(engine: Engine, how: Death) -> None:
    """The end of an engine; what it leaves behind is not cleaned up."""
    if how is Death.CORE:
        engine.signal_core(signal.SIGKILL)
    else:
        number = signal.SIGKILL if how is Death.SERVER else signal.SIGTERM
        os.kill(engine.process.pid, number)


def long_cases(kinds: Sequence[str]) -> list[Case]:
    """Two of each, since the router gives every other stream to the engine that lives."""
    has_chat_ids = "sglang" not in kinds
    cases = [
        Case(CHAT, "def main(", ids=has_chat_ids),
        Case(TEXT, "héllo wörld 你好", ids=True),
        Case(CHAT, "Größe 世界 日本語 жизнь 🙂👍", "never"),
        Case(TEXT, "class Foo", "never"),
    ]
    return [evolve(case, tokens=TOKENS, ignore_eos=True) for case in cases for _ in range(2)]


@define(eq=False)
class Stream:
    """One client of a fleet in which an engine dies."""

    id: str
    case: Case
    heard: int = 0
    #: Enough was read, or there is no more.
    has_begun: trio.Event = Factory(trio.Event)
    answer: Answer = Factory(lambda: Answer(0, {}, b""))

    def hear(self) -> None:
        self.heard += 1
        if self.heard >= HEARD_BEFORE:
            self.has_begun.set()

    async def run(self, port: int, body: bytes) -> None:
        self.answer = await ask(port, self.case.path, body, request_id=self.id, heard=self.hear)
        self.has_begun.set()


async def outlive(
    dying: Engine, how: Death, port: int, streams: Sequence[Stream], references: References
) -> None:
    """Runs all streams to their end; the engine dies when every client has read a little."""
    bodies = [each.case.body(await references.stops(dying, each.case)) for each in streams]
    async with trio.open_nursery() as nursery:
        for stream, body in zip(streams, bodies, strict=True):
            nursery.start_soon(stream.run, port, body)
        for stream in streams:
            await stream.has_begun.wait()
        kill(dying, how)


async def judge_death(
    stream: Stream, death: Dying, first: Engine, references: References, moves: Sequence[Moved]
) -> Break:
    """`first` has been asked for the right answer, also counted, while it lived."""
    case, got = stream.case, told_by(stream.answer)
    right = await references.right(first, case)
    mode = moves[0].mode if moves else "finished there" if got.is_good else "none"
    is_one_kind = death.kind == death.survivor
    is_strict = mode != "text" and (is_one_kind or case.stop == "none")
    verdict = Verdict.WRONG
    if got.faults:
        pass
    elif not got.is_good:
        is_visible = got.error is not None or not stream.answer.whole
        if is_visible and right.text.startswith(got.text):
            verdict = Verdict.FAILED
    elif got.without_stop() == right.without_stop():
        verdict = Verdict.IDENTICAL
    elif not is_strict and await _keeps_what_was_delivered(got, case, first, references, moves[0]):
        verdict = Verdict.OTHER_TAIL
    detail = "" if verdict is Verdict.IDENTICAL else f"{death} {stream.id} {moves}\n{right}\n{got}"
    gap = moves[0].gap_seconds if moves else None
    return Break(death.pair, case.endpoint, mode, verdict, gap, detail, how=death.how.value)


async def _keeps_what_was_delivered(
    got: Told, case: Case, first: Engine, references: References, moved: Moved
) -> bool:
    """The text of the tokens that were carried is where it was."""
    counted = await references.counted(first, case)
    before = counted.text[: counted.text_at.get(moved.tokens, 0)]
    return got.text.startswith(before)
