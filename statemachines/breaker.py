"""The breaker of one worker: what its own requests say about it.

Only the end of a leg is a verdict. A 4xx, a 429, a 503 and a leg that we closed are neutral: they
neither count as a failure nor end a row of failures, and a probe that ends so has only given its
permit back. A permit taken before the last move of the breaker is told as the plain fact
(`succeeded`, `failed`, `said_nothing`), whatever it was when it was taken, and to a breaker that is
closed by then not at all: what an older request met says nothing about the worker as it is now.
"""

from enum import StrEnum

from statemachines.chart import Chart, Edge, each

__all__ = ["BREAKER", "BreakerState"]


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


S = BreakerState

# fmt: off
BREAKER = Chart(
    name="breaker",
    initial=S.CLOSED,
    final=(),
    compiled=True,
    states={
        S.CLOSED: "closed: the worker is trusted",
        S.OPEN: "open: the worker failed too often and is left alone until its cooldown is over",
        S.HALF_OPEN: "half open: one request at a time finds out whether the worker is back",
    },
    facts={
        "succeeded": "a leg ended well",
        "failed": "a leg ended by the worker's fault",
        "said_nothing": "a leg ended neutral: 4xx, 429, 503, or closed by us",
        "cooled_down": "the cooldown is over and a request asks for a permit: it is the probe",
        "probe_succeeded": "the leg of the probe ended well",
        "probe_failed": "the leg of the probe ended by the worker's fault",
        "probe_said_nothing": "the leg of the probe ended neutral",
        "forced_succeeded": "a leg that was sent anyway, all breakers being open, ended well",
    },
    guards={
        "trips": "this and the failures before it, with no success between, reach the threshold",
    },
    scopes={"probation": (S.HALF_OPEN,)},
    rows=(
        Edge(S.CLOSED, "succeeded", S.CLOSED,
             "a row of failures, if there was one, is over"),
        Edge(S.CLOSED, "failed", S.OPEN, guard="trips",
             why="too many failures in a row: left alone for the first cooldown"),
        Edge(S.CLOSED, "failed", S.CLOSED,
             "not enough failures in a row yet"),
        Edge(S.CLOSED, "said_nothing", S.CLOSED,
             "the row of failures neither grows nor ends"),

        Edge(S.OPEN, "cooled_down", S.HALF_OPEN,
             "one request may find out whether the worker is back"),
        Edge(S.OPEN, "forced_succeeded", S.CLOSED,
             "there was nobody else to ask, and it worked: no better proof is to be had"),
        *each(S.OPEN, ("succeeded", "failed", "said_nothing"), S.OPEN,
              "begun before it opened, or sent anyway in vain: the cooldown stays as it is"),

        Edge(S.HALF_OPEN, "probe_succeeded", S.CLOSED,
             "the worker is back; the next cooldown starts small again"),
        Edge(S.HALF_OPEN, "probe_failed", S.OPEN,
             "not yet: left alone twice as long, up to the maximum"),
        Edge(S.HALF_OPEN, "probe_said_nothing", S.HALF_OPEN,
             "the permit is back and nothing was learned: the next request is the probe"),
        Edge(S.HALF_OPEN, "forced_succeeded", S.CLOSED,
             "sent anyway while the probe was out, and faster than it"),
        *each(S.HALF_OPEN, ("succeeded", "failed", "said_nothing"), S.HALF_OPEN,
              "begun before it opened, or sent anyway in vain: only the probe decides"),
    ),
)
