"""Find the hooks of a node of torch's graph, and keep them from running in one call of the engine.

A part of a backward pass can end before a node whose gradient is not complete (see `graph`). The
engine of torch cannot stop before a node: it looks at the node with an undefined gradient, and
calls its hooks with None. `SuppressedHooks` prevents that: for the graph task of one run, hooks of the
given nodes return None, and functions written in Python return no gradients.

Torch does not say which tensor hooks a node has. So `record_hooks` wraps `Tensor.register_hook`
(once, when a process gets its first autograd context), and the wrapper notes the dictionary of
hooks in the metadata of the node. The reference is weak, so it keeps nothing alive.

State: `_SuppressibleHook` objects stand in hook dictionaries, and as attribute `apply` of nodes, while a
run needs them; `_lock` guards putting them in and taking them out.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

_KEY = "telegrad.tensor_hooks"
_current_task: Callable[[], int] = torch._C._current_graph_task_id
_lock = threading.Lock()


class _Counter:
    """How many handles of hooks this package took, so that others can be counted."""

    ours = 0
    at_first = 0  # what `count_foreign_hooks` was when `record_hooks` was called


def count_foreign_hooks() -> int:
    """Return a number that changes when somebody else registers a hook anywhere in the process."""
    return RemovableHandle.next_id - _Counter.ours


def any_foreign_hook_added() -> bool:
    """Has anybody else registered a hook since the first context of the process began?"""
    return count_foreign_hooks() != _Counter.at_first


def register_own_hook(register: Callable[[Any], RemovableHandle], hook: Any) -> RemovableHandle:
    """Register a hook without changing `count_foreign_hooks`."""
    with _lock:
        handle = register(hook)
        # not the difference of `next_id`: another thread may register one at the same time
        _Counter.ours += 1
    return handle


def record_hooks() -> None:
    """From now on, note which nodes get tensor hooks."""
    original = Tensor.register_hook
    with _lock:
        if hasattr(original, _KEY):
            return

        @functools.wraps(original)
        def register_hook(self: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
            handle: RemovableHandle = original(self, hook)  # type: ignore[no-untyped-call]
            with torch._C.DisableTorchFunctionSubclass():
                _note(self, handle)
            return handle

        _Counter.at_first = count_foreign_hooks()
        setattr(register_hook, _KEY, True)
        Tensor.register_hook = register_hook  # type: ignore[method-assign]


def _note(tensor: Tensor, handle: RemovableHandle) -> None:
    node: Any = tensor.grad_fn
    hooks = handle.hooks_dict_ref()
    if node is None or hooks is None:
        return  # the hooks of a leaf are found without a note
    noted = node.metadata.setdefault(_KEY, [])
    if all(reference() is not hooks for reference in noted):
        noted.append(handle.hooks_dict_ref)


def tensor_hooks(node: Any) -> list[dict[int, Any]]:
    """Return the dictionaries of tensor hooks of a node that are not empty."""
    leaf = getattr(node, "variable", None)
    if leaf is not None and not isinstance(node, torch._C._FunctionBase):
        return [leaf._backward_hooks] if leaf._backward_hooks else []
    found = [reference() for reference in node.metadata.get(_KEY, ())]
    return [hooks for hooks in found if hooks]


def call_tensor_hooks(node: Node, gradient: Tensor | None) -> Tensor | None:
    """Call the tensor hooks of a node as the engine does; return the gradient that they leave."""
    for hooks in tensor_hooks(node):
        for hook in list(hooks.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
    return gradient


def node_hooks(node: Node) -> list[dict[int, Any]]:
    """Return the dictionaries of pre-hooks and post-hooks of a node that are not empty."""
    found = []
    for register in (node.register_prehook, node.register_hook):
        handle = register_own_hook(register, _ignore)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            found.append(hooks)
    return found


def _ignore(*_: Any) -> None:
    """Stand for a hook that is removed at once, so this never runs."""


class _SuppressibleHook:
    """Takes the place of a hook, or of a function's `apply`, and does nothing in some tasks."""

    def __init__(self, original: Any, result: Any) -> None:
        self.original = original
        self._result = result
        self.runs: list[SuppressedHooks] = []

    def __call__(self, *args: Any) -> Any:
        task = _current_task()
        if any(run.task == task for run in self.runs):
            return self._result
        return self.original(*args)


class SuppressedHooks:
    """While this is entered, nodes do nothing in the graph task whose number is `task`."""

    def __init__(self, hooks: Iterable[dict[int, Any]], functions: Iterable[Any]) -> None:
        self.task: int | None = None
        self._hooks = list(hooks)
        self._functions = list(functions)

    def start(self) -> None:
        """Note that the calling thread runs the graph task in question."""
        self.task = _current_task()

    def __enter__(self) -> None:
        if not self._hooks and not self._functions:
            return
        with _lock:
            for hooks in self._hooks:
                for key, hook in list(hooks.items()):
                    if not isinstance(hook, _SuppressibleHook):
                        hook = hooks[key] = _SuppressibleHook(hook, None)
                    hook.runs.append(self)
            for node in self._functions:
                substitute = node.__dict__.get("apply")
                if not isinstance(substitute, _SuppressibleHook):
                    nothing = (None,) * len(node.needs_input_grad)
                    substitute = node.apply = _SuppressibleHook(node.apply, nothing)
                substitute.runs.append(self)

    def __exit__(self, *_: object) -> None:
        if not self._hooks and not self._functions:
            return
        with _lock:
            for hooks in self._hooks:
                for key, hook in list(hooks.items()):
                    if isinstance(hook, _SuppressibleHook) and self in hook.runs:
                        hook.runs.remove(self)
                        if not hook.runs:
                            hooks[key] = hook.original
            for node in self._functions:
                substitute = node.__dict__["apply"]
                substitute.runs.remove(self)
                if not substitute.runs:
                    del node.apply
