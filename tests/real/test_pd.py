"""Real prefill/decode pairs behind Baton: what they say, and how fast their failures are told.

A pair has to say what a single engine says, token for token. Where one half fails, the client has
to know within a second, whatever the other half does: SGLang's decode would wait 300 s for a
prefill that never comes. The times are printed, beside the engines' own.
"""

import http.client
import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import pytest
from attrs import define, field, frozen

from tests.real.calls import Answer, asked, get, post, read
from tests.real.engines import ENGINES
from tests.real.pairs import HALVES, Pair
from tests.real.processes import wait_until
from tests.real.requests import CHAT, TEXT, Json, Object, chat, completion, merged, without_identity
from tests.real.router import error_of

pytestmark = pytest.mark.real

TOO_LONG = "word " * 1200
LONG_TOKENS = 600
FAST_SECONDS = 1.0
KILLED_SECONDS = 20.0
"""Mostly the kernel's: while the threads of a killed vLLM are taken down (2 to 25 s were seen, the
process is a zombie already), its sockets stay established, and connections to it are accepted and
never answered. Then it is found by its silence: `--suspect-idle-secs` and three lost probes."""
#: SGLang's `/health` takes a second at least, and more than two when it is busy.
QUICK_PROBES = {
    "sglang": "--health-check-interval-secs 1",
    "vllm": "--health-check-interval-secs 1 --health-check-timeout-secs 1",
}
BODIES: dict[str, tuple[str, Object]] = {
    "chat": (CHAT, chat("What is a relay?", max_tokens=40)),
    "chat of one token": (CHAT, chat("hi", max_tokens=1)),
    "text": (TEXT, completion("def main(", max_tokens=40)),
    "text with a stop": (TEXT, completion("def main(", max_tokens=40, stop=["mod"])),
    "text of other scripts": (TEXT, completion("héllo wörld 你好", max_tokens=40)),
    "a list of prompts": (TEXT, completion("", max_tokens=12) | {"prompt": ["def a(", "class B"]}),
    "token ids": (TEXT, completion("def main(", max_tokens=40, return_token_ids=True)),
    "long text": (TEXT, completion("class Foo", max_tokens=LONG_TOKENS, ignore_eos=True)),
}
GENERATE = "/generate"
LOGPROBS: Object = {
    "text": "def main(",
    "sampling_params": {"temperature": 0, "max_new_tokens": 8},
    "return_logprob": True,
    "logprob_start_len": 0,
}
STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
#: What the engines need by themselves, from the facts of their versions.
OWN = {
    "sglang": "decode waits 300 s (prefill alive), 5 to 14 s (prefill dead)",
    "vllm": "prefill first, so nobody waits",
}
FILE = Path("build/real-pd.md")


@frozen
class Told:
    """How long a client waited for an error."""

    kind: str
    event: str
    answer: str
    seconds: float


@define(eq=False)
class Report:
    """Times of a whole run."""

    rows: list[Told] = field(factory=list)

    def add(self, kind: str, event: str, answer: str, seconds: float) -> None:
        self.rows.append(Told(kind, event, answer, seconds))

    def publish(self) -> None:
        lines = ["| engines | event | the client is told | after | the engine's own clock |"]
        lines.append("| --- | --- | --- | --- | --- |")
        for row in self.rows:
            took = f"{1000 * row.seconds:.1f} ms"
            lines.append(f"| {row.kind} | {row.event} | {row.answer} | {took} | {OWN[row.kind]} |")
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n" + FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    kept = Report()
    yield kept
    kept.publish()


@pytest.fixture(scope="module", params=list(HALVES))
def kind(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(scope="module")
def right(kind: str) -> dict[tuple[str, bool], Answer]:
    """What a single engine of the kind says."""
    bodies = dict(BODIES)
    if kind == "sglang":
        bodies["logprobs"] = (GENERATE, LOGPROBS)
    with ENGINES[kind]() as engine:
        return {
            (name, stream): post(engine.port, path, {**body, "stream": stream})
            for name, (path, body) in bodies.items()
            for stream in (True, False)
        }


@pytest.fixture(scope="module")
def pair(kind: str, right: object) -> Iterator[Pair]:
    """After the single engine, so that no more than two run at a time."""
    with Pair(kind) as running:
        yield running


@STREAMED
@pytest.mark.parametrize("name", BODIES)
def test_a_pair_says_what_one_engine_says(
    pair: Pair, right: dict[tuple[str, bool], Answer], name: str, stream: bool
) -> None:
    path, body = BODIES[name]
    with pair.routed() as port:
        answer = post(port, path, {**body, "stream": stream})

    assert (answer.status, answer.whole) == (200, True)
    assert _said(answer) == _said(right[name, stream])


@STREAMED
def test_logprobs_of_the_prompt(
    pair: Pair, kind: str, right: dict[tuple[str, bool], Answer], stream: bool
) -> None:
    """Prefill has those of the prompt, decode those of the answer."""
    if kind != "sglang":
        pytest.skip("/generate is SGLang's own")
    with pair.routed() as port:
        answer = post(port, GENERATE, {**LOGPROBS, "stream": stream})

    found, wanted = _meta_infos(answer), _meta_infos(right["logprobs", stream])
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert found[-1][name] == wanted[-1][name]
    assert all(each["input_token_logprobs"] == found[-1]["input_token_logprobs"] for each in found)


def test_many_at_once(pair: Pair, right: dict[tuple[str, bool], Answer]) -> None:
    names = [name for name in BODIES if name != "long text"] * 3
    with pair.routed() as port, ThreadPoolExecutor(8) as clients:
        asking = [
            clients.submit(post, port, BODIES[name][0], {**BODIES[name][1], "stream": True})
            for name in names
        ]
        answers = [client.result() for client in asking]

    for name, answer in zip(names, answers, strict=True):
        assert answer.events()[-1] == b"[DONE]"
        assert _text(answer) == _text(right[name, True])


@STREAMED
def test_a_prompt_that_is_too_long_for_prefill(
    pair: Pair, kind: str, report: Report, stream: bool
) -> None:
    body = completion(TOO_LONG, max_tokens=4, stream=stream)
    took = []
    with pair.routed() as port:
        direct = post(pair.prefill.engine.port, TEXT, body)
        for _ in range(20):
            began = time.perf_counter()
            answer = post(port, TEXT, body)
            took.append(time.perf_counter() - began)
        is_free = wait_until(lambda: pair.decode.engine.running() == 0, 10)

    assert (direct.status, answer.status) == (400, 400)
    assert "x-router-error-code" not in answer.headers
    assert "context length" in str(error_of(answer.body)["message"])
    assert max(took) < FAST_SECONDS
    assert is_free
    way = "stream" if stream else "unary"
    report.add(kind, f"prompt too long for prefill ({way}, median of 20)", "400", median(took))


@STREAMED
def test_prefill_killed_before_the_first_token(
    pair: Pair, kind: str, report: Report, stream: bool
) -> None:
    body = completion("def main(", max_tokens=20, stream=stream)
    with pair.routed() as port, ThreadPoolExecutor(1) as clients:
        pair.prefill.engine.signal_core(signal.SIGSTOP)
        asking = clients.submit(_timed, port, body)
        time.sleep(1.0)
        assert not asking.done()
        killed = time.perf_counter()
        pair.prefill.engine.kill()
        answer, told = asking.result()
        took = told - killed
        is_free = wait_until(lambda: pair.decode.engine.running() == 0, 10)

    assert answer.status == 502
    # A kept connection that ends without a byte is tried once more, on a new one.
    assert answer.headers["x-router-error-code"] in ("upstream_broken", "upstream_unreachable")
    assert took < KILLED_SECONDS
    assert is_free
    way = "stream" if stream else "unary"
    report.add(kind, f"prefill killed before the first token ({way})", "502", took)


def test_prefill_killed_after_the_first_token(
    pair: Pair, right: dict[tuple[str, bool], Answer]
) -> None:
    path, body = BODIES["long text"]
    with pair.routed() as port:
        with asked(port, "POST", path, json.dumps({**body, "stream": True}).encode()) as response:
            before = _read_content(response)
            pair.prefill.engine.kill()
            rest = read(response)

    answer = Answer(rest.status, rest.headers, before + rest.body, rest.whole)
    assert answer.whole
    assert _said(answer) == _said(right["long text", True])


def test_decode_killed_in_mid_stream(pair: Pair, kind: str, report: Report) -> None:
    path, body = BODIES["long text"]
    with pair.routed(QUICK_PROBES[kind]) as port:
        with asked(port, "POST", path, json.dumps({**body, "stream": True}).encode()) as response:
            before = _read_content(response)
            with ThreadPoolExecutor(1) as clients:
                reading = clients.submit(_timed_rest, response)
                killed = time.perf_counter()
                pair.decode.engine.kill()
                rest, told = reading.result()
            took = told - killed
        unready = wait_until(lambda: get(port, "/readyz").status == 503, 60)

    answer = Answer(rest.status, rest.headers, before + rest.body, rest.whole)
    assert not answer.whole
    assert b"[DONE]" not in answer.events()
    # vLLM's front end may outlive its core by a moment and say so itself.
    assert error_of(answer.events()[-1])
    assert took < KILLED_SECONDS
    assert unready
    report.add(kind, "decode killed in mid-stream", "error event, cut", took)


@STREAMED
def test_decode_killed_before_the_first_token(
    pair: Pair, kind: str, report: Report, stream: bool
) -> None:
    # Whichever half computes the first token is stopped, so that there is none.
    body = completion("def main(", max_tokens=20, stream=stream)
    with pair.routed(QUICK_PROBES[kind]) as port, ThreadPoolExecutor(1) as clients:
        stopped = pair.prefill if kind == "sglang" else pair.decode
        stopped.engine.signal_core(signal.SIGSTOP)
        asking = clients.submit(_timed, port, body)
        time.sleep(1.0)
        # vLLM's decode answers before it has anything to say, and nobody has read on yet.
        assert not asking.done()
        killed = time.perf_counter()
        pair.decode.engine.kill()
        answer, told_at = asking.result()
        took = told_at - killed
        if kind == "sglang":
            pair.prefill.engine.signal_core(signal.SIGCONT)

    assert answer.status in (502, 200)
    assert error_of(answer.body if answer.status == 502 else answer.events()[-1])
    assert took < KILLED_SECONDS
    way = "stream" if stream else "unary"
    told = "502" if answer.status == 502 else "error event, cut"
    report.add(kind, f"decode killed before the first token ({way})", told, took)


def test_after_all_that_the_pair_still_works(
    pair: Pair, right: dict[tuple[str, bool], Answer]
) -> None:
    path, body = BODIES["text"]
    with pair.routed() as port:
        answer = post(port, path, {**body, "stream": True})

    assert _said(answer) == _said(right["text", True])


def _timed(port: int, body: Object) -> tuple[Answer, float]:
    """An answer, and when all of it was there."""
    answer = post(port, TEXT, body)
    return answer, time.perf_counter()


def _read_content(response: http.client.HTTPResponse) -> bytes:
    """Up to the first token; vLLM begins its stream while decode is still fetching."""
    read = b""
    while not re.search(rb'"text":\s*"[^"]', read):
        part = response.read1(65536)
        assert part
        read += part
    return read


def _timed_rest(response: http.client.HTTPResponse) -> tuple[Answer, float]:
    rest = read(response)
    return rest, time.perf_counter()


def _said(answer: Answer) -> Json:
    """All that an answer says but for what an engine makes up anew."""
    said = merged(answer.events()) if answer.events() else without_identity(_object(answer.json()))
    assert isinstance(said, dict)
    for passing in ("kv_transfer_params", "metadata"):
        said.pop(passing, None)
    return said


def _text(answer: Answer) -> Json:
    said = merged(answer.events())
    assert isinstance(said, dict)
    return {name: value for name, value in said.items() if name.startswith("choice")}


def _meta_infos(answer: Answer) -> list[Object]:
    """What every event, or the whole answer, tells beside its text."""
    whole = answer.events() or [answer.body]
    loaded = [_object(json.loads(each)) for each in whole if each != b"[DONE]"]
    found = [each["meta_info"] for each in loaded if isinstance(each, dict)]
    return [each for each in found if isinstance(each, dict)]


def _object(loaded: object) -> Json:
    assert isinstance(loaded, dict)
    return loaded
