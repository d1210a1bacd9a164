"""Memory that a server and its trainers share."""

from __future__ import annotations

import os

import pytest

from telegrad.transport.flat_memory import SegmentHandle, allocate_shared, open_shared
from telegrad.transport.memfd import PAGE


def test_a_segment_of_another_worker_is_mapped() -> None:
    owned = allocate_shared(100) or pytest.fail("there is no shared memory")
    owned.contents.fill_(7)
    mapped = open_shared(owned.handle) or pytest.fail("it was not mapped")
    assert mapped.contents.tolist() == [7] * 100


def test_a_file_that_can_shrink_is_not_mapped() -> None:
    """Reading a mapping beyond the end of its file would end this process."""
    token = bytes(range(32))
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(descriptor, token, 0)
        os.ftruncate(descriptor, PAGE + 100)
        assert open_shared(SegmentHandle(os.getpid(), descriptor, token, 100)) is None
    finally:
        os.close(descriptor)
