"""Sealed memfds: anonymous files of a fixed size that processes share by mapping them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref

PAGE = 4096
_POPULATE_STEP = 32 << 20  # bytes
POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_HWPOISON = 133  # EHWPOISON on Linux
_SEALS = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    if hasattr(fcntl, "F_SEAL_SHRINK")
    else 0
)


def create(name: str, size: int, owner: object) -> int:
    """Return the descriptor of a new sealed memfd, which is closed when `owner` is freed."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    weakref.finalize(owner, os.close, descriptor).atexit = False
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def is_sealed(descriptor: int) -> bool:
    """Return whether the file can no longer shrink, so that a mapping of it stays valid."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)


def populate(mapped: mmap.mmap, offset: int, nbytes: int, how: int = POPULATE_WRITE) -> bool:
    """Fault pages in. False: there is no memory for them; touching them would end the process.

    `madvise` holds the interpreter's lock, so no other thread runs meanwhile, not even the one that
    gives signs of life: many pages are faulted in step by step.
    """
    for start in range(offset, offset + nbytes, _POPULATE_STEP):
        try:
            mapped.madvise(how, start, min(_POPULATE_STEP, offset + nbytes - start))
        except OSError as error:
            # else an older kernel
            return error.errno not in (errno.ENOMEM, errno.EFAULT, _HWPOISON)
    return True
