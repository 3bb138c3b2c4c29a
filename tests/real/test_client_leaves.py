"""A client that leaves frees its engine, at whatever moment it goes.

The request would take seventeen seconds, so an engine that is free within a few has stopped. vLLM
watches its connections and needs no time. So does SGLang for streams, but what it says of its load
lags a little; for unary requests it looks only every four seconds, with or without a router.
"""

import time
from collections.abc import Iterator

import pytest

from tests.real.calls import asked, sent
from tests.real.engines import Engine
from tests.real.processes import wait_until
from tests.real.requests import TEXT, long

pytestmark = pytest.mark.real

STREAM_SECONDS = {"vllm": 1.0, "sglang": 4.0}
UNARY_SECONDS = {"vllm": 1.0, "sglang": 5.0}
BUSY_SECONDS = 5.0
IDLE_SECONDS = 30.0


@pytest.fixture(autouse=True)
def idle(engine: Engine) -> Iterator[None]:
    assert _becomes(engine, 0, IDLE_SECONDS)
    yield
    assert _becomes(engine, 0, IDLE_SECONDS)


def _becomes(engine: Engine, requests: int, seconds: float) -> bool:
    return wait_until(lambda: engine.running() == requests, seconds)


def test_leaving_mid_stream(engine: Engine, router: int) -> None:
    with asked(router, "POST", TEXT, long(stream=True)) as response:
        assert response.read1(65536)
        assert _becomes(engine, 1, BUSY_SECONDS)

    assert _becomes(engine, 0, STREAM_SECONDS[engine.kind])


def test_leaving_a_stream_before_its_first_token(engine: Engine, router: int) -> None:
    with engine.frozen_core():
        with sent(router, "POST", TEXT, long(stream=True)):
            time.sleep(0.3)
        time.sleep(0.3)

    assert _becomes(engine, 0, STREAM_SECONDS[engine.kind])


def test_leaving_a_unary_request(engine: Engine, router: int) -> None:
    with sent(router, "POST", TEXT, long(stream=False)):
        assert _becomes(engine, 1, BUSY_SECONDS)

    assert _becomes(engine, 0, UNARY_SECONDS[engine.kind])


def test_leaving_a_unary_request_while_the_engine_hangs(engine: Engine, router: int) -> None:
    with engine.frozen_core():
        with sent(router, "POST", TEXT, long(stream=False)):
            time.sleep(0.3)
        time.sleep(0.3)

    assert _becomes(engine, 0, UNARY_SECONDS[engine.kind])


def test_leaving_at_once(engine: Engine, router: int) -> None:
    for _ in range(20):
        with sent(router, "POST", TEXT, long(stream=True)):
            pass

    assert _becomes(engine, 0, STREAM_SECONDS[engine.kind])


def test_others_go_on(engine: Engine, router: int) -> None:
    with asked(router, "POST", TEXT, long(stream=True)) as staying:
        with asked(router, "POST", TEXT, long(stream=True)) as leaving:
            assert leaving.read1(65536)
            assert _becomes(engine, 2, BUSY_SECONDS)
        assert _becomes(engine, 1, STREAM_SECONDS[engine.kind])

        assert staying.read1(65536)
        assert staying.read1(65536)
