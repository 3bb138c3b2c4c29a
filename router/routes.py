"""Which paths are proxied, how their answers are read, and what a call has to carry.

Pure: a table and a few questions to it.
"""

from __future__ import annotations

from attrs import frozen

from router.calls import Call
from router.errors import Refusal
from router.headers import find
from router.migration.shape import Endpoint
from router.openai import Asked, read_request


@frozen
class Route:
    """A path that is proxied: its metric label, and how its events are judged."""

    label: str
    family: str


CHAT = Route("chat", "openai")
COMPLETIONS = Route("completions", "openai")
GENERATE = Route("generate", "generate")
OTHER = Route("other", "other")
_ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/generate": GENERATE,
    "/tokenize": OTHER,
    "/detokenize": OTHER,
    "/rerank": OTHER,
    "/score": OTHER,
}
#: Routes whose streams may move, as the pure core calls them.
ENDPOINTS: dict[str, Endpoint] = {"chat": "chat", "completions": "completions"}
#: Below /v1/, but answered here.
_LOCAL = ("/v1/models", "/v1/workers")
#: Bodies of these kinds are not JSON and are not looked into.
_OPAQUE_BODIES = (b"multipart/", b"application/octet-stream", b"audio/", b"image/")


def route_of(path: str) -> Route | None:
    """The route of a path that is proxied when it is posted to, or None."""
    route = _ROUTES.get(path)
    if route is None and path.startswith("/v1/") and not path.startswith(_LOCAL):
        return OTHER
    return route


def read_call(call: Call, route: Route) -> Asked | Refusal:
    """What a call asks for, as far as its route is read, or why it cannot be routed."""
    if route is OTHER:
        kind = find(call.headers, b"content-type") or b""
        if kind.startswith(_OPAQUE_BODIES):
            return Asked()
    return read_request(call.body)
