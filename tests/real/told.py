"""What a stream tells its client.

Two streams tell the same if text, ids, finish and usage are the same, however they are cut into
events. What no stream may do, whoever made it (two roles, two finishes, a changing id, ids that
nobody asked for), is a list of faults.
"""

import json
from collections.abc import Iterable, Sequence

from attrs import define, evolve, field, frozen

from tests.real.calls import Answer
from tests.real.requests import Object

_IDENTITY = ("id", "object", "created", "model")
Usage = tuple[int, int, int]


@frozen
class Told:
    """One stream, as far as it came."""

    text: str = ""
    #: None where no event had any.
    ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    finish: str | None = None
    #: The stop string, or what else stopped it.
    stop: str | int | None = None
    usage: Usage | None = None
    #: Text after so many tokens, where every event says how many there were.
    text_at: dict[int, int] = field(factory=dict, eq=False)
    is_done: bool = False
    error: str | None = None
    faults: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """A client takes it for a whole answer."""
        return self.is_done and self.error is None

    def without_stop(self) -> "Told":
        """To compare with engines of another kind, which say otherwise what stopped them."""
        return evolve(self, stop=None)


@define(eq=False)
class _Listening:
    text: str = ""
    ids: list[int] = field(factory=list)
    has_ids: bool = False
    prompt_ids: tuple[int, ...] | None = None
    finish: str | None = None
    stop: str | int | None = None
    usage: Usage | None = None
    text_at: dict[int, int] = field(factory=dict)
    error: str | None = None
    roles: int = 0
    identity: Object | None = None
    faults: list[str] = field(factory=list)

    def hear(self, chunk: Object) -> None:
        error = chunk.get("error")
        if error is not None:
            self.error = json.dumps(error)
            return
        identity: Object = {name: chunk.get(name) for name in _IDENTITY}
        self._check(self.identity in (None, identity), f"identity changed to {identity}")
        self.identity = identity
        if isinstance(ids := chunk.get("prompt_token_ids"), list):
            self._hear_prompt(ids)
        choices = chunk.get("choices")
        assert isinstance(choices, list)
        for choice in choices:
            assert isinstance(choice, dict)
            self._hear_choice(choice)
        if isinstance(usage := chunk.get("usage"), dict):
            self._hear_usage(usage, is_last=not choices)

    def _hear_choice(self, choice: Object) -> None:
        self._check(self.finish is None, "a choice after the finish")
        delta = choice.get("delta")
        holder, name = (delta, "content") if isinstance(delta, dict) else (choice, "text")
        self.roles += "role" in holder and holder["role"] is not None
        self._check(self.roles <= 1, "a second role")
        text = holder.get(name) or ""
        assert isinstance(text, str)
        self.text += text
        if isinstance(ids := choice.get("token_ids"), list):
            self.has_ids = True
            self.ids += [each for each in ids if isinstance(each, int)]
        if isinstance(ids := choice.get("prompt_token_ids"), list):
            self._hear_prompt(ids)
        if isinstance(finish := choice.get("finish_reason"), str):
            self.finish = finish
            stop = choice.get("stop_reason", choice.get("matched_stop"))
            self.stop = stop if isinstance(stop, (str, int)) else None

    def _hear_prompt(self, ids: Sequence[object]) -> None:
        self._check(self.prompt_ids is None, "prompt ids twice")
        self.prompt_ids = tuple(each for each in ids if isinstance(each, int))

    def _hear_usage(self, usage: Object, *, is_last: bool) -> None:
        numbers = [usage.get(f"{name}_tokens") for name in ("prompt", "completion", "total")]
        prompt, completion, total = (each if isinstance(each, int) else -1 for each in numbers)
        if is_last:
            self._check(self.usage is None, "usage twice")
            self.usage = (prompt, completion, total)
        elif completion >= 0:
            self.text_at[completion] = len(self.text)

    def _check(self, is_right: bool, fault: str) -> None:
        if not is_right:
            self.faults.append(fault)


def told(events: Iterable[bytes], *, whole: bool = True) -> Told:
    """What the data of these events tells; `[DONE]` in a body that was cut does not count."""
    listening, is_done, faults = _Listening(), False, []
    for event in events:
        if is_done:
            faults.append("an event after [DONE]")
        elif event == b"[DONE]":
            is_done = True
        else:
            listening.hear(json.loads(event))
    return Told(
        text=listening.text,
        ids=tuple(listening.ids) if listening.has_ids else None,
        prompt_ids=listening.prompt_ids,
        finish=listening.finish,
        stop=listening.stop,
        usage=listening.usage,
        text_at=listening.text_at,
        is_done=is_done and whole,
        error=listening.error,
        faults=(*listening.faults, *faults),
    )


def told_by(answer: Answer) -> Told:
    """What an answer tells, an HTTP error included."""
    if answer.status != 200:
        return Told(error=f"{answer.status}: {answer.body.decode(errors='replace')}")
    return told(answer.events(), whole=answer.whole)
