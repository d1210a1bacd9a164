"""Records the tensors of messages that travel under a context."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from telegrad.autograd.send_recv import is_non_leaf
from telegrad.autograd.untracked import untracked_results
from telegrad.autograd.worker_context import Context
from telegrad.messages.packing import MessageContext, current_message, message_resource
from telegrad.messages.scope import current_scope

if TYPE_CHECKING:
    pass


_OUTSIDE = -1  # in place of a ticket: computed from other tensors, but outside of a context


class _SentTensors:
    """The tensors of one message that need gradients, as a companion of the message.

    If packing starts again, a tensor gets another ticket, and only that one counts. Tickets and tensors are in two
    dictionaries, since a tuple for each of many tensors would be more work for the garbage collector.
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
        self._context.send(
            zip(self._tensor_ids.values(), self._tensors.values(), strict=True), self._to
        )


def _new_leaving() -> _SentTensors:
    context, envelope = current_scope.get(), current_message()
    assert isinstance(context, Context)
    assert envelope is not None
    return _SentTensors(context, envelope)


class ContextTracker:
    """Notes tensors that travel under a context."""

    def wants_gradients(self) -> bool:
        context = current_scope.get()
        if not isinstance(context, Context) or context.released or current_message() is None:
            return False
        return torch.is_grad_enabled()  # without, the call would not be noted in one process

    def leaving(self, tensor: Tensor) -> int:
        context = current_scope.get()
        if not isinstance(context, Context) or not self.wants_gradients():
            return _OUTSIDE if is_non_leaf(tensor) else 0
        tensor_id = next(context.tensor_ids)
        message_resource(_SentTensors, _new_leaving).add(tensor_id, tensor)
        return tensor_id

    def leaving_together(self, tensors: Sequence[Tensor]) -> list[int]:
        context = current_scope.get()
        if not isinstance(context, Context) or not self.wants_gradients():
            return [self.leaving(tensor) for tensor in tensors]
        tensor_ids = list(itertools.islice(context.tensor_ids, len(tensors)))
        message_resource(_SentTensors, _new_leaving).add_all(tensor_ids, tensors)
        return tensor_ids

    def arriving(self, data: Tensor, tensor_id: int) -> Tensor:
        context, envelope = current_scope.get(), current_message()
        # the callee knew that it ended
        is_late = tensor_id <= 0 and isinstance(context, Context) and context.released
        if not isinstance(context, Context) or envelope is None or is_late:
            tensor = data.requires_grad_()
            if tensor_id == _OUTSIDE:
                untracked_results.add(tensor, "" if envelope is None else envelope.peer)
            return tensor
        if tensor_id <= 0:
            return data  # the answer to a call that was made without gradients
        return context.receive((data,), (tensor_id,), envelope)[0]

    def arriving_together(self, data: Sequence[Tensor], tensor_ids: Sequence[int]) -> list[Tensor]:
        context, envelope = current_scope.get(), current_message()
        if not isinstance(context, Context) or envelope is None or min(tensor_ids) <= 0:
            return list(map(self.arriving, data, tensor_ids))
        return context.receive(data, tensor_ids, envelope)
