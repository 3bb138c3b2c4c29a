"""Clients of a simulated run: what they send, when they leave, and what they note of the answer."""

from __future__ import annotations

from collections.abc import Sequence

import h11
import trio
from attrs import define, field

from tests.memory import MemoryNetwork, MemoryStream
from tests.outcome import Got
from tests.plans import Client, Plan

READ_BYTES = 65536
GONE = (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError)


def requests_of(client: Client) -> list[Got]:
    return [Got(client), *(Got(each) for each in client.then)]


async def run_connection(network: MemoryNetwork, plan: Plan, requests: Sequence[Got]) -> None:
    """Ask one after another on one connection, until it ends."""
    await trio.sleep_until(plan.begin + requests[0].client.at)
    try:
        stream = network.open_client()
    except ConnectionRefusedError:
        for got in requests:
            _end(plan, got, "refused")
        return
    line = Line(plan, stream)
    for got in requests:
        if not line.is_usable:
            _end(plan, got, "unsent")
            continue
        await trio.sleep_until(plan.begin + got.client.at)
        await _run_request(line, got, requests)
    stream.close()


async def _run_request(line: Line, got: Got, requests: Sequence[Got]) -> None:
    async with trio.open_nursery() as nursery:
        if got.client.leaves:
            nursery.start_soon(_leave, line, got, nursery.cancel_scope)
        await line.ask(got, requests if got.client.pipelines else ())
        nursery.cancel_scope.cancel(reason="answered")
    _end(line.plan, got, got.ending or "left")
    line.is_usable &= got.ending == "clean"


def _end(plan: Plan, got: Got, ending: str) -> None:
    got.ending, got.ended_at = ending, trio.current_time() - plan.begin


async def _leave(line: Line, got: Got, scope: trio.CancelScope) -> None:
    client, begin, stream = got.client, line.plan.begin, line.stream
    assert isinstance(stream, MemoryStream)
    if client.half_closes_at is not None:
        await trio.sleep_until(begin + client.half_closes_at)
        await stream.send_eof()
    if client.resets_at is not None:
        await trio.sleep_until(begin + client.resets_at)
        got.ending = "left"
        stream.reset()
        scope.cancel(reason="the client resets")
    if client.leaves_at is not None:
        await trio.sleep_until(begin + client.leaves_at)
        got.ending = "left"
        stream.close()
        scope.cancel(reason="the client leaves")


@define(eq=False)
class Line:
    """One connection of a client's, with what it has sent and read ahead."""

    plan: Plan
    stream: trio.abc.Stream
    #: It can take another request.
    is_usable: bool = True
    _unread: bytes = b""
    #: Requests that went out with an earlier one.
    _sent: set[int] = field(factory=set)

    async def ask(self, got: Got, together: Sequence[Got] = ()) -> None:
        """One request and its answer; with it go those of `together` that follow."""
        client, connection = got.client, h11.Connection(h11.CLIENT)
        try:
            if client.raw is not None:
                await self.stream.send_all(client.raw)
                connection.receive_data(await self._read_all(got))
                connection.receive_data(b"")
            else:
                head, body = _request(self.plan, client, connection)
                if id(got) not in self._sent:
                    await self._send(client, head, body, together)
            await trio.sleep_until(self.plan.begin + client.reads_from)
            await self._read_answer(connection, got)
        except GONE:
            got.ending = got.ending or "cut"
            self.is_usable = False

    async def _send(
        self, client: Client, head: bytes, body: bytes, together: Sequence[Got]
    ) -> None:
        if client.body_at is not None:
            await self.stream.send_all(head)
            await trio.sleep_until(self.plan.begin + client.body_at)
            head = b""
        data = head + body
        for each in together[1:]:
            self._sent.add(id(each))
            data += b"".join(_request(self.plan, each.client, h11.Connection(h11.CLIENT)))
        await self.stream.send_all(data)

    async def _read_all(self, got: Got) -> bytes:
        while data := await self.stream.receive_some(READ_BYTES):
            got.raw += bytes(data)
        return got.raw

    async def _read_answer(self, connection: h11.Connection, got: Got) -> None:
        begin, unread = self.plan.begin, self._unread
        if unread:
            connection.receive_data(unread)
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(bytes(await self.stream.receive_some(READ_BYTES)))
            elif isinstance(event, h11.InformationalResponse):
                got.interim.append(event.status_code)
            elif isinstance(event, h11.Response):
                got.status, got.head_at = event.status_code, trio.current_time() - begin
                got.header_list = [(n.decode(), v.decode("latin-1")) for n, v in event.headers]
                got.headers = dict(got.header_list)
            elif isinstance(event, h11.Data):
                got.pieces.append((trio.current_time() - begin, bytes(event.data)))
                got.body += event.data
            elif isinstance(event, h11.EndOfMessage):
                got.ending = "clean"
                self.is_usable = connection.their_state is h11.DONE
                self._unread = connection.trailing_data[0]
                return
            elif isinstance(event, h11.ConnectionClosed):
                got.ending = "cut"
                return


def _request(plan: Plan, client: Client, connection: h11.Connection) -> tuple[bytes, bytes]:
    body = client.body(plan.engines[0].model if plan.engines else "tiny")
    headers = [("host", "baton")]
    if body or client.method == "POST":
        headers.append(("content-length", str(len(body))))
    if client.fault:
        headers.append(("x-sim-fault", client.fault))
    sent = [(name.encode(), value.encode("latin-1")) for name, value in (*headers, *client.headers)]
    head = connection.send(h11.Request(method=client.method, target=client.target, headers=sent))
    data = connection.send(h11.Data(data=body)) if body else b""
    connection.send(h11.EndOfMessage())
    assert head is not None
    if client.http_10:
        head = head.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)
    return head, data or b""
