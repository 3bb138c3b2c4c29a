"""What comes through the router is what the engine sent, and what it would send without a router.

The first is exact: a recorder between router and engine keeps the very bytes. The second compares
with another run of the same request, ids and times aside.
"""

import pytest

from tests.real.calls import Answer, post
from tests.real.engines import Engine
from tests.real.requests import (
    CHAT,
    TEXT,
    Json,
    Object,
    chat,
    completion,
    merged,
    without_identity,
)
from tests.real.router import Recorder, error_of

pytestmark = pytest.mark.real

USAGE: Json = {"include_usage": True}
UNICODE = "naïve café — 数据 🚀 'quoted' \"twice\"\n\t\\end"
BODIES: dict[str, tuple[str, Object]] = {
    "chat": (CHAT, chat("hi", max_tokens=40)),
    "chat with unicode": (CHAT, chat(UNICODE, max_tokens=40)),
    "chat of one token": (CHAT, chat("hi", max_tokens=1)),
    "text": (TEXT, completion("def main(", max_tokens=40)),
    "text with a stop": (TEXT, completion("def main(", max_tokens=40, stop=["mod"])),
    "two choices": (TEXT, completion("def main(", max_tokens=10, n=2, temperature=0.001, seed=1)),
}
BAD_BODIES: dict[str, tuple[str, Object]] = {
    "no tokens wanted": (TEXT, completion("a", max_tokens=0)),
    "too long": (TEXT, completion("word " * 5000, max_tokens=4)),
    "too long, streamed": (TEXT, completion("word " * 5000, max_tokens=4, stream=True)),
    "too long a chat, streamed": (CHAT, chat("word " * 5000, max_tokens=4, stream=True)),
    "more at least than at most": (CHAT, chat("a", max_tokens=2, min_tokens=3)),
}


@pytest.mark.parametrize("name", BODIES)
def test_unary_answer_is_the_engines(
    engine: Engine, recorder: Recorder, router: int, name: str
) -> None:
    path, body = BODIES[name]

    direct, through = post(engine.port, path, body), post(router, path, body)

    assert through.status == 200
    assert recorder.sent(through)
    assert without_identity(_json(through)) == without_identity(_json(direct))


@pytest.mark.parametrize("usage", [None, USAGE], ids=["plain", "usage"])
@pytest.mark.parametrize("name", BODIES)
def test_stream_is_the_engines(
    engine: Engine, recorder: Recorder, router: int, name: str, usage: Json
) -> None:
    path, body = BODIES[name]
    body = {**body, "stream": True, **({"stream_options": usage} if usage else {})}

    direct, through = post(engine.port, path, body), post(router, path, body)

    assert (through.status, through.whole) == (200, True)
    assert through.events()[-1] == b"[DONE]"
    assert recorder.sent(through)
    assert merged(through.events()) == merged(direct.events())


def test_token_ids_pass(engine: Engine, recorder: Recorder, router: int) -> None:
    body = completion("def main(", max_tokens=30, stream=True, return_token_ids=True)

    direct, through = post(engine.port, TEXT, body), post(router, TEXT, body)

    assert recorder.sent(through)
    assert b'"token_ids":[' in through.body
    assert merged(through.events()) == merged(direct.events())


@pytest.mark.parametrize("name", BAD_BODIES)
def test_error_is_the_engines_in_openai_shape(engine: Engine, router: int, name: str) -> None:
    path, body = BAD_BODIES[name]

    direct, through = post(engine.port, path, body), post(router, path, body)

    status, error = _verdict(direct)
    assert through.status == status
    assert "x-router-error-code" not in through.headers
    assert error_of(through.body) == error
    if engine.kind == "vllm":
        assert (through.content_type, through.body) == (direct.content_type, direct.body)


def test_request_id_is_echoed(engine: Engine, router: int) -> None:
    answer = post(router, CHAT, chat("hi", max_tokens=1))

    assert answer.headers["x-request-id"]


def _json(answer: Answer) -> Json:
    loaded = answer.json()
    assert isinstance(loaded, dict)
    return loaded


def _verdict(direct: Answer) -> tuple[int, Json]:
    """Status and error of a direct answer: nested, flat, or as the first event of a 200."""
    content = direct.events()[0] if direct.status == 200 else direct.body
    loaded = Answer(direct.status, {}, content).json()
    assert isinstance(loaded, dict)
    error = loaded.get("error", loaded)
    assert isinstance(error, dict)
    error.pop("object", None)
    status = int(error["code"]) if direct.status == 200 else direct.status
    return status, error
