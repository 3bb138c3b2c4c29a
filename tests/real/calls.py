"""A client that hides nothing: bytes, framing, and whether an answer was whole."""

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping

from attrs import frozen

CALL_SECONDS = 120.0


@frozen
class Answer:
    """One HTTP answer; `whole` is false when its body was cut."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    whole: bool = True

    @property
    def content_type(self) -> str | None:
        return self.headers.get("content-type")

    def json(self) -> object:
        return json.loads(self.body)

    def events(self) -> list[bytes]:
        """The data of the stream's events, `[DONE]` included."""
        lines = (event for event in self.body.split(b"\n\n") if event)
        return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]


def get(port: int, path: str) -> Answer:
    return _call(port, "GET", path, None)


def post(port: int, path: str, body: object) -> Answer:
    """Sends a JSON body, or bytes as they are, and reads the whole answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _call(port, "POST", path, data)


def _call(port: int, method: str, path: str, body: bytes | None) -> Answer:
    with asked(port, method, path, body) as response:
        return read(response)


@contextlib.contextmanager
def asked(
    port: int, method: str, path: str, body: bytes | None
) -> Iterator[http.client.HTTPResponse]:
    """An answer whose body is still to be read; leaving closes the connection."""
    with sent(port, method, path, body) as connection:
        yield connection.getresponse()


@contextlib.contextmanager
def sent(
    port: int, method: str, path: str, body: bytes | None
) -> Iterator[http.client.HTTPConnection]:
    """A request whose answer is still to be read; leaving closes the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CALL_SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"content-type": "application/json"})
        yield connection


def read(response: http.client.HTTPResponse) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    parts = []
    whole = True
    try:
        while part := response.read1(65536):
            parts.append(part)
    except (http.client.IncompleteRead, ConnectionError):
        whole = False
    return Answer(response.status, headers, b"".join(parts), whole)
