"""Deadlines on a clock that stands still unless a test moves it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad import current
from telegrad.current import Deadline
from telegrad.wire.frames import encode_timeout


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(current, "time", clock)
    return clock


def test_no_timeout_is_no_deadline() -> None:
    assert Deadline.after(None) is None


def test_a_deadline_passes_when_its_time_is_up(clock: Clock) -> None:
    until = Deadline.after(2.0)
    assert until is not None
    assert (until.left(), until.passed()) == (2.0, False)
    clock.now += 1.5
    assert (until.left(), until.passed()) == (0.5, False)
    clock.now += 0.5
    assert (until.left(), until.passed()) == (0.0, True)
    clock.now += 1.0
    assert (until.left(), until.passed()) == (-1.0, True)


def test_a_timeout_of_zero_or_less_has_passed_at_once(clock: Clock) -> None:
    for seconds in (0.0, -3.0):
        until = Deadline.after(seconds)
        assert until is not None
        assert until.passed()


def test_the_earlier_deadline_is_the_smaller() -> None:
    assert Deadline(1.0) < Deadline(2.0)
    assert min(Deadline(5.0), Deadline(3.0)) == Deadline(3.0)


@pytest.mark.parametrize(
    ("timeout", "milliseconds"),
    [
        (None, 0),
        (1.0, 1000),
        (0.25, 250),
        (0.0001, 1),
        (0.0, 1),
        (-5.0, 1),
        (4294967.295, 0xFFFFFFFF),
        (4294967.296, 0),
        (1e9, 0),
    ],
)
def test_what_travels_is_whole_milliseconds_and_zero_means_none(
    timeout: float | None, milliseconds: int
) -> None:
    assert encode_timeout(timeout) == milliseconds


@given(st.floats(min_value=0.001, max_value=4_000_000, allow_nan=False))
def test_the_wire_keeps_a_timeout_to_the_millisecond_and_never_lengthens_it(timeout: float) -> None:
    milliseconds = encode_timeout(timeout)
    assert 0 < milliseconds <= 0xFFFFFFFF
    assert timeout - 0.001 <= milliseconds / 1000 <= timeout + 1e-9
