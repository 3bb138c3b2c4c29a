"""The state machines of Baton as tables, and what can be done with a table.

Pure: nothing here performs I/O, reads a clock or imports the router. A reader starts with
`request`; `chart` says what a row means.
"""

from statemachines.breaker import BREAKER
from statemachines.chart import Chart, Edge, IllegalTransition, MalformedChart, Subject
from statemachines.handback import HANDBACK
from statemachines.leg import LEG
from statemachines.request import REQUEST
from statemachines.router import ROUTER
from statemachines.worker import WORKER

__all__ = [
    "AGENT_CHARTS",
    "BREAKER",
    "CHARTS",
    "HANDBACK",
    "LEG",
    "REQUEST",
    "ROUTER",
    "ROUTER_CHARTS",
    "WORKER",
    "Chart",
    "Edge",
    "IllegalTransition",
    "MalformedChart",
    "Subject",
]

#: What moves in a router, and what moves in the agents beside engines and nowhere else.
ROUTER_CHARTS: tuple[Chart, ...] = (REQUEST, LEG, WORKER, BREAKER, ROUTER)
AGENT_CHARTS: tuple[Chart, ...] = (HANDBACK,)
#: Every chart, in the order in which they are drawn and listed.
CHARTS: tuple[Chart, ...] = (*ROUTER_CHARTS, *AGENT_CHARTS)
