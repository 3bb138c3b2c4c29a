"""What a promise means, by example: the shortest path on which it is put to the test.

Of what *sometimes* holds the path leads to a world in which it does. What *always* holds is put to
the test where the change of a single thing about the world, to a value that it could have, would
break it; a promise without such a world promises nothing. That things end is shown by the
longest way to an end, there being no shortcut to it.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Generic, TypeVar

import attrs

from statemachines.explore import Model, Path, path_lines, path_to

__all__ = ["Ambiguous", "explain", "explain_all", "explanations"]

W = TypeVar("W", bound=Hashable)


class Ambiguous(Exception):
    """Not one promise is meant; `promises` are those that could be, by model."""

    def __init__(self, promises: Mapping[str, list[str]]) -> None:
        super().__init__()
        self.promises = promises


def explain_all(models: list[Model[Any]], words: str) -> str:
    """Explain the promise that reads so, or that alone contains these words, in all its models.

    Raises Ambiguous with all promises where none does, and with those that do where several do.
    """
    found = {model.name: list(_meant(model, words)) for model in models}
    sentences = {promise for promises in found.values() for promise in promises}
    if any(_is_same(promise, words) for promise in sentences):
        sentences = {promise for promise in sentences if _is_same(promise, words)}
    if len(sentences) != 1:
        chosen = found if sentences else {model.name: model.promises for model in models}
        raise Ambiguous({name: promises for name, promises in chosen.items() if promises})
    (sentence,) = sentences
    return "\n\n".join(explain(model, sentence) for model in models if sentence in model.promises)


def _meant(model: Model[Any], words: str) -> Iterator[str]:
    return (promise for promise in model.promises if words.lower() in promise.lower())


def _is_same(promise: str, words: str) -> bool:
    return words.lower() in (promise.lower(), promise.lower().removeprefix("sometimes "))


def explain(model: Model[W], promise: str) -> str:
    """The promise, what its example shows, and the example as a table of facts."""
    return _explain(_Walk(model), promise)


def explanations(model: Model[W]) -> dict[str, str]:
    """All promises of a model, explained."""
    walk = _Walk(model)
    return {promise: _explain(walk, promise) for promise in model.promises}


def _explain(walk: "_Walk[W]", promise: str) -> str:
    model = walk.model
    sometimes = promise.removeprefix("sometimes ")
    if promise.startswith("sometimes ") and sometimes in model.sometimes:
        text, path = _of_sometimes(walk, model.sometimes[sometimes])
    elif promise in model.always:
        text, path = _of_always(walk, model.always[promise])
    elif promise in model.between:
        text, path = _of_between(walk, model.between[promise])
    else:
        text, path = _of_all(walk)
    return "\n".join([f"{model.name}: {promise}", f"  {text}", *(path and ["", *path_lines(path)])])


def _of_sometimes(walk: "_Walk[W]", holds: Callable[[W], bool]) -> tuple[str, Path]:
    for world in walk.parents:
        if holds(world):
            path = walk.path(world)
            return f"The shortest way there, {_steps(path)}:", path
    return "It never does: this promise is broken.", ()


def _of_always(walk: "_Walk[W]", holds: Callable[[W], bool]) -> tuple[str, Path]:
    for world in walk.parents:
        if not holds(world):
            path = walk.path(world)
            return f"It does not hold after {_steps(path)}:", path
    # Where everything begins most promises are easy to keep.
    for world in (*list(walk.parents)[len(walk.model.starts) :], *walk.model.starts):
        for name, value, changed in walk.neighbours(world):
            if _breaks(holds, changed):
                path = walk.path(world)
                return f"Put to the test after {_steps(path)}; {_if_only(world, name, value)}", path
    return NEVER, ()


def _of_between(walk: "_Walk[W]", fits: Callable[[W, str, W], bool]) -> tuple[str, Path]:
    steps = [(world, *step) for world in walk.parents for step in walk.model.steps(world)]
    for world, word, after in steps:
        if not fits(world, word, after):
            path = walk.path(world, (word, after))
            return f"It does not hold after {_steps(path)}:", path
    for world, word, after in steps:
        for name, value, changed in walk.neighbours(after):
            if _breaks(fits, world, word, changed):
                path = walk.path(world, (word, after))
                text = f"Put to the test by the last of {_steps(path)}; "
                return text + _if_only(after, name, value), path
        for name, value, changed in walk.neighbours(world):
            if _breaks(fits, changed, word, after):
                path = walk.path(world, (word, after))
                text = f"Put to the test by the last of {_steps(path)}; before it, "
                return text + _if_only(world, name, value), path
    return NEVER, ()


def _of_all(walk: "_Walk[W]") -> tuple[str, Path]:
    ends = [world for world in walk.parents if walk.model.is_over(world)]
    if not ends:
        return "Nothing in this model is ever over.", ()
    path = walk.path(ends[-1])
    text = f"{len(walk.parents):,} worlds, {len(ends):,} of them ends. The furthest one, "
    return f"{text}{_steps(path)}:", path


NEVER = "No change of a single thing in any world would break it: it promises nothing."


def _if_only(world: object, name: str, value: object) -> str:
    return f"it would break if `{name}` were {_said(value)} and not {_said(getattr(world, name))}:"


def _said(value: object) -> str:
    return str(getattr(value, "value", value)) or "empty"


def _steps(path: Path) -> str:
    count = len(path) - 1
    return f"{count} step{'' if count == 1 else 's'}"


def _breaks(holds: Callable[..., bool], *of: object) -> bool:
    try:
        return not holds(*of)
    except Exception:
        return False  # a world that makes no sense judges nothing


def _with_others(seen: Iterable[object]) -> dict[object, None]:
    """Values that were seen, and those beside them: all of an enumeration, one more and one less.

    What a promise forbids is in no world, so seen values alone would leave it untried.
    """
    found = dict.fromkeys(seen)
    for value in list(found):
        if isinstance(value, Enum):
            found.update(dict.fromkeys(type(value)))
        elif isinstance(value, int) and not isinstance(value, bool):
            found.update({value - 1: None, value + 1: None})
    return found


class _Walk(Generic[W]):
    """All worlds, nearest first, and how each is reached."""

    def __init__(self, model: Model[W]) -> None:
        self.model = model
        self.parents: dict[W, tuple[W, str] | None] = dict.fromkeys(model.starts)
        todo = deque(self.parents)
        while todo:
            world = todo.popleft()
            for word, after in model.steps(world):
                if after not in self.parents:
                    self.parents[after] = (world, word)
                    todo.append(after)
        self._values = self._seen_values()

    def _seen_values(self) -> dict[str, list[object]]:
        kind: type = type(next(iter(self.parents)))
        names = [each.name for each in attrs.fields(kind)] if attrs.has(kind) else []
        return {
            name: list(_with_others(getattr(world, name) for world in self.parents))
            for name in names
        }

    def neighbours(self, world: W) -> Iterator[tuple[str, object, W]]:
        """The world with one thing changed to what it is somewhere else."""
        for name, values in self._values.items():
            for value in values:
                if value != getattr(world, name):
                    # Only worlds of attrs have names to change.
                    yield name, value, attrs.evolve(world, **{name: value})  # type: ignore[misc]

    def path(self, world: W, step: tuple[str, W] | None = None) -> Path:
        """How the world is reached, and one more step if there is one."""
        path = path_to(self.model, self.parents, world)
        return path if step is None else (*path, (step[0], self.model.show(step[1])))
