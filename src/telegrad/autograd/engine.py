"""`BackwardPass`: one worker's part of a backward pass over all workers of a context.

A message makes a worker run what it can and send messages of its own (`gradient_exchange`). The
first message that arrives activates the worker. The worker replies to it when all of its own
messages have been replied to, and to all other messages at once. When the worker that started the
pass has its replies, all workers are done. This is termination detection by Dijkstra and Scholten.
Replies carry gradients too, so a call and its backward pass take one round trip each.

State: `_inbox`, `_busy` and `_unreplied` change under `_lock`. Only the thread that set `_busy`
uses the other attributes. A pass that failed fails all messages that wait for a reply and all that
arrive later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from telegrad import plurals
from telegrad.autograd.gradient_exchange import GradientExchange
from telegrad.autograd.gradient_messages import GradientMessage, GradientReply
from telegrad.autograd.registry import ContextRegistry
from telegrad.autograd.worker_context import Context
from telegrad.errors import InternalError, PeerLost, UsageError
from telegrad.futures import Future
from telegrad.messages.call_scope import current_scope
from telegrad.messages.device_routes import allow_any_device
from telegrad.messages.remote_functions import DeferredReply, trusted
from telegrad.runtime import active_runtime

PassId = tuple[str, int]  # the incarnation of the worker that started the pass, and its local id


class _ReceivedMessage(NamedTuple):
    """A message, or the reply to one, in the inbox of a pass."""

    peer: str  # its incarnation
    message: Sequence[Any] | Exception | None  # the fields of a `GradientMessage`
    reply: GradientReply | None  # None: this is itself a reply


def run(context: Context, local_id: int, roots: Sequence[Tensor], retain_graph: bool) -> None:
    """Run a backward pass that starts on this worker. Return when all workers are done."""
    pass_id = (context.agent.local_member.incarnation, local_id)
    backward_pass = BackwardPass(context, pass_id, retain_graph, roots)
    with context.lock:
        context.passes[pass_id] = backward_pass
    # The messages of the pass must not be recorded under the context.
    token = current_scope.set(None)
    started = time.monotonic()
    try:
        backward_pass.start()
    finally:
        current_scope.reset(token)
        seconds = time.monotonic() - started
        context.agent.recorder.add_event("backward", seconds, context=context.context_id)
    if backward_pass.unanswered:
        raise InternalError(
            f"the backward pass ended without the gradients of "
            f"{plurals.count(backward_pass.unanswered, 'tensor')}; "
            f"{backward_pass!r}"
        )


class BackwardPass:
    """One worker's part of a backward pass: its inbox, and the messages that it sends."""

    def __init__(
        self,
        context: Context,
        pass_id: PassId,
        retain_graph: bool,
        roots: Sequence[Tensor] = (),
        activated_by: str | None = None,
    ) -> None:
        self._context = context
        self._agent = context.agent
        self._own_incarnation = context.agent.local_member.incarnation
        self._pass_id = pass_id
        self._retain_graph = retain_graph
        self._exchange = GradientExchange(context, retain_graph, roots, activated_by)
        self._activation: _ReceivedMessage | None = None  # the message that gets the last reply
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._inbox: list[_ReceivedMessage] = []
        self._busy = False  # a thread processes the inbox
        self._unreplied = 0  # sent messages without a reply

    def __repr__(self) -> str:
        return (
            f"<BackwardPass {self._pass_id} on {self._agent.name!r}: {self._exchange!r}, "
            f"{self._unreplied} messages without a reply>"
        )

    @property
    def unanswered(self) -> int:
        """The number of sent tensors whose gradients have not been received."""
        return self._exchange.unanswered

    def start(self) -> None:
        """Start the pass on this worker. Return when all workers are done."""
        reply = GradientReply()
        self._handle(_ReceivedMessage(self._own_incarnation, None, reply))
        outcome = reply.take()
        if isinstance(outcome, Future):
            outcome.wait()

    def receive(self, peer: str, message: Sequence[Any]) -> Any:
        """Process a message of another worker, and return the reply."""
        reply = GradientReply()
        self._handle(_ReceivedMessage(peer, message, reply))
        outcome = reply.take()
        return DeferredReply(outcome) if isinstance(outcome, Future) else outcome

    # The inbox

    def _handle(self, received: _ReceivedMessage) -> None:
        if self._enqueue(received):
            self._process_inbox()

    def _enqueue(self, received: _ReceivedMessage) -> bool:
        """Put a message into the inbox. Return True if the calling thread has to process it."""
        with self._lock:
            self._inbox.append(received)
            if received.reply is None:
                self._unreplied -= 1
            was_busy, self._busy = self._busy, True
            return not was_busy

    def _process_inbox(self) -> None:
        """Process messages until there is nothing to do on this worker."""
        while True:
            with self._lock:
                received, self._inbox = self._inbox, []
                if not received and (self._unreplied or self._activation is None):
                    self._busy = False
                    return
            if not received:
                self._reply_to_activation()
                continue
            try:
                messages = self._step(received)
            except Exception as error:
                self._fail(error, received)
                continue
            if not self._send(messages):
                return

    def _step(self, received: list[_ReceivedMessage]) -> list[tuple[str, GradientMessage]]:
        """Apply messages, run the local graph and reply. Return the messages to send."""
        if self._error is not None:
            raise self._error
        self._context.raise_if_broken()
        for each in received:
            if isinstance(each.message, Exception):
                raise each.message
            if each.message is not None:
                self._exchange.apply(each.peer, GradientMessage(*each.message))
        self._exchange.run()
        for each in received:
            if each.reply is not None:
                if self._activation is None:
                    self._activation = each
                else:
                    each.reply.complete(self._exchange.next_message(each.peer))
        activation = self._activation
        activator = self._own_incarnation if activation is None else activation.peer
        return self._exchange.take_messages(activator, self._unreplied > 0)

    def _reply_to_activation(self) -> None:
        """Reply to the message that activated this worker, since all its messages have replies."""
        try:
            # Gradients that went through a worker that was lost since are missing.
            self._context.raise_if_broken()
        except PeerLost as error:
            self._fail(error, [])
            return
        activation, self._activation = self._activation, None
        assert activation is not None
        assert activation.reply is not None
        message = None
        if activation.peer != self._own_incarnation:
            message = self._exchange.next_message(activation.peer)
        activation.reply.complete(message)

    def _fail(self, error: Exception, received: list[_ReceivedMessage]) -> None:
        """End the pass on this worker, and reply with the error to all messages."""
        if self._agent.closing:
            # The error is a consequence: calls fail because this agent closes.
            name = self._agent.name
            error = PeerLost(f"worker {name!r} left the group during the backward pass", peer=name)
        self._error = error
        waiting = received if self._activation is None else [self._activation, *received]
        self._activation = None
        for each in waiting:
            if each.reply is not None:
                each.reply.complete(None, error)

    # Calls to peers

    def _send(self, messages: list[tuple[str, GradientMessage]]) -> bool:
        """Send messages, and wait for the last reply if the inbox is empty.

        Return False if another thread has taken over the inbox.
        """
        if not messages:
            return True
        with self._lock:
            self._unreplied += len(messages)
        for peer, message in messages[:-1]:
            self._start_call(peer, message)
        peer, message = messages[-1]
        with self._lock:
            self._busy = bool(self._inbox)
            has_more = self._busy
        if has_more:
            self._start_call(peer, message)
            return True
        # A synchronous call is faster. Messages that arrive meanwhile are processed by the
        # threads that deliver them.
        name, arguments = self._exchange.peers[peer], self._arguments(peer, message)
        try:
            reply = self._agent.invoke(name, _receive_message, arguments, None, None)
        except Exception as error:
            reply = error
        return self._enqueue(_ReceivedMessage(peer, reply, None))

    def _start_call(self, peer: str, message: GradientMessage) -> None:
        """Send a message without waiting for the reply."""
        name, arguments = self._exchange.peers[peer], self._arguments(peer, message)
        try:
            future = self._agent.start(name, _receive_message, arguments, None, None)
        except Exception as error:
            # This thread is the one that processes the inbox.
            self._enqueue(_ReceivedMessage(peer, error, None))
            return

        def handle_reply() -> None:
            error = future.exception()
            reply = error if isinstance(error, Exception) else future.wait()
            self._handle(_ReceivedMessage(peer, reply, None))

        future.add_done_callback(lambda _: self._agent.threads.start(handle_reply))

    def _arguments(self, peer: str, message: GradientMessage) -> tuple[Any, ...]:
        """Return the arguments of `_receive_message`."""
        return (
            peer,
            self._context.context_id,
            self._pass_id,
            self._retain_graph,
            self._own_incarnation,
            tuple(message),
        )


@trusted
@allow_any_device
def _receive_message(
    receiver: str,
    context_id: int,
    pass_id: PassId,
    retain_graph: bool,
    sender: str,
    message: Sequence[Any],
) -> Any:
    """Process a message of a backward pass on the worker with the incarnation `receiver`."""
    agent = active_runtime()
    if agent is None or agent.local_member.incarnation != receiver:
        raise PeerLost(
            "a worker restarted since tensors were sent to it under this autograd context; start a "
            "new context"
        )
    registry = ContextRegistry.of(agent)
    context = registry.find(context_id)
    if context is None:
        if registry.has_ended(context_id):
            raise UsageError(
                f"autograd context {context_id} has ended on worker {agent.name!r}, and its graph "
                "is gone"
            )
        # No tensor of the context has arrived here: there is nothing to answer for.
        return tuple(GradientMessage([], [], []))
    with context.lock:
        backward_pass = context.passes.get(pass_id)
    if backward_pass is None:
        created = BackwardPass(context, pass_id, retain_graph, activated_by=sender)
        with context.lock:
            backward_pass = context.passes.setdefault(pass_id, created)
    return backward_pass.receive(sender, message)
