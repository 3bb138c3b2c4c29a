"""A router as the commands see it that talk to one: an HTTP server that answers as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from attrs import define, field


@define(eq=False)
class Router:
    """A stand-in for a router's HTTP API: records what it is asked, answers as it is told."""

    url: str = ""
    asked: list[tuple[str, str, str | None, object]] = field(factory=list)
    status: int = 200
    answer: bytes = b"{}"
    #: Of some paths.
    answers: dict[str, bytes] = field(factory=dict)


@contextmanager
def standing_in() -> Iterator[Router]:
    """One on a port of its own."""
    stand_in = Router()

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            size = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(size)) if size else None
            key = self.headers.get("authorization")
            stand_in.asked.append((self.command, self.path, key, body))
            self.send_response(stand_in.status)
            answer = stand_in.answers.get(self.path, stand_in.answer)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_DELETE = reply

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005})
    thread.start()
    yield stand_in
    server.shutdown()
    server.server_close()
    thread.join()
