"""Programs that people use, against vLLM behind the router."""

import json
import os
import re
import subprocess

import pytest

from tests.real import places
from tests.real.engines import OFFLINE, Engine
from tests.real.requests import CHAT, chat

pytestmark = pytest.mark.real

PROMPTS = "24"


def _curl(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", "60", *words]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)


def test_curl_streams(vllm_router: int) -> None:
    body = json.dumps(chat("hi", max_tokens=8, stream=True))
    url = f"http://127.0.0.1:{vllm_router}{CHAT}"

    done = _curl(url, "--json", body)

    assert done.returncode == 0
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_curl_sees_an_error(vllm_router: int) -> None:
    url = f"http://127.0.0.1:{vllm_router}{CHAT}"

    done = _curl(url, "--json", "{not json", "--write-out", "\n%{http_code}")

    body, _, status = done.stdout.rpartition("\n")
    assert status == "400"
    assert json.loads(body)["error"]["code"] == "bad_request"


def test_vllm_bench_serve_completes(vllm_engine: Engine, vllm_router: int) -> None:
    for backend, path in (("openai", "/v1/completions"), ("openai-chat", CHAT)):
        command = [
            *(str(places.VLLM_VENV / "bin" / "vllm"), "bench", "serve", "--backend", backend),
            *("--base-url", f"http://127.0.0.1:{vllm_router}", "--endpoint", path),
            *("--model", places.MODEL_NAME, "--tokenizer", str(places.MODEL)),
            *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "32"),
            *("--num-prompts", PROMPTS, "--max-concurrency", "4"),
            *("--temperature", "0", "--ignore-eos"),
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            check=False,
            env={**os.environ, **OFFLINE},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert re.search(rf"Successful requests:\s+{PROMPTS}\b", done.stdout), done.stdout
        assert re.search(r"Failed requests:\s+0\b", done.stdout), done.stdout
