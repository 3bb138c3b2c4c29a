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
    "BREAKER",
    "CHARTS",
    "HANDBACK",
    "LEG",
    "REQUEST",
    "ROUTER",
    "WORKER",
    "Chart",
    "Edge",
    "IllegalTransition",
    "MalformedChart",
    "Subject",
]

#: Every chart, in the order in which they are drawn and listed.
CHARTS: tuple[Chart, ...] = (REQUEST, LEG, WORKER, BREAKER, ROUTER, HANDBACK)
