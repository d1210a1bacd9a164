"""`ContextRegistry`: all contexts of one agent.

A context is created here when a block of `autograd.context()` starts (`start`), or when the first
call under a context of another worker arrives (`get_or_create`). When it ends, the workers that
its calls went to are informed (`ended_contexts`). That information can get lost with a worker, so
an audit regularly asks the workers where contexts started whether these still exist.

State: `_contexts`, `_ended_ids` and `_running_passes` change under `_lock`. No lock is held while
another worker is called. `_started_here` maps the ids of contexts that agents of this process
started to these contexts, so that they can be found without an agent.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import weakref
from typing import TYPE_CHECKING

from telegrad.autograd import hooks
from telegrad.autograd.ended_contexts import CALL_TIMEOUT, EndedContexts
from telegrad.autograd.send_recv import is_shared_node
from telegrad.autograd.shared_parameters import SharedParameters
from telegrad.autograd.worker_context import CONTEXT_ID_BITS, Context, decode_ids
from telegrad.errors import PeerLost, TelegradError, UsageError
from telegrad.group.membership import Member
from telegrad.messages.packing import MessageContext
from telegrad.messages.remote_functions import internal
from telegrad.runtime import active_runtime
from telegrad.wire.handshake import Incarnation

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

_MAX_ENDED_IDS = 10_000
_AUDIT_INTERVAL = 20.0  # seconds
_LOW_BITS = (1 << CONTEXT_ID_BITS) - 1

_log = logging.getLogger(__name__)
_started_here: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()


class ContextRegistry:
    """The contexts of one agent."""

    def __init__(self, agent: AgentRuntime) -> None:
        self.agent = agent
        self.pass_ids = itertools.count(1)
        self.shared_parameters = SharedParameters()
        self._tensor_ids = itertools.count(1)
        # A random start: a worker that restarts with the same rank must not reuse ids.
        self._context_ids = itertools.count(secrets.randbits(CONTEXT_ID_BITS - 1))
        self._contexts: dict[int, Context] = {}
        self._ended_ids: dict[int, None] = {}  # the latest `_MAX_ENDED_IDS`, oldest first
        self._ended_contexts = EndedContexts(agent, _release)
        self._running_passes = 0  # those that started on this worker
        self._lock = threading.Lock()
        hooks.record_hooks(is_shared_node)
        agent.on_loss(self._on_worker_lost)
        agent.add_statistics(self.statistics)
        agent.clock.call_every(_AUDIT_INTERVAL, self._start_audit)

    @classmethod
    def of(cls, agent: AgentRuntime) -> ContextRegistry:
        return agent.service(cls)

    def __repr__(self) -> str:
        return f"<ContextRegistry of {self.agent.name!r}: {list(self._contexts)}>"

    def start(self) -> Context:
        """Return a new context that starts on this worker."""
        rank = max(self.agent.local_member.rank, 0)
        context_id = (rank << CONTEXT_ID_BITS) | (next(self._context_ids) & _LOW_BITS)
        context = self._new_context(context_id)
        with self._lock:
            self._contexts[context_id] = context
        _started_here[context_id] = context
        return context

    def get_or_create(self, context_id: int) -> Context | None:
        """Return this worker's part of a context, or None if it has ended here."""
        context = self._contexts.get(context_id)
        if context is None:
            with self._lock:
                if context_id in self._ended_ids:
                    return None
                context = self._contexts.setdefault(context_id, self._new_context(context_id))
        return context

    def _new_context(self, context_id: int) -> Context:
        return Context(
            context_id, self.agent, self._tensor_ids, self._ended_contexts, self.shared_parameters
        )

    def find(self, context_id: int) -> Context | None:
        """Return this worker's part of a context, or None if it has none."""
        return self._contexts.get(context_id)

    def has_ended(self, context_id: int) -> bool:
        """Return True if the context is one of the latest that ended on this worker."""
        return context_id in self._ended_ids

    def end(self, context_id: int) -> None:
        """Release a context on this worker, and on the workers that its calls went to from here."""
        with self._lock:
            context = self._contexts.pop(context_id, None)
            self._ended_ids[context_id] = None
            if len(self._ended_ids) > _MAX_ENDED_IDS:
                oldest = next(iter(self._ended_ids))
                del self._ended_ids[oldest]
        if context is not None:
            context.release()

    # Counts

    def add_running_pass(self, change: int) -> None:
        """Count a backward pass that starts on this worker (1) or is over (-1)."""
        with self._lock:
            self._running_passes += change

    def count_passes(self) -> int:
        """Count the passes that run here.

        These are passes that started on this worker, and passes of other workers that have not
        sent all gradients that this worker expects.
        """
        own_incarnation = self.agent.local_member.incarnation
        count = self._running_passes
        for context in list(self._contexts.values()):
            with context.lock:
                for (starter, _), each in context.passes.items():
                    if starter != own_incarnation and each.unanswered:
                        count += 1
        return count

    def statistics(self) -> dict[str, int]:
        contexts = list(self._contexts.values())
        return {
            "autograd_contexts": len(contexts),
            "autograd_tensors_sent": sum(len(context.sends) for context in contexts),
            "autograd_tensors_received": sum(map(Context.count_received, contexts)),
        }

    # Contexts whose end was not announced

    def audit(self) -> None:
        """End the contexts that have ended where they started, or that started on a lost worker."""
        by_rank: dict[int, list[int]] = {}
        own_rank = self.agent.local_member.rank
        for context in list(self._contexts.values()):
            if context.context_id not in _started_here or context.rank != own_rank:
                by_rank.setdefault(context.rank, []).append(context.context_id)
        for rank, context_ids in by_rank.items():
            arguments = (context_ids, self.agent.local_member)
            try:
                are_open = self.agent.start(
                    rank, _are_open, arguments, None, CALL_TIMEOUT, internal=True
                ).wait()
            except PeerLost:
                are_open = [False] * len(context_ids)
            except TelegradError as error:
                _log.debug("could not ask rank %s about its autograd contexts: %s", rank, error)
                continue
            for context_id, is_open in zip(context_ids, are_open, strict=True):
                if not is_open:
                    self.end(context_id)

    def _start_audit(self) -> None:
        if self._contexts and not self.agent.closing:
            self.agent.threads.start(self.audit)

    def _on_worker_lost(self, name: str, incarnation: Incarnation) -> None:
        for context in list(self._contexts.values()):
            context.on_worker_lost(name, incarnation)
        self._start_audit()


def open_context(encoded: bytes, message: MessageContext) -> Context | None:
    """Return the context that a call arrived under, and end those that it says have ended."""
    context_id, *ended_ids = decode_ids(encoded)
    registry = ContextRegistry.of(message.runtime)
    for ended_id in ended_ids:
        registry.end(ended_id)
    return registry.get_or_create(context_id)


def find_context(context_id: int) -> Context:
    """Return this worker's part of a context. Raise `UsageError` if it has none."""
    agent = active_runtime()
    if agent is None:
        context = _started_here.get(context_id)
    else:
        context = ContextRegistry.of(agent).find(context_id)
    if context is None or context.released:
        raise UsageError(
            f"Could not find autograd context with id: {context_id}. It has ended, or no call "
            "under it has reached this worker"
        )
    return context


@internal
def _release(incarnation: Incarnation, context_ids: list[int]) -> None:
    """End contexts on this worker, if it has not restarted since."""
    agent = active_runtime()
    if agent is not None and agent.local_member.incarnation == incarnation:
        for context_id in context_ids:
            ContextRegistry.of(agent).end(context_id)


@internal
def _are_open(context_ids: list[int], asker: Member) -> list[bool]:
    """Return which contexts that started on this worker are open.

    The asker becomes a callee of these, so it is informed of their end even if the worker that
    called it has been lost.
    """
    agent = active_runtime()
    if agent is None:
        return [False] * len(context_ids)
    contexts = [ContextRegistry.of(agent).find(context_id) for context_id in context_ids]
    return [
        context is not None and context.add_callee(asker.name, asker.incarnation)
        for context in contexts
    ]
