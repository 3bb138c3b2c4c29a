"""How soon a client hears that its prefill has failed: `python -m benchmarks.prefill_failure`.

The router runs as a process of its own. Decode is a thread that would keep a request for ever; the
main thread is client and prefill in one: it sends a request, receives it as prefill, fails it, and
reads the client's connection. The clock runs from the moment before prefill's bytes leave to the
moment the client has the error, with no thread to be switched to in between.
"""

import argparse
import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median, quantiles

import msgspec
from attrs import Factory, define

from router.options import bare

Way = Callable[[socket.socket], None]

PATH = b"/v1/chat/completions"
BODY = msgspec.json.encode(
    {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
)
REQUEST = b"POST %b HTTP/1.1\r\nhost: b\r\ncontent-length: %d\r\n\r\n%b" % (PATH, len(BODY), BODY)
MODELS = msgspec.json.encode({"object": "list", "data": [{"id": "m", "object": "model"}]})
ERROR = msgspec.json.encode({"error": {"message": "it broke", "type": "t", "code": 500}})
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"data: %b\n\n" % ERROR
SETTLE_SECONDS = 0.01
"""From the moment decode has the request to prefill's failure."""
WAIT_SECONDS = 30.0


def answer(status: int, body: bytes) -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _cut(connection: socket.socket) -> None:
    # After a head, since a connection that ends without a byte is tried once more.
    connection.sendall(EVENTS)
    connection.shutdown(socket.SHUT_RDWR)


def _says(data: bytes) -> Way:
    return lambda connection: connection.sendall(data)


WAYS: dict[str, tuple[Way, bool]] = {
    "prefill answers 400": (_says(answer(400, ERROR)), False),
    "prefill answers 500": (_says(answer(500, ERROR)), False),
    "prefill's connection ends": (_cut, False),
    "prefill answers 200 with an error event": (
        _says(EVENTS + b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENT), EVENT)),
        False,
    ),
    "prefill answers 500 after decode's head": (_says(answer(500, ERROR)), True),
}
"""How prefill fails, and whether decode has answered by then."""


@define(eq=False)
class Half:
    """A worker: answers what is asked besides, and hands work on with its connection."""

    listener: socket.socket = Factory(lambda: socket.create_server(("127.0.0.1", 0)))
    work: queue.Queue[socket.socket] = Factory(queue.Queue)
    #: Moments at which the router closed a connection.
    left: queue.Queue[float] = Factory(queue.Queue)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        has_work = False
        with contextlib.suppress(OSError):
            for head in _requests(connection):
                if head.startswith(b"POST " + PATH):
                    has_work = True
                    self.work.put(connection)
                else:
                    connection.sendall(answer(200, MODELS))
        if has_work:
            self.left.put(time.perf_counter())


def _requests(connection: socket.socket) -> Iterator[bytes]:
    """The heads of complete requests."""
    data = b""
    while received := connection.recv(65536):
        data += received
        head, end, body = data.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if end and len(body) >= int(length or b"0"):
            data = b""
            yield head


def failure(
    port: int, prefill: Half, decode: Half, way: Way, has_head: bool
) -> tuple[float, float]:
    """One failure: seconds until the client is told, and until decode is left."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(REQUEST)
        failing = prefill.work.get(timeout=WAIT_SECONDS)
        waiting = decode.work.get(timeout=WAIT_SECONDS)
        heard = b""
        if has_head:
            waiting.sendall(EVENTS)
            heard = client.recv(65536)
        time.sleep(SETTLE_SECONDS)
        failed_at = time.perf_counter()
        way(failing)
        while b'"error"' not in heard:
            data = client.recv(65536)
            assert data, heard
            heard += data
        told_at = time.perf_counter()
    return told_at - failed_at, decode.left.get(timeout=WAIT_SECONDS) - failed_at


def measure(port: int, prefill: Half, decode: Half, rounds: int) -> None:
    """Every way to fail, so many times; prints a table."""
    print("| how prefill fails | client told, median | 99th percentile | decode free, median |")
    print("| --- | --- | --- | --- |")
    for name, (way, has_head) in WAYS.items():
        pairs = [failure(port, prefill, decode, way, has_head) for _ in range(rounds)]
        told, free = zip(*pairs, strict=True)
        numbers = (median(told), quantiles(told, n=100)[-1], median(free))
        print(f"| {name} | {' | '.join(f'{1000 * each:.2f} ms' for each in numbers)} |", flush=True)


@contextlib.contextmanager
def routed(prefill: Half, decode: Half) -> Iterator[int]:
    """A router in front of both; its port, once the pair is complete."""
    words = [sys.executable, "-m", "router", "serve", "--port", "0", "--log-level", "error"]
    words += ["--prefill", prefill.url, "8998", "--decode", decode.url, "--engine", "openai"]
    words += ["--pd-protocol", "sglang-bootstrap", "--breaker-failure-threshold", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=bare(os.environ)) as router:
        try:
            assert router.stdout is not None
            port = int(router.stdout.readline().rsplit(b":", 1)[1])
            deadline = time.monotonic() + WAIT_SECONDS
            while not _is_ready(port):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield port
        finally:
            router.terminate()


def _is_ready(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /readyz HTTP/1.1\r\nhost: b\r\n\r\n")
        return b" 200 " in client.recv(65536)[:20]


def main() -> None:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefill_failure")
    parser.add_argument("--rounds", type=int, default=200, help="failures of each kind")
    rounds = parser.parse_args().rounds
    prefill, decode = Half(), Half()
    prefill.start()
    decode.start()
    with routed(prefill, decode) as port:
        measure(port, prefill, decode, rounds)


if __name__ == "__main__":
    main()
