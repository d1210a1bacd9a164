"""How a trainer that joins finds the shards of a parameter server, or makes them.

The first server decides which trainer makes the shards; it makes those of all others before that one's. So whoever
finds a shard on the first server finds one on all. Shards of a run that is under way are never made anew: a server that
was restarted goes on from its own newest checkpoint, and what that lacks is brought back by trainers.
"""

from __future__ import annotations

from collections.abc import Sequence

from telegrad.errors import JoinError, UsageError
from telegrad.ps.consistency import Consistency, Sync
from telegrad.ps.messages import SavedVersions
from telegrad.ps.trainer.joining import pauses
from telegrad.ps.trainer.shard_client import ShardClient


def find_or_create_shards(servers: Sequence[ShardClient], consistency: Consistency) -> None:
    """Make sure that all servers have their shards."""
    lead, *others = servers
    for _ in pauses():
        may = lead.may_found()
        if may is not False:  # then somebody else is making the shards
            break
    if may:
        _create_shards([*others, lead], consistency)
        return
    for each in others:
        each.recreate()  # nothing happens unless it was restarted


def _create_shards(servers: Sequence[ShardClient], consistency: Consistency) -> None:
    """Make the shards, that of the first server last."""
    saved = {each.server: each.saved() for each in servers}
    lead = saved[servers[-1].server]
    under_way = lead.ours or any(each.here and not each.pristine for each in saved.values())
    if under_way and _recreate_shards(servers, saved, consistency):
        return
    rule = servers[0].plan.checkpoint
    resumes = under_way or (rule is not None and rule.resume)
    versions = _versions(saved, consistency) if resumes else dict.fromkeys(saved)
    for each in servers:
        each.create(versions[each.server])


def _recreate_shards(
    servers: Sequence[ShardClient], saved: dict[str, SavedVersions], consistency: Consistency
) -> bool:
    """Let servers that were restarted go on. Return False if all begin again, with the same version."""
    without = [server for server, each in saved.items() if not (each.here or each.ours)]
    if without:
        raise JoinError(
            f"the training is under way, but {', '.join(without)} came back without a checkpoint of it that can be "
            "read. Start it anew under another name"
        )
    rule = servers[0].plan.checkpoint
    exact = rule is not None and rule.exact
    all_restarted = not any(each.here for each in saved.values())
    if isinstance(consistency, Sync) and not exact and all_restarted and _common(saved):
        return False
    for each in servers:
        each.recreate()
    return True


def _common(saved: dict[str, SavedVersions]) -> set[int]:
    return set.intersection(*(set(each.versions) for each in saved.values()))


def _versions(saved: dict[str, SavedVersions], consistency: Consistency) -> dict[str, int | None]:
    """Return which checkpoint each server begins with; None: with the parameters of this trainer."""
    if not any(each.versions for each in saved.values()):
        return dict.fromkeys(saved)
    if not isinstance(consistency, Sync):  # each server counts its own steps
        return {server: max(each.versions, default=None) for server, each in saved.items()}
    common = _common(saved)
    if not common:
        found = {server: each.versions for server, each in saved.items()}
        raise UsageError(
            f"the servers have checkpoints of different versions, and none in common: {found}"
        )
    return dict.fromkeys(saved, max(common))
