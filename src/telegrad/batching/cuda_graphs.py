"""CUDA graphs of a function that takes batches: one for each form that its arguments have.

The first batch of a form runs as usual, which loads what is loaded on first use. The second is captured: the function
runs once more, and what it asks the GPU to do is recorded, on tensors that stay. From then on its code does not run:
arguments are copied to those tensors, the record is replayed, and the result is copied from where it was made. That is
worth it where starting kernels takes longer than the kernels do.

State: `_graphs`, by form; None for a form that was seen once. One batch of a queue runs at a time, so there is no lock.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from telegrad.batching.stacking import Signature, signature_of
from telegrad.messages.scope import current_scope

Call = Callable[..., Any]

_log = logging.getLogger(__name__)


class CudaGraphs:
    """Calls a function, by its graphs where it can."""

    def __init__(self, function: Call, name: str) -> None:
        self._function = function
        self._name = name
        self._graphs: dict[Signature, _CapturedGraph | None] = {}
        self._capture_failed = False

    def __call__(
        self, receiver: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """`function(*receiver, *args, **kwargs)`, where the receiver is the object whose method it is, if it is one."""
        leaves, _ = pytree.tree_flatten((args, kwargs))
        if (
            self._capture_failed
            or _may_need_gradients()
            or not all(_is_graph_input(leaf) for leaf in leaves)
        ):
            return self._function(*receiver, *args, **kwargs)
        signature = signature_of(tuple(args)), signature_of(kwargs)
        if signature not in self._graphs:
            self._graphs[signature] = None
            with torch.no_grad():
                return self._function(*receiver, *args, **kwargs)
        graph = self._graphs[signature] or self._capture(signature, receiver, args, kwargs)
        if graph is None:
            return self._function(*receiver, *args, **kwargs)
        return graph.replay(leaves)

    def _capture(
        self,
        signature: Signature,
        receiver: tuple[Any, ...],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> _CapturedGraph | None:
        try:
            graph = self._graphs[signature] = _CapturedGraph(
                functools.partial(self._function, *receiver), args, kwargs
            )
        # whatever the function does that cannot be recorded
        except (RuntimeError, TypeError) as error:
            self._capture_failed = True
            reason = str(error.__context__ or error).strip().partition("\n")[0]
            _log.warning(
                "%s cannot become a CUDA graph and runs as usual from now on: %s",
                self._name,
                reason,
            )
            return None
        return graph


def _may_need_gradients() -> bool:
    """Does the caller have a context whose backward pass may want what this call does, for weights if not for it?"""
    return torch.is_grad_enabled() and current_scope.get() is not None


def _is_graph_input(leaf: Any) -> bool:
    """May a graph take this instead of what was given when it was captured?"""
    return (
        isinstance(leaf, Tensor)
        and leaf.is_cuda
        and not (leaf.requires_grad and torch.is_grad_enabled())
    )


class _CapturedGraph:
    """One recording."""

    def __init__(self, function: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        with torch.inference_mode(False):  # or nobody else could write to them
            args, kwargs = pytree.tree_map(torch.clone, (args, kwargs))
        self._inputs, _ = pytree.tree_flatten((args, kwargs))
        self._device: torch.device = self._inputs[0].device
        self._graph = torch.cuda.CUDAGraph()
        current_stream, capture_stream = (
            torch.cuda.current_stream(self._device),
            _capture_stream(self._device),
        )
        pool = torch.cuda.graph_pool_handle()
        capture_stream.wait_stream(current_stream)
        with torch.no_grad(), torch.cuda.stream(capture_stream):
            self._graph.capture_begin(pool, "thread_local")  # other threads go on using the GPU
            try:
                try:
                    self._outputs = function(*args, **kwargs)
                finally:
                    self._graph.capture_end()
            except BaseException:
                _reset_after_failed_capture(self._device, pool)
                raise
        current_stream.wait_stream(capture_stream)
        if not all(
            isinstance(leaf, Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves(self._outputs)
        ):
            raise TypeError(
                "it returns other things than CUDA tensors, which would stay as they are now"
            )
        self._last_replay = current_stream.record_event()

    def replay(self, inputs: list[Tensor]) -> Any:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(
            self._last_replay
        )  # of the replay before, which may have been on another stream
        torch._foreach_copy_(self._inputs, inputs, non_blocking=True)
        self._graph.replay()
        result = pytree.tree_map(torch.clone, self._outputs)
        self._last_replay.record(stream)
        return result


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _reset_after_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """After a capture that failed torch's allocator and its random numbers would go on as if it were under way."""
    with contextlib.suppress(RuntimeError):  # if torch has ended it
        torch._C._cuda_endAllocateToPool(device.index, pool)  # type: ignore[attr-defined]
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
