"""What generation is not about: log probabilities, embeddings, scores. Pure, and minimal.

They exist so that requests for them can be routed and compared; their numbers mean nothing,
but depend on their input.
"""

from collections.abc import Sequence

import msgspec

from router.sim import tokens
from router.sim.dialect import Situation
from router.sim.jobs import DONE, Fields, Json, event

_DIMENSIONS = 8


def _logprob(id_: int) -> float:
    return -1 - id_ / tokens.VOCABULARY_SIZE


def _text(id_: int) -> str:
    return tokens.decode([id_], with_special=True)


def logprobs_of_chat(
    ids: Sequence[int], wanted: int | None, *, bytes_first: bool = False
) -> Json | None:
    """`choices[].logprobs` of chat; null unless asked for. SGLang writes `bytes` first."""
    if wanted is None:
        return None
    entries = [_entry(id_, bytes_first) for id_ in ids]
    return {"content": [entry | {"top_logprobs": [entry][:wanted]} for entry in entries]}


def _entry(id_: int, bytes_first: bool) -> Json:
    token, data, logprob = _text(id_), list(tokens.VOCABULARY[id_]), _logprob(id_)
    if bytes_first:
        return {"token": token, "bytes": data, "logprob": logprob}
    return {"token": token, "logprob": logprob, "bytes": data}


def logprobs_of_completion(
    ids: Sequence[int], wanted: int | None, *, before: Sequence[int] | None = ()
) -> Json | None:
    """`choices[].logprobs` of completions; offsets go on after the tokens `before`.

    SGLang knows no offsets (`before` is None): it writes -1.
    """
    if wanted is None:
        return None
    offsets, offset = [], sum(len(_text(id_)) for id_ in before or ())
    for id_ in ids:
        offsets.append(-1 if before is None else offset)
        offset += len(_text(id_))
    return {
        "text_offset": offsets,
        "token_logprobs": [_logprob(id_) for id_ in ids],
        "tokens": [_text(id_) for id_ in ids],
        "top_logprobs": [{_text(id_): _logprob(id_)} for id_ in ids],
    }


def embeddings(fields: Fields, now: Situation, id_: str) -> Json:
    """A vector for every input text."""
    texts = fields.texts("input")
    ids = [tokens.encode(text) for text in texts]
    count = sum(map(len, ids))
    vectors = [
        {"index": index, "object": "embedding", "embedding": _vector(encoded)}
        for index, encoded in enumerate(ids)
    ]
    return {
        "id": id_,
        "object": "list",
        "created": now.unix_time,
        "model": now.settings.model,
        "data": vectors,
        "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
    }


def _vector(ids: Sequence[int]) -> list[float]:
    total = sum((place + 1) * id_ for place, id_ in enumerate(ids))
    return [(total * (axis + 1) % 997) / 997 for axis in range(_DIMENSIONS)]


def scores(fields: Fields, now: Situation, id_: str) -> Json:
    """A score for every document, text or pair."""
    documents = fields.texts("documents") or fields.texts("text_2") or ("",)
    ranked = [
        {"index": index, "relevance_score": _vector(tokens.encode(text))[0]}
        for index, text in enumerate(documents)
    ]
    return {"id": id_, "model": now.settings.model, "results": ranked}


def as_parsed(written: bytes, what: str, engine: str) -> bytes:
    """An event of a chat whose text a parser took for a thought or for a call of a tool.

    Thoughts are `reasoning` with vLLM 0.32 and `reasoning_content` with SGLang 0.5.23.
    """
    if written == DONE:
        return written
    chunk = msgspec.json.decode(written.removeprefix(b"data: "), type=dict[str, object])
    choices = msgspec.convert(chunk["choices"], type=list[dict[str, object]])
    for choice in choices:
        delta = msgspec.convert(choice["delta"], type=dict[str, object])
        text = delta.pop("content", None)
        if what == "tool_call":
            function = {"name": "look_up", "arguments": text}
            call = {"id": "call_1", "type": "function", "index": 0, "function": function}
            delta["tool_calls"] = [call]
        else:
            delta["reasoning" if engine == "vllm" else "reasoning_content"] = text
        choice["delta"] = delta
    return event(chunk | {"choices": choices})
