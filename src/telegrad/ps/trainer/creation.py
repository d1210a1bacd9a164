"""How a trainer that joins finds the shards of a parameter server, or creates them.

The first server decides which trainer creates the shards. Its own shard is created last, so if it
exists, all shards exist. Shards of training that is under way are never created from a model: a
server that was restarted continues from its newest checkpoint, and trainers send it the values
that the checkpoint lacks.
"""

from __future__ import annotations

from collections.abc import Sequence

from telegrad.errors import JoinError, UsageError
from telegrad.ps.backoff import attempts
from telegrad.ps.consistency import Consistency, Sync
from telegrad.ps.messages import SavedVersions
from telegrad.ps.trainer.shard_client import ShardClient


def find_or_create_shards(clients: Sequence[ShardClient], consistency: Consistency) -> None:
    """Make sure that all servers have their shards."""
    leader, *others = clients
    for _ in attempts():
        may_create = leader.claim_creation()
        if may_create is not False:  # False: another trainer is creating the shards
            break
    if may_create:
        _create_shards([*others, leader], consistency)
        return
    for client in others:
        client.recreate()  # does nothing unless the server was restarted


def _create_shards(clients: Sequence[ShardClient], consistency: Consistency) -> None:
    """Create the shards. `clients` are in the order of creation, the leader last."""
    saved = {client.server: client.saved_versions() for client in clients}
    leader = saved[clients[-1].server]
    is_in_use = any(each.has_shard and not each.unused for each in saved.values())
    under_way = leader.of_this_run or is_in_use
    if under_way and _recreate_shards(clients, saved, consistency):
        return
    rule = clients[0].spec.checkpoint
    resumes = under_way or (rule is not None and rule.resume)
    versions = _versions(saved, consistency) if resumes else dict.fromkeys(saved)
    for client in clients:
        client.create(versions[client.server])


def _recreate_shards(
    clients: Sequence[ShardClient], saved: dict[str, SavedVersions], consistency: Consistency
) -> bool:
    """Let servers that were restarted continue.

    Return False if all of them were restarted and have to begin with a common version instead.
    """
    without = [server for server, each in saved.items() if not (each.has_shard or each.of_this_run)]
    if without:
        raise JoinError(
            f"the training is under way, but {', '.join(without)} was restarted without a "
            "readable checkpoint of it. Start the training again under another name"
        )
    rule = clients[0].spec.checkpoint
    exact = rule is not None and rule.exact
    all_restarted = not any(each.has_shard for each in saved.values())
    in_rounds = isinstance(consistency, Sync)
    if in_rounds and not exact and all_restarted and _common_versions(saved):
        return False
    for client in clients:
        client.recreate()
    return True


def _common_versions(saved: dict[str, SavedVersions]) -> set[int]:
    return set.intersection(*(set(each.versions) for each in saved.values()))


def _versions(saved: dict[str, SavedVersions], consistency: Consistency) -> dict[str, int | None]:
    """Return the checkpoint version for each server; None: the parameters of this trainer."""
    if not any(each.versions for each in saved.values()):
        return dict.fromkeys(saved)
    if not isinstance(consistency, Sync):  # each server counts its own steps
        return {server: max(each.versions, default=None) for server, each in saved.items()}
    common = _common_versions(saved)
    if not common:
        found = {server: each.versions for server, each in saved.items()}
        raise UsageError(
            f"the servers have checkpoints of different versions, and none in common: {found}. "
            "Keep more versions (Checkpoint.keep), or remove these to start from the model"
        )
    return dict.fromkeys(saved, max(common))
