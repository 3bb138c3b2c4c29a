"""A bare pass-through: bytes from a client to a worker and back, and nothing else.

It is the floor for any router in Python: one recv() and one send() for whatever arrives, on one
epoll, without a look at the bytes. Every client connection gets a worker connection of its own, in
turn. What Baton costs above it is what reading, judging and recording cost.

    python -m benchmarks.relay PORT WORKER_URL...
"""

import itertools
import select
import socket
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

from attrs import define

RECEIVE_BYTES = 65536
ENDED = select.EPOLLHUP | select.EPOLLERR


@define(eq=False)
class End:
    """One socket of a pair, and the bytes that it could not take yet."""

    sock: socket.socket
    peer: "End | None" = None
    unsent: bytes = b""


class Relay:
    """Accepts on one socket and pumps for ever."""

    def __init__(self, listener: socket.socket, workers: Iterator[tuple[str, int]]) -> None:
        self.listener = listener
        self.workers = workers
        self.epoll = select.epoll()
        self.ends: dict[int, End] = {}
        self.epoll.register(listener.fileno(), select.EPOLLIN)

    def run(self) -> None:
        while True:
            for number, events in self.epoll.poll():
                if number == self.listener.fileno():
                    self.accept()
                elif (end := self.ends.get(number)) is not None:
                    self.handle(end, events)

    def accept(self) -> None:
        client = self.add(self.listener.accept()[0])
        worker = self.add(socket.create_connection(next(self.workers)))
        client.peer, worker.peer = worker, client

    def add(self, sock: socket.socket) -> End:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = self.ends[sock.fileno()] = End(sock)
        self.epoll.register(sock.fileno(), select.EPOLLIN)
        return end

    def handle(self, end: End, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self.send(end, end.unsent)
            if events & (select.EPOLLIN | ENDED):
                self.receive(end)
        except ConnectionError:
            self.close(end)

    def receive(self, end: End) -> None:
        received = end.sock.recv(RECEIVE_BYTES)
        if not received or end.peer is None:
            self.close(end)
        else:
            self.send(end.peer, received)

    def send(self, end: End, data: bytes) -> None:
        """Sends; what is left waits, and its sender is not read until it has gone."""
        try:
            sent = end.sock.send(data)
        except BlockingIOError:
            sent = 0
        waiting = bool(end.unsent)
        end.unsent = data[sent:]
        if waiting != bool(end.unsent) and end.peer is not None:
            held = bool(end.unsent)
            self.epoll.modify(end.sock, select.EPOLLIN | (select.EPOLLOUT if held else 0))
            self.epoll.modify(end.peer.sock, 0 if held else select.EPOLLIN)

    def close(self, end: End) -> None:
        for one in (end, end.peer):
            if one is not None and self.ends.pop(one.sock.fileno(), None) is not None:
                one.sock.close()


def main() -> None:
    port, *urls = sys.argv[1:]
    parts = [urlsplit(url) for url in urls]
    workers = itertools.cycle([(part.hostname or "", part.port or 80) for part in parts])
    Relay(socket.create_server(("127.0.0.1", int(port)), backlog=4096), workers).run()


if __name__ == "__main__":
    main()
