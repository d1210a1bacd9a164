"""`Versions`: parameters that several trainers update at the same time, each with exact gradients.

A forward pass saves the parameters that its backward pass will need. If another trainer's step changes them in between,
torch refuses to go on. So once a second optimizer shares parameters on a worker, calls under a context run there with
hooks that keep hold of the memory of those that autograd saves, and a step that finds such memory in use leaves it as
it is and writes to new memory: a backward pass sees the weights that its forward pass saw. What is saved besides
parameters is checked for changes as always, except results of operations that are changed in place: with hooks, torch
does not let us see those.

State: everything under `_lock`. `_memory` maps the address of a parameter's memory to who has saved it. `_running` has
the calls under way; memory that was replaced is kept until all calls that ran at that moment have ended, since one of
them may be reading it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_OWNERS_TO_SHARE = 2


class _Saved:
    """A saved parameter, as the memory that it had."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Local(threading.local):
    call: object | None = None


class Versions:
    """The shared parameters of one worker."""

    def __init__(self) -> None:
        self.active = False
        self._lock = threading.Lock()
        self._users: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id: the parameter, how many optimizers
        self._memory: dict[int, weakref.WeakSet[_Saved]] = {}
        self._running: set[object] = set()
        self._replaced: list[tuple[set[object], list[Tensor]]] = []
        self._local = _Local()

    def __repr__(self) -> str:
        return f"<Versions of {len(self._users)} parameters, {'shared' if self.active else 'not shared'}>"

    def share(self, parameters: Iterable[Tensor]) -> None:
        """One more optimizer updates these."""
        with self._lock:
            for parameter in parameters:
                key = id(parameter)
                known, users = self._users.get(key, (None, 0))
                users = users + 1 if known is not None and known() is parameter else 1
                self._users[key] = weakref.ref(parameter, lambda _, key=key: self._users.pop(key, None)), users  # type: ignore[misc]
                self._memory.setdefault(_address(parameter), weakref.WeakSet())
                self.active = self.active or users >= _OWNERS_TO_SHARE

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call runs, in this block, under a context."""
        token, outer = object(), self._local.call
        with self._lock:
            self._running.add(token)
        self._local.call = token
        try:
            with saved_tensors_hooks(self._save, _restore):
                yield
        finally:
            self._local.call = outer
            with self._lock:
                self._running.discard(token)
                for calls, _ in self._replaced:
                    calls.discard(token)
                self._replaced = [entry for entry in self._replaced if entry[0]]

    def before_update(self, parameters: Iterable[Tensor]) -> None:
        """These are about to be written to: give those whose memory somebody still needs new memory first."""
        if not self.active:
            return
        with self._lock:
            others = self._running - {self._local.call}
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

    def _save(self, tensor: Tensor) -> Any:
        users = self._memory.get(_address(tensor))
        if users is None:
            return tensor, tensor._version
        saved = _Saved(tensor.detach())  # not the parameter itself, which will have other memory
        users.add(saved)
        return saved


def _restore(saved: Any) -> Tensor:
    if isinstance(saved, _Saved):
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
