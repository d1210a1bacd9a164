"""`RemoteModule`: an `nn.Module` whose parameters and computation live on another worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from telegrad.agent import Agent, runtime_of
from telegrad.errors import SerializationError, UsageError
from telegrad.futures import Future
from telegrad.messages.packing import current_message
from telegrad.messages.remote_functions import trusted
from telegrad.refs import RRef, remote
from telegrad.refs.manager import ReferenceManager
from telegrad.refs.owned_objects import ObjectKey
from telegrad.refs.owner_calls import with_object
from telegrad.wire.handshake import Incarnation

__all__ = ["RemoteModule"]

Self = TypeVar("Self", bound="RemoteModule")

_SENT_ATTRIBUTES = ("on", "device", "module_rref", "training")


class RemoteModule(nn.Module):
    """A module on another worker: `module_cls(*args, **kwargs)`, made on `remote_device`.

    `remote_device` is ``"worker/cuda:0"``, ``"worker"`` or ``"rank:1/cpu"``. Calling the module
    runs `forward` on that worker. CPU tensors are moved to the device of the module, and results
    come back on the CPU; CUDA tensors arrive where device maps say. A `RemoteModule` can be part of
    a local `nn.Sequential` and can be sent over RPC.

    `train`, `eval`, `to`, `state_dict`, `load_state_dict`, `zero_grad` and `requires_grad_` act on
    the remote module. Methods that need the parameters here (`parameters`, `register_buffer`,
    hooks) raise an error.

    >>> from telegrad.testing import LocalCluster
    >>> with LocalCluster(2) as cluster:
    ...     layer = RemoteModule("w1/cpu", nn.Linear, (3, 2), agent=cluster["w0"])
    ...     layer(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """

    on: str
    device: str
    module_rref: RRef[nn.Module]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        *,
        agent: Agent | None = None,
    ) -> None:
        super().__init__()
        if runtime_of(agent) is None:
            raise UsageError("RemoteModule requires RPC: call init_rpc first, or pass agent=")
        to, device = _parse_device(remote_device)
        rref = remote(to, _make, (module_cls, args or (), kwargs or {}, device), agent=agent)
        self._set_module(rref, device)

    def _set_module(self, rref: RRef[nn.Module], device: str) -> None:
        self.on = rref.owner_name()
        self.device = device
        self.module_rref = rref

    @staticmethod
    def init_from_module_rref(remote_device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
        """Return a `RemoteModule` for an existing module, on the owner of the reference."""
        _, device = _parse_device(remote_device)
        module = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(module)
        module._set_module(module_rref, device)
        return module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` of the module on its worker."""
        return self.module_rref._call(_forward, -1.0, (self.device, *args), kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future for `forward`."""
        return self.module_rref._start(_forward, -1.0, (self.device, *args), kwargs)

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return references to the parameters, for a `DistributedOptimizer`."""
        rrefs: list[RRef[nn.Parameter]] = self.module_rref._call(_parameters, -1.0, (recurse,), {})
        return rrefs

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the reference to the module."""
        return self.module_rref

    # Methods that act on the remote module

    def train(self: Self, mode: bool = True) -> Self:
        """Set training mode on the worker of the module."""
        self.training = mode
        self.module_rref.rpc_sync().train(mode)
        return self

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """Move or convert the module on its worker."""
        self.device = self.module_rref._call(_convert, -1.0, args, kwargs)
        return self

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Freeze or unfreeze the module on its worker."""
        self.module_rref.rpc_sync().requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the module on its worker."""
        self.module_rref.rpc_sync().zero_grad(set_to_none)

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return a copy of the state of the module."""
        state: dict[str, Any] = {} if destination is None else destination
        for name, value in self.module_rref.rpc_sync().state_dict().items():
            state[prefix + name] = value
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state into the module on its worker."""
        return self.module_rref._call(_load, -1.0, (dict(state_dict), strict, assign), {})

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load this part of the state of a module that contains this one."""
        own_state = {
            name.removeprefix(prefix): value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
        try:
            missing, unexpected = self.load_state_dict(own_state, strict=False)
        except RuntimeError as error:
            error_msgs.append(str(error))
            return
        if strict:
            missing_keys.extend(prefix + name for name in missing)
            unexpected_keys.extend(prefix + name for name in unexpected)

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        """Do nothing: moving or converting a module that contains this one does not change it."""
        return self

    # A local module sees this one as a leaf

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if self not in memo:
            memo.add(self)
            yield prefix, self

    def extra_repr(self) -> str:
        return f"on={self.on!r}, device={self.device!r}"

    def __getstate__(self) -> dict[str, Any]:
        if current_message() is None:
            raise SerializationError(
                "Cannot pickle RemoteModule in python pickler. "
                "RemoteModule can only be pickled when using RPC"
            )
        return {name: getattr(self, name) for name in _SENT_ATTRIBUTES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(state)


def _unsupported(name: str, advice: str = "") -> Callable[..., NoReturn]:
    """Return a method that raises torch's error for an unsupported method."""

    def raise_unsupported(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule{advice}")

    raise_unsupported.__name__ = name
    return raise_unsupported


for _name in (
    "register_buffer",
    "register_parameter",
    "add_module",
    "apply",
    "register_backward_hook",
    "register_full_backward_hook",
    "register_forward_pre_hook",
    "register_forward_hook",
    "named_parameters",
    "buffers",
    "named_buffers",
    "share_memory",
):
    setattr(RemoteModule, _name, _unsupported(_name))
RemoteModule.parameters = _unsupported(  # type: ignore[method-assign, assignment]
    "parameters", ". Please use ``remote_parameters`` instead."
)


def _parse_device(text: str) -> tuple[str | int, str]:
    """Return worker and device of ``worker/device``, ``rank:n/device`` or ``worker``."""
    worker, slash, device = text.partition("/")
    if not worker or "/" in device:
        raise ValueError(
            f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>', "
            "such as 'worker1/cuda:0' or 'rank:1/cpu'; the device may be left out"
        )
    device = str(torch.device(device if slash else "cpu"))
    if worker.startswith("rank:"):
        rank = worker.removeprefix("rank:")
        if not rank.isdigit():
            raise ValueError(f"{text!r} has no rank after 'rank:'")
        return int(rank), device
    return worker, device


# Functions that the owner runs. Their first arguments are the owner and key of the module, as
# `RRef` sends them.


def _make(
    module_cls: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    return module.to(device)


@trusted
def _forward(owner: Incarnation, key: ObjectKey, device: str, /, *args: Any, **kwargs: Any) -> Any:
    def run(_: ReferenceManager, module: nn.Module) -> Any:
        if device == "cpu":
            return module(*args, **kwargs)
        from_cpu = not any(
            isinstance(value, Tensor) and not value.is_cpu for value in (*args, *kwargs.values())
        )
        moved_args = [_to(value, device) for value in args]
        moved_kwargs = {name: _to(value, device) for name, value in kwargs.items()}
        result = module(*moved_args, **moved_kwargs)
        return _to_cpu(result) if from_cpu else result

    return with_object(owner, key, run)


def _to_cpu(result: Any) -> Any:
    if isinstance(result, list):
        return [_to(part, "cpu") for part in result]
    if isinstance(result, tuple):
        return tuple(_to(part, "cpu") for part in result)
    return _to(result, "cpu")


def _to(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


@trusted
def _parameters(owner: Incarnation, key: ObjectKey, recurse: bool) -> Any:
    return with_object(
        owner, key, lambda _, module: [RRef(parameter) for parameter in module.parameters(recurse)]
    )


@trusted
def _convert(owner: Incarnation, key: ObjectKey, /, *args: Any, **kwargs: Any) -> Any:
    def run(_: ReferenceManager, module: nn.Module) -> str:
        module.to(*args, **kwargs)
        first = next(iter([*module.parameters(), *module.buffers()]), None)
        return "cpu" if first is None else str(first.device)

    return with_object(owner, key, run)


@trusted
def _load(
    owner: Incarnation, key: ObjectKey, state: dict[str, Any], strict: bool, assign: bool
) -> Any:
    return with_object(
        owner, key, lambda _, module: tuple(module.load_state_dict(state, strict, assign))
    )
