"""The router under test as a process of its own, and a recorder to put between it and an engine."""

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

import h11
from attrs import Factory, define

from tests.real import places
from tests.real.calls import Answer, get
from tests.real.engines import Engine
from tests.real.processes import free_port, session, wait_ready, wait_until

START_SECONDS = 30.0
LAST_CHUNK_SECONDS = 2.0


@contextlib.contextmanager
def routed(*workers: str, flags: str = "") -> Iterator[int]:
    """Starts the router in front of these URLs; the port, once it knows the model."""
    with _running(places.ROUTER, flags, workers) as port:
        yield port


@contextlib.contextmanager
def routed_pair(prefill: str, bootstrap: int | None, decode: str, flags: str = "") -> Iterator[int]:
    """Starts the router in front of a pair; the port, once the pair is complete."""
    halves = ["--prefill", prefill, *([] if bootstrap is None else [str(bootstrap)])]
    with _running(places.PAIR_ROUTER, flags, [*halves, "--decode", decode]) as port:
        assert wait_until(lambda: get(port, "/readyz").status == 200, START_SECONDS)
        yield port


@contextlib.contextmanager
def _running(command: str, flags: str, workers: Sequence[str]) -> Iterator[int]:
    port = free_port()
    words: list[str] = []
    for word in f"{command} {flags}".split():
        if word == "{workers}":
            words += workers
        else:
            words.append(word.format(port=port, python=sys.executable))

    def knows_the_model() -> bool:
        answer = get(port, "/v1/models")
        return answer.status == 200 and f'"{places.MODEL_NAME}"'.encode() in answer.body

    name = f"router-{port}"
    with session(name, words, {}) as process:
        wait_ready(name, process, knows_the_model, START_SECONDS)
        yield port


@define(eq=False)
class Recorder:
    """A relay that keeps every byte the engine sent, by connection."""

    port: int
    received: list[bytearray] = Factory(list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answers(self) -> list[Answer]:
        """All complete answers of all connections, probes included."""
        return [answer for stream in list(self.received) for answer in _parse(bytes(stream))]

    def sent(self, answer: Answer) -> bool:
        """Whether the engine sent an answer with this status, content type and body.

        Waits a little, since a router may end its answer at `[DONE]`, before the engine's last
        chunk has come.
        """

        def is_among_them() -> bool:
            return any(
                (answer.status, answer.content_type, answer.body)
                == (own.status, own.content_type, own.body)
                for own in self.answers()
            )

        return wait_until(is_among_them, LAST_CHUNK_SECONDS)


@contextlib.contextmanager
def recorded(engine: Engine) -> Iterator[Recorder]:
    """A recorder in front of an engine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        recorder = Recorder(listener.getsockname()[1])
        accepting = threading.Thread(target=_accept, args=(listener, engine.port, recorder))
        accepting.start()
        try:
            yield recorder
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _accept(listener: socket.socket, port: int, recorder: Recorder) -> None:
    with contextlib.ExitStack() as stack:
        while True:
            try:
                client = stack.enter_context(listener.accept()[0])
            except OSError:
                return
            worker = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            stream = bytearray()
            recorder.received.append(stream)
            for pumped in ((client, worker, bytearray()), (worker, client, stream)):
                threading.Thread(target=_pump, args=pumped, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            kept += data
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


def _parse(stream: bytes) -> Iterator[Answer]:
    """The answers of one connection, in order; one that is not complete ends the list."""
    connection = h11.Connection(h11.CLIENT)
    connection.receive_data(stream)
    while True:
        connection.send(h11.Request(method="GET", target="/", headers=[("host", "engine")]))
        connection.send(h11.EndOfMessage())
        head = connection.next_event()
        if not isinstance(head, h11.Response):
            return
        body = bytearray()
        while isinstance(event := connection.next_event(), h11.Data):
            body += event.data
        if not isinstance(event, h11.EndOfMessage):
            return
        headers = {name.decode(): value.decode() for name, value in head.headers}
        yield Answer(head.status_code, headers, bytes(body))
        if h11.MUST_CLOSE in connection.states.values():
            return
        connection.start_next_cycle()


def error_of(body: bytes) -> dict[str, object]:
    """The error of an answer, which has to be of OpenAI's nested shape."""
    error = json.loads(body)["error"]
    assert isinstance(error, dict)
    return error
