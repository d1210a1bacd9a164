"""Import this first: it decides what `torch.distributed.rpc` means in this process (see `redirect.py`)."""

import os

import guard
import redirect

NAME = os.environ.get("CONFORMANCE_AGAINST", "telegrad")  # or "torch"

if NAME == "telegrad":
    guard.arm()
    redirect.install()
    redirect.tolerate_script()
