"""What a client may ask of a pair in a few bytes, and what that may cost the router."""

from __future__ import annotations

import pytest

from router.width import WIDTH_MAX
from tests.pairs import run
from tests.plans import Client

#: Path, and what makes the request too wide.
TOO_WIDE: dict[str, tuple[str, dict[str, object]]] = {
    "one more": ("/v1/chat/completions", {"n": WIDTH_MAX + 1}),
    "a million": ("/v1/chat/completions", {"n": 1_000_000}),
    "beyond all memory": ("/v1/completions", {"n": 10**18}),
    "many prompts": ("/v1/completions", {"prompt": ["a"] * (WIDTH_MAX + 1)}),
    "many lists of ids": ("/v1/completions", {"prompt": [[1]] * (WIDTH_MAX + 1)}),
    "prompts times samples": ("/v1/completions", {"prompt": ["a"] * 64, "n": 65}),
    "of SGLang's own": ("/generate", {"text": "a", "sampling_params": {"n": 1_000_000}}),
    "its batch": ("/generate", {"input_ids": [[1]] * 64, "sampling_params": [{"n": 65}] * 64}),
}


@pytest.mark.parametrize("name", TOO_WIDE)
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_is_too_wide_is_refused_and_nothing_is_sent(name: str, stream: bool) -> None:
    path, extra = TOO_WIDE[name]
    client = Client(stream=stream, path=path, extra=extra)

    result = run("json@0", "json@0", client)

    assert (result.one.status, result.one.code) == (400, "bad_request")
    assert result.p.bodies == result.d.bodies == []
    assert result.rows("p0") == result.rows("d0") == []


def test_the_widest_request_has_a_room_for_each_item() -> None:
    result = run("json@0", "json@0", Client(stream=False, extra={"n": WIDTH_MAX}))

    rooms = result.d.bodies[0]["bootstrap_room"]
    assert isinstance(rooms, list)
    assert len(set(rooms)) == WIDTH_MAX
    assert result.p.bodies[0]["bootstrap_room"] == rooms


def test_what_needs_no_rooms_is_the_engines_to_refuse() -> None:
    client = Client(stream=False, extra={"n": 1_000_000})

    result = run("", "400@0", client, protocol="vllm-nixl")

    assert result.one.status == 400
    assert result.d.bodies[0]["n"] == 1_000_000
