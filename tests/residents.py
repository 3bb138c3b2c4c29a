"""Baton's own agents in a plan: one beside each engine that is reached by it.

It registers itself at the plan's broker and has a network of its own, as it has a process of its
own; only the engines are the plan's. What plans do to it is what they do to a scripted agent.
"""

from __future__ import annotations

from collections.abc import Mapping

import trio
from attrs import define, field

from router.agent.app import Agent
from router.agent.settings import AgentSettings
from router.logs import Logs
from tests.memory import MemoryNetwork
from tests.memory_broker import MemoryBroker

#: Virtual seconds in which an agent must have stopped: its window is over long before.
STOP_SECONDS = 400.0


@define(eq=False)
class Resident:
    """An agent of ours at work."""

    network: MemoryNetwork
    broker: MemoryBroker
    agent: Agent
    _scope: trio.CancelScope = field(factory=trio.CancelScope)
    ended: trio.Event = field(factory=trio.Event)

    async def run(self) -> None:
        """Serve until it is told to stop, or killed."""
        with self._scope:
            await self.agent.run()
        self.ended.set()

    # What a plan does to it

    def die(self) -> None:
        """As by SIGKILL: nobody is told anything."""
        self.broker.close()
        self._scope.cancel(reason="killed")

    def drain(self) -> None:
        """As by SIGTERM."""
        self.agent.ask_to_drain()

    async def stop(self) -> None:
        """Let it end, and see that it leaves nothing; raises TooSlowError."""
        self.agent.ask_to_drain()
        with trio.fail_after(STOP_SECONDS):
            await self.ended.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert not self.agent.intake.open, "an agent has left requests open"
        assert not self.network.open_sockets, f"an agent left {self.network.open_sockets}"
        assert not self.broker.subscriptions, [each.subject for each in self.broker.subscriptions]
        assert not self.broker.consumptions


def resident(
    network: MemoryNetwork,
    broker: MemoryBroker,
    logs: Logs,
    values: Mapping[str, object],
) -> Resident:
    """An agent of these settings."""
    settings = AgentSettings(**values)  # type: ignore[arg-type]  # a plan's values are plain
    return Resident(network, broker, Agent(settings, network, logs, broker))
