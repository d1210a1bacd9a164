"""Lossless deltas between two images: what changed from one version of the weights to the next.

An image is the bytes of all tensors of a version (see `layout`). It consists of sections, ranges
whose elements have the same width. The elements of the old and the new image are compared and
subtracted as integers, so every bit pattern survives: NaN payloads, negative zeros, denormals. An
optimizer changes most weights by a few units in the last place, so the differences are small
integers.

Images are compared in chunks of `CHUNK` bytes, which fit in the cache. Consecutive chunks with few
changes are coded together, as a block. A block is coded in one of these ways:

    SAME      nothing changed
    GAPS      the number of unchanged elements before each changed one, then the differences
    BITS      one bit for each element, which says whether it changed, then the differences
    RAW       the new bytes

A gap of 255 or more is stored as several bytes: each 255 means "255 more", and the first other byte
ends the gap. Differences are zigzag-coded and are not zero, so 1, -1, 2, -2 become 1, 0, 3, 2.
`integers` stores them with as few bits as most of them need.

A `Part` has several blocks. Its table has a record for each of them, with a checksum of the new
bytes. So a delta that is applied to the wrong base, or is damaged, raises `ProtocolError`. The
checksum is the CRC-32 of sums: each 4 KB are a row of 64-bit integers, and the sums of all rows and
of all columns of a chunk are taken. That takes half the time of a CRC-32 of all bytes.

There is no state here. The numpy functions that take time release the interpreter lock.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from telegrad.errors import ProtocolError
from telegrad.weights import integers
from telegrad.weights.integers import Bytes, Integers, Positions

CHUNK = 1 << 20  # bytes of the image that are compared at a time
BLOCK = 4 << 20  # bytes of the image that are coded together at most
PART = 1 << 16  # bytes of payload from which on a part is complete; a part is the unit of transfer
SNAPSHOT_PART = 4 << 20  # bytes of the image in one part of a snapshot

_SAME, _GAPS, _BITS, _RAW = range(4)
# kind, width of the elements, bits of a number, length of the positions, numbers with more bits,
# changed elements, offset in the image, bytes of the image, bytes of the payload, checksum
_RECORD = struct.Struct("<BBBxIIIQIII")
_ROW = 4096  # bytes


class Section(NamedTuple):
    """A range of an image whose elements have `width` bytes: 1, 2, 4 or 8."""

    start: int
    stop: int
    width: int


class Part(NamedTuple):
    """Consecutive blocks of a delta or of a snapshot."""

    table: bytes
    payload: Tensor  # of bytes
    changed: int  # elements

    @property
    def nbytes(self) -> int:
        """The bytes that travel."""
        return len(self.table) + self.payload.numel()


class Block(NamedTuple):
    """Consecutive chunks of two images that have been compared."""

    section: Section
    old: Integers
    new: Integers
    positions: Positions  # of the changed elements, ascending
    # If few elements changed: their new values. Otherwise: which of the last chunk changed.
    sparse_values: Integers | None
    is_changed: npt.NDArray[np.bool_] | None

    @property
    def values(self) -> Integers:
        """The new values of the changed elements."""
        return self.new.take(self.positions) if self.sparse_values is None else self.sparse_values


class Log(Protocol):
    """Is told what changes."""

    def add(self, section: Section, positions: Positions, old: Integers, new: Integers) -> None:
        """Note old and new values of elements of a section of the image, at their positions."""

    def add_all(self, section: Section, old: Integers, new: Integers) -> None:
        """Note the old and new values of all elements of a section of the image."""


def compare(old: Tensor, new: Tensor, sections: Sequence[Section]) -> Iterator[Block]:
    """Return what differs between two images."""
    before, after = _bytes_of(old), _bytes_of(new)
    for section in sections:
        start = section.start
        while start < section.stop:
            limit = section._replace(start=start, stop=min(start + BLOCK, section.stop))
            block = _compare_block(before, after, limit)
            start = block.section.stop
            yield block


def encode(blocks: Iterable[Block]) -> Iterator[Part]:
    """Return the parts of the delta that turns the old image of blocks into the new one."""
    builder = _PartBuilder()
    for block in blocks:
        builder.add(*_encode_block(block))
        if builder.nbytes >= PART:
            yield builder.take()
    if builder.has_blocks:
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
    checksum = _checksum(_bytes_of(payload))
    record = _RECORD.pack(_RAW, 1, 0, 0, 0, nbytes, section.start, nbytes, nbytes, checksum)
    return Part(record, payload, nbytes)


def apply(part: Part, old: Tensor, out: Tensor, log: Log | None = None) -> None:
    """Write the blocks of a part into the image `out`. `old` is the base, and may be `out`.

    Raise `ProtocolError` if the part is not valid or the base is another one.
    """
    after, payload = _bytes_of(out), _bytes_of(part.payload)
    before = None if old is out else _bytes_of(old)
    position = 0
    try:
        for record in _RECORD.iter_unpack(part.table):
            kind, width, bits, places, large, count, start, nbytes, length, checksum = record
            body = payload[position : position + length]
            position += length
            section = Section(start, start + nbytes, width)
            if section.stop > after.size or body.size != length or width not in (1, 2, 4, 8):
                raise ValueError("a block exceeds the image or its payload")
            target = after[start : section.stop]
            if before is not None and kind != _RAW:
                target[:] = before[start : section.stop]
            coded = _Coded(kind, body, count, bits, places, large)
            if log is not None and kind == _RAW:
                kept = (after if before is None else before)[start : section.stop]
                log.add_all(section, *(each.view(f"<u{width}") for each in (kept, body)))
            _decode_block(coded, target, section, log)
            if _checksum(target) != checksum:
                raise ValueError("the checksum of a block differs")
    except (ValueError, IndexError, struct.error) as error:
        raise ProtocolError(f"a delta of weights cannot be applied: {error}") from error


class _Coded(NamedTuple):
    """One block: its kind, its body, and what the record says of them."""

    kind: int
    body: Bytes
    changed: int = 0
    bits: int = 0
    places: int = 0  # bytes of the positions
    large: int = 0  # numbers with more bits


class _PartBuilder:
    """Collects blocks until they are a part."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._records: list[bytes] = []
        self._bodies: list[Bytes] = []
        self._changed = 0

    @property
    def has_blocks(self) -> bool:
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


def _compare_block(old: Bytes, new: Bytes, limit: Section) -> Block:
    """Compare chunks until a block has enough changes that it is coded alone."""
    kind = f"<u{limit.width}"
    found: list[Positions] = []
    values: list[Integers] | None = []
    count = 0
    stop = limit.start
    while stop < limit.stop and values is not None:
        start, stop = stop, min(stop + CHUNK, limit.stop)
        chunk = new[start:stop].view(kind)
        is_changed = old[start:stop].view(kind) != chunk
        positions = integers.positions_of(is_changed)
        count += positions.size
        if _is_dense(count, CHUNK // limit.width):
            values = None
        else:
            values.append(chunk.take(positions))  # while it is in the cache
        positions += (start - limit.start) // limit.width
        found.append(positions)
    section = limit._replace(stop=stop)
    before, after = (each[section.start : stop].view(kind) for each in (old, new))
    positions = found[0] if len(found) == 1 else np.concatenate(found)
    if values is None:
        return Block(section, before, after, positions, None, is_changed)
    return Block(section, before, after, positions, np.concatenate(values), None)


def _is_dense(changed: int, elements: int) -> bool:
    """Return whether a bit for each element is shorter than a byte for each change."""
    return changed * 8 > elements


def _encode_block(block: Block) -> tuple[bytes, _Coded]:
    coded = _encode_changes(block)
    raw = block.new.view(np.uint8)
    if coded.body.size >= raw.size:
        coded = _Coded(_RAW, raw.copy(), coded.changed)
    record = _RECORD.pack(
        coded.kind,
        block.section.width,
        coded.bits,
        coded.places,
        coded.large,
        coded.changed,
        block.section.start,
        raw.size,
        coded.body.size,
        _checksum(raw),
    )
    return record, coded


def _encode_changes(block: Block) -> _Coded:
    positions = block.positions
    count = positions.size
    if not count:
        return _Coded(_SAME, np.empty(0, np.uint8))
    if _is_dense(count, block.new.size):
        is_changed = block.is_changed
        if is_changed is None or is_changed.size < block.new.size:
            is_changed = np.zeros(block.new.size, bool)
            is_changed[positions] = True
        kind, places = _BITS, np.packbits(is_changed)
        differences = (block.new - block.old).take(positions)
    else:
        kind, places = _GAPS, integers.encode_gaps(positions)
        differences = block.values - block.old.take(positions)
    packed = integers.pack(_zigzag(differences))
    body = np.concatenate([places, packed.body])
    return _Coded(kind, body, count, packed.bits, places.size, packed.large)


def _decode_block(coded: _Coded, out: Bytes, section: Section, log: Log | None) -> None:
    """Turn the old elements in `out` into the new ones."""
    kind, body, count, bits, places, large = coded
    if kind == _RAW:
        out[:] = body
        return
    if kind == _SAME:
        return
    elements = out.view(f"<u{section.width}")
    if kind == _GAPS:
        positions = integers.decode_gaps(body[:places])
    elif kind == _BITS:
        is_changed = np.unpackbits(body[:places], count=elements.size)
        positions = np.flatnonzero(is_changed.view(bool))
    else:
        raise ValueError(f"the kind of a block is {kind}")
    if positions.size != count or (count and positions[-1] >= elements.size):
        raise ValueError("the positions of a block are not valid")
    packed = integers.Packed(body[places:], bits, large)
    old = elements.take(positions)
    new = old + _unzigzag(integers.unpack(packed, count, section.width))
    elements[positions] = new  # positions are distinct
    if log is not None:
        log.add(section, positions, old, new)


def _checksum(data: Bytes, before: int = 0) -> int:
    """Return the checksum of bytes that follow others, whose checksum is `before`."""
    for start in range(0, data.size, CHUNK):
        chunk = data[start : start + CHUNK]
        whole = chunk.size // _ROW * _ROW
        words = chunk[:whole].view("<u8").reshape(-1, _ROW // 8)
        before = zlib.crc32(words.sum(axis=0), before)
        before = zlib.crc32(words.sum(axis=1), before)
        before = zlib.crc32(chunk[whole:], before)
    return before


def _zigzag(values: Integers) -> Integers:
    """Code differences other than zero: 1, -1, 2, -2 become 1, 0, 3, 2."""
    signed = values.view(f"<i{values.itemsize}")
    folded: Integers = (signed << 1) ^ (signed >> (8 * values.itemsize - 1))
    numbers: Integers = folded.view(values.dtype)
    numbers -= values.dtype.type(1)
    return numbers


def _unzigzag(values: Integers) -> Integers:
    one = values.dtype.type(1)
    values = values + one
    unfolded: Integers = (values >> one) ^ -(values & one)
    return unfolded


def _bytes_of(tensor: Tensor) -> Bytes:
    array: Bytes = tensor.numpy()
    return array
