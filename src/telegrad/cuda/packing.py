"""Decide how a CUDA tensor travels, when the message that contains it is packed.

`CudaReducer` is registered with the codec, which calls it for each CUDA tensor. There are three
ways:

1. Up to 64 KB that are ready are sent inside the message (`cuda/small_copies.py`).
2. Otherwise the receiver maps memory of the sender (`cuda/ipc.py`) and copies it on its current
   stream into memory of its own. The sender makes a *snapshot* first, in the order of its stream,
   so later writes to the tensor do not change what was sent. A large *exclusive* tensor needs no
   snapshot: an argument of a caller that waits for the reply, or a result that nothing else refers
   to.
3. If the processes cannot map each other's memory (other hosts, other containers), the tensor is
   sent through host memory (`cuda/staging.py`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from telegrad.cuda import driver, staging
from telegrad.cuda.receive import receive_inline_tensor, receive_tensor
from telegrad.cuda.send import CudaSend, LeaseLedger
from telegrad.cuda.small_copies import MAX_SMALL_COPY_BYTES, small_copies
from telegrad.cuda.sole_reference import MIN_LEASE_BYTES
from telegrad.errors import UsageError
from telegrad.messages.packing import MessageContext, current_message, message_resource
from telegrad.wire.tensors import Reduced, build_empty

# Seconds to wait for a small copy: two switches of the GPU between processes.
_SMALL_COPY_TIMEOUT = 0.0003
_CPU = torch.device("cpu")


class PeerDevices(NamedTuple):
    """What a peer reported about its GPUs."""

    gpu_count: int
    can_map: bool  # it can map memory of this worker


class SendTransfers(LeaseLedger, Protocol):
    """The part of `CudaTransfers` that packing uses."""

    peers: dict[str, PeerDevices]

    def query_peer(self, context: MessageContext, index: int) -> PeerDevices: ...


class CudaReducer:
    """Let the codec ask the agent whose message is being packed how a tensor travels."""

    def reduce_device_tensor(self, tensor: Tensor, code: int) -> Reduced | None:
        """Return how a CUDA tensor travels; None if the codec should decide."""
        context = current_message()
        if context is None or not tensor.is_cuda:
            return None
        return _reduce_tensor(context.runtime.cuda_transfers, context, tensor, code)

    def target_of_cpu_tensor(self, tensor: Tensor) -> str | None:
        """Return the device on which a CPU tensor arrives; None if it is the CPU."""
        context = current_message()
        target = None if context is None else context.route.target(_CPU)
        return None if target is None or target == _CPU else str(target)


def _reduce_tensor(
    transfers: SendTransfers, context: MessageContext, tensor: Tensor, code: int
) -> Reduced:
    """Return the constructor and arguments with which the receiver unpickles a tensor.

    The tensor must be a contiguous CUDA tensor.
    """
    device, route = tensor.device, context.route
    target = route.target(device)
    if target is None:
        raise UsageError(_unmapped_message(context, device))
    if target.type == "cpu":
        return staging.reduce_through_host(tensor, code, context.exclusive, target)
    peer = transfers.peers.get(context.incarnation) or transfers.query_peer(context, device.index)
    if target.index >= peer.gpu_count:
        if route.falls_back_to_cpu(device):
            return staging.reduce_through_host(tensor, code, context.exclusive, _CPU)
        raise UsageError(
            f"a tensor on {device} would arrive on {target}, but worker {context.peer!r} has "
            f"{peer.gpu_count} CUDA devices: set its target device with set_device_map (or "
            f"Config.device_maps), for example {{{device.index}: 'cpu'}}, or send tensor.cpu()"
        )
    if not tensor.numel():
        return build_empty, (code, tuple(tensor.shape), str(target))
    size = tensor.numel() * tensor.itemsize
    if size <= MAX_SMALL_COPY_BYTES:
        data = small_copies(device.index).copy_to_host(tensor, size, _SMALL_COPY_TIMEOUT)
        if data is not None:
            return receive_inline_tensor, (data, target.index, code, tuple(tensor.shape))
    if peer.can_map:
        # An exclusive tensor whose own memory cannot be mapped is sent as a snapshot.
        for exclusive in (
            (True, False) if context.exclusive and size >= MIN_LEASE_BYTES else (False,)
        ):
            make_send = functools.partial(CudaSend, transfers, context, device.index, exclusive)
            try:
                send = message_resource(("device", device.index, exclusive), make_send)
                location = send.add(tensor, target.index)
            # no memory for a snapshot, or memory that cannot be mapped
            except (torch.OutOfMemoryError, driver.CudaError):
                continue
            return receive_tensor, (send, *location, target.index, code, tuple(tensor.shape))
    return staging.reduce_through_host(tensor, code, context.exclusive, target)


def _unmapped_message(context: MessageContext, device: torch.device) -> str:
    """Return an error message in torch's wording."""
    if context.route.is_reply:
        return (
            f"Response device mapping is not available for worker {context.peer!r}: the result has "
            f"tensors on {device}, which the device map of that worker does not contain"
        )
    return (
        "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to "
        f"CPU before sending them to worker {context.peer!r}, or call `set_device_map` on "
        f"`TensorPipeRpcBackendOptions` to set the device on which those on {device} arrive"
    )
