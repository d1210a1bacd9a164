"""`telegrad bench ...`: run the benchmarks of a source checkout.

The benchmarks are the package `benchmarks` at the top of the repository; the wheel does not contain
them. The command replaces this process with ``python -m benchmarks`` and passes all arguments on.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

_CHECKOUT = Path(__file__).parents[3]
_NO_CHECKOUT = (
    "the benchmarks are not part of the installed package; `telegrad bench` needs a checkout:\n"
    "  git clone https://github.com/telegrad/telegrad\n"
    "  cd telegrad\n"
    "  pip install -e '.[bench]'"
)


def add(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "bench",
        help="measure Telegrad and other frameworks on this machine (needs a checkout)",
        description="Run the benchmarks; `telegrad bench --help` shows their options.",
        add_help=False,
        prefix_chars="\0",  # pass all options on
    )
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="...", help="options of the benchmarks"
    )
    parser.set_defaults(command=lambda options: _bench(parser, options.args))


def _bench(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    if not (_CHECKOUT / "benchmarks" / "__main__.py").exists():
        parser.error(_NO_CHECKOUT)
    python_path = [str(_CHECKOUT)]
    if os.environ.get("PYTHONPATH"):
        python_path.append(os.environ["PYTHONPATH"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path)}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *arguments], environment)
