"""Unpacking what a worker compressed unasked: gzip and deflate, incrementally and bounded.

A compressed answer can neither be read nor judged, and clients are never sent a stream or a
generation that is compressed. Encodings that the standard library does not know are refused.
"""

from __future__ import annotations

import zlib

from router.headers import Headers, find

#: Most bytes that one read may unpack to; a bomb is a broken answer.
UNPACKED_BYTES_MAX = 16 * 1024 * 1024
#: What `wbits` means to zlib: a gzip header, or a zlib one.
_WBITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}


class NotPacked(ValueError):
    """The bytes are not what the encoding says."""


class Unpacker:
    """Unpacks one stream; members of a gzip stream may follow each other."""

    def __init__(self, wbits: int) -> None:
        self._wbits = wbits
        self._inflate = zlib.decompressobj(wbits)

    @property
    def is_at_end(self) -> bool:
        """What was fed is whole."""
        return self._inflate.eof

    def feed(self, data: bytes) -> bytes:
        """What `data` unpacks to; may be empty. Raises NotPacked."""
        found = b""
        while data:
            if self._inflate.eof:
                self._inflate = zlib.decompressobj(self._wbits)
            try:
                found += self._inflate.decompress(data, UNPACKED_BYTES_MAX - len(found) + 1)
            except zlib.error as error:
                raise NotPacked(str(error)) from error
            if len(found) > UNPACKED_BYTES_MAX:
                raise NotPacked("too much in too little")
            data = self._inflate.unused_data
        return found


def unpacker_of(encoding: bytes) -> Unpacker | None:
    """For a content coding by its name in lower case, or None for one that is not known."""
    wbits = _WBITS.get(encoding)
    return None if wbits is None else Unpacker(wbits)


def unpack(encoding: bytes, data: bytes) -> bytes:
    """All of an answer. Raises NotPacked, also for an encoding that is not known."""
    unpacker = unpacker_of(encoding)
    if unpacker is None:
        raise NotPacked("an unknown encoding")
    found = unpacker.feed(data)
    if not unpacker.is_at_end:
        raise NotPacked("cut off")
    return found


def encoding_of(headers: Headers) -> bytes:
    """The content coding of an answer, in lower case; empty where it has none."""
    found = (find(headers, b"content-encoding") or b"").lower()
    return b"" if found == b"identity" else found


def without_encoding(headers: Headers) -> Headers:
    """The headers of the same answer, unpacked."""
    return [each for each in headers if each[0] != b"content-encoding"]
