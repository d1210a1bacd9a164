"""`DebugSession`: a pdb session of an observer in this worker.

An observer that asks for ``debug`` gets a prompt of pdb for one thread: the one that serves the
oldest call, else the main thread. The thread goes on meanwhile; its frames and their variables can
be looked at (``w``, ``u``, ``d``, ``p``, ``ll``), and expressions are evaluated in them. ``stop``
stops the thread at its next line, from where it can be stepped; that needs Python 3.12, because
before it no thread can trace another. When the observer is gone, the thread goes on.

Threads: the thread that serves the observer does all I/O. pdb runs on a thread of the session while
it looks at a running thread, and on that thread itself while it is stopped; both read lines from
the `_Console`. A stopped thread gives up its role (`thread_roles`), so other calls go on.

State: `detached` goes from False to True once. `_Debugger.stopped` is changed by the thread that
runs pdb. There is one session at a time in a process (`_attached`).
"""

from __future__ import annotations

import ctypes
import pdb
import queue
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from telegrad import thread_roles
from telegrad.diagnosis.stacks import served_call
from telegrad.errors import UsageError
from telegrad.transport.json_messages import JsonStream

_MAX_MESSAGE = 1 << 16
_SILENCE = 60.0  # seconds after which an observer that sends nothing is gone
_POLL = 0.1  # seconds between two looks at the connection while there is no prompt
# commands of pdb that control a thread
_BREAK = {"b", "break", "tbreak", "commands", "c", "cont", "continue", "j", "jump"}
_NEED_STOP = _BREAK | {"n", "next", "r", "return", "s", "step", "unt", "until"}
_NOT_HERE = frozenset(["debug", "interact", "restart", "run"])
_CAN_STOP = sys.version_info >= (3, 12)
_attached = threading.Lock()


class _Console:
    """What pdb writes to and reads from: queues to and from the thread that does the I/O."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.outgoing: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()  # with prompt?
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()  # "" at the end
        self._text: list[str] = []

    def write(self, text: str) -> int:
        self._text.append(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: the text is sent with the next prompt."""

    def send(self) -> None:
        """Send what was written."""
        self._send(False)

    def readline(self) -> str:
        """Send what was written and wait for a line; "" if the observer is gone."""
        self._send(True)
        role = thread_roles.pause()
        try:
            return self.lines.get()
        finally:
            thread_roles.resume(role)

    def _send(self, is_prompt: bool) -> None:
        text, self._text = "".join(self._text), []
        self.outgoing.put((text, is_prompt))


class _Debugger(pdb.Pdb):
    """pdb for another thread than the one that it runs on, until that thread is stopped."""

    def __init__(self, session: DebugSession, console: Any) -> None:
        super().__init__(stdin=console, stdout=console, nosigint=True, readrc=False)
        self.prompt = "(Pdb) "
        self.stopped = False
        self._session = session

    def inspect(self, frame: FrameType) -> None:
        """Run commands for a frame of a running thread."""
        self.reset()
        self.interaction(frame, None)

    def onecmd(self, line: str) -> Any:
        command = self.parseline(line)[0]
        if command in _NOT_HERE:
            self.error(f"{command} cannot be used in a worker")
            return False
        if command in _NEED_STOP and not self.stopped and not self.commands_defining:
            self.error("the thread is running; `stop` stops it at its next line")
            return False
        return super().onecmd(line)

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._session.detached:
            sys.settrace(None)
            return None
        return super().trace_dispatch(frame, event, arg)

    # Commands

    def do_threads(self, arg: str) -> None:
        """threads

        List the threads of the worker, with the calls that they serve.
        """
        self.message(self._session.describe_threads())

    def do_thread(self, arg: str) -> bool:
        """thread number

        Look at another thread. `threads` shows the numbers.
        """
        if self.stopped:
            self.error("the thread is stopped; `continue` first")
            return False
        return self._session.choose(arg.strip(), self.error)

    def do_refresh(self, arg: str) -> bool:
        """refresh

        Look at the frames that the thread has now.
        """
        return not self.stopped

    def do_stop(self, arg: str) -> bool:
        """stop

        Stop the thread at its next line. Then step, next, until, return, break and continue work.
        """
        if self.stopped:
            self.error("the thread is stopped already")
        elif not _CAN_STOP:
            self.error("stopping a thread needs Python 3.12 or newer in the worker")
        else:
            self.message("waiting for the next line of the thread; Ctrl-C detaches")
            self._session.stop()
            return True
        return False

    def do_continue(self, arg: str) -> Any:
        """c(ont(inue))

        Let the thread run to the next breakpoint; without one, look at it while it runs.
        """
        result = super().do_continue(arg)
        if not self.breaks:
            self._session.resumed()
        return result

    do_c = do_cont = do_continue

    def do_quit(self, arg: str) -> bool:
        """q(uit)

        Detach. The thread goes on.
        """
        self.clear_all_breaks()
        if self.stopped:
            self.set_continue()
        self._session.detach()
        return True

    do_q = do_exit = do_EOF = do_quit


class DebugSession:
    """One observer with a debugger in this worker."""

    def __init__(self, worker: str) -> None:
        self.detached = False
        self._worker = worker
        self._console = _Console()
        self._debugger = _Debugger(self, self._console)
        self._target = 0
        self._own_threads: set[int] = {threading.get_ident()}
        self._may_inspect = threading.Event()
        self._stop_requested = False
        self._done = threading.Event()

    def __repr__(self) -> str:
        return f"<DebugSession of {self._worker!r}>"

    # On the thread that serves the observer

    def serve(self, stream: JsonStream, thread: str) -> None:
        """Run the session until the observer is gone or quits."""
        self._choose_first(thread)
        if not _attached.acquire(blocking=False):
            raise UsageError(f"a debugger is attached to worker {self._worker!r} already")
        try:
            self._run(stream)
        finally:
            _attached.release()

    def _run(self, stream: JsonStream) -> None:
        inspector = threading.Thread(target=self._inspect, name="telegrad debugger", daemon=True)
        self._may_inspect.set()
        inspector.start()
        try:
            while self._exchange(stream):
                pass
        finally:
            self.detach()
            self._console.lines.put("")
            self._end(inspector)

    def _exchange(self, stream: JsonStream) -> bool:
        """Send output and receive a line, if there is a prompt. Return False at the end."""
        try:
            text, is_prompt = self._console.outgoing.get(timeout=_POLL)
        except queue.Empty:
            if self._done.is_set():
                return False
            # Without a prompt, observers send nothing, so this is the end of the connection.
            return not stream.is_readable()
        stream.send({"value": {"output": text, "prompt": is_prompt}}, time.monotonic() + _SILENCE)
        while is_prompt:
            message = stream.receive(_MAX_MESSAGE, time.monotonic() + _SILENCE)
            if not isinstance(message, dict):
                return False
            if "line" in message:  # else it says that it is still there
                self._console.lines.put(str(message["line"]).rstrip("\n") + "\n")
                break
        return True

    def _end(self, inspector: threading.Thread) -> None:
        """End a command that still runs."""
        inspector.join(_POLL)
        if inspector.is_alive() and inspector.ident is not None:
            ident, error = ctypes.c_ulong(inspector.ident), ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)

    # On the thread of the session

    def _inspect(self) -> None:
        self._own_threads.add(threading.get_ident())
        try:
            while not self.detached:
                self._may_inspect.wait()
                if self.detached:
                    break
                frame = sys._current_frames().get(self._target)
                if frame is None:
                    self._debugger.message("the thread has ended; this is the main thread")
                    self._target = threading.main_thread().ident or 0
                    continue
                self._debugger.message(self._title())
                self._debugger.inspect(frame)
        finally:
            self._done.set()

    def _title(self) -> str:
        return f"worker {self._worker!r}, {_describe(self._target)}"

    # On the thread that runs pdb

    def describe_threads(self) -> str:
        """Return the threads of this process, one in a line."""
        return "\n".join(
            f"{'->' if ident == self._target else '  '} {number} {_describe(ident)}"
            for number, ident in enumerate(self._threads())
        )

    def choose(self, text: str, complain: Callable[[str], None]) -> bool:
        """Look at the thread with this number from now on."""
        threads = self._threads()
        if not text.isdigit() or int(text) >= len(threads):
            complain(f"{text!r} is no number of a thread; `threads` shows them")
            return False
        self._target = threads[int(text)]
        return True

    def stop(self) -> None:
        """Stop the thread at its next line."""
        self._may_inspect.clear()
        self._stop_requested = True
        hook = threading.gettrace()
        threading.settrace_all_threads(self._catch)  # type: ignore[attr-defined]
        threading.settrace(hook)  # type: ignore[arg-type]
        frame = sys._current_frames().get(self._target)
        while frame is not None:
            frame.f_trace = self._catch
            frame = frame.f_back
        self._console.send()

    def resumed(self) -> None:
        """The thread was stopped and runs again."""
        self._debugger.stopped = False
        self._may_inspect.set()

    def detach(self) -> None:
        """End the session, whoever runs pdb."""
        self.detached = True
        self._debugger.stopped = False
        self._may_inspect.set()

    def _catch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Trace all threads until the right one comes here."""
        if threading.get_ident() != self._target or not self._stop_requested or self.detached:
            sys.settrace(None)
            return None
        self._stop_requested = False
        self._debugger.stopped = True
        self._debugger.set_trace(frame)
        return self._debugger.trace_dispatch

    # Threads

    def _threads(self) -> list[int]:
        """Return the threads that can be looked at: those that serve calls first, oldest first."""
        found = [each for each in sys._current_frames() if each not in self._own_threads]
        main = threading.main_thread().ident
        return sorted(found, key=lambda ident: (_received_at(ident), ident != main, ident))

    def _choose_first(self, name: str) -> None:
        threads = self._threads()
        named = [ident for ident in threads if name and _name(ident) == name]
        if name and not named:
            names = ", ".join(sorted(_name(ident) for ident in threads))
            raise UsageError(f"worker {self._worker!r} has no thread {name!r}; it has {names}")
        self._target = (named or threads)[0]


def _name(ident: int) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return names.get(ident, f"thread {ident}")


def _received_at(ident: int) -> float:
    frame = sys._current_frames().get(ident)
    call = None if frame is None else served_call(frame)
    return float("inf") if call is None else call.received_at


def _describe(ident: int) -> str:
    frame = sys._current_frames().get(ident)
    call = None if frame is None else served_call(frame)
    text = f"thread {_name(ident)}"
    if call is not None:
        age = time.monotonic() - call.received_at
        text += f", serves {call.function} for {call.caller}, {age:.1f} s"
    if frame is not None:
        text += f", in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
    return text
