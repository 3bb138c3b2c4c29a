"""Who hears of every transition: the metrics, whoever watches, and the log at debug.

One listener a machine does all three, because the frequent machines call it five times a request.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import define

from router.feed import Feed
from router.logs import HasId, Logs
from router.metrics import Metrics
from statemachines import Edge

Listener = Callable[[HasId, Edge], None]


@define(eq=False)
class Booking:
    """Makes the listeners of one process."""

    metrics: Metrics
    feed: Feed
    logs: Logs

    def listener(self, machine: str) -> Listener:
        """What every subject of this machine is listened to by."""
        taken, watchers = self.metrics.taken(machine), self.feed.watchers
        write = self.logs.transitions(machine)

        def listen(subject: HasId, edge: Edge) -> None:
            taken[id(edge)] += 1
            if watchers:
                self.feed.publish(machine, subject, edge)
            if write is not None:
                write(subject, edge)

        return listen
