"""`telegrad bench ...`: measure Telegrad beside its peers on this machine, and look at the results.

The benchmarks are a package of their own, `benchmarks`. It is installed beside this one in a folder that only it is in;
in a checkout it is at the top. Python is given it in place of this process.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent.parent
_FOLDERS = (_PACKAGE / "bench", _PACKAGE.parent.parent)


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine: Telegrad, its peers, and the limits",
        description="Run the benchmarks; `telegrad bench --help` shows how.",
        add_help=False,
        prefix_chars="\0",  # no argument is an option of ours
    )
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="their options")
    parser.set_defaults(command=lambda chosen: _bench(parser, chosen.args))


def _bench(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    folder = next(
        (folder for folder in _FOLDERS if (folder / "benchmarks" / "__main__.py").exists()), None
    )
    if folder is None:
        parser.error(
            f"the benchmarks are neither in {' nor in '.join(str(folder) for folder in _FOLDERS)}"
        )
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    sys.stdout.flush()
    command = [sys.executable, "-m", "benchmarks", *arguments]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": os.pathsep.join(path)})
