"""Membership: a directory of the workers of a group, in a `torch.distributed` store.

The store may be of any kind: TCP, file, or in-process `HashStore`. Its keys:

    group            whether the size is fixed, and a random id; other groups cannot connect
    arrivals         how many workers have registered; slot/<i> holds the rank of the i-th
    rank/<r>         JSON of the member with that rank: the fields of `Member`
    name/<name>      the rank of the worker with that name

An *incarnation* is the random id of one start of a worker. A worker that restarts keeps its name
and replaces its entry with a new incarnation. Nothing that is read from the store is unpickled, and
an address in it is not trusted: the worker that answers there must pass the handshake.

State: `_members` (the entries read so far, by rank) and `_names` (by incarnation) are written by
atomic operations of the dict. Entries are replaced, never changed. A store may be used from one
thread at a time only while it waits, so it is never asked to wait: `wait_for_members` polls.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from telegrad.errors import JoinError, UsageError
from telegrad.wire.handshake import Incarnation

Store = Any  # torch.distributed.Store; that name is missing in builds of torch without distributed

_POLL = (0.002, 0.1)


_NAME = re.compile(r"[A-Za-z0-9\-_:.]+")
_MAX_NAME = 128


class WorkerInfo:
    """A worker's name and id (its rank).

    Names consist of letters, digits, ``-``, ``_``, ``:`` and ``.``.
    """

    __slots__ = ("id", "name")

    def __init__(self, name: str, id: int) -> None:
        check_name(name)
        self.name: str = name
        self.id: int = id

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerInfo) and (self.id, self.name) == (other.id, other.name)

    def __hash__(self) -> int:
        return hash((self.id, self.name))

    def __reduce__(self) -> tuple[type[WorkerInfo], tuple[str, int]]:
        return WorkerInfo, (self.name, self.id)


def check_name(name: str) -> None:
    """Raise `UsageError` unless `name` is a valid name of a worker."""
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
    """A worker of the group, as it is registered in the directory."""

    name: str
    rank: int
    incarnation: Incarnation
    addresses: tuple[str, ...]
    left: bool = False
    maps_devices: bool = False
    main: str = ""  # identifies the program that it runs; see `main_module_identity`

    @property
    def is_local(self) -> bool:
        """Whether only processes of its own host can connect to this worker."""
        local = ("unix:", "memory:", "tcp:127.", "tcp:localhost:", "tcp:::1:")
        return all(address.startswith(local) for address in self.addresses)

    @property
    def info(self) -> WorkerInfo:
        """The public description of this worker."""
        return WorkerInfo(self.name, self.rank)


class Directory:
    """The members of one group."""

    def __init__(self, store: Store, fixed_size: bool) -> None:
        self._store = store
        self._fixed_size = fixed_size
        self._lock = threading.Lock()
        self._members: dict[int, Member] = {}
        self._names: dict[Incarnation, str] = {}  # of every incarnation ever seen
        self.group = self._agree_on_group(fixed_size)

    def __repr__(self) -> str:
        names = sorted(member.name for member in list(self._members.values()))
        return f"<Directory of group {self.group}: {names}>"

    # Joining and leaving

    def free_rank(
        self, name: str, rank: int | None, is_alive: Callable[[Member], bool | None]
    ) -> int | None:
        """Return the rank for a worker that joins; None: any. Raise `JoinError` if it is taken.

        A name or rank is free if no worker has it, or if the worker that had it is not alive. A
        worker that comes back under its name without a rank gets its old rank.
        """
        with_name = self._member_with_name(name)
        if with_name is not None and self._fixed_size and with_name.rank != rank:
            with_name = None  # two workers with one name: `wait_for_members` tells both of them
        with_rank = None if rank is None else self._read(rank)
        for member in (with_name, with_rank):
            if member is None or member.left:
                continue
            if is_alive(member):
                raise JoinError(
                    f"a worker named {member.name!r} is already in the group and alive "
                    f"(rank {member.rank}); {name!r} needs a name and a rank of its own"
                )
            if rank is None:
                rank = member.rank
        return rank

    def register(
        self,
        name: str,
        rank: int | None,
        addresses: tuple[str, ...],
        maps_devices: bool = False,
        main: str = "",
    ) -> Member:
        """Write this worker into the directory. Without a rank, it gets the next free one."""
        assigned = False
        while rank is None or (assigned and self._get(f"rank/{rank}") is not None):
            rank, assigned = int(self._store.add("next_rank", 1)) - 1, True
        member = Member(
            name,
            rank,
            Incarnation(secrets.token_hex(8)),
            addresses,
            maps_devices=maps_devices,
            main=main,
        )
        self._write(member)
        self._store.set(f"name/{name}", str(rank))
        self._store.set(f"slot/{self._store.add('arrivals', 1)}", str(rank))
        return member

    def wait_for_members(self, world_size: int, timeout: float) -> None:
        """Wait until every rank of a group of fixed size has registered. Names must differ."""
        until, pause = time.monotonic() + timeout, _POLL[0]
        missing = list(range(world_size))
        while missing:
            missing = [rank for rank in missing if self._read(rank) is None]
            if missing:
                if time.monotonic() > until:
                    raise JoinError(
                        f"only {world_size - len(missing)} of {world_size} workers came within "
                        f"{timeout} s; missing ranks: {missing}. Start them, or raise "
                        "Config.join_timeout"
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, _POLL[1])
        ranks: dict[str, int] = {}
        for member in self.members(refresh=False):
            if member.name in ranks:
                raise JoinError(
                    f"RPC worker name {member.name} is not unique. "
                    f"Workers {ranks[member.name]} and {member.rank} share it; give each its own"
                )
            ranks[member.name] = member.rank

    def leave(self, member: Member) -> None:
        """Mark this worker as left, unless a newer incarnation has taken its place."""
        registered = self._read(member.rank)
        if registered is not None and registered.incarnation == member.incarnation:
            try:
                self._write(replace(member, left=True))
            except RuntimeError as error:
                raise JoinError(f"the group's store does not answer: {error}") from error

    def close(self) -> None:
        """Release the store."""
        self._store = None

    # Looking up

    def find(self, key: str | int, *, refresh: bool = False) -> Member:
        """Return the member with this name or rank; `refresh`: read the store in any case."""
        member = self._known(key)
        if member is None or refresh:
            member = self._read(key) if isinstance(key, int) else self._member_with_name(key)
        if member is None:
            members = self.members(refresh=False)
            known = ", ".join(f"{each.name} (rank {each.rank})" for each in members)
            raise UsageError(f"could not find destination worker {key!r}; this group has {known}")
        return member

    def members(self, *, refresh: bool) -> list[Member]:
        """Return all members that have not left, by rank."""
        if refresh:
            for slot in range(1, int(self._store.add("arrivals", 0)) + 1):
                rank = self._get(f"slot/{slot}")
                if rank is not None:
                    self._read(int(rank))
        present = [member for member in list(self._members.values()) if not member.left]
        return sorted(present, key=lambda member: member.rank)

    def is_current(self, name: str, incarnation: Incarnation) -> bool:
        """Return whether this incarnation is the last that was read under this name."""
        member = self._known(name)
        return member is not None and member.incarnation == incarnation

    def name_of(self, incarnation: Incarnation) -> str:
        """Return the name of a worker by its incarnation, alive or not."""
        if incarnation not in self._names:
            self.members(refresh=True)
        return self._names.get(incarnation, f"unknown worker {incarnation}")

    def _known(self, key: str | int) -> Member | None:
        """Return a member without reading the store."""
        if isinstance(key, int):
            return self._members.get(key)
        return next((each for each in list(self._members.values()) if each.name == key), None)

    def _member_with_name(self, name: str) -> Member | None:
        rank = self._get(f"name/{name}")
        return None if rank is None else self._read(int(rank))

    # The store

    def _agree_on_group(self, fixed_size: bool) -> str:
        kind = "fixed" if fixed_size else "open"
        # One operation: with two, a worker that dies in between would leave a group that no worker
        # can join.
        found = self._store.compare_set("group", "", f"{kind} {secrets.token_hex(8)}")
        found_kind, group = bytes(found).decode().split()
        if found_kind != kind:
            raise JoinError(
                "RPC group mixes statically and dynamically initialized members which is not "
                "supported. Give every worker a world_size, or none"
            )
        return group

    def _write(self, member: Member) -> None:
        self._store.set(f"rank/{member.rank}", json.dumps(asdict(member)))
        self._remember(member)

    def _read(self, rank: int) -> Member | None:
        text = self._get(f"rank/{rank}")
        if text is None:
            return None
        fields = json.loads(text)
        member = Member(
            str(fields["name"]),
            int(fields["rank"]),
            Incarnation(str(fields["incarnation"])),
            tuple(map(str, fields["addresses"])),
            bool(fields["left"]),
            bool(fields.get("maps_devices")),
            str(fields.get("main", "")),
        )
        self._remember(member)
        return member

    def _remember(self, member: Member) -> None:
        self._members[member.rank] = member
        self._names[member.incarnation] = member.name

    def _get(self, key: str) -> str | None:
        try:
            with self._lock:
                return bytes(self._store.get(key)).decode() if self._store.check([key]) else None
        # the worker that hosted the store has ended, or this one has left
        except (RuntimeError, AttributeError) as error:
            raise JoinError(f"the group's store does not answer: {error}") from error
