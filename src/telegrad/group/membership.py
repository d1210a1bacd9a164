"""Membership: a directory of the workers of a group, in a `torch.distributed` store.

The store may be of any kind: TCP, file, or in-process `HashStore`. Its entries, signed with the
group's secret (`SignedStore`):

    group            whether the size is fixed, a random id, and the worker that wrote this entry;
                     other groups cannot connect
    slot/<i>         the rank of the i-th worker that has registered, also if it came back
    ranks, slots     counters of the ranks and slots that were taken; not signed
    rank/<r>         JSON of the member with that rank: the fields of `Member`
    name/<name>      the rank of the worker with that name
    check/<r>        what the network check of that worker has found, as JSON

An *incarnation* is the random id of one start of a worker. A worker that restarts keeps its name
and replaces its entry with a new incarnation. Nothing that is read from the store is unpickled.
A worker that cannot join writes the reason under problem/<rank>, for the errors of the others. It
may not know the secret, so that text is not signed: it can end the
waiting for that worker, and nothing else.

State: `_members` (the entries read last, by rank), `_by_name` (the same) and `_names` (by
incarnation) are changed under `_lock` and read without it; `_slots` (ranks, by slot) is written by
atomic operations of the dict. Entries are replaced, never changed, and no earlier entry replaces a
later one. `_slot` is set once. `_arrivals` belongs to the thread that calls `arrivals`.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from telegrad.errors import AuthenticationError, JoinError, StoreTampered, UsageError
from telegrad.group.signed_store import SignedStore, Store, StoreEntry
from telegrad.wire.handshake import Incarnation

_POLL = (0.002, 0.1)
_LOOK_FOR_PROBLEMS = 1.0  # seconds between two looks for problems of missing workers
_MAX_PROBLEM = 500  # characters
_PROBLEM_GRACE = 5.0  # seconds for a worker that could not join to be started again
_MAX_PROBLEMS = 16  # missing workers whose problems are looked for while this one waits
_POLLS_PER_SECOND = 2000  # of all workers that wait for the others, together
_FILL_AFTER = 2.0  # seconds for a worker to write its slot before another one does
_MAX_GAP = 4096  # free slots that are filled
_MANY = 64  # entries that are read together

_log = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of the group, as it is registered in the directory."""

    name: str
    rank: int
    incarnation: Incarnation
    addresses: tuple[str, ...]
    left: bool = False
    maps_devices: bool = False
    main: str = ""  # identifies the program that it runs; see `main_module_identity`
    host: str = ""  # see `host_id`
    protocol: int = 0  # the version of the handshake
    python: str = ""
    torch: str = ""
    tls: str = ""

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
    """The members of one group, as the worker `name` sees them; `rank` is the one it asks for."""

    def __init__(
        self, store: Store, key: bytes, name: str, rank: int | None, fixed_size: bool
    ) -> None:
        self._store = SignedStore(store, key)
        self._fixed_size = fixed_size
        self._name = name
        self._rank = rank
        self._members: dict[int, Member] = {}
        self._by_name: dict[str, Member] = {}
        self._names: dict[Incarnation, str] = {}  # of every incarnation ever seen
        self._slots: dict[int, int] = {}
        self._slot = 0  # that of this worker
        self._arrivals = 0  # slots whose workers `arrivals` has returned
        self._lock = threading.Lock()
        self._store.group = self.group = self._agree_on_group(fixed_size)

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
                raise _taken(member, name)
            if rank is None:
                rank = member.rank
        return rank

    def register(
        self, name: str, rank: int | None, addresses: tuple[str, ...], **details: Any
    ) -> Member:
        """Write this worker into the directory. Without a rank, it gets the next free one.

        `details` are further fields of `Member`. Raise `JoinError` if another worker has taken the
        rank since `free_rank`.
        """
        member = Member(name, -1, Incarnation(secrets.token_hex(8)), addresses, **details)
        if rank is None:
            rank = self._store.claim("rank", lambda free: _to_json(replace(member, rank=free)))
            member = replace(member, rank=rank)
        else:
            member = replace(member, rank=rank)
            key = f"rank/{rank}"
            if not self._store.write(key, _to_json(member), self._store.last_seen(key)):
                other = self._read(rank)
                raise _taken(member if other is None else other, name)
        self._remember(member)
        self._write_name(member)
        self._slot = self._store.claim("slot", lambda _: str(rank))
        self._fill_gap(self._slot, str(rank))
        return member

    def _fill_gap(self, slot: int, value: str) -> None:
        """Make sure that there are no free slots before one: others read until the first.

        A worker that has just taken a number may have ended before it wrote its entry.
        """
        until, pause = time.monotonic() + _FILL_AFTER, _POLL[0]
        for free in range(slot - 1, -1, -1):
            while not self._store.exists(f"slot/{free}") and time.monotonic() < until:
                time.sleep(pause)
                pause = min(pause * 1.5, _POLL[1])
            if not self._store.write(f"slot/{free}", value, None):
                return  # it is not free
            if slot - free > _MAX_GAP:
                raise StoreTampered(
                    f"the store's counter of workers ({slot}) was changed by someone who is no "
                    "worker of the group. Find out who can write to the store, then start the "
                    "group again"
                )

    def has_come_back(self, member: Member) -> bool:
        """Return whether an earlier worker has had the rank of this member."""
        entry = self._store.last_seen(f"rank/{member.rank}")
        return entry is not None and entry.number > 1

    def write_check(self, member: Member, value: str) -> None:
        """Write the result of this worker's network check."""
        key = f"check/{member.rank}"
        previous = self._store.read(key, f"worker {member.name!r}")
        self._store.write(key, value, previous)

    def wait_for_checks(self, members: Sequence[Member], until: float) -> list[str]:
        """Wait for the results of the network checks of all members."""
        names = {f"check/{member.rank}": member.name for member in members}
        subjects = {key: f"worker {name!r}" for key, name in names.items()}
        pause = _POLL[0]
        while (entries := self._store.read_all(subjects)) is None:
            if time.monotonic() > until:
                missing = [name for key, name in names.items() if not self._store.exists(key)]
                raise JoinError(
                    f"these workers did not finish their network check within Config.join_timeout: "
                    f"{', '.join(missing)}"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL[1])
        return [entry.value for entry in entries]

    def _report_problem(self, reason: str) -> None:
        """Let the workers that wait for this one know why it did not join."""
        if self._rank is not None:
            self._store.write_unsigned(f"problem/{self._rank}", reason)

    def wait_for_members(
        self, world_size: int, timeout: float, has_ended: Callable[[Member], bool]
    ) -> None:
        """Wait until every rank of a group of fixed size has registered. Names must differ.

        An entry of which `has_ended` is true does not count. Do not wait for workers that have said
        that they cannot join, unless they are started again soon. (Who can write to the store could
        say so in their place. He could as well spoil its entries.)
        """
        until, pause = time.monotonic() + timeout, _POLL[0]
        look_at = time.monotonic() + _LOOK_FOR_PROBLEMS
        problems: dict[int, str] = {}
        give_up_at = math.inf
        present: set[Incarnation] = set()

        def find_ended() -> list[int]:
            members = list(self._members.values())
            new = [each for each in members if each.incarnation not in present]
            ended = [each for each in new if has_ended(each)]
            present.update(each.incarnation for each in new if each not in ended)
            return [each.rank for each in ended]

        ended: list[int] = []
        while not self._read_world(world_size) or (ended := find_ended()):
            now = time.monotonic()
            if now > until:
                missing = sorted({*self._missing(range(world_size), world_size), *ended})
                self._look_for_problems(missing, problems)
                raise JoinError(
                    f"only {world_size - len(missing)} of {world_size} workers came within "
                    f"{timeout} s; missing ranks: {missing}. Start them, or raise "
                    f"Config.join_timeout{_describe_problems(missing, problems)}"
                )
            if now > look_at:
                missing = self._missing(range(world_size), _MAX_PROBLEMS)
                self._look_for_problems(missing, problems)
                look_at = now + _LOOK_FOR_PROBLEMS
                if not any(rank in problems for rank in missing):
                    give_up_at = math.inf
                elif now > give_up_at:
                    raise JoinError(
                        f"{len(missing)} of {world_size} workers are missing, and some of them "
                        f"cannot join{_describe_problems(missing, problems)}"
                    )
                else:
                    give_up_at = min(give_up_at, now + _PROBLEM_GRACE)
            time.sleep(pause)
            # In a large group, not all workers poll the store all the time.
            pause = min(pause * 1.5, max(_POLL[1], world_size / _POLLS_PER_SECOND))
        ranks: dict[str, int] = {}
        for member in self.members(refresh=False):
            if member.name in ranks:
                raise JoinError(
                    f"RPC worker name {member.name} is not unique. "
                    f"Workers {ranks[member.name]} and {member.rank} share it; give each its own"
                )
            ranks[member.name] = member.rank

    def _missing(self, ranks: Sequence[int], limit: int) -> list[int]:
        """Return up to `limit` ranks that have not registered, with few requests to the store."""
        missing: list[int] = []
        for first in range(0, len(ranks), _MANY):
            part = ranks[first : first + _MANY]
            if len(missing) < limit and not self._store.exists(*(f"rank/{rank}" for rank in part)):
                missing += [rank for rank in part if not self._store.exists(f"rank/{rank}")]
        return missing[:limit]

    def _look_for_problems(self, ranks: Sequence[int], problems: dict[int, str]) -> None:
        """Add the problems that missing workers have reported. Log those that are new."""
        for rank in ranks:
            text = self._store.read_unsigned(f"problem/{rank}")
            if text is not None and problems.get(rank) != text:
                problems[rank] = text
                _log.warning(
                    "worker %r waits for rank %d, which could not join and left this message: %s",
                    self._name,
                    rank,
                    ascii(text[:_MAX_PROBLEM]),
                )

    def leave(self, member: Member) -> None:
        """Mark this worker as left, unless a newer incarnation has taken its place."""
        registered = self._read(member.rank)
        if registered is not None and registered.incarnation == member.incarnation:
            key = f"rank/{member.rank}"
            left = replace(member, left=True)
            if self._store.write(key, _to_json(left), self._store.last_seen(key)):
                self._remember(left)

    def close(self) -> None:
        """Release the store."""
        self._store.close()

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
            self._read_slots()
            self._read_all(sorted(dict.fromkeys(list(self._slots.values()))))
        present = [member for member in list(self._members.values()) if not member.left]
        return sorted(present, key=lambda member: member.rank)

    def sample(self, count: int) -> list[Member]:
        """Return up to `count` (at least 2) workers that came before this one and have not left."""
        last = self._slot - 1
        slots = sorted({index * last // (count - 1) for index in range(count)}) if last >= 0 else []
        found: dict[int, Member] = {}
        for slot in slots:
            entry = self._store.read(f"slot/{slot}", f"the worker that registered as number {slot}")
            member = None if entry is None else self._read(int(entry.value))
            if member is not None and not member.left:
                found[member.rank] = member
        return list(found.values())

    def arrivals(self) -> list[Member]:
        """Return the members that have registered since the last call, also those that came back.

        Only one thread may call this at a time. If there are none, it is one request to the store.
        """
        self._read_slots()
        first, self._arrivals = self._arrivals, len(self._slots)
        ranks = list(dict.fromkeys(self._slots[slot] for slot in range(first, self._arrivals)))
        if ranks:
            self._read_all(ranks)
        return [self._members[rank] for rank in ranks]

    def is_current(self, name: str, incarnation: Incarnation) -> bool:
        """Return whether this incarnation is the last that was read under this name."""
        member = self._known(name)
        return member is not None and member.incarnation == incarnation

    def name_of(self, incarnation: Incarnation) -> str:
        """Return the name of a worker by its incarnation, alive or not."""
        if incarnation not in self._names:
            self.members(refresh=True)
        return self.known_name(incarnation)

    def known_name(self, incarnation: Incarnation) -> str:
        """Do what `name_of` does without reading the store."""
        return self._names.get(incarnation, f"unknown worker {incarnation}")

    def _known(self, key: str | int) -> Member | None:
        """Return a member without reading the store."""
        if isinstance(key, int):
            return self._members.get(key)
        member = self._by_name.get(key)
        # otherwise another worker has taken its rank
        is_member = member is not None and self._members.get(member.rank) is member
        return member if is_member else None

    def _member_with_name(self, name: str) -> Member | None:
        entry = self._store.read(f"name/{name}", f"worker {name!r}")
        member = None if entry is None else self._read(int(entry.value), f"worker {name!r}")
        # otherwise another worker has taken the rank
        return member if member is not None and member.name == name else None

    # The store

    def _agree_on_group(self, fixed_size: bool) -> str:
        kind = "fixed" if fixed_size else "open"
        value = f"{kind} {secrets.token_hex(8)} {self._name}"
        # One operation: with two, a worker that dies in between would leave a group that no worker
        # can join.
        self._store.write("group", value, None)
        try:
            entry = self._store.read("group", "the group")
        except StoreTampered as error:
            reason = (
                f"worker {self._name!r} has another secret than the worker that started this "
                "group: set the same TELEGRAD_SECRET (or Config.secret) on every worker. If the "
                f"secrets are equal: {error}"
            )
            self._report_problem(reason)
            raise AuthenticationError(reason, peer=self._name) from None
        if entry is None:
            raise JoinError("the group's store lost the entry 'group' that was just written")
        found_kind, group, _ = entry.value.split()
        if found_kind != kind:
            raise JoinError(
                "RPC group mixes statically and dynamically initialized members which is not "
                "supported. Give every worker a world_size, or none"
            )
        return group

    def _write_name(self, member: Member) -> None:
        """Let the name mean this worker; the last one counts if several take a name at once."""
        key, previous = f"name/{member.name}", self._store.last_seen(f"name/{member.name}")
        while not self._store.write(key, str(member.rank), previous):
            previous = self._store.read(key, f"worker {member.name!r}")

    def _read_slots(self) -> None:
        """Read the slots that were added. If there are none, it is one request to the store."""
        count = 1
        while count:
            first = len(self._slots)
            slots = range(first, first + count)
            entries = self._store.read_all(
                {f"slot/{slot}": f"the worker that registered as number {slot}" for slot in slots}
            )
            if entries is None:
                count //= 2
            else:
                ranks = [int(entry.value) for entry in entries]
                self._slots.update(zip(slots, ranks, strict=True))
                count = min(2 * count, _MANY)

    def _read_all(self, ranks: Sequence[int]) -> bool:
        """Read the entries of these ranks. Return False if one has none."""
        subjects = {f"rank/{rank}": self._subject(rank) for rank in ranks}
        entries = self._store.read_all(subjects)
        for entry in entries or ():
            self._remember(_from_json(entry), entry)
        return entries is not None

    def _read_world(self, world_size: int) -> bool:
        """Read the entries of a group of fixed size. Return False if one is missing.

        While few workers have registered, it is one small request to the store.
        """
        return self._store.exists(f"slot/{world_size - 1}") and self._read_all(range(world_size))

    def _subject(self, rank: int) -> str:
        known = self._members.get(rank)
        return f"the worker with rank {rank}" if known is None else f"worker {known.name!r}"

    def _read(self, rank: int, subject: str = "") -> Member | None:
        entry = self._store.read(f"rank/{rank}", subject or self._subject(rank))
        if entry is None:
            return None
        member = _from_json(entry)
        self._remember(member, entry)
        return member

    def _remember(self, member: Member, entry: StoreEntry | None = None) -> None:
        """Store a member that was read from `entry`; None: that this worker has written.

        Do nothing if another thread has read a later entry meanwhile.
        """
        with self._lock:
            if entry is None or entry is self._store.last_seen(f"rank/{member.rank}"):
                self._members[member.rank] = self._by_name[member.name] = member
            self._names[member.incarnation] = member.name


def read_members(store: Store, key: bytes) -> tuple[str, list[Member]]:
    """Return the id and the members of a group without joining it; ("", []) if there is none."""
    signed = SignedStore(store, key)
    group = signed.read("group", "the group")
    if group is None:
        return "", []
    signed.group = group.value.split()[1]
    ranks: list[int] = []
    while (slot := signed.read(f"slot/{len(ranks)}", f"worker number {len(ranks)}")) is not None:
        ranks.append(int(slot.value))
    entries = [signed.read(f"rank/{rank}", f"the worker with rank {rank}") for rank in set(ranks)]
    members = [_from_json(entry) for entry in entries if entry is not None]
    return signed.group, [member for member in members if not member.left]


_FIELDS = tuple(field.name for field in fields(Member))
_REPEATED = ("main", "host", "python", "torch", "tls")  # many members have the same text


def _to_json(member: Member) -> str:
    return json.dumps(asdict(member))


def _from_json(entry: StoreEntry) -> Member:
    """Return the member of an entry. Fields that this version does not have are ignored."""
    values = json.loads(entry.value)
    values["addresses"] = tuple(values["addresses"])
    for name in _REPEATED:
        values[name] = sys.intern(values.get(name, ""))
    if len(values) != len(_FIELDS):
        values = {name: values[name] for name in _FIELDS if name in values}
    return Member(**values)


def _taken(member: Member, name: str) -> JoinError:
    return JoinError(
        f"a worker named {member.name!r} is already in the group and alive "
        f"(rank {member.rank}); {name!r} needs a name and a rank of its own"
    )


def _describe_problems(missing: Sequence[int], problems: dict[int, str]) -> str:
    """Return the end of an error message: why workers did not come, as far as they have said."""
    texts = [
        f"rank {rank}: {problems[rank][:_MAX_PROBLEM]!a}" for rank in missing if rank in problems
    ]
    return f". Messages from workers that could not join: {'; '.join(texts)}" if texts else ""
