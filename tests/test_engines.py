"""Recognising engines by what they serve; the answers are those of real ones, shortened."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.engines import (
    MODEL_NAMES_MAX,
    MODELS,
    SGLANG_PAGES,
    VERSION,
    Answer,
    Knowledge,
    next_question,
    recognise,
)

NOT_FOUND = Answer(404, b'{"detail":"Not Found"}')


def ok(value: object) -> Answer:
    return Answer(200, json.dumps(value).encode())


def models(*cards: Mapping[str, object]) -> Answer:
    return ok({"object": "list", "data": list(cards)})


def card(model: str, owner: str, length: object = None) -> dict[str, object]:
    return {
        "id": model,
        "object": "model",
        "created": 1795987935,
        "owned_by": owner,
        "root": "/models/tiny",
        "parent": None,
        "max_model_len": length,
    }


# vLLM 0.32.0
VLLM = {
    MODELS: models({**card("tiny", "vllm", 2048), "permission": [{"id": "modelperm-9e7a"}]}),
    VERSION: ok({"version": "0.32.0"}),
}
# SGLang 0.5.23; disaggregation_mode is the string "null" for a mixed one
SGLANG = {
    MODELS: models(card("tiny", "sglang", 2048)),
    "/model_info": ok(
        {
            "model_path": "/models/tiny",
            "served_model_name": "tiny",
            "tokenizer_path": "/models/tiny",
            "is_generation": True,
            "weight_version": "default",
            "disaggregation_mode": "null",
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
        }
    ),
}
LLAMA_CPP = {
    MODELS: ok(
        {
            "object": "list",
            "data": [
                {
                    "id": "tiny.gguf",
                    "object": "model",
                    "created": 1795987935,
                    "owned_by": "llamacpp",
                    "meta": {"n_vocab": 2048, "n_ctx_train": 4096},
                }
            ],
        }
    ),
}


def interview(
    world: Mapping[str, Answer], configured: str = "auto", *, wants_port: bool = False
) -> tuple[Knowledge, list[str]]:
    """Ask as the probe loop does; what the server has no answer for is a 404."""
    answers: dict[str, Answer] = {}
    while (path := next_question(answers, configured, wants_port=wants_port)) is not None:
        assert path not in answers
        answers[path] = world.get(path, NOT_FOUND)
    return recognise(answers, configured), list(answers)


def test_vllm() -> None:
    knowledge, asked = interview(VLLM)

    assert knowledge == Knowledge("vllm", ("tiny",), context_length=2048, version="0.32.0")
    assert asked == [MODELS, VERSION]


def test_sglang() -> None:
    knowledge, asked = interview(SGLANG)

    assert knowledge == Knowledge("sglang", ("tiny",), context_length=2048)
    assert asked == [MODELS, "/model_info"]


def test_anything_else_speaks_openai() -> None:
    knowledge, _ = interview(LLAMA_CPP)

    assert knowledge == Knowledge("openai", ("tiny.gguf",))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_sglang_tells_its_role(role: str) -> None:
    page = {"model_path": "m", "tokenizer_path": "m", "disaggregation_mode": role}

    knowledge, _ = interview({**SGLANG, "/model_info": ok(page)})

    assert knowledge.role == role


@pytest.mark.parametrize("configured", ["auto", "sglang"])
@pytest.mark.parametrize(
    ("mode", "told", "port"),
    [
        ("prefill", 9111, 9111),
        ("prefill", None, None),
        ("prefill", 0, None),
        ("prefill", 65536, None),
        ("prefill", "9111", None),
        ("prefill", True, None),
        ("decode", 9111, None),  # it has the setting, too, and nobody listens there
        ("null", 9111, None),
    ],
)
def test_sglang_tells_the_port_of_its_bootstrap(
    configured: str, mode: str, told: object, port: int | None
) -> None:
    page = {"model_path": "m", "tokenizer_path": "m", "disaggregation_mode": mode}
    info = ok({**page, "disaggregation_bootstrap_port": told})

    knowledge, asked = interview({**SGLANG, "/server_info": info}, configured, wants_port=True)

    assert knowledge.bootstrap_port == port
    assert "/server_info" in asked


def test_a_port_is_sought_of_sglang_alone() -> None:
    assert interview(VLLM, wants_port=True) == interview(VLLM)
    assert interview(LLAMA_CPP, wants_port=True) == interview(LLAMA_CPP)


@pytest.mark.parametrize("path", SGLANG_PAGES)
def test_any_page_of_sglang_will_do(path: str) -> None:
    page = {"model_path": "m", "tokenizer_path": "m", "version": "0.4.9"}

    knowledge, _ = interview({MODELS: Answer(401), path: ok(page)})

    assert knowledge == Knowledge("sglang", version="0.4.9")


def test_vllm_that_keeps_its_models_behind_a_key_is_known_by_its_version() -> None:
    knowledge, _ = interview({MODELS: Answer(401), VERSION: VLLM[VERSION]})

    assert knowledge == Knowledge("vllm", version="0.32.0")


def test_a_version_page_of_somebody_else_is_not_vllms() -> None:
    version = ok({"version": "1.2", "build": "b1234"})

    knowledge, _ = interview({**LLAMA_CPP, VERSION: version})

    assert knowledge.engine == "openai"


@pytest.mark.parametrize("configured", ["vllm", "sglang", "openai"])
def test_what_the_operator_says_is_not_overruled(configured: str) -> None:
    for world in (VLLM, SGLANG, LLAMA_CPP):
        knowledge, _ = interview(world, configured)

        assert knowledge.engine == configured
        assert knowledge.models


def test_a_configured_openai_server_is_asked_for_its_models_only() -> None:
    _, asked = interview(LLAMA_CPP, "openai")

    assert asked == [MODELS]


def test_adapters_are_models_too_and_the_shortest_context_counts() -> None:
    listed = models(
        card("base", "vllm", 4096), card("adapter", "vllm"), card("small", "vllm", 2048)
    )

    knowledge, _ = interview({**VLLM, MODELS: listed})

    assert knowledge.models == ("base", "adapter", "small")
    assert knowledge.context_length == 2048


@pytest.mark.parametrize("length", [0, -1, True, "2048", 1.5, None, [], 2**41])
def test_a_strange_context_length_is_unknown(length: object) -> None:
    knowledge, _ = interview({MODELS: models(card("tiny", "vllm", length))})

    assert knowledge.models == ("tiny",)
    assert knowledge.context_length is None


def test_a_list_of_models_without_end_is_cut() -> None:
    listed = models(*(card(f"m{number}", "vllm") for number in range(2 * MODEL_NAMES_MAX)))

    knowledge, _ = interview({MODELS: listed})

    assert len(knowledge.models) == MODEL_NAMES_MAX


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'{"data": {}}',
        b'{"data": [1, null, {}, {"id": 5}, {"id": ""}]}',
        b'{"data": [{"id": "\\ud800"}]}',
        b'{"a":' * 20_000,
        b"[" * 20_000,
    ],
)
def test_what_cannot_be_read_is_unknown(body: bytes) -> None:
    garbage = Answer(200, body)

    knowledge, _ = interview(dict.fromkeys((MODELS, VERSION, *SGLANG_PAGES), garbage))

    assert knowledge == Knowledge("openai")


odd: st.SearchStrategy[object] = st.sampled_from(
    [None, True, 0, -1, 7, 1.5, "", "vllm", "sglang", "x" * 600, [], {}, [1]]
)
keys = ["id", "owned_by", "max_model_len", "version", "model_path", "tokenizer_path", "data"]
odd_page = st.dictionaries(st.sampled_from(keys), odd, max_size=4)
odd_list = st.builds(lambda cards: {"data": cards}, st.lists(odd | odd_page, max_size=3))
answers = st.one_of(
    st.builds(Answer, st.sampled_from([100, 200, 204, 301, 404, 429, 500]), st.binary(max_size=9)),
    st.builds(ok, odd | odd_page | odd_list),
)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from([MODELS, VERSION, *SGLANG_PAGES]), answers))
def test_no_answer_raises_and_the_questions_end(world: dict[str, Answer]) -> None:
    knowledge, asked = interview(world)

    assert knowledge.engine in ("vllm", "sglang", "openai")
    assert len(asked) <= 6
