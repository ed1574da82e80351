"""CRC64-NVME, the checksum that S3 keeps of a whole object, in parts that may be read in any order.

A CRC is linear: the one of A followed by B is that of A, carried over B's length, xor that of B. Carrying over one byte
is a multiplication by x^8 modulo the polynomial over GF(2); zlib's crc32_combine does the same with another polynomial.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable
from typing import cast

from pctool.errors import UsageError

# 0xad93d23594c93659 in the order in which the bits are sent (catalogue of CRC algorithms, CRC-64/NVME: reflected)
_POLYNOMIAL = 0x9A6C9329AC4BC9B5
_ONE = 1 << 63  # x^0 in that order


def crc64(data: bytes, before: int = 0) -> int:
    """Return the CRC64-NVME of `data`, going on from that of what came before. Raise UsageError without awscrt."""
    return function()(data, before)


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC of two pieces, one after the other, from theirs and the second one's length in bytes."""
    return _times(_carry(second_bytes), first) ^ second


def text(value: int) -> str:
    """Return a CRC as S3 writes it: base64 of its eight bytes, the highest first."""
    return base64.b64encode(value.to_bytes(8, "big")).decode()


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the CRC's."""
    product = 0
    for bit in range(63, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=256)  # nearly all parts are of one length
def _carry(length: int) -> int:
    """Return x^(8 * length) modulo the CRC's polynomial."""
    power, square = _ONE, _ONE >> 8  # x^8 to the powers of two, as the bits of the length say
    while length:
        if length & 1:
            power = _times(square, power)
        square = _times(square, square)
        length >>= 1
    return power


def function() -> Callable[[bytes | memoryview, int], int]:
    """Return awscrt's CRC64-NVME: (data, value so far) -> value. Raise UsageError where it is not installed."""
    try:
        from awscrt import checksums
    except ImportError:
        raise UsageError(
            "awscrt is not installed, so checkpoints cannot be checksummed",
            fix="install pctool with its checkpoint extra: pip install 'pctool[checkpoint]'",
        ) from None
    # it is declared for bytes, and takes any buffer
    return cast("Callable[[bytes | memoryview, int], int]", checksums.crc64nvme)
