"""Find the hooks of a node of torch's graph, and suppress them in one run of the engine.

A part of a backward pass can end at a node whose gradient is not complete (`partial_run`). Torch's
engine cannot stop there: it visits the node with an undefined gradient and calls its hooks with
None. `SuppressedHooks` prevents that. In one graph task, hooks of the given nodes return None, and
functions written in Python return undefined gradients.

Torch does not show which tensor hooks a node has. So `record_hooks` wraps `Tensor.register_hook`,
once, when a process gets its first autograd context. The wrapper stores a weak reference to the
dictionary of hooks in the metadata of the node.

Tensors that share a node (`send_recv.is_shared_node`) must behave as if each had its own. If the
loss depends on some of them, the engine calls the hooks of all. So these are registered as
`_DefinedOnly`, which ignores undefined gradients, and `local_graph` calls them with None if the
loss depends on their tensor. The hooks that `torch.autograd.graph` registers for several tensors
expect one call for each output of a node, so they are left as they are. `retain_grad` registers a
hook of its own there: that of torch accesses the wrong output, or ends the process, if the tensor
is written in place afterwards and is not the first output of its node (torch 2.15).

Torch does not show either whether a node has hooks. But each hook of a node or of a leaf has a
`RemovableHandle`. `record_hooks` wraps its constructor, too, and counts those of other code.

State: `_SuppressibleHook` objects replace hooks in dictionaries, and `apply` of nodes, during runs
that need them. `_lock` is held while they are inserted and removed. `_Handles.foreign` is changed
under `_handle_lock`, and so is the counter that torch takes the ids of handles from: without the
interpreter lock, two hooks could get the same id, and one would replace the other.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from telegrad.errors import UsageError

_KEY = "telegrad.tensor_hooks"  # in the metadata of a node
_current_task: Callable[[], int] = torch._C._current_graph_task_id
_lock = threading.Lock()
_handle_lock = threading.RLock()  # reentrant: a finalizer may register a hook


class _Handles:
    """The handles of hooks that other code has registered since `record_hooks` was called."""

    foreign = 0


class _HandleThreadState(threading.local):
    is_own = False  # this thread registers a hook of this package


_local = _HandleThreadState()


def count_foreign_hooks() -> int:
    """Return how many hooks other code has registered since `record_hooks` was called."""
    return _Handles.foreign


def register_own_hook(register: Callable[[Any], RemovableHandle], hook: Any) -> RemovableHandle:
    """Register a hook without changing `count_foreign_hooks`."""
    _local.is_own = True
    try:
        return register(hook)
    finally:
        _local.is_own = False


class _DefinedOnly:
    """Replaces a hook of a tensor that shares its node, and ignores undefined gradients."""

    def __init__(self, original: Callable[[Tensor | None], Any]) -> None:
        self.original = original

    def __call__(self, gradient: Tensor | None) -> Any:
        return None if gradient is None else self.original(gradient)


class _RetainedGradient:
    """The hook by which `retain_grad` works for a tensor that shares its node.

    It is the last hook of its tensor, as in torch, so it gets what other hooks return.
    """

    def __init__(self, tensor: Tensor, is_shared_node: Callable[[Any], bool]) -> None:
        self._tensor = weakref.ref(tensor)
        self._is_shared_node = is_shared_node
        self._has_gradient = False

    def __call__(self, gradient: Tensor | None) -> None:
        tensor = self._tensor()
        if tensor is None or gradient is None:
            return
        if not self._is_shared_node(tensor.grad_fn):
            raise UsageError(
                f"retain_grad() was called for a received tensor of shape {tuple(tensor.shape)} "
                "that was written in place afterwards. Its message has many small tensors, so its "
                "gradient cannot be retained: clone() the tensor before retain_grad()"
            )
        known = None
        if self._has_gradient:
            with warnings.catch_warnings():  # torch warns if the user has set it to None
                warnings.simplefilter("ignore")
                known = tensor.grad
        tensor.grad = gradient if known is None else known + gradient
        self._has_gradient = True


def _keep_last(found: dict[int, Any]) -> None:
    """Move the `_RetainedGradient` of a tensor to the end of its hooks."""
    for key, hook in list(found.items()):
        if isinstance(hook, _RetainedGradient):
            found[key] = found.pop(key)


def _is_of_several_tensors(hook: Any) -> bool:
    """Return whether `torch.autograd.graph` has made this hook, for several tensors."""
    return getattr(hook, "__globals__", None) is torch.autograd.graph.__dict__


def record_hooks(is_shared_node: Callable[[Any], bool]) -> None:
    """Record from now on which nodes get tensor hooks."""
    original, original_retain_grad = Tensor.register_hook, Tensor.retain_grad
    with _lock:
        if hasattr(original, _KEY):
            return

        @functools.wraps(original)
        def register_hook(self: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
            with torch._C.DisableTorchFunctionSubclass():
                is_shared = is_shared_node(self.grad_fn)
            if is_shared and not _is_of_several_tensors(hook):
                hook = _DefinedOnly(hook)  # type: ignore[arg-type]
            handle: RemovableHandle = original(self, hook)  # type: ignore[no-untyped-call]
            with torch._C.DisableTorchFunctionSubclass():
                _record(self, handle)
            if is_shared:
                _keep_last(handle.hooks_dict_ref() or {})
            return handle

        @functools.wraps(original_retain_grad)
        def retain_grad(self: Tensor) -> None:
            with torch._C.DisableTorchFunctionSubclass():
                node = self.grad_fn
            if not is_shared_node(node):
                original_retain_grad(self)
            elif not _retains_gradient(self, node):
                handle = original(self, _RetainedGradient(self, is_shared_node))  # type: ignore[no-untyped-call]
                _record(self, handle)

        setattr(register_hook, _KEY, True)
        Tensor.register_hook = register_hook  # type: ignore[method-assign]
        Tensor.retain_grad = retain_grad  # type: ignore[assignment,method-assign]
        _count_handles()


def _count_handles() -> None:
    """Count the handles that other code makes from now on."""
    original = RemovableHandle.__init__

    @functools.wraps(original)
    def init(self: RemovableHandle, *args: Any, **kwargs: Any) -> None:
        with _handle_lock:
            original(self, *args, **kwargs)
            if not _local.is_own:
                _Handles.foreign += 1

    RemovableHandle.__init__ = init  # type: ignore[method-assign]


def _record(tensor: Tensor, handle: RemovableHandle) -> None:
    """Store a reference to the dictionary of tensor hooks in the node of a tensor."""
    node: Any = tensor.grad_fn
    hooks = handle.hooks_dict_ref()
    if node is None or hooks is None:
        return  # the hooks of a leaf are in `_backward_hooks`
    recorded = node.metadata.setdefault(_KEY, [])
    if all(reference() is not hooks for _, reference in recorded):
        recorded.append((tensor.output_nr, handle.hooks_dict_ref))


def _retains_gradient(tensor: Tensor, node: Any) -> bool:
    """Return whether a tensor that shares its node has a `_RetainedGradient`."""
    return any(
        isinstance(hook, _RetainedGradient)
        for output, reference in node.metadata.get(_KEY, ())
        if output == tensor.output_nr
        for hook in (reference() or {}).values()
    )


def tensor_hooks(node: Any) -> list[dict[int, Any]]:
    """Return the dictionaries of tensor hooks of a node that are not empty."""
    leaf = getattr(node, "variable", None)
    if leaf is not None and not isinstance(node, torch._C._FunctionBase):
        return [leaf._backward_hooks] if leaf._backward_hooks else []
    found = [reference() for _, reference in node.metadata.get(_KEY, ())]
    return [hooks for hooks in found if hooks]


def call_tensor_hooks(node: Node, gradient: Tensor | None) -> Tensor | None:
    """Call the tensor hooks of a node as the engine does, and return the resulting gradient."""
    for hooks in tensor_hooks(node):
        for hook in list(hooks.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
    return gradient


def call_hooks_of_output(node: Any, output: int) -> None:
    """Call the hooks of one tensor of a shared node with None, which the engine did not."""
    for index, reference in node.metadata.get(_KEY, ()):
        for hook in list((reference() or {}).values()) if index == output else ():
            original = hook.original if isinstance(hook, _SuppressibleHook) else hook
            if isinstance(original, _DefinedOnly) and original.original(None) is not None:
                raise RuntimeError("can't replace a None gradient with a non-None value")


def node_hooks(node: Node) -> list[dict[int, Any]]:
    """Return the dictionaries of pre-hooks and post-hooks of a node that are not empty."""
    found = []
    for register in (node.register_prehook, node.register_hook):
        # Torch shows the dictionary only in the handle of a registered hook.
        handle = register_own_hook(register, _do_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            found.append(hooks)
    return found


def _do_nothing(*_: Any) -> None:
    """Serve as a hook that is removed at once and never called."""


class _SuppressibleHook:
    """Replaces a hook, or the `apply` of a function, and does nothing in some graph tasks."""

    def __init__(self, original: Any, result: Any) -> None:
        self.original = original
        self._result = result  # returned instead
        # replaced under `_lock`, never changed: it is read without a lock
        self.suppressed_in: tuple[SuppressedHooks, ...] = ()

    def end_suppression(self, by: SuppressedHooks) -> None:
        self.suppressed_in = tuple(each for each in self.suppressed_in if each is not by)

    def __call__(self, *args: Any) -> Any:
        task = _current_task()
        if any(each.task == task for each in self.suppressed_in):
            return self._result
        return self.original(*args)


class SuppressedHooks:
    """A context manager: hooks and functions do nothing in one graph task of torch's engine."""

    def __init__(self, hooks: Iterable[dict[int, Any]], functions: Iterable[Any]) -> None:
        self.task: int | None = None
        self._hooks = list(hooks)
        self._functions = list(functions)

    def start(self) -> None:
        """Set the graph task to the one that the calling thread runs."""
        self.task = _current_task()

    def __enter__(self) -> None:
        if not self._hooks and not self._functions:
            return
        with _lock:
            for hooks in self._hooks:
                for key, hook in list(hooks.items()):
                    if not isinstance(hook, _SuppressibleHook):
                        hook = hooks[key] = _SuppressibleHook(hook, None)
                    hook.suppressed_in += (self,)
            for node in self._functions:
                substitute = node.__dict__.get("apply")
                if not isinstance(substitute, _SuppressibleHook):
                    undefined = (None,) * len(node.needs_input_grad)
                    substitute = node.apply = _SuppressibleHook(node.apply, undefined)
                substitute.suppressed_in += (self,)

    def __exit__(self, *_: object) -> None:
        if not self._hooks and not self._functions:
            return
        with _lock:
            for hooks in self._hooks:
                for key, hook in list(hooks.items()):
                    if isinstance(hook, _SuppressibleHook) and self in hook.suppressed_in:
                        hook.end_suppression(self)
                        if not hook.suppressed_in:
                            hooks[key] = hook.original
            for node in self._functions:
                substitute = node.__dict__["apply"]
                substitute.end_suppression(self)
                if not substitute.suppressed_in:
                    del node.apply
