"""Flat memory that workers of one host share, and private memory in its place.

Two workers of the same user on the same host can map the same segment of shared memory. One writes
what the other reads, and nothing has to be sent.

A segment is a memfd. Its owner sends a `SegmentHandle`; another process opens the file through
`/proc`, which the kernel allows only to the same user in the same process namespace. In another
namespace the same process and descriptor may be another file, so the opener compares the token at
the beginning of the segment. The kernel frees the memory when the last process that maps it ends.

    bytes 0..31     the token
    bytes 32..39    a counter, which only the owner writes
    from 4096 on    the contents
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
from typing import NamedTuple

import torch
from torch import Tensor

from telegrad.config import Config
from telegrad.transport.memfd import PAGE, create_memfd, is_sealed

_TOKEN = 32


class SegmentHandle(NamedTuple):
    """What another process needs to open a segment."""

    process: int
    descriptor: int
    token: bytes
    nbytes: int


class MappedMemory:
    """A mapped segment: its contents as bytes, and its counter."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._map = mmap.mmap(descriptor, PAGE + nbytes)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        # one integer; a tensor would take microseconds to read or write
        self.counter = memoryview(self._map)[_TOKEN : _TOKEN + 8].cast("q")
        self.contents: Tensor = whole[PAGE:]

    def tensor_at(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor at `offset` of the contents that has its own storage."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        start = PAGE + offset
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)

    @property
    def token(self) -> bytes:
        return self._map[:_TOKEN]


class SharedMemory(MappedMemory):
    """A segment that this worker owns."""

    def __init__(self, nbytes: int) -> None:
        descriptor = create_memfd("telegrad-flat", PAGE + nbytes, self)
        super().__init__(descriptor, nbytes)
        self._map[:_TOKEN] = secrets.token_bytes(_TOKEN)
        self.handle = SegmentHandle(os.getpid(), descriptor, self.token, nbytes)


def may_share(config: Config) -> bool:
    """Return whether an agent may use shared memory: not if its only transport is TCP."""
    return any(transport != "tcp" for transport in config.transports)


def allocate_private(nbytes: int, device: torch.device | str = "cpu") -> Tensor:
    """Return zeroed bytes that are not shared."""
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def allocate_shared(nbytes: int) -> SharedMemory | None:
    """Return a new segment, or None if the system cannot provide one."""
    try:
        return SharedMemory(nbytes)
    # no memory or no descriptor is left, or the system has no memfd
    except (OSError, AttributeError):
        return None


def open_shared(handle: SegmentHandle) -> MappedMemory | None:
    """Map the segment of another worker. Return None if this process cannot reach it."""
    with contextlib.suppress(OSError, ValueError):
        path = f"/proc/{handle.process}/fd/{handle.descriptor}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # without the seal, the owner could shrink the file while it is mapped here
            size = os.fstat(descriptor).st_size
            if is_sealed(descriptor) and size == PAGE + handle.nbytes:
                mapped = MappedMemory(descriptor, handle.nbytes)
                return mapped if mapped.token == handle.token else None
        finally:
            os.close(descriptor)
    return None
