"""Run the command line with `python -m telegrad`."""

from __future__ import annotations

import sys

from telegrad.cli import main

if __name__ == "__main__":
    sys.exit(main())
