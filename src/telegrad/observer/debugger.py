"""`debug`: talk to pdb in a worker.

Only one of the two sides sends at a time: the worker sends output, the last of it with a prompt,
and the observer answers a prompt with a line. While the user types, a thread tells the worker that
the observer is still there.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from telegrad.errors import ProtocolError, UsageError
from telegrad.observer.connection import MAX_REPLY, NoAnswer, WorkerConnection
from telegrad.timeouts import duration
from telegrad.transport.json_messages import JsonStream
from telegrad.transport.sockets import clock_id

_SEND_SECONDS = 10.0
_ALIVE_SECONDS = 10.0  # between two messages while the user types
_A_YEAR = 3.15e7  # seconds: output comes when the thread reaches its next line
_log = logging.getLogger(__name__)


def debug(
    connection: WorkerConnection,
    read: Callable[[str], str],
    write: Callable[[str], Any],
    timeout: float = 2.0,
    thread: str = "",
) -> None:
    """Run a pdb session in a worker until it ends.

    `read(prompt)` returns a line or raises `EOFError`, which detaches. Raise `NoAnswer` if the
    worker does not answer within `timeout` seconds, cannot be debugged, or ends.
    """
    timeout = duration(timeout, positive=True)
    stream, first = connection.converse("debug", timeout, thread=thread)
    try:
        message: Any = first
        while True:
            if "error" in message:
                raise NoAnswer(str(message["error"]))
            found = message["value"]
            if found.get("end"):
                return
            output = str(found["output"])
            if found["prompt"]:
                output, newline, prompt = output.rpartition("\n")
                write(output + newline)
                with _alive(stream) as lock:
                    try:
                        line = read(prompt)
                    except EOFError:
                        line = "quit"
                with lock:
                    stream.send({"line": line}, time.monotonic() + _SEND_SECONDS)
            else:
                write(output)
            message = stream.receive(MAX_REPLY, time.monotonic() + _A_YEAR)
            if message is None:
                raise NoAnswer("it has ended")
    except (OSError, ProtocolError) as error:
        raise NoAnswer(f"the connection ended: {error}") from error
    finally:
        stream.close()


def attach_to_process(worker: dict[str, Any], write: Callable[[str], Any]) -> NoReturn:
    """Become pdb of the standard library, attached to the main thread of a worker on this host.

    It takes the place of this process, so that Ctrl-C reaches only pdb, which stops the thread
    again.
    """
    version = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info < (3, 14) or not str(worker["python"]).startswith(f"{version}."):
        raise UsageError(
            "attaching by process id needs Python 3.14 or newer, the same for this command "
            f"({version}) and the worker ({worker['python']}); leave out --main-thread"
        )
    if worker["clock"] != clock_id():
        raise UsageError(f"worker {worker['name']!r} is on {worker['host']}, not on this host")
    write(
        f"pdb stops the main thread of worker {worker['name']!r} (process {worker['pid']}) when it "
        "next runs Python code;\nif it waits in a call, Ctrl-C gives up, and `telegrad debug` "
        "without --main-thread shows where\n"
    )
    os.execv(sys.executable, [sys.executable, "-m", "pdb", "-p", str(worker["pid"])])


@contextmanager
def _alive(stream: JsonStream) -> Iterator[threading.Lock]:
    """Tell the worker in this block that the observer is there."""
    ended, lock = threading.Event(), threading.Lock()

    def tell() -> None:
        while not ended.wait(_ALIVE_SECONDS):
            try:
                with lock:
                    stream.send({"alive": True}, time.monotonic() + _SEND_SECONDS)
            except OSError as error:
                _log.debug("the worker is gone: %s", error)  # which the next line shows
                return

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield lock
    finally:
        ended.set()
        thread.join()
