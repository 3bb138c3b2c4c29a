"""A server that speaks the OpenAI API and gives nothing of itself away. Pure.

Only /v1/models answers to GET; there is no version, no health, no token ids and none of the
extra keys by which vLLM and SGLang are known. What a router cannot recognise, it must still
be able to use.
"""

from collections.abc import Mapping, Sequence

import msgspec

from router.sim import tokens
from router.sim.chat import prompt_for_vllm
from router.sim.decoding import VLLM, Choice, Limits, Manner, Piece
from router.sim.dialect import Situation
from router.sim.extras import embeddings
from router.sim.jobs import (
    BadField,
    Fields,
    Job,
    Json,
    Refused,
    Reply,
    Route,
    Wishes,
    dump,
    event,
    messages_of,
    prompts_of,
)

_DEFAULT_COMPLETION_TOKENS = 16


class PlainDialect:
    """An OpenAI-compatible server of unknown make."""

    manner: Manner = VLLM
    head_waits_for_first_event = False
    server_headers: tuple[tuple[str, str], ...] = ()
    chunked_header = ("transfer-encoding", "chunked")
    routes: Mapping[str, Route] = {
        "/v1/chat/completions": "chat",
        "/v1/completions": "completions",
    }

    def read(
        self, route: Route, body: bytes, headers: Mapping[str, str], now: Situation
    ) -> Job | Reply:
        try:
            return _read(route, _object(body), now)
        except BadField as bad:
            return self.error(400, f"Invalid value for '{bad.name}'.")
        except Refused as refused:
            return refused.reply

    def fixed(self, method: str, path: str, body: bytes, now: Situation) -> Reply:
        if (method, path) == ("GET", "/v1/models"):
            card = {"id": now.settings.model, "object": "model", "created": now.unix_time}
            cards = [card | {"owned_by": "organization-owner"}]
            return Reply(200, dump({"object": "list", "data": cards}))
        if (method, path) == ("POST", "/v1/embeddings"):
            try:
                answer = embeddings(_object(body), now, "embd-" + now.new_id(16))
            except Refused as refused:
                return refused.reply
            return Reply(200, dump(answer))
        return self.error(404, f"Invalid URL ({method} {path})")

    def opening(self, job: Job) -> list[bytes]:
        if job.route != "chat":
            return []
        delta: Json = {"role": "assistant", "content": ""}
        return [event(_chunk(job, [_delta(index, delta, None)])) for index in range(job.n)]

    def events(self, job: Job, choice: Choice, piece: Piece) -> list[bytes]:
        if job.route == "completions":
            shaped: Json = {"index": piece.index, "text": piece.text, "logprobs": None}
            return [event(_chunk(job, [shaped | {"finish_reason": piece.finish}]))]
        shown = []
        if piece.text:
            shown.append(_delta(piece.index, {"content": piece.text}, None))
        if piece.finish is not None:
            shown.append(_delta(piece.index, {}, piece.finish))
        return [event(_chunk(job, [one])) for one in shown]

    def closing(self, job: Job, choices: Sequence[Choice]) -> list[bytes]:
        if not job.wishes.usage:
            return []
        return [event(_chunk(job, []) | {"usage": _usage(job, choices)})]

    def unary(self, job: Job, choices: Sequence[Choice]) -> Json:
        shaped = []
        for choice in choices:
            one: Json = {"index": choice.index}
            if job.route == "chat":
                one["message"] = {"role": "assistant", "content": choice.text}
            else:
                one["text"] = choice.text
            shaped.append(one | {"logprobs": None, "finish_reason": choice.finish})
        name = "chat.completion" if job.route == "chat" else "text_completion"
        answer: Json = {"id": job.id, "object": name, "created": job.created, "model": job.model}
        return answer | {"choices": shaped, "usage": _usage(job, choices)}

    def error(self, status: int, message: str, kind: str = "") -> Reply:
        return Reply(status, dump(_error(status, message, kind)))

    def error_event(self, status: int, message: str, kind: str = "") -> bytes:
        return event(_error(status, message))


def _error(status: int, message: str, kind: str = "") -> Json:
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _refuse(message: str) -> Refused:
    return Refused(Reply(400, dump(_error(400, message))))


def _object(body: bytes) -> Fields:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _refuse("We could not parse the JSON body of your request.") from None
    if not isinstance(value, dict):
        raise _refuse("The body of your request is not a JSON object.")
    return Fields(value)


def _read(route: Route, fields: Fields, now: Situation) -> Job:
    if fields.text("model") not in (None, now.settings.model):
        message = f"The model '{fields.text('model')}' does not exist"
        raise Refused(Reply(404, dump(_error(404, message))))
    prompts = _chat_prompt(fields) if route == "chat" else _prompts(fields)
    context = now.settings.context_length
    budget = fields.integer("max_completion_tokens") or fields.integer("max_tokens")
    if budget is None and route == "completions":
        budget = _DEFAULT_COMPLETION_TOKENS
    longest = max(map(len, prompts))
    budget = min(budget or context, context - longest)
    if budget < 1:
        raise _refuse(f"This model's maximum context length is {context} tokens.")
    limits = Limits(budget, stop=fields.texts("stop"))
    prefix = "chatcmpl-" if route == "chat" else "cmpl-"
    return Job(
        route,
        id=prefix + now.new_id(24),
        rid="",
        created=now.unix_time,
        model=now.settings.model,
        prompts=tuple(prompts),
        limits=(limits,) * len(prompts),
        n=fields.integer("n") or 1,
        stream=fields.flag("stream"),
        wishes=Wishes(usage=fields.fields("stream_options").flag("include_usage")),
        greedy=fields.number("temperature") == 0,
    )


def _chat_prompt(fields: Fields) -> list[list[int]]:
    messages = messages_of(fields.get("messages"))
    if not messages:
        raise _refuse("'messages' must be a non-empty array of messages.")
    return [prompt_for_vllm(messages, continue_final=False, add_generation_prompt=True)]


def _prompts(fields: Fields) -> list[list[int]]:
    prompts = prompts_of(fields)
    if not prompts:
        raise _refuse("You must provide a prompt.")
    ids = [tokens.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    if not all(tokens.is_in_vocabulary(id_) for prompt in ids for id_ in prompt):
        raise _refuse("Invalid token in the prompt.")
    return ids


def _chunk(job: Job, choices: list[Json]) -> Json:
    name = "chat.completion.chunk" if job.route == "chat" else "text_completion"
    chunk: Json = {"id": job.id, "object": name, "created": job.created, "model": job.model}
    return chunk | {"choices": choices}


def _delta(index: int, delta: Json, finish: str | None) -> Json:
    return {"index": index, "delta": delta, "finish_reason": finish}


def _usage(job: Job, choices: Sequence[Choice]) -> Json:
    count = sum(choice.count for choice in choices)
    usage: Json = {"prompt_tokens": job.prompt_tokens, "completion_tokens": count}
    return usage | {"total_tokens": job.prompt_tokens + count}
