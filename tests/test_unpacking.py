"""Streams that come compressed although nobody asked."""

import gzip
import zlib

import pytest

from router.unpacking import UNPACKED_BYTES_MAX, NotPacked, unpacker_of

TEXT = b'data: {"choices":[]}\n\n' * 50


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        (b"gzip", gzip.compress(TEXT)),
        (b"gzip", gzip.compress(TEXT[:100]) + gzip.compress(TEXT[100:])),
        (b"deflate", zlib.compress(TEXT)),
    ],
    ids=["gzip", "two members", "deflate"],
)
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_any_cut_unpacks_to_the_same(encoding: bytes, packed: bytes, size: int) -> None:
    unpacker = unpacker_of(encoding)
    assert unpacker is not None

    pieces = [packed[start : start + size] for start in range(0, len(packed), size)]

    assert b"".join(unpacker.feed(piece) for piece in pieces) == TEXT


def test_what_is_not_packed_is_refused() -> None:
    unpacker = unpacker_of(b"gzip")
    assert unpacker is not None

    with pytest.raises(NotPacked):
        unpacker.feed(TEXT)


def test_a_bomb_is_refused() -> None:
    unpacker = unpacker_of(b"gzip")
    assert unpacker is not None

    with pytest.raises(NotPacked):
        unpacker.feed(gzip.compress(bytes(2 * UNPACKED_BYTES_MAX)))


def test_an_unknown_encoding_has_no_unpacker() -> None:
    assert unpacker_of(b"br") is None
