"""`SharedParameters`: parameters that several trainers update, each with exact gradients.

A forward pass saves the parameters that its backward pass needs. If the step of another trainer
changes them in between, torch raises an error. So once a second optimizer updates parameters of a
worker, calls under a context run there with `saved_tensors_hooks`, which record the memory of the
parameters that autograd saves. A step that finds such memory in use leaves it as it is and gives
the parameter new memory. So a backward pass uses the weights that its forward pass used. Other
saved tensors are checked for changes as usual, except results that an operation changed in place,
which torch does not show to these hooks.

Calls and updates exclude each other, so that an operation and what it saves have the same weights:
an update waits until no call reads parameters, and calls that arrive meanwhile wait for the update.
A call that waits for another worker does not count as reading. If calls and updates wait for each
other in a way that cannot be detected here, such as a lock of the user, the update proceeds after
`_MAX_WAIT`.

State: everything changes under the lock of the condition `_changed`, except that the garbage
collector removes parameters from `_optimizers`. `active` is read without the lock.
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

from telegrad import thread_roles

_MIN_OPTIMIZERS = 2  # that update a parameter, so that it is shared
_MAX_WAIT = 10.0  # seconds


class _SavedParameter:
    """A parameter that autograd saved, with the memory that it had then."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _RunningCallRole:
    """A running call, as the role of its thread: see `telegrad.thread_roles`.

    It stops reading parameters while the thread blocks, and delegates the rest to the outer role.
    """

    def __init__(self, parameters: SharedParameters, outer: thread_roles.ThreadRole | None) -> None:
        self._parameters = parameters
        self.outer = outer

    def pause(self) -> None:
        self._parameters.stop_reading(self)
        if self.outer is not None:
            self.outer.pause()

    def pause_when_needed(self) -> thread_roles.DelayedPause | None:
        self._parameters.stop_reading(self)
        return None if self.outer is None else self.outer.pause_when_needed()

    def resume(self) -> None:
        if self.outer is not None:
            self.outer.resume()
        self._parameters.start_reading(self)

    def begin_backpressure(self) -> None:
        self._parameters.stop_reading(self)
        if self.outer is not None:
            self.outer.begin_backpressure()

    def end_backpressure(self) -> None:
        if self.outer is not None:
            self.outer.end_backpressure()
        self._parameters.start_reading(self)

    def has_pending_messages(self) -> bool:
        return self.outer is not None and self.outer.has_pending_messages()

    def run_when_drained(self, key: Hashable, job: Callable[[], None]) -> None:
        assert self.outer is not None
        self.outer.run_when_drained(key, job)

    def run_at(self, key: Hashable, when: float, job: Callable[[], None]) -> bool:
        return self.outer is not None and self.outer.run_at(key, when, job)


class _CallThreadState(threading.local):
    call: _RunningCallRole | None = None


class SharedParameters:
    """The shared parameters of one worker."""

    def __init__(self) -> None:
        self.active = False
        self._changed = threading.Condition()
        # By id: the parameter, and how many optimizers update it.
        self._optimizers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        # By the address of a parameter's memory: what autograd has saved of it.
        self._saved: dict[int, weakref.WeakSet[_SavedParameter]] = {}
        self._reading: set[_RunningCallRole] = set()  # calls that can be reading parameters
        self._updates = 0  # running or waiting
        # Memory that was replaced while calls could be reading it, kept until they have ended.
        self._replaced: list[tuple[set[_RunningCallRole], list[Tensor]]] = []
        self._local = _CallThreadState()

    def __repr__(self) -> str:
        state = "shared" if self.active else "not shared"
        return f"<SharedParameters of {len(self._optimizers)} parameters, {state}>"

    def add_optimizer(self, parameters: Iterable[Tensor]) -> None:
        """Record that one more optimizer updates these parameters."""
        with self._changed:
            for parameter in parameters:
                key = id(parameter)
                known, count = self._optimizers.get(key, (None, 0))
                count = count + 1 if known is not None and known() is parameter else 1
                forget = functools.partial(self._forget, key)
                self._optimizers[key] = weakref.ref(parameter, forget), count
                self._saved.setdefault(_address(parameter), weakref.WeakSet())
                self.active = self.active or count >= _MIN_OPTIMIZERS

    def _forget(self, key: int, _: object) -> None:
        self._optimizers.pop(key, None)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run a call under a context in this block."""
        if self._local.call is not None:  # a nested call on the same thread
            with saved_tensors_hooks(self._save, _restore):
                yield
            return
        call = self._local.call = _RunningCallRole(self, thread_roles.current_role())
        self.start_reading(call)
        thread_roles.set_role(call)
        try:
            with saved_tensors_hooks(self._save, _restore):
                yield
        finally:
            thread_roles.set_role(call.outer)
            self._local.call = None
            self.stop_reading(call)
            with self._changed:
                for calls, _ in self._replaced:
                    calls.discard(call)
                self._replaced = [each for each in self._replaced if each[0]]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Update parameters on this thread in this block, while no call reads them."""
        if not self.active:
            yield
            return
        call = self._local.call
        with self._changed:
            if call is not None:
                self._reading.discard(call)
            self._updates += 1
            if self._reading:
                role = thread_roles.current_role() if call is None else call.outer
                self._wait(lambda: not self._reading, role)
        try:
            yield
        finally:
            with self._changed:
                self._updates -= 1
                self._changed.notify_all()
            if call is not None:
                self.start_reading(call)

    def before_update(self, parameters: Iterable[Tensor]) -> None:
        """Give parameters that are about to be written to new memory, if theirs is in use."""
        if not self.active:
            return
        with self._changed:
            readers = set(self._reading)  # calls that did not end within `_MAX_WAIT`
            replaced = []
            for parameter in parameters:
                address = _address(parameter)
                if readers or self._saved.get(address):
                    replaced.append(parameter.data)
                    parameter.data = parameter.data.clone()
                    self._saved.pop(address, None)
                    self._saved[_address(parameter)] = weakref.WeakSet()
            if replaced and readers:
                self._replaced.append((readers, replaced))

    # Calls

    def start_reading(self, call: _RunningCallRole) -> None:
        """Wait until no update runs, and record that a call can be reading parameters."""
        with self._changed:
            if self._updates:
                self._wait(lambda: not self._updates, call.outer)
            self._reading.add(call)

    def stop_reading(self, call: _RunningCallRole) -> None:
        """Record that a call does not read parameters."""
        with self._changed:
            self._reading.discard(call)
            if self._updates:
                self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], role: thread_roles.ThreadRole | None) -> None:
        """Wait for a condition, at most `_MAX_WAIT`, while the role of the thread is paused."""
        if role is not None:
            role.pause()
        try:
            self._changed.wait_for(condition, _MAX_WAIT)
        finally:
            if role is not None:
                role.resume()

    def _save(self, tensor: Tensor) -> Any:
        """Return what autograd saves instead of a tensor."""
        known = self._saved.get(_address(tensor))
        if known is None:
            return tensor, tensor._version
        # Not the parameter itself, since a step can give it other memory.
        saved = _SavedParameter(tensor.detach())
        known.add(saved)
        return saved


def _restore(saved: Any) -> Tensor:
    """Return the tensor for what `_save` returned. Raise if it was changed in place."""
    if isinstance(saved, _SavedParameter):
        return saved.tensor
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, "
            f"expected version {version}"
        )
    result: Tensor = tensor
    return result


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return 0 if tensor.is_sparse else tensor.untyped_storage().data_ptr()
