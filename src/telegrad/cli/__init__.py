"""The command line: `telegrad`, or `python -m telegrad`.

One module per subcommand (`run`, `train`, `bench`, `doctor`), and what the training examples share:
starting their processes (`launcher`) and reporting their progress (`progress`). The library never
imports this package. Importing it does not import torch, so that `telegrad --help` is fast.
"""

from telegrad.cli.commands import main

__all__ = ["main"]
