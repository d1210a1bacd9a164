"""Ending what a test left behind: members of the session that was made for it, and nothing else
(Linux).
"""

import ctypes
import os
import signal
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE = 1.5  # seconds between asking and killing


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Have what a test leaves behind become a child of this process, which can then collect it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end(session: int) -> None:
    """End every process of the session: ask first, then kill."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _members(session):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        deadline = time.monotonic() + GRACE
        while not _gone(session):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        else:
            return


def _gone(session: int) -> bool:
    """Collect the dead, and say whether nobody is left."""
    try:
        while os.waitpid(-session, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return not _members(session)
    return False


def _members(session: int) -> list[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _session(entry) == session
    ]


def _session(process: Path) -> int | None:
    """The session of a live process; none if it is gone or a zombie."""
    try:
        state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return None
    return None if state == "Z" else int(session)
