"""How many examples hypothesis draws: few while working, more and always the same in CI.

For every test a clean log, since an application under test sets up the process's, and Trio's
scheduler with a seed of its own: whom it lets go first is then the same whenever the test runs.
`--seed N` draws another order for all of them.

Settings for a Baton of the terminal's own stay outside; `BATON_REAL_*` are for tests/real.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest
import structlog
import trio
from hypothesis import HealthCheck, settings

from router.process import raise_descriptor_limit

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci",
    max_examples=300,
    deadline=None,
    derandomize=True,
    # A machine that builds other things besides is slow, which says nothing about the plans.
    suppress_health_check=[HealthCheck.too_slow],
)
for _name in [name for name in os.environ if name.startswith("BATON_")]:
    if not _name.startswith("BATON_REAL_"):
        del os.environ[_name]

# Some tests have hundreds of sockets at once; a soft limit of 256 is usual on some systems.
raise_descriptor_limit()

settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="of the order in which Trio's tasks run")


@pytest.fixture(autouse=True)
def _own_order(request: pytest.FixtureRequest) -> None:
    name = f"{request.config.getoption('--seed')} {request.node.nodeid}"
    trio._core._run._r.seed(zlib.crc32(name.encode()))


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    yield
    structlog.reset_defaults()
