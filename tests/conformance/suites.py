"""Which of PyTorch's RPC suites the installed torch wheel holds, and which tests are in them.

Read from the wheel's files with `ast`: torch is not imported, and none of the suites' code is kept
here. The suites change between versions of torch, so a module, a class or a test that is not there
is simply not listed.
"""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BASE = "torch.testing._internal.distributed."

MODULES = {
    "RpcTest": BASE + "rpc.rpc_test",
    "TensorPipeAgentRpcTest": BASE + "rpc.rpc_test",
    "FaultyAgentRpcTest": BASE + "rpc.faulty_agent_rpc_test",
    "DistAutogradTest": BASE + "rpc.dist_autograd_test",
    "TensorPipeAgentDistAutogradTest": BASE + "rpc.dist_autograd_test",
    "FaultyAgentDistAutogradTest": BASE + "rpc.dist_autograd_test",
    "DistOptimizerTest": BASE + "rpc.dist_optimizer_test",
    "RemoteModuleTest": BASE + "nn.api.remote_module_test",
    "ThreeWorkersRemoteModuleTest": BASE + "nn.api.remote_module_test",
    "ParameterServerTest": BASE + "rpc.examples.parameter_server_test",
    "ReinforcementLearningRpcTest": BASE + "rpc.examples.reinforcement_learning_rpc_test",
    "DdpUnderDistAutogradTest": BASE + "ddp_under_dist_autograd_test",
    "DdpComparisonTest": BASE + "ddp_under_dist_autograd_test",
    "CudaRpcTest": BASE + "rpc.rpc_test",
    "TensorPipeAgentCudaRpcTest": BASE + "rpc.rpc_test",
    "CudaDistAutogradTest": BASE + "rpc.dist_autograd_test",
    "TensorPipeCudaDistAutogradTest": BASE + "rpc.dist_autograd_test",
    "CudaRemoteModuleTest": BASE + "nn.api.remote_module_test",
    "CudaDdpComparisonTest": BASE + "ddp_under_dist_autograd_test",
    "JitRpcTest": BASE + "rpc.jit.rpc_test",
    "JitDistAutogradTest": BASE + "rpc.jit.dist_autograd_test",
    "JitFaultyAgentRpcTest": BASE + "rpc.jit.rpc_test_faulty",
}
# run with the agent that delays and drops messages
FAULTY = {"FaultyAgentRpcTest", "FaultyAgentDistAutogradTest"}


class Found(NamedTuple):
    suite: str
    test: str
    gpus: int  # how many the test needs


def discover() -> Iterator[Found]:
    """Every test of every suite, in the suites' own order."""
    for suite, module in MODULES.items():
        path = _path(module)
        if path.exists():
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield from (Found(suite, test, gpus) for test, gpus in _tests(tree, suite).items())


def _path(module: str) -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("conformance: torch is not installed")
    return Path(spec.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")


def _tests(tree: ast.Module, suite: str) -> dict[str, int]:
    """Test -> GPUs it needs, those that it inherits from classes of the same file included."""
    node = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == suite), None)
    found: dict[str, int] = {}
    if node is None:
        return found
    for base in node.bases:
        if isinstance(base, ast.Name):
            found |= _tests(tree, base.id)
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name.startswith("test"):
            found[method.name] = max(map(_gpus, method.decorator_list), default=0)
    return found


def _gpus(decorator: ast.expr) -> int:
    """2 for `@skip_if_lt_x_gpu(2)`; a named number counts as many."""
    if (
        not isinstance(decorator, ast.Call)
        or getattr(decorator.func, "id", "") != "skip_if_lt_x_gpu"
    ):
        return 0
    number = decorator.args[0]
    return (
        int(number.value)
        if isinstance(number, ast.Constant) and isinstance(number.value, int)
        else 99
    )
