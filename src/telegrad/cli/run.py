"""`telegrad run script.py ...`: run a program for `torch.distributed.rpc` on Telegrad, unchanged.

The program runs as `__main__`, with its own `sys.argv` and `sys.path[0]`, as if Python had been
started with it. Exit codes and Ctrl-C behave as in Python, and a traceback starts with the lines of
the program. Its module stays in `sys.modules` when it ends, because threads, exit handlers and
workers that refer to its functions may still need it.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple

from telegrad import openmp
from telegrad.cli.help_text import HelpFormatter
from telegrad.errors import UsageError

_EXAMPLES = """\
  telegrad run train.py --epochs 3                        a script
  telegrad run -m project.train --epochs 3                a module
  torchrun --nproc-per-node 4 -m telegrad run train.py    with torchrun
"""


class Program(NamedTuple):
    """The program that becomes `__main__`."""

    code: CodeType
    module_attributes: dict[str, Any]  # those that the import system sets
    argv0: str


def add(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "run",
        help="run a program that was written for torch.distributed.rpc, unchanged",
        description="Run a program with Telegrad in place of torch.distributed.rpc and related "
        "modules, in its own process and in all processes that it forks or spawns.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="PROGRAM is the name of a module"
    )
    parser.add_argument(
        "program", metavar="PROGRAM", help="a script, or a folder or zip file with a __main__.py"
    )
    rest = parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the program"
    )
    rest.required = False  # an error about a missing argument does not name it
    parser.set_defaults(command=lambda options: _run(parser, options))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    openmp.limit_spinning(os.environ)  # before torch is imported, by the next line
    # Install before searching for the program: finding a module imports its package.
    importlib.import_module("telegrad.compat").install()
    main = new_main()
    try:
        find = _find_module if options.module else find_script
        program = find(options.program)
    except UsageError as error:
        parser.error(f"cannot run {options.program!r}: {error}")
    run_as_main(main, program, options.args)
    return 0


def new_main() -> ModuleType:
    """Return a module for a program. A traceback that ends the process starts in its code."""
    main = ModuleType("__main__")
    _hide_frames(vars(main))
    return main


def run_as_main(main: ModuleType, program: Program, arguments: Sequence[str]) -> None:
    """Run a program as `__main__` in this process."""
    sys.argv = [program.argv0, *arguments]
    sys.modules["__main__"] = main
    vars(main).update(program.module_attributes, __builtins__=builtins)
    exec(program.code, vars(main))


def find_script(path: str) -> Program:
    """Return the program in a script, or in a folder or zip file. Put its folder on `sys.path`."""
    if not os.path.exists(path):
        raise UsageError("there is no such file")
    absolute = os.path.abspath(path)
    spec = PathFinder.find_spec("__main__", [absolute])  # a folder or a zip file
    if spec is not None:
        _put_first(path)
        return _from_spec(spec, path)
    if os.path.isdir(path):
        raise UsageError("it is a folder without a __main__.py")
    _put_first(os.path.dirname(os.path.realpath(path)))
    loader = SourceFileLoader("__main__", absolute)
    code = loader.source_to_code(loader.get_data(absolute), absolute)
    return Program(code, {"__file__": absolute, "__loader__": loader}, path)


def _find_module(name: str) -> Program:
    _put_first(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but its package imports one that does not
        spec = None
    if spec is None or spec.origin is None:
        raise UsageError("there is no such module, or it is a package without __main__")
    return _from_spec(spec, spec.origin)


def _from_spec(spec: ModuleSpec, argv0: str) -> Program:
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    if code is None:
        raise UsageError("it is not made of Python code")
    attributes = {
        "__file__": spec.origin,
        "__loader__": loader,
        "__spec__": spec,
        "__cached__": spec.cached,
    }
    return Program(code, {**attributes, "__package__": spec.parent}, argv0)


def _put_first(folder: str) -> None:
    """Replace the first entry of `sys.path`, which is that of the `telegrad` command."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _hide_frames(main: dict[str, Any]) -> None:
    """Remove the frames of this module from a traceback that ends the process."""
    show = sys.excepthook

    def show_program(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        inner = trace
        while inner is not None and inner.tb_frame.f_globals is not main:
            inner = inner.tb_next
        # without a frame of the program, show all; a syntax error in the program needs none
        if inner is None and not isinstance(error, SyntaxError):
            inner = trace
        show(kind, error.with_traceback(inner), inner)

    sys.excepthook = show_program
