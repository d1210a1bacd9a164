"""What PyTorch's suites leave to their user: how ranks start, which options they get, what errors
say.

`cases.py` mixes these into the suites: `Ranks` always, the others when Telegrad is under test.
"""

import faulthandler
import os
import time
from collections.abc import Callable
from typing import Any

import sessions
import torch
import torch.distributed.rpc as rpc
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture

# in the environment: fork or spawn, and seconds for a test
START, LIMIT = "CONFORMANCE_START", "CONFORMANCE_LIMIT"
EXIT_CODES: list[int | None] = []  # of the ranks of the test that ran in this process


class Ranks(MultiProcessTestCase):
    """Starts the ranks of a test, by fork unless told otherwise."""

    def setUp(self) -> None:
        super().setUp()
        context: Any = torch.multiprocessing.get_context(os.environ[START])
        self._start_processes(context.Process)

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        sessions.die_with_parent()
        # PyTorch misses ranks that hang in exiting
        faulthandler.dump_traceback_later(float(os.environ[LIMIT]) - 0.5)
        super()._run(*args, **kwargs)

    def tearDown(self) -> None:
        deadline = time.monotonic() + 2
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        EXIT_CODES[:] = [process.exitcode for process in self.processes]
        super().tearDown()


class Wording:
    """Texts that only pybind11 writes are not asked of a Python package; the type of the exception
    still is.
    """

    PYBIND = ("incompatible function arguments", "incompatible constructor arguments")

    def assertRaisesRegex(self, error: Any, regex: Any, *args: Any, **kwargs: Any) -> Any:
        suite: Any = super()
        return suite.assertRaisesRegex(  # noqa: PT027
            error, "" if regex in self.PYBIND else regex, *args, **kwargs
        )


class TelegradFixture(RpcAgentTestFixture):
    @property
    def rpc_backend(self) -> Any:
        return getattr(getattr(rpc, "BackendType", None), "TENSORPIPE", None)

    @property
    def rpc_backend_options(self) -> Any:
        return rpc.TensorPipeRpcBackendOptions(init_method=self.init_method)

    def get_shutdown_error_regex(self) -> str:
        return ".*"

    def get_timeout_error_regex(self) -> str:
        return r"RPC ran for more than|timed out|[Tt]imeout"


class SlowOwnerFixture(TelegradFixture):
    """In place of torch's fault-injecting agent.

    Delays: the callee sleeps first. Lost messages cannot be had.
    """

    def setup_fault_injection(
        self, faulty_messages: Any, messages_to_delay: dict[str, float] | None
    ) -> None:
        if faulty_messages:
            raise NotImplementedError("messages cannot be dropped on purpose")
        delays = (
            {"PYTHON_CALL": 1.5, "SCRIPT_CALL": 1.5}
            if messages_to_delay is None
            else messages_to_delay
        )
        for name, message in (
            ("rpc_sync", "_CALL"),
            ("rpc_async", "_CALL"),
            ("remote", "_REMOTE_CALL"),
        ):
            if hasattr(rpc, name):
                setattr(rpc, name, _delayed(getattr(rpc, name), delays, message))


def _delayed(
    call: Callable[..., Any], delays: dict[str, float], message: str
) -> Callable[..., Any]:
    """The call, with a sleep on the callee for as long as the agent would have delayed its
    message.
    """

    def delayed(to: Any, func: Any, args: Any = None, kwargs: Any = None, **rest: Any) -> Any:
        builtin = torch.jit._builtins._find_builtin(func) is not None
        seconds = delays.get(("SCRIPT" if builtin else "PYTHON") + message, 0.0)
        # a slow fetch is a slow creation, to the one who waits
        if builtin and message == "_REMOTE_CALL":
            seconds = max(seconds, delays.get("SCRIPT_RREF_FETCH_CALL", 0.0))
        if seconds:
            return call(to, _sleep_then_call, (seconds, func, args or (), kwargs or {}), **rest)
        return call(to, func, args, kwargs, **rest)

    return delayed


def _sleep_then_call(seconds: float, func: Any, args: Any, kwargs: Any) -> Any:
    time.sleep(seconds)
    return func(*args, **kwargs)
