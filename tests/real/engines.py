"""Real engines on a CPU: started on a free port, asked how much they are doing, killed.

The flags make them as small and as deterministic as they get: float32, one thread, eager, two
thousand tokens of context. Niced, so that the router under test is not what waits.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
from attrs import define

from tests.real import places
from tests.real.calls import get, post
from tests.real.processes import free_port, kill_session, session, titled, wait_ready

START_SECONDS = 400.0
"""A minute on an idle machine. SGLang took over three where the tests' other engines computed."""
CONTEXT = "2048"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}


class ServerLoad(msgspec.Struct):
    """vLLM's GET /load."""

    server_load: int


class SchedulerLoad(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int


class SchedulerLoads(msgspec.Struct):
    """SGLang's GET /v1/loads, one entry a data-parallel rank."""

    loads: list[SchedulerLoad]


@define(eq=False)
class Engine:
    """A running engine; `core` is the title of the process that computes."""

    kind: str
    port: int
    process: subprocess.Popen[bytes]
    core: str
    requests: Callable[[int], int]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def running(self) -> int:
        """How many requests the engine is working on or has queued."""
        return self.requests(self.port)

    def kill(self) -> None:
        """All of it, at once."""
        kill_session(self.process)

    def signal_core(self, number: signal.Signals) -> None:
        """A signal for the computing process alone; its front end lives on."""
        os.kill(titled(self.process.pid, self.core), number)

    @contextlib.contextmanager
    def frozen_core(self) -> Iterator[None]:
        """Accepts requests, but computes nothing."""
        self.signal_core(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal_core(signal.SIGCONT)


@contextlib.contextmanager
def vllm(*flags: str, settings: Mapping[str, str] | None = None) -> Iterator[Engine]:
    """vLLM; its /load counts the requests whose clients are still there.

    `settings` are more of its environment; with them it is half of a pair.
    """
    venv = _there(places.VLLM_VENV)
    port = free_port()
    command: list[str | Path] = [
        *("nice", "-n", "10", venv / "bin" / "vllm", "serve", places.MODEL),
        *("--served-model-name", places.MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", CONTEXT, "--max-num-seqs", "16"),
        *("--enforce-eager", "--enable-server-load-tracking", *flags),
    ]
    environment = {
        **OFFLINE,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        **(settings or {}),
    }
    with _engine("vllm", port, command, environment, "EngineCore", _vllm_requests) as engine:
        yield engine


@contextlib.contextmanager
def sglang(*flags: str, settings: Mapping[str, str] | None = None) -> Iterator[Engine]:
    """SGLang; its /v1/loads counts what its scheduler holds.

    Its memory is bounded by the tokens. The fraction is generous, since SGLang takes memory that
    others take while it loads its weights for its own, and gives up where that is more.
    `settings` are more of its environment; with them it is half of a pair.
    """
    venv = _there(places.SGLANG_VENV)
    port = free_port()
    command: list[str | Path] = [
        *("nice", "-n", "10", venv / "bin" / "python", "-m", "sglang.launch_server"),
        *("--model-path", places.MODEL, "--served-model-name", places.MODEL_NAME),
        *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"),
        *("--context-length", CONTEXT, "--max-total-tokens", "16384"),
        *("--max-running-requests", "8", "--mem-fraction-static", "0.3"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--grammar-backend", "none", "--disable-overlap-schedule", "--disable-cuda-graph"),
        *("--skip-server-warmup", *flags),
    ]
    environment = {
        **OFFLINE,
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        **(settings or {}),
    }
    is_alone = settings is None
    with _engine(
        "sglang", port, command, environment, "scheduler", _sglang_requests, is_alone=is_alone
    ) as engine:
        yield engine


ENGINES = {"vllm": vllm, "sglang": sglang}


@contextlib.contextmanager
def _engine(
    kind: str,
    port: int,
    command: list[str | Path],
    environment: dict[str, str],
    core: str,
    requests: Callable[[int], int],
    *,
    is_alone: bool = True,
) -> Iterator[Engine]:
    name = f"{kind}-{port}"
    # Half of a pair computes nothing alone, and says by its health that it has begun.
    is_ready = _computes if is_alone else _is_well
    with session(name, command, environment) as process:
        wait_ready(name, process, lambda: is_ready(port), START_SECONDS)
        yield Engine(kind, port, process, core, requests)


def _computes(port: int) -> bool:
    """Whether a whole request succeeds: a health endpoint may answer before the model does."""
    if not _is_well(port):
        return False
    body = {"model": places.MODEL_NAME, "prompt": "a", "max_tokens": 1}
    return post(port, "/v1/completions", body).status == 200


def _is_well(port: int) -> bool:
    return get(port, "/health").status == 200


def _vllm_requests(port: int) -> int:
    return msgspec.json.decode(get(port, "/load").body, type=ServerLoad).server_load


def _sglang_requests(port: int) -> int:
    loads = msgspec.json.decode(get(port, "/v1/loads").body, type=SchedulerLoads).loads
    return sum(load.num_running_reqs + load.num_waiting_reqs for load in loads)


def _there(venv: Path) -> Path:
    if not (venv / "bin" / "python").exists() or not places.MODEL.exists():
        raise FileNotFoundError(f"no engine at {venv}: run `python -m tests.real.install`")
    return venv
