"""The cost of the flight recorder: the time of a call without tensors, with it and without.

    python -m benchmarks.recorder

Two processes that call each other are up to 5 % faster or slower than the next two, because memory
and threads are placed differently. So all variants are measured in turn in the same two processes:
the methods are compiled again without the statements in `_RECORDING` (what the recorder adds) or in
`_ALL` (that, and the description of the calls in progress). The result is the median of the
differences between rounds that follow each other, over several pairs of processes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from telegrad import Agent, Config
from telegrad.client.peer import Peer
from telegrad.current import ServedCall
from telegrad.server.connection import ReplyingConnection, ServerConnection

_the_call = ServedCall()  # without recording, a call has only its id
_the_call.timeout_ms = 0
_the_call.outcome = ""
# The beginnings of the statements that are removed from a method, and what replaces them.
Removed = dict[Callable[..., Any], dict[str, str]]
_RECORDING: Removed = {
    Peer.call: {
        "record[REQUEST_BYTES] =": "",
        "record[ENDED_AT] = connection": "",
        "record[REPLY_BYTES] =": "",
        "record[OUTCOME] = 'ok'": "",
        "self._record(record)": "",
    },
    ReplyingConnection._send_reply: {"call.reply_bytes =": ""},
    ReplyingConnection._mark_answered: {"call.outcome =": "", "self._record(call)": ""},
}
_ALL: Removed = {
    Peer.call: {
        **_RECORDING[Peer.call],
        "record =": "record = None",
        "if role is not None:": "",
        "self._busy[connection] =": "self._busy[connection] = None",
        "function_id, _, body, buffers =": "",
        "if not function_id:": "",
    },
    # `_begin` itself is needed only for the calls in progress
    ServerConnection.handle: {
        "call = self._begin(frame)": "call = _the_call; _the_call.call_id = call_id = "
        "frame.call_id; self._unanswered[call_id] = True",
        "if function is not None:": "if function is None:\n    raise AssertionError",
    },
    ServerConnection.on_flushed: {"if self._next_call": ""},
    ServerConnection._execute: {
        "thread_state.call =": "thread_state.caller = self.peer_name; thread_state.deadline = None"
    },
    ServerConnection._run: {
        "call.function =": "",
        "if loop is None or call.request_bytes": "started = _now()",
        "call.returned_at =": "returned = _now()",
    },
    ReplyingConnection._send_reply: {"call.reply_bytes =": ""},
    ReplyingConnection._mark_answered: {
        "if self._unanswered.pop": "self._unanswered.pop(call.call_id, None)"
    },
}


class _Variants:
    """The methods as they are, and without recording; and the switch between them."""

    def __init__(self) -> None:
        self._methods = {
            name: [
                (_owner(method), method.__name__, _without(method, removed.get(method, {})))
                for method in _ALL
            ]
            for name, removed in (("as it is", {}), ("no recording", _RECORDING), ("none", _ALL))
        }

    def __repr__(self) -> str:
        return f"<_Variants {', '.join(self._methods)}>"

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def use(self, variant: str) -> None:
        for owner, name, method in self._methods[variant]:
            setattr(owner, name, method)


def _owner(method: Callable[..., Any]) -> type:
    found = getattr(sys.modules[method.__module__], method.__qualname__.partition(".")[0])
    assert isinstance(found, type)
    return found


class _Remover(ast.NodeTransformer):
    def __init__(self, removed: dict[str, str]) -> None:
        self._removed = removed
        self.found: set[str] = set()

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef):
            text = ast.unparse(node)
            for beginning, replacement in self._removed.items():
                if text.startswith(beginning):
                    self.found.add(beginning)
                    return ast.parse(replacement or "pass").body
        return self.generic_visit(node)


def _without(method: Callable[..., Any], removed: dict[str, str]) -> Callable[..., Any]:
    """Return a method without some of its statements. All of them must be there.

    All variants are compiled here: the interpreter has already adapted the original methods to the
    calls that were made before.
    """
    remover = _Remover(removed)
    tree = remover.visit(ast.parse(textwrap.dedent(inspect.getsource(method))))
    missing = removed.keys() - remover.found
    if missing:
        raise SystemExit(f"{method.__qualname__} has no statement that begins with {missing}")
    namespace = {**vars(sys.modules[method.__module__]), "_the_call": _the_call}
    tree.body.insert(0, ast.parse("from __future__ import annotations").body[0])
    exec(compile(ast.fix_missing_locations(tree), f"<{method.__name__}>", "exec"), namespace)
    made: Callable[..., Any] = namespace[method.__name__]
    return made


_variants = _Variants()


def _serve(path: str, switch: Connection) -> None:
    with Agent("callee", store=dist.FileStore(path, 2), rank=1, world_size=2, config=_config()):
        while True:  # until this process is killed
            _variants.use(switch.recv())
            switch.send(None)


def _config() -> Config:
    return Config(secret="only for this benchmark")


def run_pair(rounds: int, calls: int) -> None:
    """Print the median time of a call in microseconds with each variant, one line per round."""
    path = os.path.join(tempfile.mkdtemp(), "store")
    switch, other_end = Pipe()
    callee = get_context("fork").Process(target=_serve, args=(path, other_end), daemon=True)
    callee.start()
    store = dist.FileStore(path, 2)
    with Agent("caller", store=store, rank=0, world_size=2, config=_config()) as agent:

        def measure(variant: str) -> float:
            switch.send(variant)
            switch.recv()
            _variants.use(variant)
            times, call, now = [], agent.call, time.perf_counter
            for _ in range(calls):
                started = now()
                call("callee", max, 1, 2)
                times.append(now() - started)
            return statistics.median(times[calls // 4 :]) * 1e6

        for _ in range(12):
            measure("as it is")  # warm up, and fill the recorder
        names = list(_variants)
        for index in range(rounds):
            order = names[index % 3 :] + names[: index % 3]
            found = {variant: measure(variant) for variant in order}
            print(*(found[variant] for variant in names), flush=True)
        _variants.use("as it is")
    callee.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=6, help="pairs of processes")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of each pair")
    parser.add_argument("--calls", type=int, default=300, help="calls in a round")
    parser.add_argument("--pair", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pair:
        run_pair(options.rounds, options.calls)
        return
    command = [sys.executable, "-m", "benchmarks.recorder", "--pair"]
    command += ["--rounds", str(options.rounds), "--calls", str(options.calls)]
    rounds: list[list[float]] = []
    by_pair = []
    for _ in range(options.pairs):
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = [list(map(float, line.split())) for line in printed.splitlines()]
        rounds += found
        by_pair.append(_costs(found))
    without = statistics.median(each[2] for each in rounds)
    print(f"a call without both  {without:6.2f} us")
    for name, index in (("recorder", 0), ("with the calls in progress", 1)):
        costs = [pair[index] for pair in by_pair]
        middle = statistics.median(costs)
        text = ", ".join(f"{cost:+.2f}" for cost in costs)
        print(f"{name}: {middle:+.2f} us ({100 * middle / without:+.1f} %); pairs: {text}")


def _costs(rounds: list[list[float]]) -> tuple[float, float]:
    """Return the cost of recording, and of it and of describing the calls in progress."""
    recording = statistics.median(each[0] - each[1] for each in rounds)
    return recording, statistics.median(each[0] - each[2] for each in rounds)


if __name__ == "__main__":
    main()
