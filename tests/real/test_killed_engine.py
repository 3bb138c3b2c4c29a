"""Engines die for real: before the first byte nobody notices, after it nobody is deceived."""

import contextlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.real.calls import Answer, asked, get, post, read
from tests.real.engines import ENGINES, Engine, vllm
from tests.real.processes import wait_until
from tests.real.requests import CHAT, TEXT, chat, completion, long
from tests.real.router import routed

pytestmark = pytest.mark.real

VLLM_CORE_LOST = 500
"""vLLM's front end outlives its core for a moment and says so in the stream, then `[DONE]`."""
QUICK_PROBES = "--health-check-interval-secs 1 --health-check-timeout-secs 1"


@contextlib.contextmanager
def two_engines() -> Iterator[tuple[Engine, Engine, int]]:
    """Two vLLMs, started one after the other (two cores), and a router in front of both."""
    with vllm() as first, vllm() as second, routed(first.url, second.url) as port:
        yield first, second, port


def test_requests_after_an_engine_was_killed() -> None:
    with two_engines() as (first, _, port):
        first.kill()

        answers = [post(port, CHAT, chat(f"hi {n}", max_tokens=3)) for n in range(50)]

    assert [answer.status for answer in answers] == [200] * 50


def test_streams_after_an_engine_was_killed() -> None:
    with two_engines() as (_, second, port):
        second.kill()

        body = chat("hi", max_tokens=3, stream=True)
        answers = [post(port, CHAT, body) for _ in range(50)]

    assert [answer.status for answer in answers] == [200] * 50
    assert all(answer.whole and answer.events()[-1] == b"[DONE]" for answer in answers)


def test_unary_requests_in_flight_move_when_their_engine_is_killed() -> None:
    body = completion("def main(", max_tokens=400, ignore_eos=True)
    with two_engines() as (first, _, port), ThreadPoolExecutor(8) as clients:
        asking = [clients.submit(post, port, TEXT, body) for _ in range(8)]
        assert wait_until(lambda: first.running() > 0, 10)
        first.kill()
        answers = [client.result() for client in asking]

    assert [answer.status for answer in answers] == [200] * 8
    assert len({json.dumps(_text(answer)) for answer in answers}) == 1


def test_unary_requests_in_flight_move_when_the_core_of_their_engine_is_killed() -> None:
    body = completion("def main(", max_tokens=400, ignore_eos=True)
    with two_engines() as (first, _, port), ThreadPoolExecutor(8) as clients:
        asking = [clients.submit(post, port, TEXT, body) for _ in range(8)]
        assert wait_until(lambda: first.running() > 0, 10)
        first.signal_core(signal.SIGKILL)
        answers = [client.result() for client in asking]

    assert [answer.status for answer in answers] == [200] * 8


@pytest.mark.parametrize("part", ["all", "core"])
@pytest.mark.parametrize("kind", ENGINES)
def test_stream_of_a_killed_engine_fails_visibly(kind: str, part: str) -> None:
    with ENGINES[kind]() as engine, routed(engine.url) as port:
        with asked(port, "POST", TEXT, long(stream=True)) as response:
            before = response.read1(65536)
            if part == "all":
                engine.kill()
            else:
                engine.signal_core(signal.SIGKILL)
            rest = read(response)

    answer = Answer(rest.status, rest.headers, before + rest.body, rest.whole)
    assert not answer.whole
    assert b"[DONE]" not in answer.events()
    error = json.loads(answer.events()[-1])["error"]
    assert isinstance(error["message"], str)
    assert error["code"] in ("upstream_broken", VLLM_CORE_LOST)


def test_a_lone_engine_that_is_gone_makes_the_router_unready() -> None:
    with vllm() as engine, routed(engine.url, flags=QUICK_PROBES) as port:
        engine.kill()

        answer = post(port, CHAT, chat("hi", max_tokens=1))
        unready = wait_until(lambda: get(port, "/readyz").status == 503, 15)

    assert answer.status in (502, 503)
    assert answer.headers["x-router-error-code"] in ("upstream_unreachable", "no_workers")
    assert unready


def _text(answer: Answer) -> object:
    loaded = answer.json()
    assert isinstance(loaded, dict)
    return loaded["choices"]
