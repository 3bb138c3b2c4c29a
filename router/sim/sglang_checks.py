"""How SGLang reads and refuses generation requests (0.5.23, probed on the live server). Pure."""

from collections.abc import Mapping
from typing import TypeVar

import attrs
import msgspec

from router.sim import tokens
from router.sim.chat import prompt_for_sglang
from router.sim.decoding import Limits
from router.sim.dialect import Situation
from router.sim.jobs import (
    DONE,
    BadField,
    Fields,
    Job,
    Json,
    Meeting,
    Message,
    Refused,
    Reply,
    Route,
    Wishes,
    dump,
    event,
    is_ids,
    messages_of,
    prompts_of,
)

_DEFAULT_COMPLETION_TOKENS = 16
_DEFAULT_GENERATE_TOKENS = 128


def error_reply(status: int, message: str, kind: str = "BadRequestError") -> Reply:
    """SGLang's flat error body."""
    error = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return Reply(status, dump(error))


def refuse(message: str, kind: str = "BadRequestError") -> Refused:
    return Refused(error_reply(400, message, kind))


def refuse_invalid(path: str, location: tuple[str | int, ...], kind: str, what: str) -> Refused:
    """A 400 of the body's schema, which shows where in the server's source it was raised."""
    detail = f"{{'type': '{kind}', 'loc': {location}, 'msg': '{what}'}}"
    place = f'File "sglang/srt/entrypoints/http_server.py", line 1860\n    POST {path} [{detail}]'
    return refuse(f"1 validation error:\n  {detail}\n\n  {place}", "Bad Request")


def read_object(path: str, body: bytes, headers: Mapping[str, str]) -> Fields:
    if not headers.get("content-type", "application/json").startswith("application/json"):
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        raise refuse(f"1 validation error:\n  {message}", "Bad Request")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise refuse_invalid(path, ("body", 1), "json_invalid", "JSON decode error") from None
    if not isinstance(value, dict):
        # The server's own error handler trips over it (0.5.23).
        raise Refused(Reply(500, b"Internal Server Error", "text/plain; charset=utf-8"))
    return Fields(value)


_PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
}


def read_job(route: Route, body: bytes, headers: Mapping[str, str], now: Situation) -> Job | Reply:
    """Check a request for chat, completions or SGLang's own /generate."""
    path = _PATHS[route]
    readers = {"chat": _read_chat, "completions": _read_completion, "generate": _read_generate}
    try:
        return readers[route](read_object(path, body, headers), headers, now)
    except BadField as bad:
        return refuse_invalid(path, ("body", bad.name), bad.kind, bad.message).reply
    except Refused as refused:
        return refused.reply


def _read_chat(fields: Fields, headers: Mapping[str, str], now: Situation) -> Job:
    messages = read_messages("/v1/chat/completions", fields)
    stream = fields.flag("stream")
    for flag in ("return_token_ids", "return_prompt_token_ids", "return_meta_info"):
        if stream and fields.flag(flag):
            where = " on /v1/chat/completions" if flag == "return_token_ids" else ""
            message = f"{flag} is not supported with streaming{where}."
            raise refuse(f"{message} Please set stream=false when using {flag}=true.", "BadRequest")
    _check_choices(fields)
    if fields.get("tools") and fields.get("tool_choice") not in (None, "auto", "none"):
        raise refuse(
            "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported"
            " when the server is launched with --grammar-backend none"
        )
    context = now.settings.context_length
    budget = fields.integer("max_completion_tokens")
    budget = fields.integer("max_tokens") if budget is None else budget
    if budget is not None and budget > context:
        raise refuse(
            f"max_completion_tokens is too large: {budget}."
            f"This model supports at most {context} completion tokens."
        )
    given = fields.ids("input_ids")
    prompt = list(given) if given is not None else read_chat_prompt(fields, messages)
    return _job("chat", fields, headers, now, [prompt], budget, _chat_logprobs(fields))


def read_messages(path: str, fields: Fields) -> list[Message]:
    if fields.get("messages") is None:
        raise refuse_invalid(path, ("body", "messages"), "missing", "Field required")
    messages = messages_of(fields.get("messages"))
    if messages is None:
        raise BadField("messages", "list_type", "Input should be a valid list")
    if not messages:
        raise refuse("Messages cannot be empty.")
    return messages


def read_chat_prompt(fields: Fields, messages: list[Message]) -> list[int]:
    return prompt_for_sglang(messages, continue_final=fields.flag("continue_final_message"))


def _check_choices(fields: Fields) -> None:
    n = fields.integer("n")
    if n is not None and n < 1:
        raise refuse("range() arg 3 must not be zero", "BadRequest")


def _read_completion(fields: Fields, headers: Mapping[str, str], now: Situation) -> Job:
    path = "/v1/completions"
    if "prompt" not in fields.values:
        raise refuse_invalid(path, ("body", "prompt"), "missing", "Field required")
    if fields.has_null("max_tokens"):
        raise BadField("max_tokens", "int_type", "Input should be a valid integer")
    budget = fields.integer("max_tokens")
    budget = _DEFAULT_COMPLETION_TOKENS if budget is None else budget
    if budget < 1:
        raise BadField("max_tokens", "value_error", "Value error, max_tokens must be positive")
    _check_choices(fields)
    if fields.get("prompt") in ("", []):
        raise refuse("Prompt cannot be empty")
    prompts = prompts_of(fields)
    if prompts is None:
        raise BadField("prompt", "list_type", "Input should be a valid list")
    ids = [tokens.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    given = fields.get("prompt")
    is_batch = isinstance(given, list) and not is_ids(given)
    job = _job("completions", fields, headers, now, ids, budget, fields.integer("logprobs"))
    return attrs.evolve(job, is_batch=is_batch)


def _read_generate(fields: Fields, headers: Mapping[str, str], now: Situation) -> Job:
    given = fields.ids("input_ids")
    text = fields.text("text")
    if given is None and text is None:
        message = "Either text, input_ids or input_embeds should be provided."
        raise Refused(_generate_error(400, message, in_stream=False))
    prompt = list(given) if given is not None else tokens.encode(text or "")
    sampling = fields.fields("sampling_params")
    budget = sampling.integer("max_new_tokens")
    budget = _DEFAULT_GENERATE_TOKENS if budget is None else budget
    merged = Fields({**sampling.values, **fields.values})
    try:
        return _job("generate", merged, headers, now, [prompt], budget, None)
    except Refused as refused:
        message = msgspec.json.decode(refused.reply.body)["message"]
        raise Refused(_generate_error(400, message, in_stream=fields.flag("stream"))) from None


def _generate_error(status: int, message: str, *, in_stream: bool) -> Reply:
    """/generate nests its errors, and a stream that is refused is a 200 (0.5.23)."""
    if not in_stream:
        return Reply(status, dump({"error": {"message": message}}))
    error: Json = {"message": message, "type": "invalid_request_error"}
    error |= {"code": status, "retryable": False}
    return Reply(200, event({"error": error}) + DONE, "text/event-stream; charset=utf-8")


def _job(
    route: Route,
    fields: Fields,
    headers: Mapping[str, str],
    now: Situation,
    prompts: list[list[int]],
    budget: int | None,
    logprobs: int | None,
) -> Job:
    n = fields.integer("n") or 1
    given = fields.texts("rid")
    rid = given[0] if given else now.new_id(32)
    context = now.settings.context_length
    return Job(
        route,
        id=rid,
        # Each of several samples gets an id of its own, which nobody is told.
        rid=rid if n == 1 else now.new_id(32),
        created=now.unix_time,
        # Any model name is served and repeated (0.5.23).
        model=fields.text("model") or now.settings.model,
        prompts=tuple(prompts),
        limits=tuple(_limits(fields, len(prompt), budget, context) for prompt in prompts),
        n=n,
        stream=fields.flag("stream"),
        wishes=_wishes(fields, headers, logprobs),
        greedy=fields.number("temperature") == 0,
        meetings=_meetings(fields, len(prompts) * n, rid, now),
    )


def _meetings(fields: Fields, count: int, rid: str, now: Situation) -> tuple[Meeting, ...]:
    """Where each sequence meets its other half: a room for each, counted on from the only one."""
    rooms = _one_or_list(fields, "bootstrap_room", int)
    hosts = _one_or_list(fields, "bootstrap_host", str)
    ports = _one_or_list(fields, "bootstrap_port", int)
    if now.settings.role == "mixed":
        return ()
    if rooms is None:
        raise refuse(
            "Invalid request: Disaggregated request received without bootstrap room id."
            f" req.rid='{rid}'"
        )
    return tuple(
        Meeting(
            hosts[place % len(hosts)] if isinstance(hosts, list) else hosts,
            ports[place % len(ports)] if isinstance(ports, list) else ports,
            rooms[place % len(rooms)] if isinstance(rooms, list) else rooms + place,
            is_listed=isinstance(rooms, list),
        )
        for place in range(count)
    )


T = TypeVar("T", int, str)


def _one_or_list(fields: Fields, name: str, kind: type[T]) -> T | list[T | None] | None:
    """A field that may also be a list, one item a sequence."""
    value = fields.get(name)
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    if isinstance(value, list) and all(each is None or isinstance(each, kind) for each in value):
        return value
    raise BadField(name, "list_type", "Input should be a valid list")


def _limits(fields: Fields, prompt_tokens: int, budget: int | None, context: int) -> Limits:
    if prompt_tokens >= context:
        raise refuse(
            f"The input ({prompt_tokens} tokens) is longer than the model's context length"
            f" ({context} tokens)."
        )
    if budget is None:
        budget = context - prompt_tokens
    if budget < 0:
        raise refuse(f"max_new_tokens must be at least 0, got {budget}.")
    if prompt_tokens + budget > context:
        raise refuse(
            f"Requested token count exceeds the model's maximum context length of {context} tokens."
            f" You requested a total of {prompt_tokens + budget} tokens: {prompt_tokens} tokens"
            f" from the input messages and {budget} tokens for the completion. Please reduce the"
            " number of tokens in the input messages or the completion to fit within the limit."
        )
    # Its scheduler ends two tokens before the context is full (0.5.23).
    budget = min(budget, max(0, context - 2 - prompt_tokens))
    min_tokens = fields.integer("min_tokens") or fields.integer("min_new_tokens") or 0
    if not 0 <= min_tokens <= budget:
        raise refuse(f"min_new_tokens must be in [0, max_new_tokens({budget})], got {min_tokens}.")
    return Limits(
        budget,
        min_tokens=min_tokens,
        ignore_eos=fields.flag("ignore_eos"),
        stop=fields.texts("stop"),
        stop_ids=frozenset(fields.ids("stop_token_ids") or ()),
        keeps_stop_text=fields.flag("no_stop_trim"),
    )


def _chat_logprobs(fields: Fields) -> int | None:
    return (fields.integer("top_logprobs") or 0) if fields.flag("logprobs") else None


def _wishes(fields: Fields, headers: Mapping[str, str], logprobs: int | None) -> Wishes:
    options = fields.fields("stream_options")
    return Wishes(
        token_ids=fields.flag("return_token_ids"),
        usage=options.flag("include_usage"),
        usage_everywhere=options.flag("continuous_usage_stats"),
        echo=fields.flag("echo"),
        logprobs=logprobs,
        sglext_input=_asked(fields, headers, "input"),
        sglext_output=_asked(fields, headers, "output"),
        sglext_framed=headers.get("x-sglext-ids-framed") == "1",
    )


def _asked(fields: Fields, headers: Mapping[str, str], side: str) -> bool:
    field, header = f"return_{side}_ids_in_sglext", f"x-sglext-return-{side}-ids"
    return fields.flag(field) or headers.get(header) == "1"
