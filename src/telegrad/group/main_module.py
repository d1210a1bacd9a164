"""What program this process runs: two workers that run the same one may refer to functions of `__main__` by name."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path


def main_module_identity() -> str:
    """Equal for two processes exactly if their `__main__` came from files with the same content."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is not None and os.path.isfile(path):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    # interactive: nobody else has what is typed here
    return f"process {os.getpid()} of {os.uname().nodename}"
