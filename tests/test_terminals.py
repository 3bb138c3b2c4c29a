"""Whatever a command is started with as its standard streams, it does what it is there for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from attrs import define

from tests.nats_server import free_port
from tests.real.calls import get
from tests.real.processes import wait_until
from tests.routers import Router, standing_in
from tests.test_replay import MOVED, as_lines, record

ROOT = Path(__file__).resolve().parent.parent
Plain = list[tuple[list[str], int, bytes, bytes]]
CLOSED = [(0,), (1,), (2,), (0, 1, 2)]
SECONDS = 30.0
#: Of a worker, beyond ASCII as it may be.
NAME = "größer-世界"

pytestmark = pytest.mark.slow


@define
class Started:
    """A command, with some of its standard streams closed or of an encoding."""

    words: Sequence[str]
    closed: Sequence[int] = ()
    encoding: str = "utf-8"

    def popen(self, cwd: Path) -> subprocess.Popen[bytes]:
        script = " ".join(['exec "$@"', *(f"{fd}>&-" for fd in self.closed)])
        return subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", sys.executable, "-m", "router", *self.words],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": self.encoding},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def end(self, cwd: Path) -> tuple[int, bytes, bytes]:
        with self.popen(cwd) as popen:
            out, err = popen.communicate(timeout=SECONDS)
        return popen.returncode, out, err


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    with standing_in() as stand_in:
        stand_in.answer = f'{{"workers":[{{"id":"{NAME}"}}]}}'.encode()
        yield stand_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("there")
    (made / "log").write_bytes(as_lines([record(MOVED[0])]))
    return made


@pytest.fixture(scope="module")
def plainly(router: Router, folder: Path) -> Plain:
    """Commands, with how they end and what they say where nothing is the matter."""
    return [(words, *Started(words).end(folder)) for words in commands(router)]


def commands(router: Router) -> list[list[str]]:
    return [
        ["serve", "--print-config"],
        ["check", "the router"],
        ["diagrams", "--check"],
        ["replay", "log"],
        ["workers", "list", "--router-url", router.url],
    ]


@pytest.mark.parametrize("closed", CLOSED, ids=str)
def test_closed_streams_change_no_exit_code_and_nothing_on_the_others(
    closed: tuple[int, ...], plainly: Plain, folder: Path
) -> None:
    for words, code, out, err in plainly:
        expected = code, b"" if 1 in closed else out, b"" if 2 in closed else err

        assert (words, *Started(words, closed).end(folder)) == (words, *expected)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_a_terminal_does_not_know_end_nothing(
    encoding: str, plainly: Plain, folder: Path
) -> None:
    for words, code, out, err in plainly:
        expected = code, out.decode().encode(encoding, "replace"), err

        assert (words, *Started(words, encoding=encoding).end(folder)) == (words, *expected)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc here")
@pytest.mark.parametrize("closed", CLOSED, ids=str)
def test_what_a_server_logs_goes_nowhere_but_to_its_standard_error(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    port = free_port()
    words = ["serve", "--port", str(port), "--log-level", "debug"]
    with Started(words, closed).popen(tmp_path) as popen:
        wait_until(lambda: answers(port) or popen.poll() is not None, SECONDS)
        opened = [os.readlink(f"/proc/{popen.pid}/fd/{fd}") for fd in closed]
        popen.send_signal(signal.SIGTERM)
        out, err = popen.communicate(timeout=SECONDS)

    assert opened == ["/dev/null"] * len(closed)
    assert popen.returncode == 0
    assert out == (
        b"" if 1 in closed else f"baton: listening on http://127.0.0.1:{port}\n".encode()
    )
    assert (b"fact=listening" in err) == (2 not in closed)


def answers(port: int) -> bool:
    try:
        return get(port, "/health").status == 200
    except OSError:
        return False
