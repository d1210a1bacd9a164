"""`telegrad launch ... script.py`: start the workers of a program on this host."""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from telegrad.errors import UsageError

_EXAMPLES = """\
  telegrad launch -n 3 train.py --epochs 3                      worker0, worker1 and worker2
  telegrad launch --role ps=1 --role trainer=4 train.py         ps0, trainer0, ..., trainer3
  telegrad launch -n 3 --restarts 2 -m project.train            a module; restart what fails
  telegrad launch -n 2 -m telegrad run old.py                   a torch.distributed.rpc script

In each worker, `init_rpc` and `Agent` need no arguments.
"""


def add(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "launch",
        help="start the workers of a program",
        description="Start the workers of a program, show and keep their output, and restart those "
        "that fail. The exit code is that of the first worker that fails for good.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", dest="workers", type=int, metavar="N", help="number of workers")
    parser.add_argument(
        "--role",
        dest="roles",
        action="append",
        type=_role,
        default=[],
        metavar="NAME=N",
        help="N workers of a role, named NAME0, NAME1, ...; may be repeated",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="restart a worker that fails, under the same name, up to N times (default: 0)",
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the output here (default: a new folder)"
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="PROGRAM is the name of a module"
    )
    parser.add_argument("program", metavar="PROGRAM", help="a script")
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the program"
    )
    parser.set_defaults(command=lambda options: _launch(parser, options))


def _role(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    if not name or not size.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=N")
    return name, int(size)


def _launch(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if (options.workers is None) == (not options.roles):
        parser.error("give the number of workers: either -n N or --role NAME=N")
    if not options.module and not Path(options.program).exists():
        parser.error(f"cannot launch {options.program!r}: there is no such file")
    roles = dict(options.roles) or {"worker": options.workers}
    program: Sequence[str] = ["-m", options.program] if options.module else [options.program]
    folder = options.logs or Path(tempfile.mkdtemp(prefix="telegrad-"))
    scripts = importlib.import_module("telegrad.launcher.scripts")  # it imports torch
    try:
        exit_code: int = scripts.run_script(
            [*program, *options.args], roles, options.restarts, folder
        )
    except UsageError as error:
        parser.error(str(error))
    return exit_code
