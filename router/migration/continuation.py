"""What is sent to the next worker, built from the record and the client's own request.

Three forms: the original request again (nothing but preamble was delivered), the ids of prompt and
output (the next worker of the same model goes on as the first would have), or the text (its tokens
may differ, so it is the last resort). Members of the body that need no change go on byte for byte;
what belonged to the first engine alone is dropped. It never promises what a record cannot prove.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec
from attrs import frozen

from router.migration.agreement import Agreed, Disagreed
from router.migration.asking import Asking, ask, gives_ids, plan_asking
from router.migration.attempt import Attempt
from router.migration.closing import close
from router.migration.poison import Poison
from router.migration.reading import Unreadable
from router.migration.record import Record
from router.migration.seam import Seam
from router.migration.shape import Endpoint
from router.migration.splice import edit, read_members
from router.migration.stops import StopSeam, could_straddle
from router.migration.turns import extend_messages

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

#: Members that named the first attempt to its engine, or described its place in a PD pair.
_OF_ONE_ATTEMPT = (
    "request_id",
    "rid",
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disagg_prefill_dp_rank",
    "routed_dp_rank",
    "data_parallel_rank",
)


class Mode(Enum):
    """How a generation is carried; the metric's label."""

    RESTART = "restart"
    EXACT = "exact"
    TEXT = "text"


@frozen
class Target:
    """What has to be known of the worker that may continue."""

    engine: str
    #: Prompt and output together.
    context_length: int | None = None
    #: Its fingerprint equals that of the workers the ids came from.
    same_tokens: bool = False

    @property
    def sequence_max(self) -> int | None:
        """The longest sequence that it makes; SGLang 0.5.23 ends two tokens before its context."""
        if self.context_length is None:
            return None
        return self.context_length - (2 if self.engine == "sglang" else 0)


@frozen
class Continuation:
    """The next request."""

    path: str
    body: bytes
    mode: Mode
    #: Tokens of output that are carried.
    carried: int
    engine: str
    asking: Asking
    agreed: Agreed | None = None
    #: What the worker has to report as its prompt.
    expected: list[int] | int | None = None
    #: The worker leaves stop strings in; they are looked for and cut off here.
    owns_stops: bool = False


@frozen
class CompletedLocally:
    """Nothing is missing but the end; `tail` is what the client still gets."""

    reason: Literal["finish_seen", "budget_spent"]
    tail: bytes


@frozen
class CannotContinue:
    """No other worker can go on (or, for `unsuitable`, this one cannot)."""

    reason: Literal["poisoned", "too_long", "unsuitable", "rejected"]
    poison: Poison | None = None


Outcome = Continuation | CompletedLocally | CannotContinue


def build(
    record: Record,
    body: bytes,
    target: Target,
    agreed: Agreed | Disagreed,
    *,
    refused: frozenset[Mode] = frozenset(),
) -> Outcome:
    """How `target` is asked to go on. `refused` holds the forms that a 4xx has answered.

    `body` is the client's own. Changes nothing but for a local completion, which ends the record.
    """
    if record.finish is not None:
        return CompletedLocally("finish_seen", close(record, record.finish))
    if not record.has_content:
        return _restart(record, body, target)
    if record.is_too_long:
        return CannotContinue("too_long")
    if record.poison is not None:
        return CannotContinue("poisoned", record.poison)
    if (ended := _spent(record, agreed)) is not None:
        return ended
    kept = agreed.ids if isinstance(agreed, Agreed) else 0
    if not _can_show(record, target, kept):
        return CannotContinue("unsuitable")
    exact = _exact(record, body, target, agreed) if Mode.EXACT not in refused else None
    if exact is not None:
        return exact
    if Mode.TEXT in refused:
        return CannotContinue("rejected")
    return _text(record, body, target, agreed)


def _restart(record: Record, body: bytes, target: Target) -> Outcome:
    if not _can_show(record, target, 0):
        return CannotContinue("unsuitable")
    asking = plan_asking(record.shape, target.engine)
    path = PATHS[record.shape.endpoint]
    asked = ask(body, asking, record.shape)
    return Continuation(
        path=path, body=asked, mode=Mode.RESTART, carried=0, engine=target.engine, asking=asking
    )


def _can_show(record: Record, target: Target, kept: int) -> bool:
    """Whether a client that can count tokens goes on to see each of them once.

    Ids that it was shown and that are rolled back have to come again, which only ids can prove.
    """
    shape = record.shape
    if gives_ids(target.engine, shape.endpoint):
        return True
    if not shape.shows_tokens:
        return True
    return not shape.asks_ids and not record.replay and kept == len(record.ids)


def _spent(record: Record, agreed: Agreed | Disagreed) -> CompletedLocally | None:
    """The end, where every token of the answer is here and only the engine's word is missing."""
    shape = record.shape
    if not isinstance(agreed, Agreed):
        rest = record.rest()
        if rest is None or rest + record.tokens - record.tokens_at_text > 0:
            return None
        return CompletedLocally("budget_spent", close(record, "length"))
    is_whole = agreed.ids == len(record.ids)
    last = record.ids[-1] if record.ids else None
    if last in shape.stop_ids and record.tokens >= shape.min_tokens:
        return CompletedLocally("finish_seen", close(record, "stop", last))
    rest = record.rest()
    if rest is None or rest > 0 or not is_whole:
        return None
    record.carry(agreed.ids, agreed.held)
    return CompletedLocally("budget_spent", close(record, "length"))


#### exact


def _exact(
    record: Record, body: bytes, target: Target, agreed: Agreed | Disagreed
) -> Continuation | None:
    """The ids of prompt and output, or None where they are not known or not taken."""
    shape, prompt = record.shape, record.prompt_ids
    if not isinstance(agreed, Agreed) or prompt is None or not target.same_tokens:
        return None
    if shape.has_media or target.engine not in ("vllm", "sglang"):
        return None
    asking = plan_asking(shape, target.engine)
    ids = prompt + record.ids[: agreed.ids]
    tokens = record.tokens - len(record.ids) + agreed.ids
    changes = _common(record, body, target, tokens, len(ids))
    if changes is None:
        return None
    owns_stops = _take_stops(changes, record, record.text + agreed.held, target)
    changes["truncate_prompt_tokens"] = None
    given, expected = msgspec.json.encode(ids), ids
    if shape.endpoint == "completions":
        changes["prompt"] = given
    elif target.engine == "vllm":
        changes["kv_transfer_params"] = b'{"prompt_token_ids":%b}' % given
    elif asking.usage or (shape.asks_continuous_usage and shape.asks_usage):
        changes["input_ids"] = given
    else:
        return None  # nothing would tell whether the ids were taken
    is_told = shape.endpoint == "completions" or target.engine == "vllm"
    return Continuation(
        path=PATHS[shape.endpoint],
        body=ask(_edited(body, changes), asking, shape),
        mode=Mode.EXACT,
        carried=tokens,
        engine=target.engine,
        asking=asking,
        agreed=agreed,
        # SGLang's chat tells only how long its prompt was. Older releases ignore the ids silently.
        expected=expected if is_told else len(ids),
        owns_stops=owns_stops,
    )


#### text


def _text(record: Record, body: bytes, target: Target, agreed: Agreed | Disagreed) -> Outcome:
    shape = record.shape
    if shape.text_barred is not None:
        return CannotContinue("poisoned", shape.text_barred)
    known = agreed if isinstance(agreed, Agreed) else None
    if known is None and shape.shows_tokens and record.is_exact and record.ids:
        return CannotContinue("poisoned", Poison.SHOWN_TOKENS)
    text, tokens = record.text, record.tokens_at_text
    if known is not None:
        text += known.held
        tokens = record.tokens - len(record.ids) + known.ids
    changes = _common(record, body, target, tokens, (record.prompt_tokens or 0) + tokens)
    if changes is None:
        return CannotContinue("unsuitable")
    owns_stops = _take_stops(changes, record, text, target)
    try:
        refusal = _put_text(changes, record, body, target, text)
    except (msgspec.DecodeError, Unreadable, KeyError):
        refusal = CannotContinue("poisoned", Poison.MALFORMED)
    if refusal is not None:
        return refusal
    asking = plan_asking(shape, target.engine)
    return Continuation(
        path=PATHS[shape.endpoint],
        body=ask(_edited(body, changes), asking, shape),
        mode=Mode.TEXT,
        carried=tokens,
        engine=target.engine,
        asking=asking,
        agreed=known,
        owns_stops=owns_stops,
    )


def _put_text(
    changes: dict[str, bytes | None], record: Record, body: bytes, target: Target, text: str
) -> CannotContinue | None:
    members = read_members(body) or {}
    if record.shape.endpoint == "completions":
        prompt = msgspec.json.decode(members["prompt"], type=str)
        changes["prompt"] = msgspec.json.encode(prompt + text)
        return None
    turns = extend_messages(members, text, record.engine, target.engine)
    if turns is None:
        return CannotContinue("unsuitable")
    if isinstance(turns, Poison):
        return CannotContinue("poisoned", turns)
    changes["messages"] = turns
    changes |= {"continue_final_message": b"true", "add_generation_prompt": b"false"}
    return None


#### both


def _common(
    record: Record, body: bytes, target: Target, tokens: int, length: int
) -> dict[str, bytes | None] | None:
    """What every continuation changes; None where the target has no room for it.

    `tokens` of output are carried, `length` with the prompt.
    """
    shape, members = record.shape, read_members(body) or {}
    changes: dict[str, bytes | None] = dict.fromkeys(
        (name for name in _OF_ONE_ATTEMPT if name in members), None
    )
    room = None if target.context_length is None else target.context_length - length
    if room is not None and room < 1:
        return None
    most = record.sequence_max
    left = None if most is None else most - length
    if shape.budget is not None:
        rest = shape.budget - tokens
        rest = min(each for each in (rest, room, left) if each is not None)
        names = [name for name in ("max_completion_tokens", "max_tokens") if name in members]
        if shape.endpoint == "completions":
            names = ["max_tokens"]
        changes |= dict.fromkeys(names, b"%d" % rest)
        if shape.min_tokens:
            changes["min_tokens"] = b"%d" % min(max(0, shape.min_tokens - tokens), rest)
        return changes
    if most is not None and (target.sequence_max is None or target.sequence_max > most):
        changes["max_tokens"] = b"%d" % (most - length)
    if shape.min_tokens:
        changes["min_tokens"] = b"%d" % max(0, shape.min_tokens - tokens)
    return changes


def _take_stops(
    changes: dict[str, bytes | None], record: Record, text: str, target: Target
) -> bool:
    """Whether the router looks for stop strings itself, since one may have begun already."""
    shape = record.shape
    owns = target.engine == "vllm" and could_straddle(text, shape.stops)
    if owns:
        changes["include_stop_str_in_output"] = b"true"
    return owns


def _edited(body: bytes, changes: dict[str, bytes | None]) -> bytes:
    members = read_members(body) or {}
    return edit(
        body,
        {name: value for name, value in changes.items() if value is not None or name in members},
    )


def resume(record: Record, continuation: Continuation) -> Attempt:
    """The attempt that reads the answer to a continuation; the record goes over to it."""
    agreed = continuation.agreed
    if continuation.mode is Mode.RESTART:
        record.restart()
        record.engine = continuation.engine
    elif continuation.mode is Mode.TEXT:
        record.carry_text(None if agreed is None else (agreed.ids, agreed.held))
    elif agreed is not None:
        record.carry(agreed.ids, agreed.held)
    seam = Seam(
        record=record,
        asking=continuation.asking,
        engine=continuation.engine,
        stops=_stop_seam(record, owns=continuation.owns_stops),
        base=record.tokens,
    )
    return Attempt(
        record,
        continuation.engine,
        continuation.asking,
        seam=seam,
        expected=continuation.expected,
        is_fresh=continuation.mode is Mode.RESTART,
    )


def _stop_seam(record: Record, *, owns: bool) -> StopSeam:
    shape = record.shape
    stops = shape.stops if record.has_content and record.is_kept else ()
    before = record.text if stops or record.waiting else ""
    return StopSeam(before, len(record.waiting), stops, keeps=shape.keeps_stop, owns=owns)
