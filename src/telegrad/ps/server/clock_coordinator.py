"""`ClockCoordinator`: decide for `Async` and `Stale`, without rounds: every report is a step.

The clock of a trainer is its start clock plus the number of its last step. The start clock is
assigned when the trainer joins and is the same on all servers, so two servers never make trainers
wait for each other.

| input | transition |
|---|---|
| `report` of a new step | `MakeStep`; after it the report waits for its reply |
| `report` of a step that is already applied | reply at once: the first reply was lost |
| a step has been applied, a trainer leaves or joins | reply to every trainer that may continue |

With `Async` every trainer may continue. With `Stale(k)` a trainer may continue while it is fewer
than k steps ahead of the slowest trainer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from telegrad.errors import StaleReference
from telegrad.ps.consistency import Consistency, Stale
from telegrad.ps.messages import Steps
from telegrad.ps.server.coordinator import (
    UNKNOWN_TRAINER,
    Coordinator,
    Decision,
    FailReport,
    MakeStep,
    ReplyToReport,
    StepReport,
)


class ClockCoordinator(Coordinator):
    """Decide when each trainer may continue, by the clocks of all trainers."""

    def __init__(self, consistency: Consistency, trainers: int) -> None:
        super().__init__(trainers)
        self._version = 0
        self._max_ahead = consistency.ahead if isinstance(consistency, Stale) else None
        self._start_clocks: Steps = {}
        self._step_in_progress: StepReport | None = None

    def __repr__(self) -> str:
        clocks = {trainer: self._clock(trainer) for trainer in self._start_clocks}
        return (
            f"<ClockCoordinator: {len(self.members)} trainers, version {self.version}, "
            f"clocks {clocks}>"
        )

    @property
    def version(self) -> int:
        return self._version

    def announce(self, trainer: str) -> int:
        return min(map(self._clock, self._start_clocks), default=0)

    def join(self, trainer: str, first: int, future: Any) -> list[Decision]:
        self._add_member(trainer)
        self._start_clocks[trainer] = first
        return [*self._add_joining(trainer, first, future), *self.advance()]

    def rejoin(
        self, trainer: str, first: int, acknowledged: int, version: int, applied: Steps
    ) -> list[Decision]:
        self._add_member(trainer)
        self._start_clocks[trainer] = first
        self._merge_applied({**applied, trainer: acknowledged})
        self._version = max(self._version, version)
        return self.advance()

    def leave(self, trainer: str) -> list[Decision]:
        self._remove_member(trainer)
        self._start_clocks.pop(trainer, None)
        self._reports.pop(trainer, None)
        return self.advance()

    def report(self, report: StepReport) -> list[Decision]:
        if report.trainer not in self.members:
            raise StaleReference(UNKNOWN_TRAINER)
        # The trainer repeats the step because the first reply was lost.
        if report.step <= self.applied.get(report.trainer, 0):
            return [ReplyToReport(report)]
        self._step_in_progress = report._replace(staleness=self.version - report.version)
        return [MakeStep([report])]

    def step_applied(self, error: Exception | None) -> None:
        assert self._step_in_progress is not None
        if error is None:
            self._version += 1
            self.applied[self._step_in_progress.trainer] = self._step_in_progress.step

    def step_finished(self, error: Exception | None = None) -> list[Decision]:
        report, self._step_in_progress = self._step_in_progress, None
        assert report is not None
        if error is not None:
            return [FailReport(report.future, error)]
        self._reports[report.trainer] = report
        return self.advance()

    def restore(
        self, version: int, applied: Steps, expected: Iterable[str], unconfirmed: Steps | None
    ) -> None:
        self._version = version
        self.applied = dict(applied)

    def advance(self) -> list[Decision]:
        ready = [report for report in self._reports.values() if self._may_continue(report.trainer)]
        for report in ready:
            del self._reports[report.trainer]
        admitted = self._admit() if self._joining else []
        return [*admitted, *map(ReplyToReport, ready)]

    def _clock(self, trainer: str) -> int:
        return self._start_clocks[trainer] + self.applied.get(trainer, 0)

    def _may_continue(self, trainer: str) -> bool:
        """Return whether a trainer has left or is close enough to the slowest."""
        clocks = self._start_clocks
        if self._max_ahead is None or trainer not in clocks or len(clocks) == 1:
            return True
        return self._clock(trainer) - min(map(self._clock, clocks)) < self._max_ahead
