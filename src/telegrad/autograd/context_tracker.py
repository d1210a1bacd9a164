"""`ContextTracker`: records the tensors of messages that are sent and received under a context.

`wire.gradient_tracking` calls it for each tensor of a message that requires a gradient. A tensor id
travels with the tensor. It is positive if the tensor is recorded. 0 stands for a leaf, and
`_UNTRACKED_RESULT` for a result of operations, that were sent outside of a context.

State: none besides that of the context and of the message (`_SentTensors`), which one thread packs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from telegrad.autograd.send_recv import is_non_leaf
from telegrad.autograd.untracked_results import untracked_results
from telegrad.autograd.worker_context import Context
from telegrad.messages.call_scope import current_scope
from telegrad.messages.packing import MessageContext, current_message, message_resource

_UNTRACKED_RESULT = -1  # instead of a tensor id


class _SentTensors:
    """The tensors of one message that require gradients, recorded when the message is packed.

    If packing starts again, a tensor gets another id, and only the last one is recorded. There are
    two dictionaries and not one of tuples, to save the garbage collector work with many tensors.
    """

    def __init__(self, context: Context, to: MessageContext) -> None:
        self._context = context
        self._to = to
        self._tensor_ids: dict[int, int] = {}
        self._tensors: dict[int, Tensor] = {}

    def add(self, tensor_id: int, tensor: Tensor) -> None:
        self._tensor_ids[id(tensor)] = tensor_id
        self._tensors[id(tensor)] = tensor

    def add_all(self, tensor_ids: Sequence[int], tensors: Sequence[Tensor]) -> None:
        keys = list(map(id, tensors))
        self._tensor_ids.update(zip(keys, tensor_ids, strict=True))
        self._tensors.update(zip(keys, tensors, strict=True))

    def finish(self) -> None:
        sent = zip(self._tensor_ids.values(), self._tensors.values(), strict=True)
        self._context.record_sent(sent, self._to)


def _new_sent_tensors() -> _SentTensors:
    context, message = current_scope.get(), current_message()
    assert isinstance(context, Context)
    assert message is not None
    return _SentTensors(context, message)


def _recording_context() -> Context | None:
    """Return the context that records the tensors of the message that is being packed."""
    context, message = _context_of_message()
    # With gradients disabled, torch would not record the call in one process either.
    if context is None or context.released or message is None or not torch.is_grad_enabled():
        return None
    return context


def _context_of_message() -> tuple[Context | None, MessageContext | None]:
    """Return the context of the current message, if it has one, and the message.

    A message of another agent of this process is not one of the current context.
    """
    context, message = current_scope.get(), current_message()
    if not isinstance(context, Context) or message is None or message.runtime is not context.agent:
        return None, message
    return context, message


class ContextTracker:
    """The `GradientTracker` of messages under a context."""

    def is_recording(self) -> bool:
        """Return True if tensors of the message that is being packed are recorded."""
        return _recording_context() is not None

    def track_sent(self, tensor: Tensor) -> int:
        """Return the id of a tensor that is being packed, and record it under a context."""
        context = _recording_context()
        if context is None:
            return _UNTRACKED_RESULT if is_non_leaf(tensor) else 0
        tensor_id = next(context.tensor_ids)
        message_resource(_SentTensors, _new_sent_tensors).add(tensor_id, tensor)
        return tensor_id

    def track_sent_many(self, tensors: Sequence[Tensor]) -> list[int]:
        """Do for many tensors what `track_sent` does for one."""
        context = _recording_context()
        if context is None:
            return [self.track_sent(tensor) for tensor in tensors]
        tensor_ids = list(itertools.islice(context.tensor_ids, len(tensors)))
        message_resource(_SentTensors, _new_sent_tensors).add_all(tensor_ids, tensors)
        return tensor_ids

    def track_received(self, data: Tensor, tensor_id: int) -> Tensor:
        """Return the tensor for data that was unpacked with this id."""
        context, message = _context_of_message()
        # The context ended while the call ran, and the callee had been informed.
        has_ended = tensor_id <= 0 and context is not None and context.released
        if context is None or message is None or has_ended:
            tensor = data.requires_grad_()
            if tensor_id == _UNTRACKED_RESULT:
                untracked_results.add(tensor, "" if message is None else message.peer)
            return tensor
        if tensor_id <= 0:
            return data  # the result of a call that was made with gradients disabled
        return context.record_received((data,), (tensor_id,), message)[0]

    def track_received_many(
        self, data: Sequence[Tensor], tensor_ids: Sequence[int]
    ) -> list[Tensor]:
        """Do for many tensors what `track_received` does for one."""
        context, message = _context_of_message()
        if context is None or message is None or min(tensor_ids) <= 0:
            return list(map(self.track_received, data, tensor_ids))
        return context.record_received(data, tensor_ids, message)
