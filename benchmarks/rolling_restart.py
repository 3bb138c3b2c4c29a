"""`python -m benchmarks.rolling_restart`: five agents restarted in turn under a hundred streams.

Every stream is compared with what the engine says undisturbed. Exit code 1 when a request failed,
a token was wrong, or an agent did not leave in time; the numbers are printed either way.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

import trio

from tests.nats import rolling
from tests.nats.fleet import fleet, starter
from tests.nats_server import NatsServer


async def run(
    broker: str, directory: Path, *, agents: int, streams: int, tokens: int, window_seconds: float
) -> rolling.Rolled:
    """One rolling restart of a fleet of its own."""
    with starter() as first, fleet(broker, directory, "infera", first) as processes:
        sims = [processes.sim(f"s{number}") for number in range(agents)]
        return await rolling.roll(
            processes,
            [sim.ready() for sim in sims],
            streams=streams,
            tokens=tokens,
            token_seconds=0.05,
            window_seconds=window_seconds,
        )


def main() -> int:
    """Read the flags, run, say what came of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rolling_restart")
    add = parser.add_argument
    add("--agents", type=int, default=5)
    add("--streams", type=int, default=100, help="at a time (100)")
    add("--tokens", type=int, default=100, help="a stream, at 20 a second (100)")
    add("--window", type=float, default=1.0, help="of a drain, seconds (1)")
    given = parser.parse_args()
    with NatsServer() as server, tempfile.TemporaryDirectory() as directory:
        work = partial(
            run,
            server.url,
            Path(directory),
            agents=given.agents,
            streams=given.streams,
            tokens=given.tokens,
            window_seconds=given.window,
        )
        rolled = trio.run(work)
    for left in rolled.left:
        print(
            f"{left.worker}: left after {left.seconds:.2f} s, back after {left.back_seconds:.2f} s"
        )
    try:
        rolling.check(rolled)
    except AssertionError as problem:
        print(problem)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
