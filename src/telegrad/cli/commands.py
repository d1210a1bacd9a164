"""The subcommands. Each is a module whose `add` declares its arguments and its function."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import telegrad
from telegrad.cli import bench, doctor, launch, observe, run, train

__all__ = ["main", "make_parser"]

INTERRUPTED = 130  # the exit code that shells give a command that Ctrl-C has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand with these arguments, or those of this process. Return the exit code."""
    options = make_parser().parse_args(arguments)
    try:
        exit_code: int = options.command(options)
    except KeyboardInterrupt:
        if options.subcommand == "run":  # it belongs to the program
            raise
        return INTERRUPTED
    return exit_code


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. Its result has the function `command`."""
    parser = argparse.ArgumentParser(
        prog="telegrad", description=(telegrad.__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--version", action="version", version=f"telegrad {telegrad.__version__}")
    parser.set_defaults(command=lambda _: _show_help(parser))
    commands = parser.add_subparsers(metavar="COMMAND", dest="subcommand")
    bench.add(commands)
    doctor.add(commands)
    launch.add(commands)
    observe.add(commands)
    run.add(commands)
    train.add(commands)
    return parser


def _show_help(parser: argparse.ArgumentParser) -> int:
    """Show the commands to a user who named none."""
    parser.print_help(sys.stderr)
    return 2
