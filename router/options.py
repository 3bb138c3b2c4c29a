"""Options declared once: an attrs class whose fields say how they are typed in.

Each field carries an `Option`; the flag, the environment name, the TOML key, the line of
`--help`, the row in docs/configuration.md and the line of `--print-config` all come from it,
so that no two of them can disagree.
Every source is turned into the same thing, a list of words, and there is one parser for words.
Nothing here knows what any option means.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import attrs
from attrs import field, frozen

T = TypeVar("T")

MASK = "********"
"""What `--print-config` shows for a secret; refused when it is read back as a value."""

ENV_PREFIX = "BATON_"

ENV_NOT_OPTIONS = frozenset({"BATON_CONFIG", "BATON_ROUTER_URL"})
"""Variables of ours that are no option of a class: the file itself, and the router that
`baton workers` talks to."""

_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})

_SERVICE_LINK = re.compile(
    r"BATON_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""What Kubernetes puts into every container beside a Service whose name begins with `baton`."""


class SettingsError(ValueError):
    """What somebody typed cannot be used; the message is one line and names where it was typed."""


class Kind(ABC, Generic[T]):
    """How one value is written, read and checked."""

    several = False
    """Takes any number of words: whitespace in the environment, an array in TOML."""
    stands_alone = False
    """As a flag it needs no word."""
    toml_types: tuple[type, ...] = (str,)
    secret = False
    choices: tuple[str, ...] = ()
    metavar = "TEXT"

    @abstractmethod
    def parse(self, words: Sequence[str]) -> T:
        """Read words (exactly one unless `several`); raise ValueError saying what is expected."""

    @abstractmethod
    def words(self, value: T) -> list[str]:
        """The words that `parse` reads back as `value`."""

    def check(self, value: T) -> None:
        """Raise ValueError where a value of the right type is not allowed."""

    def masked(self, word: str) -> str:
        """The word as `--print-config` and docs may show it."""
        return MASK if self.secret else word


@frozen
class Text(Kind["str | None"]):
    """One word, or nothing."""

    metavar: str = "TEXT"
    secret: bool = False

    def parse(self, words: Sequence[str]) -> str | None:
        self.check(words[0])
        return words[0]

    def words(self, value: str | None) -> list[str]:
        return [] if value is None else [value]

    def check(self, value: str | None) -> None:
        if value is not None:
            check_word(value, self.secret)


@frozen
class Texts(Kind[tuple[str, ...]]):
    """Several words."""

    metavar: str = "TEXT"
    secret: bool = False
    several = True

    def parse(self, words: Sequence[str]) -> tuple[str, ...]:
        self.check(tuple(words))
        return tuple(words)

    def words(self, value: tuple[str, ...]) -> list[str]:
        return list(value)

    def check(self, value: tuple[str, ...]) -> None:
        for word in value:
            check_word(word, self.secret)


@frozen
class Word(Kind[str]):
    """One word that is always there, perhaps out of a closed list."""

    choices: tuple[str, ...] = ()
    metavar: str = "TEXT"

    def parse(self, words: Sequence[str]) -> str:
        self.check(words[0])
        return words[0]

    def words(self, value: str) -> list[str]:
        return [value]

    def check(self, value: str) -> None:
        check_word(value, secret=False)
        if self.choices and value not in self.choices:
            raise ValueError(f"must be one of {', '.join(self.choices)}, not {value!r}")


@frozen
class Whole(Kind[int]):
    """A whole number."""

    minimum: int = 0
    maximum: int = 2**53
    metavar: str = "N"
    toml_types = (int,)

    def parse(self, words: Sequence[str]) -> int:
        try:
            value = int(words[0])
        except ValueError:
            raise ValueError(f"must be a whole number, not {words[0]!r}") from None
        self.check(value)
        return value

    def words(self, value: int) -> list[str]:
        return [str(value)]

    def check(self, value: int) -> None:
        check_between(value, self.minimum, self.maximum)


@frozen
class Seconds(Kind[float]):
    """A length of time; where `positive`, 0 is not allowed."""

    positive: bool = False
    metavar: str = "SECONDS"
    toml_types = (int, float)

    def parse(self, words: Sequence[str]) -> float:
        try:
            value = float(words[0])
        except ValueError:
            raise ValueError(f"must be a number of seconds, not {words[0]!r}") from None
        self.check(value)
        return value

    def words(self, value: float) -> list[str]:
        return [f"{value:g}" if float(f"{value:g}") == value else repr(value)]

    def check(self, value: float) -> None:
        if not math.isfinite(value):
            raise ValueError(f"must be a finite number of seconds, not {value}")
        if value < 0 or (self.positive and value == 0):
            raise ValueError(
                f"must be {'above' if self.positive else 'at least'} 0 seconds, not {value:g}"
            )


@frozen
class Switch(Kind[bool]):
    """On or off; as a flag it stands alone or takes true or false."""

    metavar: str = "BOOL"
    stands_alone = True
    toml_types = (bool,)

    def parse(self, words: Sequence[str]) -> bool:
        meanings = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if words[0].lower() not in meanings:
            raise ValueError(f"must be true or false, not {words[0]!r}")
        return meanings[words[0].lower()]

    def words(self, value: bool) -> list[str]:
        return ["true" if value else "false"]


def check_word(word: str, secret: bool) -> None:
    """Refuse what cannot be meant: nothing, whitespace, control characters, our own mask."""
    shown = "a secret" if secret else repr(word)
    if not word:
        raise ValueError("must not be empty")
    if word == MASK and secret:
        raise ValueError("is the mask that --print-config shows, not the secret itself")
    if not word.isprintable() or any(c.isspace() for c in word):
        raise ValueError(f"must not contain spaces or control characters: {shown}")


def check_between(value: int, minimum: int, maximum: int) -> None:
    if value < minimum:
        raise ValueError(f"must be at least {minimum}, not {value}")
    if value > maximum:
        raise ValueError(f"must be at most {maximum}, not {value}")


@frozen
class Option:
    """One setting under all its names."""

    key: str
    kind: Kind[object]
    default: object
    help: str
    section: str
    aliases: tuple[str, ...] = ()
    addition: bool = False
    """Not in the published contract: may still change its name."""

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.key.upper()

    @property
    def default_text(self) -> str:
        """The default as it would be typed; empty where there is none."""
        return " ".join(self.kind.words(self.default))


def option(
    kind: Kind[T],
    default: T,
    help: str,
    *,
    section: str | None = None,
    aliases: tuple[str, ...] = (),
    addition: bool = False,
) -> T:
    """Declare a field of a settings class; `section` starts a group that goes on until the next."""

    def check(_: object, attribute: attrs.Attribute[T], value: T) -> None:
        try:
            kind.check(value)
        except ValueError as problem:
            raise SettingsError(f"{attribute.name} {problem}") from None

    about = {"kind": kind, "help": help, "section": section}
    about |= {"aliases": aliases, "addition": addition}
    return field(default=default, validator=check, kw_only=True, metadata=about)


def options_of(cls: type[attrs.AttrsInstance]) -> tuple[Option, ...]:
    """The option table of a settings class, in the order of its fields."""
    return tuple(_read_fields(cls))


def _read_fields(cls: type[attrs.AttrsInstance]) -> Iterator[Option]:
    section = ""
    for each in attrs.fields(cls):
        about = each.metadata
        section = about["section"] or section
        yield Option(
            key=each.name,
            kind=about["kind"],
            default=each.default,
            help=about["help"],
            section=section,
            aliases=about["aliases"],
            addition=about["addition"],
        )


# --- the three sources -----------------------------------------------------------------------

Found = dict[str, tuple[str, Sequence[str]]]
"""Key of the option -> (how the source names it, the words found there)."""


def load(
    cls: Callable[..., T],
    table: Sequence[Option],
    *,
    flags: Mapping[str, Sequence[str]],
    env: Mapping[str, str],
    file: str | None,
) -> T:
    """Merge flag over environment over file over default and build `cls` from it.

    Raises SettingsError for anything unknown or unusable, in whichever source it stands.
    """
    by_key = {each.key: each for each in table}
    found: Found = {}
    if file is not None:
        found |= read_file(file, by_key)
    found |= read_env(env, by_key)
    found |= {key: (by_key[key].flag, words) for key, words in flags.items()}
    values: dict[str, object] = {}
    for key, (source, words) in found.items():
        try:
            values[key] = by_key[key].kind.parse(words)
        except ValueError as problem:
            raise SettingsError(f"{source}: {problem}") from None
    return cls(**values)


def read_env(env: Mapping[str, str], by_key: Mapping[str, Option]) -> Found:
    """The options set by `BATON_*` variables; an empty variable counts as not set."""
    found: Found = {}
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name in ENV_NOT_OPTIONS or is_service_link(name, env):
            continue
        each = by_key.get(name.removeprefix(ENV_PREFIX).lower())
        if each is None or each.env != name:
            raise SettingsError(f"{name}: no option has this environment name")
        text = env[name].strip()
        if not text and each.kind.secret:
            # An unset secret in a deployment file must not quietly open the router.
            raise SettingsError(f"{name}: is set but empty")
        if text:
            found[each.key] = (name, text.split() if each.kind.several else [text])
    return found


def bare(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that shall hear its flags only: no settings, no proxies.

    For whatever starts a router of its own, as the demos, `baton conform` and the benchmarks do:
    an admin key or a proxy of the terminal's would shut it off from who started it.
    """
    return {
        name: value
        for name, value in env.items()
        if not name.startswith(ENV_PREFIX) and name.lower() not in _PROXIES
    }


def is_service_link(name: str, env: Mapping[str, str]) -> bool:
    """Was this variable put there by Kubernetes for a Service called baton-something?"""
    if name.endswith("_PORT") and re.match(r"(tcp|udp|sctp)://", env[name]):
        return True
    return _SERVICE_LINK.fullmatch(name) is not None


def read_file(path: str, by_key: Mapping[str, Option]) -> Found:
    """The options set by a TOML file."""
    try:
        with open(path, "rb") as opened:
            content = tomllib.load(opened)
    except OSError as problem:
        raise SettingsError(f"--config {path}: {os.strerror(problem.errno or 0)}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise SettingsError(f"--config {path}: not TOML: {problem}") from problem
    found: Found = {}
    for key, value in content.items():
        source = f"{path}: {key}"
        if key not in by_key:
            raise SettingsError(f"{source}: no option has this key")
        try:
            found[key] = (source, _words_from_toml(value, by_key[key].kind))
        except ValueError as problem:
            raise SettingsError(f"{source}: {problem}") from None
    return found


def _words_from_toml(value: object, kind: Kind[object]) -> list[str]:
    if kind.several:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError("must be an array of strings")
        return [word for each in value for word in each.split()]
    # In TOML true is no number, though in Python bool is an int.
    if type(value) not in kind.toml_types:
        expected = "a string" if str in kind.toml_types else kind.metavar.lower()
        raise ValueError(f"must be {_TOML_NAMES.get(expected, expected)}, not {value!r}")
    return [str(value).lower() if isinstance(value, bool) else str(value)]


_TOML_NAMES = {"n": "a whole number", "seconds": "a number of seconds", "bool": "true or false"}


# --- showing them ----------------------------------------------------------------------------


def to_toml(settings: object, table: Sequence[Option]) -> str:
    """The settings as a TOML file that `--config` reads back, secrets masked."""
    lines: list[str] = []
    section = ""
    for each in table:
        if each.section != section:
            section = each.section
            lines += ["", f"# {section}"]
        words = [each.kind.masked(w) for w in each.kind.words(getattr(settings, each.key))]
        lines.append(_toml_line(each, words))
    return "\n".join(lines).strip() + "\n"


def _toml_line(each: Option, words: Sequence[str]) -> str:
    if each.kind.several:
        return f"{each.key} = [{', '.join(map(_toml_string, words))}]"
    if not words:
        return f"# {each.key} is not set"
    bare = str not in each.kind.toml_types
    return f"{each.key} = {words[0] if bare else _toml_string(words[0])}"


def _toml_string(word: str) -> str:
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
