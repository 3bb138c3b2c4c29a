"""vLLM's answers: chunks, whole responses, errors and fixed endpoints (0.32.0). Pure.

Key order, nulls and which chunk carries what are those of the recorded streams; the tests
compare with them.
"""

import json
from collections.abc import Mapping, Sequence

from router.sim import tokens
from router.sim.decoding import VLLM, Choice, Manner, Piece
from router.sim.dialect import Situation
from router.sim.extras import embeddings, logprobs_of_chat, logprobs_of_completion, scores
from router.sim.jobs import BadField, Job, Json, Refused, Reply, Route, dump, event
from router.sim.vllm_checks import (
    check_model,
    error_reply,
    read_chat_prompt,
    read_job,
    read_messages,
    read_object,
    refuse,
    refuse_invalid,
)

_KINDS = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
_KINDS |= {429: "TooManyRequestsError", 503: "ServiceUnavailableError"}


class VllmDialect:
    """vLLM 0.32.0."""

    manner: Manner = VLLM
    head_waits_for_first_event = False
    server_headers: tuple[tuple[str, str], ...] = (("server", "uvicorn"),)
    chunked_header = ("transfer-encoding", "chunked")
    routes: Mapping[str, Route] = {
        "/v1/chat/completions": "chat",
        "/v1/completions": "completions",
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
            return refuse_invalid(f"body.{bad.name}", bad.kind, bad.message).reply

    def opening(self, job: Job) -> list[bytes]:
        if job.route != "chat":
            return []
        events = [event(self._role_chunk(job, index)) for index in range(job.n)]
        if job.echo_text:
            delta = {"content": job.echo_text}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            events.append(event(self._chunk(job, [choice])))
        return events

    def _role_chunk(self, job: Job, index: int) -> Json:
        delta = {"role": job.role, "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._chunk(job, [choice])
        if job.wishes.usage_everywhere:
            chunk["usage"] = _usage_so_far(job, job.prompt_tokens, 0)
        chunk["prompt_token_ids"] = list(job.prompts[0]) if job.wishes.token_ids else None
        chunk["prompt_text"] = None
        return chunk

    def events(self, job: Job, choice: Choice, piece: Piece) -> list[bytes]:
        shape = self._chat_choice if job.route == "chat" else self._completion_choice
        chunk = self._chunk(job, [shape(job, choice, piece)])
        if job.wishes.usage_everywhere:
            chunk["usage"] = _usage_so_far(job, len(choice.prompt), choice.count)
        if piece.finish is not None and not job.wishes.usage:
            chunk["system_fingerprint"] = job.fingerprint
        return [event(chunk)]

    def _chunk(self, job: Job, choices: list[Json]) -> Json:
        name = "chat.completion.chunk" if job.route == "chat" else "text_completion"
        return {
            "id": job.id,
            "object": name,
            "created": job.created,
            "model": job.model,
            "choices": choices,
        }

    def _chat_choice(self, job: Job, choice: Choice, piece: Piece) -> Json:
        wants = job.wishes
        shaped: Json = {
            "index": piece.index,
            "delta": {"content": piece.text},
            "logprobs": logprobs_of_chat(piece.ids, wants.logprobs),
            "finish_reason": piece.finish,
        }
        if piece.finish is not None:
            shaped["stop_reason"] = _stop_reason(piece.stopped_by)
        shaped["token_ids"] = list(piece.ids) if wants.token_ids else None
        return shaped

    def _completion_choice(self, job: Job, choice: Choice, piece: Piece) -> Json:
        wants = job.wishes
        is_first = choice.count == len(piece.ids)
        echoed = tokens.decode(choice.prompt) if is_first and _echoes(job) else ""
        shows_prompt = is_first and (wants.token_ids or wants.echo)
        before = choice.ids[: len(choice.ids) - len(piece.ids)]
        return {
            "index": piece.index,
            "text": echoed + piece.text,
            "logprobs": logprobs_of_completion(piece.ids, wants.logprobs, before=before),
            "finish_reason": piece.finish,
            "stop_reason": _stop_reason(piece.stopped_by),
            "prompt_token_ids": list(choice.prompt) if shows_prompt else None,
            "token_ids": list(piece.ids) if wants.token_ids else None,
        }

    def closing(self, job: Job, choices: Sequence[Choice]) -> list[bytes]:
        if not job.wishes.usage:
            return []
        chunk = self._chunk(job, [])
        chunk["usage"] = _usage(job.prompt_tokens, sum(choice.count for choice in choices))
        chunk["system_fingerprint"] = job.fingerprint
        return [event(chunk)]

    def unary(self, job: Job, choices: Sequence[Choice]) -> Json:
        is_chat = job.route == "chat"
        shape = self._whole_chat_choice if is_chat else self._whole_completion_choice
        answer: Json = {
            "id": job.id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": job.created,
            "model": job.model,
            "choices": [shape(job, choice) for choice in choices],
            "service_tier": None,
            "system_fingerprint": job.fingerprint,
            "usage": _usage(job.prompt_tokens, sum(choice.count for choice in choices))
            | {"prompt_tokens_details": None, "completion_tokens_details": None},
        }
        if is_chat:
            ids = list(job.prompts[0]) if job.wishes.token_ids else None
            answer |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
        return answer | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}

    def _whole_chat_choice(self, job: Job, choice: Choice) -> Json:
        message: Json = {"role": job.role, "content": job.echo_text + choice.text}
        for absent in ("refusal", "annotations", "audio", "function_call", "reasoning"):
            message[absent] = None
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs_of_chat(choice.ids, job.wishes.logprobs),
            "finish_reason": choice.finish,
            "stop_reason": _stop_reason(choice.stopped_by),
            "token_ids": list(choice.ids) if job.wishes.token_ids else None,
            "routed_experts": None,
        }

    def _whole_completion_choice(self, job: Job, choice: Choice) -> Json:
        wants = job.wishes
        echoed = tokens.decode(choice.prompt) if _echoes(job) else ""
        return {
            "index": choice.index,
            "text": echoed + choice.text,
            "logprobs": logprobs_of_completion(choice.ids, wants.logprobs),
            "finish_reason": choice.finish,
            "stop_reason": _stop_reason(choice.stopped_by),
            "token_ids": list(choice.ids) if wants.token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": list(choice.prompt) if wants.token_ids else None,
            "routed_experts": None,
        }

    def error(self, status: int, message: str, kind: str = "") -> Reply:
        return error_reply(status, message, kind or _KINDS.get(status, "InternalServerError"))

    def error_event(self, status: int, message: str, kind: str = "") -> bytes:
        kind = kind or _KINDS.get(status, "InternalServerError")
        error = {"message": message, "type": kind, "param": None, "code": status}
        # With spaces: this one is written by the standard library's encoder (0.32.0).
        return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


def _stop_reason(stopped_by: str | int | None) -> str | int | None:
    """The end-of-sequence token is no stop reason; every other stop is named."""
    return None if stopped_by == tokens.TURN_END else stopped_by


def _echoes(job: Job) -> bool:
    """Asking for ids empties the echo (0.32.0): the text would no longer match them."""
    return job.wishes.echo and not job.wishes.token_ids


def _usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def _usage_so_far(job: Job, prompt_tokens: int, completion_tokens: int) -> Json:
    usage = _usage(prompt_tokens, completion_tokens)
    return usage | {"completion_tokens_details": None} if job.route == "chat" else usage


def _get(path: str, now: Situation) -> Reply:
    match path:
        case "/health":
            return Reply(now.health, content_type=None)
        case "/ping":
            return Reply(now.health, content_type=None)
        case "/version":
            return Reply(200, dump({"version": "0.32.0"}))
        case "/load":
            return Reply(200, dump({"server_load": now.running}))
        case "/v1/models":
            return Reply(200, dump({"object": "list", "data": [_model_card(now)]}))
        case "/metrics":
            line = f'vllm:num_requests_running{{model_name="{now.settings.model}"}} {now.running}\n'
            return Reply(200, line.encode(), "text/plain; version=1.0.0; charset=utf-8")
    return Reply(404, dump({"detail": "Not Found"}))


def _model_card(now: Situation) -> Json:
    permission: Json = {
        "id": "modelperm-" + now.new_id(16),
        "object": "model_permission",
        "created": now.unix_time,
    }
    permission |= {"allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True}
    permission |= {"allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False}
    permission |= {"organization": "*", "group": None, "is_blocking": False}
    return {
        "id": now.settings.model,
        "object": "model",
        "created": now.unix_time,
        "owned_by": "vllm",
        "root": f"/models/{now.settings.model}",
        "parent": None,
        "max_model_len": now.settings.context_length,
        "permission": [permission],
    }


def _post(path: str, body: bytes, now: Situation) -> Reply:
    if path not in (
        "/tokenize",
        "/detokenize",
        "/v1/embeddings",
        "/rerank",
        "/v1/rerank",
        "/score",
    ):
        return Reply(404, dump({"detail": "Not Found"}))
    fields = read_object(body, {})
    check_model(fields, now)
    match path:
        case "/tokenize":
            if fields.get("messages") is not None:
                ids = read_chat_prompt(fields, read_messages(fields))
            else:
                ids = tokens.encode(fields.text("prompt") or "")
            strings = [tokens.decode([id_], with_special=True) for id_ in ids]
            answer: Json = {"count": len(ids), "max_model_len": now.settings.context_length}
            wants_strings = fields.flag("return_token_strs")
            answer |= {"tokens": ids, "token_strs": strings if wants_strings else None}
            return Reply(200, dump(answer))
        case "/detokenize":
            given = fields.ids("tokens")
            if given is None:
                raise refuse_invalid("body.tokens", "missing", "Field required")
            if not all(map(tokens.is_in_vocabulary, given)):
                raise refuse("Token id is out of vocabulary")
            return Reply(200, dump({"prompt": tokens.decode(given, with_special=True)}))
        case "/v1/embeddings":
            return Reply(200, dump(embeddings(fields, now, "embd-" + now.new_id(16))))
    return Reply(200, dump(scores(fields, now, "score-" + now.new_id(16))))
