"""The directive `public-names MODULE`: the documentation of every name in its `__all__`.

A name that a module has from another public module is listed with a link to that one. So every
object is described once. Modules in `__all__` have their own pages and are left out here.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import types
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

# Modules with a page of their own, the one that describes a shared name first.
PUBLIC = (
    "telegrad",
    "telegrad.ps",
    "telegrad.weights",
    "telegrad.autograd",
    "telegrad.optim",
    "telegrad.nn",
    "telegrad.refs",
    "telegrad.testing",
    "telegrad.testing.faults",
    "telegrad.observer",
    "telegrad.dashboard",
    "telegrad.cluster",
    "telegrad.compat",
    "telegrad.errors",
    "telegrad.rpc",
    "telegrad.rpc.functions",
    "telegrad.rpc.backend_registry",
    "telegrad.rpc.options",
)
CONSTANTS = {
    "telegrad.rpc.UNSET_RPC_TIMEOUT": "As a `timeout`: the timeout of the options of `init_rpc`.",
}
# Methods that other modules of the package use, and users do not.
INTERNAL = {
    "Future.is_call",
    "Future.add_caller",
    "Future.remove_caller",
    "Tables.define",
    "Tables.change_optimizer",
    "Tables.fetch",
    "Tables.write_rows",
    "Tables.stored_rows",
    "Tables.show_gradients",
    "Tables.begin_step",
    "Tables.finish_step",
    "RowSGD.state_spec",
    "RowSGD.update",
    "FaultPlan.choose",
    "RpcBackendOptions.to_config",
    "TensorPipeRpcBackendOptions.to_config",
}
_MODULE = re.compile(r"~(?:\w+\.)*~?")  # of a type in a signature


def public_names(module: str) -> dict[str, Any]:
    """Return the public objects of a module that are not modules."""
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    ]
    found = {name: getattr(loaded, name) for name in names}
    return {name: it for name, it in found.items() if not isinstance(it, types.ModuleType)}


def described_in(module: str, name: str, value: Any) -> str:
    """Return the module whose page describes an object, which may have several names."""
    for other in PUBLIC[: PUBLIC.index(module)]:
        try:
            names = public_names(other)
        except ModuleNotFoundError:
            continue
        if names.get(name) is value and not isinstance(value, (int, float, str)):
            return other
    return module


class PublicNames(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        lines, elsewhere = [f".. py:module:: {module}", "   :no-index-entry:", ""], []
        for name, value in public_names(module).items():
            home = described_in(module, name, value)
            if home != module:
                elsewhere.append(f"* `{name} <{home}.{name}>`, described in `{home}`")
                continue
            lines += self._documented(f"{module}.{name}", value)
        if elsewhere:
            lines += ["", "These names are also here:", "", *elsewhere]
        content = StringList(lines, source=f"<public names of {module}>")
        node = nodes.Element()
        self.state.nested_parse(content, 0, node)
        return node.children

    def _documented(self, path: str, value: Any) -> list[str]:
        if inspect.isclass(value):
            lines = [f".. autoclass:: {path}", "   :members:"]
            if issubclass(value, BaseException):
                lines.append("   :show-inheritance:")
        elif callable(value):
            lines = [f".. autofunction:: {path}"]
        else:  # a constant; its docstring is that of its type
            lines = [f".. py:data:: {path.rpartition('.')[2]}", f"   :value: {value!r}"]
            lines += ["", f"   {CONSTANTS[path]}"]
        return [*lines, ""]


def shorten(
    _app: Sphinx, _what: str, _name: str, value: Any, _options: Any, signature: Any, result: Any
) -> tuple[str, str | None] | None:
    """Remove the modules of types. Fields of dataclasses are listed below, not in the signature."""
    if not signature:
        return None
    if inspect.isclass(value) and dataclasses.is_dataclass(value):
        return "", None
    signature = signature.replace("_TakesList[", "Callable[..., ")
    return _MODULE.sub("", signature), result and _MODULE.sub("", result)


def skip(
    _app: Sphinx, _what: str, _name: str, value: Any, skipped: bool, _options: Any
) -> bool | None:
    function = value.fget if isinstance(value, property) else value
    return True if getattr(function, "__qualname__", "") in INTERNAL else None


def drop_aliases(
    _app: Sphinx, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]
) -> None:
    """Remove what Python says about a field of a named tuple: its number."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", drop_aliases)
    return {"parallel_read_safe": True}
