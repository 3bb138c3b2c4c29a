"""What the log tells an operator, at its usual level, about workers and their breakers.

Only what changes who gets requests: a worker that became ready or ill, one that does not come up,
a breaker that opened or closed. What people have done themselves (added, drained, removed) is told
where they did it, and every single fact at debug by `router.booking`.
"""

from __future__ import annotations

import structlog

from router.breaker import Breaker
from router.worker import Worker
from statemachines import Edge
from statemachines.breaker import BreakerState
from statemachines.worker import WorkerState

_log = structlog.get_logger("baton")


def tell_worker(worker: Worker, edge: Edge) -> None:
    """Listens to a worker."""
    if edge.target is edge.source:
        if edge.fact == "probe_failed" and edge.target is WorkerState.PROBING:
            _tell_slow_start(worker)
    elif edge.target is WorkerState.READY and edge.fact == "probe_passed":
        _log.info("worker", fact="ready", worker=worker.id)
    elif edge.target is WorkerState.UNHEALTHY:
        _log.warning("worker", fact="unhealthy", worker=worker.id, **_met(worker))


def tell_breaker(breaker: Breaker, edge: Edge) -> None:
    """Listens to a breaker, which has the id of its worker."""
    if edge.target is edge.source:
        return
    if edge.target is BreakerState.OPEN:
        _log.warning("breaker", fact="opened", worker=breaker.id, failures=breaker.failures)
    elif edge.target is BreakerState.CLOSED:
        _log.info("breaker", fact="closed", worker=breaker.id)


def _tell_slow_start(worker: Worker) -> None:
    """Once, when a worker that had passed would be called ill: it may be loading, or misnamed."""
    if worker.failures == worker.failure_threshold:
        _log.warning("worker", fact="not_ready", worker=worker.id, **_met(worker))


def _met(worker: Worker) -> dict[str, str | None]:
    """What its last probe met."""
    probe = worker.last_probe
    if probe is None:
        return {}
    return {"probe": probe.outcome.value, "detail": probe.detail or None}
