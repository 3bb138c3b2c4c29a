"""The cases, by what goes wrong. `CASES` is all of them, in the order of a matrix."""

from router.conform.case import CASES as _ENTERED
from router.conform.case import Case

# Each enters its cases when it is imported; the order is that of a matrix.
from router.conform.cases import leaving  # isort: skip
from router.conform.cases import deaths  # isort: skip
from router.conform.cases import blame  # isort: skip
from router.conform.cases import relaying  # isort: skip
from router.conform.cases import answers  # isort: skip
from router.conform.cases import fleet  # isort: skip
from router.conform.cases import pairs  # isort: skip

__all__ = [
    "CASES",
    "LEFT_OUT",
    "answers",
    "blame",
    "deaths",
    "fleet",
    "leaving",
    "pairs",
    "relaying",
]

CASES: tuple[Case, ...] = tuple(_ENTERED)

LEFT_OUT = {
    "C4": "engines of today notice a closed connection, and the simulated ones do, too",
    "C7": "which leg of a pair time is booked on shows only in a router's own metrics",
    "C10": "needs a fleet that changes between choosing and connecting, not static URLs",
    "C12": "the gauge of requests in flight has another name in every router",
    "C17": "needs a discovery to go stale",
    "C18": "memory without bound takes hours to tell from memory with a generous one",
    "C31": "which engine metrics a router believes differs from router to router",
    "C33": "needs KV events",
}
"""Complaints that are not tried from outside, and why."""
