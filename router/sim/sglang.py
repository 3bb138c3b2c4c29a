"""SGLang's answers: chunks, whole responses, errors and fixed endpoints (0.5.23). Pure.

Key order, nulls and which chunk carries what are those of the recorded streams; the tests
compare with them.
"""

import json
from collections.abc import Mapping, Sequence

from router.sim import tokens
from router.sim.decoding import SGLANG, Choice, Manner, Piece
from router.sim.dialect import Situation
from router.sim.extras import embeddings, logprobs_of_chat, logprobs_of_completion, scores
from router.sim.jobs import BadField, Fields, Job, Json, Refused, Reply, Route, dump, event
from router.sim.sglang_checks import (
    error_reply,
    read_chat_prompt,
    read_job,
    read_messages,
    read_object,
    refuse_invalid,
)

_KINDS = {400: "BadRequestError", 404: "NotFoundError", 429: "TooManyRequestsError"}
_KINDS |= {500: "InternalServerError", 503: "ServiceUnavailableError"}
_EMPTY_PATHS = ("/health", "/health_generate", "/ready", "/ping")
_NOT_FOUND = Reply(404, dump({"detail": "Not Found"}))


class SglangDialect:
    """SGLang 0.5.23."""

    manner: Manner = SGLANG
    head_waits_for_first_event = True
    server_headers: tuple[tuple[str, str], ...] = (("server", "uvicorn"),)
    chunked_header = ("Transfer-Encoding", "chunked")
    routes: Mapping[str, Route] = {
        "/v1/chat/completions": "chat",
        "/v1/completions": "completions",
        "/generate": "generate",
    }

    def read(
        self, route: Route, body: bytes, headers: Mapping[str, str], now: Situation
    ) -> Job | Reply:
        return read_job(route, body, headers, now)

    def fixed(self, method: str, path: str, body: bytes, now: Situation) -> Reply:
        try:
            return _get(path, now) if method == "GET" else _post(path, body, now)
        except Refused as refused:
            return refused.reply
        except BadField as bad:
            return refuse_invalid(path, ("body", bad.name), bad.kind, bad.message).reply

    def opening(self, job: Job) -> list[bytes]:
        return []

    def events(self, job: Job, choice: Choice, piece: Piece) -> list[bytes]:
        if job.route == "chat":
            return self._chat_events(job, choice, piece)
        if not piece.ids and piece.finish is None:
            return []
        if job.route == "generate":
            return [event(_generated(job, choice))]
        chunk = _chunk(job, [_completion_choice(job, choice, piece)])
        usage = _full_usage(len(choice.prompt), choice.count)
        chunk["usage"] = usage if job.wishes.usage_everywhere else None
        return [event(chunk)]

    def _chat_events(self, job: Job, choice: Choice, piece: Piece) -> list[bytes]:
        """The role comes with a choice's first text, its finish in a chunk of its own."""
        chunks: list[Json] = []
        delta: Json = {"reasoning_content": None}
        if choice.count == len(piece.ids) and (piece.ids or piece.finish):
            opened = delta | {"role": "assistant", "content": ""}
            chunks.append(_chunk(job, [_chat_choice(piece.index, opened)]))
        if piece.text:
            text = _chat_choice(piece.index, delta | {"content": piece.text})
            text["logprobs"] = logprobs_of_chat(piece.ids, job.wishes.logprobs, bytes_first=True)
            chunk = _chunk(job, [text])
            if job.wishes.usage_everywhere:
                chunk["usage"] = _full_usage(len(choice.prompt), choice.count)
            chunks.append(chunk)
        if piece.finish is not None:
            finish = _chat_choice(piece.index, delta)
            finish |= {"finish_reason": piece.finish, "matched_stop": piece.stopped_by}
            chunks.append(_chunk(job, [finish]))
        return [event(chunk) for chunk in chunks]

    def closing(self, job: Job, choices: Sequence[Choice]) -> list[bytes]:
        wants, count = job.wishes, sum(choice.count for choice in choices)
        closing = []
        if wants.sglext_input or wants.sglext_output:
            closing.append(self._sglext(job, choices))
        if wants.usage and job.route != "generate":
            usage = _full_usage if job.route == "chat" else _usage
            closing.append(event(_chunk(job, []) | {"usage": usage(job.prompt_tokens, count)}))
        return closing

    def _sglext(self, job: Job, choices: Sequence[Choice]) -> bytes:
        sglext: Json = {}
        if job.wishes.sglext_input:
            sglext["input_ids"] = list(job.prompts[0])
        if job.wishes.sglext_output:
            sglext["output_ids"] = [list(choice.ids) for choice in choices]
        written = event(_chunk(job, []) | {"usage": None, "sglext": sglext})
        return b"event: sglext_ids\n" + written if job.wishes.sglext_framed else written

    def unary(self, job: Job, choices: Sequence[Choice]) -> Json:
        if job.route == "generate":
            return _generated(job, choices[0])
        is_chat = job.route == "chat"
        shape = _whole_chat_choice if is_chat else _whole_completion_choice
        count = sum(choice.count for choice in choices)
        spans = [{"version": "default", "start": 0, "end": count}]
        return {
            "id": job.id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": job.created,
            "model": job.model,
            "choices": [shape(job, choice) for choice in choices],
            "usage": _full_usage(job.prompt_tokens, count),
            "metadata": {"weight_version": "default", "weight_versions": spans},
        }

    def error(self, status: int, message: str, kind: str = "") -> Reply:
        return error_reply(status, message, kind or _KINDS.get(status, "InternalServerError"))

    def error_event(self, status: int, message: str, kind: str = "") -> bytes:
        kind = kind or _KINDS.get(status, "InternalServerError")
        error: Json = {"object": "error", "message": message, "type": kind}
        error |= {"param": None, "code": status}
        return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


def _chunk(job: Job, choices: list[Json]) -> Json:
    name = "chat.completion.chunk" if job.route == "chat" else "text_completion"
    chunk: Json = {"id": job.id, "object": name, "created": job.created, "model": job.model}
    return chunk | {"choices": choices}


def _chat_choice(index: int, delta: Json) -> Json:
    choice: Json = {"index": index, "delta": delta, "logprobs": None}
    return choice | {"finish_reason": None, "matched_stop": None}


def _completion_choice(job: Job, choice: Choice, piece: Piece) -> Json:
    is_first = choice.count == len(piece.ids)
    echoed = tokens.decode(choice.prompt) if is_first and job.wishes.echo else ""
    shaped: Json = {
        "index": piece.index,
        "text": echoed + piece.text,
        "logprobs": logprobs_of_completion(piece.ids, job.wishes.logprobs, before=None),
        "finish_reason": piece.finish,
        "matched_stop": piece.stopped_by,
    }
    if job.wishes.token_ids:
        shaped["token_ids"] = list(piece.ids)
        if is_first:
            shaped["prompt_token_ids"] = list(choice.prompt)
    return shaped


def _whole_chat_choice(job: Job, choice: Choice) -> Json:
    shaped: Json = {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "reasoning_content": None},
        "logprobs": logprobs_of_chat(choice.ids, job.wishes.logprobs, bytes_first=True),
        "finish_reason": choice.finish,
        "matched_stop": choice.stopped_by,
    }
    if job.wishes.token_ids:
        shaped["prompt_token_ids"] = list(choice.prompt)
        shaped["response_token_ids"] = list(choice.ids)
    return shaped


def _whole_completion_choice(job: Job, choice: Choice) -> Json:
    echoed = tokens.decode(choice.prompt) if job.wishes.echo else ""
    shaped: Json = {
        "index": choice.index,
        "text": echoed + choice.text,
        "logprobs": logprobs_of_completion(choice.ids, job.wishes.logprobs, before=None),
        "finish_reason": choice.finish,
        "matched_stop": choice.stopped_by,
    }
    if job.wishes.token_ids:
        shaped["token_ids"] = list(choice.ids)
        shaped["prompt_token_ids"] = list(choice.prompt)
    return shaped


def _generated(job: Job, choice: Choice) -> Json:
    """/generate repeats the whole text and all ids in every event."""
    meta: Json = {
        "id": job.rid,
        "finish_reason": _finish_of_generate(choice),
        "prompt_tokens": len(choice.prompt),
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": choice.count,
        "cached_tokens": 0,
    }
    if choice.finish is not None:
        meta["weight_versions"] = [{"version": "default", "start": 0, "end": choice.count}]
    meta |= {"cached_tokens_details": None, "dp_rank": None}
    if choice.finish is not None:
        meta["e2e_latency"] = 0.0
    return {"text": choice.text, "output_ids": list(choice.ids), "meta_info": meta}


def _finish_of_generate(choice: Choice) -> Json | None:
    match choice.finish:
        case None:
            return None
        case "length":
            return {"type": "length", "length": choice.count}
        case "stop":
            return {"type": "stop", "matched": choice.stopped_by}
    return {"type": choice.finish, "message": "Aborted", "status_code": None, "err_type": None}


def _usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "reasoning_tokens": 0,
    }


def _full_usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def _get(path: str, now: Situation) -> Reply:
    if path in _EMPTY_PATHS:
        return Reply(200 if path == "/ping" else now.health, content_type=None)
    match path:
        case "/":
            return Reply(200, b'"SGLang is running"')
        case "/v1/models":
            return Reply(200, dump({"object": "list", "data": [_model_card(now)]}))
        case "/server_info" | "/get_server_info":
            return Reply(200, dump(_server_info(now)))
        case "/model_info" | "/get_model_info":
            return Reply(200, dump(_model_info(now)))
        case "/v1/loads":
            loads = [{"dp_rank": 0, "num_running_reqs": now.running, "num_waiting_reqs": 0}]
            return Reply(200, dump({"version": "0.5.23", "loads": loads}))
    if path.startswith("/v1/models/"):
        name = path.removeprefix("/v1/models/")
        if name == now.settings.model:
            return Reply(200, dump(_model_card(now)))
        error: Json = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
        }
        error |= {"param": "model", "code": "model_not_found"}
        return Reply(404, dump({"error": error}))
    return _NOT_FOUND


def _model_card(now: Situation) -> Json:
    name, created = now.settings.model, now.unix_time
    card: Json = {"id": name, "object": "model", "created": created, "owned_by": "sglang"}
    return card | {"root": name, "parent": None, "max_model_len": now.settings.context_length}


def _server_info(now: Situation) -> Json:
    """The few of several hundred settings that a router may look at."""
    settings = now.settings
    path = f"/models/{settings.model}"
    info: Json = {"model_path": path, "tokenizer_path": path, "served_model_name": settings.model}
    info |= {"context_length": settings.context_length, "is_embedding": False}
    info |= {"disaggregation_mode": _pd_mode(now), "disaggregation_bootstrap_port": now.kv_port}
    return info | {"dp_size": 1, "version": "0.5.23"}


def _model_info(now: Situation) -> Json:
    settings = now.settings
    path = f"/models/{settings.model}"
    info: Json = {"model_path": path, "served_model_name": settings.model, "tokenizer_path": path}
    info |= {"is_generation": True, "preferred_sampling_params": None, "weight_version": "default"}
    info |= {"reasoning_parser": None, "tool_call_parser": None}
    return info | {"disaggregation_mode": _pd_mode(now)}


def _pd_mode(now: Situation) -> str:
    role = now.settings.role
    return "null" if role == "mixed" else role


def _post(path: str, body: bytes, now: Situation) -> Reply:
    match path:
        case "/tokenize" | "/v1/tokenize":
            return Reply(200, dump(_tokenized(path, read_object(path, body, {}), now)))
        case "/detokenize" | "/v1/detokenize":
            return Reply(200, dump(_detokenized(path, read_object(path, body, {}))))
        case "/v1/embeddings":
            fields = read_object(path, body, {})
            return Reply(200, dump(embeddings(fields, now, now.new_id(32))))
        case "/v1/rerank" | "/v1/score":
            fields = read_object(path, body, {})
            return Reply(200, dump(scores(fields, now, now.new_id(32))))
    return _NOT_FOUND


def _tokenized(path: str, fields: Fields, now: Situation) -> Json:
    if fields.get("messages") is not None:
        ids = read_chat_prompt(fields, read_messages(path, fields))
    else:
        ids = tokens.encode(fields.text("prompt") or "")
    # The tokenizer's own limit, which is not the server's context length (0.5.23).
    return {"tokens": ids, "count": len(ids), "max_model_len": 2 * now.settings.context_length}


def _detokenized(path: str, fields: Fields) -> Json:
    given = fields.ids("tokens")
    if given is None:
        raise refuse_invalid(path, ("body", "tokens"), "missing", "Field required")
    keeps_special = not fields.flag("skip_special_tokens", True)
    known = [id_ for id_ in given if tokens.is_in_vocabulary(id_)]
    return {"text": tokens.decode(known, with_special=keeps_special)}
