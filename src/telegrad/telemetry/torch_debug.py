"""A handler for torch's debug server, `torch.distributed.debug.start_debug_server`.

That server has one HTTP endpoint per process. `register` adds ``/handler/telegrad``, which answers
with the snapshots of the agents of the process as JSON. `telegrad.telemetry.torch_debug_page` is
the page for the front end. The server of torch answers on threads of its own, so it answers also if
all calls are blocked. It asks for no secret; torch says that it is for trusted networks only.

State: `_registered`, whether torch has the handler, under `_lock`.
"""

from __future__ import annotations

import ctypes
import json
import threading
from typing import Any

from telegrad.errors import TelegradError
from telegrad.runtime import open_runtimes

try:
    from torch._C._distributed_c10d import _register_handler
except ImportError:  # another torch
    _register_handler = None  # type: ignore[assignment]

__all__ = ["register"]

NAME = "telegrad"
_lock = threading.Lock()
_registered = False


def register() -> None:
    """Let torch's server ask for this process's agents. It may be repeated. Agents call this."""
    global _registered  # noqa: PLW0603 - the handlers of torch are state of the process
    with _lock:
        if not _registered and _register_handler is not None:
            # torch gives up its reference when the process exits, after the interpreter has ended.
            # If it were the last one, freeing the function would abort the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(_answer))
            _register_handler(NAME, _answer)
            _registered = True


def _answer(request: Any, response: Any) -> None:
    snapshots = []
    for runtime in open_runtimes():
        try:
            snapshots.append(runtime.snapshot())
        except TelegradError as error:  # it was closed meanwhile
            snapshots.append({"worker": {"name": runtime.name}, "error": str(error)})
    response.set_content(json.dumps(snapshots), "application/json")
    response.set_status(200)
