"""The subcommands. Each is a module whose `add` declares its arguments and its function."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import telegrad
from telegrad.cli import bench, doctor, launch, observe, run, train

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand with these arguments, or those of this process. Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="telegrad", description=(telegrad.__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--version", action="version", version=f"telegrad {telegrad.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    bench.add(commands)
    doctor.add(commands)
    launch.add(commands)
    observe.add(commands)
    run.add(commands)
    train.add(commands)
    options = parser.parse_args(arguments)
    exit_code: int = options.command(options)
    return exit_code
