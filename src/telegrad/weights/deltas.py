"""Lossless deltas between two images: what changed from one version of the weights to the next.

An image is the bytes of all tensors of a version (see `layout`). It consists of sections, ranges
whose elements have the same width. A section is coded in chunks of up to `CHUNK` bytes, which fit
in the cache. The elements of the old and the new chunk are compared and subtracted as integers,
so every bit pattern survives: NaN payloads, negative zeros, denormals. An optimizer changes most
weights by a few units in the last place, so the differences are small integers.

A chunk is coded in the smallest of these ways:

    SAME      nothing changed
    GAPS      the number of unchanged elements before each changed one, then the differences
    BITS      one bit for each element, which says whether it changed, then the differences
    ALL       the differences of all elements
    RAW       the new bytes

Differences are zigzag-coded (0, -1, 1, -2, ... become 0, 1, 2, 3, ...) and stored as planes: the
low bytes of all of them, then the next bytes, up to the highest byte that is not zero everywhere.
A gap of 255 or more is stored as several bytes: each 255 means "255 more", and the first other byte
ends the gap. If the result is short, it is compressed with zlib: positions and differences as
blocks of their own, because their bytes have other frequencies.

A `Part` has several chunks. Its table has a record for each of them, with the CRC-32 of the new
bytes. So a delta that is applied to the wrong base, or is damaged, raises `ProtocolError`.

There is no state here. The numpy and zlib functions that take time release the interpreter lock.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from telegrad.errors import ProtocolError

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[Any]  # unsigned, of the width of the elements

CHUNK = 1 << 20  # bytes of the image
PART = 1 << 20  # bytes of payload from which on a part is complete; a part is the unit of transfer
SNAPSHOT_PART = 4 << 20  # bytes of the image in one part of a snapshot

_SAME, _GAPS, _BITS, _ALL, _RAW = range(5)
_COMPRESSED = 0x80  # a flag in the kind of a record
# kind, width of the elements, planes of the differences, length of the gaps, changed elements,
# offset in the image, bytes of the image, bytes of the payload, CRC-32 of the new bytes
_RECORD = struct.Struct("<BBBxIIQIII")
_ESCAPE = 255
_COMPRESS_BELOW = CHUNK // 8  # longer bodies are hardly compressible, and zlib is slow


class Section(NamedTuple):
    """A range of an image whose elements have `width` bytes: 1, 2, 4 or 8."""

    start: int
    stop: int
    width: int


class Part(NamedTuple):
    """Consecutive chunks of a delta or of a snapshot."""

    table: bytes
    payload: Tensor  # of bytes
    changed: int  # elements

    @property
    def nbytes(self) -> int:
        """The bytes that travel."""
        return len(self.table) + self.payload.numel()


def encode(old: Tensor, new: Tensor, sections: Sequence[Section]) -> Iterator[Part]:
    """Return the parts of the delta that turns the image `old` into `new`."""
    before, after = _bytes_of(old), _bytes_of(new)
    builder = _PartBuilder()
    for start, stop, width in _chunks(sections):
        builder.add(*_encode_chunk(before[start:stop], after[start:stop], width, start))
        if builder.nbytes >= PART:
            yield builder.take()
    if builder.has_chunks:
        yield builder.take()


def snapshot_parts(image: Tensor) -> list[Section]:
    """Return the ranges of the parts that `snapshot_part` makes of an image."""
    nbytes = image.numel()
    starts = range(0, nbytes, SNAPSHOT_PART)
    return [Section(start, min(start + SNAPSHOT_PART, nbytes), 1) for start in starts]


def snapshot_part(image: Tensor, section: Section) -> Part:
    """Return a part with all bytes of a range. Its payload is a view of the image."""
    payload = image[section.start : section.stop]
    nbytes = payload.numel()
    crc = zlib.crc32(_bytes_of(payload))
    record = _RECORD.pack(_RAW, 1, 0, 0, nbytes, section.start, nbytes, nbytes, crc)
    return Part(record, payload, nbytes)


def apply(part: Part, old: Tensor, out: Tensor) -> None:
    """Write the chunks of a part into the image `out`. `old` is the base, and may be `out`.

    Raise `ProtocolError` if the part is not valid or the base is another one.
    """
    before, after, payload = _bytes_of(old), _bytes_of(out), _bytes_of(part.payload)
    position = 0
    try:
        for record in _RECORD.iter_unpack(part.table):
            kind, width, planes, gaps, count, start, nbytes, length, crc = record
            body = payload[position : position + length]
            position += length
            stop = start + nbytes
            if stop > after.size or body.size != length or width not in (1, 2, 4, 8):
                raise ValueError("a chunk exceeds the image or its payload")
            target = after[start:stop]
            coded = _Coded(kind, body, planes, gaps, count)
            _decode_chunk(coded, before[start:stop], target, width)
            if zlib.crc32(target) != crc:
                raise ValueError("the checksum of a chunk differs")
    except (ValueError, IndexError, struct.error, zlib.error) as error:
        raise ProtocolError(f"a delta of weights cannot be applied: {error}") from error


class _Coded(NamedTuple):
    """One chunk: its kind, its body, and what the record says of them."""

    kind: int
    body: Bytes
    planes: int = 0
    gaps: int = 0
    changed: int = 0


class _PartBuilder:
    """Collects chunks until they are a part."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._records: list[bytes] = []
        self._bodies: list[Bytes] = []
        self._changed = 0

    @property
    def has_chunks(self) -> bool:
        return bool(self._records)

    def add(self, record: bytes, coded: _Coded) -> None:
        self._records.append(record)
        self._bodies.append(coded.body)
        self._changed += coded.changed
        self.nbytes += coded.body.size

    def take(self) -> Part:
        payload = np.concatenate(self._bodies)
        part = Part(b"".join(self._records), torch.from_numpy(payload), self._changed)
        self.__init__()  # type: ignore[misc]
        return part


def _chunks(sections: Sequence[Section]) -> Iterator[Section]:
    for section in sections:
        for start in range(section.start, section.stop, CHUNK):
            yield Section(start, min(start + CHUNK, section.stop), section.width)


def _encode_chunk(old: Bytes, new: Bytes, width: int, start: int) -> tuple[bytes, _Coded]:
    coded = _encode_values(old.view(f"<u{width}"), new.view(f"<u{width}"), new)
    record = _RECORD.pack(
        coded.kind,
        width,
        coded.planes,
        coded.gaps,
        coded.changed,
        start,
        new.size,
        coded.body.size,
        zlib.crc32(new),
    )
    return record, coded


def _encode_values(old: Integers, new: Integers, raw: Bytes) -> _Coded:
    """Code one chunk in the smallest way."""
    is_changed = old != new
    count = int(np.count_nonzero(is_changed))
    if not count:
        return _Coded(_SAME, raw[:0])
    gaps = raw[:0]
    if count == new.size:
        values = new - old
    elif count * 8 > new.size:  # a bit for each element is shorter than a byte for each change
        values = new[is_changed] - old[is_changed]
    else:
        positions = np.flatnonzero(is_changed)
        gaps = _encode_gaps(positions)
        values = new[positions] - old[positions]
    zigzag = _zigzag(values)
    planes = (int(zigzag.max()).bit_length() + 7) // 8
    sizes = {
        _RAW: raw.size,
        _ALL: planes * new.size,
        _BITS: -(-new.size // 8) + planes * count,
    }
    if gaps.size:
        sizes[_GAPS] = gaps.size + planes * count
    kind = min(sizes, key=sizes.__getitem__)
    if kind == _RAW:
        return _Coded(_RAW, raw.copy(), changed=count)
    if kind == _ALL:
        return _Coded(_ALL, _to_planes(_zigzag(new - old), planes), planes, changed=count)
    if kind == _BITS:
        gaps, positions_coded = gaps[:0], np.packbits(is_changed)
    else:
        positions_coded = gaps
    kind, body = _compress(kind, positions_coded, _to_planes(zigzag, planes))
    return _Coded(kind, body, planes, gaps.size, count)


def _compress(kind: int, positions: Bytes, differences: Bytes) -> tuple[int, Bytes]:
    """Join the two halves of a body, and compress them if that is worth the time."""
    size = positions.size + differences.size
    if size < _COMPRESS_BELOW:
        # run lengths find planes that are almost constant; a search for matches finds no more
        coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
        compressed = b"".join(
            [
                coder.compress(positions),
                coder.flush(zlib.Z_SYNC_FLUSH),
                coder.compress(differences),
                coder.flush(),
            ]
        )
        if len(compressed) < size:
            return kind | _COMPRESSED, np.frombuffer(compressed, np.uint8)
    return kind, np.concatenate([positions, differences])


def _decode_chunk(coded: _Coded, old: Bytes, out: Bytes, width: int) -> None:
    kind, body = coded.kind & ~_COMPRESSED, coded.body
    if coded.kind & _COMPRESSED:
        decoder = zlib.decompressobj(-15)
        # no valid body is longer than this, so a damaged one cannot fill the memory
        body = np.frombuffer(decoder.decompress(body, 2 * CHUNK), np.uint8)
    if kind == _RAW:
        out[:] = body
        return
    if out is not old:
        out[:] = old
    if kind == _SAME:
        return
    values = out.view(f"<u{width}")
    if kind == _ALL:
        values += _unzigzag(_from_planes(body, coded.planes, values.size, width))
        return
    if kind == _GAPS:
        positions = _decode_gaps(body[: coded.gaps])
        if positions.size and positions[-1] >= values.size:
            raise ValueError("a position exceeds its chunk")
        body = body[coded.gaps :]
    elif kind == _BITS:
        where = -(-values.size // 8)
        bits = np.unpackbits(body[:where], count=values.size)
        positions = np.flatnonzero(bits)
        body = body[where:]
    else:
        raise ValueError(f"the kind of a chunk is {kind}")
    # positions are distinct, so no element is added to twice
    values[positions] += _unzigzag(_from_planes(body, coded.planes, positions.size, width))


def _encode_gaps(positions: Integers) -> Bytes:
    gaps = np.diff(positions, prepend=-1) - 1
    escapes = gaps // _ESCAPE
    ends = np.cumsum(escapes + 1) - 1
    coded = np.full(int(ends[-1]) + 1, _ESCAPE, np.uint8)
    coded[ends] = gaps - escapes * _ESCAPE
    return coded


def _decode_gaps(coded: Bytes) -> npt.NDArray[np.int64]:
    ends = np.flatnonzero(coded != _ESCAPE)
    skipped = np.cumsum(coded, dtype=np.int64)[ends]
    return skipped + np.arange(ends.size)


def _zigzag(values: Integers) -> Integers:
    signed = values.view(f"<i{values.itemsize}")
    folded: Integers = (signed << 1) ^ (signed >> (8 * values.itemsize - 1))
    return folded.view(values.dtype)


def _unzigzag(values: Integers) -> Integers:
    one = values.dtype.type(1)
    unfolded: Integers = (values >> one) ^ -(values & one)
    return unfolded


def _to_planes(values: Integers, planes: int) -> Bytes:
    by_element = values.view(np.uint8).reshape(values.size, values.itemsize)
    return np.ascontiguousarray(by_element[:, :planes].T).reshape(-1)


def _from_planes(body: Bytes, planes: int, count: int, width: int) -> Integers:
    if planes > width:
        raise ValueError("the differences are wider than the elements")
    by_element = np.zeros((count, width), np.uint8)
    by_element[:, :planes] = body.reshape(planes, count).T
    return by_element.reshape(-1).view(f"<u{width}")


def _bytes_of(tensor: Tensor) -> Bytes:
    array: Bytes = tensor.numpy()
    return array
