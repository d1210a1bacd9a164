"""Who is in the group: a directory in a `torch.distributed` store (TCP, file, or in-process `HashStore`).

    group            whether its size is fixed, and a random id; a connection from another group is refused
    arrivals         how many have registered; slot/<i> holds the rank of the i-th
    rank/<r>         JSON of the member with that rank: name, incarnation, addresses, program, whether it has left
    name/<name>      its rank

A worker that comes back under its name writes a new incarnation over the old one. Nothing read from the store is ever
unpickled, and an address in it is not trusted: whoever answers there must pass the handshake.

State: `_seen`, the members read so far; entries are replaced whole. A store may be used from one thread at a time only
while it waits, so it is never asked to wait: `meet` polls.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from telegrad.errors import JoinError, UsageError

Store = Any  # torch.distributed.Store; that name is missing in builds of torch without distributed

_POLL = (0.002, 0.1)


_NAME = re.compile(r"[A-Za-z0-9\-_:.]+")
_MAX_NAME = 128


class WorkerInfo:
    """A worker's name and id (its rank). Names consist of letters, digits, ``-``, ``_``, ``:`` and ``.``."""

    __slots__ = ("id", "name")

    def __init__(self, name: str, id: int) -> None:
        check_name(name)
        self.name = name
        self.id = id

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerInfo) and (self.id, self.name) == (other.id, other.name)

    def __hash__(self) -> int:
        return hash((self.id, self.name))

    def __reduce__(self) -> tuple[type[WorkerInfo], tuple[str, int]]:
        return WorkerInfo, (self.name, self.id)


def check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise UsageError(f"Worker name must be non-empty text, not {name!r}")
    if len(name) >= _MAX_NAME:
        raise UsageError(
            f"Worker name must be shorter than {_MAX_NAME} characters, not {len(name)}"
        )
    if not _NAME.fullmatch(name):
        raise UsageError(f"Worker name must match {_NAME.pattern}, but got {name!r}")


@dataclass(frozen=True)
class Member:
    """A worker of the group, as the directory knows it."""

    name: str
    rank: int
    incarnation: str
    addresses: tuple[str, ...]
    left: bool = False
    maps_devices: bool = False
    main: str = ""  # which program it runs; see `main_identity`

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, self.rank)


class Directory:
    """The members of one group."""

    def __init__(self, store: Store, fixed_size: bool) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._seen: dict[int, Member] = {}
        self._names: dict[str, str] = {}  # of every incarnation ever seen
        self.group = self._agree_on_group(fixed_size)

    def __repr__(self) -> str:
        return f"<Directory of group {self.group}: {sorted(member.name for member in list(self._seen.values()))}>"

    def register(
        self,
        name: str,
        rank: int | None,
        addresses: tuple[str, ...],
        maps_devices: bool = False,
        main: str = "",
    ) -> Member:
        """Put this worker into the directory. Without a rank, it gets the next one that nobody has."""
        given = False
        while rank is None or (given and self._get(f"rank/{rank}") is not None):
            rank, given = int(self._store.add("next_rank", 1)) - 1, True
        member = Member(
            name, rank, secrets.token_hex(8), addresses, maps_devices=maps_devices, main=main
        )
        self._write(member)
        self._store.set(f"name/{name}", str(rank))
        self._store.set(f"slot/{self._store.add('arrivals', 1)}", str(rank))
        return member

    def at_rank(self, rank: int) -> Member | None:
        """Who is registered with this rank right now, if anybody."""
        return self._read(rank)

    def occupant(self, name: str) -> Member | None:
        """Who is registered under this name right now, if anybody."""
        rank = self._get(f"name/{name}")
        return None if rank is None else self._read(int(rank))

    def meet(self, world_size: int, timeout: float) -> None:
        """Wait until every rank of a fixed group has registered. Names must differ."""
        until, pause = time.monotonic() + timeout, _POLL[0]
        missing = list(range(world_size))
        while missing:
            missing = [rank for rank in missing if self._read(rank) is None]
            if missing:
                if time.monotonic() > until:
                    raise JoinError(
                        f"only {world_size - len(missing)} of {world_size} workers came within {timeout} s; "
                        f"missing ranks: {missing}. Start them, or raise Config.join_timeout"
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, _POLL[1])
        names: dict[str, int] = {}
        for member in self.members(refresh=False):
            if member.name in names:
                raise JoinError(
                    f"RPC worker name {member.name} is not unique. "
                    f"Workers {names[member.name]} and {member.rank} share it; give each its own"
                )
            names[member.name] = member.rank

    def find(self, target: str | int, *, refresh: bool = False) -> Member:
        """The member with this name or rank; `refresh` asks the store even if it is known."""
        member = self._known(target)
        if member is None or refresh:
            rank = target if isinstance(target, int) else self._get(f"name/{target}")
            member = None if rank is None else self._read(int(rank))
        if member is None:
            known = ", ".join(
                f"{each.name} (rank {each.rank})" for each in self.members(refresh=False)
            )
            raise UsageError(
                f"could not find destination worker {target!r}; this group has {known}"
            )
        return member

    def members(self, *, refresh: bool) -> list[Member]:
        """All members that have not left, by rank."""
        if refresh:
            for slot in range(1, int(self._store.add("arrivals", 0)) + 1):
                rank = self._get(f"slot/{slot}")
                if rank is not None:
                    self._read(int(rank))
        return sorted((m for m in list(self._seen.values()) if not m.left), key=lambda m: m.rank)

    def is_current(self, name: str, incarnation: str) -> bool:
        """Is this incarnation the last that was seen under this name?"""
        member = self._known(name)
        return member is not None and member.incarnation == incarnation

    def name_of(self, incarnation: str) -> str:
        """The name of a worker by its incarnation, living or dead."""
        if incarnation not in self._names:
            self.members(refresh=True)
        return self._names.get(incarnation, f"unknown worker {incarnation}")

    def leave(self, member: Member) -> None:
        """Mark this worker as gone, unless a newer incarnation has taken its place."""
        now = self._read(member.rank)
        if now is not None and now.incarnation == member.incarnation:
            try:
                self._write(replace(member, left=True))
            except RuntimeError as error:
                raise JoinError(f"the group's store does not answer: {error}") from error

    def close(self) -> None:
        self._store = None

    def _known(self, target: str | int) -> Member | None:
        if isinstance(target, int):
            return self._seen.get(target)
        return next((each for each in list(self._seen.values()) if each.name == target), None)

    def _agree_on_group(self, fixed_size: bool) -> str:
        kind = "fixed" if fixed_size else "open"
        # One operation: a worker that dies between two of them would leave a group that nobody can join.
        found = self._store.compare_set("group", "", f"{kind} {secrets.token_hex(8)}")
        founded, group = bytes(found).decode().split()
        if founded != kind:
            raise JoinError(
                "RPC group mixes statically and dynamically initialized members which is not supported. "
                "Give every worker a world_size, or none"
            )
        return group

    def _write(self, member: Member) -> None:
        self._store.set(f"rank/{member.rank}", json.dumps(asdict(member)))
        self._remember(member)

    def _read(self, rank: int) -> Member | None:
        text = self._get(f"rank/{rank}")
        if text is None:
            return None
        entry = json.loads(text)
        member = Member(
            str(entry["name"]),
            int(entry["rank"]),
            str(entry["incarnation"]),
            tuple(map(str, entry["addresses"])),
            bool(entry["left"]),
            bool(entry.get("maps_devices")),
            str(entry.get("main", "")),
        )
        self._remember(member)
        return member

    def _remember(self, member: Member) -> None:
        self._seen[member.rank] = member
        self._names[member.incarnation] = member.name

    def _get(self, key: str) -> str | None:
        try:
            with self._lock:
                return bytes(self._store.get(key)).decode() if self._store.check([key]) else None
        # the worker that hosted it is gone, or this one has left
        except (RuntimeError, AttributeError) as error:
            raise JoinError(f"the group's store does not answer: {error}") from error
