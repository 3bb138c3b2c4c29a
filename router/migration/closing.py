"""The end of an answer that the router writes itself.

A finish that was seen, a budget that was spent and a stop string across a seam need no other
worker: what is missing (waiting text, the finish, usage, `[DONE]`) is written here, in the shape of
the stream the client has been reading. It never gives anything a second time.
"""

from __future__ import annotations

from router.migration.chunks import Json, event_of
from router.migration.record import Record

DONE = b"data: [DONE]\n\n"


def close(record: Record, finish: str, stopped_by: str | int | None = None) -> bytes:
    """What is still missing of a good end; `finish` is used where none was given."""
    pieces = []
    if record.finish is None:
        pieces.append(_finish_event(record, finish, stopped_by))
        record.finish = finish
        record.waiting = ""
    pieces.append(usage_event(record))
    pieces.append(DONE)
    return b"".join(pieces)


def usage_event(record: Record) -> bytes:
    """The last chunk, with nothing but usage; empty where it was not asked for, given or known.

    Tokens of a poisoned stream are not counted.
    """
    is_known = not record.is_miscounted and record.poison is None
    if not record.shape.asks_usage or record.gave_usage or not is_known:
        return b""
    if record.prompt_tokens is None:
        return b""
    record.gave_usage = True
    return event_of(record.identity() | {"choices": [], "usage": usage_of(record)})


def usage_of(record: Record) -> Json:
    """Usage of the whole generation so far."""
    prompt, completion = record.prompt_tokens or 0, record.tokens
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


def _finish_event(record: Record, finish: str, stopped_by: str | int | None) -> bytes:
    known = record.choice_keys()
    choice: Json = {"index": 0}
    if record.shape.endpoint == "chat":
        choice["delta"] = {"content": record.waiting} if record.waiting else {}
    else:
        choice["text"] = record.waiting
    choice |= {"logprobs": None, "finish_reason": finish}
    # SGLang has `matched_stop` in every choice, vLLM `stop_reason` at the finish.
    choice["matched_stop" if "matched_stop" in known else "stop_reason"] = stopped_by
    chunk = record.identity() | {"choices": [choice]}
    if record.shape.asks_continuous_usage and record.prompt_tokens is not None:
        chunk["usage"] = usage_of(record)
    return event_of(chunk)
