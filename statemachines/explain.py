"""What a promise means, by example: the shortest path on which it is put to the test.

Of what *sometimes* holds the path leads to a world in which it does. What *always* holds is put to
the test where the change of a single thing about the world, to a value that it could have, would
break it; a promise without such a world promises nothing. What *eventually* comes true is shown
where it does so: soonest after something that it follows, or as far from the start as it can. That
things end is shown by the furthest end.
"""

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import attrs
from attrs import frozen

from statemachines.eventually import Due, evasion, example
from statemachines.explore import Model, Path, path_lines, path_on
from statemachines.graph import EndsFirst, Graph

__all__ = ["Ambiguous", "explain", "explain_all", "explanations"]

W = TypeVar("W", bound=Hashable)


class Ambiguous(Exception):
    """Not one promise is meant; `promises` are those that could be, by model.

    `fits`: they have the words; else none has, and these are all.
    """

    def __init__(self, promises: Mapping[str, list[str]], *, fits: bool) -> None:
        super().__init__()
        self.promises = promises
        self.fits = fits


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
        listed = {name: promises for name, promises in chosen.items() if promises}
        raise Ambiguous(listed, fits=bool(sentences))
    (sentence,) = sentences
    return "\n\n".join(explain(model, sentence) for model in models if sentence in model.promises)


def _meant(model: Model[Any], words: str) -> Iterator[str]:
    return (promise for promise in model.promises if words.lower() in promise.lower())


def _is_same(promise: str, words: str) -> bool:
    whole = promise.lower()
    bare = whole.removeprefix("sometimes ").removeprefix("eventually ")
    return words.lower() in (whole, bare)


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
    elif promise in model.dues:
        text, path = _of_eventually(walk, model.dues[promise])
    else:
        text, path = _of_all(walk)
    return "\n".join([f"{model.name}: {promise}", f"  {text}", *(path and ["", *path_lines(path)])])


def _of_sometimes(walk: "_Walk[W]", holds: Callable[[W], bool]) -> tuple[str, Path]:
    for number, world in enumerate(walk.worlds):
        if holds(world):
            path = walk.path(number)
            return f"The shortest way there, {_steps(path)}:", path
    return "It never does: this promise is broken.", ()


def _of_always(walk: "_Walk[W]", holds: Callable[[W], bool]) -> tuple[str, Path]:
    for number, world in enumerate(walk.worlds):
        if not holds(world):
            path = walk.path(number)
            return f"It does not hold after {_steps(path)}:", path
    # Where everything begins most promises are easy to keep.
    starts = walk.graph.starts
    for number in (*range(len(starts), len(walk.worlds)), *starts):
        world = walk.worlds[number]
        (names,) = _read_by(holds, world)
        for change, changed in walk.neighbours(world, names):
            if _breaks(holds, changed):
                path = walk.path(number)
                return f"Put to the test after {_steps(path)}; {change}", path
    return NEVER, ()


def _of_between(walk: "_Walk[W]", fits: Callable[[W, str, W], bool]) -> tuple[str, Path]:
    for number, word, after in walk.steps:
        if not fits(walk.worlds[number], word, after):
            path = walk.path(number, (word, after))
            return f"It does not hold after {_steps(path)}:", path
    for number, word, after in walk.steps:
        world = walk.worlds[number]
        names, names_after = _read_by(lambda w, a, said=word: fits(w, said, a), world, after)
        for change, changed in walk.neighbours(after, names_after):
            if _breaks(fits, world, word, changed):
                path = walk.path(number, (word, after))
                return f"Put to the test by the last of {_steps(path)}; {change}", path
        for change, changed in walk.neighbours(world, names):
            if _breaks(fits, changed, word, after):
                path = walk.path(number, (word, after))
                return f"Put to the test by the last of {_steps(path)}; before it, {change}", path
    return NEVER, ()


def _of_eventually(walk: "_Walk[W]", due: Due[W]) -> tuple[str, Path]:
    graph = walk.graph
    if (evaded := evasion(graph, due, walk.ends_first)) is not None:
        path = path_on(walk.model, graph, evaded.way)
        how = "the last world comes back" if evaded.comes_back else "there it ends"
        return f"It does not come true in {_steps(path)}, and {how}:", path
    if (found := example(graph, due)) is None:
        return NEVER_DUE, ()
    way, since = found
    path = path_on(walk.model, graph, way)
    if due.since is None:
        return f"It comes true with the last of {_steps(path)}, as late as it can:", path
    return f"Due since step {since}, it comes true with the last of {_steps(path)}:", path


def _of_all(walk: "_Walk[W]") -> tuple[str, Path]:
    ends = [number for number, world in enumerate(walk.worlds) if walk.model.is_over(world)]
    if not ends:
        return "Nothing in this model is ever over.", ()
    path = walk.path(ends[-1])
    text = f"{len(walk.worlds):,} worlds, {len(ends):,} of them ends. The furthest one, "
    return f"{text}{_steps(path)}:", path


NEVER_DUE = "It is never due: it promises nothing."
NEVER = "No change of a single thing in any world would break it: it promises nothing."


@frozen
class _Change:
    """One thing about a world, and what it could be instead."""

    name: str
    value: object
    other: object

    def __str__(self) -> str:
        return (
            f"it would break if `{self.name}` were {_said(self.other)} and not {_said(self.value)}:"
        )


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
        elif isinstance(value, bool):
            found.update({True: None, False: None})
        elif isinstance(value, int):
            found.update({value - 1: None, value + 1: None})
    return found


class _Part(Protocol):
    """One of several things alike that a world has, as a named tuple."""

    def _asdict(self) -> dict[str, Hashable]: ...
    def _replace(self, **changes: object) -> Self: ...


def _things(world: object) -> Iterator[tuple[str, Hashable]]:
    """What a world is made of, by name; one that is no class has no names."""
    kind: type = type(world)
    if attrs.has(kind):
        for each in attrs.fields(kind):
            yield each.name, getattr(world, each.name)


class _Read:
    """A world that remembers what was looked at: nothing else about it can matter."""

    def __init__(self, world: object) -> None:
        self._world = world
        self._names: set[str] = set()

    def __getattr__(self, name: str) -> object:
        asked = getattr(type(self._world), name, None)
        if isinstance(asked, property) and asked.fget is not None:
            return asked.fget(self)
        self._names.add(name)
        return getattr(self._world, name)


def _read_by(holds: Callable[..., bool], *worlds: object) -> list[Container[str]]:
    """What the promise looks at of each of these worlds to judge them."""
    read = [_Read(world) for world in worlds]
    try:
        holds(*read)
    except Exception:  # it looks at them as a whole
        return [[name for name, _ in _things(world)] for world in worlds]
    return [each._names for each in read]


def _parts(value: object) -> Sequence[_Part]:
    is_several = isinstance(value, tuple) and all(hasattr(each, "_asdict") for each in value)
    # What a named tuple has, the type checker does not see through `hasattr`.
    return cast(Sequence[_Part], value) if is_several else ()


class _Walk(Generic[W]):
    """All worlds, nearest first, and how each is reached."""

    def __init__(self, model: Model[W]) -> None:
        self.model = model
        self.graph = Graph(model.starts, model.steps).complete()
        self.worlds = self.graph.worlds
        self._values = self._seen_values()

    @cached_property
    def ends_first(self) -> EndsFirst:
        return self.graph.ends_first()

    def _seen_values(self) -> dict[str, list[object]]:
        """What each thing about a world is somewhere, by its name; parts of lists by theirs."""
        seen: dict[str, dict[object, None]] = {}
        for world in self.worlds:
            for name, value in _things(world):
                seen.setdefault(name, {})[value] = None
                for part in _parts(value):
                    for field, each in part._asdict().items():
                        seen.setdefault(f"{name}.{field}", {})[each] = None
        return {name: list(_with_others(values)) for name, values in seen.items()}

    @cached_property
    def steps(self) -> Sequence[tuple[int, str, W]]:
        """Every step, by the number of the world that it leaves."""
        return [
            (number, word, after)
            for number, world in enumerate(self.worlds)
            for word, after in self.model.steps(world)
        ]

    def neighbours(self, world: W, names: Container[str]) -> Iterator[tuple[_Change, W]]:
        """The world with one of these things changed to what it is somewhere else."""
        things = list(_things(world))
        make: Callable[..., W] = type(world)
        values = [value for _, value in things]
        for place, (name, value) in enumerate(things):
            if name not in names:
                continue
            before, behind = values[:place], values[place + 1 :]
            for change, changed in self._changes(name, value):
                if change.value != change.other:
                    yield change, make(*before, changed, *behind)

    def _changes(self, name: str, value: Hashable) -> Iterator[tuple[_Change, object]]:
        if parts := _parts(value):
            yield from self._changed_parts(name, parts)
        else:
            yield from ((_Change(name, value, other), other) for other in self._values[name])

    def _changed_parts(
        self, name: str, parts: Sequence[_Part]
    ) -> Iterator[tuple[_Change, tuple[_Part, ...]]]:
        """One thing about one of several alike."""
        for place, part in enumerate(parts):
            before, behind = tuple(parts[:place]), tuple(parts[place + 1 :])
            for field, value in part._asdict().items():
                for other in self._values[f"{name}.{field}"]:
                    change = _Change(f"{name}[{place}].{field}", value, other)
                    yield change, (*before, part._replace(**{field: other}), *behind)

    def path(self, number: int, step: tuple[str, W] | None = None) -> Path:
        """How the world is reached, and one more step if there is one."""
        path = path_on(self.model, self.graph, self.graph.way_to(number))
        return path if step is None else (*path, (step[0], self.model.columns(step[1])))
