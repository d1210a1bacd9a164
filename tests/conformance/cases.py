"""The test classes: each suite of the wheel, with the fixtures that it needs.

A class is made when it is first asked for (`cases.RpcTest`): importing torch's fault-injecting
agent changes how stock torch behaves, so its suites must not be made in a process that runs another
one. Ranks that are spawned, not forked, find their class here by name.
"""

import importlib
from typing import Any

import under_test

# isort: split
import fixtures
import suites


def __getattr__(suite: str) -> Any:
    if suite not in suites.MODULES:
        raise AttributeError(suite)
    module = importlib.import_module(suites.MODULES[suite])
    base = getattr(module, suite)
    cls: Any = type(suite, (base, *_fixtures(suite), fixtures.Ranks), {"__module__": __name__})
    if hasattr(base, "_create_remote_module_iter"):
        cls._create_remote_module_iter = staticmethod(_python_modules(base, module))
    return globals().setdefault(suite, cls)


def _fixtures(suite: str) -> tuple[type, ...]:
    if under_test.NAME == "telegrad":
        return (
            fixtures.Wording,
            fixtures.SlowOwnerFixture if suite in suites.FAULTY else fixtures.TelegradFixture,
        )
    kind, name = (
        ("faulty", "FaultyRpc") if suite in suites.FAULTY else ("tensorpipe", "TensorPipeRpc")
    )
    module = importlib.import_module(f"{suites.BASE}rpc.{kind}_rpc_agent_test_fixture")
    return (getattr(module, f"{name}AgentTestFixture"),)


def _python_modules(base: Any, module: Any) -> Any:
    """The RemoteModule tests make each module in Python and in TorchScript; keep the Python way."""
    python = (module.ModuleCreationMode.MODULE_CTOR,)

    def create(remote_device: Any, modes: Any = python) -> Any:
        return base._create_remote_module_iter(remote_device, modes=modes)

    return create
