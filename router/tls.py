"""TLS to workers, inside the seam of sockets: records in memory BIOs over a TCP connection."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.tcp import TcpSocket


class TlsSocket:
    """TLS as a client, over a `TcpSocket`, with the same face.

    The records live in two memory BIOs, so that the reactor needs to know nothing of TLS: a
    handshake is an unfinished connect, and ciphertext the kernel did not take is `has_unsent`.
    """

    __slots__ = (
        "_ended",
        "_error",
        "_handshaken",
        "_incoming",
        "_outgoing",
        "_tcp",
        "_tls",
        "_unsent",
        "recv",
        "send",
    )

    def __init__(self, tcp: TcpSocket, context: ssl.SSLContext, server_name: str) -> None:
        self._tcp = tcp
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._unsent = b""
        self._handshaken = False
        #: What stands behind the bytes that were returned: an orderly end, or an error.
        self._ended = False
        self._error: OSError | None = None
        self.recv: Callable[[int], bytes] = self._recv
        self.send: Callable[[bytes], int] = self._send

    @property
    def has_unsent(self) -> bool:
        """Ciphertext waits for the kernel."""
        return bool(self._unsent) or self._outgoing.pending > 0

    @has_unsent.setter
    def has_unsent(self, _value: bool) -> None:
        raise AttributeError("derived")

    def fileno(self) -> int:
        """The descriptor, for epoll."""
        return self._tcp.fileno()

    def finish_connecting(self) -> None:
        """Connect, then shake hands; a certificate that does not fit is an OSError (SSLError)."""
        if self._handshaken:
            return
        self._tcp.finish_connecting()
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._push()
                if not self._pull():
                    raise BlockingIOError from None
        self._handshaken = True
        self._push()

    def is_quiet(self) -> bool:
        """See `TcpSocket.is_quiet`; session tickets have been read by the reactor long before."""
        return self._tls.pending() == 0 and self._tcp.is_quiet()

    def untaken_bytes(self) -> int:
        """Ciphertext, which is as good."""
        return self._tcp.untaken_bytes()

    def shutdown_write(self) -> None:
        """Half-close the transport."""
        self._tcp.shutdown_write()

    def close(self) -> None:
        """Close the transport; workers do not miss a close_notify from a client."""
        self._tcp.close()

    def reset(self) -> None:
        """Reset the transport."""
        self._tcp.reset()

    def _recv(self, limit: int) -> bytes:
        pieces: list[bytes] = []
        size = 0
        try:
            while size < limit and not self._ended and self._error is None:
                piece = self._read(limit - size)
                if piece is None:
                    break
                self._ended = not piece
                pieces.append(piece)
                size += len(piece)
            self._push()
        except OSError as error:
            self._error = error  # also an end without close_notify, perhaps a truncation
        if size:
            if self._ended or self._error is not None:
                # What comes behind these bytes must be read, too, and may bring no edge by itself.
                self._tcp.shutdown_read()
            return b"".join(pieces)
        if self._error is not None:
            raise self._error
        if self._ended:
            return b""
        raise BlockingIOError

    def _read(self, limit: int) -> bytes | None:
        """Plaintext, b"" at an orderly end, or None where more ciphertext must come first.

        Ciphertext is taken from the kernel only when it is needed, so that little is kept here.
        """
        while True:
            try:
                return self._tls.read(limit)
            except ssl.SSLWantReadError:
                if not self._pull():
                    return None

    def _send(self, data: bytes) -> int:
        self._push()
        if self._unsent:
            raise BlockingIOError
        if data:
            self._tls.write(data)
            self._push()
        return len(data)

    def _pull(self) -> bool:
        """Take ciphertext, or its end, from the kernel; whether there was any."""
        try:
            data = self._tcp.recv(65536)
        except BlockingIOError:
            return False
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        return True

    def _push(self) -> None:
        while self.has_unsent:
            data = self._unsent or self._outgoing.read()
            try:
                sent = self._tcp.send(data)
            except BlockingIOError:
                self._unsent = data
                return
            self._unsent = data[sent:]
