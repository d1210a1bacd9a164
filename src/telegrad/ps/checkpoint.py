"""Checkpoints of a server: what it holds of the parameters (safetensors), and the optimizer's state beside it.

    folder/<parameter server>/<worker>/<version>/parameters.safetensors
    folder/<parameter server>/<worker>/<version>/optimizer.pt
    folder/<parameter server>/<worker>/members.json      the trainers that take part

A version is written under another name and renamed when it is complete, so whatever has a number is whole.

State of an `Archive`: `_next`, the newest snapshot that nobody has begun to write; `_writing`, whether some thread
writes; `_error`, what went wrong there, which the next one to save hears. All under `_changed`.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.errors import UsageError
from telegrad.ps.solver import Options, State

try:
    from safetensors.torch import load_file, save_file
except ImportError:  # needed only by those who want checkpoints; `Checkpoint` says so
    load_file = save_file = None  # type: ignore[assignment]

_PARAMETERS, _OPTIMIZER, _MEMBERS = "parameters.safetensors", "optimizer.pt", "members.json"


@dataclass(frozen=True)
class Checkpoint:
    """Let servers save what they hold into a `folder` of theirs, after `every` so many steps and at the end.

    A server that dies and comes back under its name goes on from there by itself; `resume` lets a new run do the same.
    Writing goes on beside training. With `wait`, trainers are answered only when the step is on disk: with `every=1`,
    nothing that was acknowledged is ever lost.
    """

    folder: str | os.PathLike[str]
    every: int = 100
    resume: bool = False
    wait: bool = False
    keep: int = 2

    def __post_init__(self) -> None:
        if save_file is None:
            raise UsageError("checkpoints need the safetensors package: pip install 'telegrad[ps]'")
        if self.every < 1 or self.keep < 1:
            raise UsageError(f"checkpoints are made every 1 or more steps, and 1 or more are kept, not {self}")


class Snapshot(NamedTuple):
    """What a server holds at one moment: copies."""

    version: int
    run: str  # the group that trained it
    values: dict[str, Tensor]  # by the names of their parts
    states: list[State]
    groups: list[Options]
    applied: dict[str, int]


class Archive:
    """The checkpoints of one server. `start` runs a job on a thread of its own."""

    def __init__(self, rule: Checkpoint, name: str, server: str, start: Callable[[Callable[[], None]], None]) -> None:
        self.rule = rule
        self._folder = Path(rule.folder) / name / server
        self._start = start
        self._changed = threading.Condition()
        self._next: Snapshot | None = None
        self._writing = False
        self._error: Exception | None = None
        self._folder.mkdir(parents=True, exist_ok=True)

    def __repr__(self) -> str:
        return f"<Archive {self._folder}: versions {self.versions()}{', writing' if self._writing else ''}>"

    def versions(self) -> list[int]:
        return sorted(int(entry.name) for entry in self._folder.iterdir() if entry.name.isdigit())

    def newest(self) -> Snapshot | None:
        versions = self.versions()
        return self.read(versions[-1]) if versions else None

    def read(self, version: int) -> Snapshot:
        folder = self._folder / str(version)
        rest: dict[str, Any] = torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True)
        return Snapshot(values=load_file(folder / _PARAMETERS), **rest)

    def clear(self, after: int = -1) -> None:
        """Remove what an earlier run left: versions after this one, which would be taken for this run's."""
        for version in self.versions():
            if version > after:
                shutil.rmtree(self._folder / str(version))

    def members(self) -> list[str]:
        """Who took part when this was last noted."""
        file = self._folder / _MEMBERS
        return list(json.loads(file.read_text())) if file.exists() else []

    def note_members(self, members: Iterable[str]) -> None:
        file = self._folder / _MEMBERS
        beside = file.with_suffix(".new")
        beside.write_text(json.dumps(list(members)))
        beside.replace(file)

    def save(self, snapshot: Snapshot) -> None:
        """Write a snapshot, beside what the caller does next unless the rule says to wait. The newest wins."""
        with self._changed:
            error, self._error = self._error, None
            if error is not None:
                raise error
            if not self.rule.wait:
                self._next = snapshot
                if not self._writing:
                    self._writing = True
                    self._start(self._write_all)
                return
        self._write(snapshot)

    def finish(self) -> None:
        """Wait until everything is on disk."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                snapshot, self._next = self._next, None
                if snapshot is None:
                    self._writing = False
                    self._changed.notify_all()
                    return
            try:
                self._write(snapshot)
            except Exception as error:
                with self._changed:
                    self._error = error

    def _write(self, snapshot: Snapshot) -> None:
        final = self._folder / str(snapshot.version)
        if final.exists():
            return
        beside = self._folder / f"{snapshot.version}.new"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        rest = snapshot._asdict()
        save_file(rest.pop("values"), beside / _PARAMETERS)
        torch.save(rest, beside / _OPTIMIZER)
        _to_disk([beside / _PARAMETERS, beside / _OPTIMIZER, beside])
        beside.rename(final)
        _to_disk([self._folder])
        for old in self.versions()[: -self.rule.keep]:
            shutil.rmtree(self._folder / str(old))


def _to_disk(paths: Sequence[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
