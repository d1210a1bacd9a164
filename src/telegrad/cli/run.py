"""`telegrad run script.py ...`: run a program that was written for `torch.distributed.rpc`, unchanged.

The program is `__main__`, with its own `sys.argv` and `sys.path[0]`, as if Python had been given it directly. Exit
codes and Ctrl-C are Python's, and a traceback starts with the program's own lines. Its module stays in place when it
ends, since threads, exit handlers and workers that refer to its functions may still need it.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple

from telegrad import openmp
from telegrad.errors import UsageError

_EXAMPLES = """\
  telegrad run train.py --epochs 3                        a script
  telegrad run -m project.train --epochs 3                a module
  torchrun --nproc-per-node 4 -m telegrad run train.py    started by others
"""


class Program(NamedTuple):
    """What `__main__` is going to be."""

    code: CodeType
    names: dict[str, Any]  # that the import system sets
    argv0: str


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "run",
        help="run a program that was written for torch.distributed.rpc, unchanged",
        description="Run a program with torch.distributed.rpc and its neighbours meaning Telegrad, "
        "in its own process and in all that it forks or spawns.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="PROGRAM is the name of a module"
    )
    parser.add_argument(
        "program", metavar="PROGRAM", help="a script, or a folder or zip file with a __main__.py"
    )
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(command=lambda chosen: _run(parser, chosen))


def _run(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> int:
    openmp.limit_spinning(os.environ)  # torch reads it when it is imported, by the next line
    # This comes first, because finding a module imports its package.
    importlib.import_module("telegrad.compat").install()
    main = ModuleType("__main__")
    _hide_ourselves(vars(main))
    try:
        program = _find_module(chosen.program) if chosen.module else _find_script(chosen.program)
    except UsageError as error:
        parser.error(f"cannot run {chosen.program!r}: {error}")
    sys.argv = [program.argv0, *chosen.args]
    sys.modules["__main__"] = main
    vars(main).update(program.names, __builtins__=builtins)
    exec(program.code, vars(main))
    return 0


def _find_script(path: str) -> Program:
    if not os.path.exists(path):
        raise UsageError("there is no such file")
    where = os.path.abspath(path)
    spec = PathFinder.find_spec("__main__", [where])  # a folder or a zip file
    if spec is not None:
        _put_first(path)
        return _named(spec, path)
    if os.path.isdir(path):
        raise UsageError("it is a folder without a __main__.py")
    _put_first(os.path.dirname(os.path.realpath(path)))
    loader = SourceFileLoader("__main__", where)
    code = loader.source_to_code(loader.get_data(where), where)
    return Program(code, {"__file__": where, "__loader__": loader}, path)


def _find_module(name: str) -> Program:
    _put_first(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, what its package imports is not
        spec = None
    if spec is None or spec.origin is None:
        raise UsageError("there is no such module, or it is a package without __main__")
    return _named(spec, spec.origin)


def _named(spec: ModuleSpec, argv0: str) -> Program:
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    if code is None:
        raise UsageError("it is not made of Python code")
    names = {
        "__file__": spec.origin,
        "__loader__": loader,
        "__spec__": spec,
        "__cached__": spec.cached,
    }
    return Program(code, {**names, "__package__": spec.parent}, argv0)


def _put_first(folder: str) -> None:
    """As the first entry of `sys.path`, in place of the one that Telegrad was started with."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _hide_ourselves(main: dict[str, Any]) -> None:
    """Let a traceback that ends the process begin in the program, or where the program cannot be compiled."""
    show = sys.excepthook

    def show_program(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        inner = trace
        while inner is not None and inner.tb_frame.f_globals is not main:
            inner = inner.tb_next
        if inner is None and not isinstance(error, SyntaxError):
            inner = trace
        show(kind, error.with_traceback(inner), inner)

    sys.excepthook = show_program
