"""CUDA graphs of a batched function: one for each signature of its arguments.

The first batch of a signature runs as usual, which loads what is loaded on first use. The second is
captured: the function runs once more while its GPU operations are recorded on persistent tensors.
From then on the code of the function does not run: the arguments are copied to these tensors, the
graph is replayed, and the result is copied out. This is faster if launching the kernels takes
longer than running them.

State: `_graphs` by signature; None for a signature that was seen once. There is no lock, because a
queue runs one batch at a time.
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

from telegrad.batching.calls import Signature, signature_of
from telegrad.messages.call_scope import current_scope

Call = Callable[..., Any]

_log = logging.getLogger(__name__)


class CudaGraphs:
    """Call a function, with a captured graph where possible."""

    def __init__(self, function: Call, name: str) -> None:
        self._function = function
        self._name = name
        self._graphs: dict[Signature, _CapturedGraph | None] = {}
        self._capture_failed = False

    def __call__(
        self, receiver: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return `function(*receiver, *args, **kwargs)`.

        `receiver` contains the object if the function is a method; it is empty otherwise.
        """
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
        # The function did something that cannot be captured.
        except (RuntimeError, TypeError) as error:
            self._capture_failed = True
            reason = str(error.__context__ or error).strip().partition("\n")[0]
            _log.warning(
                "%s cannot be captured as a CUDA graph and runs without one from now on: %s",
                self._name,
                reason,
            )
            return None
        return graph


def _may_need_gradients() -> bool:
    """Return whether a distributed autograd context may need the graph of this call.

    It may need the gradients of weights even if no argument requires a gradient.
    """
    return torch.is_grad_enabled() and current_scope.get() is not None


def _is_graph_input(leaf: Any) -> bool:
    """Return whether an argument can be copied to the input of a graph."""
    return (
        isinstance(leaf, Tensor)
        and leaf.is_cuda
        and not (leaf.requires_grad and torch.is_grad_enabled())
    )


class _CapturedGraph:
    """A captured graph with its input and output tensors."""

    def __init__(self, function: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        with torch.inference_mode(False):  # inference tensors could not be written later
            args, kwargs = pytree.tree_map(torch.clone, (args, kwargs))
        self._inputs, _ = pytree.tree_flatten((args, kwargs))
        self._device: torch.device = self._inputs[0].device
        self._graph = torch.cuda.CUDAGraph()
        current_stream = torch.cuda.current_stream(self._device)
        capture_stream = _capture_stream(self._device)
        pool = torch.cuda.graph_pool_handle()
        capture_stream.wait_stream(current_stream)
        with torch.no_grad(), torch.cuda.stream(capture_stream):
            self._graph.capture_begin(pool, "thread_local")  # other threads may use the GPU
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
                "it returns other things than CUDA tensors, which a replay would not update"
            )
        self._last_replay = current_stream.record_event()

    def replay(self, inputs: list[Tensor]) -> Any:
        """Return the result of the function for these leaves of its arguments."""
        stream = torch.cuda.current_stream(self._device)
        # The previous replay may have been on another stream.
        stream.wait_event(self._last_replay)
        torch._foreach_copy_(self._inputs, inputs, non_blocking=True)
        self._graph.replay()
        result = pytree.tree_map(torch.clone, self._outputs)
        self._last_replay.record(stream)
        return result


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which graphs of a device are captured."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _reset_after_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Make torch's allocator and random generator leave the capture mode."""
    with contextlib.suppress(RuntimeError):  # torch may have done it already
        torch._C._cuda_endAllocateToPool(device.index, pool)  # type: ignore[attr-defined]
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
