"""The points where the autograd graph of one worker continues on another.

`SentTensor` is the point where the gradient of a sent tensor enters the local graph again.
`ReceivedTensor` is the node of a received tensor, where the local graph ends.

Locks: a thread that creates the `AccumulateGrad` node of a leaf holds a lock of the leaf while it
waits for the GIL. A thread that waits for that lock and holds the GIL would block the whole
process. `Function.apply` does that, and for leaves that are views, so do `grad_fn` and `is_leaf`.
Therefore functions in this module find nodes through an operation that releases the GIL.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd import hooks
from telegrad.errors import UsageError

TensorOrigin = tuple[str, int]  # the incarnation of the sender, and the id of the tensor there


class SentTensor:
    """A tensor that was sent to a peer, and the edge where its gradient enters the local graph."""

    __slots__ = ("_edge", "_preceding_node", "device", "leaf", "peer")

    def __init__(self, tensor: Tensor, peer: str) -> None:
        self.peer = peer
        self.device = tensor.device
        # A view can be a leaf too, but reading its `grad_fn` takes a lock: see above.
        is_leaf = not tensor._is_view() and tensor.grad_fn is None
        self.leaf: Tensor | None = tensor if is_leaf else None
        # Created now, since an operation in place would change where the gradient goes.
        self._preceding_node = None if is_leaf else _new_preceding_node(tensor)
        self._edge: GradientEdge | None = None

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]:
        """The node that the gradient goes to, in the form of `Node.next_functions`."""
        edge = self.edge()
        return ((edge.node, edge.output_nr),)

    def edge(self) -> GradientEdge:
        """Return the edge where the gradient enters the local graph."""
        if self._edge is None:
            node, output = self.preceding_node().next_functions[0]
            assert node is not None
            self._edge = GradientEdge(node, output)
        return self._edge

    def preceding_node(self) -> Node:
        """Return a node of a torch operation whose only edge is `edge()`."""
        if self._preceding_node is None:
            assert self.leaf is not None
            self._preceding_node = _new_preceding_node(self.leaf)
        return self._preceding_node


class GradientCapture:
    """Stores the gradient of a received tensor when torch's engine reaches its node.

    `is_active` is set during runs in which the engine returns no gradients, since those of leaves
    go to `.grad`. Otherwise the node runs only in the user's own `loss.backward()`.
    """

    __slots__ = ("_tensor", "gradient", "is_active")

    def __init__(self) -> None:
        self.is_active = False
        self.gradient: Tensor | None = None
        self._tensor: weakref.ref[Tensor] | None = None

    def set_tensor(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    def is_unobserved(self, node: Node) -> bool:
        """Return True if no hook sees the gradient and the tensor does not retain it."""
        if self._tensor is None or hooks.tensor_hooks(node):
            return False
        tensor = self._tensor()
        return tensor is None or not tensor.retains_grad


class ReceivedTensor(torch.autograd.Function):
    """The node of a tensor that was received from another worker."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, tensor: tuple[Tensor], capture: GradientCapture) -> Tensor:
        ctx.capture = capture
        data = tensor[0]
        # Torch refuses operations in place on views that a function returns.
        return data.detach() if data._is_view() else data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        if not ctx.capture.is_active:
            raise UsageError(
                "this graph continues on another worker: call telegrad.autograd.backward("
                "context_id, [loss]) inside the context instead of loss.backward()"
            )
        ctx.capture.gradient = gradients[0]
        return None, None, None


# An input that requires a gradient, so that torch records `ReceivedTensor`.
DUMMY_LEAF = torch.empty(0, requires_grad=True)


def attach_receive_node(data: Tensor, capture: GradientCapture) -> Tensor:
    """Return received data as the output of a new `ReceivedTensor` node."""
    tensor: Tensor = ReceivedTensor.apply(DUMMY_LEAF, (data,), capture)  # type: ignore[no-untyped-call]
    capture.set_tensor(tensor)
    return tensor


def gradient_edge(tensor: Tensor) -> tuple[Node, int]:
    """Return the node and input that the gradient of a tensor goes to, without taking a lock."""
    node, output = _new_preceding_node(tensor).next_functions[0]
    assert node is not None
    return node, output


def _new_preceding_node(tensor: Tensor) -> Node:
    """Return a new node of a torch operation that passes its gradient on to that of a tensor."""
    if type(tensor) is Tensor and torch.is_grad_enabled() and tensor.layout is torch.strided:
        node = tensor.view_as(tensor).grad_fn
    else:
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            copy = tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()
            node = copy.grad_fn
    assert node is not None
    return node


def is_non_leaf(tensor: Tensor) -> bool:
    """Return True if a tensor that requires a gradient is not a leaf, without taking a lock."""
    if tensor._is_view():
        return type(gradient_edge(tensor)[0]) is not ACCUMULATE_GRAD
    return tensor.grad_fn is not None


def accumulate_grad_node(leaf: Tensor) -> Node:
    """Return the `AccumulateGrad` node of a leaf."""
    return gradient_edge(leaf)[0]


def leaf_of(accumulate_grad: Any) -> Tensor:
    """Return the leaf that an `AccumulateGrad` node belongs to."""
    leaf: Tensor = accumulate_grad.variable
    return leaf


ACCUMULATE_GRAD = type(accumulate_grad_node(DUMMY_LEAF))  # the type of `AccumulateGrad` nodes
RECEIVED: Any = ReceivedTensor._backward_cls  # the type of the nodes of received tensors
