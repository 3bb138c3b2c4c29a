"""Compiles the simulated worker and the load client.

They are in C because they must be far cheaper than what they measure.
"""

import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "benchmarks"


class NoCompiler(Exception):
    """There is no C compiler on this machine."""


def build(name: str) -> Path:
    """The program made of NAME.c, compiled when its sources are newer."""
    program, source = BUILD / name, HERE / f"{name}.c"
    newest = max(path.stat().st_mtime for path in (source, HERE / "wire.h"))
    if program.exists() and program.stat().st_mtime >= newest:
        return program
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoCompiler("the benchmark needs a C compiler (cc, gcc or clang) and found none")
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = ["-O2", "-Wall", "-Wextra"]
    subprocess.run([compiler, *flags, "-o", str(program), str(source)], check=True)
    return program
