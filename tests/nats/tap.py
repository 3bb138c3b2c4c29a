"""A broker with a leak: passes NATS on to the real one and loses some of what is published.

Only messages to some subjects are lost: to inboxes, say, which makes holes in streams, or to
workers, which makes requests that never arrive. Which ones is decided by a seed.
"""

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

from attrs import Factory, define, field

RECEIVE_BYTES = 65536


@define(eq=False)
class Tap:
    """Where it listens, and how many messages it has passed on and lost."""

    url: str
    share: float
    random: random.Random
    subjects: bytes
    passed: int = 0
    lost: int = 0
    sockets: list[socket.socket] = Factory(list)
    _lock: threading.Lock = field(factory=threading.Lock)

    def loses(self, subject: bytes) -> bool:
        if not subject.startswith(self.subjects):
            return False
        with self._lock:
            is_lost = self.random.random() < self.share
            self.lost += is_lost
            self.passed += not is_lost
        return is_lost


@contextlib.contextmanager
def tapped(
    broker: str, *, share: float, seed: int = 1, subjects: bytes = b"_INBOX."
) -> Iterator[Tap]:
    """Loses this share of the messages to these subjects that come in through it."""
    host, port = broker.removeprefix("nats://").rsplit(":", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"nats://127.0.0.1:{listener.getsockname()[1]}"
        tap = Tap(url, share, random.Random(seed), subjects)
        accepting = threading.Thread(target=_accept, args=(listener, (host, int(port)), tap))
        accepting.start()
        try:
            yield tap
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for each in tap.sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()


def _accept(listener: socket.socket, target: tuple[str, int], tap: Tap) -> None:
    while True:
        try:
            client = listener.accept()[0]
        except OSError:
            return
        server = socket.create_connection(target)
        tap.sockets += [client, server]
        for pump in (
            threading.Thread(target=_pass_on, args=(server, client), daemon=True),
            threading.Thread(target=_filter, args=(client, server, tap), daemon=True),
        ):
            pump.start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(RECEIVE_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)


def _filter(source: socket.socket, target: socket.socket, tap: Tap) -> None:
    buffered = b""
    with contextlib.suppress(OSError):
        while data := source.recv(RECEIVE_BYTES):
            kept, buffered = _sifted(buffered + data, tap)
            target.sendall(kept)
        target.shutdown(socket.SHUT_RDWR)


def _sifted(data: bytes, tap: Tap) -> tuple[bytes, bytes]:
    """What goes on of the complete protocol messages in `data`, and the incomplete rest.

    `PUB subject [reply] bytes` and `HPUB subject [reply] header-bytes bytes` are followed by so
    many bytes and CRLF; every other operation is one line.
    """
    kept = []
    while (end := data.find(b"\r\n")) >= 0:
        words = data[:end].split()
        size = end + 2
        is_lost = False
        if words and words[0].upper() in (b"PUB", b"HPUB"):
            size += int(words[-1]) + 2
            if len(data) < size:
                break
            is_lost = tap.loses(words[1])
        if not is_lost:
            kept.append(data[:size])
        data = data[size:]
    return b"".join(kept), data
