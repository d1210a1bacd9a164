"""`Context`: one worker's part of a distributed autograd context. `ContextRegistry`: all those of one agent.

A context starts with `autograd.context()` on one worker and follows every call made under it to others, where a part of
it appears when the first such call arrives. Each part notes the tensors that need gradients as they leave (`sends`) and
arrive (`receives`); `engine` walks these backwards. When the context ends where it began, each part tells those whom
its calls went to (with the next call there, or a moment later), and forgets. A part whose beginning is gone finds out
by asking (`audit`), so none outlives it long.

State: of a context, `sends`, `receives`, `peers`, `callees` and `gradients` under its lock until `released` is set,
which clears them; `broken` is set once. Of an agent, `_open`, `_ended` (numbers of contexts that ended here), `_untold`
and `_tells_soon` under `_lock`. No lock is held while another worker is called.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from telegrad.autograd.gradients import add_gradients
from telegrad.autograd.send_recv import (
    GradientCapture,
    SentTensor,
    TensorOrigin,
    attach_receive_node,
)
from telegrad.errors import PeerLost
from telegrad.messages.packing import MessageContext
from telegrad.messages.scope import current_scope

if TYPE_CHECKING:
    from telegrad.autograd.registry import ContextRegistry


CONTEXT_ID_BITS = (
    48  # of a context's number; above them stands the rank of the worker where it began
)
MAX_ENDED_PER_CALL = 7  # ended contexts that a call tells of
_NUMBER = 8  # bytes
_NUMBERS = [struct.Struct(f"<{count + 1}Q") for count in range(MAX_ENDED_PER_CALL + 1)]


class Context:
    """One worker's part of a context."""

    def __init__(self, number: int, contexts: ContextRegistry) -> None:
        self.number = number
        self.agent = contexts.agent
        self.tensor_ids = contexts.tensor_ids
        self.contexts = contexts
        self.lock = threading.Lock()
        self.sends: dict[int, SentTensor] = {}
        self.receives: dict[Node, TensorOrigin] = {}
        self.captures: dict[Node, GradientCapture] = {}
        self.peers: dict[str, str] = {}  # incarnation to name: who tensors went to or came from
        self.callees: dict[str, str] = {}  # who calls under this context went to
        self.gradients: dict[Tensor, Tensor] = {}
        self.passes: dict[tuple[str, int], Any] = {}  # see `engine`
        self.broken: PeerLost | None = None
        self.released = False

    def __repr__(self) -> str:
        state = "released" if self.released else "broken" if self.broken else "open"
        return (
            f"<Context {self.number} on {self.agent.name!r}: {state}, {len(self.sends)} sends, "
            f"{len(self.receives)} receives, {len(self.gradients)} gradients>"
        )

    @property
    def rank(self) -> int:
        """The rank of the worker where it began."""
        return self.number >> CONTEXT_ID_BITS

    def follow(self, to: MessageContext) -> bytes:
        """A call takes the context to a peer, and the numbers of those that have ended."""
        if not torch.is_grad_enabled() or not self.add_callee(to.peer, to.incarnation):
            return b""
        ended = self.contexts.take_ended(to.incarnation) if self.contexts.owes_news else ()
        return _NUMBERS[len(ended)].pack(self.number, *ended)

    def add_callee(self, name: str, incarnation: str) -> bool:
        """Somebody has a part of this, and is to hear of its end. False: it has ended."""
        if not self.released:
            self.callees[incarnation] = name
        return not self.released

    def run(self, call: Callable[[], None]) -> None:
        """A call that came with the context runs here."""
        versions = self.contexts.versions
        if not versions.active:
            call()
            return
        with versions.call():
            call()

    def send(self, tensors: Iterable[tuple[int, Tensor]], to: MessageContext) -> None:
        """Note tensors that leave, by ticket."""
        with self.lock:
            if not self.released:
                peer = to.incarnation
                for tensor_id, tensor in tensors:
                    self.sends[tensor_id] = SentTensor(tensor, peer)
                self.peers[peer] = to.peer

    def receive(
        self, data: Sequence[Tensor], tensor_ids: Sequence[int], sender: MessageContext
    ) -> list[Tensor]:
        """Return tensors that arrived as outputs of nodes, and note these."""
        captures = [GradientCapture() for _ in tensor_ids]
        if torch.is_grad_enabled():
            tensors = list(map(attach_receive_node, data, captures))
        else:
            with torch.enable_grad():
                tensors = list(map(attach_receive_node, data, captures))
        peer = sender.incarnation
        with self.lock:
            if not self.released:
                for tensor_id, tensor, capture in zip(tensor_ids, tensors, captures, strict=True):
                    node = tensor.grad_fn
                    assert node is not None
                    self.receives[node] = peer, tensor_id
                    self.captures[node] = capture
                self.peers[peer] = sender.peer
        return tensors

    def add(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Further gradients of leaves on this worker."""
        with self.lock:
            for leaf, gradient in gradients:
                known = self.gradients.setdefault(leaf, gradient)
                if known is not gradient:
                    self.gradients[leaf] = add_gradients(known, gradient)

    def replace(self, leaf: Tensor, gradient: Tensor) -> None:
        """Another gradient in place of what a leaf has."""
        with self.lock:
            self.gradients[leaf] = gradient

    def check(self) -> None:
        """Raise if a gradient could be missing."""
        if self.broken is not None:
            raise PeerLost(
                str(self.broken), peer=self.broken.peer, last_words=self.broken.last_words
            )

    def lost(self, name: str, incarnation: str) -> None:
        if incarnation in self.peers and self.broken is None:
            self.broken = PeerLost(
                f"worker {name!r} was lost, and gradients of autograd context {self.number} went through it. "
                "Start a new context",
                peer=name,
            )

    # What torch.distributed.autograd.DistAutogradContext offers

    def _context_id(self) -> int:
        return self.number

    def _known_worker_ids(self) -> set[int]:
        """Return the ranks of the workers that calls under this context went to."""
        return {self.agent.get_worker_info(name).id for name in list(self.callees.values())}

    def _send_functions(self) -> dict[int, SentTensor]:
        """Return the tensors that left, by an id that the receiver has for them, too."""
        with self.lock:
            return {
                _message_id(self.agent.local_member.rank, tensor_id): send
                for tensor_id, send in self.sends.items()
            }

    def _recv_functions(self) -> dict[int, Node]:
        """Return the autograd nodes of the tensors that arrived, by an id that the sender has for them, too."""
        with self.lock:
            received = [
                (node, self.peers[sender], tensor_id)
                for node, (sender, tensor_id) in self.receives.items()
            ]
        return {
            _message_id(self.agent.get_worker_info(name).id, tensor_id): node
            for node, name, tensor_id in received
        }

    def release(self) -> None:
        with self.lock:
            if self.released:
                return
            self.released = True
            callees, self.callees = self.callees, {}
            kept = self.sends, self.receives, self.captures, self.gradients, self.passes
            self.sends, self.receives, self.captures, self.gradients, self.passes = (
                {},
                {},
                {},
                {},
                {},
            )
        del kept  # graphs, which may take long to take down: not under the lock
        self.contexts.tell_ended(self.number, callees)


def _message_id(sender_rank: int, tensor_id: int) -> int:
    return (max(sender_rank, 0) << CONTEXT_ID_BITS) | tensor_id


def decode_ids(encoded: bytes) -> tuple[int, ...]:
    """Return what `Context.follow` encoded: the id of the context, and those of ended ones."""
    return _NUMBERS[len(encoded) // _NUMBER - 1].unpack(encoded)


def current_context() -> Context | None:
    """The context that this thread runs under."""
    context = current_scope.get()
    return context if isinstance(context, Context) else None
