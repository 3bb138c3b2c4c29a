"""The `openai` Python client against vLLM behind the router: answers, streams and errors."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.real import places
from tests.real.engines import Engine
from tests.real.processes import wait_until
from tests.real.requests import LONG_TOKENS

if TYPE_CHECKING:
    from openai import OpenAI

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("default"),  # the client's own warnings are not ours to judge
]
openai = pytest.importorskip("openai", reason="pip install --group real")

HI = [{"role": "user", "content": "hi"}]
ASK = {"model": places.MODEL_NAME, "messages": HI, "temperature": 0}


@pytest.fixture(scope="module")
def client(vllm_router: int) -> "Iterator[OpenAI]":
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{vllm_router}/v1", api_key="any", max_retries=0, timeout=60
    ) as made:
        yield made


def test_models(client: "OpenAI") -> None:
    assert [model.id for model in client.models.list()] == [places.MODEL_NAME]


def test_stream_says_what_the_answer_says(client: "OpenAI") -> None:
    answer = client.chat.completions.create(**ASK, max_tokens=30)
    stream = client.chat.completions.create(
        **ASK, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)

    parts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert "".join(parts) == answer.choices[0].message.content
    assert finishes[-1] == answer.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions(client: "OpenAI") -> None:
    ask = {"model": places.MODEL_NAME, "prompt": "def main(", "temperature": 0, "max_tokens": 20}

    answer = client.completions.create(**ask)
    parts = [chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)]

    assert "".join(parts) == answer.choices[0].text


def test_an_engines_refusal(client: "OpenAI") -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ASK, "temperature": 2.5})

    assert caught.value.param == "temperature"
    assert "temperature" in caught.value.message


def test_the_routers_refusal(client: "OpenAI") -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**{**ASK, "model": "nobody has this"})

    assert caught.value.code == "model_not_found"


def test_closing_a_stream_frees_the_engine(client: "OpenAI", vllm_engine: Engine) -> None:
    stream = client.chat.completions.create(
        **ASK, max_tokens=LONG_TOKENS, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert vllm_engine.running() == 1
    stream.close()

    assert wait_until(lambda: vllm_engine.running() == 0, 1.0)
