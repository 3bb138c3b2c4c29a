"""What is added to a request so that its answer can be continued, and nothing else.

Ids where the engine streams them (vLLM on both endpoints, SGLang on completions; SGLang 0.5.23
refuses them with 400 on streaming chat), otherwise usage with every chunk, because chunks are not
tokens. The client's own text of the body is left as it is, and what it said about ids or usage is
never overruled. Whatever was asked for here, `router.migration.attempt` takes out again.
"""

from __future__ import annotations

from attrs import frozen

from router.migration.shape import Endpoint, Shape
from router.migration.splice import edit, read_members


@frozen
class Asking:
    """What the router asks for that the client did not."""

    ids: bool = False
    #: Usage with every chunk; the last chunk of a stream, which holds nothing else, comes with it.
    usage: bool = False


NOTHING = Asking()


def gives_ids(engine: str, endpoint: Endpoint) -> bool:
    """Whether an engine streams token ids on an endpoint when it is asked to.

    vLLM since 0.10.2, SGLang since 0.5.17; older ones ignore the request silently.
    """
    return engine == "vllm" or (engine == "sglang" and endpoint == "completions")


def plan_asking(shape: Shape, engine: str) -> Asking:
    """What to ask an engine for. Nothing for a shape that could not use it."""
    if shape.poison is not None:
        return NOTHING
    if gives_ids(engine, shape.endpoint) and shape.asks_ids is not False:
        return Asking(ids=shape.asks_ids is None)
    if engine not in ("vllm", "sglang"):
        return NOTHING  # an unknown server may refuse a request for a field it does not know
    if shape.asks_continuous_usage is not None:
        return NOTHING
    if engine == "vllm" and shape.asks_usage is False:
        return NOTHING  # vLLM sends continuous usage only together with the last chunk's
    return Asking(usage=True)


def ask(body: bytes, asking: Asking, shape: Shape) -> bytes:
    """The body with the asking in it."""
    changes: dict[str, bytes | None] = {}
    if asking.ids:
        changes["return_token_ids"] = b"true"
    if asking.usage:
        changes["stream_options"] = _options(body, shape)
    return edit(body, changes)


def _options(body: bytes, shape: Shape) -> bytes:
    members = read_members(body) or {}
    given = members.get("stream_options")
    options = b"{}" if given is None or bytes(given) == b"null" else bytes(given)
    added: dict[str, bytes | None] = {"continuous_usage_stats": b"true"}
    if shape.asks_usage is None:
        added["include_usage"] = b"true"
    return edit(options, added)
