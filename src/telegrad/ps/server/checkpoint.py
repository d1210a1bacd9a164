"""Checkpoints of a shard on disk: `ShardSnapshot` and `CheckpointArchive`.

    folder/<parameter server>/<worker>/<version>/parameters.safetensors
    folder/<parameter server>/<worker>/<version>/optimizer.pt
    folder/<parameter server>/<worker>/<version>/checksums.json
    folder/<parameter server>/<worker>/members.json      the trainers that take part

A version is written to a temporary folder, which is renamed when it is complete. A version whose
files do not match their checksums, or cannot be read, is ignored with a warning; the version before
it is used.

Writing never raises, except for the first checkpoint and, when a trainer joins, for the list of
members. An error is logged and kept as `problem` until something has been written again. Training
continues meanwhile, and the last good checkpoint stays.

State of a `CheckpointArchive`, under `_changed`: `_queued`, the newest snapshot that is not being
written; `_writing`, whether a thread writes; `problem`. Not under a lock: `_members`, the last list
of members, and `_members_saved`, whether it is on disk.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.errors import UsageError
from telegrad.param_groups import Options
from telegrad.ps.checkpoint_policy import Checkpoint
from telegrad.ps.optimizer_types import State

try:
    from safetensors.torch import load_file, save_file
except ImportError:  # optional; `Checkpoint` raises an error without it
    load_file = save_file = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

_PARAMETERS, _OPTIMIZER, _CHECKSUMS, _MEMBERS = (
    "parameters.safetensors",
    "optimizer.pt",
    "checksums.json",
    "members.json",
)
_READ_SIZE = 1 << 20  # bytes


class ShardSnapshot(NamedTuple):
    """Copies of the contents of a shard. The fields are also the format on disk."""

    version: int
    run: str  # the group of workers that trained it
    values: dict[str, Tensor]  # by the labels of the parts
    states: list[State]
    groups: list[Options]
    applied: dict[str, int]  # the last step of each trainer in this version
    # the reports of the last step, if other servers may not have made that step
    round: dict[str, int] | None = None
    skipped: bool = False  # the last round made no step


class CheckpointArchive:
    """The checkpoints of one shard. `start` runs a function on another thread."""

    def __init__(
        self,
        policy: Checkpoint,
        name: str,
        server: str,
        start: Callable[[Callable[[], None]], None],
    ) -> None:
        self.policy = policy
        self.problem: str | None = None
        # A step of an exact shard can be undone, which needs the version before it.
        self._keep = max(policy.keep, 2) if policy.exact else policy.keep
        self._folder = Path(policy.folder) / name / server
        self._start = start
        self._changed = threading.Condition()
        self._queued: ShardSnapshot | None = None
        self._writing = False
        self._members: dict[str, Any] | None = None
        self._members_saved = True
        self._folder.mkdir(parents=True, exist_ok=True)

    def __repr__(self) -> str:
        state = ", writing" if self._writing else ""
        return f"<CheckpointArchive {self._folder}: versions {self.versions()}{state}>"

    # Reading

    def versions(self) -> list[int]:
        """Return the versions on disk, including those that cannot be read."""
        try:
            names = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            _warn_damaged(self._folder, error)
            return []
        return sorted(int(name) for name in names if name.isdigit())

    def readable(self) -> list[int]:
        """Return the versions whose files match their checksums."""
        return [version for version in self.versions() if self._is_intact(version)]

    def newest(self) -> ShardSnapshot | None:
        """Return the newest version that can be read, or None."""
        for version in reversed(self.versions()):
            snapshot = self.find(version)
            if snapshot is not None:
                return snapshot
        return None

    def find(self, version: int) -> ShardSnapshot | None:
        """Return a version, or None if it does not exist or cannot be read."""
        if version not in self.versions():
            return None
        try:
            self._verify(version)
            return self._read(version)
        except Exception as error:  # readers raise many types for damaged files
            _warn_damaged(self._folder / str(version), error)
            return None

    def _is_intact(self, version: int) -> bool:
        try:
            self._verify(version)
        except Exception as error:
            _warn_damaged(self._folder / str(version), error)
            return False
        return True

    def _verify(self, version: int) -> None:
        """Raise an error if the files of a version are damaged."""
        folder = self._folder / str(version)
        for name, expected in json.loads((folder / _CHECKSUMS).read_text()).items():
            found = _checksum(folder / name)
            if found != expected:
                raise ValueError(f"{name} has checksum {found}, but {expected} was written")

    def _read(self, version: int) -> ShardSnapshot:
        folder = self._folder / str(version)
        metadata: dict[str, Any] = torch.load(
            folder / _OPTIMIZER, map_location="cpu", weights_only=True
        )
        return ShardSnapshot(values=load_file(folder / _PARAMETERS), **metadata)

    def members(self) -> tuple[list[str], bool]:
        """Return the members when they were last saved, and whether training had started."""
        file = self._folder / _MEMBERS
        try:
            saved = json.loads(file.read_text())
        except FileNotFoundError:
            return [], False
        except (OSError, ValueError) as error:
            _warn_damaged(file, error)
            return [], False
        return list(saved["members"]), bool(saved["started"])

    # Writing

    def clear(self, after: int = -1) -> None:
        """Remove the versions after this one: they are of an earlier run, or undone."""
        for version in self.versions():
            if version > after:
                self._attempt(shutil.rmtree, self._folder / str(version))

    def save_members(self, members: Iterable[str], started: bool) -> None:
        """Write the list of members. If that fails, the next checkpoint tries again."""
        if self._set_members(members, started):
            self._attempt(self._write_members)

    def write_members_now(self, members: Iterable[str], started: bool) -> None:
        """Write the list of members. Raise `UsageError` if that fails."""
        if not self._set_members(members, started):
            return
        try:
            self._write_members()
        except Exception as error:
            raise UsageError(
                f"the list of trainers cannot be written into {self._folder}: "
                f"{type(error).__name__}: {error}. Make room, or repair the folder, and join again"
            ) from error

    def _set_members(self, members: Iterable[str], started: bool) -> bool:
        """Set the current members. Return whether they must be written."""
        current = {"members": sorted(members), "started": started}
        if current == self._members and self._members_saved:
            return False
        self._members = current
        self._members_saved = False
        return True

    def save(self, snapshot: ShardSnapshot) -> None:
        """Write a snapshot: now if the policy says `wait`, or else on another thread.

        If several are queued, only the newest is written.
        """
        if self.policy.wait:
            self._attempt(self._write, snapshot)
            return
        with self._changed:
            self._queued = snapshot
            if not self._writing:
                self._writing = True
                self._start(self._write_queued)

    def write_now(self, snapshot: ShardSnapshot) -> None:
        """Write a snapshot. Raise `UsageError` if that fails."""
        try:
            self._write(snapshot)
        except Exception as error:
            raise UsageError(
                f"the first checkpoint cannot be written into {self._folder}: "
                f"{type(error).__name__}: {error}. Choose another folder, or make room"
            ) from error

    def finish(self) -> None:
        """Wait until all queued snapshots are written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)

    def record_problem(self, error: Exception) -> None:
        """Log that a checkpoint could not be written, and set `problem`."""
        versions = self.versions()
        last = f"version {versions[-1]}" if versions else "nothing"
        problem = (
            f"a checkpoint could not be written into {self._folder}: {type(error).__name__}: "
            f"{error}. Training goes on; if the server dies, it goes back to {last}"
        )
        _log.error("%s", problem)
        with self._changed:
            self.problem = problem

    def _attempt(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            self.record_problem(error)

    def _write_queued(self) -> None:
        while True:
            with self._changed:
                snapshot, self._queued = self._queued, None
                if snapshot is None:
                    self._writing = False
                    self._changed.notify_all()
                    return
            self._attempt(self._write, snapshot)

    def _write(self, snapshot: ShardSnapshot) -> None:
        final = self._folder / str(snapshot.version)
        temporary = self._folder / f"{snapshot.version}.new"
        self._folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            self._write_files(temporary, snapshot)
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # an incomplete version takes up space
            raise
        _fsync([self._folder])
        if not self._members_saved:
            self._write_members()
        for old in self.versions()[: -self._keep]:
            shutil.rmtree(self._folder / str(old))
        with self._changed:
            self.problem = None

    def _write_files(self, folder: Path, snapshot: ShardSnapshot) -> None:
        folder.mkdir()
        files = [folder / _PARAMETERS, folder / _OPTIMIZER]
        metadata = snapshot._asdict()
        save_file(metadata.pop("values"), files[0])
        torch.save(metadata, files[1])
        checksums_file = folder / _CHECKSUMS
        checksums_file.write_text(json.dumps({file.name: _checksum(file) for file in files}))
        _fsync([*files, checksums_file, folder])

    def _write_members(self) -> None:
        file = self._folder / _MEMBERS
        temporary = file.with_suffix(".new")
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(self._members))
        temporary.replace(file)
        self._members_saved = True


def _warn_damaged(path: Path, error: Exception) -> None:
    # As text: a log record must not keep the frames of the error alive.
    _log.warning("%s cannot be used: %s", path, f"{type(error).__name__}: {error}")


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(_READ_SIZE):
            total = zlib.crc32(block, total)
    return total


def _fsync(paths: Sequence[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
