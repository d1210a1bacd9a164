"""Reading a complete version: one that this worker has received, or one in shared memory.

Shared memory is that of the host or of a GPU. The owner of host memory never writes again what a
reader may still read, even if it takes the reader for lost. Memory of a GPU is too scarce for that:
the reader asks at the end whether what it has read was still valid.

State: `SharedReader` keeps the segments of its source mapped. `is_possible` becomes False once,
when a segment cannot be mapped; `device_is_possible` is the same for memory of a GPU. Any thread
may read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from telegrad.cuda import flat_memory as device_memory
from telegrad.cuda.driver import CudaError
from telegrad.cuda.flat_memory import DeviceHandle
from telegrad.errors import PeerLost, StaleReference, TelegradError, UsageError
from telegrad.futures import Future
from telegrad.transport import flat_memory
from telegrad.transport.flat_memory import MappedMemory, SegmentHandle
from telegrad.weights import service
from telegrad.weights.boxes import is_sharded
from telegrad.weights.changes import Changes, LogInfo
from telegrad.weights.held import Held
from telegrad.weights.layout import Layout, Rename, entry_of, pairs
from telegrad.weights.leases import Leases
from telegrad.weights.service import JoinReply
from telegrad.weights.versions import SharedVersion, VersionStore

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

_MAPPED, _MAPPED_LOGS = 4, 8  # segments that stay mapped


class VersionLost(StaleReference):
    """What was read may be a mix: the owner took this worker for lost. It must be read again."""


class ReadVersion(NamedTuple):
    """A complete version, which does not change while it is read."""

    version: int
    layout: Layout
    image: Tensor
    epoch: str = ""
    changes: Changes | None = None  # since the version that the reader has

    def copies(
        self, target: Mapping[str, Tensor], names: Rename | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors to write, each with its values."""
        if is_sharded(target):
            raise UsageError("to copy into shards, pass the model to the subscriber as `weights`")
        return [
            (tensor, entry_of(self.image, entry))
            for tensor, entry in pairs(self.layout, target, names)
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of all tensors."""
        return self.layout.tensors(self.image.clone())

    def views(self) -> dict[str, Tensor]:
        """Return all tensors without a copy."""
        return self.layout.tensors(self.image)


@contextmanager
def read_own(
    store: VersionStore, reader: str, leases: Leases, held: Held | None = None
) -> Iterator[ReadVersion]:
    """Read the newest version that this worker has received."""
    lease = leases.open(store.release)
    version = store.acquire(reader, lease.ticket, _version_of(held, store.epoch))
    if isinstance(version, Future):
        version = version.wait()
    image = store.image_of(lease.ticket).contents
    logs = [(log.image.contents, log.info) for log in store.logs_of(lease.ticket)]
    changes = None if version.logs is None else Changes(logs)
    try:
        yield ReadVersion(version.version, store.layout, image, store.epoch, changes)
    finally:
        if image.is_cuda:  # pragma: gpu
            torch.cuda.current_stream(image.device).synchronize()
        del lease


def _version_of(held: Held | None, epoch: str) -> int | None:
    return None if held is None or held.epoch != epoch else held.version


class SharedReader:
    """Reads versions in the memory of another worker of this host."""

    def __init__(
        self, runtime: AgentRuntime, name: str, reader: str, timeout: float, leases: Leases
    ) -> None:
        self.device_is_possible = runtime.config.cuda_ipc
        self.is_possible = flat_memory.may_share(runtime.config)
        self._runtime = runtime
        self._name = name
        self._reader = reader
        self._timeout = timeout
        self._leases = leases
        self._mapped: dict[bytes, MappedMemory] = {}
        self._mapped_logs: dict[bytes, MappedMemory] = {}

    @contextmanager
    def read(self, reply: JoinReply, key: str, held: Held | None = None) -> Iterator[ReadVersion]:
        """Read the newest version of the source that `reply` names, in its store `key`."""
        source, arguments = reply.source.worker, (key, reply.epoch)

        def release(ticket: str) -> None:
            with suppress(TelegradError):  # this agent was closed meanwhile, so all is released
                self._start(source, service.release, (*arguments, ticket), None)

        lease = self._leases.open(release)
        have = _version_of(held, reply.epoch)
        request = (*arguments, self._reader, lease.ticket, have, self._timeout / 2)
        version: SharedVersion = self._start(source, service.acquire, request, self._timeout).wait()
        with self._map(version.handle) as image:
            changes = self._changes(version.logs)
            yield ReadVersion(version.version, reply.layout, image, reply.epoch, changes)
        if isinstance(version.handle, DeviceHandle):
            self._end_device_read(source, (*arguments, lease.ticket))

    def _start(
        self, to: str, function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None
    ) -> Future[Any]:
        return self._runtime.start(to, function, args, timeout=timeout, internal=True)

    def close(self) -> None:
        """Unmap all segments that are not being read."""
        self._mapped.clear()
        self._mapped_logs.clear()

    def _end_device_read(self, source: str, arguments: tuple[str, str, str]) -> None:  # pragma: gpu
        """Release memory of a GPU. Raise `VersionLost` if it may have been written meanwhile."""
        self._runtime.cuda_transfers.copies_started()  # it unmaps memory that is not used
        try:
            is_valid = self._start(source, service.release, arguments, self._timeout).wait()
        except PeerLost:  # nobody writes the memory of a process that has ended
            is_valid = True
        except TelegradError:
            is_valid = False
        if not is_valid:
            raise VersionLost(f"worker {source!r} no longer keeps this version for this worker")

    def _map(self, handle: SegmentHandle | DeviceHandle | None) -> AbstractContextManager[Tensor]:
        if isinstance(handle, DeviceHandle):  # pragma: gpu
            return self._map_device(handle)
        return nullcontext(self._open(handle, self._mapped, _MAPPED))

    def _changes(self, logs: tuple[LogInfo, ...] | None) -> Changes | None:
        if logs is None:
            return None
        return Changes(
            [(self._open(info.handle, self._mapped_logs, _MAPPED_LOGS), info) for info in logs]
        )

    def _open(
        self,
        handle: SegmentHandle | DeviceHandle | None,
        mapped: dict[bytes, MappedMemory],
        limit: int,
    ) -> Tensor:
        """Return the contents of a segment, which stays mapped until others take its place."""
        memory = None
        if isinstance(handle, SegmentHandle):
            memory = mapped.pop(handle.token, None) or flat_memory.open_shared(handle)
        if not isinstance(handle, SegmentHandle) or memory is None:
            self.is_possible = False
            raise StaleReference("the memory of the source cannot be mapped here")
        mapped[handle.token] = memory
        for token in list(mapped)[:-limit]:
            mapped.pop(token, None)
        return memory.contents

    @contextmanager
    def _map_device(self, handle: DeviceHandle) -> Iterator[Tensor]:  # pragma: gpu
        with ExitStack() as stack:
            try:
                image = stack.enter_context(device_memory.mapped(handle))
            except CudaError as error:
                self.device_is_possible = False
                raise StaleReference(f"memory of a GPU cannot be mapped here: {error}") from error
            yield image
