"""What trainers and servers say to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, optim

from telegrad.ps.consistency import Consistency
from telegrad.ps.flat_memory import SegmentHandle
from telegrad.ps.layout import ServerRange
from telegrad.ps.server.checkpoint import Checkpoint
from telegrad.ps.server.shard_optimizer import Options

# Of a server's range: all as they are; compressed, run by run; by bucket, those that the server does not have yet.
Gradients = Tensor | list[Tensor] | dict[int, Tensor]

Steps = dict[str, int]  # of trainers: the number of a step of each


def trainer_name(incarnation: str, number: int) -> str:
    """What identifies a trainer: a worker may have several, one after the other or at the same time."""
    return f"{incarnation}/{number}"


def worker_of(trainer: str) -> str:
    """The incarnation of the worker that a trainer lives on."""
    return trainer.partition("/")[0]


@dataclass(frozen=True)
class ShardSpec:
    """What trainers tell a server when they come to it. All of them say the same."""

    name: str
    share: ServerRange
    optimizer: Callable[..., optim.Optimizer]
    options: Options
    groups: tuple[Options, ...]
    consistency: Consistency
    trainers: int  # that must have come before anybody starts
    checkpoint: Checkpoint | None
    servers: tuple[str, ...]  # that have a share; the first leads
    device: str = "cpu"  # that the parameters are on

    def make(self, groups: list[dict[str, Any]]) -> optim.Optimizer:
        return self.optimizer(groups, **self.options)


class SavedVersions(NamedTuple):
    """What a server has of a parameter server that a trainer wants to make or join."""

    here: bool  # the shard is in memory
    pristine: bool  # it is, and nobody has used it
    ours: bool  # there is a checkpoint of this run
    versions: list[int]  # that a shard of this run, or of a run that resumes, may begin with


class PushReply(NamedTuple):
    """What a trainer learns: the version it may read now, and by how many others its gradients were overtaken."""

    version: int
    staleness: int = 0
    dropped: bool = False
    values: Tensor | None = None
    # the round made no step, because the gradients of some trainer were not finite
    skipped: bool = False
    # the last step of each trainer in this version, where it may be asked for
    applied: Steps | None = None
    problem: str | None = None  # why steps of this server are not on disk, if they should be


class JoinReply(NamedTuple):
    """What a trainer learns when it enters."""

    answer: PushReply
    shared: bool  # the server reads its gradients where they are
    memory: SegmentHandle | None  # where the values are published
