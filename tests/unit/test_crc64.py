"""The checksum of a whole from those of its pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pctool.checkpoint import manifest as mf
from pctool.crc64 import combine, crc64, text


def test_the_published_check_value() -> None:
    # the check value of CRC-64/NVME for "123456789" in the catalogue of CRC algorithms
    assert crc64(b"123456789") == 0xAE8B14860A799888
    assert text(crc64(b"123456789")) == mf.crc64nvme([b"123456789"]) == "rosUhgp5mIg="


@given(pieces=st.lists(st.binary(max_size=300), max_size=8))
def test_pieces_combine_to_the_whole(pieces: list[bytes]) -> None:
    whole = 0
    for piece in pieces:
        whole = combine(whole, crc64(piece), len(piece))
    assert whole == crc64(b"".join(pieces))


@given(first=st.binary(max_size=50), zeros=st.integers(0, 1 << 21), tail=st.binary(max_size=9))
def test_long_second_pieces_combine_too(first: bytes, zeros: int, tail: bytes) -> None:
    second = bytes(zeros) + tail
    assert combine(crc64(first), crc64(second), len(second)) == crc64(first + second)


def test_an_object_of_many_gigabytes() -> None:
    """The CRC of 2^40 zero bytes after something, by doubling: no such object is made."""
    length, zeros = 1, crc64(b"\0")
    for _ in range(40):
        zeros, length = combine(zeros, zeros, length), 2 * length
    halves = combine(crc64(b"head"), combine(zeros, zeros, length), 2 * length)
    assert combine(combine(crc64(b"head"), zeros, length), zeros, length) == halves
