"""`telegrad train NAME ...`: run one of the training examples with its own options.

The examples are ordinary scripts. The wheel contains them as `telegrad/examples`; in a checkout
they are in its `examples` folder. They run as with ``python NAME.py``, in the process of the
command, which ends without a traceback if Ctrl-C is pressed while they import their modules.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from telegrad import openmp
from telegrad.cli.help_text import HelpFormatter
from telegrad.cli.run import find_script, new_main, run_as_main

_PACKAGE = Path(__file__).parent.parent
_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parent.parent / "examples")
_EXAMPLES = {
    "cartpole": "reinforcement learning: one policy, many observers, batched calls",
    "mnist": "handwritten digits, with parameter servers",
    "rl": "reinforcement learning: a learner publishes weights, actors have local policies",
    "recsys": "click prediction, with large embedding tables on parameter servers",
    "resnet": "a residual network, with parameter servers",
}


def add(commands: Any) -> None:
    """Add the subcommand to the parser."""
    examples = "\n".join(f"  {name:<10} {summary}" for name, summary in _EXAMPLES.items())
    parser = commands.add_parser(
        "train",
        help="run a training example on this machine",
        description="Run one of these examples; `telegrad train NAME --help` shows its options. "
        "They need `pip install 'telegrad[examples]'`.",
        epilog=examples,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("example", choices=_EXAMPLES, metavar="NAME", help="the example to run")
    rest = parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="...", help="options of the example"
    )
    rest.required = False  # an error about a missing argument does not name it
    parser.set_defaults(command=lambda options: _train(parser, options))


def _train(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    scripts = [folder / f"{options.example}.py" for folder in _FOLDERS]
    script = next((script for script in scripts if script.exists()), None)
    if script is None:
        parser.error(f"found none of {', '.join(map(str, scripts))}; reinstall telegrad")
    openmp.limit_spinning(os.environ)  # before the example imports torch
    run_as_main(new_main(), find_script(str(script)), options.args)
    return 0
