"""Leaves whose gradients somebody expects in `.grad`, or is told of when they arrive there.

These are parameters of a `DistributedDataParallel`, whose reducer hooks into their accumulation, and leaves with hooks
of the user's on it (`register_post_accumulate_grad_hook`, or a hook on the `AccumulateGrad` node).

State: the live instances of `DistributedDataParallel`. The first backward pass in a process that has
a process group finds those that exist and sets torch's hook for module registration, which records
those that are made later.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
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


class _Search:
    done = False


def replicated() -> Replicated:
    """The instance that each replicated parameter belongs to."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    _start_recording()
    return {
        id(parameter): instance
        for instance in list(_instances)
        for parameter in instance.parameters()
    }


def any_observed(accumulators: Sequence[Any], instances: Replicated) -> bool:
    """Does somebody wait for the gradient of one of these leaves to be accumulated?"""
    for accumulator in accumulators:
        leaf = accumulator.variable
        if id(leaf) in instances or leaf._post_accumulate_grad_hooks:
            return True
    return _checks.find_hooks(accumulators)


def observation_check(instances: Replicated) -> Callable[[Tensor], bool]:
    """Return a function: does somebody wait for the gradient of this leaf to be accumulated, as far as is known?

    It holds for the time being: hooks that are added later make it wrong.
    """
    clean, count = _checks.clean, hooks.count_foreign_hooks()

    def is_observed(leaf: Tensor) -> bool:
        key = id(leaf)
        known = clean.get(key)
        if known is None or known[1] != count or known[0]() is not leaf:
            return True  # not known to have no hooks
        return bool(leaf._post_accumulate_grad_hooks) or key in instances

    return is_observed


def take_gradient(leaf: Tensor, instances: Replicated) -> Tensor | None:
    """What is in `.grad`, as a tensor that nobody overwrites."""
    instance = instances.get(id(leaf))
    if leaf.grad is not None and instance is not None and instance.gradient_as_bucket_view:
        return leaf.grad.clone()
    return leaf.grad


def raise_if_sharded(
    leaves: Iterable[Tensor], with_gradients: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Raise if one of these is a gathered parameter of a module under `fully_shard` (FSDP2).

    Its hooks expect the whole of a backward pass in one call of the engine, and `.grad` to be left alone.
    """
    known = _composable_state._module_state_mapping
    if not known or "torch.distributed.fsdp._fully_shard._fsdp_param_group" not in sys.modules:
        return
    states = [reference() for reference in known.values()]
    groups = [group for state in states for group in _groups_of(state)]
    gathered = {
        id(getattr(each, "_unsharded_param", None))
        for group in groups
        for each in group.fsdp_params
    }
    for leaf in (*leaves, *(leaf for leaf, _ in with_gradients)):
        if id(leaf) in gathered:
            raise UsageError(
                f"the loss depends on a parameter of shape {tuple(leaf.shape)} of a module under fully_shard (FSDP2), "
                "which would not get its gradient from telegrad.autograd.backward. Detach the module's output, let "
                "autograd compute the gradient of that, and pass it to output.backward(gradient)"
            )


def _groups_of(state: Any) -> Sequence[Any]:
    """Return the groups of parameters that FSDP2 gathers together. There is one at most in torch 2.11."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


class _Checks:
    """Which leaves are known to have no hooks on their accumulation.

    Torch does not say which hooks a node has, except to those who add one, and that takes longer than the rest of a
    small backward pass. But every hook that anybody adds takes a number from one counter. As long as it stands where it
    stood when a leaf was looked at, nothing was added to that leaf; the numbers that looking takes do not count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # by id: the leaf, and where the counter stood
        self.clean: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def find_hooks(self, accumulators: Sequence[Any]) -> bool:
        """Has one of these nodes a hook?"""
        with self._lock:
            clean, count = self.clean, hooks.count_foreign_hooks()
            for node in accumulators:
                leaf = node.variable
                key = id(leaf)
                known = clean.get(key)
                if known is not None and known[1] == count and known[0]() is leaf:
                    continue
                if hooks.node_hooks(node):
                    return True
                clean[key] = weakref.ref(leaf, lambda _, key=key: clean.pop(key, None)), count  # type: ignore[misc]
        return False


def _start_recording() -> None:
    """Find the instances that exist, and record those that are made from now on."""
    if not _Search.done:
        _Search.done = True
        register_module_module_registration_hook(_registered)
        _instances.update(
            thing for thing in gc.get_objects() if type(thing) is DistributedDataParallel
        )


def _registered(module: nn.Module, name: str, submodule: Any) -> None:
    if isinstance(module, DistributedDataParallel) and name == "module":
        _instances.add(module)


_checks = _Checks()
