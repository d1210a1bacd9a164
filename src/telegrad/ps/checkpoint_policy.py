"""`Checkpoint`: when and where servers save their shards. `ps/server/checkpoint.py` writes them."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from telegrad.errors import UsageError


@dataclass(frozen=True)
class Checkpoint:
    """When and where servers save their shards: into `folder`, after `every` steps and at the end.

    A server that is restarted under the same name continues from its newest checkpoint. With
    `resume`, a new run does so, too. `keep` is the number of versions that are kept. Checkpoints
    are written while training continues. With `wait`, trainers get their reply when the step is on
    disk; with `every=1` as well, no acknowledged step is ever lost.
    """

    folder: str | os.PathLike[str]
    every: int = 100
    resume: bool = False
    wait: bool = False
    keep: int = 2

    def __post_init__(self) -> None:
        if importlib.util.find_spec("safetensors") is None:
            raise UsageError("checkpoints need the safetensors package: pip install 'telegrad[ps]'")
        if self.every < 1 or self.keep < 1:
            raise UsageError(
                f"checkpoints are made every 1 or more steps, and 1 or more are kept, not {self}"
            )

    @property
    def exact(self) -> bool:
        """Whether every step is on disk before it is acknowledged."""
        return self.every == 1 and self.wait
