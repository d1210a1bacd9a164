"""CUDA, once started, does not survive a fork, and importing the suites may start it.

So `run.py` and the ranks that are forked see no GPU. A test that needs one spawns its ranks, and these see them again.
"""

import os

VISIBLE, SHOWN_BEFORE = "CUDA_VISIBLE_DEVICES", "CONFORMANCE_SHOWN_BEFORE"


def hide() -> None:
    """For this process and those it forks. Comes before the import of torch."""
    if VISIBLE in os.environ:
        os.environ[SHOWN_BEFORE] = os.environ[VISIBLE]
    os.environ[VISIBLE] = ""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # counting GPUs does not start CUDA either


def show() -> None:
    """For the processes that this one spawns."""
    del os.environ[VISIBLE]
    if SHOWN_BEFORE in os.environ:
        os.environ[VISIBLE] = os.environ[SHOWN_BEFORE]
