"""How many generations one request asks for.

Pure. What a client writes there is a number or a list that costs it a few bytes; whoever makes
something for each generation must know first how many there are. So they are counted where they
stand, without an object for each, and no further than the most that may be asked for.
"""

from __future__ import annotations

import re
from itertools import islice

import msgspec

#: Generations that one request may ask for where the router makes something for each of them.
WIDTH_MAX = 4096
_IS_SEVERAL = re.compile(rb'\[\s*["\[]').match
#: One text, or one list of ids, in a list whose JSON is known to be valid.
_PROMPTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"|\[[^\[\]]*+\]', re.DOTALL).finditer


class _Width(msgspec.Struct, gc=False):
    n: int | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()


_WIDTH = msgspec.json.Decoder(_Width)


def choices_asked(body: bytes, route: str) -> int:
    """How many choices the whole answer to this request has; 1 where that cannot be read.

    `route` is its label: what is no prompt there is passed over, as engines do.
    """
    try:
        asked = _WIDTH.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return 1
    fields = {"completions": (asked.prompt,), "generate": (asked.text, asked.input_ids)}
    return max(map(prompts_in, fields.get(route, ())), default=1) * (asked.n or 1)


def prompts_in(field: msgspec.Raw) -> int:
    """A list of texts or of lists of ids is several prompts; a list of ids is one.

    More than `WIDTH_MAX` are not counted further.
    """
    text = bytes(field)
    if _IS_SEVERAL(text) is None:
        return 1
    return sum(1 for _ in islice(_PROMPTS(text, 1), WIDTH_MAX + 1))
