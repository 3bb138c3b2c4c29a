"""Simulated engines of one process that reach each other's KV caches without sockets."""

from __future__ import annotations

import trio
import trio.testing
from attrs import define, field

from router.sim import SimEngine, SimSettings


@define(eq=False)
class Neighbours:
    """Engines that know where the others hand over; connections are served in `nursery`."""

    nursery: trio.Nursery
    _at: dict[tuple[str, int], SimEngine] = field(factory=dict)

    def start(self, settings: SimSettings) -> SimEngine:
        """A new engine among them."""
        engine = SimEngine(settings, dial=self.dial)
        if settings.bootstrap_port:
            self._at[settings.host, settings.bootstrap_port] = engine
        return engine

    async def dial(self, host: str, port: int) -> trio.abc.Stream:
        """A connection to whoever hands over there; raises ConnectionRefusedError."""
        engine = self._at.get((host, port))
        await trio.lowlevel.checkpoint()
        if engine is None or engine.is_refusing:
            raise ConnectionRefusedError
        near, far = trio.testing.memory_stream_pair()
        self.nursery.start_soon(engine.serve_handover, far)
        return near
