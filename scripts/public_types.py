"""Check with pyright that every public name has complete types: `make public-types`.

`pyright --verifytypes` takes every module without an underscore for public. Public here is what
`__all__` of the documented modules lists, with the public members of these classes.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODULES = [
    "telegrad",
    "telegrad.autograd",
    "telegrad.batching",
    "telegrad.compat",
    "telegrad.errors",
    "telegrad.nn",
    "telegrad.optim",
    "telegrad.ps",
    "telegrad.refs",
    "telegrad.rpc",
    "telegrad.testing",
    "telegrad.weights",
]
# Only Telegrad makes these objects, and the parameters are of internal types.
INTERNAL = {"telegrad.autograd.worker_context.Context.__init__"}


def main() -> int:
    names = public_names()
    symbols = [symbol for symbol in _symbols() if is_public(symbol["name"], names)]
    faults = [fault for symbol in symbols if not symbol["isTypeKnown"] for fault in _faults(symbol)]
    for fault in faults:
        print(fault)
    print(f"{len(symbols)} public symbols, {len(faults)} faults")
    return bool(faults) or not symbols


def public_names() -> set[str]:
    """Return the names under which pyright knows what the documented modules offer: where it is
    defined.
    """
    names = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in getattr(
            module, "__all__", [name for name in vars(module) if not name.startswith("_")]
        ):
            value = getattr(module, name)
            home = getattr(value, "__module__", None)
            if home is not None and home.startswith("telegrad"):
                names.add(f"{home}.{getattr(value, '__qualname__', name)}")
    return names


def is_public(symbol: str, names: set[str]) -> bool:
    """Return whether a symbol is one of these names or a member of one that has no underscore."""
    if symbol in INTERNAL:
        return False
    for length in range(symbol.count(".") + 1):
        owner, *members = symbol.rsplit(".", length) if length else [symbol]
        if owner in names:
            return not any(
                member.startswith("_") and not member.startswith("__") for member in members
            )
    return False


def _symbols() -> list[dict[str, Any]]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pyright",
            "--outputjson",
            "--ignoreexternal",
            "--verifytypes",
            "telegrad",
        ],
        env={**os.environ, "PATH": path},  # here it asks `python`, whatever --pythonpath says
        capture_output=True,
        text=True,
        check=False,  # 1 if anything is incomplete, public or not
    )
    if not done.stdout.startswith("{"):
        raise SystemExit(f"pyright: {done.stdout}{done.stderr}")
    symbols: list[dict[str, Any]] = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    return symbols


def _faults(symbol: dict[str, Any]) -> Iterator[str]:
    for fault in symbol["diagnostics"]:
        if fault["message"].startswith("No docstring"):
            continue
        line = fault.get("range", {}).get("start", {}).get("line", 0) + 1
        yield f"{fault.get('file', '')}:{line}: {symbol['name']}: {fault['message']}"


if __name__ == "__main__":
    sys.exit(main())
