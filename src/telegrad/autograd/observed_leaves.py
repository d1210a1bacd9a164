"""Leaves whose gradients are expected in `.grad`, or whose accumulation is observed.

These are parameters of a `DistributedDataParallel`, whose reducer hooks into their accumulation,
and leaves with hooks of the user on it (`register_post_accumulate_grad_hook`, or a hook on the
`AccumulateGrad` node).

State: the live instances of `DistributedDataParallel`, under `_lock`. The first backward pass in a
process that has a process group finds those that exist and sets torch's hook for module
registration, which records those that are created later. `_HookFreeLeaves` changes under its lock.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from telegrad.autograd import hooks
from telegrad.errors import UsageError

Replicated = dict[int, DistributedDataParallel]  # by the id of a parameter

_instances: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_lock = threading.RLock()  # reentrant: a finalizer may create a module


class _Recording:
    has_started = False


def replicated_parameters() -> Replicated:
    """Return the `DistributedDataParallel` instance of each replicated parameter."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    _start_recording()
    with _lock:
        instances = list(_instances)
    return {
        id(parameter): instance for instance in instances for parameter in instance.parameters()
    }


def any_observed(accumulate_grad_nodes: Sequence[Any], replicated: Replicated) -> bool:
    """Return True if the accumulation of one of these leaves is observed."""
    for node in accumulate_grad_nodes:
        leaf = node.variable
        if id(leaf) in replicated or leaf._post_accumulate_grad_hooks:
            return True
    return _hook_free_leaves.find_hooks(accumulate_grad_nodes)


def is_known_unobserved(leaf: Tensor, replicated: Replicated) -> bool:
    """Return True if the accumulation of a leaf is known to be unobserved."""
    key = id(leaf)
    if key not in _hook_free_leaves.known():
        return False
    return not leaf._post_accumulate_grad_hooks and key not in replicated


def are_plain(leaves: Sequence[Tensor | None], replicated: Replicated) -> bool:
    """Return True if all are leaves, without hooks and with accumulation known to be unobserved."""
    if type(None) in set(map(type, leaves)):
        return False
    if any(map(_tensor_hooks, leaves)) or any(map(_accumulation_hooks, leaves)):
        return False
    keys = set(map(id, leaves))
    return _hook_free_leaves.known().keys() >= keys and replicated.keys().isdisjoint(keys)


_tensor_hooks = attrgetter("_backward_hooks")
_accumulation_hooks = attrgetter("_post_accumulate_grad_hooks")


def take_gradient(leaf: Tensor, replicated: Replicated) -> Tensor | None:
    """Return the gradient in `.grad`, as a tensor that is not overwritten later."""
    instance = replicated.get(id(leaf))
    if leaf.grad is not None and instance is not None and instance.gradient_as_bucket_view:
        return leaf.grad.clone()
    return leaf.grad


def raise_if_sharded(leaves: Iterable[Tensor], gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Raise if a leaf is a gathered parameter of a module under `fully_shard` (FSDP2).

    The hooks of FSDP2 expect a whole backward pass in one run of the engine, and they use `.grad`.
    """
    known = _composable_state._module_state_mapping
    if not known or "torch.distributed.fsdp._fully_shard._fsdp_param_group" not in sys.modules:
        return
    states = [reference() for reference in known.values()]
    groups = [group for state in states for group in _parameter_groups(state)]
    gathered = {
        id(getattr(parameter, "_unsharded_param", None))
        for group in groups
        for parameter in group.fsdp_params
    }
    for leaf in (*leaves, *(leaf for leaf, _ in gradients)):
        if id(leaf) in gathered:
            raise UsageError(
                f"the loss depends on a parameter of shape {tuple(leaf.shape)} of a module under "
                "fully_shard (FSDP2), which would not get its gradient from "
                "telegrad.autograd.backward. Detach the module's output, let autograd compute the "
                "gradient of that, and pass it to output.backward(gradient)"
            )


def _parameter_groups(state: Any) -> Sequence[Any]:
    """Return the groups of parameters that FSDP2 gathers together. Torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


class _HookFreeLeaves:
    """Leaves that are known to have no hooks on their `AccumulateGrad` node.

    Torch shows the hooks of a node only to a caller that registers one, and that takes longer than
    the rest of a small backward pass. If no hook was registered by other code since a leaf was
    examined (`hooks.count_foreign_hooks`), the leaf has not got one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The value of the counter when the leaves were examined; and the leaves, by id. An entry is
        # removed before the memory of its leaf is used again.
        self._known: tuple[int, dict[int, weakref.ref[Tensor]]] = 0, {}

    def known(self) -> dict[int, weakref.ref[Tensor]]:
        """Return the leaves that are known now, by id."""
        count, leaves = self._known
        return leaves if count == hooks.count_foreign_hooks() else {}

    def find_hooks(self, accumulate_grad_nodes: Sequence[Any]) -> bool:
        """Return True if one of these nodes has a hook."""
        with self._lock:
            count = hooks.count_foreign_hooks()
            if self._known[0] != count:
                self._known = count, {}
            leaves = self._known[1]
            for node in accumulate_grad_nodes:
                leaf = node.variable
                key = id(leaf)
                if key in leaves:
                    continue
                if hooks.node_hooks(node):
                    return True

                def forget(_: object, key: int = key) -> None:
                    leaves.pop(key, None)

                leaves[key] = weakref.ref(leaf, forget)
        return False


def _start_recording() -> None:
    """Find the existing instances of DistributedDataParallel, and record those created later."""
    with _lock:
        if not _Recording.has_started:
            register_module_module_registration_hook(_on_registration)
            _instances.update(
                each for each in gc.get_objects() if type(each) is DistributedDataParallel
            )
            _Recording.has_started = True


def _on_registration(module: nn.Module, name: str, submodule: Any) -> None:
    if isinstance(module, DistributedDataParallel) and name == "module":
        with _lock:
            _instances.add(module)


_hook_free_leaves = _HookFreeLeaves()
