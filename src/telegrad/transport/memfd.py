"""Sealed memfds: anonymous files of a fixed size that processes share by mapping them.

A memfd is sealed when it is created: its size never changes, so a mapping of it never becomes
invalid. The kernel frees the memory with the last descriptor and the last mapping.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref

PAGE = 4096
POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_POPULATE_STEP = 32 << 20  # bytes that are populated by one system call
_HWPOISON = 133  # EHWPOISON on Linux
_SEALS = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    if hasattr(fcntl, "F_SEAL_SHRINK")
    else 0
)


def create(name: str, size: int, owner: object) -> int:
    """Return the descriptor of a new memfd of `size` bytes, sealed. It is closed with `owner`.

    Raise `OSError` if memory or descriptors are exhausted, `AttributeError` on systems without
    memfds.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    weakref.finalize(owner, os.close, fd).atexit = False
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def is_sealed(fd: int) -> bool:
    """Return whether the file cannot shrink. Access to a mapping beyond its end is fatal."""
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)


def round_to_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def populate(mapping: mmap.mmap, offset: int, nbytes: int, how: int = POPULATE_WRITE) -> bool:
    """Fault pages in. Return False if there is no memory for them: using them would be fatal.

    `madvise` holds the interpreter lock, so no other thread of the process runs meanwhile, not even
    the one that sends heartbeats. So many pages are faulted in step by step.
    """
    end = offset + nbytes
    for start in range(offset, end, _POPULATE_STEP):
        try:
            mapping.madvise(how, start, min(_POPULATE_STEP, end - start))
        except OSError as error:
            # other errors mean that the kernel is too old: pages are then faulted in by their use
            return error.errno not in (errno.ENOMEM, errno.EFAULT, _HWPOISON)
    return True
