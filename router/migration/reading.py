"""Single values of a request, read as leniently as the engines read them.

vLLM and SGLang validate in pydantic's lax mode: "20" and 20.0 are 20, "true" and 1 are true. A
value that even this does not explain raises `Unreadable`; guessing what an engine made of it would
be guessing what was asked.
"""

from __future__ import annotations

import msgspec

from router.migration.splice import Members

_ANY = msgspec.json.Decoder()
_TRUE = frozenset({"true", "1", "yes", "on", "t", "y"})
_FALSE = frozenset({"false", "0", "no", "off", "f", "n"})


class Unreadable(ValueError):
    """A member has a form that nobody defined."""


def is_given(members: Members, name: str) -> bool:
    """Whether a member is there and not null."""
    value = members.get(name)
    return value is not None and bytes(value) != b"null"


def value_of(members: Members, name: str) -> object:
    """The decoded value; None when it is absent or null. Raises Unreadable."""
    raw = members.get(name)
    if raw is None:
        return None
    try:
        value: object = _ANY.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unreadable(name) from error
    return value


def integer_of(members: Members, name: str) -> int | None:
    """A whole number; None when it is absent or null. Raises Unreadable."""
    value = value_of(members, name)
    if value is None:
        return None
    if isinstance(value, str | float):
        try:
            number = float(value)
            if number != int(number):
                raise Unreadable(name)
            return int(number)
        except (ValueError, OverflowError) as error:
            raise Unreadable(name) from error
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unreadable(name)
    return value


def flag_of(members: Members, name: str, default: bool | None = None) -> bool | None:
    """A truth value; the default when it is absent or null. Raises Unreadable."""
    value = value_of(members, name)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise Unreadable(name)


def texts_of(members: Members, name: str) -> tuple[str, ...]:
    """A string or a list of strings; empty when it is absent or null. Raises Unreadable."""
    value = value_of(members, name)
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise Unreadable(name)


def ids_of(members: Members, name: str) -> tuple[int, ...]:
    """A list of token ids; empty when it is absent or null. Raises Unreadable."""
    value = value_of(members, name)
    if value is None:
        return ()
    if isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    raise Unreadable(name)


def object_of(members: Members, name: str) -> Members:
    """A nested object's members; none when it is absent or null. Raises Unreadable."""
    if not is_given(members, name):
        return {}
    try:
        return msgspec.json.decode(members[name], type=Members)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unreadable(name) from error
