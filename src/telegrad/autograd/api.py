"""The functions of `torch.distributed.autograd`.

Importing this module registers the gradient tracker and the scope opener of autograd with the
layers below. It has no other state.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from telegrad.agent import Agent, runtime_of
from telegrad.autograd import engine
from telegrad.autograd.context_tracker import ContextTracker
from telegrad.autograd.registry import ContextRegistry, find_context, open_context
from telegrad.autograd.worker_context import CONTEXT_ID_BITS, Context, current_context
from telegrad.errors import UsageError
from telegrad.messages import call_scope
from telegrad.messages.call_scope import current_scope
from telegrad.runtime import active_runtime
from telegrad.wire import gradient_tracking

__all__ = ["backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Return True: distributed autograd is always available."""
    return True


class context:  # as torch spells it
    """Record the calls made in this block, and the calls that these make, for a backward pass.

    Entering the block returns the id that `backward`, `get_gradients` and
    `DistributedOptimizer.step` take. Gradients are stored in the context, not in `.grad`. They are
    released with it, on all workers.

    A thread started in this block does not inherit the context: use
    `contextvars.copy_context().run` there. Autocast, grad mode and default dtype of the caller do
    not travel with calls.
    """

    def __init__(self, *, agent: Agent | None = None) -> None:
        self._agent = agent
        self._context: Context | None = None

    def __enter__(self) -> int:
        self._context = _start(self._agent)
        return self._context.context_id

    def __exit__(self, *_: object) -> None:
        if self._context is not None:
            _end(self._context)
            self._context = None


def _start(agent: Agent | None) -> Context:
    """Start a context and make it the current one of this thread."""
    runtime = runtime_of(agent)
    if runtime is None:
        raise UsageError(
            "RPC has not been initialized: call telegrad.rpc.init_rpc first, or pass agent="
        )
    if current_context() is not None:
        raise UsageError(
            "Already have an autograd context id for this thread; contexts do not nest. Leave the "
            "block of the current context before you enter another"
        )
    context = ContextRegistry.of(runtime).start()
    current_scope.set(context)
    return context


def _end(context: Context) -> None:
    """End a context on all workers. It is no longer the current one of this thread."""
    if current_scope.get() is context:
        current_scope.set(None)
    ContextRegistry.of(context.agent).end(context.context_id)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of the sum of `roots` for every leaf on every worker.

    The roots are scalars. The gradients are added to those in the context. Return when all workers
    are done. With `retain_graph`, the same graph can be used again.
    """
    if not isinstance(context_id, int) or not isinstance(roots, list | tuple):
        raise TypeError(
            "backward(): incompatible function arguments: it takes the id of a context and a list "
            f"of tensors, not {type(context_id).__name__} and {type(roots).__name__}"
        )
    found = find_context(context_id)
    _check_roots(roots)
    registry = ContextRegistry.of(found.agent)
    registry.add_running_pass(1)
    try:
        engine.run(found, next(registry.pass_ids), roots, retain_graph)
    finally:
        registry.add_running_pass(-1)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients of a context on this worker, by leaf."""
    found = find_context(context_id)
    with found.lock:
        return dict(found.gradients)


def _check_roots(roots: Sequence[Tensor]) -> None:
    """Raise if a pass cannot start with these tensors."""
    if not roots:
        raise UsageError("No tensors provided for gradient computation.")
    for index, root in enumerate(roots):
        if not isinstance(root, Tensor):
            raise TypeError(
                f"incompatible function arguments: root {index} is a {type(root).__name__}, not a "
                "tensor"
            )
        if not root.requires_grad:
            raise UsageError(
                f"requires_grad not set on root {index}: it does not depend on a tensor that "
                "requires a gradient"
            )
        if root.numel() != 1:
            raise UsageError(
                f"root {index} of shape {tuple(root.shape)} is not a scalar, all roots need to be "
                "scalar"
            )
        if root.is_complex():
            raise UsageError(
                f"root {index} is complex ({root.dtype}); a loss must be a real number"
            )
        if root.grad_fn is None:
            raise UsageError(
                f"root {index} does not have a valid gradient function: it is a leaf and not the "
                "result of an operation"
            )


# Private functions of torch.distributed.autograd that programs and torch's tests use.


def _new_context() -> Context:
    """Start a context, which `_release_context` ends. Raise if this thread has one."""
    return _start(None)


def _release_context(context_id: int) -> None:
    """End a context on all workers. Raise if this worker does not have it."""
    _end(find_context(context_id))


def _get_debug_info() -> dict[str, int]:
    """Return the numbers of backward passes and of contexts on this worker."""
    agent = active_runtime()
    if agent is None:
        return {"num_current_backward_passes": 0, "num_autograd_contexts": 0}
    registry = ContextRegistry.of(agent)
    return {
        "num_current_backward_passes": registry.count_passes(),
        "num_autograd_contexts": registry.statistics()["autograd_contexts"],
    }


def _current_context() -> Context:
    """Return the context of this thread. Raise if it has none."""
    found = current_context()
    if found is None:
        raise UsageError(
            "Current thread doesn't have a valid autograd context. Wrap your code in "
            "autograd.context()"
        )
    return found


def _retrieve_context(context_id: int) -> Context:
    """Return a context. Raise if this worker does not have it."""
    return find_context(context_id)


def _is_valid_context(context_id: int) -> None:
    """Raise if this worker does not have a context."""
    find_context(context_id)


def _get_max_id() -> int:
    """Return the largest id that a context of this worker can have."""
    agent = active_runtime()
    rank = 0 if agent is None else agent.local_member.rank
    return (rank << CONTEXT_ID_BITS) | ((1 << CONTEXT_ID_BITS) - 1)


gradient_tracking.set_gradient_tracker(ContextTracker())
call_scope.register_opener(open_context)
