"""`Optimizer`: a parameter server, as a trainer sees it.

The model stays an ordinary model: see `flat` for where parameters and gradients are. What the optimizer cannot follow
is an error in the next step: parameters of another type or shape, frozen ones that get gradients, and parameters that
the model has and the optimizer does not know.

A step that a `GradScaler` finds infinite gradients in is made all the same, as a report that says so
(`_step_supports_amp_scaling`): the servers skip the round of which it is a part, so all trainers skip it together.

State: `param_groups` are the trainer's own, and what changed in them travels with the next push; `_known` is what the
servers have been told. `_attachments`, one per server, hold the rest. Used by one thread at a time.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim

from telegrad import param_groups
from telegrad.errors import UsageError
from telegrad.futures import Future, wait_all
from telegrad.ps import compression as compressing
from telegrad.ps.consistency import Consistency, Sync, waits_for_quorum
from telegrad.ps.embeddings.row_gradients import RowsParameter
from telegrad.ps.embeddings.tables import Tables
from telegrad.ps.layout import ParameterLayout
from telegrad.ps.messages import PushReply, ShardSpec, trainer_name
from telegrad.ps.server import service
from telegrad.ps.server.checkpoint import Checkpoint
from telegrad.ps.server.shard_optimizer import Options, State, works_by_element
from telegrad.ps.trainer.creation import find_or_create_shards
from telegrad.ps.trainer.flat_parameters import FlatParameters, check_kind
from telegrad.ps.trainer.joining import (
    LOSS_ERRORS,
    ServerCall,
    answers,
    closing,
    find_servers,
    join,
    leave,
    leave_all,
    require_runtime,
)
from telegrad.ps.trainer.model_structure import ModelStructure
from telegrad.ps.trainer.registration import TrainerNames
from telegrad.ps.trainer.shard_client import PushRequest, ShardClient

if TYPE_CHECKING:
    from telegrad.agent import Agent

_numbers = itertools.count(1)


class Optimizer(optim.Optimizer):
    """`optimizer(model.parameters(), **options)`, run by parameter servers for all trainers together.

    `servers` are workers: a pattern of names, or names. `model` is a module, or what `torch.optim` takes. Trainers that
    say the same `name` train together: the first brings the parameters, the others get them. Without a name, the n-th
    optimizer that a worker makes trains with the n-th of the others. With `trainers`, they
    start when so many have come. `step` reports the gradients, waits as `consistency` says, and leaves fresh
    parameters in the model. `close` lets the others go on without this trainer, and so does the end of its agent.
    With `checkpoint`, a server that dies is waited for, `patience` seconds long. Gradients that travel by calls, to
    other hosts, can be made smaller (`compression`, such as `torch.bfloat16`), and unless `overlap` is off they leave
    while backward is under way. Parameters that require no gradient are left out unless `include_frozen` is set, for
    models that are unfrozen later. Embeddings of the model whose rows live on servers (`telegrad.ps.Embedding`) step
    and are closed along.

    >>> from telegrad.testing import LocalCluster
    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> with LocalCluster(2) as cluster:
    ...     with Optimizer(model, servers="w1", optimizer=torch.optim.SGD, lr=0.5, agent=cluster["w0"]) as optimizer:
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
        compressing.check(compression)
        if optimizer is torch.optim.SparseAdam:
            raise UsageError(
                "SparseAdam steps on sparse gradients, and parameter servers have dense ones: use torch.optim.Adam, "
                "or keep the rows on servers by telegrad.ps.Embedding with RowAdam"
            )
        template = optimizer(
            model.parameters() if isinstance(model, nn.Module) else model, **options
        )
        self._agent = runtime
        self._attachments: list[ShardClient] = []
        self._tables: list[Tables] = []
        super().__init__(template.param_groups, template.defaults)
        self.steps = 0
        self.staleness = 0
        self.dropped = 0
        self.skipped = 0
        self._kind = optimizer
        self._known = [param_groups.options(group) for group in self.param_groups]
        self._consistency = consistency or Sync()
        learning = _learning(model, self.param_groups, include_frozen)
        for _, parameter_name, parameter in itertools.chain.from_iterable(learning):
            check_kind(parameter_name, parameter)
        self._layout = ParameterLayout.of(learning)
        if not self._layout.slots:
            raise UsageError("none of the parameters requires a gradient")
        # servers may step, and publish, while this trainer computes
        compares = self._consistency != Sync()
        shares_memory = service.shares_memory(runtime)
        self._flat = FlatParameters(self._layout, self._parameters, shares_memory, compares)
        self._structure = (
            ModelStructure(model, self._parameters) if isinstance(model, nn.Module) else None
        )
        known = {slot.number for slot in self._layout.slots}
        self._frozen = [
            each
            for number, each in enumerate(self._parameters)
            if number not in known and not isinstance(each, RowsParameter)
        ]
        self._trainer = trainer_name(runtime.local_member.incarnation, next(_numbers))
        self._patience = patience
        self._compression = compression
        # elsewhere, to look would be to wait
        self._overlap = overlap and self._flat.device.type == "cpu"
        workers = find_servers(runtime, servers)
        self._name = runtime.service(TrainerNames).take(
            "parameter server", name, "default", waits_for_quorum(self._consistency)
        )
        self.name = self._name.name
        try:
            self._attachments = self._plan(workers, options, trainers, checkpoint)
            self._tables = _tables_of(self._parameters)
            self._join()
        except BaseException:
            self._name.give_back(unused=True)
            raise
        self._name.belongs_to(self, partial(leave_all, self._attachments))
        for tables in self._tables:
            tables.show_gradients(True)
        runtime.on_shutdown(closing(self))

    def __repr__(self) -> str:
        servers = ", ".join(each.server for each in self._attachments)
        kind = getattr(self._kind, "__name__", repr(self._kind))
        return (
            f"<ps.Optimizer {self.name!r} of {kind} on {servers}, {self._consistency}: "
            f"{self.steps} steps, staleness {self.staleness}, {self.dropped} dropped>"
        )

    def __enter__(self) -> Optimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> int:
        """How many steps the servers had made when they last answered."""
        return min(each.version for each in self._attachments)

    def close(self) -> None:
        """Leave: the other trainers no longer wait for this one. The model keeps its parameters."""
        attachments, self._attachments = self._attachments, []
        if attachments:
            leave(self._agent, attachments)
            self._flat.release()
            self._name.give_back()
        for tables in self._tables:
            tables.show_gradients(False)
            tables.close()

    # What torch.optim.Optimizer does

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a `GradScaler` calls `step` also if gradients are not finite, and says so by `found_inf`.

        It alone is told. Frameworks that read this would conclude that gradients cannot be clipped, but they can:
        `GradScaler.unscale_` works as with any optimizer.
        """
        return sys._getframe(1).f_globals.get("__name__") == torch.amp.GradScaler.__module__

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Report the gradients, wait, and take the fresh parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._attachments:
            raise UsageError(f"the optimizer of parameter server {self.name!r} is closed")
        self._check_model()
        skip = self._unscale()
        if not skip:
            self._flat.collect()
        self.steps += 1
        for tables in self._tables:
            tables.begin_step(skip)
        with self._name.explained():
            answered = self._push(skip)
        self._take(answered)
        for tables in self._tables:
            tables.finish_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for tables in self._tables:
            tables.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._attachments:
            raise UsageError(
                "the parameters of a parameter server are fixed; make a new Optimizer under another name"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state that servers hold, fetched here, in the form that the optimizer itself would give."""
        state: dict[int, State] = {}
        for attachment, parts in zip(
            self._attachments, self._everywhere(ShardClient.state), strict=True
        ):
            for part, values in zip(attachment.plan.share.parts, parts, strict=True):
                if values:
                    self._put(
                        state.setdefault(part.slot.number, {}), part.slot.number, part.first, values
                    )
        return {
            "state": dict(sorted(state.items())),
            "param_groups": param_groups.packed(self.param_groups),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give every server its share of a state that `state_dict` returned, here or of the optimizer itself."""
        state = param_groups.state_by_number(state_dict, self.param_groups)
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(param_groups.options(loaded))
        changes = param_groups.changes(self.param_groups, self._known)
        self._everywhere(lambda each: each.load(state, changes))

    # Inside

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _plan(
        self, servers: list[str], options: Options, trainers: int, checkpoint: Checkpoint | None
    ) -> list[ShardClient]:
        shares = self._layout.divide(len(servers), whole=not works_by_element(self._kind))
        known, device = tuple(self._known), str(self._flat.device)
        used = [
            (server, share) for server, share in zip(servers, shares, strict=True) if share.nbytes
        ]
        names = tuple(server for server, _ in used)
        rest = (self._kind, options, known, self._consistency, trainers, checkpoint, names, device)
        return [
            ShardClient(
                self._agent,
                self._trainer,
                server,
                ShardSpec(self.name, share, *rest),
                self._flat,
                self._compression,
                self._overlap,
            )
            for server, share in used
        ]

    def _join(self) -> None:
        patience = None if self._attachments[0].plan.checkpoint is None else self._patience
        for each in self._attachments:
            each.patience = self._patience
            each.step_limit = self._name.step_limit
        prepare = partial(find_or_create_shards, self._attachments, self._consistency)
        try:
            join(
                self._agent, f"parameter server {self.name!r}", self._attachments, prepare, patience
            )
        except BaseException:
            self.close()
            raise
        self._flat.note()

    def _check_model(self) -> None:
        """Raise an error if the model has parameters that would silently not be trained."""
        if self._structure is not None:
            self._structure.check()
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise UsageError(
                    "a parameter that required no gradient when the ps.Optimizer was made has one now, but the "
                    "servers do not hold it: make the optimizer with include_frozen=True, or after unfreezing"
                )

    def _unscale(self) -> bool:
        """Divide gradients as a `GradScaler` asks for. Return whether they are not finite."""
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
        """Push to all servers at once. Where there is only one, by a call that is waited for, which is the fastest."""
        changes = param_groups.changes(self.param_groups, self._known)
        written = frozenset(self._flat.written())
        pushes = [
            (each, PushRequest(self.steps, self._version_of(each), changes, skip, written))
            for each in self._attachments
        ]
        if len(pushes) == 1:
            ((only, pushed),) = pushes
            try:
                return [only.push(pushed)]
            except LOSS_ERRORS as error:
                return [self._again(only, pushed)(error).wait()]
        calls = [
            ServerCall(
                each.start_push(pushed), self._again(each, pushed), partial(each.stay, self.steps)
            )
            for each, pushed in pushes
        ]
        return answers(self._agent, calls)

    def _version_of(self, attachment: ShardClient) -> int:
        """What the gradients were computed with. Rounds are the same on all servers."""
        return self.version if isinstance(self._consistency, Sync) else attachment.version

    def _again(
        self, attachment: ShardClient, pushed: PushRequest
    ) -> Callable[[Exception], Future[PushReply]]:
        """Wait for a server that was lost, which may come back."""

        def again(error: Exception) -> Future[PushReply]:
            everything = pushed._replace(changes=dict(enumerate(self._known)))
            return attachment.push_again(everything, error)

        return again

    def _take(self, answered: list[PushReply]) -> None:
        for attachment, answer in zip(self._attachments, answered, strict=True):
            attachment.take(answer)
        self._flat.note()
        self.staleness = max(answer.staleness for answer in answered)
        self.dropped += any(answer.dropped for answer in answered)
        self.skipped += any(answer.skipped for answer in answered)

    def _put(self, state: State, number: int, first: int, values: State) -> None:
        """Put the state of some elements of a parameter where it belongs."""
        shape = self._parameters[number].shape
        for key, value in values.items():
            flat = works_by_element(self._kind) and torch.is_tensor(value) and value.dim() == 1
            if not flat:
                state[key] = value
                continue
            device = self._parameters[number].device
            whole = state.setdefault(key, torch.empty(shape, dtype=value.dtype, device=device))
            whole.view(-1)[first : first + value.numel()].copy_(value)

    def _everywhere(self, start: Callable[[ShardClient], Future[Any]]) -> list[Any]:
        return wait_all([start(each) for each in self._attachments])


def _tables_of(parameters: Iterable[Tensor]) -> list[Tables]:
    """What holds the tables that these parameters stand for, each once."""
    found = [each.tables for each in parameters if isinstance(each, RowsParameter)]
    return list({id(tables): tables for tables in found}.values())


def _learning(
    model: Any, groups: list[dict[str, Any]], include_frozen: bool
) -> list[list[tuple[int, str, Tensor]]]:
    """The parameters of each group that servers hold: their numbers, and their names in the model if there is one."""
    names = (
        {id(each): name for name, each in model.named_parameters()}
        if isinstance(model, nn.Module)
        else {}
    )
    number = itertools.count()
    numbered = [[(next(number), each) for each in group["params"]] for group in groups]
    return [
        [
            (place, names.get(id(each), str(place)), each)
            for place, each in group
            if (each.requires_grad or include_frozen) and not isinstance(each, RowsParameter)
        ]
        for group in numbered
    ]
