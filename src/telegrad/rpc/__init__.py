"""`torch.distributed.rpc` on Telegrad: change the import, and the rest of the script stays.

This package has torch's names, signatures and special values, such as a timeout of 0 for no limit,
and translates them for the agent of this process. No module below it imports it. Everything that
torch has no name for belongs in `telegrad.Agent` and `telegrad.Config`, not here.

>>> import telegrad.rpc as rpc
>>> rpc.is_available()
True
"""

from telegrad import autograd as dist_autograd
from telegrad.agent import Agent
from telegrad.futures import Future
from telegrad.group.membership import WorkerInfo
from telegrad.refs import RRef
from telegrad.rpc import api, backend_registry, constants, functions, internal, options
from telegrad.rpc.agent import RpcAgent
from telegrad.rpc.api import AllGatherStates as AllGatherStates
from telegrad.rpc.api import _all_gather as _all_gather
from telegrad.rpc.api import _barrier as _barrier
from telegrad.rpc.api import _get_current_rpc_agent as _get_current_rpc_agent
from telegrad.rpc.api import _get_debug_info as _get_debug_info
from telegrad.rpc.api import _init_rpc_backend as _init_rpc_backend
from telegrad.rpc.api import _is_current_rpc_agent_set as _is_current_rpc_agent_set
from telegrad.rpc.api import _require_initialized as _require_initialized
from telegrad.rpc.api import _reset_current_rpc_agent as _reset_current_rpc_agent
from telegrad.rpc.api import _rref_context_get_debug_info as _rref_context_get_debug_info
from telegrad.rpc.api import _set_rpc_timeout as _set_rpc_timeout
from telegrad.rpc.api import _to_worker_info as _to_worker_info
from telegrad.rpc.api import _wait_all as _wait_all
from telegrad.rpc.api import _wait_all_workers as _wait_all_workers
from telegrad.rpc.api import (
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from telegrad.rpc.backend_registry import BackendType
from telegrad.rpc.constants import _DEFAULT_INIT_METHOD as _DEFAULT_INIT_METHOD
from telegrad.rpc.constants import _DEFAULT_NUM_WORKER_THREADS as _DEFAULT_NUM_WORKER_THREADS
from telegrad.rpc.constants import _DEFAULT_RPC_TIMEOUT_SEC as _DEFAULT_RPC_TIMEOUT_SEC
from telegrad.rpc.constants import _UNSET_RPC_TIMEOUT as _UNSET_RPC_TIMEOUT
from telegrad.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions

PyRRef = RRef
_is_tensorpipe_available = True  # Telegrad registers its backend under this name
TensorPipeAgent = RpcAgent

__all__ = [
    "UNSET_RPC_TIMEOUT",
    "Agent",
    "AllGatherStates",
    "BackendType",
    "Future",
    "PyRRef",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "api",
    "backend_registry",
    "constants",
    "dist_autograd",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "internal",
    "is_available",
    "options",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
