"""One worker as the router sees it: may it be given requests, and is it still there.

The probe loop reports every probe; how many in a row it takes is a threshold behind a guard. What
its requests experience belongs to the breaker, not here: a worker can be ready and not trusted.
"""

from enum import StrEnum

from statemachines.chart import Chart, Edge, everywhere

__all__ = ["WORKER", "WorkerState"]


class WorkerState(StrEnum):
    PROBING = "probing"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    GONE = "gone"


S = WorkerState

# fmt: off
WORKER = Chart(
    name="worker",
    initial=S.PROBING,
    final=(S.GONE,),
    states={
        S.PROBING: "not known to be able to serve yet; it gets no requests",
        S.READY: "passing its probes; it gets requests",
        S.UNHEALTHY: "failing its probes after having been ready; it gets no requests",
        S.DRAINING: "asked to stop; it gets no new requests, and keeps those it has",
        S.GONE: "removed",
    },
    facts={
        "probe_passed": "the health endpoint answered 200 in time",
        "probe_failed": "the health endpoint refused, timed out or answered something else",
        "drain_asked": "somebody, or the worker itself, wants it to get no new requests",
        "drain_cancelled": "it is asked to serve again",
        "removed": "taken out by the API, or its registration ran out",
    },
    guards={
        "passed_enough": "this and the probes before it passed --health-success-threshold in a row",
        "failed_enough": "this and the probes before it failed --health-failure-threshold in a row",
    },
    scopes={
        "probed": (S.PROBING, S.READY, S.UNHEALTHY, S.DRAINING),
    },
    rows=(
        Edge(S.PROBING, "probe_passed", S.READY,
             "nothing is held against it, so the first passed probe is enough"),
        Edge(S.PROBING, "probe_failed", S.PROBING,
             "it may still be loading its model; one that never passed is not called unhealthy"),

        Edge(S.READY, "probe_failed", S.UNHEALTHY, guard="failed_enough",
             why="one lost probe proves nothing, this many in a row do"),
        Edge(S.READY, "probe_failed", S.READY,
             "not enough failures in a row yet"),
        Edge(S.READY, "probe_passed", S.READY,
             "a row of failures, if there was one, is over"),

        Edge(S.UNHEALTHY, "probe_passed", S.READY, guard="passed_enough",
             why="it has come back, and stayed long enough to be believed"),
        Edge(S.UNHEALTHY, "probe_passed", S.UNHEALTHY,
             "not enough passes in a row yet; it failed before"),
        Edge(S.UNHEALTHY, "probe_failed", S.UNHEALTHY,
             "a row of passes, if there was one, is over"),

        Edge(S.PROBING, "drain_asked", S.DRAINING,
             "it will get no requests, whatever its probes say"),
        Edge(S.READY, "drain_asked", S.DRAINING,
             "no new requests; those it has run on until the window ends"),
        Edge(S.UNHEALTHY, "drain_asked", S.DRAINING,
             "it will get no requests, even if it comes back"),
        Edge(S.DRAINING, "drain_asked", S.DRAINING,
             "asked again: the new window replaces the old one"),
        Edge(S.DRAINING, "probe_passed", S.DRAINING,
             "a draining worker is healthy and still gets nothing"),
        Edge(S.DRAINING, "probe_failed", S.DRAINING,
             "many answer 503 while they drain"),
        Edge(S.DRAINING, "drain_cancelled", S.PROBING,
             "it serves again as soon as it passes a probe"),

        everywhere("removed", S.GONE,
                   "its probes stop; requests it still has run to their end"),
    ),
)
