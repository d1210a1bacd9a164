"""Make `torch.distributed.rpc` and its neighbours mean Telegrad, before the suites import them.

`install()` is the one place that does this: `telegrad.compat.install()` is to take its place once it exists. After
it, the torch names *are* Telegrad's modules, so what a test patches is patched in Telegrad.

A name that Telegrad does not have yet must fail the tests that use it and no others. The suites import most names at
the top of their files, so they, and only they, get a `Missing` that fails when it is used.
"""

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.nn
import torch.distributed.optim
import torch.distributed.rpc

SUITES = "torch.testing._internal."  # modules that may import what is missing


class NotOfferedError(AttributeError):  # not a RuntimeError: tests expect those
    """A test used something that Telegrad does not have."""


class Missing:
    """In place of a function, class or enum: can be imported, and named in signatures; anything else fails."""

    name = "?"

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.name}.{name}")

    def __getitem__(self, item: object) -> "Missing":
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and inspect.isfunction(args[0]):  # as a decorator
            return Missing(f"{self.name}, which decorates {args[0].__name__}")
        return self._fail()

    def _fail(self, *args: Any) -> Any:
        raise NotOfferedError(f"telegrad does not offer {self.name}")

    __eq__ = __bool__ = __iter__ = __enter__ = _fail
    __hash__ = object.__hash__


def install() -> None:
    """Point the torch names at Telegrad."""
    torch.jit._builtins._get_builtin_table()  # reads torch.distributed.autograd once: let it see torch's own
    for name in sorted(n for n in sys.modules if f"{n}.".startswith("torch.distributed.rpc.")):  # parents first
        _point(name, "telegrad" + name.removeprefix("torch.distributed"))
    _point("torch.distributed.autograd", "telegrad.autograd")
    for module in (torch.distributed.rpc, torch.distributed.autograd):
        vars(module).setdefault("is_available", lambda: True)  # torch's other modules ask
    _point("torch.distributed.nn.api.remote_module", "telegrad.nn")
    vars(torch.distributed.nn)["RemoteModule"] = _get("telegrad.nn", "RemoteModule")
    vars(torch.distributed.optim)["DistributedOptimizer"] = _get("telegrad.optim", "DistributedOptimizer")


def _point(torch_name: str, telegrad_name: str) -> None:
    module = _module(telegrad_name)
    parent, _, child = torch_name.rpartition(".")
    sys.modules[torch_name] = module
    setattr(sys.modules[parent], child, module)


def _module(name: str) -> ModuleType:
    """The module, or an empty one where there is none; suites find a `Missing` for every name it lacks."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, what it imports is not
        module = ModuleType(name)
    if not hasattr(module, "__getattr__"):

        def missing(attribute: str) -> Missing:
            if sys._getframe(1).f_globals.get("__name__", "").startswith(SUITES) and not attribute.startswith("__"):
                return Missing(f"{name}.{attribute}")
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

        module.__dict__["__getattr__"] = missing
    return module


def _get(module: str, name: str) -> Any:
    return getattr(_module(module), name, Missing(f"{module}.{name}"))


def tolerate_script() -> None:
    """dist_autograd_test compiles, as it is imported, a function that takes an `RRef[Tensor]`. TorchScript knows the
    C++ RRef only, so with another one that line would take the whole file down: the function becomes a `Missing`."""
    compile_script = torch.jit.script

    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return compile_script(obj, *args, **kwargs)
        except Exception:
            if inspect.isfunction(obj) and obj.__module__.startswith(SUITES):
                return Missing(f"a type that TorchScript can compile in {obj.__name__}")
            raise

    vars(torch.jit)["script"] = script
