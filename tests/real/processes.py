"""Server processes: started in a session of their own, logged to a file, always ended.

An engine is several processes, which must all be gone before the next one starts, and some of which
outlive their parent when that is killed; so ends are by session, each process by its id.
"""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from router.options import bare
from tests.real import places


class NotReady(Exception):
    """A server ended, or took too long, before it answered; the message has the end of its log."""


@contextlib.contextmanager
def session(
    name: str, command: Sequence[str | Path], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command whose log is NAME.log; kills all that it started on the way out.

    Settings for Baton that happen to be in the environment stay outside.
    """
    places.LOGS.mkdir(parents=True, exist_ok=True)
    with log_of(name).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**bare(os.environ), **environment},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill_session(process)


def log_of(name: str) -> Path:
    return places.LOGS / f"{name}.log"


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for every process of the session, until there is none."""
    while True:
        for member in members(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        process.poll()
        if not members(process.pid):
            process.wait()
            return
        time.sleep(0.05)


def members(session_id: int) -> list[int]:
    """The living processes of a session; what has died and was not waited for does not live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                if int(fields[3]) == session_id and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def titled(session_id: int, title: str) -> int:
    """The one process of a session whose title has these letters in it."""
    [found] = [
        member
        for member in members(session_id)
        if title.encode() in (Path("/proc") / str(member) / "cmdline").read_bytes()
    ]
    return found


def wait_until(condition: Callable[[], bool], seconds: float, every: float = 0.02) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def wait_ready(
    name: str, process: subprocess.Popen[bytes], ready: Callable[[], bool], seconds: float
) -> None:
    """Until `ready` says so; a refused or broken connection means not yet. Raises NotReady."""

    def settled() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return ready()
        return process.poll() is not None

    if not wait_until(settled, seconds, every=0.1) or process.poll() is not None:
        tail = log_of(name).read_text(errors="replace", encoding="utf-8")[-2000:]
        raise NotReady(f"{name} is not ready (exit code {process.poll()}):\n{tail}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
