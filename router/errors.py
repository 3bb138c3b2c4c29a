"""Every error the router makes, in one place and one shape.

A `Refusal` is what the client is told: a code, and a sentence for a human. Status, type and wire
form follow from the code. The sentences never hold a worker's address, a traceback or text of a
request. Errors of workers are forwarded, not made here; only SGLang's flat error objects are
nested to the shape that OpenAI's clients can read (observed with SGLang 0.5.23).
"""

from __future__ import annotations

import msgspec
from attrs import frozen

#: code -> HTTP status. The first group is the contract's; a new code needs a changelog entry.
STATUS_OF = {
    "bad_request": 400,
    "unauthorized": 401,
    "not_found": 404,
    "model_not_found": 404,
    "method_not_allowed": 405,
    "body_too_large": 413,
    "queue_full": 429,
    "queue_timeout": 429,
    "prefill_failed": 502,
    "upstream_unreachable": 502,
    "upstream_broken": 502,
    "no_workers": 503,
    "no_prefill_workers": 503,
    "no_decode_workers": 503,
    "no_compatible_pd_group": 503,
    "breaker_open": 503,
    "shutting_down": 503,
    "first_token_timeout": 504,
    "stream_idle_timeout": 504,
    "request_timeout": 504,
    # Beyond the contract: refusals of the HTTP server, a duplicate worker, and our own bugs.
    "header_timeout": 408,
    "body_timeout": 408,
    "worker_exists": 409,
    "headers_too_large": 431,
    "internal_error": 500,
}

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder()


@frozen
class Refusal:
    """What the client is told when there is no answer for it."""

    code: str
    message: str
    param: str | None = None
    #: Seconds for a `Retry-After` header.
    retry_after: int | None = None

    @property
    def status(self) -> int:
        """The HTTP status of this code."""
        return STATUS_OF[self.code]

    @property
    def type(self) -> str:
        """OpenAI's coarse error type."""
        return _type_of(self.status)

    def body(self) -> bytes:
        """The JSON error body."""
        return _ENCODER.encode(self._object())

    def event(self) -> bytes:
        """The same error as one event of a stream that cannot go on."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that go with the body."""
        found = [
            (b"content-type", b"application/json"),
            (b"x-router-error-code", self.code.encode()),
        ]
        if self.retry_after is not None:
            found.append((b"retry-after", str(self.retry_after).encode()))
        return found

    def _object(self) -> dict[str, dict[str, str | None]]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


SHUTTING_DOWN = Refusal("shutting_down", "The router is shutting down.", retry_after=1)


def nest_error(body: bytes) -> bytes:
    """SGLang's flat `{"object":"error",…}` as `{"error":{…}}`; anything else unchanged.

    Node's client shows "no body" for the flat form (SGLang 0.5.23, openai 6.49 on npm).
    """
    try:
        found = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body
    if not isinstance(found, dict) or found.get("object") != "error" or "error" in found:
        return body
    return _ENCODER.encode(
        {"error": {key: found.get(key) for key in ("message", "type", "param", "code")}}
    )


def wordless(status: int) -> bytes:
    """The JSON body for an error of a worker that came without one; the code is its status."""
    message = f"The worker answered with status {status} and did not say why."
    error = {"message": message, "type": _type_of(status), "param": None, "code": status}
    return _ENCODER.encode({"error": error})


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    if status < 500:
        return "invalid_request_error"
    return "server_error"
