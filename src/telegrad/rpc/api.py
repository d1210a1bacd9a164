"""The functions of `torch.distributed.rpc`, for the default agent of this process.

Inside a remote function they use the agent that runs it, so that several agents can live in one
process.

State: the default agent (`current.process_state`), which `init_rpc` sets under `_init_lock`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from telegrad import autograd, cluster, futures, plurals, profiling, refs
from telegrad.agent import Agent
from telegrad.config import Config
from telegrad.current import process_state
from telegrad.errors import UsageError
from telegrad.futures import Future
from telegrad.group.membership import WorkerInfo
from telegrad.group.rendezvous import ask_store, next_group, open_store
from telegrad.messages.remote_functions import check_callable, checked_args, checked_kwargs
from telegrad.refs import RRef
from telegrad.refs.manager import ReferenceManager
from telegrad.rpc import backend_registry, device_maps
from telegrad.rpc.agent import RpcAgent
from telegrad.rpc.backend_registry import BackendType
from telegrad.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT

# torch's api module has these names, too
from telegrad.rpc.internal import PythonUDF, RPCExecMode, _build_rpc_profiling_key  # noqa: F401
from telegrad.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from telegrad.runtime import AgentRuntime, active_runtime
from telegrad.timeouts import torch_limit

PyRRef = RRef
P = ParamSpec("P")
T = TypeVar("T")
To = str | int | WorkerInfo

__all__ = [
    "AllGatherStates",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


_init_lock = threading.Lock()
_thread_local_var = threading.local()


def is_available() -> bool:
    """Return True if torch was built with `torch.distributed`, whose stores Telegrad uses."""
    return dist.is_available()


def init_rpc(
    name: str | None = None,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    config: Config | None = None,
) -> None:
    """Make this process the worker `name` of a group and wait for the other workers.

    Under `telegrad launch`, torchrun, Slurm and other engines, all values may be left out (see
    `telegrad.cluster`). If nothing defines the size of the group, workers may join and leave it at
    any time. `config` is that of the options; without it, ``TELEGRAD_*`` variables count.
    """
    if backend is not None and backend not in BackendType:
        raise TypeError(f"Argument backend must be a member of BackendType, not {backend!r}")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _infer_backend(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    if config is not None:
        if rpc_backend_options.config is not None:
            raise UsageError(
                "config= is given, and rpc_backend_options have a config, too; pass one of them"
            )
        rpc_backend_options = copy.copy(rpc_backend_options)
        rpc_backend_options.config = config
    with _init_lock:
        if active_runtime() is not None:
            raise UsageError("RPC is already initialized; call shutdown first")
        timeout = rpc_backend_options.to_config().join_timeout
        url = rpc_backend_options.init_method
        if name is None or url.startswith("env:"):
            place = cluster.detect(name, rank if rank >= 0 else None, world_size)
            name = place.name
        if url.startswith("env:"):
            rank, world_size = -1 if place.rank is None else place.rank, place.world_size
        if world_size is not None and world_size <= 0:
            world_size = None  # torch's way to say that the size is not known
        _check_rank(rank, world_size)
        if url.startswith("env:"):
            store = open_store(place, timeout)
        else:
            store, rank = _rendezvous(url, rank, world_size, timeout)
        _init_rpc_backend(backend, next_group(store), name, rank, world_size, rpc_backend_options)


def _check_rank(rank: int, world_size: int | None) -> None:
    if world_size is not None and not 0 <= rank < world_size:
        raise UsageError(
            f"rank {rank} is outside a group of {plurals.count(world_size, 'worker')}, whose "
            f"ranks go from 0 to {world_size - 1}. Pass rank= and world_size= to init_rpc, "
            "or set RANK and WORLD_SIZE"
        )


def _rendezvous(url: str, rank: int, world_size: int | None, timeout: float) -> tuple[Any, int]:
    """Return the store of the group and the rank. The store waits for no worker: see `open_store`.

    A file store needs the size, because its last worker deletes the file.
    """
    size = -1 if world_size is None or url.startswith("tcp:") else world_size
    url += f"{'&' if '?' in url else '?'}world_size={size}"
    if rank >= 0:
        url += f"&rank={rank}"
    limit = timedelta(seconds=timeout)
    store, rank, _ = ask_store(timeout, lambda: next(dist.rendezvous(url, timeout=limit)))
    return store, rank


def _infer_backend(options: RpcBackendOptions | None) -> Any:
    if options is None or type(options) is RpcBackendOptions:
        return BackendType.TENSORPIPE
    for candidate in BackendType:
        if isinstance(options, type(backend_registry.construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {options}; pass backend= too")


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    if _is_current_rpc_agent_set():
        raise UsageError("RPC is already initialized")
    for value, kind in ((name, str), (rank, int), (rpc_backend_options, RpcBackendOptions)):
        if not isinstance(value, kind):
            raise UsageError(f"Argument {value} must be of type {kind} but got type {type(value)}")
    agent = backend_registry.init_backend(
        BackendType.TENSORPIPE if backend is None else backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    process_state.runtime = agent._runtime


def _start_agent(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> Agent:
    if (
        not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions)
        and type(rpc_backend_options) is not RpcBackendOptions
    ):
        kind = type(rpc_backend_options).__name__
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, not a `{kind}`"
        )
    agent = RpcAgent(
        name, store=store, rank=rank, world_size=world_size, options=rpc_backend_options
    )
    store.set_timeout(timedelta(seconds=agent.config.join_timeout))
    profiling.enable_remote_events()
    futures.end_collect_all_early()
    agent.open()
    try:
        device_maps.check_group(agent._runtime, getattr(rpc_backend_options, "devices", ()))
    except BaseException:
        agent.close()
        raise
    return agent


def rpc_sync(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> T:
    """Run `func(*args, **kwargs)` on worker `to` and return its result.

    `timeout` is in seconds; 0 means no limit.
    """
    runtime = active_runtime() or _require_runtime()
    check_callable(func)
    args = args if type(args) is tuple else checked_args(args)
    kwargs = checked_kwargs(kwargs) if kwargs else None
    limit = _limit(timeout, runtime)
    result: T = runtime.invoke(to, func, args, kwargs, limit)
    return result


def rpc_async(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]:
    """Run `func(*args, **kwargs)` on worker `to` and return a future for its result."""
    runtime = _require_runtime()
    check_callable(func)
    args = args if type(args) is tuple else checked_args(args)
    kwargs = checked_kwargs(kwargs) if kwargs else None
    limit = _limit(timeout, runtime)
    future = runtime.start(to, func, args, kwargs, limit)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


def remote(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]:
    """Run `func(*args, **kwargs)` on worker `to` and leave the result there.

    Return a reference to the result at once.
    """
    runtime = _require_runtime()
    check_callable(func)
    args = args if type(args) is tuple else checked_args(args)
    kwargs = checked_kwargs(kwargs) if kwargs else None
    limit = _limit(timeout, runtime)
    return refs.remote(to, func, args, kwargs, limit, agent=runtime.agent)


def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Return the worker with this name; without a name, this worker."""
    return _require_runtime().get_worker_info(worker_name)


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group. If `graceful`, first wait until all workers have finished their calls.

    For a worker that is lost meanwhile and may be restarted, see `Config.restart_timeout`.
    `timeout` is in seconds; 0 means no limit.
    """
    runtime = _require_runtime()
    limit = torch_limit(timeout)
    try:
        if graceful:
            runtime.shutdown(limit)
    finally:
        runtime.close()
        if process_state.runtime is runtime:
            process_state.runtime = None


def get_rpc_timeout() -> float:
    """Return the default timeout of calls in seconds; 0 means no limit."""
    return _require_runtime().timeout or 0.0


def _set_rpc_timeout(seconds: float) -> None:
    _require_runtime().timeout = torch_limit(seconds)


def _limit(timeout: float, runtime: AgentRuntime) -> float | None:
    """Return the time limit of a call that is given torch's values."""
    return runtime.timeout if timeout == UNSET_RPC_TIMEOUT else torch_limit(timeout)


def _require_runtime() -> AgentRuntime:
    runtime = active_runtime()
    if runtime is None:
        raise UsageError("RPC has not been initialized. Call telegrad.rpc.init_rpc first.")
    return runtime


def _require_initialized(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that needs `init_rpc` to have been called."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        _require_runtime()
        return function(*args, **kwargs)

    return checked


def _is_current_rpc_agent_set() -> bool:
    return active_runtime() is not None


def _get_current_rpc_agent() -> Agent:
    agent: Agent = _require_runtime().agent
    return agent


def _rref_context_get_debug_info() -> dict[str, str]:
    """Return the counters of references, under torch's names."""
    statistics = ReferenceManager.of(_require_runtime()).statistics()
    return {
        "num_owner_rrefs": str(statistics["owned_objects"]),
        "num_forks": str(statistics["references_of_others"]),
        "num_pending_futures": str(statistics["unacknowledged_reference_messages"]),
        "num_pending_users": str(statistics["unconfirmed_creations"]),
    }


@_require_initialized
def _get_debug_info() -> dict[str, Any]:
    """Return the counters of references, of the agent and of distributed autograd."""
    agent = _require_runtime().agent
    metrics = agent.get_debug_info() if isinstance(agent, RpcAgent) else {}
    return {**_rref_context_get_debug_info(), **metrics, **autograd._get_debug_info()}


def _to_worker_info(to: To) -> WorkerInfo:
    """Return the `WorkerInfo` of a name or rank."""
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, str | int):
        return get_worker_info(to)
    raise ValueError(f"Cannot get WorkerInfo from {to!r}: pass a name, a rank or a WorkerInfo")


def _reset_current_rpc_agent() -> None:
    """Remove the default agent of this process without closing it."""
    process_state.runtime = None


class AllGatherStates:
    """The state of a gather in torch. Telegrad does not use it; programs may import it."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal: threading.Event = threading.Event()


def _all_gather(
    obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Return the objects of the named workers by name; no names mean all workers.

    Raise an error that names missing workers.
    """
    runtime = _require_runtime()
    names = sorted(worker_names or ()) or None
    return runtime.all_gather(obj, names, _limit(timeout, runtime))


def _barrier(worker_names: set[str]) -> None:
    """Wait until all named workers have called this; an empty set means all workers."""
    runtime = _require_runtime()
    runtime.barrier(sorted(worker_names) or None, runtime.timeout)


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until every worker has called this."""
    _require_runtime().barrier(None, torch_limit(timeout))


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """At the end of the block, wait for every future that `rpc_async` returned inside it."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        futures_to_wait_for = _thread_local_var.future_list
        del _thread_local_var.future_list
        errors = [future.exception() for future in futures_to_wait_for]
        for error in errors:
            if error is not None:
                raise error


def _tensorpipe_options(rpc_timeout: float, init_method: str, **options: Any) -> RpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **options)


if not backend_registry.backend_registered("TENSORPIPE"):
    backend_registry.register_backend("TENSORPIPE", _tensorpipe_options, _start_agent)
