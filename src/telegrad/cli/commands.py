"""Which subcommands there are. Each is a module; its `add` says what arguments it takes and what it does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import telegrad
from telegrad.cli import bench, run, train

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say (by default, those of this process); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="telegrad", description=(telegrad.__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--version", action="version", version=f"telegrad {telegrad.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    bench.add(commands)
    run.add(commands)
    train.add(commands)
    chosen = parser.parse_args(arguments)
    code: int = chosen.command(chosen)
    return code
