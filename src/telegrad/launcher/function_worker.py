"""Run a function in the process of a worker."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle
import torch


class Call(NamedTuple):
    """A function with its arguments. What `packed` does not contain is in `args`."""

    packed: bytes | tuple[Callable[..., Any], None]
    args: tuple[Any, ...] = ()


def run(call: Call, paths: Sequence[str]) -> bytes:
    """Write to these paths, call the function, and return its pickled result."""
    # Ctrl-C is for the launcher, which then ends its workers. If the launcher dies, torch sends
    # SIGINT to this process.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for descriptor, path in enumerate(paths, 1):
        opened = os.open(path, os.O_WRONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if os.environ.get("OMP_NUM_THREADS"):  # this process has loaded OpenMP before
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        packed = pickle.loads(call.packed) if isinstance(call.packed, bytes) else call.packed
        function, args = packed
        result: bytes = cloudpickle.dumps(function(*(call.args if args is None else args)))
        return result
    except Exception as error:
        trace = error.__traceback__
        traceback.print_exception(error.with_traceback(trace and trace.tb_next))
        sys.exit(1)
