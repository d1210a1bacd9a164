"""The role of a worker by its rank, for engines that know ranks only.

``TELEGRAD_ROLES=ps=1,trainer=4`` means that rank 0 is ``ps0`` and the next four are trainers.
"""

from __future__ import annotations

from collections.abc import Mapping

from telegrad import plurals
from telegrad.errors import UsageError


def format_roles(roles: Mapping[str, int]) -> str:
    """Return the text of the variable for these roles."""
    return ",".join(f"{role}={size}" for role, size in roles.items())


def role_of_rank(text: str, rank: int) -> tuple[str, int]:
    """Return the role of a worker and its index in that role.

    >>> role_of_rank("ps=1,trainer=4", 2)
    ('trainer', 1)
    """
    first = 0
    for part in text.split(","):
        role, _, size = part.strip().partition("=")
        if not role or not size.isdecimal():
            raise UsageError(f"TELEGRAD_ROLES must be of the form ROLE=N,ROLE=N, not {text!r}")
        if rank < first + int(size):
            return role, rank - first
        first += int(size)
    raise UsageError(
        f"TELEGRAD_ROLES={text!r} has {plurals.count(first, 'worker')}, and none of rank {rank}"
    )
