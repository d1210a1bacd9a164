"""Reading a complete version: one that this worker has received, or one in shared memory.

State: `SharedReader` keeps the segments of its source mapped. `is_possible` becomes False once,
when a segment cannot be mapped. Any thread may read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from telegrad.errors import StaleReference, UsageError
from telegrad.transport import flat_memory
from telegrad.transport.flat_memory import MappedMemory, SegmentHandle
from telegrad.weights import service
from telegrad.weights.layout import Layout
from telegrad.weights.service import JoinReply
from telegrad.weights.versions import SharedVersion, VersionStore

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

_MAPPED = 4  # segments that stay mapped


class ReadVersion(NamedTuple):
    """A complete version, which does not change while it is read."""

    version: int
    layout: Layout
    image: Tensor


@contextmanager
def read_own(store: VersionStore, reader: str) -> Iterator[ReadVersion]:
    """Read the newest version that this worker has received."""
    version = store.acquire(reader)
    try:
        yield ReadVersion(version.version, store.layout, store.image_of(version.ticket).contents)
    finally:
        store.release(version.ticket)


class SharedReader:
    """Reads versions in the memory of another worker of this host."""

    def __init__(self, runtime: AgentRuntime, name: str, reader: str, timeout: float) -> None:
        self.is_possible = flat_memory.may_share(runtime.config)
        self._runtime = runtime
        self._name = name
        self._reader = reader
        self._timeout = timeout
        self._mapped: dict[bytes, MappedMemory] = {}

    @contextmanager
    def read(self, reply: JoinReply) -> Iterator[ReadVersion]:
        """Read the newest version of the source that `reply` names."""
        source, arguments = reply.source.worker, (self._name, reply.epoch)
        start = self._runtime.start
        version: SharedVersion = start(
            source,
            service.acquire,
            (*arguments, self._reader),
            timeout=self._timeout,
            internal=True,
        ).wait()
        try:
            yield ReadVersion(version.version, reply.layout, self._map(version.handle))
        finally:
            with suppress(UsageError):  # this agent was closed meanwhile, so all is released
                start(source, service.release, (*arguments, version.ticket), internal=True)

    def close(self) -> None:
        """Unmap all segments that are not being read."""
        self._mapped.clear()

    def _map(self, handle: SegmentHandle | None) -> Tensor:
        memory = None
        if handle is not None:
            memory = self._mapped.get(handle.token) or flat_memory.open_shared(handle)
        if handle is None or memory is None:
            self.is_possible = False
            raise StaleReference("the memory of the source cannot be mapped here")
        self._mapped[handle.token] = memory
        for token in list(self._mapped)[:-_MAPPED]:
            self._mapped.pop(token, None)
        return memory.contents
