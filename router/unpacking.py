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
    """Unpacks one stream."""

    def __init__(self, wbits: int) -> None:
        self._inflate = zlib.decompressobj(wbits)

    def feed(self, data: bytes) -> bytes:
        """What `data` unpacks to; may be empty. Raises NotPacked."""
        try:
            found = self._inflate.decompress(data, UNPACKED_BYTES_MAX)
        except zlib.error as error:
            raise NotPacked(str(error)) from error
        if self._inflate.unconsumed_tail:
            raise NotPacked("too much in too little")
        return found


def unpacker_of(encoding: bytes) -> Unpacker | None:
    """For a content coding by its name in lower case, or None for one that is not known."""
    wbits = _WBITS.get(encoding)
    return None if wbits is None else Unpacker(wbits)
