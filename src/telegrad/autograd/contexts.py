"""`Context`: one worker's part of a distributed autograd context. `Contexts`: all those of one agent.

A context starts with `autograd.context()` on one worker and follows every call made under it to others, where a part of
it appears when the first such call arrives. Each part notes the tensors that need gradients as they leave (`sends`) and
arrive (`receives`); `engine` walks these backwards. When the context ends where it began, each part tells those whom
its calls went to (with the next call there, or a moment later), and forgets. A part whose beginning is gone finds out
by asking (`audit`), so none outlives it long.

State: of a context, `sends`, `receives`, `peers`, `followers` and `gradients` under its lock until `released` is set,
which clears them; `broken` is set once. Of an agent, `_open`, `_ended` (numbers of contexts that ended here), `_untold`
and `_tells_soon` under `_lock`. No lock is held while another worker is called.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd import hooks
from telegrad.autograd.shared_parameters import SharedParameters
from telegrad.errors import PeerLost, TelegradError, UsageError
from telegrad.group.membership import Member
from telegrad.messages import scope
from telegrad.messages.packing import MessageContext, current_message, message_resource
from telegrad.messages.scope import current_scope
from telegrad.runtime import active_runtime
from telegrad.server.functions import internal
from telegrad.wire import tensors

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

NUMBER_BITS = 48  # of a context's number; above them stands the rank of the worker where it began
_REMEMBERED = 10_000
_AUDIT_EVERY = 20.0
_PATIENCE = 30.0
_TELL_WITHIN = 0.01
_OUTSIDE = -1  # in place of a ticket: computed from other tensors, but outside of a context
_AT_ONCE = 7  # ended contexts that a call tells of
_NUMBER = 8  # bytes
_NUMBERS = [struct.Struct(f"<{count + 1}Q") for count in range(_AT_ONCE + 1)]

Receive = tuple[str, int]  # the incarnation that sent a tensor, and the ticket it sent it with

_log = logging.getLogger(__name__)
_begun: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()


class SentTensor:
    """A tensor that left: where its gradient, once it is back, enters the local graph."""

    __slots__ = ("_behind", "_edge", "device", "leaf", "peer")

    def __init__(self, tensor: Tensor, peer: str) -> None:
        self.peer = peer
        self.device = tensor.device
        # A view can be a leaf too, but asking for its `grad_fn` takes a lock: see `_edge_of`.
        is_leaf = not tensor._is_view() and tensor.grad_fn is None
        self.leaf: Tensor | None = tensor if is_leaf else None
        # Now, since an operation in place would change where the gradient goes.
        self._behind = None if is_leaf else _node_behind(tensor)
        self._edge: GradientEdge | None = None

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]:
        """The node that its gradient goes to, as autograd nodes name what follows them."""
        edge = self.edge()
        return ((edge.node, edge.output_nr),)

    def edge(self) -> GradientEdge:
        if self._edge is None:
            node, output = self.node_behind().next_functions[0]
            assert node is not None
            self._edge = GradientEdge(node, output)
        return self._edge

    def node_behind(self) -> Node:
        """Return a node of torch's own that leads to the edge."""
        if self._behind is None:
            assert self.leaf is not None
            self._behind = _node_behind(self.leaf)
        return self._behind


class GradientSlot:
    """Takes the gradient of an arrived tensor when the engine of torch runs into it with `catching` on."""

    __slots__ = ("_tensor", "catching", "gradient")

    def __init__(self) -> None:
        self.catching = False
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
    def forward(ctx: Any, anchor: Tensor, tensor: tuple[Tensor], slot: GradientSlot) -> Tensor:
        ctx.slot = slot
        data = tensor[0]
        # operations in place are not allowed on views
        return data.detach() if data._is_view() else data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        if not ctx.slot.catching:
            raise UsageError(
                "this graph goes on on another worker: call telegrad.autograd.backward(context_id, [loss]) inside the "
                "context instead of loss.backward()"
            )
        ctx.slot.gradient = gradients[0]
        return None, None, None


ANCHOR = torch.empty(0, requires_grad=True)  # makes torch record `ReceivedTensor`


def _arrive(data: Tensor, slot: GradientSlot) -> Tensor:
    tensor: Tensor = ReceivedTensor.apply(ANCHOR, (data,), slot)  # type: ignore[no-untyped-call]
    slot.belongs_to(tensor)
    return tensor


def _edge_of(tensor: Tensor) -> tuple[Node, int]:
    """Where the gradient of a tensor goes; if it is a leaf, the node where it ends.

    An operation that runs without the GIL finds it. A thread that makes the node of a leaf holds a lock of the leaf and
    then needs the GIL, so whoever waits for that lock with the GIL blocks the whole process: `Function.apply` does, and
    if the leaf is a view, `grad_fn` and `is_leaf`.
    """
    node, output = _node_behind(tensor).next_functions[0]
    assert node is not None
    return node, output


def _node_behind(tensor: Tensor) -> Node:
    """A new node of torch's own that leads to where the gradient of a tensor goes."""
    if type(tensor) is Tensor and torch.is_grad_enabled() and tensor.layout is torch.strided:
        node = tensor.view_as(tensor).grad_fn
    else:
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            behind = tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()
            node = behind.grad_fn
    assert node is not None
    return node


def _is_computed(tensor: Tensor) -> bool:
    """Return True if a tensor that requires a gradient is no leaf, without taking a lock: see `_edge_of`."""
    if tensor._is_view():
        return type(_edge_of(tensor)[0]) is not type(accumulator(ANCHOR))
    return tensor.grad_fn is not None


def accumulator(leaf: Tensor) -> Node:
    """The node where gradients of a leaf end."""
    return _edge_of(leaf)[0]


class Context:
    """One worker's part of a context."""

    def __init__(self, number: int, contexts: Contexts) -> None:
        self.number = number
        self.agent = contexts.agent
        self.tickets = contexts.tickets
        self.contexts = contexts
        self.lock = threading.Lock()
        self.sends: dict[int, SentTensor] = {}
        self.receives: dict[Node, Receive] = {}
        self.slots: dict[Node, GradientSlot] = {}
        self.peers: dict[str, str] = {}  # incarnation to name: who tensors went to or came from
        self.followers: dict[str, str] = {}  # who calls under this context went to
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
        return self.number >> NUMBER_BITS

    def follow(self, to: MessageContext) -> bytes:
        """A call takes the context to a peer, and the numbers of those that have ended."""
        if not torch.is_grad_enabled() or not self.followed_by(to.peer, to.incarnation):
            return b""
        ended = self.contexts.take_ended(to.incarnation) if self.contexts.owes_news else ()
        return _NUMBERS[len(ended)].pack(self.number, *ended)

    def followed_by(self, name: str, incarnation: str) -> bool:
        """Somebody has a part of this, and is to hear of its end. False: it has ended."""
        if not self.released:
            self.followers[incarnation] = name
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
                for ticket, tensor in tensors:
                    self.sends[ticket] = SentTensor(tensor, peer)
                self.peers[peer] = to.peer

    def receive(
        self, data: Sequence[Tensor], tickets: Sequence[int], sender: MessageContext
    ) -> list[Tensor]:
        """Return tensors that arrived as outputs of nodes, and note these."""
        slots = [GradientSlot() for _ in tickets]
        if torch.is_grad_enabled():
            tensors = list(map(_arrive, data, slots))
        else:
            with torch.enable_grad():
                tensors = list(map(_arrive, data, slots))
        peer = sender.incarnation
        with self.lock:
            if not self.released:
                for ticket, tensor, slot in zip(tickets, tensors, slots, strict=True):
                    node = tensor.grad_fn
                    assert node is not None
                    self.receives[node] = peer, ticket
                    self.slots[node] = slot
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
        return {self.agent.get_worker_info(name).id for name in list(self.followers.values())}

    def _send_functions(self) -> dict[int, SentTensor]:
        """Return the tensors that left, by an id that the receiver has for them, too."""
        with self.lock:
            return {
                _message_id(self.agent.local_member.rank, ticket): send
                for ticket, send in self.sends.items()
            }

    def _recv_functions(self) -> dict[int, Node]:
        """Return the autograd nodes of the tensors that arrived, by an id that the sender has for them, too."""
        with self.lock:
            received = [
                (node, self.peers[sender], ticket)
                for node, (sender, ticket) in self.receives.items()
            ]
        return {
            _message_id(self.agent.get_worker_info(name).id, ticket): node
            for node, name, ticket in received
        }

    def release(self) -> None:
        with self.lock:
            if self.released:
                return
            self.released = True
            followers, self.followers = self.followers, {}
            kept = self.sends, self.receives, self.slots, self.gradients, self.passes
            self.sends, self.receives, self.slots, self.gradients, self.passes = {}, {}, {}, {}, {}
        del kept  # graphs, which may take long to take down: not under the lock
        self.contexts.tell_ended(self.number, followers)


def _message_id(sender_rank: int, ticket: int) -> int:
    return (max(sender_rank, 0) << NUMBER_BITS) | ticket


def add_gradients(a: Tensor, b: Tensor) -> Tensor:
    return b + a if a.is_sparse and not b.is_sparse else a + b


class Contexts:
    """The contexts of one agent."""

    def __init__(self, agent: AgentRuntime) -> None:
        self.agent = agent
        self.tickets = itertools.count(1)
        self.passes = itertools.count(1)
        self._numbers = itertools.count(secrets.randbits(NUMBER_BITS - 1))
        self.versions = SharedParameters()
        self._open: dict[int, Context] = {}
        self._ended: dict[int, None] = {}
        # by incarnation: name, numbers it has not been told ended
        self._untold: dict[str, tuple[str, list[int]]] = {}
        self._tells_soon = False  # a timer runs until all are told
        self._lock = threading.Lock()
        self._passes_begun_here = 0
        hooks.record_hooks()
        agent.on_loss(self._lost)
        agent.add_statistics(self.statistics)
        agent.clock.every(_AUDIT_EVERY, self._tick)

    @classmethod
    def of(cls, agent: AgentRuntime) -> Contexts:
        return agent.service(cls)

    def __repr__(self) -> str:
        return f"<Contexts of {self.agent.name!r}: {list(self._open)}>"

    def begin(self) -> Context:
        """A new context, which begins here."""
        number = (max(self.agent.local_member.rank, 0) << NUMBER_BITS) | (
            next(self._numbers) & ((1 << NUMBER_BITS) - 1)
        )
        context = Context(number, self)
        with self._lock:
            self._open[number] = context
        _begun[number] = context
        return context

    def open(self, number: int) -> Context | None:
        """This worker's part of a context that a call brought; None if it has ended here."""
        context = self._open.get(number)
        if context is None:
            with self._lock:
                if number in self._ended:
                    return None
                context = self._open.setdefault(number, Context(number, self))
        return context

    def find(self, number: int) -> Context | None:
        return self._open.get(number)

    def has_ended(self, number: int) -> bool:
        """Was a part of this context here? As far back as is remembered."""
        return number in self._ended

    def end(self, number: int) -> None:
        """Forget a context, here and wherever it went from here."""
        with self._lock:
            context = self._open.pop(number, None)
            self._ended[number] = None
            if len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
        if context is not None:
            context.release()

    @property
    def owes_news(self) -> bool:
        """Is there a peer that does not know yet of contexts that ended?"""
        return bool(self._untold)

    def tell_ended(self, number: int, followers: dict[str, str]) -> None:
        """Let peers know soon that a context has ended."""
        with self._lock:
            for incarnation, name in followers.items():
                if incarnation != self.agent.local_member.incarnation:
                    self._untold.setdefault(incarnation, (name, []))[1].append(number)
            if self._tells_soon or not self._untold or self.agent.closing:
                return
            self._tells_soon = True
        self.agent.clock.at(time.monotonic() + _TELL_WITHIN, self._tell_now)

    def take_ended(self, incarnation: str) -> list[int]:
        """What a call that is about to leave can tell a peer."""
        with self._lock:
            _, numbers = self._untold.get(incarnation, ("", []))
            told, numbers[:] = numbers[:_AT_ONCE], numbers[_AT_ONCE:]
            if not numbers:
                self._untold.pop(incarnation, None)
            return told

    def _tell_now(self) -> None:
        with self._lock:
            self._tells_soon = False
            if not self._untold:
                return  # calls have told everybody
        self.agent.threads.start(self._tell_all)

    def _tell_all(self) -> None:
        with self._lock:
            untold, self._untold = self._untold, {}
        for incarnation, (name, numbers) in untold.items():
            if not self.agent.closing:
                self.agent.start(
                    name, _release, (incarnation, numbers), None, _PATIENCE, internal=True
                )

    def count_running(self, change: int) -> None:
        """Note that a backward pass begins here (1) or is over (-1)."""
        with self._lock:
            self._passes_begun_here += change

    def count_passes(self) -> int:
        """Count the backward passes that began here, and those of others that this worker waits for gradients of."""
        me = self.agent.local_member.incarnation
        waiting = 0
        for context in list(self._open.values()):
            with context.lock:
                waiting += sum(
                    1
                    for (began, _), each in context.passes.items()
                    if began != me and each.unanswered
                )
        return self._passes_begun_here + waiting

    def statistics(self) -> dict[str, int]:
        contexts = list(self._open.values())
        return {
            "autograd_contexts": len(contexts),
            "autograd_tensors_sent": sum(len(context.sends) for context in contexts),
            "autograd_tensors_received": sum(len(context.receives) for context in contexts),
        }

    def audit(self) -> None:
        """Forget the contexts that have ended where they began, or whose beginning is gone."""
        by_rank: dict[int, list[int]] = {}
        for context in list(self._open.values()):
            if context.number not in _begun or context.rank != self.agent.local_member.rank:
                by_rank.setdefault(context.rank, []).append(context.number)
        for rank, numbers in by_rank.items():
            try:
                alive = self.agent.start(
                    rank, _alive, (numbers, self.agent.local_member), None, _PATIENCE, internal=True
                ).wait()
            except PeerLost:
                alive = [False] * len(numbers)
            except TelegradError as error:
                _log.debug("nothing was heard of contexts of rank %s: %s", rank, error)
                continue
            for number, is_alive in zip(numbers, alive, strict=True):
                if not is_alive:
                    self.end(number)

    def _tick(self) -> None:
        if self._open and not self.agent.closing:
            self.agent.threads.start(self.audit)

    def _lost(self, name: str, incarnation: str) -> None:
        contexts = list(self._open.values())
        for context in contexts:
            context.lost(name, incarnation)
        if contexts and not self.agent.closing:
            self.agent.threads.start(self.audit)


class _UntrackedResults:
    """Leaves that stand for tensors which another worker computed, and which came outside of any context.

    Their gradients would have to go on to that worker, so a pass that reaches one of them is an error.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def add(self, leaf: Tensor, peer: str) -> None:
        key, known = id(leaf), self._known
        known[key] = weakref.ref(leaf, lambda _: known.pop(key, None)), peer

    def refuse(
        self, leaves: Iterable[Tensor], with_gradients: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Raise if one of these is such a leaf."""
        if not self._known:
            return
        for leaf in (*leaves, *(leaf for leaf, _ in with_gradients)):
            found = self._known.get(id(leaf))
            if found is not None and found[0]() is leaf:
                raise UsageError(
                    f"the loss depends on a tensor of shape {tuple(leaf.shape)} that worker {found[1]!r} computed in a "
                    "call outside of this autograd context, so its gradient would be lost. Make the call inside the "
                    "context; in a thread, with contextvars.copy_context().run(...), since threads do not inherit it. "
                    "If no gradient is wanted, detach() the tensor"
                )


untracked_results = _UntrackedResults()


class _SentTensors:
    """The tensors of one message that need gradients, as a companion of the message.

    If packing starts again, a tensor gets another ticket, and only that one counts. Tickets and tensors are in two
    dictionaries, since a tuple for each of many tensors would be more work for the garbage collector.
    """

    def __init__(self, context: Context, to: MessageContext) -> None:
        self._context = context
        self._to = to
        self._tickets: dict[int, int] = {}
        self._tensors: dict[int, Tensor] = {}

    def add(self, ticket: int, tensor: Tensor) -> None:
        self._tickets[id(tensor)] = ticket
        self._tensors[id(tensor)] = tensor

    def add_all(self, tickets: Sequence[int], tensors: Sequence[Tensor]) -> None:
        keys = list(map(id, tensors))
        self._tickets.update(zip(keys, tickets, strict=True))
        self._tensors.update(zip(keys, tensors, strict=True))

    def finish(self) -> None:
        self._context.send(
            zip(self._tickets.values(), self._tensors.values(), strict=True), self._to
        )


def _new_leaving() -> _SentTensors:
    context, envelope = current_scope.get(), current_message()
    assert isinstance(context, Context)
    assert envelope is not None
    return _SentTensors(context, envelope)


class _ContextTracker:
    """Notes tensors that travel under a context."""

    def wants_gradients(self) -> bool:
        context = current_scope.get()
        if not isinstance(context, Context) or context.released or current_message() is None:
            return False
        return torch.is_grad_enabled()  # without, the call would not be noted in one process

    def leaving(self, tensor: Tensor) -> int:
        context = current_scope.get()
        if not isinstance(context, Context) or not self.wants_gradients():
            return _OUTSIDE if _is_computed(tensor) else 0
        ticket = next(context.tickets)
        message_resource(_SentTensors, _new_leaving).add(ticket, tensor)
        return ticket

    def leaving_together(self, tensors: Sequence[Tensor]) -> list[int]:
        context = current_scope.get()
        if not isinstance(context, Context) or not self.wants_gradients():
            return [self.leaving(tensor) for tensor in tensors]
        tickets = list(itertools.islice(context.tickets, len(tensors)))
        message_resource(_SentTensors, _new_leaving).add_all(tickets, tensors)
        return tickets

    def arriving(self, data: Tensor, ticket: int) -> Tensor:
        context, envelope = current_scope.get(), current_message()
        # the callee knew that it ended
        is_late = ticket <= 0 and isinstance(context, Context) and context.released
        if not isinstance(context, Context) or envelope is None or is_late:
            tensor = data.requires_grad_()
            if ticket == _OUTSIDE:
                untracked_results.add(tensor, "" if envelope is None else envelope.peer)
            return tensor
        if ticket <= 0:
            return data  # the answer to a call that was made without gradients
        return context.receive((data,), (ticket,), envelope)[0]

    def arriving_together(self, data: Sequence[Tensor], tickets: Sequence[int]) -> list[Tensor]:
        context, envelope = current_scope.get(), current_message()
        if not isinstance(context, Context) or envelope is None or min(tickets) <= 0:
            return list(map(self.arriving, data, tickets))
        return context.receive(data, tickets, envelope)


def _open(said: bytes, envelope: MessageContext) -> Context | None:
    """The context that a call came with; those that it says have ended are forgotten."""
    number, *ended = _NUMBERS[len(said) // _NUMBER - 1].unpack(said)
    contexts = Contexts.of(envelope.agent)
    for each in ended:
        contexts.end(each)
    return contexts.open(number)


def current_context() -> Context | None:
    """The context that this thread runs under."""
    context = current_scope.get()
    return context if isinstance(context, Context) else None


def find_context(number: int) -> Context:
    """This worker's part of a context."""
    agent = active_runtime()
    context = _begun.get(number) if agent is None else Contexts.of(agent).find(number)
    if context is None or context.released:
        raise UsageError(
            f"Could not find autograd context with id: {number}. It ended, or nothing of it has come to this worker"
        )
    return context


@internal
def _release(incarnation: str, numbers: list[int]) -> None:
    agent = active_runtime()
    if agent is not None and agent.local_member.incarnation == incarnation:
        for number in numbers:
            Contexts.of(agent).end(number)


@internal
def _alive(numbers: list[int], asker: Member) -> list[bool]:
    """Which contexts that began here go on? Whoever asks will hear of their end, even if those between us are dead."""
    agent = active_runtime()
    if agent is None:
        return [False] * len(numbers)
    found = [Contexts.of(agent).find(number) for number in numbers]
    return [
        context is not None and context.followed_by(asker.name, asker.incarnation)
        for context in found
    ]


tensors.set_gradient_tracker(_ContextTracker())
scope.register_opener(_open)
