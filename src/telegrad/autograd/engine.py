"""The backward pass over all workers of a context: `BackwardPass` is one worker's part of it.

Gradients go the way the tensors came. In a pass each worker tells each peer that it exchanged
tensors with, once, which of the tensors that it has from that peer will be answered later. An
answer is a gradient (None if it is undefined, as after a function whose backward returns None), or
says that the loss does not depend on the tensor. That is also the answer for whatever is neither
answered nor announced then. So every tensor that was sent is answered exactly once, unused results
and dropped replies included, and nobody waits in vain.

A message makes a worker run what it can (`graph`) and send messages of its own. It replies to the
message that woke it when all of its own have been replied to, and to all others at once (Dijkstra
and Scholten's way to notice the end of a diffusing computation). When the worker that began has its
replies, everybody is done. Replies carry gradients too, so a call and its backward pass take one
round trip each.

A worker often sends a tensor back to the peer that it came from, as in a chain of calls or an RNN.
The gradient of what was sent back then goes to that peer again, so the peer can add it itself. A
`Shortcut` says so. It travels with the first message to the peer, if nothing was heard of the peer
before and nobody observes the gradient on the way. The peer uses it if it has told nothing yet.
Otherwise the two first messages crossed, which both sides notice: the peer sends its answers as if
there were no shortcut, and the worker passes them on. So a chain of calls to one worker takes one
round trip.

State: `_inbox`, `_busy`, `_under_way` under `_lock`; the thread that set `_busy` alone touches the
rest. A pass that failed fails everybody who waits for it and takes nothing more.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd.context import Context
from telegrad.autograd.graph import GradientSource, LocalGraph
from telegrad.autograd.registry import Contexts
from telegrad.autograd.send_recv import Receive, SentTensor, add_gradients
from telegrad.errors import InternalError, PeerLost, TelegradError, UsageError
from telegrad.futures import Future
from telegrad.messages.routes import allow_any_device
from telegrad.messages.scope import current_scope
from telegrad.runtime import active_runtime
from telegrad.server.functions import DeferredReply, trusted

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

PassId = tuple[str, int]
_MANY = 8
_SMALL = 4096  # bytes


Gradients = list[tuple[int, Tensor | None]]  # by ticket
# Others; tickets by shape; the small ones.
PackedGradients = tuple[Gradients, list[tuple[list[int], tuple[int, ...]]], Tensor]


def pack(gradients: Gradients) -> Gradients | PackedGradients:
    """Make many small gradients one tensor: a tensor of its own costs far more than its bytes.

    These are CPU tensors of the dtype that the first gradient has, in the order of their shapes.
    """
    if len(gradients) < _MANY:
        return [(ticket, _without_repetition(gradient)) for ticket, gradient in gradients]
    dtype = next((gradient.dtype for _, gradient in gradients if gradient is not None), None)
    others: Gradients = []
    # None: these are not packed
    by_kind: dict[tuple[Any, ...], tuple[list[int], list[Tensor]] | None] = {}
    for ticket, gradient in gradients:
        if type(gradient) is not Tensor:
            others.append((ticket, gradient))
            continue
        kind = _kind(gradient)
        if kind in by_kind:
            group = by_kind[kind]
        else:
            group = by_kind[kind] = (
                ([], []) if gradient.dtype == dtype and _is_small(gradient) else None
            )
        if group is None:
            others.append((ticket, gradient))
        else:
            group[0].append(ticket)
            group[1].append(gradient)
    if len(gradients) - len(others) < _MANY:
        return gradients
    by_shape = {kind[0]: group for kind, group in by_kind.items() if group is not None}
    parts = [
        torch.cat(group).view(-1) if shape else torch.stack(group)
        for shape, (_, group) in by_shape.items()
    ]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return others, [(tickets, tuple(shape)) for shape, (tickets, _) in by_shape.items()], flat


def unpack(packed: Gradients | PackedGradients) -> Gradients:
    if isinstance(packed, list):
        return packed
    gradients, groups, flat = packed
    sizes = [len(tickets) * math.prod(shape) for tickets, shape in groups]
    for (tickets, shape), part in zip(groups, torch.split(flat, sizes), strict=True):
        gradients += zip(tickets, part.view(len(tickets), *shape).unbind(), strict=True)
    return gradients


def _without_repetition(gradient: Tensor | None) -> Tensor | None:
    """Return a small gradient as a tensor without strides of 0, which takes less time to send."""
    if gradient is not None and _is_small(gradient) and 0 in gradient.stride():
        return gradient.contiguous()
    return gradient


# all that `_is_small` depends on
_kind = attrgetter("shape", "dtype", "layout", "is_cpu", "requires_grad")


def _is_small(gradient: Tensor) -> bool:
    return (
        type(gradient) is Tensor
        and gradient.is_cpu
        and gradient.layout is torch.strided
        and 0 < gradient.nbytes <= _SMALL
        and not gradient.requires_grad
    )


# tickets: of a tensor that was sent back, and of the same tensor when it came
Shortcut = tuple[int, int]


class GradientMessage(NamedTuple):
    """Answers for tensors that came from the peer, by ticket. It travels as a plain tuple, which is faster."""

    gradients: Gradients | PackedGradients
    unreached: list[int]  # the loss does not depend on these
    announced: list[int] | None  # to be answered later; None: this is not the first message
    shortcuts: Sequence[Shortcut] = ()
    has_heard: bool = True  # the sender had the first message of the receiver when it wrote this


class _GradientReply:
    """What a message will be answered with. A future is made only if somebody has to wait for it."""

    __slots__ = ("_future", "_outcome")

    def __init__(self) -> None:
        self._outcome: tuple[Any, Exception | None] | None = None
        self._future: Future[Any] | None = None

    def settle(self, message: GradientMessage | None, error: Exception | None = None) -> None:
        self._outcome = message and tuple(message), error
        if self._future is not None:
            self._future._settle(*self._outcome)

    def take(self) -> Any:
        """The message if it is there, else a future for it. Raises what the pass failed with."""
        if self._outcome is None:
            self._future = Future()
            if self._outcome is None:  # `settle` writes this first and then looks for the future
                return self._future
        message, error = self._outcome
        if error is not None:
            raise error
        return message


class _ReceivedMessage(NamedTuple):
    peer: str
    message: Sequence[Any] | Exception | None  # the fields of a `GradientMessage`
    reply: _GradientReply | None  # None: this is itself a reply


def run(context: Context, roots: Sequence[Tensor], retain_graph: bool) -> None:
    """A backward pass that begins here."""
    agent = context.agent
    identity = (agent.local_member.incarnation, next(context.contexts.passes))
    this = BackwardPass(context, identity, retain_graph, roots)
    with context.lock:
        context.passes[identity] = this
    # the messages of a pass do not run under the context themselves
    token = current_scope.set(None)
    try:
        this.begin()
    finally:
        current_scope.reset(token)
    if this.unanswered:
        raise InternalError(
            f"the backward pass ended without the gradients of {this.unanswered} tensors; {this!r}"
        )


class BackwardPass:
    def __init__(
        self,
        context: Context,
        identity: PassId,
        retain_graph: bool,
        roots: Sequence[Tensor] = (),
        woken_by: str | None = None,
    ) -> None:
        self._context = context
        self._agent = context.agent
        self._me = context.agent.local_member.incarnation
        self._identity = identity
        self._retain_graph = retain_graph
        with context.lock:
            sends, receives, self._peers = (
                context.sends.copy(),
                context.receives.copy(),
                context.peers.copy(),
            )
        self._shortcuts: dict[str, dict[int, int]] = {}  # ours, by peer
        # by peer, those of its shortcuts that are used here
        self._used: dict[str, dict[int, int]] = {}
        # by peer, those of ours that it did not use
        self._passed_on: dict[str, dict[int, int]] = {}
        self._sent: dict[str, set[int]] = {}  # by peer, the tickets that it has not answered
        sources: dict[Any, GradientSource] = {}
        for ticket, send in sends.items():
            peer = send.peer
            if send.leaf is None and peer != woken_by and self._is_shortcut(send, ticket, receives):
                continue
            sources[ticket] = send
            if peer in self._sent:
                self._sent[peer].add(ticket)
            else:
                self._sent[peer] = {ticket}
        self._owed: dict[str, set[int]] = {}  # by peer, the tickets that it has no answer for
        for peer, ticket in receives.values():
            if peer in self._owed:
                self._owed[peer].add(ticket)
            else:
                self._owed[peer] = {ticket}
        for number, root in enumerate(roots):
            sources[number, "root"] = _RootTensor(root)
        self._sends = sends
        self._graph = LocalGraph(sources, receives, context.slots, retain_graph)
        for number, root in enumerate(roots):
            self._graph.resolve((number, "root"), torch.ones_like(root))
        # by ticket, how many further gradients the peer will send
        self._additions: dict[int, int] = {}
        # by ticket, what came of answers to pass on
        self._partial: dict[int, tuple[bool, Tensor | None]] = {}
        # messages of peers whose first message has not come
        self._early: dict[str, list[GradientMessage]] = {}
        self._told: set[str] = set()
        self._heard: set[str] = set()
        self._outgoing: dict[str, tuple[list[tuple[int, Tensor | None]], list[int]]] = {}
        self._waker: _ReceivedMessage | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._inbox: list[_ReceivedMessage] = []
        self._busy = False
        self._under_way = 0

    def __repr__(self) -> str:
        return (
            f"<BackwardPass {self._identity} on {self._agent.name!r}: {self._graph!r}, "
            f"{self._under_way} messages under way>"
        )

    def _is_shortcut(self, send: SentTensor, ticket: int, receives: dict[Node, Receive]) -> bool:
        """Note if a tensor was sent back to where it came from, so that the peer can answer for it itself."""
        node = send.edge().node
        receive = receives.get(node)
        if receive is None or receive[0] != send.peer or send.peer == self._me:
            return False
        if not self._context.slots[node].is_unobserved(node):
            return False
        self._shortcuts.setdefault(send.peer, {})[ticket] = receive[1]
        return True

    @property
    def unanswered(self) -> int:
        """How many tensors went out whose gradients have not come back."""
        return sum(len(tickets) for tickets in self._sent.values())

    def begin(self) -> None:
        """Start here, and return when all workers are done."""
        done = _GradientReply()
        self._take(_ReceivedMessage(self._me, None, done))
        outcome = done.take()
        if isinstance(outcome, Future):
            outcome.wait()

    def receive(self, peer: str, message: Sequence[Any]) -> Any:
        """A message of another worker; returns the reply."""
        reply = _GradientReply()
        self._take(_ReceivedMessage(peer, message, reply))
        outcome = reply.take()
        return DeferredReply(outcome) if isinstance(outcome, Future) else outcome

    def _take(self, arrival: _ReceivedMessage) -> None:
        if self._put(arrival):
            self._work()

    def _put(self, arrival: _ReceivedMessage) -> bool:
        """True if the calling thread has to deal with it, since nobody else is busy."""
        with self._lock:
            self._inbox.append(arrival)
            if arrival.reply is None:
                self._under_way -= 1
            was_busy, self._busy = self._busy, True
            return not was_busy

    def _work(self) -> None:
        """Deal with what arrives until nothing is left to do here."""
        while True:
            with self._lock:
                arrivals, self._inbox = self._inbox, []
                if not arrivals and (self._under_way or self._waker is None):
                    self._busy = False
                    return
            if not arrivals:
                self._reply_to_waker()
                continue
            try:
                messages = self._step(arrivals)
            except Exception as error:
                self._fail(error, arrivals)
                continue
            if not self._send(messages):
                return

    def _step(self, arrivals: list[_ReceivedMessage]) -> list[tuple[str, GradientMessage]]:
        """Apply messages, run, reply to those that need not wait; returns the messages to send."""
        if self._error is not None:
            raise self._error
        self._context.check()
        for arrival in arrivals:
            if isinstance(arrival.message, Exception):
                raise arrival.message
            if arrival.message is not None:
                self._apply(arrival.peer, GradientMessage(*arrival.message))
        self._run()
        for arrival in arrivals:
            if arrival.reply is not None:
                if self._waker is None:
                    self._waker = arrival
                else:
                    arrival.reply.settle(self._news(arrival.peer))
        return self._messages()

    def _apply(self, peer: str, message: GradientMessage) -> None:
        is_first = message.announced is not None and peer not in self._heard
        if not is_first and peer not in self._heard:
            self._early.setdefault(peer, []).append(message)
            return
        gradients = unpack(message.gradients)
        if is_first:
            self._heard.add(peer)
            self._agree_on_shortcuts(peer, message)
        for ticket in message.unreached:
            self._take_answer(peer, ticket, None, reached=False)
        if self._additions or self._passed_on:
            for ticket, gradient in gradients:
                self._take_answer(peer, ticket, gradient)
        else:
            self._take_gradients(peer, gradients)
        if is_first:
            mentioned = {
                *(message.announced or ()),
                *message.unreached,
                *(ticket for ticket, _ in gradients),
            }
            for ticket in self._sent.get(peer, set()) - mentioned:
                self._take_answer(peer, ticket, None, reached=False)
            for early in self._early.pop(peer, ()):
                self._apply(peer, early)

    def _agree_on_shortcuts(self, peer: str, message: GradientMessage) -> None:
        """Find out from the first message of a peer which shortcuts are used, the peer's and ours."""
        ours = self._shortcuts.pop(peer, None)
        if ours and not message.has_heard:
            self._passed_on[peer] = ours
            self._sent.setdefault(peer, set()).update(ours)
        waiting, owed = self._sent.get(peer, ()), self._owed.get(peer, ())
        for sent_back, came in message.shortcuts:
            if came not in waiting:
                continue  # it was sent after this pass began
            if peer in self._told:
                self._additions[came] = self._additions.get(came, 0) + 1
                if came in self._passed_on.get(peer, ()):
                    continue
            elif sent_back in owed:
                self._used.setdefault(peer, {})[sent_back] = came
            else:
                continue  # it never arrived
            self._graph.expect_another(came)

    def _take_gradients(self, peer: str, gradients: Gradients) -> None:
        """Take gradients of tensors that nothing is added to and that are not passed on."""
        waiting, sends = self._sent.get(peer, set()), self._sends
        taken: Gradients = []
        for answer in gradients:
            ticket, gradient = answer
            if ticket in waiting:
                waiting.discard(ticket)
                # a map moved the tensor
                if gradient is not None and gradient.device != sends[ticket].device:
                    answer = (ticket, gradient.to(sends[ticket].device))
                taken.append(answer)
        self._graph.resolve_all(taken, own=peer != self._me)

    def _take_answer(
        self, peer: str, ticket: int, gradient: Tensor | None, *, reached: bool = True
    ) -> None:
        waiting = self._sent.get(peer)
        if waiting is None or ticket not in waiting:
            return
        additions = self._additions.get(ticket)
        if additions:
            self._additions[ticket] = additions - 1
        else:
            waiting.discard(ticket)
        passed_on = self._passed_on.get(peer)
        if passed_on and ticket in passed_on:
            before_reached, before = self._partial.pop(ticket, (False, None))
            total = (
                add_gradients(before, gradient)
                if before is not None and gradient is not None
                else gradient
            )
            answer = (reached or before_reached, before if total is None else total)
            if additions:
                self._partial[ticket] = answer
            else:
                self._add_outgoing(peer, passed_on[ticket], *answer)
            return
        if gradient is not None and gradient.device != self._sends[ticket].device:
            gradient = gradient.to(self._sends[ticket].device)
        self._graph.resolve(ticket, gradient, reached=reached, own=peer != self._me)

    def _add_outgoing(self, peer: str, ticket: int, reached: bool, gradient: Tensor | None) -> None:
        outgoing = self._outgoing.get(peer)
        if outgoing is None:
            outgoing = self._outgoing[peer] = ([], [])
        if reached:
            outgoing[0].append((ticket, gradient))
        else:
            outgoing[1].append(ticket)

    def _run(self) -> None:
        """Run until only others can help. Answers for this worker itself are taken on the spot."""
        while True:
            try:
                outcome = self._graph.run()
            except Exception as error:
                raise _located(error, self._agent) from error
            if outcome.leaves:
                self._context.add(outcome.leaves)
            go_on = False
            used = self._used
            for (peer, ticket), reached, gradient in outcome.receives:
                self._owed[peer].discard(ticket)
                if used and ticket in used.get(peer, ()):
                    self._graph.resolve(used[peer][ticket], gradient, reached=reached)
                    go_on = True
                else:
                    self._add_outgoing(peer, ticket, reached, gradient)
            to_myself = self._news(self._me) if self._me in self._peers else None
            if to_myself is not None:
                self._apply(self._me, to_myself)
            elif not go_on:
                return

    def _messages(self) -> list[tuple[str, GradientMessage]]:
        """What peers have to be told now. The waker can wait for its reply, unless others make that late."""
        waker = self._waker.peer if self._waker is not None else self._me
        messages = []
        for peer in self._peers:
            if peer not in (waker, self._me):
                message = self._news(peer)
                if message is not None:
                    messages.append((peer, message))
        if (messages or self._under_way) and self._outgoing.get(waker):
            to_waker = self._news(waker)
            assert to_waker is not None
            messages.append((waker, to_waker))
        return messages

    def _news(self, peer: str) -> GradientMessage | None:
        """What a peer has not been told yet."""
        gradients, unreached = self._outgoing.pop(peer, ([], []))
        # it may not be one of the peers: what it sent can have come after the pass began
        if peer not in self._told:
            self._told.add(peer)
            announced = list(self._owed.get(peer, ()))
            if peer in self._used:
                announced = [ticket for ticket in announced if ticket not in self._used[peer]]
            passed_on = self._passed_on.get(peer, {})
            shortcuts = list(self._shortcuts.get(peer, passed_on).items())
            added_to = set(passed_on.values())  # what is not mentioned of others is unreached
            unreached = [ticket for ticket in unreached if ticket in added_to]
            return GradientMessage(
                pack(gradients), unreached, announced, shortcuts, peer in self._heard
            )
        if not gradients and not unreached:
            return None
        return GradientMessage(pack(gradients), unreached, None)

    def _reply_to_waker(self) -> None:
        """All is done here, unless somebody died since: what went through it, or ended there, is lost."""
        try:
            self._context.check()
        except PeerLost as error:
            self._fail(error, [])
            return
        waker, self._waker = self._waker, None
        assert waker is not None and waker.reply is not None  # noqa: PT018
        waker.reply.settle(None if waker.peer == self._me else self._news(waker.peer))

    def _fail(self, error: Exception, arrivals: list[_ReceivedMessage]) -> None:
        """End the pass on this worker: everybody who waits for it learns why."""
        if self._agent.closing:  # whoever it could not reach is not to blame
            name = self._agent.name
            error = PeerLost(f"worker {name!r} left the group during the backward pass", peer=name)
        self._error = error
        waiting = arrivals if self._waker is None else [self._waker, *arrivals]
        self._waker = None
        for arrival in waiting:
            if arrival.reply is not None:
                arrival.reply.settle(None, error)

    def _send(self, messages: list[tuple[str, GradientMessage]]) -> bool:
        """Send messages. This thread waits for the last reply, if nothing else is to be done.

        False: somebody else deals with what arrives from now on.
        """
        if not messages:
            return True
        with self._lock:
            self._under_way += len(messages)
        for peer, message in messages[:-1]:
            self._start(peer, message)
        peer, message = messages[-1]
        with self._lock:
            more = bool(self._inbox)
            self._busy = more
        if more:
            self._start(peer, message)
            return True
        try:
            reply = self._agent.invoke(
                self._peers[peer], _deliver, self._arguments(peer, message), None, None
            )
        except Exception as error:
            reply = error
        return self._put(_ReceivedMessage(peer, reply, None))

    def _start(self, peer: str, message: GradientMessage) -> None:
        try:
            future = self._agent.start(
                self._peers[peer], _deliver, self._arguments(peer, message), None, None
            )
        except Exception as error:
            # for the thread that is busy, which is this one
            self._put(_ReceivedMessage(peer, error, None))
            return

        def take() -> None:
            error = future.exception()
            self._take(
                _ReceivedMessage(
                    peer, error if isinstance(error, Exception) else future.wait(), None
                )
            )

        future.add_done_callback(lambda _: self._agent.threads.start(take))

    def _arguments(self, peer: str, message: GradientMessage) -> tuple[Any, ...]:
        return (
            peer,
            self._context.number,
            self._identity,
            self._retain_graph,
            self._me,
            tuple(message),
        )


@trusted
@allow_any_device
def _deliver(
    me: str, number: int, identity: PassId, retain_graph: bool, sender: str, message: Sequence[Any]
) -> Any:
    """A message of a pass arrives."""
    agent = active_runtime()
    if agent is None or agent.local_member.incarnation != me:
        raise PeerLost(
            "a worker restarted since tensors were sent to it under this autograd context; start a new one"
        )
    contexts = Contexts.of(agent)
    context = contexts.find(number)
    if context is None:
        if contexts.has_ended(number):
            raise UsageError(
                f"autograd context {number} has ended on worker {agent.name!r}, and its graph is gone"
            )
        return tuple(GradientMessage([], [], []))  # nothing of the context has arrived here
    with context.lock:
        this = context.passes.get(identity)
    if this is None:
        made = BackwardPass(context, identity, retain_graph, woken_by=sender)
        with context.lock:
            this = context.passes.setdefault(identity, made)
    return this.receive(sender, message)


class _RootTensor:
    """A tensor that a pass begins with."""

    leaf: Tensor | None = None

    def __init__(self, root: Tensor) -> None:
        self._root = root

    def edge(self) -> GradientEdge:
        assert self._root.grad_fn is not None
        return GradientEdge(self._root.grad_fn, self._root.output_nr)

    def node_behind(self) -> Node:
        raise InternalError("a root always has a gradient")


def _located(error: Exception, agent: AgentRuntime) -> Exception:
    """An error of the user's own graph, with the worker that it happened on; as torch, always a RuntimeError."""
    if isinstance(error, TelegradError):
        return error
    what = str(error) if isinstance(error, RuntimeError) else f"{error} ({type(error).__name__})"
    return RuntimeError(
        f"Error on Node {agent.local_member.rank}: {what} [worker {agent.name!r}, in the backward pass]"
    )
