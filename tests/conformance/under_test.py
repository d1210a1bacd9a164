"""Import this first: it decides what `torch.distributed.rpc` means in this process (see
`redirect.py`).
"""

import os

import guard
import redirect

from telegrad import compat

NAME = os.environ.get("CONFORMANCE_AGAINST", "telegrad")  # or "torch"

if NAME == "telegrad":
    compat.uninstall()  # a spawned rank comes with it, and the guard is for torch's own
    guard.arm()
    redirect.install()
    redirect.tolerate_script()
