"""`DistributedOptimizer`: a `torch.optim.Optimizer` whose parameters live on other workers.

Each worker that owns some of the parameters has a `_WorkerOptimizer`: an ordinary optimizer over
those. Options that the trainer changes in `param_groups`, for example with a learning-rate
scheduler, are sent to the workers with the next step.

Several trainers can train the same parameters, each with an optimizer of its own. Each worker runs
one step at a time; the order of steps is not defined. A step between the forward and the backward
pass of another trainer does not change the gradients of that trainer: they are those of the weights
that its forward pass used (see `autograd.shared_parameters`).

State: the optimizer of a worker, and `.grad` of its parameters, change under one lock per worker.
A `DistributedOptimizer` belongs to the thread that uses it, like any optimizer of torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from telegrad import autograd, param_groups
from telegrad.autograd.registry import ContextRegistry, find_context
from telegrad.errors import InternalError, UsageError, WorkersFailed
from telegrad.futures import Future
from telegrad.messages.remote_functions import trusted
from telegrad.param_groups import Options
from telegrad.refs import RRef
from telegrad.runtime import active_runtime

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

__all__ = ["DistributedOptimizer"]


class _StepLock:
    """The lock that is held while an optimizer on one agent steps."""

    def __init__(self, agent: AgentRuntime) -> None:
        self.lock = threading.Lock()


class _OwnedParameters(NamedTuple):
    """The parameters of one group that live on one worker."""

    group_index: int
    options: Options
    indices: list[int]  # among all parameters of the distributed optimizer
    parameters: list[RRef[Tensor]]


class _WorkerOptimizer:
    """The optimizer of those parameters that live on this worker.

    Groups and parameters are identified by their indices in the distributed optimizer.
    """

    def __init__(
        self,
        agent: AgentRuntime,
        create: Callable[[list[dict[str, Any]]], Optimizer],
        owned: list[_OwnedParameters],
    ) -> None:
        self._lock = agent.service(_StepLock).lock
        self._indices: list[int] = []  # of the parameters, in the order of the local optimizer
        self._group_indices: list[int] = []
        self._shared_parameters = ContextRegistry.of(agent).shared_parameters
        self._optimizer = create([self._local_group(each) for each in owned])
        self._shared_parameters.add_optimizer(self._parameters)

    def __repr__(self) -> str:
        return f"<_WorkerOptimizer of parameters {self._indices}: {self._optimizer!r}>"

    def _local_group(self, owned: _OwnedParameters) -> dict[str, Any]:
        """Record the indices of parameters, and return these as a group for the local optimizer."""
        self._indices += owned.indices
        self._group_indices.append(owned.group_index)
        return {
            **owned.options,
            "params": [parameter.local_value() for parameter in owned.parameters],
        }

    @property
    def _parameters(self) -> list[Tensor]:
        groups = self._optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    @trusted
    def add(self, owned: _OwnedParameters) -> None:
        """Add a group of parameters."""
        with self._lock:
            group = self._local_group(owned)
            self._optimizer.add_param_group(group)
            self._shared_parameters.add_optimizer(group["params"])

    @trusted
    def options(self) -> tuple[Options, dict[int, Options]]:
        """Return the defaults of the optimizer, and the options of its groups by index."""
        indexed = zip(self._group_indices, self._optimizer.param_groups, strict=True)
        by_index = {index: param_groups.group_options(group) for index, group in indexed}
        return self._optimizer.defaults, by_index

    @trusted
    def step(self, context_id: int | None, changed: dict[int, Options]) -> None:
        """Set changed options, and step with the gradients of a context or those in `.grad`."""
        with self._shared_parameters.updating(), self._lock:
            for index, group in zip(self._group_indices, self._optimizer.param_groups, strict=True):
                group.update(changed.get(index, {}))
            parameters = self._parameters
            self._shared_parameters.before_update(parameters)
            if context_id is None:
                self._optimizer.step()
                return
            gradients = _gradients(context_id)
            accumulated = [parameter.grad for parameter in parameters]
            try:
                for parameter in parameters:
                    parameter.grad = gradients.get(parameter)
                self._optimizer.step()
            finally:
                for parameter, gradient in zip(parameters, accumulated, strict=True):
                    parameter.grad = gradient

    @trusted
    def accumulate(self, context_id: int) -> None:
        """Add the gradients of a context to `.grad`."""
        with self._lock:
            gradients = _gradients(context_id)
            for parameter in self._parameters:
                if parameter in gradients:
                    known, new = parameter.grad, gradients[parameter]
                    # A clone, since the context keeps its own gradient.
                    parameter.grad = new.clone() if known is None else known + new

    @trusted
    def zero_grad(self, set_to_none: bool) -> None:
        with self._lock:
            self._optimizer.zero_grad(set_to_none)

    @trusted
    def norms(self, context_id: int | None, norm_type: float) -> list[float]:
        """Return the norm of each gradient."""
        with self._lock:
            gradients = [gradient for _, gradient in self._with_gradients(context_id)]
        norms = []
        for gradient in gradients:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            norms.append(float(torch.linalg.vector_norm(values, norm_type)))
        return norms

    @trusted
    def scale(self, context_id: int | None, factor: float) -> None:
        """Multiply each gradient with a factor."""
        with self._lock:
            for parameter, gradient in self._with_gradients(context_id):
                if context_id is None:
                    parameter.grad = gradient * factor
                else:
                    find_context(context_id).replace_gradient(parameter, gradient * factor)

    def _with_gradients(self, context_id: int | None) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters that have a gradient, with it."""
        gradients = {} if context_id is None else _gradients(context_id)
        found = []
        for parameter in self._parameters:
            gradient = parameter.grad if context_id is None else gradients.get(parameter)
            if gradient is not None:
                found.append((parameter, gradient))
        return found

    @trusted
    def state(self) -> dict[int, Any]:
        """Return the state of each parameter, by index."""
        with self._lock:
            state = self._optimizer.state_dict()["state"]
            return {self._indices[position]: value for position, value in state.items()}

    @trusted
    def load(self, state: dict[int, Any], options: dict[int, Options]) -> None:
        """Load the state of parameters and the options of groups, both by index."""
        with self._lock:
            local_groups = self._optimizer.state_dict()["param_groups"]
            for index, group in zip(self._group_indices, local_groups, strict=True):
                group.update(options[index])
            local_state = {
                position: state[index]
                for position, index in enumerate(self._indices)
                if index in state
            }
            self._optimizer.load_state_dict({"state": local_state, "param_groups": local_groups})


@trusted
def _create_worker_optimizer(
    optimizer_class: Callable[..., Optimizer],
    owned: list[_OwnedParameters],
    args: tuple[Any, ...],
    kwargs: Options,
) -> RRef[_WorkerOptimizer]:
    agent = active_runtime()
    if agent is None:
        raise InternalError("an optimizer for a worker was to be created outside of a worker")
    optimizer = _WorkerOptimizer(
        agent, lambda groups: optimizer_class(groups, *args, **kwargs), owned
    )
    return RRef(optimizer, agent=agent.agent)


class DistributedOptimizer(Optimizer):
    """`optimizer_class(parameters, *args, **kwargs)`, run where the parameters are.

    `params_rref` has references to parameters, or groups of them as in `torch.optim`. Use it like
    any optimizer; `step(context_id)` takes the gradients from an autograd context. To step with the
    gradients of several contexts, call `accumulate(context_id)` for each of them, then `step()` and
    `zero_grad()`.

    >>> import torch
    >>> from telegrad import autograd
    >>> from telegrad.refs import remote
    >>> from telegrad.testing import LocalCluster
    >>> with LocalCluster(2) as cluster:
    ...     weight = remote("w1", torch.nn.Parameter, (torch.zeros(2),), agent=cluster["w0"])
    ...     optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
    ...     with autograd.context(agent=cluster["w0"]) as context_id:
    ...         loss = (weight.to_here() - 1).sum()
    ...         autograd.backward(context_id, [loss])
    ...         optimizer.step(context_id)
    ...     weight.to_here().detach()
    tensor([-0.5000, -0.5000])
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        params_rref: Iterable[RRef[Any]] | Iterable[dict[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._optimizer_class, self._args, self._kwargs = optimizer_class, args, kwargs
        self._worker_optimizers: dict[str, RRef[_WorkerOptimizer]] = {}  # by owner
        self._parameter_count = 0
        self._sent_options: list[Options] = []  # by group: the options that the workers have
        given: list[Any] = list(params_rref)
        if not given:
            raise UsageError("optimizer got an empty parameter list")
        if not isinstance(given[0], dict):
            given = [{"params": given}]
        # `Optimizer.__init__` adds these groups, with `add_param_group`.
        self._new_groups = [self._check_group(group) for group in given]
        self._runtime: AgentRuntime = self._new_groups[0]["params"][0]._runtime
        self._distribute(range(len(self._new_groups)), self._new_groups)
        super().__init__(self._new_groups, self._defaults)  # type: ignore[arg-type]
        self.state: param_groups.RemoteState = param_groups.RemoteState()
        del self._new_groups

    def __repr__(self) -> str:
        owners = ", ".join(rref.owner_name() for rref in self._worker_optimizers.values())
        name = self._optimizer_class.__name__  # type: ignore[attr-defined]
        return f"{type(self).__name__} of {name} on {owners}: {super().__repr__()}"

    @property
    def remote_optimizers(self) -> list[RRef[Any]]:
        """References to the optimizers of the workers that own parameters, one per worker."""
        return list(self._worker_optimizers.values())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Its parameters can live on workers that own no other parameters."""
        if param_group not in getattr(self, "_new_groups", ()):
            param_group = self._check_group(param_group)
            self._distribute([len(self.param_groups)], [param_group])
        options = self._options[len(self.param_groups)]
        self.param_groups.append({**options, "params": param_group["params"]})
        self._sent_options.append(param_groups.group_options(self.param_groups[-1]))

    def step(self, context_id: int | None = None) -> None:  # type: ignore[override]
        """Step on every worker with the gradients of a context, or with accumulated gradients.

        Return when all workers have stepped. If some fail, the others have stepped nevertheless;
        the error names every failure.
        """
        if context_id is not None:
            if callable(context_id):
                raise UsageError(
                    "a distributed step takes the id of an autograd context, not a closure"
                )
            find_context(context_id)
        changed = param_groups.take_changes(self.param_groups, self._sent_options)
        self._call_all("step", context_id, changed)

    def accumulate(self, context_id: int) -> None:
        """Add the gradients of a context to `.grad` of the parameters, for a later `step()`."""
        find_context(context_id)
        self._call_all("accumulate", context_id)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop accumulated gradients. Gradients of a context are released with it."""
        self._call_all("zero_grad", set_to_none)

    def clip_grad_norm_(
        self,
        max_norm: float,
        context_id: int | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale the gradients on all workers so that their total norm is at most `max_norm`.

        Return the norm before, like `torch.nn.utils.clip_grad_norm_`.
        """
        norms: list[float] = []
        for norms_of_worker in self._call_all("norms", context_id, norm_type).values():
            norms += norms_of_worker
        total: Tensor = torch.linalg.vector_norm(
            torch.tensor(norms, dtype=torch.float64), norm_type
        ).float()
        if error_if_nonfinite and not bool(total.isfinite()):
            raise UsageError(
                f"the norm of order {norm_type} of the gradients is {total.item()}: it cannot be "
                "clipped"
            )
        factor = max_norm / (float(total) + 1e-6)
        if not factor >= 1.0:
            self._call_all("scale", context_id, factor)
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all workers in the form that `optimizer_class` uses."""
        state: dict[int, Any] = {}
        for state_of_worker in self._call_all("state").values():
            state.update(state_of_worker)
        return {
            "state": dict(sorted(state.items())),
            "param_groups": param_groups.to_state_dict(self.param_groups),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, of this class or of `optimizer_class`."""
        state = param_groups.state_by_index(state_dict, self.param_groups)
        options = {
            index: param_groups.group_options(group)
            for index, group in enumerate(state_dict["param_groups"])
        }
        self._call_all("load", state, options)
        for index, group in enumerate(self.param_groups):
            group.update(options[index])
            self._sent_options[index] = param_groups.group_options(group)

    def _check_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group whose parameters are a list. Raise if they are not references."""
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, RRef) else list(parameters)
        for index, parameter in enumerate(parameters):
            if not isinstance(parameter, RRef):
                raise UsageError(
                    f"parameter {index} is a {type(parameter).__name__}; a DistributedOptimizer "
                    "takes references (RRef) to parameters"
                )
        if not parameters:
            raise UsageError("optimizer got a group without parameters")
        return {**group, "params": parameters}

    def _distribute(self, group_indices: Iterable[int], groups: list[dict[str, Any]]) -> None:
        """Pass the parameters of new groups to the optimizers of the workers that own them."""
        by_owner: dict[str, list[_OwnedParameters]] = {}
        for group_index, group in zip(group_indices, groups, strict=True):
            for parameter in group["params"]:
                owned = by_owner.setdefault(parameter.owner_name(), [])
                if not owned or owned[-1].group_index != group_index:
                    options = param_groups.group_options(group)
                    owned.append(_OwnedParameters(group_index, options, [], []))
                owned[-1].indices.append(self._parameter_count)
                owned[-1].parameters.append(parameter)
                self._parameter_count += 1
        created: dict[str, Future[Any]] = {}
        for owner, owned in by_owner.items():
            if owner in self._worker_optimizers:
                for each in owned:
                    self._worker_optimizers[owner].rpc_sync().add(each)
            else:
                arguments = (self._optimizer_class, owned, self._args, self._kwargs)
                created[owner] = self._runtime.start(owner, _create_worker_optimizer, arguments)
        self._worker_optimizers.update(_gather_results(created))
        self._options: dict[int, Options] = {}  # by group
        for defaults, options in self._call_all("options").values():
            self._defaults: Options = defaults
            self._options.update(options)

    def _call_all(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of every worker's optimizer at the same time. Return results by owner."""
        *others, (last_owner, last) = self._worker_optimizers.items()
        calls = {owner: getattr(rref.rpc_async(timeout=0), method)(*args) for owner, rref in others}
        # The last call is synchronous, which is faster.
        calls[last_owner] = _completed(getattr(last.rpc_sync(timeout=0), method), *args)
        return _gather_results(calls)


def _gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients of a context on this worker: none, if no call under it came here."""
    try:
        find_context(context_id)
    except UsageError:
        return {}
    return autograd.get_gradients(context_id)


def _completed(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function, and return a future with its result or exception."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    return future


def _gather_results(calls: dict[str, Future[Any]]) -> dict[str, Any]:
    """Return the results of calls by owner. Raise all their errors if there are any."""
    failures: dict[str, BaseException] = {}
    for owner, call in calls.items():
        error = call.exception()
        if error:
            failures[owner] = error
    if len(failures) == 1:
        raise next(iter(failures.values()))
    if failures:
        raise WorkersFailed.of(failures)
    return {owner: call.wait() for owner, call in calls.items()}
