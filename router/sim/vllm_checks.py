"""How vLLM reads and refuses generation requests (0.32.0, probed on the live server). Pure."""

from collections.abc import Mapping

import msgspec

from router.sim import tokens
from router.sim.chat import prompt_for_vllm
from router.sim.decoding import Limits
from router.sim.dialect import Situation
from router.sim.jobs import (
    BadField,
    Fields,
    Job,
    Json,
    Message,
    Refused,
    Reply,
    Route,
    Wishes,
    dump,
    messages_of,
    prompts_of,
)

_DEFAULT_COMPLETION_TOKENS = 16
_LOGPROBS_MAX = 20


def error_reply(status: int, message: str, kind: str, param: str | None = None) -> Reply:
    """vLLM's nested error body."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return Reply(status, dump({"error": error}))


def refuse(message: str, param: str | None = None, value: object = None) -> Refused:
    """A 400 of vLLM's own checks; a named parameter is repeated in the message."""
    if param is not None:
        shown = f", value={value}" if value is not None else ""
        message = f"{message} (parameter={param}{shown})"
    return Refused(error_reply(400, message, "BadRequestError", param))


def refuse_invalid(location: str | None, kind: str, message: str) -> Refused:
    """A 400 of the body's schema."""
    detail = f"{{'type': '{kind}', 'loc': '{location}', 'msg': '{message}'}}"
    return Refused(error_reply(400, f"1 validation error:\n  {detail}", "Bad Request", location))


def read_object(body: bytes, headers: Mapping[str, str]) -> Fields:
    """The request body as an object, or the refusal vLLM has for what it is instead."""
    if not headers.get("content-type", "application/json").startswith("application/json"):
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        raise Refused(error_reply(400, f"1 validation error:\n  {message}", "Bad Request"))
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise refuse_invalid("body.1", "json_invalid", "JSON decode error") from None
    if not isinstance(value, dict):
        raise refuse_invalid("body", "model_attributes_type", "Input should be a valid dictionary")
    return Fields(value)


def read_job(route: Route, body: bytes, headers: Mapping[str, str], now: Situation) -> Job | Reply:
    """Check a request for /v1/chat/completions or /v1/completions."""
    try:
        fields = read_object(body, headers)
        check_model(fields, now)
        return _read_chat(fields, now) if route == "chat" else _read_completion(fields, now)
    except BadField as bad:
        return refuse_invalid(f"body.{bad.name}", bad.kind, bad.message).reply
    except Refused as refused:
        return refused.reply


def check_model(fields: Fields, now: Situation) -> None:
    model = fields.text("model")
    served = now.settings.model
    if model is not None and model != served:
        message = f"The model `{model}` does not exist. Valid aliases: {served}."
        raise Refused(error_reply(404, message, "NotFoundError", "model"))


def _read_chat(fields: Fields, now: Situation) -> Job:
    messages = read_messages(fields)
    _check_tools(fields)
    _check_common(fields)
    continue_final = fields.flag("continue_final_message")
    prompt = read_chat_prompt(fields, messages)
    budget = fields.integer("max_completion_tokens")
    budget = fields.integer("max_tokens") if budget is None else budget
    context = now.settings.context_length
    if budget is not None and budget > context:
        message = (
            f"max_tokens={budget} cannot be greater than max_model_len={context}."
            " Please request fewer output tokens."
        )
        raise refuse(message, "max_tokens", budget)
    forced = fields.fields("kv_transfer_params").ids("prompt_token_ids")
    if forced is not None:
        check_vocabulary(forced, "kv_transfer_params.prompt_token_ids")
        prompt = list(forced)
    last = messages[-1]
    role = "assistant" if fields.flag("add_generation_prompt", True) else last.role
    echoes = fields.flag("echo") and continue_final and last.role == role
    return Job(
        "chat",
        id="chatcmpl-" + (fields.text("request_id") or now.new_id(16)),
        rid="",
        created=now.unix_time,
        model=now.settings.model,
        prompts=(prompt,),
        limits=(_limits(fields, len(prompt), budget, context),),
        n=_choices(fields),
        stream=fields.flag("stream"),
        wishes=_wishes(fields, _chat_logprobs(fields)),
        greedy=fields.number("temperature") == 0,
        role=role,
        kv=_kv(fields),
        echo_text=last.content if echoes else "",
        fingerprint=fingerprint(now),
    )


def read_messages(fields: Fields) -> list[Message]:
    if fields.get("messages") is None:
        raise refuse_invalid("body.messages", "missing", "Field required")
    messages = messages_of(fields.get("messages"))
    if messages is None:
        raise BadField("messages", "list_type", "Input should be a valid list")
    if not messages:
        message = "Cannot apply chat template to an empty conversation."
        raise refuse(f"{message} Provide at least one message.")
    return messages


def read_chat_prompt(fields: Fields, messages: list[Message]) -> list[int]:
    """Render a conversation; the two flags exclude each other, and one of them defaults to on."""
    continue_final = fields.flag("continue_final_message")
    add_prompt = fields.flag("add_generation_prompt", True)
    if continue_final and add_prompt:
        raise refuse(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        )
    return prompt_for_vllm(
        messages, continue_final=continue_final, add_generation_prompt=add_prompt
    )


def _check_tools(fields: Fields) -> None:
    tools = fields.get("tools")
    choice = fields.get("tool_choice")
    if tools == []:
        message = "`tools` must not be an empty array. Provide at least one tool or omit the field."
        raise refuse(message, "tools")
    if tools and choice in (None, "auto"):
        raise refuse(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        )
    if tools and choice != "none":
        raise refuse('tool_choice="required" requires --tool-call-parser to be set')


def _check_common(fields: Fields) -> None:
    if fields.get("stream_options") is not None and not fields.flag("stream"):
        raise refuse("Stream options can only be defined when `stream=True`.", "stream_options")
    temperature = fields.number("temperature")
    if temperature is not None and not 0 <= temperature <= 2:
        message = f"temperature must be in [0, 2], got {temperature}."
        raise refuse(message, "temperature", temperature)
    n = fields.integer("n")
    if n is not None and n < 1:
        raise refuse(f"n must be at least 1, got {n}.")
    if n is not None and n > 1 and temperature == 0:
        raise refuse(f"n must be 1 when using greedy sampling, got {n}.")
    if "" in fields.texts("stop"):
        raise refuse("stop cannot contain an empty string.")


def _read_completion(fields: Fields, now: Situation) -> Job:
    if fields.get("suffix"):
        raise Refused(
            error_reply(
                400,
                "suffix is only supported for models with FIM completion rendering",
                "BadRequestError",
                "suffix",
            )
        )
    _check_common(fields)
    prompts = tuple(_read_prompts(fields))
    budget = fields.integer("max_tokens")
    budget = _DEFAULT_COMPLETION_TOKENS if budget is None else budget
    echo = fields.flag("echo")
    wishes = _wishes(fields, fields.integer("logprobs"))
    context = now.settings.context_length
    # An echo without output still generates one token (0.32.0).
    wanted = 1 if echo and budget == 0 else budget
    return Job(
        "completions",
        id="cmpl-" + (fields.text("request_id") or now.new_id(16)),
        rid="",
        created=now.unix_time,
        model=now.settings.model,
        prompts=prompts,
        limits=tuple(_limits(fields, len(prompt), wanted, context) for prompt in prompts),
        n=_choices(fields),
        stream=fields.flag("stream"),
        wishes=wishes,
        greedy=fields.number("temperature") == 0,
        kv=_kv(fields),
        fingerprint=fingerprint(now),
    )


def _kv(fields: Fields) -> Json | None:
    return dict(fields.fields("kv_transfer_params").values) or None


def _read_prompts(fields: Fields) -> list[list[int]]:
    if fields.get("prompt") in (None, ""):
        raise refuse("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    prompts = prompts_of(fields)
    if prompts is None:
        raise BadField("prompt", "list_type", "Input should be a valid list")
    if not prompts:
        raise refuse("You must pass at least one prompt")
    return [_prompt_ids(prompt) for prompt in prompts]


def _prompt_ids(prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return tokens.encode(prompt)
    negative = next((place for place, id_ in enumerate(prompt) if id_ < 0), None)
    if negative is not None:
        message = "Input should be greater than or equal to 0"
        raise BadField(f"prompt.{negative}", "greater_than_equal", message)
    check_vocabulary(prompt, None)
    return prompt


def check_vocabulary(ids: tuple[int, ...] | list[int], param: str | None) -> None:
    unknown = next((id_ for id_ in ids if not tokens.is_in_vocabulary(id_)), None)
    if unknown is not None:
        raise refuse(f"Token id {unknown} is out of vocabulary", param)


def _limits(fields: Fields, prompt_tokens: int, budget: int | None, context: int) -> Limits:
    room = context - prompt_tokens
    if room < 0:
        message = (
            f"This model's maximum context length is {context} tokens. However, your prompt"
            f" contains {prompt_tokens} input tokens, which exceeds this limit even without any"
            " output tokens. Please reduce the length of the input prompt."
        )
        raise refuse(message, "input_tokens", prompt_tokens)
    # A budget beyond the context is cut down to what is left of it, without a word.
    budget = room if budget is None else min(budget, room)
    if budget < 1:
        message = f"max_tokens must be at least 1, got {budget}."
        raise refuse(message, "max_tokens", budget)
    min_tokens = fields.integer("min_tokens") or 0
    if min_tokens > budget:
        message = f"min_tokens must be less than or equal to max_tokens={budget}, got {min_tokens}."
        raise refuse(message)
    return Limits(
        budget,
        min_tokens=min_tokens,
        ignore_eos=fields.flag("ignore_eos"),
        stop=fields.texts("stop"),
        stop_ids=frozenset(fields.ids("stop_token_ids") or ()),
        keeps_stop_text=fields.flag("include_stop_str_in_output"),
    )


def _choices(fields: Fields) -> int:
    return fields.integer("n") or 1


def _chat_logprobs(fields: Fields) -> int | None:
    return (fields.integer("top_logprobs") or 0) if fields.flag("logprobs") else None


def _wishes(fields: Fields, logprobs: int | None) -> Wishes:
    if logprobs is not None and logprobs > _LOGPROBS_MAX:
        message = (
            f"Requested sample logprobs of {logprobs}, which is greater than max allowed:"
            f" {_LOGPROBS_MAX}"
        )
        raise refuse(message, "logprobs", logprobs)
    options = fields.fields("stream_options")
    usage = options.flag("include_usage")
    return Wishes(
        token_ids=fields.flag("return_token_ids"),
        usage=usage,
        usage_everywhere=usage and options.flag("continuous_usage_stats"),
        echo=fields.flag("echo"),
        logprobs=logprobs,
    )


def fingerprint(now: Situation) -> str:
    """Equal for engines of one configuration, as the real one."""
    settings = now.settings
    mark = hash_text(f"{settings.model}/{settings.context_length}/{settings.seed}")
    return f"vllm-0.32.0-{mark:08x}"


def hash_text(text: str) -> int:
    """A small hash that does not change between processes."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value
