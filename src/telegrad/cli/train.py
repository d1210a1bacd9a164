"""`telegrad train mnist ...`: run one of the examples that train something, with its own options.

The examples are scripts as users would write them. They are installed with the package; in a checkout they are in its
`examples` folder. Python is given the script in place of this process, so everything about it is the script's own.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from telegrad import openmp

_PACKAGE = Path(__file__).parent.parent
_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parent.parent / "examples")
_JOBS = {
    "cartpole": "a pole to balance: one policy, many observers, batched calls",
    "mnist": "handwritten digits, with parameter servers",
    "recsys": "clicks to predict, with large tables on parameter servers",
    "resnet": "a residual network, with parameter servers",
}


def add(commands: Any) -> None:
    """Add the subcommand."""
    jobs = "\n".join(f"  {name:<10} {what}" for name, what in _JOBS.items())
    parser = commands.add_parser(
        "train",
        help="train something on this machine, to see it work",
        description="Run one of these examples; `telegrad train NAME --help` shows its options.",
        epilog=jobs,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", choices=_JOBS, metavar="NAME", help="which one")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its options")
    parser.set_defaults(command=lambda chosen: _train(parser, chosen))


def _train(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> int:
    scripts = [folder / f"{chosen.job}.py" for folder in _FOLDERS]
    script = next((script for script in scripts if script.exists()), None)
    if script is None:
        parser.error(
            f"{chosen.job}.py is neither in {' nor in '.join(str(folder) for folder in _FOLDERS)}"
        )
    sys.stdout.flush()
    openmp.limit_spinning(os.environ)
    os.execv(sys.executable, [sys.executable, str(script), *chosen.args])
