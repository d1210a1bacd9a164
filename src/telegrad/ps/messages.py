"""The arguments and results of calls between trainers and servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, optim

from telegrad.param_groups import Options
from telegrad.ps.checkpoint_policy import Checkpoint
from telegrad.ps.consistency import Consistency
from telegrad.ps.layout import ServerRange
from telegrad.transport.flat_memory import SegmentHandle
from telegrad.wire.handshake import Incarnation

# The gradients of a server's range: all of them as bytes; compressed, one tensor for each dtype
# range; or, by index, the buckets that the server does not have yet.
Gradients = Tensor | list[Tensor] | dict[int, Tensor]

Steps = dict[str, int]  # a step of each trainer


def make_trainer_id(incarnation: Incarnation, count: int) -> str:
    """Return the id of the `count`-th trainer of a worker, given the worker's incarnation."""
    return f"{incarnation}/{count}"


def worker_of(trainer: str) -> Incarnation:
    """Return the incarnation of the worker of a trainer."""
    return Incarnation(trainer.partition("/")[0])


@dataclass(frozen=True)
class ShardSpec:
    """The configuration that a trainer sends to one server. It is the same for all trainers."""

    name: str
    server_range: ServerRange
    optimizer: Callable[..., optim.Optimizer]
    options: Options
    groups: tuple[Options, ...]
    consistency: Consistency
    trainers: int  # that must have joined before training starts
    checkpoint: Checkpoint | None
    servers: tuple[str, ...]  # that hold a part of the parameters; the first is the leader
    device: str = "cpu"  # of the parameters

    def make_optimizer(self, groups: list[dict[str, Any]]) -> optim.Optimizer:
        """Create the optimizer for parameter groups."""
        return self.optimizer(groups, **self.options)


class SavedVersions(NamedTuple):
    """What a server has of a shard, in memory and in checkpoints."""

    has_shard: bool  # the shard is in memory
    unused: bool  # the shard is in memory and no trainer has used it
    of_this_run: bool  # there is a checkpoint of this run
    versions: list[int]  # of checkpoints that the shard may start with


class PushReply(NamedTuple):
    """The reply to a push: which version the trainer may read now."""

    version: int
    staleness: int = 0  # steps that were made since the version of the pushed gradients
    dropped: bool = False  # the gradients came too late for their round
    values: Tensor | None = None  # the values of the range, if they are not in shared memory
    # the round made no step, because the gradients of some trainer were not finite
    skipped: bool = False
    # the last step of each trainer that this version contains, if trainers have to know it
    applied: Steps | None = None
    problem: str | None = None  # why the steps of this server could not be saved


class JoinReply(NamedTuple):
    """The reply to a trainer that joins."""

    reply: PushReply
    reads_shared_memory: bool  # the server reads the trainer's gradients from shared memory
    memory: SegmentHandle | None  # where the server publishes values
