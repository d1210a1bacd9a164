"""Leaves whose gradients somebody expects in `.grad`, or is told of when they arrive there.

These are parameters of a `DistributedDataParallel`, whose reducer hooks into their accumulation, and leaves with hooks
of the user's on it (`register_post_accumulate_grad_hook`, or a hook on the `AccumulateGrad` node).

State: the live instances of `DistributedDataParallel`, known since they were made (through torch's hook for module
registration) or found once among the objects that existed before this module was imported.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

Replicated = dict[int, DistributedDataParallel]  # by the id of a parameter

_instances: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


class _Search:
    done = False


def replicated() -> Replicated:
    """The instance that each replicated parameter belongs to."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    _find_older()
    return {id(parameter): instance for instance in list(_instances) for parameter in instance.parameters()}


def is_watched(accumulator: Any, instances: Replicated) -> bool:
    """Does somebody wait for the gradient of this leaf to be accumulated?"""
    leaf = accumulator.variable
    if id(leaf) in instances or leaf._post_accumulate_grad_hooks:
        return True
    return _has_hooks(accumulator)


def take_gradient(leaf: Tensor, instances: Replicated) -> Tensor | None:
    """What is in `.grad`, as a tensor that nobody overwrites."""
    instance = instances.get(id(leaf))
    if leaf.grad is not None and instance is not None and instance.gradient_as_bucket_view:
        return leaf.grad.clone()
    return leaf.grad


def _has_hooks(node: Node) -> bool:
    """Torch does not say which hooks a node has, except to those who add one."""
    for register in (node.register_prehook, node.register_hook):
        handle = register(_ignore)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _ignore(*_: Any) -> None:
    """Never runs: it is removed at once."""


def _find_older() -> None:
    if not _Search.done:
        _Search.done = True
        _instances.update(thing for thing in gc.get_objects() if type(thing) is DistributedDataParallel)


def _registered(module: nn.Module, name: str, submodule: Any) -> None:
    if isinstance(module, DistributedDataParallel) and name == "module":
        _instances.add(module)


register_module_module_registration_hook(_registered)
