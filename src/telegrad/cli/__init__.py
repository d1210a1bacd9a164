"""The command line: `telegrad`, or `python -m telegrad`.

One module per subcommand (`launch`, `run`, `train`, `bench`, `doctor`), and what the training
examples share (`training`, `progress`). The library never imports this package. Importing it does
not import torch, so that `telegrad --help` is fast.
"""

from telegrad.cli.commands import main

__all__ = ["main"]
