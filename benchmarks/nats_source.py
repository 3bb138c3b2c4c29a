"""A worker behind NATS that is far cheaper than any router: `python -m benchmarks.nats_source`.

It speaks the broker's own protocol on one socket and writes all frames that are due with one
send(). What it says is what `worker.c` says over HTTP: a role, then tokens whose text ends with
CLOCK_MONOTONIC, at RATE a second and stream, numbered, without an end. Probes are answered, too.
"""

import argparse
import base64
import json
import select
import socket
import time

from attrs import Factory, define

MODEL = "n"
TICK_SECONDS = 0.001
RECEIVE_BYTES = 1 << 16
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1764450000,"model":"%b","choices":[{"index":0,"delta":{%b},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
HEADERS = b"NATS/1.0\r\nrs-type: %b\r\nrs-seq: %d\r\n%b\r\n"
MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()


@define(eq=False)
class Stream:
    """One request's frames."""

    inbox: bytes
    due: float
    seq: int = 0


@define(eq=False)
class Source:
    """The connection, and the streams that it feeds."""

    server: socket.socket
    period: float
    streams: dict[bytes, Stream] = Factory(dict)
    received: bytes = b""
    out: list[bytes] = Factory(list)

    def frame(self, stream: Stream, kind: bytes, payload: bytes, more: bytes = b"") -> None:
        head = HEADERS % (kind, stream.seq, more)
        stream.seq += 1
        sizes = (len(head), len(head) + len(payload))
        self.out.append(b"HPUB %b %d %d\r\n%b%b\r\n" % (stream.inbox, *sizes, head, payload))

    def feed(self, now: float) -> None:
        """All tokens that are due."""
        text = b'"content":" quick ts=%d"' % int(now * 1e9)
        token = CHUNK % (MODEL.encode(), text)
        for stream in self.streams.values():
            while stream.due <= now:
                stream.due += self.period
                self.frame(stream, b"data", token)

    def flush(self) -> None:
        if self.out:
            self.server.sendall(b"".join(self.out))
            self.out.clear()

    def receive(self) -> None:
        """Requests and cancels; everything else only has to be skipped."""
        data = self.server.recv(RECEIVE_BYTES)
        if not data:
            raise SystemExit("the broker has gone")
        self.received += data
        while (end := self.received.find(b"\r\n")) >= 0:
            words = self.received[:end].split()
            size = end + 2
            if words[0] in (b"MSG", b"HMSG"):
                size += int(words[-1]) + 2
                if len(self.received) < size:
                    return
                payload = self.received[end + 2 : size - 2]
                skipped = int(words[-2]) if words[0] == b"HMSG" else 0
                self.take(words[1], words[3], payload[skipped:])
            elif words[0] == b"PING":
                self.out.append(b"PONG\r\n")
            elif words[0] == b"-ERR":
                raise SystemExit(self.received[:end].decode())
            self.received = self.received[size:]

    def take(self, subject: bytes, reply: bytes, payload: bytes) -> None:
        if b".cancel." in subject:
            self.streams.pop(payload, None)
            return
        asked = json.loads(payload)
        stream = Stream(reply, time.monotonic())
        if not asked["stream"]:
            body = MODELS if asked["path"] == "/v1/models" else b"{}"
            self.frame(stream, b"data", body)
            self.frame(stream, b"done", b"", b"rs-status: 200\r\n")
            return
        kind = b"rs-status: 200\r\nrs-content-type: text/event-stream; charset=utf-8\r\n"
        self.frame(stream, b"head", b"", kind)
        role = CHUNK % (MODEL.encode(), b'"role":"assistant","content":""')
        self.frame(stream, b"data", role)
        self.streams[reply] = stream


def main() -> None:
    """Read the flags and serve for ever."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nats_source")
    parser.add_argument("port", type=int, help="of the broker")
    parser.add_argument("id", help="of the worker")
    parser.add_argument("rate", type=float, help="tokens per second and stream")
    parser.add_argument("--prefix", default="infera")
    given = parser.parse_args()
    token = base64.urlsafe_b64encode(given.id.encode()).rstrip(b"=").decode()
    server = socket.create_connection(("127.0.0.1", given.port))
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    source = Source(server, 1 / given.rate)
    options = {"verbose": False, "headers": True, "no_responders": False}
    lines = [f"CONNECT {json.dumps(options)}"]
    for number, kind in enumerate(("req", "cancel")):
        lines.append(f"SUB {given.prefix}.{kind}.{token} {number + 1}")
    source.out.append("".join(f"{line}\r\n" for line in lines).encode())
    while True:
        source.flush()
        if select.select([server], [], [], TICK_SECONDS)[0]:
            source.receive()
        source.feed(time.monotonic())


if __name__ == "__main__":
    main()
