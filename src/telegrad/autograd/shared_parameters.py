"""`SharedParameters`: parameters that several trainers update at the same time, each with exact gradients.

A forward pass saves the parameters that its backward pass will need. If another trainer's step changes them in between,
torch refuses to go on. So once a second optimizer shares parameters on a worker, calls under a context run there with
hooks that keep hold of the memory of those that autograd saves, and a step that finds such memory in use leaves it as
it is and writes to new memory: a backward pass sees the weights that its forward pass saw. What is saved besides
parameters is checked for changes as always, except results of operations that are changed in place: with hooks, torch
does not let us see those.

Calls and updates take turns, so that an operation and what is saved for it are of the same weights: an update waits
until no call reads parameters, and calls that come meanwhile wait for it. A call that waits for other workers reads
none. If calls and updates wait for each other in a way that we cannot see (a lock of the user's), the update goes ahead
after `_LONGEST`.

State: everything under the lock of `_changed`. `_memory` maps the address of a parameter's memory to who has saved it.
`_reading` has the calls that may be reading; memory that was replaced under their eyes is kept until they have ended.
`_updates` counts the updates under way.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from telegrad import blocking

_OWNERS_TO_SHARE = 2
_LONGEST = 10.0  # seconds


class _SavedParameter:
    """A saved parameter, as the memory that it had."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _RunningCallRole:
    """A call under way, as a role of its thread: see `telegrad.blocking`."""

    def __init__(self, versions: SharedParameters, outer: blocking.ThreadRole | None) -> None:
        self._versions = versions
        self.outer = outer

    def pause(self) -> None:
        self._versions.stop_reading(self)
        if self.outer is not None:
            self.outer.pause()

    def resume(self) -> None:
        if self.outer is not None:
            self.outer.resume()
        self._versions.start_reading(self)

    def hold(self) -> None:
        self._versions.stop_reading(self)
        if self.outer is not None:
            self.outer.hold()

    def release(self) -> None:
        if self.outer is not None:
            self.outer.release()
        self._versions.start_reading(self)

    def more(self) -> bool:
        return self.outer is not None and self.outer.more()

    def afterwards(self, key: Hashable, job: Callable[[], None]) -> None:
        assert self.outer is not None
        self.outer.afterwards(key, job)

    def at(self, key: Hashable, moment: float, job: Callable[[], None]) -> bool:
        return self.outer is not None and self.outer.at(key, moment, job)


class _ThreadState(threading.local):
    call: _RunningCallRole | None = None


class SharedParameters:
    """The shared parameters of one worker."""

    def __init__(self) -> None:
        self.active = False
        self._changed = threading.Condition()
        # by id: the parameter, how many optimizers
        self._users: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._memory: dict[int, weakref.WeakSet[_SavedParameter]] = {}
        self._reading: set[_RunningCallRole] = set()
        self._updates = 0
        self._replaced: list[tuple[set[_RunningCallRole], list[Tensor]]] = []
        self._local = _ThreadState()

    def __repr__(self) -> str:
        return f"<SharedParameters of {len(self._users)} parameters, {'shared' if self.active else 'not shared'}>"

    def share(self, parameters: Iterable[Tensor]) -> None:
        """One more optimizer updates these."""
        with self._changed:
            for parameter in parameters:
                key = id(parameter)
                known, users = self._users.get(key, (None, 0))
                users = users + 1 if known is not None and known() is parameter else 1
                forget = functools.partial(self._forget, key)
                self._users[key] = weakref.ref(parameter, forget), users
                self._memory.setdefault(_address(parameter), weakref.WeakSet())
                self.active = self.active or users >= _OWNERS_TO_SHARE

    def _forget(self, key: int, _: object) -> None:
        self._users.pop(key, None)

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call runs, in this block, under a context."""
        if self._local.call is not None:  # it runs as part of another, on the same thread
            with saved_tensors_hooks(self._save, _restore):
                yield
            return
        call = self._local.call = _RunningCallRole(self, blocking.role())
        self.start_reading(call)
        blocking.take(call)
        try:
            with saved_tensors_hooks(self._save, _restore):
                yield
        finally:
            blocking.take(call.outer)
            self._local.call = None
            self.stop_reading(call)
            with self._changed:
                for calls, _ in self._replaced:
                    calls.discard(call)
                self._replaced = [entry for entry in self._replaced if entry[0]]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """This thread updates parameters in this block, and nobody reads them meanwhile."""
        if not self.active:
            yield
            return
        call = self._local.call
        with self._changed:
            if call is not None:
                self._reading.discard(call)
            self._updates += 1
            if self._reading:
                self._wait(
                    lambda: not self._reading, blocking.role() if call is None else call.outer
                )
        try:
            yield
        finally:
            with self._changed:
                self._updates -= 1
                self._changed.notify_all()
            if call is not None:
                self.start_reading(call)

    def before_update(self, parameters: Iterable[Tensor]) -> None:
        """These are about to be written to: give those whose memory somebody still needs new memory first."""
        if not self.active:
            return
        with self._changed:
            others = set(self._reading)  # who did not end in time
            replaced = []
            for parameter in parameters:
                address = _address(parameter)
                if others or self._memory.get(address):
                    replaced.append(parameter.data)
                    parameter.data = parameter.data.clone()
                    self._memory.pop(address, None)
                    self._memory[_address(parameter)] = weakref.WeakSet()
            if replaced and others:
                self._replaced.append((others, replaced))

    # Of calls

    def start_reading(self, call: _RunningCallRole) -> None:
        with self._changed:
            if self._updates:
                self._wait(lambda: not self._updates, call.outer)
            self._reading.add(call)

    def stop_reading(self, call: _RunningCallRole) -> None:
        with self._changed:
            self._reading.discard(call)
            if self._updates:
                self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], role: blocking.ThreadRole | None) -> None:
        if role is not None:
            role.pause()
        try:
            self._changed.wait_for(condition, _LONGEST)
        finally:
            if role is not None:
                role.resume()

    def _save(self, tensor: Tensor) -> Any:
        users = self._memory.get(_address(tensor))
        if users is None:
            return tensor, tensor._version
        # not the parameter itself, which will have other memory
        saved = _SavedParameter(tensor.detach())
        users.add(saved)
        return saved


def _restore(saved: Any) -> Tensor:
    if isinstance(saved, _SavedParameter):
        return saved.tensor
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)} is at version {tensor._version}, expected version {version}"
        )
    result: Tensor = tensor
    return result


def _address(tensor: Tensor) -> int:
    return 0 if tensor.is_sparse else tensor.untyped_storage().data_ptr()
