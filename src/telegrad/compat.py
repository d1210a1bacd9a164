"""Run a program that was written for `torch.distributed.rpc` on Telegrad, unchanged.

After `install()`, all import paths of torch's RPC, distributed autograd, optimizer and RemoteModule
lead to Telegrad's modules. Earlier imports are redirected, too: every global of a loaded module
that is one of torch's functions or classes is replaced by Telegrad's. So `install` may be called
before or after other imports. Only references that are not globals of a module, such as attributes
of objects and base classes, stay as they are.

Processes that start later are redirected as well. A forked process inherits it. A process that is
spawned or comes from a fork server is sent a pickle of preparation data before it imports the
program's `__main__`; an object in that pickle calls `install` when it is unpickled (coverage.py
does the same). An environment variable would need a file in site-packages that every Python process
reads, and would reach unrelated processes. A program that is started by other means, such as
`subprocess` or torchrun, needs its own `python -m telegrad run script.py`.

TorchScript is not redirected: its compiler knows only torch's own RRef and reports that as an
error.

State: the functions that undo each change (`_Redirection.undo`), under its lock.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing.forkserver
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
    """Redirect torch's names to Telegrad's, in this process and in those that it starts.

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
    """Undo `install`. Modules that were imported in between keep what they imported."""
    with _redirection.lock:
        while _redirection.undo:
            _redirection.undo.pop()()


def installed() -> bool:
    """Return True if torch's names are redirected in this process."""
    return bool(_redirection.undo)


class _Redirection:
    """The changes that `install` makes, and how to undo them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.undo: list[Callable[[], None]] = []  # called from last to first

    def install(self) -> None:
        finder = _Finder()
        self.undo.append(lambda: self._remove_finder(finder))
        sys.meta_path.insert(0, finder)
        replacements = {id(old): new for old, new in self._replace_modules()}
        replacements[id(torch._C._distributed_rpc.PyRRef)] = RRef
        for name, module in list(sys.modules.items()):
            # Libraries of cffi are in `sys.modules`, too, and `isinstance` takes them for modules.
            is_module = issubclass(type(module), ModuleType)
            if is_module and not f"{name}.".startswith(_SCRIPT):
                # `vars` would load a lazy module
                namespace = object.__getattribute__(module, "__dict__")
                self._rebind(namespace, replacements)
        futures.end_collect_all_early()
        self._install_in_children()

    def _replace_modules(self) -> Iterator[tuple[object, object]]:
        """Replace torch's loaded modules; yield each of their objects with its replacement."""
        for name, old in list(sys.modules.items()):
            if not _counterpart(name):
                continue
            self.undo.append(functools.partial(sys.modules.__setitem__, name, old))
            replacement = _find(name)
            if replacement is None:
                del sys.modules[name]
            else:
                sys.modules[name] = replacement
                yield from _pairs(old, replacement)

    def _rebind(self, namespace: dict[str, Any], replacements: dict[int, object]) -> None:
        """Replace the values of a namespace, by their id."""
        for name, value in list(namespace.items()):
            if id(value) in replacements:
                namespace[name] = replacements[id(value)]
                self.undo.append(functools.partial(namespace.__setitem__, name, value))

    def _remove_finder(self, finder: _Finder) -> None:
        """Replace the modules that the finder has loaded by torch's own; the last step of undo."""
        sys.meta_path.remove(finder)
        for name in finder.found:
            replacement = sys.modules.pop(name)
            if importlib.util.find_spec(name) is None:
                continue  # only Telegrad has a module of this name
            original = importlib.import_module(name)
            originals = {id(new): old for old, new in _pairs(original, replacement)}
            # parent packages may have imported names of this module
            for depth in range(1, name.count(".") - 1):
                namespace = vars(sys.modules[name.rsplit(".", depth)[0]])
                for key, value in list(namespace.items()):
                    if id(value) in originals:
                        namespace[key] = originals[id(value)]

    def _install_in_children(self) -> None:
        """Put an object into the preparation data of new processes that installs there."""
        spawn: Any = multiprocessing.spawn
        prepare = spawn.get_preparation_data

        @functools.wraps(prepare)
        def get_preparation_data(name: str) -> dict[str, Any]:
            data: dict[str, Any] = prepare(name)
            if not self.undo:
                return data
            return {"telegrad.compat": _InstallInChild(data["sys_path"]), **data}

        spawn.get_preparation_data = get_preparation_data
        self.undo.append(lambda: setattr(spawn, "get_preparation_data", prepare))
        # From Python 3.14 on, the fork server itself imports the program, without preparation data.
        # Each of its children does so instead, after `install`.
        fork_server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
        preloaded = fork_server._preload_modules
        fork_server._preload_modules = [name for name in preloaded if name != "__main__"]
        self.undo.append(lambda: setattr(fork_server, "_preload_modules", preloaded))


class _InstallInChild:
    """Calls `install` in a new process when it is unpickled, after setting `sys.path`."""

    def __init__(self, path: Sequence[Any]) -> None:
        self._path = [str(entry) for entry in path]

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (
            f"import sys; sys.path = {self._path!r}; from telegrad import compat; compat.install()",
            {},
        )


class _Finder(MetaPathFinder):
    """Finds Telegrad's modules for those of torch that are first imported after `install`."""

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
    """The loader of a module that is loaded already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = self._module


def _counterpart(name: str) -> str | None:
    """Return the name of Telegrad's module for one of torch; None if it is not redirected."""
    for torch_name, replacement in _MODULES.items():
        if f"{name}.".startswith(f"{torch_name}."):
            return replacement + name.removeprefix(torch_name)
    return None


def _find(name: str) -> ModuleType | None:
    """Return Telegrad's module for one of torch, or None."""
    replacement = _counterpart(name)
    if replacement is None:
        return None
    try:
        return importlib.import_module(replacement)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{replacement}.".startswith(f"{error.name}."):
            raise  # the module exists, but one that it imports does not
        return None


def _pairs(old: ModuleType, new: ModuleType) -> Iterator[tuple[object, object]]:
    """Yield both modules as a pair, and each function and class that both have."""
    yield old, new
    for name, value in vars(old).items():
        if isinstance(value, type | FunctionType | BuiltinFunctionType) and hasattr(new, name):
            home = str(value.__module__)
            if home in _ENGINE or _counterpart(home):
                yield value, getattr(new, name)


_redirection = _Redirection()
