"""Telegrad's modules have every name of torch's, except those listed here with a reason."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any, Union

import pytest
import torch
import torch.distributed.rpc

import telegrad.autograd
import telegrad.rpc

ENGINE = "part of torch's C++ engine, which Telegrad does not use"
GATHER = "a step of torch's gather; Telegrad's is in group/collectives.py"
SCRIPT = "TorchScript knows torch's RRef only"
HELPER = "a helper of torch's implementation, which nothing outside it calls"
ACCIDENT = "a variable of a loop of torch's that became public by accident"
OWN = "has nothing to do with RPC: import torch's own"
PROFILER = "profiles threads of torch's engine; profiles of the caller show remote events here"
PICKLER = "Telegrad's codec takes its place: telegrad.wire.codec"
INIT = "`init_rpc` does it"

MODULES = {
    "torch.distributed.rpc": "telegrad.rpc",
    "torch.distributed.rpc.api": "telegrad.rpc.api",
    "torch.distributed.rpc.backend_registry": "telegrad.rpc.backend_registry",
    "torch.distributed.rpc.constants": "telegrad.rpc.constants",
    "torch.distributed.rpc.functions": "telegrad.rpc.functions",
    "torch.distributed.rpc.internal": "telegrad.rpc.internal",
    "torch.distributed.rpc.options": "telegrad.rpc.options",
    "torch.distributed.autograd": "telegrad.autograd",
    "torch.distributed.optim": "telegrad.optim",
    "torch.distributed.optim.optimizer": "telegrad.optim",
    "torch.distributed.nn.api.remote_module": "telegrad.nn",
}
MODULES_LEFT_OUT = {
    "torch.distributed.rpc._testing": "faults for torch's engine",
    "torch.distributed.rpc._utils": "of torch's engine; Telegrad has group/membership.py",
    "torch.distributed.rpc.rref_proxy": "of torch's engine; Telegrad has refs/rref.py",
    "torch.distributed.rpc.server_process_global_profiler": PROFILER,
}

_INVOKE = """_invoke_remote_builtin _invoke_remote_python_udf _invoke_remote_torchscript
    _invoke_rpc_builtin _invoke_rpc_python_udf _invoke_rpc_torchscript
    _cleanup_python_rpc_handler _delete_all_user_and_unforked_owner_rrefs _destroy_rref_context
    _set_and_start_rpc_agent"""

LATEST = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
_BEFORE = """_ScriptLocalOptimizer _ScriptLocalOptimizerInterface _new_script_local_optimizer
    _script_local_optimizer_step """  # names that older versions of torch have

LEFT_OUT: dict[str, dict[str, str]] = {  # by module and reason
    "torch.distributed.rpc": {
        ENGINE: f"{_INVOKE} _TensorPipeRpcBackendOptionsBase _utils",
        PROFILER: """RemoteProfilerManager _disable_server_process_global_profiler
            enable_gil_profiling _enable_server_process_global_profiler
            _server_process_global_profile _set_profiler_node_id server_process_global_profiler""",
        SCRIPT: "_disable_jit_rref_pickle _enable_jit_rref_pickle",
        INIT: "_init_counter _init_counter_lock _validate_rpc_args",
        HELPER: "Store logger",
        ACCIDENT: "method_factory new_method",
    },
    "torch.distributed.rpc.api": {
        ENGINE: f"""{_INVOKE} _invoke_rpc _group_membership_management _update_group_membership
            _rref_typeof_on_user""",
        GATHER: """_ALL_WORKER_NAMES _all_gather_dict_lock _all_gather_sequence_id
            _broadcast_to_followers _all_gather_sequence_id_to_states _gather_to_leader""",
        PICKLER: "_default_pickler _internal_rpc_pickler _use_rpc_pickler",
        PROFILER: "RemoteProfilerManager _enable_rpc_profiler _get_should_profile",
        INIT: "_init_rpc_states",
        "`shutdown` does it, and logs which references are left": """_finalize_shutdown
            _ignore_rref_leak""",
        "in telegrad.refs.rref": "_rref_typeof_on_owner",
        HELPER: "GenericWithOneTypeVar TYPE_CHECKING _P _R logger",
        ACCIDENT: "docstring method method_factory method_name new_method",
    },
    "torch.distributed.rpc.backend_registry": {
        ENGINE: "_group_membership_management _update_group_membership",
        "device maps are checked in telegrad.rpc.device_maps": """_create_device_list
            _create_reverse_mapping _get_device_infos _set_devices_and_reverse_device_map
            _tensorpipe_exchange_and_check_all_device_maps _tensorpipe_validate_devices
            _validate_device_maps""",
        HELPER: """_backend_type_doc _backend_type_repr _init_process_group
            _tensorpipe_construct_rpc_backend_options_handler _tensorpipe_init_backend_handler
            api rpc_constants""",
    },
    "torch.distributed.rpc.internal": {
        PICKLER: "_InternalRPCPickler _thread_local_tensor_tables deserialize serialize",
        "exceptions travel as themselves": "RemoteException _handle_exception",
        ENGINE: "_get_current_rpc_agent _run_function",
        PROFILER: "_start_record_function",
    },
    "torch.distributed.rpc.options": {
        ENGINE: "_TensorPipeRpcBackendOptionsBase",
        HELPER: """DeviceType _is_tensorpipe_available _to_device _to_device_list _to_device_map
            rpc_contants""",
    },
    "torch.distributed.autograd": {INIT: "_init", HELPER: "TYPE_CHECKING annotations"},
    "torch.distributed.optim": {
        OWN: """PostLocalSGDOptimizer ZeroRedundancyOptimizer _FunctionalAdadelta
            _FunctionalAdagrad _FunctionalAdam _FunctionalAdamW _FunctionalAdamax
            _FunctionalRMSprop _FunctionalRprop _FunctionalSGD _NamedOptimizer
            _apply_optimizer_in_backward _deprecation_warning _get_in_backward_optimizers
            apply_optimizer_in_backward as_functional_optim functional_adadelta
            functional_adagrad functional_adam functional_adamax functional_adamw
            functional_rmsprop functional_rprop functional_sgd named_optimizer
            post_localSGD_optimizer utils zero_redundancy_optimizer""",
        "telegrad.optim is one module": "optimizer",
    },
    "torch.distributed.optim.optimizer": {
        SCRIPT: f"""_FunctionalLocalOptimizer _functional_local_optimizer_step functional_optim_map
            _new_functional_local_optimizer {"" if LATEST else _BEFORE}""",
        HELPER: """_LocalOptimizer _local_optimizer_step _new_local_optimizer _wait_for_all
            dist_autograd logger rpc""",
    },
    "torch.distributed.nn.api.remote_module": {
        SCRIPT: """_RemoteModule _create_module_with_interface _instantiate_template instantiator
            _recursive_script_module_receiver _recursive_script_module_reducer""",
        PICKLER: """_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING
            _REMOTE_MODULE_PICKLED_ATTRIBUTES _SerializedRemoteModule _internal_rpc_pickler
            _remote_module_receiver _remote_module_reducer""",
        HELPER: "T _create_module _grad_t _param_rrefs _raise_not_supported _remote_device rpc",
    },
}


def defined(module: ModuleType) -> set[str]:
    """Names that a module of torch's RPC has, less what it imported from elsewhere."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("__") and not _is_foreign(value)
    }


def _is_foreign(value: Any) -> bool:
    """Return True for a module, and for what another part of torch or Python defines."""
    if isinstance(value, ModuleType):
        return not value.__name__.startswith("torch.distributed.")
    if value is Any or value is Union:  # neither functions nor classes before Python 3.11 and 3.14
        return True
    home = str(getattr(value, "__module__", None) or "torch.distributed")
    return (inspect.isroutine(value) or isinstance(value, type)) and not home.startswith(
        ("torch.distributed.", "torch._C._distributed_rpc", "torch._C._distributed_autograd")
    )


def left_out(name: str) -> list[str]:
    return [each for names in LEFT_OUT.get(name, {}).values() for each in names.split()]


@pytest.mark.parametrize("name", MODULES)
def test_every_name_is_there_or_left_out_with_a_reason(name: str) -> None:
    theirs, ours = importlib.import_module(name), importlib.import_module(MODULES[name])
    missing = [each for each in defined(theirs) if not hasattr(ours, each)]
    assert set(missing) <= set(left_out(name))
    if LATEST:  # the others lack some of the names
        assert sorted(missing) == sorted(left_out(name))


def test_every_module_is_there_or_left_out_with_a_reason() -> None:
    modules = {
        "torch.distributed.rpc",
        "torch.distributed.autograd",
        "torch.distributed.nn.api.remote_module",
    }
    modules |= {
        each.name
        for each in pkgutil.iter_modules(torch.distributed.rpc.__path__, "torch.distributed.rpc.")
    }
    # its other modules are torch's own
    modules |= {"torch.distributed.optim", "torch.distributed.optim.optimizer"}
    assert modules == MODULES.keys() | MODULES_LEFT_OUT.keys()


@pytest.mark.parametrize(
    ("theirs", "ours", "omitted"),
    [
        # ENGINE
        ("PyRRef", telegrad.rpc.PyRRef, {"_serialize", "_deserialize", "_set_profiling_future"}),
        ("RpcAgent", telegrad.rpc.RpcAgent, set()),
        ("TensorPipeAgent", telegrad.rpc.TensorPipeAgent, {"_update_group_membership"}),  # ENGINE
        ("WorkerInfo", telegrad.rpc.WorkerInfo, set()),
    ],
)
def test_classes_of_torchs_engine_have_their_methods(
    theirs: str, ours: type, omitted: set[str]
) -> None:
    original = getattr(torch.distributed.rpc, theirs)
    names = {name for name in dir(original) if not name.startswith("__")} - {
        "_pybind11_conduit_v1_"
    }
    assert {name for name in names if not hasattr(ours, name)} == omitted


def test_contexts_have_the_methods_of_torchs() -> None:
    original = torch._C._distributed_autograd.DistAutogradContext
    names = {name for name in dir(original) if not name.startswith("__")} - {
        "_pybind11_conduit_v1_"
    }
    assert [
        name for name in names if not hasattr(telegrad.autograd.DistAutogradContext, name)
    ] == []
