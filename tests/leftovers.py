"""A router whose deadlines are all short, and what must not be left of it afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from router.app import App
from router.config import Settings
from router.logs import LineWriter
from router.wires.http import Pool
from router.workerspec import WorkerSpec


@define(eq=False)
class Lines(LineWriter):
    """Keeps the log lines instead of writing them."""

    lines: list[bytes] = field(factory=list)

    def write(self, line: bytes) -> None:
        self.lines.append(line)

    @property
    def bugs(self) -> list[bytes]:
        """Lines that tell of a bug of ours."""
        return [line for line in self.lines if b"internal_error" in line or b"crashed" in line]


def hurried(urls: Sequence[str], *, port: int, places: int, second: float = 1.0) -> Settings:
    """Settings by which every deadline and every limit will be met."""
    return Settings(
        port=port,
        worker_urls=tuple(WorkerSpec.parse(f"{url},id=w{i}") for i, url in enumerate(urls)),
        request_max_retries=2,
        connect_timeout_secs=5 * second,
        first_token_timeout_secs=8 * second,
        stream_idle_timeout_secs=8 * second,
        request_timeout_secs=25 * second,
        client_stall_timeout_secs=10 * second,
        header_timeout_secs=5 * second,
        keep_alive_timeout_secs=15 * second,
        max_concurrent_requests=places,
        queue_size=2 * places,
        queue_timeout_secs=10 * second,
        breaker_failure_threshold=1,
        breaker_cooldown_secs=3 * second,
        health_check_interval_secs=30.0,
    )


def left_of(app: App) -> dict[str, int]:
    """What is still held, by name; nothing should be, but idle connections to workers."""
    workers = app.fleet.all()
    pools = [line for worker in workers if isinstance(line := app.line(worker), Pool)]
    idle = sum(len(pool.idle) for pool in pools)
    held = {
        "live requests": len(app.serving.live),
        "places": len(app.serving.admission.holding) + len(app.serving.admission.waiting),
        "legs": sum(worker.inflight for worker in workers),
        "permits": sum(worker.breaker.probe is not None for worker in workers),
        "connections": app.reactor.statistics()["channels"] - idle,
    }
    return {name: count for name, count in held.items() if count}
