"""The command line: `telegrad`, or `python -m telegrad`."""

from telegrad.cli.commands import main

__all__ = ["main"]
