"""Make `torch.distributed.rpc` and its neighbours mean Telegrad, before the suites import them.

`telegrad.compat.install()` does it, as for any program: the torch names *are* Telegrad's modules
then, so what a test patches is patched in Telegrad. Here we add what only the suites need: a name
that Telegrad does not have must fail the tests that use it and no others. The suites import most
names at the top of their files, so they, and only they, get a `Missing` that fails when it is used.
"""

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc

from telegrad import compat

SUITES = "torch.testing._internal."  # modules that may import what is missing
RPC = "torch.distributed.rpc"
OTHERS = [
    "torch.distributed.autograd",
    "torch.distributed.nn.api.remote_module",
    "torch.distributed.optim.optimizer",
]


class NotOfferedError(AttributeError):  # not a RuntimeError: tests expect those
    """A test used something that Telegrad does not have."""


class Missing:
    """In place of a function, class or enum: can be imported, and named in signatures; anything
    else fails.
    """

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
    """Point the torch names at Telegrad; what it lacks is a `Missing`, for the suites."""
    # reads torch.distributed.autograd once: let it see torch's own
    torch.jit._builtins._get_builtin_table()
    # parents first
    loaded = sorted(name for name in sys.modules if f"{name}.".startswith(f"{RPC}."))
    compat.install()
    for name in (*loaded, *OTHERS):
        _complete(_telegrads(name))


def _telegrads(name: str) -> ModuleType:
    """What Telegrad has under this name of torch's; where it has nothing, an empty module takes its
    place.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        module = ModuleType(name)
    if module.__name__ == name:
        module = ModuleType("telegrad" + name.removeprefix("torch.distributed"))
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        setattr(importlib.import_module(parent), child, module)
    return module


def _complete(module: ModuleType) -> None:
    if hasattr(module, "__getattr__"):
        return

    def missing(attribute: str) -> Missing:
        if sys._getframe(1).f_globals.get("__name__", "").startswith(
            SUITES
        ) and not attribute.startswith("__"):
            return Missing(f"{module.__name__}.{attribute}")
        raise AttributeError(f"module {module.__name__!r} has no attribute {attribute!r}")

    module.__dict__["__getattr__"] = missing


def tolerate_script() -> None:
    """Let `dist_autograd_test` be imported: it compiles a function that takes an `RRef[Tensor]`.

    TorchScript knows the C++ RRef only, so the compiled function becomes a `Missing` here.
    """
    compile_script = torch.jit.script

    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return compile_script(obj, *args, **kwargs)
        except Exception:
            if inspect.isfunction(obj) and obj.__module__.startswith(SUITES):
                return Missing(f"a type that TorchScript can compile in {obj.__name__}")
            raise

    vars(torch.jit)["script"] = script
