"""Run a program that was written for `torch.distributed.rpc` on Telegrad, unchanged.

After `install()`, every import path of torch's RPC, distributed autograd, optimizer and RemoteModule leads to
Telegrad's modules. What was imported before is caught up with: wherever a loaded module holds one of torch's functions
or classes, it holds Telegrad's from then on. So it does not matter whether `install` comes before or after other
imports. Only what is not a global of a module (an attribute of an object, a base class) stays as it was.

Processes that start later have it too. A forked one inherits it. One that is spawned, or comes from a fork server, is
sent a pickle of preparation data before it imports the program's `__main__`; we put an object into it that installs
when it is unpickled. An environment variable would need a file in site-packages that every Python process reads, and
it would reach processes that have nothing to do with the program; this reaches exactly its children, before their
first line. (coverage.py finds its way into children like this.) A program started by other means, such as `subprocess`
or torchrun, says so itself: `python -m telegrad run script.py`.

TorchScript is left alone: its compiler knows torch's own RRef only, and is to say so.

State: what was there before, as a list of steps to take it back (`_Redirection.undo`), changed under its lock.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing.spawn
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc

from telegrad import futures
from telegrad.refs import RRef

__all__ = ["install", "installed", "uninstall"]

_MODULES = {
    "torch.distributed.rpc": "telegrad.rpc",
    "torch.distributed.autograd": "telegrad.autograd",
    "torch.distributed.nn.api.remote_module": "telegrad.nn",
    "torch.distributed.optim.optimizer": "telegrad.optim",
}

_ENGINE = ("torch._C._distributed_rpc", "torch._C._distributed_autograd")
_SCRIPT = ("torch.jit", "torch._jit_internal")


def install() -> None:
    """Make torch's names for all that Telegrad offers mean Telegrad's, here and in processes that start later.

    >>> install()
    >>> import torch.distributed.rpc as rpc
    >>> rpc.__name__
    'telegrad.rpc'
    >>> uninstall()
    """
    with _redirection.lock:
        if _redirection.undo:
            return
        try:
            _redirection.install()
        except BaseException:
            uninstall()
            raise


def uninstall() -> None:
    """Give torch its names back. Modules that were imported in between keep what they imported."""
    with _redirection.lock:
        while _redirection.undo:
            _redirection.undo.pop()()


def installed() -> bool:
    """Do torch's names mean Telegrad's in this process?"""
    return bool(_redirection.undo)


class _Redirection:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.undo: list[Callable[[], None]] = []

    def install(self) -> None:
        finder = _Finder()
        self.undo.append(lambda: self._forget(finder))
        sys.meta_path.insert(0, finder)
        changes = {id(old): new for old, new in self._take_over()}
        changes[id(torch._C._distributed_rpc.PyRRef)] = RRef
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and not f"{name}.".startswith(_SCRIPT):
                # a lazy module stays unloaded
                self._rebind(object.__getattribute__(module, "__dict__"), changes)
        futures.end_collect_all_early()
        self._tell_children()

    def _take_over(self) -> Iterator[tuple[object, object]]:
        """Put Telegrad's modules in the place of those that are loaded; yields what each thing of theirs becomes."""
        for name, old in [
            (name, module) for name, module in list(sys.modules.items()) if _counterpart(name)
        ]:
            self.undo.append(functools.partial(sys.modules.__setitem__, name, old))
            ours = _find(name)
            if ours is None:
                del sys.modules[name]
            else:
                sys.modules[name] = ours
                yield from _pairs(old, ours)

    def _rebind(self, namespace: dict[str, Any], changes: dict[int, object]) -> None:
        for name, value in list(namespace.items()):
            if id(value) in changes:
                namespace[name] = changes[id(value)]
                self.undo.append(functools.partial(namespace.__setitem__, name, value))

    def _forget(self, finder: _Finder) -> None:
        """The last step back: torch's own modules take the place of those that were found meanwhile."""
        sys.meta_path.remove(finder)
        for name in finder.found:
            ours = sys.modules.pop(name)
            if importlib.util.find_spec(name) is None:
                continue  # a name that only Telegrad has
            back = {id(new): old for old, new in _pairs(importlib.import_module(name), ours)}
            for depth in range(1, name.count(".") - 1):
                namespace = vars(sys.modules[name.rsplit(".", depth)[0]])
                namespace.update(
                    {key: back[id(value)] for key, value in namespace.items() if id(value) in back}
                )

    def _tell_children(self) -> None:
        spawn: Any = multiprocessing.spawn
        prepare = spawn.get_preparation_data

        @functools.wraps(prepare)
        def get_preparation_data(name: str) -> dict[str, Any]:
            data: dict[str, Any] = prepare(name)
            return (
                {"telegrad.compat": _InstallInChild(data["sys_path"]), **data}
                if self.undo
                else data
            )

        spawn.get_preparation_data = get_preparation_data
        self.undo.append(lambda: setattr(spawn, "get_preparation_data", prepare))


class _InstallInChild:
    """Travels in what a new process is told first; unpickling it installs. `sys.path` is not the parent's yet then."""

    def __init__(self, path: Sequence[Any]) -> None:
        self._path = [str(entry) for entry in path]

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (
            f"import sys; sys.path = {self._path!r}; from telegrad import compat; compat.install()",
            {},
        )


class _Finder(MetaPathFinder):
    """Finds Telegrad's modules under torch's names, when they are first imported after `install`."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = _find(fullname)
        if module is None:
            return None
        self.found.append(fullname)
        return ModuleSpec(fullname, _ExistingModuleLoader(module))


class _ExistingModuleLoader(Loader):
    """The loader of a module that there is already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = self._module


def _counterpart(name: str) -> str | None:
    """The name of Telegrad's module in the place of torch's; None where torch keeps its own."""
    for theirs, ours in _MODULES.items():
        if f"{name}.".startswith(f"{theirs}."):
            return ours + name.removeprefix(theirs)
    return None


def _find(name: str) -> ModuleType | None:
    """Telegrad's module in the place of torch's, if there is one."""
    ours = _counterpart(name)
    if ours is None:
        return None
    try:
        return importlib.import_module(ours)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{ours}.".startswith(f"{error.name}."):
            raise  # the module is there, what it imports is not
        return None


def _pairs(old: ModuleType, new: ModuleType) -> Iterator[tuple[object, object]]:
    """Torch's module and Telegrad's, and each function and class that both have."""
    yield old, new
    for name, value in vars(old).items():
        if isinstance(value, type | FunctionType | BuiltinFunctionType) and hasattr(new, name):
            home = str(value.__module__)
            if home in _ENGINE or _counterpart(home):
                yield value, getattr(new, name)


_redirection = _Redirection()
