"""One broker and one set of simulated engines for all tests here; each fleet has its own prefix."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import Factory, define

from tests.nats import fleet as f
from tests.nats_server import NatsServer

ENGINES = 3
_PREFIXES = itertools.count()


@define(eq=False)
class World:
    """The broker's URL, and engines that all fleets share."""

    broker: str
    directory: Path
    starter: f.Starter
    sims: list[f.Process] = Factory(list)
    prefixes: dict[int, str] = Factory(dict)
    """The prefix of a router, by its process id."""

    @contextlib.contextmanager
    def fleet(self) -> Iterator[f.Fleet]:
        """A fleet under a prefix that no other has."""
        prefix = f"infera{next(_PREFIXES)}"
        directory = self.directory / prefix
        directory.mkdir()
        with f.fleet(self.broker, directory, prefix, self.starter) as fleet:
            yield fleet


@pytest.fixture(scope="session")
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


@pytest.fixture(scope="session")
def world(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("nats")
    with f.starter() as starter, f.fleet(server.url, directory, "none", starter) as engines:
        world = World(server.url, directory, starter)
        sims = [engines.sim(f"s{number}") for number in range(ENGINES)]
        world.sims.extend(sim.ready() for sim in sims)
        yield world
