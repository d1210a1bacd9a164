"""`Tables`: tables that are trained together, as a trainer sees them.

State: `_definitions`, the tables by name, and `_told`, the rules that servers know of; `_gradients`, what backward
passes have left for each table; `_shown`, whether an `Optimizer` steps the tables; `_pushed`, the answers that a step
under way waits for, and `_acknowledged`, the last step that was answered. Used by one thread at a time, but for
`_gradients`, to which whoever runs a backward pass adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from telegrad.errors import UsageError
from telegrad.futures import Future
from telegrad.ps.consistency import Consistency, Sync, waits_for_quorum
from telegrad.ps.embeddings.messages import RowRequest, RowUpdate, TableDefinition, TablesSpec
from telegrad.ps.embeddings.row_batch import RowBatch
from telegrad.ps.embeddings.row_gradients import RowGradients
from telegrad.ps.embeddings.row_optimizers import RowOptimizer
from telegrad.ps.embeddings.row_storage import TableSpec
from telegrad.ps.embeddings.table_client import TableClient
from telegrad.ps.messages import PushReply, trainer_name
from telegrad.ps.server.checkpoint import Checkpoint
from telegrad.ps.trainer.joining import (
    ServerCall,
    answers,
    closing,
    find_servers,
    join,
    leave,
    leave_all,
    require_runtime,
)
from telegrad.ps.trainer.registration import TrainerNames

if TYPE_CHECKING:
    from telegrad.agent import Agent

_numbers = itertools.count(1)


class Tables:
    """Tables on these servers that are trained together: one call to each server fetches or updates rows of all.

    `servers` are workers: a pattern of names, or names. Trainers that say the same `name` train together, with
    `consistency` as `telegrad.ps.Optimizer` has it; they start when `trainers` have come. `step` sends the gradients
    that backward passes have left; an `Optimizer` of a model that has such tables does it along with its own.
    With `checkpoint`, a server that dies is waited for, `patience` seconds long.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        consistency: Consistency | None = None,
        name: str | None = None,
        trainers: int = 1,
        checkpoint: Checkpoint | None = None,
        patience: float = 300.0,
        agent: Agent | None = None,
        default_name: str = "tables",
    ) -> None:
        self.steps = 0
        self.staleness = 0
        self.dropped = 0
        self._agent = require_runtime(agent)
        self._consistency = consistency or Sync()
        self._patience = patience
        self._definitions: dict[str, TableDefinition] = {}
        self._told: dict[str, RowOptimizer] = {}
        self._gradients: dict[str, RowGradients] = {}
        self._shown = False
        self._pushed: list[ServerCall[PushReply]] = []
        self._acknowledged = 0
        self._member = True
        trainer = trainer_name(self._agent.local_member.incarnation, next(_numbers))
        names = find_servers(self._agent, servers)
        self._name = self._agent.service(TrainerNames).take(
            "tables", name, default_name, waits_for_quorum(self._consistency)
        )
        self.name = self._name.name
        self._attachments = [
            TableClient(
                self._agent,
                trainer,
                server,
                TablesSpec(
                    self.name, number, tuple(names), self._consistency, trainers, checkpoint
                ),
            )
            for number, server in enumerate(names)
        ]
        for each in self._attachments:
            each.step_limit = self._name.step_limit
        try:
            self._join()
        except BaseException:
            self._name.give_back(unused=True)
            raise
        self._name.belongs_to(self, partial(leave_all, self._attachments))
        self._agent.on_shutdown(closing(self))

    def __repr__(self) -> str:
        servers = ", ".join(each.server for each in self._attachments)
        return (
            f"<ps.Tables {self.name!r}: {len(self._definitions)} on {servers}, {self._consistency}: "
            f"{self.steps} steps, staleness {self.staleness}, {self.dropped} dropped>"
        )

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._definitions)

    def __bool__(self) -> bool:
        return True

    @property
    def servers(self) -> int:
        """How many there are."""
        return len(self._attachments)

    @property
    def version(self) -> int:
        """How many steps the servers had made when they last answered."""
        return min(each.version for each in self._attachments)

    def close(self) -> None:
        """Leave: the other trainers no longer wait for this one. Rows can still be read."""
        if self._member:
            leave(self._agent, self._attachments)
            self._name.give_back()
        self._member = False

    # What tables need

    def define(self, shape: TableSpec, rule: RowOptimizer) -> RowGradients:
        """Have a table; its gradients belong into what is returned."""
        if shape.name in self._definitions:
            raise UsageError(
                f"there is a table {shape.name!r} in {self.name!r} already; give each another name"
            )
        definition = TableDefinition(shape, rule)
        self._everywhere([partial(each.define, [definition]) for each in self._attachments])
        self._definitions[shape.name] = definition
        self._told[shape.name] = rule
        gradients = self._gradients[shape.name] = RowGradients(self.servers)
        gradients.shown = self._shown
        self._rest()
        return gradients

    def change(self, table: str, rule: RowOptimizer) -> None:
        """Train a table with other numbers from the next step on."""
        shape, before = self._definitions[table]
        if rule.keeps(shape.dim).keys() != before.keeps(shape.dim).keys():
            raise UsageError(
                f"table {table!r} is trained with {before}, which cannot become {rule}"
            )
        self._definitions[table] = TableDefinition(shape, rule)

    def fetch(self, wanted: Sequence[tuple[str, RowBatch]], keep: bool) -> list[Tensor]:
        """The rows of batches; `keep`: they are to be trained. One call to each server that has some of them."""
        by_server: list[list[RowRequest]] = [[] for _ in self._attachments]
        for table, batch in wanted:
            for requests, ids in zip(by_server, batch.split(batch.ids), strict=True):
                if len(ids):
                    requests.append(RowRequest(table, ids))
        asked = [each for each in zip(self._attachments, by_server, strict=True) if each[1]]
        calls = [
            self._started(each, partial(each.pull, requests, keep)) for each, requests in asked
        ]
        answered = zip(asked, answers(self._agent, calls), strict=True)
        rows = {each.server: iter(each.pulled(answer)) for (each, _), answer in answered}
        servers = [each.server for each in self._attachments]
        return [
            _together(
                [
                    next(rows[server])
                    for server, count in zip(servers, batch.counts, strict=True)
                    if count
                ],
                self._definitions[table].shape,
            )
            for table, batch in wanted
        ]

    def put(self, table: str, batch: RowBatch, values: Tensor) -> None:
        parts = zip(self._attachments, batch.split(batch.ids), batch.split(values), strict=True)
        self._everywhere([partial(each.put, table, ids, lines) for each, ids, lines in parts])

    def parts(self, table: str, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows of a table that were ever trained, `count` at a time."""
        for each in self._attachments:
            start = 0
            while True:
                ids, rows = each.part(table, start, count)
                if not len(ids):
                    break
                yield ids, rows
                start += len(ids)

    # Steps

    def show_gradients(self, shown: bool) -> None:
        """Let the parameters of tables have gradients: an `Optimizer` steps these tables, or no longer does."""
        self._shown = shown
        self._name.quorum = not shown and waits_for_quorum(self._consistency)
        for gradients in self._gradients.values():
            gradients.shown = shown

    def zero_grad(self) -> None:
        """Forget gradients that have not been sent."""
        for gradients in self._gradients.values():
            gradients.clear()

    def step(self) -> None:
        """Send the gradients, and wait as the consistency rule says."""
        self.begin_step()
        self.finish_step()

    def begin_step(self, skip: bool = False) -> None:
        """Send the gradients. `skip` says that they are not finite: the round makes no step then."""
        if not self._member:
            raise UsageError(f"tables {self.name!r} are closed")
        updates: list[list[RowUpdate]] = [[] for _ in self._attachments]
        for table, gradients in self._gradients.items():
            if gradients and not skip:
                batch, gradient = gradients.sum()
                rule = self._news(table)
                for mine, ids, lines in zip(
                    updates, batch.split(batch.ids), batch.split(gradient), strict=True
                ):
                    mine.append(RowUpdate(table, ids, lines, rule))
            # otherwise they stay until `zero_grad`, as those of other parameters do
            if not self._shown:
                gradients.clear()
        self.steps += 1
        self._pushed = [
            self._started(
                each,
                partial(each.push, self.steps, version, None if skip else mine),
                self._stay(each, self.steps),
            )
            for each, version, mine in zip(
                self._attachments, self._versions(), updates, strict=True
            )
        ]

    def finish_step(self) -> None:
        """Wait for the answers."""
        pushed, self._pushed = self._pushed, []
        with self._name.explained():
            answered = answers(self._agent, pushed)
        for each, answer in zip(self._attachments, answered, strict=True):
            each.pushed(answer)
        self._acknowledged = self.steps
        self._rest()
        self.staleness = max(answer.staleness for answer in answered)
        self.dropped += any(answer.dropped for answer in answered)

    # Inside

    def _rest(self) -> None:
        """Let servers that are restarted between steps find this trainer."""
        if not self._pushed:
            for each in self._attachments:
                each.rest(list(self._definitions.values()), self._acknowledged)

    def _news(self, table: str) -> RowOptimizer | None:
        """The rule of a table, if servers do not know it; they do from now on."""
        rule = self._definitions[table].rule
        if rule == self._told[table]:
            return None
        self._told[table] = rule
        return rule

    def _join(self) -> None:
        patience = None if self._attachments[0].plan.checkpoint is None else self._patience
        try:
            join(self._agent, f"tables {self.name!r}", self._attachments, lambda: None, patience)
            self._rest()
        except BaseException:
            self._member = False
            raise

    def _versions(self) -> list[int]:
        """What the gradients were computed with. Rounds are the same on all servers; the oldest rows count."""
        if not isinstance(self._consistency, Sync):
            return [each.version for each in self._attachments]
        fetched = [each.version for each in self._attachments if each.current]
        return [min(fetched, default=self.version)] * self.servers

    def _started(
        self,
        attachment: TableClient,
        call: Callable[[], Future[Any]],
        stay: Callable[[Any], None] | None = None,
    ) -> ServerCall[Any]:
        """Make a call, and say what to do if the server is lost, which may come back."""
        tables = list(self._definitions.values())
        acknowledged, patience = self._acknowledged, self._patience

        def again(error: Exception) -> Future[Any]:
            if not self._member:
                raise error
            return attachment.again(call, tables, acknowledged, patience, error)

        return ServerCall(call(), again, stay or _need_not_stay)

    def _stay(self, attachment: TableClient, step: int) -> Callable[[PushReply], None]:
        return partial(attachment.stay, list(self._definitions.values()), step)

    def _everywhere(self, calls: Sequence[Callable[[], Future[Any]]]) -> list[Any]:
        """Make a call to each server."""
        return answers(
            self._agent,
            [
                self._started(each, call)
                for each, call in zip(self._attachments, calls, strict=True)
            ],
        )


def _need_not_stay(_: Any) -> None:
    """Nobody waits for others in this call."""


def _together(parts: list[Tensor], shape: TableSpec) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(0, shape.dim, dtype=shape.dtype)
