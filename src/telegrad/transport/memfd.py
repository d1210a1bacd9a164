"""Files in memory (memfds) that processes share by mapping them, and the pages of mappings.

A file is sealed when it is created: its size never changes, so a mapping of it never becomes
invalid. The kernel frees the memory with the last descriptor and the last mapping.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

PAGE = 4096
POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_POPULATE_STEP = 32 << 20  # bytes that are populated by one system call
_HWPOISON = 133  # EHWPOISON on Linux
# /proc/PID/pagemap has an entry for each page. The upper bits of an entry: present, swapped, and
# not anonymous. A page of a private mapping becomes anonymous when it is written to.
_PAGEMAP_ENTRY = np.dtype(np.uint64)
_PAGEMAP_STATE_SHIFT = np.uint64(61)
_PRESENT_FILE_PAGE = 0b101
_SEALS = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    if hasattr(fcntl, "F_SEAL_SHRINK")
    else 0
)
Bytes = npt.NDArray[np.uint8]
_log = logging.getLogger(__name__)


def create_memfd(name: str, size: int, owner: object) -> int:
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


def populate_pages(mapping: mmap.mmap, offset: int, nbytes: int, how: int = POPULATE_WRITE) -> bool:
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


def has_only_file_pages(array: Bytes) -> bool:
    """Return True if a private mapping shows the file, and nothing that was written to the mapping.

    Then all pages of the array, which begins at a page, are present and none is a private copy. To
    ask the kernel costs a fifth of faulting the pages in. Return False if that is not known.
    """
    first = array.__array_interface__["data"][0] // PAGE
    size = -(-array.nbytes // PAGE) * _PAGEMAP_ENTRY.itemsize
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(pagemap, size, first * _PAGEMAP_ENTRY.itemsize)
        finally:
            os.close(pagemap)
    except OSError as error:
        _log.debug("the kernel does not tell which pages are mapped: %s", error)
        return False
    if len(data) < size or mmap.PAGESIZE != PAGE:
        return False
    entries = np.frombuffer(data, _PAGEMAP_ENTRY)
    return bool((entries >> _PAGEMAP_STATE_SHIFT == _PRESENT_FILE_PAGE).all())
