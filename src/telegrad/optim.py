"""`DistributedOptimizer`: a `torch.optim.Optimizer` whose parameters live on other workers.

Each worker that owns some of the parameters holds a part: an ordinary optimizer over those. What the trainer sets in
`param_groups` (a learning-rate scheduler, for one) goes to the parts with the next step.

Several trainers may train the same parameters, each with an optimizer of its own. Steps on one worker happen one after
the other, each as a whole; which comes first is not defined. A step between another trainer's forward and backward pass
does not disturb that: its gradients are those of the weights that it saw (see `autograd.versions`).

State: of a part, its optimizer and the `.grad` of its parameters, under one lock per worker.
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
from telegrad.autograd.worker_context import Context
from telegrad.errors import InternalError, UsageError, WorkersFailed
from telegrad.futures import Future
from telegrad.param_groups import Options
from telegrad.refs import RRef
from telegrad.runtime import active_runtime
from telegrad.server.functions import trusted

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

__all__ = ["DistributedOptimizer"]


class _StepLock:
    """One per agent: whose step it is."""

    def __init__(self, agent: AgentRuntime) -> None:
        self.lock = threading.Lock()


class _WorkerParameters(NamedTuple):
    """The parameters of one group that live on one worker."""

    group: int
    options: Options
    numbers: list[int]  # among all parameters of the optimizer
    parameters: list[RRef[Tensor]]


class _WorkerOptimizer:
    """The optimizer of those parameters that live on this worker."""

    def __init__(
        self,
        agent: AgentRuntime,
        make: Callable[[list[dict[str, Any]]], Optimizer],
        shares: list[_WorkerParameters],
    ) -> None:
        self._turn = agent.service(_StepLock)
        self._numbers: list[int] = []
        self._groups: list[int] = []
        self._versions = ContextRegistry.of(agent).shared_parameters
        self._optimizer = make([self._take(share) for share in shares])
        self._versions.add_optimizer(self._parameters)

    def __repr__(self) -> str:
        return f"<WorkerOptimizer of a DistributedOptimizer: parameters {self._numbers}, {self._optimizer!r}>"

    def _take(self, share: _WorkerParameters) -> dict[str, Any]:
        self._numbers += share.numbers
        self._groups.append(share.group)
        return {
            **share.options,
            "params": [parameter.local_value() for parameter in share.parameters],
        }

    @property
    def _parameters(self) -> list[Tensor]:
        return [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]

    @trusted
    def add(self, share: _WorkerParameters) -> None:
        with self._turn.lock:
            taken = self._take(share)
            self._optimizer.add_param_group(taken)
            self._versions.add_optimizer(taken["params"])

    @trusted
    def options(self) -> tuple[Options, dict[int, Options]]:
        """The defaults of the optimizer, and the options of its groups by number."""
        numbered = zip(self._groups, self._optimizer.param_groups, strict=True)
        return self._optimizer.defaults, {
            number: param_groups.options(group) for number, group in numbered
        }

    @trusted
    def step(self, context_id: int | None, changed: dict[int, Options]) -> None:
        with self._versions.updating(), self._turn.lock:
            self._set(changed)
            parameters = self._parameters
            self._versions.before_update(parameters)
            if context_id is None:
                self._optimizer.step()
                return
            gradients = _gradients(context_id)
            kept = [parameter.grad for parameter in parameters]
            try:
                for parameter in parameters:
                    parameter.grad = gradients.get(parameter)
                self._optimizer.step()
            finally:
                for parameter, gradient in zip(parameters, kept, strict=True):
                    parameter.grad = gradient

    @trusted
    def accumulate(self, context_id: int) -> None:
        with self._turn.lock:
            gradients = _gradients(context_id)
            for parameter in self._parameters:
                if parameter in gradients:
                    known, new = parameter.grad, gradients[parameter]
                    # the context keeps its own
                    parameter.grad = new.clone() if known is None else known + new

    @trusted
    def zero_grad(self, set_to_none: bool) -> None:
        with self._turn.lock:
            self._optimizer.zero_grad(set_to_none)

    @trusted
    def norms(self, context_id: int | None, norm_type: float) -> list[float]:
        """The norm of each gradient."""
        with self._turn.lock:
            found = [gradient for _, gradient in self._found(context_id)]
        values = [
            gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in found
        ]
        return [float(torch.linalg.vector_norm(value, norm_type)) for value in values]

    @trusted
    def scale(self, context_id: int | None, factor: float) -> None:
        with self._turn.lock:
            for parameter, gradient in self._found(context_id):
                if context_id is None:
                    parameter.grad = gradient * factor
                else:
                    find_context(context_id).replace_gradient(parameter, gradient * factor)

    def _found(self, context_id: int | None) -> list[tuple[Tensor, Tensor]]:
        gradients = {} if context_id is None else _gradients(context_id)
        found = [
            (each, each.grad if context_id is None else gradients.get(each))
            for each in self._parameters
        ]
        return [(parameter, gradient) for parameter, gradient in found if gradient is not None]

    @trusted
    def state(self) -> dict[int, Any]:
        """The state of each parameter, by number."""
        with self._turn.lock:
            state = self._optimizer.state_dict()["state"]
            return {self._numbers[place]: value for place, value in state.items()}

    @trusted
    def load(self, state: dict[int, Any], options: dict[int, Options]) -> None:
        with self._turn.lock:
            places = {number: place for place, number in enumerate(self._numbers)}
            mine = self._optimizer.state_dict()["param_groups"]
            for number, group in zip(self._groups, mine, strict=True):
                group.update(options[number])
            local = {places[number]: value for number, value in state.items() if number in places}
            self._optimizer.load_state_dict({"state": local, "param_groups": mine})

    def _set(self, changed: dict[int, Options]) -> None:
        for number, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            group.update(changed.get(number, {}))


@trusted
def _make_part(
    optimizer_class: Callable[..., Optimizer],
    shares: list[_WorkerParameters],
    args: tuple[Any, ...],
    kwargs: Options,
) -> RRef[_WorkerOptimizer]:
    agent = active_runtime()
    if agent is None:
        raise InternalError("a part of an optimizer was to be made outside a worker")
    return RRef(
        _WorkerOptimizer(agent, lambda shared: optimizer_class(shared, *args, **kwargs), shares),
        agent=agent.agent,
    )


class DistributedOptimizer(Optimizer):
    """`optimizer_class(parameters, *args, **kwargs)`, run where the parameters are.

    `params_rref` holds references to parameters, or groups of them as `torch.optim` takes them. Use it like any
    optimizer; `step(context_id)` takes the gradients from an autograd context. To step on gradients of several
    contexts, `accumulate(context_id)` them, `step()`, and `zero_grad()`.

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
        self._make = optimizer_class, args, kwargs
        self._parts: dict[str, RRef[_WorkerOptimizer]] = {}  # by owner
        self._count = 0
        self._known: list[Options] = []  # what the parts know of each group's options
        given: list[Any] = list(params_rref)
        if not given:
            raise UsageError("optimizer got an empty parameter list")
        if not isinstance(given[0], dict):
            given = [{"params": given}]
        self._new_groups = [self._group(group) for group in given]
        self._agent: AgentRuntime = self._new_groups[0]["params"][0]._agent
        self._distribute(range(len(self._new_groups)), self._new_groups)
        super().__init__(self._new_groups, self._defaults)  # type: ignore[arg-type]  # which adds the groups
        del self._new_groups

    def __repr__(self) -> str:
        owners = ", ".join(part.owner_name() for part in self._parts.values())
        return (
            f"{type(self).__name__} of {self._make[0].__name__} on {owners}: {super().__repr__()}"  # type: ignore[attr-defined]
        )

    @property
    def remote_optimizers(self) -> list[RRef[_WorkerOptimizer]]:
        """References to the parts, one per worker that owns parameters."""
        return list(self._parts.values())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group; its parameters may live on workers that had none so far."""
        if param_group not in getattr(self, "_new_groups", ()):
            param_group = self._group(param_group)
            self._distribute([len(self.param_groups)], [param_group])
        number = len(self.param_groups)
        self.param_groups.append({**self._options[number], "params": param_group["params"]})
        self._known.append(param_groups.options(self.param_groups[-1]))

    def step(self, context_id: int | None = None) -> None:  # type: ignore[override]
        """Step on every worker with the gradients of a context, or with those that were accumulated.

        Returns when all have. If some fail, the others have stepped all the same; the error names every failure.
        """
        if context_id is not None:
            if callable(context_id):
                raise UsageError(
                    "a distributed step takes the id of an autograd context, not a closure"
                )
            find_context(context_id)
        self._everywhere("step", context_id, param_groups.changes(self.param_groups, self._known))

    def accumulate(self, context_id: int) -> None:
        """Add the gradients of a context to the `.grad` of the parameters, for a later `step()`."""
        find_context(context_id)
        self._everywhere("accumulate", context_id)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop accumulated gradients. Those of a context end with it and need no zeroing."""
        self._everywhere("zero_grad", set_to_none)

    def clip_grad_norm_(
        self,
        max_norm: float,
        context_id: int | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale all gradients, on all workers, so that their norm taken together is at most `max_norm`.

        Returns what it was, like `torch.nn.utils.clip_grad_norm_`.
        """
        norms = [
            norm
            for part in self._everywhere("norms", context_id, norm_type).values()
            for norm in part
        ]
        total: Tensor = torch.linalg.vector_norm(
            torch.tensor(norms, dtype=torch.float64), norm_type
        ).float()
        if error_if_nonfinite and not bool(total.isfinite()):
            raise UsageError(
                f"the norm of order {norm_type} of the gradients is {total.item()}: it cannot be clipped"
            )
        factor = max_norm / (float(total) + 1e-6)
        if not factor >= 1.0:
            self._everywhere("scale", context_id, factor)
        return total

    def state_dict(self) -> dict[str, Any]:
        """The state of all parts, fetched here, in the form that `optimizer_class` itself would give."""
        state = {
            number: value
            for part in self._everywhere("state").values()
            for number, value in part.items()
        }
        return {
            "state": dict(sorted(state.items())),
            "param_groups": param_groups.packed(self.param_groups),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give every part its share of a state that `state_dict` returned, here or by `optimizer_class` itself."""
        state = param_groups.state_by_number(state_dict, self.param_groups)
        options = {
            number: param_groups.options(group)
            for number, group in enumerate(state_dict["param_groups"])
        }
        self._everywhere("load", state, options)
        for number, group in enumerate(self.param_groups):
            group.update(options[number])
            self._known[number] = param_groups.options(group)

    # Inside

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, RRef) else list(parameters)
        for number, parameter in enumerate(parameters):
            if not isinstance(parameter, RRef):
                raise UsageError(
                    f"parameter {number} is a {type(parameter).__name__}; a DistributedOptimizer takes references "
                    "(RRef) to parameters"
                )
        if not parameters:
            raise UsageError("optimizer got a group without parameters")
        return {**group, "params": parameters}

    def _distribute(self, numbers: Iterable[int], new: list[dict[str, Any]]) -> None:
        """Give the workers that own parameters of new groups their parts of them."""
        shares: dict[str, list[_WorkerParameters]] = {}
        for number, group in zip(numbers, new, strict=True):
            for parameter in group["params"]:
                owned = shares.setdefault(parameter.owner_name(), [])
                if not owned or owned[-1].group != number:
                    owned.append(_WorkerParameters(number, param_groups.options(group), [], []))
                owned[-1].numbers.append(self._count)
                owned[-1].parameters.append(parameter)
                self._count += 1
        made: dict[str, Future[Any]] = {}
        optimizer_class, args, kwargs = self._make
        for owner, owned in shares.items():
            if owner in self._parts:
                for share in owned:
                    self._parts[owner].rpc_sync().add(share)
            else:
                made[owner] = self._agent.start(
                    owner, _make_part, (optimizer_class, owned, args, kwargs)
                )
        self._parts.update(_gather(made))
        self._options: dict[int, Options] = {}
        for defaults, options in self._everywhere("options").values():
            self._defaults: Options = defaults
            self._options.update(options)

    def _everywhere(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of every part at the same time; all results, or all errors."""
        *others, (last, part) = self._parts.items()
        calls = {owner: getattr(each.rpc_async(timeout=0), method)(*args) for owner, each in others}
        calls[last] = _done(
            getattr(part.rpc_sync(timeout=0), method), *args
        )  # a call that is waited for is the fastest
        return _gather(calls)


def _gradients(context_id: int) -> dict[Tensor, Tensor]:
    """What a context holds here; nothing, if its calls never came to this worker."""
    context = _find(context_id)
    return {} if context is None else autograd.get_gradients(context_id)


def _find(context_id: int) -> Context | None:
    try:
        return find_context(context_id)
    except UsageError:
        return None


def _done(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """The outcome of a call that has been made."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    return future


def _gather(calls: dict[str, Future[Any]]) -> dict[str, Any]:
    failures = {
        owner: error
        for owner, error in ((owner, call.exception()) for owner, call in calls.items())
        if error
    }
    if len(failures) == 1:
        raise next(iter(failures.values()))
    if failures:
        raise WorkersFailed.of(failures)
    return {owner: call.wait() for owner, call in calls.items()}
