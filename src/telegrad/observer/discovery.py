"""Find the workers of a running group: through its store, through one worker, or on this host.

The store is only read. Workers of this host have unix sockets with abstract names that begin with
``telegrad-<pid>-``; the kernel lists them.
"""

from __future__ import annotations

import importlib
import re
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from telegrad.config import Config
from telegrad.errors import JoinError, UsageError
from telegrad.group.membership import read_members
from telegrad.group.store_connection import open_within
from telegrad.observer.connection import Credentials, NoAnswer, WorkerConnection
from telegrad.observer.group import Group, ObservedWorker
from telegrad.timeouts import duration

_MAX_PREFIXES = 64  # groups that were made one after the other with one store
_SOCKET = re.compile(r"@(telegrad-(\d+)-[0-9a-f]+)$", re.MULTILINE)


def attach(
    rendezvous: str | None = None,
    address: str | None = None,
    pid: int | None = None,
    config: Config | None = None,
    timeout: float = 2.0,
) -> Group:
    """Return a running group.

    `rendezvous` is the ``host:port`` of its TCP store, `address` that of one worker (``host:port``
    or ``unix:@name``), `pid` the process of one on this host. With none of them, the group is the
    one on this host; there must be only one. `config` has the secret and the TLS settings of the
    group; by default they come from the environment.
    """
    timeout = duration(timeout, positive=True)
    credentials = Credentials(config if config is not None else Config.from_environment())
    if rendezvous is not None:
        name, workers = _from_store(rendezvous, credentials, timeout)
        return Group(name, workers, credentials)
    if address is not None:
        return _from_worker(_worker_address(address), credentials, timeout)
    groups = _on_this_host(pid, credentials, timeout)
    if not groups:
        where = "on this host" if pid is None else f"in process {pid}"
        raise UsageError(
            f"found no worker {where} that answers and knows this secret; name a group with "
            "--rendezvous host:port, or a worker with --address host:port"
        )
    if len(groups) > 1:
        lines = "\n".join(f"  --pid {found.pid}: {found!r}" for found in groups)
        raise UsageError(f"there are several groups on this host; choose one:\n{lines}")
    return groups[0]


def _from_worker(address: str, credentials: Credentials, timeout: float) -> Group:
    """Return the group that the worker at this address knows."""
    connection = WorkerConnection([address], credentials)
    try:
        return _group_of(connection, credentials, timeout)
    except NoAnswer as error:
        raise UsageError(f"the worker at {address} cannot be asked: {error}") from None
    finally:
        connection.close()


def _group_of(connection: WorkerConnection, credentials: Credentials, timeout: float) -> Group:
    answer = connection.request("members", timeout)
    worker = answer["worker"]
    workers = [_worker(fields) for fields in answer["members"]]
    return Group(worker["group"], workers, credentials, worker["pid"])


def _on_this_host(pid: int | None, credentials: Credentials, timeout: float) -> list[Group]:
    """Return the groups that have a worker on this host, or in this process."""
    groups: dict[str, Group] = {}
    for address, process in local_addresses():
        if pid is not None and process != pid:
            continue
        connection = WorkerConnection([address], credentials)
        try:
            group = _group_of(connection, credentials, timeout)
        except NoAnswer:
            continue  # it is frozen, or has another user or secret
        finally:
            connection.close()
        groups.setdefault(group.name, group)
    return list(groups.values())


def local_addresses() -> Iterator[tuple[str, int]]:
    """Yield the unix addresses of workers on this host, with their processes."""
    try:
        listed = Path("/proc/net/unix").read_text()
    except OSError:
        return
    for name, process in sorted(set(_SOCKET.findall(listed))):
        yield f"unix:@{name}", int(process)


def _worker_address(text: str) -> str:
    if text.startswith(("unix:", "tcp:")):
        return text
    if not re.fullmatch(r".+:\d+", text):
        raise UsageError(f"{text!r} is not host:port, tcp:host:port or unix:@name")
    return f"tcp:{text}"


# The store


def _from_store(
    rendezvous: str, credentials: Credentials, timeout: float
) -> tuple[str, list[ObservedWorker]]:
    dist = importlib.import_module("torch.distributed")  # takes seconds; only stores need it
    store = _open_store(dist, rendezvous, timeout)
    prefix = _find_prefix(store)
    if prefix:
        store = dist.PrefixStore(prefix, store)
    group, members = read_members(store, credentials.key)
    return group, [
        ObservedWorker(each.name, each.rank, each.incarnation, each.addresses) for each in members
    ]


def _open_store(dist: Any, rendezvous: str, timeout: float) -> Any:
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"{rendezvous!r} is not host:port of a TCP store")
    limit = timedelta(seconds=timeout)

    def connect() -> Any:
        return dist.TCPStore(host, int(port), None, False, limit, wait_for_workers=False)

    try:
        # torch writes pages of C++ frames if nothing listens there
        socket.create_connection((host, int(port)), timeout).close()
        return open_within(timeout, connect)
    except (RuntimeError, OSError) as error:
        reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
        raise JoinError(
            f"no store answers at {rendezvous} within {timeout:g} s{reason}. The worker with rank "
            "0 hosts it; if that one has ended, name another worker with --address or --pid"
        ) from error


def _find_prefix(store: Any) -> str:
    """Return the prefix of the newest group: `init_rpc` numbers the groups of a process."""
    for elastic in ("", *(f"/worker/attempt_{attempt}/" for attempt in range(_MAX_PREFIXES))):
        found = None
        for count in range(_MAX_PREFIXES):
            if not store.check([f"{elastic}telegrad_{count}/group"]):
                break
            found = f"{elastic}telegrad_{count}"
        if found is not None:
            return found
        if store.check([f"{elastic}group"]):
            return elastic.rstrip("/")
    raise UsageError("the store has no group of Telegrad: no worker has registered yet")


def _worker(fields: dict[str, Any]) -> ObservedWorker:
    return ObservedWorker(
        str(fields["name"]),
        int(fields["rank"]),
        str(fields["incarnation"]),
        tuple(map(str, fields["addresses"])),
    )
