"""The flat memory of trainers and servers, which is made here and nowhere else: shared where it can be, or private.

Shared memory is what two workers of one user on one host both map: one writes what the other reads, nothing travels.

A segment is a memfd. Whoever is told its `SegmentHandle` opens it through `/proc`, which the kernel allows to the same
user in the same process namespace only, and compares the token that stands at its beginning: elsewhere, the same
numbers may mean another file. The kernel frees it when the last process that maps it ends, however that ends.

    bytes 0..31     the token
    bytes 32..39    a counter, which its owner alone writes
    from 4096 on    the contents
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import secrets
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

_PAGE = 4096
_TOKEN = 32
_SEALS = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    if hasattr(fcntl, "F_SEAL_SHRINK")
    else 0
)


class SegmentHandle(NamedTuple):
    """How others find a segment."""

    process: int
    descriptor: int
    token: bytes
    nbytes: int


class MappedMemory:
    """A mapped segment: its contents as bytes, and its counter."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._map = mmap.mmap(descriptor, _PAGE + nbytes)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._counter = whole[_TOKEN : _TOKEN + 8].view(torch.int64)
        self.contents: Tensor = whole[_PAGE:]

    def part(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor at `offset` of the contents that has a storage of its own."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        start = _PAGE + offset
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)

    @property
    def token(self) -> bytes:
        return self._map[:_TOKEN]

    @property
    def counter(self) -> int:
        return int(self._counter)

    @counter.setter
    def counter(self, value: int) -> None:
        self._counter.fill_(value)


class SharedMemory(MappedMemory):
    """Memory of this worker that it shares."""

    def __init__(self, nbytes: int) -> None:
        descriptor = os.memfd_create("telegrad-ps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, descriptor).atexit = False
        os.ftruncate(descriptor, _PAGE + nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        super().__init__(descriptor, nbytes)
        self._map[:_TOKEN] = secrets.token_bytes(_TOKEN)
        self.handle = SegmentHandle(os.getpid(), descriptor, self.token, nbytes)


def allocate_private(nbytes: int, device: torch.device | str = "cpu") -> Tensor:
    """Bytes of this worker alone, all zero."""
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def allocate(nbytes: int) -> SharedMemory | None:
    """A new segment, or None where the system has none to give."""
    try:
        return SharedMemory(nbytes)
    # no memory or no descriptor left, or no such call on this system
    except (OSError, AttributeError):
        return None


def find_shared(handle: SegmentHandle) -> MappedMemory | None:
    """The segment of another worker, or None if it cannot be reached from here."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(
            f"/proc/{handle.process}/fd/{handle.descriptor}", os.O_RDWR | os.O_CLOEXEC
        )
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if sealed and os.fstat(descriptor).st_size == _PAGE + handle.nbytes:
                mapped = MappedMemory(descriptor, handle.nbytes)
                return mapped if mapped.token == handle.token else None
        finally:
            os.close(descriptor)
    return None
