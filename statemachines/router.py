"""The process itself: when it accepts connections, when it admits requests, when it is over."""

from enum import StrEnum

from statemachines.chart import Chart, Edge, everywhere

__all__ = ["ROUTER", "RouterState"]


class RouterState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


S = RouterState

# fmt: off
ROUTER = Chart(
    name="router",
    initial=S.STARTING,
    final=(S.STOPPED,),
    states={
        S.STARTING: "reading its settings and binding its port",
        S.SERVING: "accepting requests",
        S.DRAINING: "refusing new requests with 503 while the running ones may finish",
        S.STOPPED: "over",
    },
    facts={
        "listening": "the port is bound and the address was printed",
        "stop_asked": "SIGTERM or SIGINT",
        "emptied": "the last open request has ended, and the last prefill that outlived its own",
        "window_over": "the drain window ran out",
        "crashed": "an error that the router cannot outlive: port taken, bug in the root",
    },
    scopes={
        "router": (S.STARTING, S.SERVING, S.DRAINING),
        "listening": (S.SERVING, S.DRAINING),
    },
    rows=(
        Edge(S.STARTING, "listening", S.SERVING,
             "requests are accepted; whether one can be served is readiness"),
        Edge(S.STARTING, "stop_asked", S.STOPPED,
             "nothing is running yet"),
        Edge(S.SERVING, "stop_asked", S.DRAINING,
             "readiness turns 503, so that balancers look elsewhere"),
        Edge(S.DRAINING, "emptied", S.STOPPED,
             "nobody was cut"),
        Edge(S.DRAINING, "window_over", S.STOPPED,
             "the requests that are left are told so and cut"),
        Edge(S.DRAINING, "stop_asked", S.STOPPED,
             "a second signal: whoever sent it does not want to wait"),
        everywhere("crashed", S.STOPPED,
                   "everything that lives in the router ends with it"),
    ),
)
