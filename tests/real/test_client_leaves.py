"""A client that leaves frees its engine, at whatever moment it goes.

The request would take seventeen seconds, so an engine that is free within a few has stopped. vLLM
watches its connections and needs no time. So does SGLang for streams; for unary requests it looks
only every four seconds, with or without a router.
"""

import time
from collections.abc import Iterator

import pytest

from tests.real.calls import asked, sent
from tests.real.engines import Engine
from tests.real.processes import wait_until
from tests.real.requests import TEXT, long

pytestmark = pytest.mark.real

FREE_SECONDS = 1.0
SGLANG_UNARY_SECONDS = 5.0


@pytest.fixture(autouse=True)
def idle(engine: Engine) -> Iterator[None]:
    assert wait_until(lambda: engine.running() == 0, 30)
    yield
    assert wait_until(lambda: engine.running() == 0, 30)


def _unary_seconds(engine: Engine) -> float:
    return SGLANG_UNARY_SECONDS if engine.kind == "sglang" else FREE_SECONDS


def _is_free(engine: Engine, seconds: float) -> bool:
    return wait_until(lambda: engine.running() == 0, seconds)


def test_leaving_mid_stream(engine: Engine, router: int) -> None:
    with asked(router, "POST", TEXT, long(stream=True)) as response:
        assert response.read1(65536)
        assert engine.running() == 1

    assert _is_free(engine, FREE_SECONDS)


def test_leaving_a_stream_before_its_first_token(engine: Engine, router: int) -> None:
    with engine.frozen_core():
        with sent(router, "POST", TEXT, long(stream=True)):
            time.sleep(0.3)
        time.sleep(0.3)

    assert _is_free(engine, FREE_SECONDS)


def test_leaving_a_unary_request(engine: Engine, router: int) -> None:
    with sent(router, "POST", TEXT, long(stream=False)):
        assert wait_until(lambda: engine.running() == 1, 5)

    assert _is_free(engine, _unary_seconds(engine))


def test_leaving_a_unary_request_while_the_engine_hangs(engine: Engine, router: int) -> None:
    with engine.frozen_core():
        with sent(router, "POST", TEXT, long(stream=False)):
            time.sleep(0.3)
        time.sleep(0.3)

    assert _is_free(engine, _unary_seconds(engine))


def test_leaving_at_once(engine: Engine, router: int) -> None:
    for _ in range(20):
        with sent(router, "POST", TEXT, long(stream=True)):
            pass

    assert _is_free(engine, FREE_SECONDS)


def test_others_go_on(engine: Engine, router: int) -> None:
    with asked(router, "POST", TEXT, long(stream=True)) as staying:
        with asked(router, "POST", TEXT, long(stream=True)) as leaving:
            assert leaving.read1(65536)
        assert wait_until(lambda: engine.running() == 1, FREE_SECONDS)

        assert staying.read1(65536)
        assert staying.read1(65536)
