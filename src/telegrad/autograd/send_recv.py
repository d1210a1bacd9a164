"""The points where the graph of one worker continues on another: sent and received tensors."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd import hooks
from telegrad.errors import UsageError

if TYPE_CHECKING:
    pass


TensorOrigin = tuple[str, int]  # the incarnation that sent a tensor, and the ticket it sent it with


class SentTensor:
    """A tensor that left: where its gradient, once it is back, enters the local graph."""

    __slots__ = ("_edge", "_preceding_node", "device", "leaf", "peer")

    def __init__(self, tensor: Tensor, peer: str) -> None:
        self.peer = peer
        self.device = tensor.device
        # A view can be a leaf too, but asking for its `grad_fn` takes a lock: see `gradient_edge`.
        is_leaf = not tensor._is_view() and tensor.grad_fn is None
        self.leaf: Tensor | None = tensor if is_leaf else None
        # Now, since an operation in place would change where the gradient goes.
        self._preceding_node = None if is_leaf else _new_preceding_node(tensor)
        self._edge: GradientEdge | None = None

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]:
        """The node that its gradient goes to, as autograd nodes name what follows them."""
        edge = self.edge()
        return ((edge.node, edge.output_nr),)

    def edge(self) -> GradientEdge:
        if self._edge is None:
            node, output = self.preceding_node().next_functions[0]
            assert node is not None
            self._edge = GradientEdge(node, output)
        return self._edge

    def preceding_node(self) -> Node:
        """Return a node of torch's own that leads to the edge."""
        if self._preceding_node is None:
            assert self.leaf is not None
            self._preceding_node = _new_preceding_node(self.leaf)
        return self._preceding_node


class GradientCapture:
    """Takes the gradient of an arrived tensor when the engine of torch runs into it with `is_active` on."""

    __slots__ = ("_tensor", "gradient", "is_active")

    def __init__(self) -> None:
        self.is_active = False
        self.gradient: Tensor | None = None
        self._tensor: weakref.ref[Tensor] | None = None

    def belongs_to(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    def is_unobserved(self, node: Node) -> bool:
        """Return True if no hook would see the gradient, nor would it be retained."""
        if self._tensor is None or hooks.tensor_hooks(node):
            return False
        tensor = self._tensor()
        return tensor is None or not tensor.retains_grad


class ReceivedTensor(torch.autograd.Function):
    """The node of a tensor that came from another worker."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, tensor: tuple[Tensor], capture: GradientCapture) -> Tensor:
        ctx.capture = capture
        data = tensor[0]
        # operations in place are not allowed on views
        return data.detach() if data._is_view() else data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        if not ctx.capture.is_active:
            raise UsageError(
                "this graph goes on on another worker: call telegrad.autograd.backward(context_id, [loss]) inside the "
                "context instead of loss.backward()"
            )
        ctx.capture.gradient = gradients[0]
        return None, None, None


DUMMY_LEAF = torch.empty(0, requires_grad=True)  # makes torch record `ReceivedTensor`


def attach_receive_node(data: Tensor, capture: GradientCapture) -> Tensor:
    tensor: Tensor = ReceivedTensor.apply(DUMMY_LEAF, (data,), capture)  # type: ignore[no-untyped-call]
    capture.belongs_to(tensor)
    return tensor


def gradient_edge(tensor: Tensor) -> tuple[Node, int]:
    """Where the gradient of a tensor goes; if it is a leaf, the node where it ends.

    An operation that runs without the GIL finds it. A thread that makes the node of a leaf holds a lock of the leaf and
    then needs the GIL, so whoever waits for that lock with the GIL blocks the whole process: `Function.apply` does, and
    if the leaf is a view, `grad_fn` and `is_leaf`.
    """
    node, output = _new_preceding_node(tensor).next_functions[0]
    assert node is not None
    return node, output


def _new_preceding_node(tensor: Tensor) -> Node:
    """A new node of torch's own that leads to where the gradient of a tensor goes."""
    if type(tensor) is Tensor and torch.is_grad_enabled() and tensor.layout is torch.strided:
        node = tensor.view_as(tensor).grad_fn
    else:
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            preceding = tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()
            node = preceding.grad_fn
    assert node is not None
    return node


def is_non_leaf(tensor: Tensor) -> bool:
    """Return True if a tensor that requires a gradient is no leaf, without taking a lock: see `gradient_edge`."""
    if tensor._is_view():
        return type(gradient_edge(tensor)[0]) is not type(accumulator(DUMMY_LEAF))
    return tensor.grad_fn is not None


def accumulator(leaf: Tensor) -> Node:
    """The node where gradients of a leaf end."""
    return gradient_edge(leaf)[0]


def leaf_of(accumulator: Any) -> Tensor:
    """Return the leaf that an `AccumulateGrad` node belongs to."""
    leaf: Tensor = accumulator.variable
    return leaf


ACCUMULATE_GRAD = type(
    accumulator(DUMMY_LEAF)
)  # the type of the node where gradients of a leaf end
RECEIVED: Any = ReceivedTensor._backward_cls  # the type of the node of a received tensor
