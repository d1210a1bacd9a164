"""CUDA, once started, does not survive a fork, and importing the suites may start it.

So `run.py`, which forks, sees no GPU. On a machine that has one, tests spawn their ranks, and these
see it again.
"""

import os
from pathlib import Path

VISIBLE, SHOWN_BEFORE = "CUDA_VISIBLE_DEVICES", "CONFORMANCE_SHOWN_BEFORE"


def present() -> bool:
    return Path("/dev/nvidia0").exists()


def hide() -> None:
    """From this process and those it forks. Comes before the import of torch."""
    if VISIBLE in os.environ:
        os.environ[SHOWN_BEFORE] = os.environ[VISIBLE]
    os.environ[VISIBLE] = ""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # counting GPUs does not start CUDA either


def show() -> None:
    """To the processes that this one spawns."""
    del os.environ[VISIBLE]
    if SHOWN_BEFORE in os.environ:
        os.environ[VISIBLE] = os.environ[SHOWN_BEFORE]
