"""Unpacking what a worker compressed unasked: gzip and deflate, incrementally and bounded.

Events inside a compressed stream can neither be read nor judged, and clients are never sent a
compressed stream. Encodings that the standard library does not know are refused.
"""

from __future__ import annotations

import zlib

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
