"""Processes under measurement: pinned, logged, counted through /proc, and always ended.

CPU time is the sum over all threads of all processes of a session, from schedstat, which has
nanoseconds where stat has ticks of 10 ms; stat gives the split into user and system time.
"""

import contextlib
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from attrs import frozen

from router.options import bare

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ENDING_SECONDS = 3.0


@frozen
class Usage:
    """What a session of processes has used so far."""

    cpu_ns: int
    waited_ns: int
    """Ready to run, but somebody else had the core."""
    user_ticks: int
    system_ticks: int
    resident_bytes: int


@contextlib.contextmanager
def pinned(
    command: Sequence[str], core: int, log: Path, *, nice: int = 0, pipes: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Runs a command on one core in a session of its own; ends the whole session on the way out.

    Its output goes to `log`; with `pipes`, stdin and stdout are pipes instead.
    """

    def settle() -> None:
        os.sched_setaffinity(0, {core})
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        # With autogroups, priority counts within a session only, and each is one of its own.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(nice), encoding="utf-8")

    with log.open("a") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else output,
            stderr=output,
            env=bare(os.environ),
            encoding="utf-8",
            start_new_session=True,
            preexec_fn=settle,
        )
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        _close(pipe)


def _close(pipe: IO[str] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def usage(session: int) -> Usage:
    """Sums over the session's processes; one that ends meanwhile counts as far as it was read."""
    cpu_ns = waited_ns = user = system = resident = 0
    for process in _members(session):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = _stat(process)
            user += int(fields[11])
            system += int(fields[12])
            resident += int((process / "statm").read_text(encoding="utf-8").split()[1]) * PAGE_BYTES
            for thread in (process / "task").iterdir():
                ran, waited, _ = (thread / "schedstat").read_text(encoding="utf-8").split()
                cpu_ns += int(ran)
                waited_ns += int(waited)
    return Usage(cpu_ns, waited_ns, user, system, resident)


def _members(session: int) -> list[Path]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if int(_stat(entry)[3]) == session:
                    members.append(entry)
    return members


def _stat(process: Path) -> list[str]:
    """The fields of stat after the command name, which may hold spaces: state is field 0."""
    return (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
