"""One engine at a time, with a recorder and the router in front of it."""

from collections.abc import Iterator

import pytest

from tests.real.engines import ENGINES, Engine, vllm
from tests.real.router import Recorder, recorded, routed


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with ENGINES[request.param]() as running:
        yield running


@pytest.fixture(scope="module")
def vllm_engine() -> Iterator[Engine]:
    with vllm() as running:
        yield running


@pytest.fixture(scope="module")
def recorder(engine: Engine) -> Iterator[Recorder]:
    with recorded(engine) as recording:
        yield recording


@pytest.fixture(scope="module")
def router(recorder: Recorder) -> Iterator[int]:
    """The port of a router whose only worker is the recorder."""
    with routed(recorder.url) as port:
        yield port


@pytest.fixture(scope="module")
def vllm_router(vllm_engine: Engine) -> Iterator[int]:
    with routed(vllm_engine.url) as port:
        yield port
