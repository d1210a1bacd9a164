"""Codes for ascending positions and for numbers of which most are small.

Numbers are stored as planes of bits: the lowest bits of all of them, then the next ones, up to as
many bits as most numbers need. The remaining bits of the few large numbers follow: their positions
as gaps, then the values.

There is no state here. Damaged input raises `ValueError` or `IndexError`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[Any]  # unsigned, of the width of the elements
Positions = npt.NDArray[np.int64]

_ESCAPE = 255
_SAMPLE = 4096  # numbers that decide how many bits are used


class Packed(NamedTuple):
    """Coded numbers: `bits` of each of them, and `large` numbers with more bits."""

    body: Bytes
    bits: int
    large: int


def pack(numbers: Integers) -> Packed:
    """Code numbers."""
    bits = _best_bits(numbers)
    body = [np.packbits((numbers >> bit).astype(np.uint8) & 1) for bit in range(bits)]
    large = np.empty(0, np.int64)
    if bits < 8 * numbers.itemsize:
        rest = numbers >> bits
        large = np.flatnonzero(rest != 0)
        if large.size:
            body += [encode_gaps(large), rest[large].view(np.uint8)]
    return Packed(np.concatenate(body) if body else np.empty(0, np.uint8), bits, large.size)


def unpack(packed: Packed, count: int, width: int) -> Integers:
    """Return `count` numbers of `width` bytes."""
    body, bits, large = packed
    dtype = np.dtype(f"<u{width}")
    plane = -(-count // 8)
    if bits > 8 * width or body.size < bits * plane:
        raise ValueError("coded numbers are incomplete")
    numbers = np.zeros(count, dtype)
    for bit in range(bits):
        ones = np.unpackbits(body[bit * plane : (bit + 1) * plane], count=count)
        numbers |= ones.astype(dtype) << dtype.type(bit)
    if large:
        rest = body[bits * plane :]
        gaps = rest.size - large * width
        if gaps < 0:
            raise ValueError("coded numbers are incomplete")
        positions = decode_gaps(rest[:gaps])
        numbers[positions] |= rest[gaps:].copy().view(dtype) << dtype.type(bits)
    return numbers


def positions_of(is_set: npt.NDArray[np.bool_]) -> Positions:
    """Return the positions of the booleans that are set.

    `np.flatnonzero` mispredicts a branch for each of them if up to a tenth is set. Unless they are
    few, first find the groups of 8 in which some are set, in the same way, and look only at these.
    """
    size = is_set.size
    if size % 8 or not size // 1000 < np.count_nonzero(is_set) <= size // 10:
        return np.flatnonzero(is_set)
    groups = is_set.view("<u8")
    found = positions_of(groups != 0)
    places = np.flatnonzero(groups.take(found).view(bool))
    positions = found.take(places >> 3)
    positions <<= 3
    places &= 7
    positions += places
    return positions


def encode_gaps(positions: Positions) -> Bytes:
    """Code ascending positions by the differences between neighbours.

    A gap is a byte. Each 255 means "255 more", and the first other byte ends the gap.
    """
    gaps = np.empty_like(positions)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= 1
    large = np.flatnonzero(gaps >= _ESCAPE)
    if not large.size:
        return gaps.astype(np.uint8)
    escapes = gaps[large] // _ESCAPE
    gaps[large] -= escapes * _ESCAPE
    return np.insert(gaps.astype(np.uint8), np.repeat(large, escapes), _ESCAPE)


def decode_gaps(coded: Bytes) -> Positions:
    """Return the positions that `encode_gaps` has coded."""
    ends = np.flatnonzero(coded != _ESCAPE)
    skipped = np.cumsum(coded, dtype=np.int64)[ends]
    skipped += np.arange(ends.size)
    return skipped


def _best_bits(numbers: Integers) -> int:
    """Return with how many bits for each number the code is shortest, judged by a sample."""
    sample = numbers[:: -(-numbers.size // _SAMPLE)]
    width = numbers.itemsize
    powers = numbers.dtype.type(1) << np.arange(8 * width, dtype=numbers.dtype)
    lengths = np.searchsorted(powers, sample, side="right")  # bits of each number
    larger = sample.size - np.cumsum(np.bincount(lengths, minlength=8 * width + 1))
    # a large number is stored in all its bytes, and its position in about one more
    sizes = np.arange(8 * width + 1) * sample.size + 8 * (width + 1) * larger
    return int(sizes.argmin())
