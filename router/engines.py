"""Which engine answers at an address, and what it serves, read from what it says of itself.

Pure: `next_question` names the next path to GET, `recognise` turns the answers into knowledge, and
the probe loop does the asking. Whatever an answer holds, nothing here raises: something malformed
is something unknown. What is told apart: vLLM 0.32 serves /version, SGLang 0.5.23 /model_info
and /server_info, both name themselves as the owner of their models; anything else is a server that
speaks OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec
from attrs import frozen

Engine = Literal["vllm", "sglang", "openai"]

_BY_NAME: Final[Mapping[str, Engine]] = {"vllm": "vllm", "sglang": "sglang", "openai": "openai"}

MODELS: Final = "/v1/models"
VERSION: Final = "/version"
# SGLang renamed its pages; one that answers is enough. The first is small, the last tells most.
SGLANG_PAGES: Final = ("/model_info", "/get_model_info", "/server_info", "/get_server_info")

MODEL_NAMES_MAX: Final = 1000  # LoRA adapters are listed too; beyond this it is garbage
MODEL_NAME_CHARS_MAX: Final = 512
CONTEXT_LENGTH_MAX: Final = 2**40


@frozen
class Answer:
    """What one path answered."""

    status: int
    body: bytes = b""

    @property
    def is_definite(self) -> bool:
        """Whether it will say the same when asked again; a 5xx or a 429 is a moment's answer."""
        return self.status < 500 and self.status != 429


@frozen
class Knowledge:
    """What an engine has said of itself."""

    engine: Engine
    models: tuple[str, ...] = ()  # empty: it names none
    context_length: int | None = None  # the shortest of the models', prompt and output together
    version: str | None = None
    role: str | None = None  # "prefill" or "decode" where the engine was started as one
    bootstrap_port: int | None = None  # where decodes find an SGLang prefill


def next_question(
    answers: Mapping[str, Answer], configured: str = "auto", *, wants_port: bool = False
) -> str | None:
    """The path to ask next, or None when the answers so far will do.

    `wants_port`: the bootstrap port is to be learned, which only SGLang's /server_info tells.
    """
    if MODELS not in answers:
        return MODELS
    engine = configured if configured != "auto" else _owner(answers[MODELS])
    if engine == "vllm":
        return _first_missing((VERSION,), answers)
    if engine == "sglang":
        return _sglang_question(answers, wants_port)
    if engine == "openai":
        return None
    return _first_missing((VERSION,), answers) or (
        None if _says_vllm(answers) else _sglang_question(answers, wants_port)
    )


def recognise(answers: Mapping[str, Answer], configured: str = "auto") -> Knowledge:
    """Who answered, and what it serves; `configured` overrules what it looks like."""
    models = _models(answers.get(MODELS))
    pages = [page for path in SGLANG_PAGES if (page := _sglang_page(answers.get(path))) is not None]
    version = _version(answers)
    return Knowledge(
        engine=_engine(answers, configured),
        models=tuple(dict.fromkeys(card.id for card in models)),
        context_length=min((n for card in models if (n := card.context_length)), default=None),
        version=version or next((page.version for page in pages if page.version), None),
        role=next((page.role for page in pages if page.role), None),
        bootstrap_port=next((page.port for page in pages if page.port), None),
    )


# ------------------------------------------------------------------- reading what cannot be trusted


@frozen
class _Card:
    id: str
    owner: str
    context_length: int | None


@frozen
class _Page:
    """What is read of SGLang's pages about itself."""

    version: str | None
    role: str | None
    port: int | None


def _engine(answers: Mapping[str, Answer], configured: str) -> Engine:
    if (named := _BY_NAME.get(configured)) is not None:
        return named
    owner = _owner(answers.get(MODELS))
    if owner is not None:
        return owner
    if _says_vllm(answers):
        return "vllm"
    if any(_sglang_page(answers.get(path)) is not None for path in SGLANG_PAGES):
        return "sglang"
    return "openai"


def _owner(answer: Answer | None) -> Literal["vllm", "sglang"] | None:
    for card in _models(answer):
        if card.owner == "vllm":
            return "vllm"
        if card.owner == "sglang":
            return "sglang"
    return None


def _says_vllm(answers: Mapping[str, Answer]) -> bool:
    # llama.cpp and gateways may answer any path with a page of theirs; only vLLM's exact shape,
    # an object with nothing but the version, counts.
    return set(_object(answers.get(VERSION))) == {"version"} and _version(answers) is not None


def _sglang_question(answers: Mapping[str, Answer], wants_port: bool) -> str | None:
    pages = [page for path in SGLANG_PAGES if (page := _sglang_page(answers.get(path)))]
    if pages and (not wants_port or any(page.port for page in pages)):
        return None
    return _first_missing(SGLANG_PAGES, answers)


def _first_missing(paths: tuple[str, ...], answers: Mapping[str, Answer]) -> str | None:
    return next((path for path in paths if path not in answers), None)


def _version(answers: Mapping[str, Answer]) -> str | None:
    return _text(_object(answers.get(VERSION)).get("version"))


def _sglang_page(answer: Answer | None) -> _Page | None:
    page = _object(answer)
    if "model_path" not in page or "tokenizer_path" not in page:
        return None
    mode, port = page.get("disaggregation_mode"), page.get("disaggregation_bootstrap_port")
    return _Page(
        version=_text(page.get("version")),
        role=mode if mode == "prefill" or mode == "decode" else None,
        port=port if type(port) is int and 0 < port < 65536 and mode == "prefill" else None,
    )


def _models(answer: Answer | None) -> list[_Card]:
    listed = _object(answer).get("data")
    if not isinstance(listed, list):
        return []
    return [card for item in listed[:MODEL_NAMES_MAX] if (card := _card(item)) is not None]


def _card(item: object) -> _Card | None:
    if not isinstance(item, dict):
        return None
    model_id = _text(item.get("id"))
    if model_id is None:
        return None
    length = item.get("max_model_len")
    known = type(length) is int and 0 < length <= CONTEXT_LENGTH_MAX
    return _Card(model_id, _text(item.get("owned_by")) or "", length if known else None)


def _text(value: object) -> str | None:
    if isinstance(value, str) and 0 < len(value) <= MODEL_NAME_CHARS_MAX:
        return value
    return None


def _object(answer: Answer | None) -> dict[str, object]:
    """The JSON object of a good answer; an empty one for anything else."""
    if answer is None or not 200 <= answer.status < 300:
        return {}
    try:
        value = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
