"""Run `python -m benchmarks`, which is `telegrad bench`: a run, or a subcommand of `COMMANDS`."""

from __future__ import annotations

import sys

from benchmarks import compare, environments, parts, publish, report

COMMANDS = {
    "report": report.main,
    "compare": compare.main,
    "peers": environments.main,
    "publish": publish.main,
}

if __name__ == "__main__":
    arguments = sys.argv[1:]
    command = COMMANDS.get(arguments[0]) if arguments else None
    sys.exit(command(arguments[1:]) if command else parts.main(arguments))
