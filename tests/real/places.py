"""Where the engines, the model and the logs live; each can be moved by an environment variable."""

import os
from pathlib import Path

HOME = Path.home() / ".cache" / "baton-real"
VLLM_VENV = Path(os.environ.get("BATON_REAL_VLLM_VENV", HOME / "vllm"))
SGLANG_VENV = Path(os.environ.get("BATON_REAL_SGLANG_VENV", HOME / "sglang"))
MODEL = Path(os.environ.get("BATON_REAL_MODEL", HOME / "model"))
LOGS = Path(os.environ.get("BATON_REAL_LOGS", HOME / "logs"))
ROUTER = os.environ.get(
    "BATON_REAL_ROUTER",
    "{python} -m router serve --host 127.0.0.1 --port {port} --worker-urls {workers}",
)
"""The router under test; any other can stand in, to see what the tests make of it."""
PAIR_ROUTER = "{python} -m router serve --host 127.0.0.1 --port {port} {workers}"
MODEL_NAME = "tiny"
