"""Every code in one loop: status, shape, headers; and nothing of a worker in any of them."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from router.errors import STATUS_OF, Refusal, nest_error

#: As the contract lists them.
CONTRACT = {
    400: ["bad_request"],
    401: ["unauthorized"],
    404: ["not_found", "model_not_found"],
    405: ["method_not_allowed"],
    413: ["body_too_large"],
    429: ["queue_full", "queue_timeout"],
    502: ["prefill_failed", "upstream_unreachable", "upstream_broken"],
    503: [
        "no_workers",
        "no_prefill_workers",
        "no_decode_workers",
        "no_compatible_pd_group",
        "breaker_open",
        "shutting_down",
    ],
    504: ["first_token_timeout", "stream_idle_timeout", "request_timeout"],
}
ROUTER = Path(__file__).parent.parent / "router"


def test_the_contracts_codes_have_the_contracts_statuses() -> None:
    for status, codes in CONTRACT.items():
        for code in codes:
            assert Refusal(code, "x").status == status


@pytest.mark.parametrize("code", STATUS_OF)
def test_every_code_has_one_shape(code: str) -> None:
    refusal = Refusal(code, "What happened.", param="model", retry_after=1)

    error = json.loads(refusal.body())["error"]
    assert error == {
        "message": "What happened.",
        "type": refusal.type,
        "param": "model",
        "code": code,
    }
    assert dict(refusal.headers()) == {
        b"content-type": b"application/json",
        b"x-router-error-code": code.encode(),
        b"retry-after": b"1",
    }
    assert refusal.event() == b"data: " + refusal.body() + b"\n\n"


@pytest.mark.parametrize("code", STATUS_OF)
def test_the_type_says_whose_fault_it_is(code: str) -> None:
    refusal = Refusal(code, "x")

    expected = {401: "authentication_error", 429: "rate_limit_error"}.get(refusal.status)
    if expected is None:
        expected = "server_error" if refusal.status >= 500 else "invalid_request_error"
    assert refusal.type == expected
    assert b"retry-after" not in dict(refusal.headers())


def refusals_in_the_source() -> list[tuple[str, ast.Call]]:
    return [
        (f"{path.name}:{node.lineno}", node)
        for path in sorted(ROUTER.rglob("*.py"))
        if "sim" not in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Refusal"
    ]


def test_every_refusal_in_the_source_has_a_known_code_and_names_no_worker() -> None:
    found = refusals_in_the_source()
    assert len(found) > 20

    for place, call in found:
        code = call.args[0]
        assert isinstance(code, ast.Constant), place
        assert code.value in STATUS_OF, place
        names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
        attributes = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
        assert not (names | attributes) & {"worker", "url", "host", "address", "detail"}, place


FLAT = {"object": "error", "message": "too long", "type": "BadRequest", "param": None, "code": 400}


def test_a_flat_error_is_nested() -> None:
    nested = json.loads(nest_error(json.dumps(FLAT).encode()))

    assert nested == {
        "error": {"message": "too long", "type": "BadRequest", "param": None, "code": 400}
    }


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"x"}}',
        b'{"object":"error","error":{"message":"x"}}',
        b'{"object":"list"}',
        b'{"detail":"Not Found"}',
        b"Internal Server Error",
        b"",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"\xff",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_any_other_error_body_is_left_alone(body: bytes) -> None:
    assert nest_error(body) == body
