"""`baton agent` as a process: signals, the real network, and the bridge to a real broker.

Also the other half of it, `baton agent --drain`: a preStop command that asks the running agent of
the same id to drain, over NATS, and returns when it has.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator

import structlog
import trio

from router.agent.app import Agent
from router.agent.draining import ask_to_drain
from router.agent.presence import Hello, wait_connected
from router.agent.settings import AgentSettings
from router.config import NatsUrl
from router.logs import Logs, configure
from router.process import calm_collector, raise_descriptor_limit
from router.tcp import TcpNetwork
from router.wires.nats.bridge import Bridge
from router.wires.nats.protocol import Names

_log = structlog.get_logger("baton")

LOOPBACK = ("localhost", "127.0.0.1", "::1")
#: The exit code where another agent has the id.
REFUSED = 3
#: What takes longer than this is told to who looks on.
PATIENCE_SECONDS = 1.0
#: For the broker, and then for the agent, to answer a command.
ANSWER_SECONDS = 5.0


def run(settings: AgentSettings) -> int:
    """Run `baton agent` until it is told to stop and has drained; returns the exit code."""
    logs = configure(format=settings.log_format, level=settings.log_level)
    raise_descriptor_limit()
    network = TcpNetwork()
    calm_collector()
    try:
        in_the_way = trio.run(
            _serve_until_signalled, settings, network, logs, strict_exception_groups=True
        )
    finally:
        network.close()
    if in_the_way is None:
        return 0
    print(
        f"baton agent: an agent of {settings.worker_id()} is there already (on {in_the_way.host}): "
        "give every agent an --id of its own",
        file=sys.stderr,
    )
    return REFUSED


def drain(settings: AgentSettings) -> int:
    """Ask the running agent to drain and wait for it; returns the exit code.

    0 also where no agent of that id is there any more: then there is nothing to wait for.
    """
    configure(format=settings.log_format, level=settings.log_level)
    end, trouble = trio.run(_ask, settings, strict_exception_groups=True)
    texts = {
        "drained": "drained",
        "absent": "no agent of that id is running",
        "away": f"the NATS server cannot be reached: {trouble}".removesuffix(": "),
        "late": "the agent has not said in time that it has drained",
    }
    is_good = end in ("drained", "absent")
    where = sys.stdout if is_good else sys.stderr
    print(f"baton agent: {settings.worker_id()}: {texts[end]}", file=where)
    return 0 if is_good else 1


async def _serve_until_signalled(
    settings: AgentSettings, network: TcpNetwork, logs: Logs
) -> Hello | None:
    """Serve; at the end, the agent that kept this one from it, if one did."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            bridge = Bridge(settings.nats_url(), name=f"baton agent {settings.worker_id()}")
            await nursery.start(bridge.run)
            agent = Agent(settings, network, logs, bridge)
            _warn_of_id(settings)
            nursery.start_soon(_pass_on, signals, agent)
            nursery.start_soon(_tell_people, agent)
            await agent.run()
            bridge.close()
            nursery.cancel_scope.cancel(reason="the agent has stopped")
    return agent.refused_by


async def _tell_people(agent: Agent) -> None:
    """What it waits for, and when it has begun."""
    name = f"baton: agent of {agent.worker.id}"
    if not agent.broker.is_connected:
        server = NatsUrl().masked(agent.settings.nats_url())
        with trio.move_on_after(PATIENCE_SECONDS):
            await wait_connected(agent.broker)
        if not agent.broker.is_connected:
            why = f" ({agent.broker.trouble})" if agent.broker.trouble else ""
            print(f"{name} waits for the NATS server at {server}{why}", flush=True)
    with trio.move_on_after(PATIENCE_SECONDS + ANSWER_SECONDS):
        await agent.listening.wait()
    if not agent.listening.is_set() and agent.broker.is_connected:
        why = ": the broker has no JetStream" if agent.broker.has_jetstream is False else ""
        print(f"{name} takes no requests yet{why}", flush=True)
    await agent.listening.wait()
    print(f"{name} listens at {agent.names.request(agent.worker.id)}", flush=True)
    with trio.move_on_after(PATIENCE_SECONDS):
        await agent.registration.registered.wait()
    if agent.registration.registered.is_set():
        return
    if problem := agent.registration.problem:
        print(f"{name} is not registered, and routers must name it: {problem}", flush=True)
    else:
        print(f"{name} waits for its engine at {agent.settings.engine_url}", flush=True)


def _warn_of_id(settings: AgentSettings) -> None:
    if settings.id is None and settings.spec().host in LOOPBACK:
        _log.warning("the id is unique on this machine only: give --id", id=settings.worker_id())


async def _pass_on(signals: AsyncIterator[int], agent: Agent) -> None:
    async for _ in signals:
        agent.ask_to_stop()


async def _ask(settings: AgentSettings) -> tuple[str, str]:
    """How it ended, and what was wrong with the broker."""
    async with trio.open_nursery() as nursery:
        bridge = Bridge(settings.nats_url(), name="baton agent --drain")
        await nursery.start(bridge.run)
        names = Names(settings.nats_prefix)
        end = await ask_to_drain(bridge, names, settings.worker_id(), ANSWER_SECONDS)
        trouble = bridge.trouble
        nursery.cancel_scope.cancel(reason="answered")
    return end, trouble
