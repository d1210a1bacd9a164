"""`Optimizer`: a `torch.optim.Optimizer` whose steps are made by parameter servers.

The model stays an ordinary model: see `flat_parameters` for how parameters and gradients are
exchanged. A change of the model that the optimizer cannot follow raises an error in the next step:
parameters of another dtype or shape, frozen parameters that get gradients, and new parameters.

If a `GradScaler` finds infinite gradients, the step is still sent, with a flag
(`_step_supports_amp_scaling`). The servers then skip the round, so all trainers skip it together.

State: `param_groups` belong to the trainer, and their changes are sent with the next push;
`_sent_options` are the options that the servers know; `_clients`, the clients, one for each
server, hold the rest. Used by one thread at a time.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim

from telegrad import param_groups, plurals
from telegrad.errors import ArgumentTypeError, CallTimeout, UsageError
from telegrad.futures import Future, wait_all
from telegrad.param_groups import Options
from telegrad.ps import compression as gradient_compression
from telegrad.ps.checkpoint_policy import Checkpoint
from telegrad.ps.consistency import Consistency, Sync, waits_for_quorum
from telegrad.ps.embeddings.row_gradients import RowsParameter
from telegrad.ps.embeddings.tables import Tables
from telegrad.ps.layout import ParameterLayout
from telegrad.ps.messages import PushReply, ShardSpec, make_trainer_id
from telegrad.ps.optimizer_types import State, works_by_element
from telegrad.ps.trainer.creation import find_or_create_shards
from telegrad.ps.trainer.flat_parameters import FlatParameters, check_kind
from telegrad.ps.trainer.joining import (
    check_rules,
    close_on_shutdown,
    find_servers,
    join,
    leave,
    require_runtime,
    start_leaving,
)
from telegrad.ps.trainer.model_structure import ModelStructure, trained_parameters
from telegrad.ps.trainer.server_calls import ServerCall, gather_replies
from telegrad.ps.trainer.server_client import LOSS_ERRORS
from telegrad.ps.trainer.shard_client import PushRequest, ShardClient
from telegrad.ps.trainer.trainer_registry import TrainerRegistry
from telegrad.timeouts import duration
from telegrad.transport import flat_memory

if TYPE_CHECKING:
    from telegrad.agent import Agent

_trainer_counter = itertools.count(1)
_REPORT_INTERVAL = 0.25  # seconds between two reports of the progress


class Optimizer(optim.Optimizer):
    """`optimizer(model.parameters(), **options)`, run by parameter servers for all trainers.

    `servers` are workers: a pattern of names, or a list of names. `model` is a module, or anything
    that `torch.optim` takes. `step` sends the gradients, waits as `consistency` requires, and
    writes the new values into the model. `close` leaves the other trainers, and so does the
    shutdown of the agent.

    Trainers that pass the same `name` train together: the first one provides the initial
    parameters, the others receive them. Without a name, the n-th optimizer of a worker trains with
    the n-th optimizer of every other worker. They start when `trainers` of them have joined.

    With `checkpoint`, a trainer waits up to `patience` seconds for a server that is restarted.
    Gradients that are sent to other hosts can be compressed (`compression`, such as
    `torch.bfloat16`). With `overlap`, they are sent while backward is running. Parameters that
    require no gradient are left out unless `include_frozen` is set, for models that are unfrozen
    later. Embeddings of the model whose rows are on servers (`telegrad.ps.Embedding`) are stepped
    and closed together with the optimizer.

    >>> from telegrad.testing import LocalCluster
    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> with LocalCluster(2) as cluster:
    ...     options = dict(optimizer=torch.optim.SGD, lr=0.5, agent=cluster["w0"])
    ...     with Optimizer(model, servers="w1", **options) as optimizer:
    ...         model(torch.ones(1, 2)).sum().backward()
    ...         optimizer.step()
    >>> model.weight.tolist()
    [[0.5, 0.5]]
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        servers: str | Sequence[str],
        optimizer: Callable[..., optim.Optimizer] = torch.optim.SGD,
        *,
        consistency: Consistency | None = None,
        name: str | None = None,
        trainers: int = 1,
        checkpoint: Checkpoint | None = None,
        compression: torch.dtype | None = None,
        overlap: bool = True,
        include_frozen: bool = False,
        patience: float = 300.0,
        agent: Agent | None = None,
        **options: Any,
    ) -> None:
        runtime = require_runtime(agent)
        patience = duration(patience, "patience")
        gradient_compression.check(compression)
        consistency = Sync() if consistency is None else consistency
        check_rules(consistency, trainers, checkpoint)
        if isinstance(optimizer, optim.Optimizer) or not callable(optimizer):
            raise ArgumentTypeError(
                f"optimizer is a class, such as torch.optim.Adam, not {optimizer!r}"
            )
        if optimizer is torch.optim.SparseAdam:
            raise UsageError(
                "SparseAdam needs sparse gradients, and parameter servers have dense ones: use "
                "torch.optim.Adam, or keep the rows on servers with telegrad.ps.Embedding and "
                "RowAdam"
            )
        # creates the parameter groups and checks the options as torch does
        template = optimizer(
            model.parameters() if isinstance(model, nn.Module) else model, **options
        )
        self._runtime = runtime
        self._clients: list[ShardClient] = []
        self._tables: list[Tables] = []
        super().__init__(template.param_groups, template.defaults)
        self.state: param_groups.RemoteState = param_groups.RemoteState()
        self._known_ids = self._grouped_ids()
        self.steps: int = 0
        self.staleness: int = 0
        self.dropped: int = 0
        self.skipped: int = 0
        self._reported_step = 0
        self._next_report = 0.0  # of `time.monotonic`
        self._optimizer_class = optimizer
        self._sent_options = [param_groups.group_options(group) for group in self.param_groups]
        self._consistency = consistency
        trained = trained_parameters(model, self.param_groups, include_frozen)
        for _, parameter_name, parameter in itertools.chain.from_iterable(trained):
            check_kind(parameter_name, parameter)
        self._layout = ParameterLayout.of(trained)
        if not self._layout.slots:
            raise UsageError(
                "none of the parameters requires a gradient: unfreeze some, or pass "
                "include_frozen=True"
            )
        # without rounds of all trainers, servers publish new values while this trainer computes
        keeps_copy = self._consistency != Sync()
        shares_memory = flat_memory.may_share(runtime.config)
        self._flat = FlatParameters(self._layout, self._parameters, shares_memory, keeps_copy)
        self._structure = (
            ModelStructure(model, self._parameters) if isinstance(model, nn.Module) else None
        )
        trained_indices = {slot.index for slot in self._layout.slots}
        self._frozen = [
            parameter
            for index, parameter in enumerate(self._parameters)
            if index not in trained_indices and not isinstance(parameter, RowsParameter)
        ]
        self._trainer = make_trainer_id(runtime.local_member.incarnation, next(_trainer_counter))
        self._compression = compression
        # on other devices, reading a gradient would wait for the device
        self._overlap = overlap and self._flat.device.type == "cpu"
        workers = find_servers(runtime, servers)
        self._registration = runtime.service(TrainerRegistry).register(
            "parameter server", name, "default", waits_for_quorum(self._consistency)
        )
        self.name: str = self._registration.name
        try:
            self._clients = self._make_clients(workers, options, trainers, checkpoint, patience)
            self._tables = _tables_of(self._parameters)
            self._join(None if checkpoint is None else patience)
        except BaseException:
            self._registration.release(unused=True)
            raise
        self._registration.leave_when_collected(self, partial(start_leaving, self._clients))
        for tables in self._tables:
            tables.show_gradients(True)
        close_on_shutdown(runtime, self)

    def __repr__(self) -> str:
        servers = ", ".join(client.server for client in self._clients)
        name = getattr(self._optimizer_class, "__name__", repr(self._optimizer_class))
        return (
            f"<ps.Optimizer {self.name!r} of {name} on {servers}, {self._consistency}: "
            f"{plurals.count(self.steps, 'step')}, staleness {self.staleness}, "
            f"{self.dropped} dropped>"
        )

    def __enter__(self) -> Optimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> int:
        """The number of steps that the servers had made when they last replied."""
        return min(client.version for client in self._clients)

    def close(self) -> None:
        """Leave, so that other trainers no longer wait for this one. The model stays as it is."""
        if self._clients:
            if self.steps > self._reported_step:
                self._report()
            clients, self._clients = self._clients, []
            leave(self._runtime, clients)
            self._flat.release()
            self._registration.release()
        for tables in self._tables:
            tables.show_gradients(False)
            tables.close()

    # The interface of torch.optim.Optimizer

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a `GradScaler` calls `step` even if gradients are not finite.

        True only for calls from `GradScaler`. Frameworks that read this attribute would conclude
        that gradients cannot be clipped, but they can: `GradScaler.unscale_` works as with any
        optimizer.
        """
        return sys._getframe(1).f_globals.get("__name__") == torch.amp.GradScaler.__module__

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Send the gradients, wait, and write the new values into the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._clients:
            raise UsageError(
                f"the optimizer of parameter server {self.name!r} is closed; create a new one"
            )
        self._check_model()
        skip = self._unscale()
        if not skip:
            self._flat.collect_gradients()
        self.steps += 1
        for tables in self._tables:
            tables.begin_step(skip)
        try:
            replies = self._push(skip)
        except CallTimeout as error:
            self._registration.explain_timeout(error)
            raise
        self._apply_replies(replies)
        for tables in self._tables:
            tables.finish_step()
        if time.monotonic() >= self._next_report:
            self._report()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for tables in self._tables:
            tables.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._clients:
            raise UsageError(
                "the parameters of a parameter server are fixed; create a new Optimizer under "
                "another name"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Fetch the state from the servers, in the format of the optimizer that they run."""
        state: dict[int, State] = {}
        server_states = self._call_all(ShardClient.state)
        for client, parts_state in zip(self._clients, server_states, strict=True):
            for part, values in zip(client.spec.server_range.parts, parts_state, strict=True):
                if values:
                    index = part.slot.index
                    self._write_state(state.setdefault(index, {}), index, part.first, values)
        return {
            "state": dict(sorted(state.items())),
            "param_groups": param_groups.to_state_dict(self.param_groups),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Send every server its part of a `state_dict` of this or the underlying optimizer."""
        state = param_groups.state_by_index(state_dict, self.param_groups)
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(param_groups.group_options(loaded))
        changes = param_groups.take_changes(self.param_groups, self._sent_options)
        self._call_all(lambda client: client.load(state, changes))

    # Internal

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _make_clients(
        self,
        servers: list[str],
        options: Options,
        trainers: int,
        checkpoint: Checkpoint | None,
        patience: float,
    ) -> list[ShardClient]:
        """Divide the parameters among the servers. Return a client for each that gets some."""
        whole = not works_by_element(self._optimizer_class)
        ranges = self._layout.divide(len(servers), whole)
        used = [
            (server, server_range)
            for server, server_range in zip(servers, ranges, strict=True)
            if server_range.nbytes
        ]
        clients = []
        for server, server_range in used:
            spec = ShardSpec(
                self.name,
                server_range,
                self._optimizer_class,
                options,
                groups=tuple(self._sent_options),
                consistency=self._consistency,
                trainers=trainers,
                checkpoint=checkpoint,
                servers=tuple(server for server, _ in used),
                device=str(self._flat.device),
            )
            client = ShardClient(
                self._runtime,
                self._trainer,
                server,
                spec,
                self._flat,
                self._registration,
                self._compression,
                self._overlap,
                patience,
            )
            clients.append(client)
        return clients

    def _join(self, patience: float | None) -> None:
        clients = self._clients
        prepare = partial(find_or_create_shards, clients, self._consistency)
        try:
            join(self._runtime, f"parameter server {self.name!r}", clients, prepare, patience)
        except BaseException:
            self.close()
            raise
        self._flat.mark_current()

    def _check_model(self) -> None:
        """Raise `UsageError` if the model or a group has parameters that would not be trained."""
        if self._grouped_ids() != self._known_ids:
            raise UsageError(
                "the parameters in `param_groups` have changed, but those of a parameter server "
                "are fixed; create a new ps.Optimizer under another name"
            )
        if self._structure is not None:
            self._structure.check()
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise UsageError(
                    "a parameter that required no gradient when the ps.Optimizer was created has "
                    "one now, but the servers do not hold it: create the optimizer with "
                    "include_frozen=True, or after unfreezing"
                )

    def _grouped_ids(self) -> list[int]:
        return [id(each) for group in self.param_groups for each in group["params"]]

    def _unscale(self) -> bool:
        """Unscale gradients if a `GradScaler` asks for it. Return whether some are not finite."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return True
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            factor = scale.double().reciprocal().float()
            gradients = [each.grad for each in self._parameters if each.grad is not None]
            for gradient in gradients:
                gradient.detach().mul_(factor.to(gradient.device))
        return False

    def _push(self, skip: bool) -> list[PushReply]:
        """Push to all servers at once, and return their replies."""
        changes = param_groups.take_changes(self.param_groups, self._sent_options)
        written = frozenset(self._flat.find_written())
        pushes = [
            (client, PushRequest(self.steps, self._version_of(client), changes, skip, written))
            for client in self._clients
        ]
        if len(pushes) == 1:  # a synchronous call is the fastest
            ((client, request),) = pushes
            try:
                return [client.push(request)]
            except LOSS_ERRORS as error:
                return [self._retry_push(client, request, error).wait()]
        calls = [
            ServerCall(
                client.start_push(request),
                partial(self._retry_push, client, request),
                partial(client.ensure_member, self.steps),
            )
            for client, request in pushes
        ]
        return gather_replies(self._runtime, calls)

    def _version_of(self, client: ShardClient) -> int:
        """Return the version that the gradients were computed with.

        With rounds, versions are the same on all servers.
        """
        return self.version if isinstance(self._consistency, Sync) else client.version

    def _retry_push(
        self, client: ShardClient, request: PushRequest, error: Exception
    ) -> Future[PushReply]:
        """Wait for a lost server and push again, with all options: it may have lost them."""
        all_options = dict(enumerate(self._sent_options))
        return client.retry_push(request._replace(changes=all_options), error)

    def _apply_replies(self, replies: list[PushReply]) -> None:
        for client, reply in zip(self._clients, replies, strict=True):
            client.apply_reply(reply)
        self._flat.mark_current()
        self.staleness = max(reply.staleness for reply in replies)
        self.dropped += any(reply.dropped for reply in replies)
        self.skipped += any(reply.skipped for reply in replies)

    def _report(self) -> None:
        """Report how far this trainer is, as `telegrad.report` does."""
        prefix = "" if self.name == "default" else f"{self.name}/"
        values = {f"{prefix}version": self.version, f"{prefix}staleness": self.staleness}
        self._runtime.scalars.add(values, self.steps)
        self._reported_step = self.steps
        self._next_report = time.monotonic() + _REPORT_INTERVAL

    def _write_state(self, state: State, index: int, first: int, values: State) -> None:
        """Write the state of some elements of a parameter, from `first` on, into its state."""
        parameter = self._parameters[index]
        by_element = works_by_element(self._optimizer_class)
        for key, value in values.items():
            is_flat = by_element and torch.is_tensor(value) and value.dim() == 1
            if not is_flat:
                state[key] = value
                continue
            if key not in state:
                state[key] = torch.empty(
                    parameter.shape, dtype=value.dtype, device=parameter.device
                )
            state[key].view(-1)[first : first + value.numel()].copy_(value)

    def _call_all(self, start: Callable[[ShardClient], Future[Any]]) -> list[Any]:
        return wait_all([start(client) for client in self._clients])


def _tables_of(parameters: Iterable[Tensor]) -> list[Tables]:
    """Return the tables that these parameters stand for, each once."""
    found = [each.tables for each in parameters if isinstance(each, RowsParameter)]
    return list({id(tables): tables for tables in found}.values())
