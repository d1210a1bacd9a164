"""Records the tensors of messages that travel under a context."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from telegrad.autograd.send_recv import is_computed
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
            return _OUTSIDE if is_computed(tensor) else 0
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
