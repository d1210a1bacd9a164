"""Distributed autograd: exact gradients through remote calls.

This package has the contexts that travel with calls (`worker_context`, `registry`), the recording
of tensors that are sent and received (`context_tracker`, `send_recv`), and the backward pass:
messages between workers (`engine`, `gradient_exchange`) and what each worker computes
(`local_graph`). It uses agents, messages and tensors of the layers below. Code for references,
optimizers and modules does not belong here.

>>> import torch
>>> from telegrad import autograd
>>> from telegrad.testing import LocalCluster
>>> with LocalCluster(2) as cluster, autograd.context(agent=cluster["w0"]) as context_id:
...     x = torch.tensor([1.0, 2.0], requires_grad=True)
...     y = cluster["w0"].call("w1", torch.mul, x, 3)
...     autograd.backward(context_id, [y.sum()])
...     autograd.get_gradients(context_id)[x]
tensor([3., 3.])
"""

from telegrad.autograd.api import _current_context as _current_context
from telegrad.autograd.api import _get_debug_info as _get_debug_info
from telegrad.autograd.api import _get_max_id as _get_max_id
from telegrad.autograd.api import _is_valid_context as _is_valid_context
from telegrad.autograd.api import _new_context as _new_context
from telegrad.autograd.api import _release_context as _release_context
from telegrad.autograd.api import _retrieve_context as _retrieve_context
from telegrad.autograd.api import backward, context, get_gradients, is_available
from telegrad.autograd.worker_context import Context as DistAutogradContext

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]
