"""`telegrad status`, `top`, `stacks`, `trace`, `debug` and `dashboard`: look at a running group.

They attach to the group through its store, through one worker, or on this host, and are no members
of it. A worker that does not answer in time gets a line that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from telegrad import dashboard
from telegrad.cli.help_text import HelpFormatter
from telegrad.errors import TelegradError, UsageError
from telegrad.observer import Group, attach
from telegrad.observer.connection import NoAnswer
from telegrad.observer.debugger import attach_to_process, debug
from telegrad.observer.tables import stacks_text, status_text
from telegrad.observer.trace import collect_trace
from telegrad.timeouts import duration

_EXAMPLES = """\
  telegrad status                                 the group on this host
  telegrad status --rendezvous 10.0.0.1:29500     through its store (MASTER_ADDR:MASTER_PORT)
  telegrad stacks --pid 4711                      the group of a process on this host
  telegrad debug worker3                          pdb in that worker
  telegrad trace --seconds 5 -o trace.json        open it at https://ui.perfetto.dev
  telegrad dashboard                              a web page that shows all of this
"""
_CLEAR = "\033[H\033[2J"

_LAST_PORT = 65535
Command = Callable[[Group, argparse.Namespace], None]


def add(commands: Any) -> None:
    """Add the subcommands to the parser."""
    status = _add(commands, "status", _status, "show what the workers of a running group do")
    top = _add(commands, "top", _top, "show the same again and again, like top")
    top.add_argument("--interval", type=_positive, default=1.0, help="seconds between two updates")
    top.add_argument("--count", type=int, help="number of updates; without it, until Ctrl-C")
    for parser in (status, top):
        parser.add_argument(
            "--internal", action="store_true", help="show the calls of Telegrad itself, too"
        )
        parser.add_argument(
            "--window",
            type=_positive,
            default=10.0,
            help="seconds of which to show rates and times",
        )
    stacks = _add(commands, "stacks", _stacks, "show the Python stacks of all workers")
    stacks.add_argument("--all", action="store_true", help="show waiting threads of Telegrad, too")
    debug = _add(commands, "debug", _debug, "open pdb in a worker of a running group")
    debug.add_argument("worker", help="the name of the worker")
    debug.add_argument("--thread", default="", help="the name of a thread; `stacks` shows them")
    debug.add_argument(
        "--main-thread",
        action="store_true",
        help="attach by process id and stop the main thread (Python 3.14, the same host)",
    )
    trace = _add(commands, "trace", _trace, "write the last seconds of all workers for Perfetto")
    trace.add_argument("--seconds", type=_positive, default=10.0, help="how far back")
    trace.add_argument("-o", "--out", type=Path, default=Path("trace.json"), help="the file")
    page = _add_parser(commands, "dashboard", "show a running group on a web page of this host")
    page.add_argument("--port", type=_port, help="port of 127.0.0.1 (default: 8642, if free)")
    page.add_argument(
        "--wait", action="store_true", help="start also if the group does not exist yet"
    )
    page.set_defaults(command=lambda options: _catch(lambda: _dashboard(options)))


def _add(commands: Any, name: str, command: Command, summary: str) -> argparse.ArgumentParser:
    parser = _add_parser(commands, name, summary)
    if name not in ("trace", "debug"):
        parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(command=lambda options: _catch(lambda: _run(command, options)))
    return parser


def _add_parser(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. The secret is that of the group: "
        "TELEGRAD_SECRET, or the key file of this user.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--rendezvous", metavar="HOST:PORT", help="the TCP store of the group")
    where.add_argument("--address", metavar="HOST:PORT", help="a worker; also unix:@name")
    where.add_argument("--pid", type=int, help="the process of a worker on this host")
    parser.add_argument(
        "--timeout", type=_positive, default=2.0, help="seconds that each worker has to answer"
    )
    return parser


def _run(command: Command, options: argparse.Namespace) -> None:
    with attach(options.rendezvous, options.address, options.pid, timeout=options.timeout) as group:
        command(group, options)


def _catch(work: Callable[[], None]) -> int:
    """Return the exit code of a command."""
    try:
        work()
        sys.stdout.flush()
    except TelegradError as error:
        sys.stderr.write(f"telegrad: {error}\n")
        return 1
    except BrokenPipeError:  # for example of head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a file cannot be written
        sys.stderr.write(f"telegrad: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _positive(text: str) -> float:
    """Return a number of seconds."""
    try:
        return duration(float(text), positive=True)
    except ValueError:  # also a UsageError
        message = f"{text!r} is not a positive number of seconds"
        raise argparse.ArgumentTypeError(message) from None


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to {_LAST_PORT}")
    return int(text)


def _status(group: Group, options: argparse.Namespace) -> None:
    snapshot = group.snapshot(options.timeout, options.window)
    text = _json(snapshot) if options.json else status_text(snapshot, options.internal)
    sys.stdout.write(text)


def _top(group: Group, options: argparse.Namespace) -> None:
    shown = 0
    while options.count is None or shown < options.count:
        if shown:
            time.sleep(options.interval)
        if sys.stdout.isatty() and not options.json:
            sys.stdout.write(_CLEAR)
        _status(group, options)
        sys.stdout.flush()
        shown += 1


def _stacks(group: Group, options: argparse.Namespace) -> None:
    replies = group.ask("stacks", options.timeout)
    if options.json:
        workers = [
            {"name": reply.worker.name, "problem": reply.problem, "stacks": reply.value}
            for reply in replies
        ]
        sys.stdout.write(_json(workers))
    else:
        sys.stdout.write(stacks_text(replies, options.all))


def _debug(group: Group, options: argparse.Namespace) -> None:
    connection = group.connection(options.worker)
    try:
        if options.main_thread:
            attach_to_process(connection.request("members", options.timeout)["worker"], _write)
        else:
            debug(connection, input, _write, options.timeout, options.thread)
    except NoAnswer as error:
        raise UsageError(f"worker {options.worker!r} cannot be debugged: {error}") from error


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _trace(group: Group, options: argparse.Namespace) -> None:
    try:
        options.out.touch()  # now, and not after the recording
    except OSError as error:
        message = f"cannot write into --out {options.out}: {error.strerror}"
        raise UsageError(message) from None
    trace = collect_trace(group, options.seconds, options.timeout)
    options.out.write_text(json.dumps(trace))
    for name, note in trace["otherData"].items():
        sys.stdout.write(f"{name}: {note}\n")
    sys.stdout.write(f"wrote {options.out}; open it at https://ui.perfetto.dev\n")


def _dashboard(options: argparse.Namespace) -> None:
    with dashboard.serve(
        options.rendezvous,
        options.address,
        options.pid,
        timeout=options.timeout,
        port=options.port,
        wait=options.wait,
    ) as server:
        sys.stdout.write(f"open {server.url}\nCtrl-C ends it\n")
        sys.stdout.flush()
        threading.Event().wait()


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
