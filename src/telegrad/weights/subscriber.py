"""`Subscriber`: a worker's side. It reads the newest version that has arrived.

State: `Receivers`, one per agent, which subscribers of the same name share.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from telegrad.agent import Agent, runtime_of
from telegrad.errors import CallCancelled, UsageError
from telegrad.futures import Future
from telegrad.runtime import DEFAULT
from telegrad.timeouts import duration, time_limit
from telegrad.weights import device_images, planning
from telegrad.weights.assembly import SlicedVersion
from telegrad.weights.boxes import Slices
from telegrad.weights.held import Held, HeldWeights, copy_whole
from telegrad.weights.layout import Rename, Weights, check_target, renamed, targets_of
from telegrad.weights.newest import closed_error
from telegrad.weights.planning import Wanted
from telegrad.weights.reading import ReadVersion, VersionLost
from telegrad.weights.receiver import Receiver, ReceiverCounters
from telegrad.weights.sliced import SlicedVersions
from telegrad.weights.versions import as_version

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

T = TypeVar("T")


Versions = Receiver | SlicedVersions
Found = ReadVersion | SlicedVersion


class Receivers:
    """The receivers of one agent, by name. Changed under `_lock`."""

    def __init__(self, runtime: AgentRuntime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._receivers: dict[str, tuple[Versions, int]] = {}
        runtime.on_close(partial(self._close, True))
        runtime.on_end(partial(self._close, False))

    def open(
        self,
        name: str,
        publisher: str | None,
        patience: float,
        uuid: str | None,
        wanted: Wanted | None,
    ) -> Versions:
        """Return the receiver of these weights, for one more subscriber."""
        with self._lock:
            receiver, users = self._receivers.get(name, (None, 0))
            if receiver is None and wanted is not None:
                receiver = SlicedVersions(self._runtime, name, publisher, patience, wanted)
            elif receiver is None:
                receiver = Receiver(self._runtime, name, publisher, patience, uuid)
            elif receiver.uuid != uuid or receiver.wanted != wanted:
                raise UsageError(
                    f"subscribers of {name!r} in one worker have the same `device` and get the "
                    "same slices"
                )
            self._receivers[name] = receiver, users + 1
            return receiver

    def release(self, receiver: Versions) -> None:
        """Close a receiver if this was its last subscriber."""
        with self._lock:
            _, users = self._receivers.get(receiver.name, (receiver, 0))
            if users > 1:
                self._receivers[receiver.name] = receiver, users - 1
                return
            self._receivers.pop(receiver.name, None)
        receiver.close(leave=not self._runtime.closing)

    def _close(self, leave: bool) -> None:
        with self._lock:
            receivers = [receiver for receiver, _ in self._receivers.values()]
        for receiver in receivers:
            receiver.close(leave)


class Subscriber:
    """The newest version of the weights that are published under a name.

    Versions arrive in the background. A subscriber may be made before the publisher, and continues
    with the next version if the publisher is restarted. `publisher` is the worker that publishes;
    without it, it is searched for. If a worker that passes the weights on is silent for `patience`
    seconds, another one takes its place.

    With `device`, a CUDA device, versions are kept in the memory of this GPU, once for all workers
    of the host that subscribe with it, and are copied from there.

    With `weights`, the model or `state_dict` that is later passed to `pull_into`, only the parts of
    tensors that it holds are received: if its tensors are of the class `DTensor`, their shards.
    With `slices`, only these parts are received: a dict of slices by published name, such as
    ``{"weight": (slice(0, 10),)}``. `names` is that of `pull_into`, for all pulls.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        agent: Agent | None = None,
        publisher: str | None = None,
        patience: float = 10.0,
        device: torch.device | str | int | None = None,
        weights: Weights | None = None,
        names: Rename | None = None,
        slices: Slices | None = None,
    ) -> None:
        runtime = runtime_of(agent)
        if runtime is None:
            raise UsageError("a subscriber needs an agent: pass `agent`, or call `init_rpc` first")
        runtime.require_open()
        patience = duration(patience, "patience", positive=True)
        self.name = name
        self._runtime = runtime
        self._receivers = runtime.service(Receivers)
        uuid = None if device is None else device_images.uuid_of(device)
        wanted: Wanted | None = None
        if weights is not None or slices is not None:
            if uuid is not None:  # pragma: gpu
                raise UsageError("`device` cannot be combined with `weights` or `slices`")
            tensors = {} if weights is None else targets_of(weights, names)
            wanted = planning.wanted(tensors, names, slices)
        self._held = HeldWeights()
        self._names = names
        self._names_are_checked = weights is not None
        self._receiver = self._receivers.open(name, publisher, patience, uuid, wanted)
        self._closed = False

    def __repr__(self) -> str:
        return f"<Subscriber of {self.name!r}: version {self.version}>"

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> int | None:
        """The newest version that has arrived; None before the first."""
        return self._receiver.version

    @property
    def received(self) -> ReceiverCounters:
        """What this worker has received over connections, not through shared memory."""
        return self._receiver.counters

    def pull_into(
        self,
        weights: Weights,
        *,
        names: Rename | None = None,
        have: int | None = None,
        timeout: float | object | None = DEFAULT,
    ) -> int:
        """Copy the newest version into a module or `state_dict`. Return its number.

        All tensors are of this version. `names` has the published name of each tensor that is
        written, or is a function that returns it, or None for tensors that keep their values.
        Without it, all tensors are written. Tensors of another dtype are converted. Wait up to
        `timeout` seconds for the first version; None: without a limit.

        `have` says that the weights hold this version. Nothing is copied if it is the newest one,
        and otherwise only what changed since, unless PyTorch has counted other writes to these
        tensors or their views. It does not count writes through `.data`, NumPy, fused optimizers or
        another tensor in the same memory: pull without `have` after these.
        """
        self._seconds(timeout)  # check it
        if self._closed:
            raise closed_error(self.name)
        if have is not None:
            have = as_version(have)
            if self._receiver.is_newest(have):
                return have
        is_part = names is None and self._names_are_checked
        names = self._names if names is None else names
        target = targets_of(weights, names, is_part=is_part)
        check_target(weights, target, names)
        written = [tensor for _, _, tensor in renamed(target, names) if not tensor.is_meta]
        held = self._held.find(written, have)

        def pull(found: Found) -> int:
            copies = found.copies(target, names)
            if isinstance(found, ReadVersion):
                self._held.write(written, copies, found, held)
            else:
                copy_whole(copies)
            return found.version

        return self._read(pull, timeout, held)

    def state_dict(
        self, *, timeout: float | object | None = DEFAULT
    ) -> tuple[int, dict[str, Tensor]]:
        """Return the newest version and its tensors, as copies. Tied tensors are the same."""
        return self._read(lambda found: (found.version, found.tensors()), timeout)

    @contextmanager
    def view(
        self, *, timeout: float | object | None = DEFAULT
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Return the newest version and its tensors without a copy, for a `with` statement.

        Only a tensor that comes from several shards is a copy.
        The tensors are in memory that workers of this host share: use them only inside the
        statement, and do not write to them. If they are on a GPU and their owner took this worker
        for lost meanwhile, the end of the statement raises `StaleReference`.
        """
        with self._receiver.read(self._seconds(timeout)) as found:
            yield found.version, found.views()

    def newer_than(self, version: int | None) -> Future[int]:
        """Return a future for the newest version once it is newer than `version`.

        It can be awaited. None: any version. It fails with `CallCancelled` after `close`.
        """
        if self._runtime.forked:  # no version arrives in a child
            self._runtime.require_open()
        return self._receiver.newer_than(None if version is None else as_version(version))

    def __iter__(self) -> Iterator[int]:
        """Yield each version that arrives, without those that were superseded meanwhile."""
        version: int | None = None
        while True:
            try:
                version = self.newer_than(version).wait()
            except CallCancelled:
                return
            yield version

    async def __aiter__(self) -> AsyncIterator[int]:
        version: int | None = None
        while True:
            try:
                version = await self.newer_than(version)
            except CallCancelled:
                return
            yield version

    def close(self) -> None:
        """Stop receiving. May be repeated."""
        if not self._closed:
            self._closed = True
            self._receivers.release(self._receiver)

    def _read(
        self, use: Callable[[Found], T], timeout: float | object | None, held: Held | None = None
    ) -> T:
        """Return what `use` returns for the newest version."""
        seconds = self._seconds(timeout)
        while True:
            try:
                with self._receiver.read(seconds, held) as found:
                    return use(found)
            except VersionLost:
                continue

    def _seconds(self, timeout: float | object | None) -> float | None:
        if timeout is DEFAULT:
            return self._runtime.timeout
        return time_limit(timeout)  # type: ignore[arg-type]  # checked there
