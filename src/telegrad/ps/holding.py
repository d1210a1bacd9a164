"""`Holding`: what one server holds of something that trainers train together: who they are, rounds, and checkpoints.

What it is that they train is for classes that derive from it to know. State, all of it under `_lock`: the attendance,
and `_saved`. Futures are completed after the lock is released.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from telegrad.futures import Future
from telegrad.ps.attendance import Action, Attendance, Report, act
from telegrad.ps.checkpoint import Archive, Snapshot
from telegrad.ps.consistency import Consistency
from telegrad.ps.messages import Answer, Steps


class Holding(ABC):
    """`run` names the group of workers; a snapshot of the same run brings back the trainers that took part."""

    def __init__(
        self,
        consistency: Consistency,
        trainers: int,
        run: str,
        archive: Archive | None,
        followers: Sequence[str] = (),
        ask: Callable[[int, Steps], None] | None = None,
    ) -> None:
        self._run = run
        self._archive = archive
        self._lock = threading.Lock()
        self._attendance = Attendance(consistency, trainers, self, followers, ask)
        self._saved = -1  # the last version that was given to the archive

    @property
    def version(self) -> int:
        """The number of steps made."""
        return self._attendance.version

    @property
    def waiting(self) -> list[str]:
        """Who has reported and is not answered."""
        return self._attendance.waiting

    @property
    def members(self) -> set[str]:
        return self._attendance.members

    # What attendance needs, under the lock

    @abstractmethod
    def apply(self, reports: list[Report]) -> None:
        """Make a step of the reports of a round, which may be none, or, without rounds, of one."""

    def stepped(self) -> None:
        """The step has been counted."""
        self._save_if_due()

    def answer(self, report: Report) -> Answer:
        """What a trainer learns that has reported."""
        return Answer(self.version, report.staleness)

    def welcome(self, trainer: str) -> Any:
        """What a trainer learns that enters."""
        return Answer(self.version)

    # Who takes part

    def leave(self, trainer: str) -> None:
        """A trainer has left or is lost: what it reported in an unfinished round goes with it."""
        with self._lock:
            known = trainer in self._attendance.members
            actions = self._leave(trainer)
            if known:
                self._note_members()
        act(actions)

    def _leave(self, trainer: str) -> list[Action]:
        return self._attendance.leave(trainer)

    def lose(self, worker: str) -> None:
        """A worker is gone, by its incarnation, and with it every trainer there, or a server that follows this one."""
        with self._lock:
            trainers = self._attendance.of(worker)
            self._attendance.forget(worker)
        for trainer in trainers:
            self.leave(trainer)

    # What servers say to each other

    def hear(self, name: str, server: str, number: int, held: Steps) -> Future[Steps]:
        """A follower asks which of these reports count in its round; the answer comes when that is decided."""
        future: Future[Steps] = Future()
        with self._lock:
            actions = self._attendance.hear(name, server, number, held, future)
        act(actions)
        return future

    def hear_of(self, name: str, server: str, number: int) -> None:
        """A follower is in this round."""
        with self._lock:
            actions = self._attendance.hear_of(name, server, number)
        act(actions)

    def decide(self, number: int, steps: Steps) -> None:
        """The server that leads has said which steps of trainers are in the version that a round makes."""
        with self._lock:
            actions = self._attendance.decide(number, steps)
        act(actions)

    def is_open(self, number: int) -> bool:
        """Is this the round that goes on here, with trainers?"""
        with self._lock:
            return self._attendance.is_open(number) and bool(self._attendance.known)

    @property
    def unsure(self) -> bool:
        """Was this server restarted, and may others have finished a round since that it does not know of?"""
        with self._lock:
            return self._attendance.unsure

    # Checkpoints

    def save(self) -> None:
        """Put what is here now into the archive."""
        with self._lock:
            self._save()

    def close(self) -> None:
        """The worker leaves: save what it has, and wait until that is on disk."""
        if self._archive is not None:
            self.save()
            self._archive.finish()

    @abstractmethod
    def _snapshot(self) -> Snapshot:
        """What is here now, copied; under the lock."""

    def _restore(self, snapshot: Snapshot, expected: Sequence[str]) -> None:
        """Begin with the version of a snapshot. Of the same run, the trainers that took part are waited for."""
        same = snapshot.run == self._run
        self._attendance.restore(snapshot.version, snapshot.applied if same else {}, expected if same else ())
        self._saved = snapshot.version

    def _save(self) -> None:
        if self._archive is not None and self.version != self._saved:
            self._archive.save(self._snapshot())
            self._saved = self.version

    def _save_if_due(self) -> None:
        if self._archive is not None and self.version % self._archive.rule.every == 0:
            self._save()

    def _note_members(self) -> None:
        if self._archive is not None:
            self._archive.note_members(self._attendance.members)
            if not self._attendance.members:
                self._save()
