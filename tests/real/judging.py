"""Whether a client whose stream was broken was told the right thing.

The right answer is what the first engine says when it is asked directly and not interrupted. A
stream that moved in a way that promises the same tokens has to tell exactly that. Where only the
text was carried, or where engines differ in how they look for stop strings, what was delivered has
to stay and to be continued without a gap or an overlap, and the rest may be another.
"""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path

import msgspec
from attrs import define, evolve, frozen

from tests.real.cutting import Cuts, How, Sent
from tests.real.moves import Case, Outcome, References
from tests.real.told import Told, told, told_by

HELD_MAX = 64
"""Characters that a router may add at a seam: what engines hold back for stop strings."""
AFTER_TEXT = "after text"
STRICT = ("exact", "restart", "retry", "local", "empty")
OVERTAKEN_MAX = 4
"""Events that may be lost to a reset that comes right after them."""


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

    What comes after a move in text mode can at most be what that move promised, so it is counted
    by itself.

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
    first = next((at for at, (mode, _) in enumerate(ways) if mode == "text"), len(ways))
    return [(AFTER_TEXT if at > first else mode, move) for at, (mode, move) in enumerate(ways)]


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
    if _lacks_usage_only(got, right, case, sent):
        return Verdict.OTHER_TAIL, "usage that only the engine knew"
    if is_strict:
        return Verdict.WRONG, "not the right answer"
    if (fault := _fault_at_seams(got, right, case, sent)) is not None:
        return Verdict.WRONG, fault
    return Verdict.OTHER_TAIL, ""


def _lacks_usage_only(got: Told, right: Told, case: Case, sent: list[Sent]) -> bool:
    """SGLang's chat is cut between a stop string's finish and the usage, which is then left out.

    Tokens of a stop string may have come without a chunk, so that nobody can count them.
    """
    is_lost = sent[-1].engine.kind == "sglang" and case.endpoint == "chat" and sent[-1].was_cut
    return is_lost and isinstance(right.stop, str) and got == evolve(right, usage=None)


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
